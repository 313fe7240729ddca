"""Plans and reports on a terminal: the verdict in one line, the evidence in a few, and the next step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kb.harness.outcome import ArmOutcome
from kb.probe import Arm, Needs
from kb.verify.plan import Plan
from kb.verify.report import WITH_PYTHON, ExperimentResult, Report, summary
from kb.verify.verdict import EXIT_CODES

from .fields import wrapped_on_terminal
from .hints import with_roots
from .output import style

BUILD_PATH = re.compile(r"\[/\S*/(\w+\.\w+:\d+)\]")  # a path on the machine that torch was built on
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # a rank's output must not control the reader's terminal
COLORS = {0: "green", 1: "red", 3: "yellow", 4: "cyan"}
MEANING = {
    "hardware": "on your GPUs",
    "cpu": "the real mechanism, on CPU and gloo",
    "stand-in": "shown by a stand-in",
    "model": "shown by arithmetic",
    "check": "this machine and its configuration",
}


def print_report(report: Report, roots: Sequence[Path] | None, *, is_short: bool, counter: str = "") -> None:
    """Print one report. In a list, a success takes one line, which begins with `counter`.

    `roots` are the content roots given to the command.
    """
    print(_first_line(report, counter))
    _print_check(report, is_short=is_short)
    if is_short and report.exit_code == 0:
        return
    if reason := _reason(report, is_short=is_short):
        _print_wrapped(reason)
    for number, result in enumerate(report.results):
        if number:
            print(f"  variant {style(result.experiment.name, bold=True)}: {result.judgement.verdict.value}")
        _print_experiment(result)
    _print_skipped(report, is_short=is_short)
    for leftover in report.leftovers:
        print(f"  {style('left behind:', 'red')} {leftover}")
    if not (is_short and WITH_PYTHON in report.next_step):  # the same for many reports; the summary says it once
        _print_wrapped(f"next: {with_roots(report.next_step, roots)}")


def _first_line(report: Report, counter: str) -> str:
    verdict = f"{report.verdict.value:<15}"
    circumstances = f"({MEANING[report.fidelity]}, {report.duration_s:.1f} s)"
    line = wrapped_on_terminal(f"{counter}{verdict}  {report.entry_id}  {circumstances}", 2)
    colored = line.replace(verdict, style(verdict, COLORS[EXIT_CODES[report.verdict]], bold=True), 1)
    return colored.replace(report.entry_id, style(report.entry_id, bold=True), 1)


def _reason(report: Report, *, is_short: bool) -> str:
    """The reason for the verdict, without what the lines about the check and skipped experiments already say."""
    skipped = "; ".join(f"{name}: {reason}" for name, reason in report.skipped)
    reason = report.judgement.reason.removesuffix(skipped).removesuffix("; ")
    is_shown = not is_short and report.check is not None and reason == "; ".join(report.check.evidence)
    return "" if is_shown else reason


def _print_skipped(report: Report, *, is_short: bool) -> None:
    """Print why experiments did not run; in a list without the interpreter's path, which is in the summary."""
    interpreter = f" in {report.environment.get('interpreter')}" if is_short else ""
    names: dict[str, list[str]] = {}
    for name, reason in report.skipped:
        names.setdefault(reason.replace(interpreter, "") if interpreter else reason, []).append(name)
    for reason, experiments in names.items():
        label = f"not run: {', '.join(experiments)}"
        _print_wrapped(f"{label}: {reason}", label)


def _print_wrapped(text: str, label: str = "", indent: int = 2) -> None:
    """Print a text whose lines begin at the same column, after a dim label."""
    print(" " * indent + wrapped_on_terminal(text, indent).replace(label, style(label, dim=True) if label else "", 1))


def _print_check(report: Report, *, is_short: bool) -> None:
    """Print the check's finding about this machine or the given file, before the results of the arms."""
    check = report.check
    if check is None or (is_short and check.state != "exposed" and not report.has_named_file):
        return
    color = {"exposed": "red", "clear": "green"}.get(check.state, "yellow")
    whose = "your file" if report.has_named_file else "this machine"
    print(f"  {whose}: {style(check.state, color, bold=True)}")
    for line in check.evidence[:1] if is_short else check.evidence:
        _print_wrapped(line, indent=4)


def _print_experiment(result: ExperimentResult) -> None:
    _print_arm("control", result.experiment.control, result.control)
    _print_arm("treatment", result.experiment.treatment, result.treatment)
    if result.experiment.control.stands_for:
        _print_wrapped(f"stands for {result.experiment.control.stands_for}", "stands for")
    if result.counts and result.counts.pairs > 1:
        counts = result.counts
        failures = f"control failed {counts.control}, treatment {counts.treatment}"
        print(f"  {counts.pairs} pairs: {failures}, p {counts.p:.3g}")


def _print_arm(name: str, arm: Arm, outcome: ArmOutcome) -> None:
    label = f"{name:<9} "
    print(f"  {label}" + wrapped_on_terminal(f"{outcome.kind} after {outcome.duration_s:.1f} s: {arm.because}", 12))
    first = outcome.first_failure
    if first:
        message = " ".join((first.message or first.log.strip()[-300:] or first.waiting_in).split())
        message = ESCAPES.sub("", BUILD_PATH.sub(r"[\1]", message))
        kind = first.type or first.signal or first.kind
        _print_wrapped(f"first failing rank: {first.rank} {kind} {message[:300]}", indent=12)
    for sentence in outcome.flight:
        _print_wrapped(sentence, indent=12)


def print_summary(reports: Sequence[Report]) -> None:
    print(", ".join(f"{count} {verdict}" for verdict, count in summary(reports).items()))
    lacking = next((report for report in reports if report.lacks_package), None)
    if lacking:
        where = lacking.environment.get("interpreter", "this interpreter")
        print(wrapped_on_terminal(f"next: what is not installed in {where} may be elsewhere: `{WITH_PYTHON}`", 0))


def print_plan(plan: Plan) -> None:
    """Print what would run for one entry."""
    print(style(plan.entry.id, bold=True))
    if plan.fault or plan.waiver:
        print(f"  nothing: {plan.fault or plan.waiver}")
    if plan.probe.check:
        print("  check: is this machine or configuration exposed? read-only")
    for experiment in plan.experiments:
        seconds = " + ".join(f"{duration:g}" for duration in experiment.expected_s)
        print(f"  experiment {experiment.name}: {experiment.world_size} ranks, {experiment.backend}, about {seconds} s")
        print(f"    needs     {_needs(experiment.needs)}; deadline {experiment.deadline_s:g} s an arm")
        for name, arm in (("control", experiment.control), ("treatment", experiment.treatment)):
            print(f"    {name:<9} {arm.because} ({arm.fidelity}; must be {arm.expect.kind})")
    for name, reason in plan.skipped:
        print(f"  not experiment {name}: {reason}")
    for name, (kind, value) in plan.params.items():
        given = "not given" if value is None else value
        print(f"  --set {name}=<{kind}>: {plan.probe.params[name].help} ({given})")
    if plan.probe_file:
        print(f"  probe file {plan.probe_file}")
    print()


def _needs(needs: Needs) -> str:
    packages = [f"{name} {specifier}".strip() for name, specifier in needs.packages.items()]
    gpus = [f"{needs.gpus} GPUs with {needs.gpu_memory_mib} MiB each"] if needs.gpus else []
    return ", ".join([*gpus, f"{needs.memory_mib} MiB of memory", *packages, *needs.programs])
