"""Runs the checks of probes: what this machine, its environment or a configuration is exposed to.

No arm runs and no GPU is used. Every check has its own process and deadline, so a broken check only makes its own
result `unknown`, with the failure as evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kb.content.catalog import Catalog
from kb.content.entry import Entry, Severity
from kb.harness.launcher import Launcher, Task
from kb.harness.outcome import ArmOutcome
from kb.probe import STATES, Finding

CHECK_S = 10.0  # a check takes less than a second, except on a slow file system
AT_ONCE = 4  # checks mostly wait for files and for nvidia-smi
SEVEREST = (Severity.CRITICAL, Severity.HIGH, Severity.MEDIUM, Severity.LOW)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The finding of one entry's check. `takes_given_file`: it takes a file that the caller named."""

    entry: Entry
    finding: Finding
    takes_given_file: bool

    @property
    def is_exposed(self) -> bool:
        return self.finding.state == "exposed"

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.entry.id,
            "title": self.entry.meta.title,
            "severity": self.entry.meta.severity.value,
            "state": self.finding.state,
            "evidence": list(self.finding.evidence),
            "advice": self.finding.advice or None,
            "takes_given_file": self.takes_given_file,
        }


def check_entries(
    catalog: Catalog, entries: Iterable[Entry], launcher: Launcher, files: Mapping[str, Path]
) -> tuple[CheckResult, ...]:
    """Run the checks of those entries that have one. Returns exposed results first, most severe first.

    `files` are passed to the params with these names.
    """
    params = {name: ("path", path) for name, path in files.items()}

    def check_entry(entry: Entry) -> CheckResult | None:
        probe = catalog.probe_file(entry)
        if probe is None or not probe.is_file():
            return None
        finding, taken = run_check(probe, launcher, params)
        return CheckResult(entry, finding, bool(taken)) if finding else None

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kb-check") as pool:
        results = [result for result in pool.map(check_entry, entries) if result]
    return tuple(sorted(results, key=_urgency))


def run_check(
    probe: Path, launcher: Launcher, params: Mapping[str, tuple[str, Any]]
) -> tuple[Finding | None, tuple[str, ...]]:
    """Run one check. Returns its finding (None if the probe has no check), and which of these params it takes."""
    task = Task("check", probe, CHECK_S, params=params, env=launcher.of_caller)
    result, outcome = launcher.rank_results(task)
    if result is None or result.get("outcome") != "completed":
        return Finding("unknown", [f"the check failed: {failure_reason(result, outcome)}"]), ()
    try:
        taken = tuple(result["takes"])
        state = result["state"]
        finding = Finding(state, result["evidence"], result["advice"]) if state in STATES else None
    except (KeyError, TypeError):
        return Finding("unknown", ["the check failed: the probe file wrote a result of its own"]), ()
    return finding, taken


def failure_reason(result: Mapping[str, Any] | None, outcome: ArmOutcome) -> str:
    """Why a process that describes a probe or runs a check failed, in one line."""
    if result and result.get("message") is not None:
        return f"{result.get('type', 'error')}: {result['message']}"
    rank = outcome.ranks[0] if outcome.ranks else None
    if outcome.failure or rank is None:
        return outcome.failure or "it did not start"
    if rank.signal:
        return f"its process died of {rank.signal}"
    return "it did not end in time" if rank.exit_code is None else f"its process ended with exit code {rank.exit_code}"


def exit_code(results: Iterable[CheckResult]) -> int:
    """1 if something is exposed; else 3 if a check of a given file, or every check, could not tell; else 0."""
    results = tuple(results)
    if any(result.is_exposed for result in results):
        return 1
    judged = [result for result in results if result.takes_given_file] or results
    return 0 if any(result.finding.state == "clear" for result in judged) else 3


def _urgency(result: CheckResult) -> tuple[int, int, str]:
    order = ("exposed", "clear", "unknown")
    return order.index(result.finding.state), SEVEREST.index(result.entry.meta.severity), result.entry.id
