"""The next step: tell the remaining candidates apart, verify the only one, or read the first failure.

An entry says under `How to tell` how it differs from its look-alikes. The step is an item there that says what to do,
preferably one that names the other candidate. An item that only states something ("not this entry: see ...") never is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kb.content.actions import action
from kb.diagnose.finding import Finding
from kb.diagnose.first_failure import RankSummary
from kb.harness.collective import name_ranks

CERTAIN = 0.8  # confidence from which a finding is verified instead of compared with others
LIKELY = 0.35  # confidence below which an entry is not a candidate
MOST_CANDIDATES = 3
STREAMS = ("", "-", "body", "pasted text")  # names that the command and the service use for a log that is not a file
PACKED = (".gz", ".zst")
REASONS = (  # errors without a reason, and where to find the reason
    (
        re.compile(r"\bnccl\w+Error\b"),
        "NCCL gives its reason in a line with `NCCL WARN`, and only with `NCCL_DEBUG=INFO`: "
        "set it on every rank, run the job again, and diagnose that log.",
    ),
    (
        re.compile(r"\b(?:CUDA|HIP|NPU|XPU) out of memory\b"),
        "This says that a GPU is full, not of what. Diagnose the log with the whole traceback: its last frames are in "
        "a layer or the backward, the loss, the optimizer, an evaluation, a save or a load, and that decides.",
    ),
)

Documents = Mapping[str, Mapping[str, Any]]  # of the index, by entry


@dataclass(frozen=True, slots=True)
class NextStep:
    """`text` is one paragraph of Markdown, `source` the entry that it is from ("" if none).

    `separates` are the candidates that the step tells apart; `command` is what to run, "" if there is nothing to run.
    """

    text: str
    source: str = ""
    separates: tuple[str, ...] = ()
    command: str = ""


def candidates(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that may still be the cause: only the first if it is certain, never consequences or similar wording.

    If a root signature matched, cascades are left out: waiting ranks print them whatever the cause.
    """
    printed = [finding for finding in findings if finding.role != "similar" and not finding.caused_by]
    likely = [finding for finding in printed if finding.confidence >= LIKELY]
    if any(finding.role == "root" for finding in likely):
        likely = [finding for finding in likely if finding.role != "cascade"]
    return likely[: 1 if likely and likely[0].confidence >= CERTAIN else MOST_CANDIDATES]


def next_step(findings: Sequence[Finding], documents: Documents, ranks: RankSummary) -> NextStep | None:
    """The next step, or None if nothing suggests one."""
    rivals = candidates(findings)
    if ranks.absent and not any(rival.role == "root" for rival in rivals):
        return _read_absent(ranks.absent, rivals)
    if not rivals:
        return None
    if len(rivals) == 1 and (rivals[0].confidence >= CERTAIN or rivals[0].role == "root"):
        return _proof(rivals[0], documents)
    return _difference(rivals, documents) or _first_test(rivals[0], documents) or _proof(rivals[0], documents)


def read_first_failure(ranks: RankSummary) -> NextStep | None:
    """The step if no finding explains the first failure."""
    if ranks.first_failure is None:
        return None
    place = f"`{ranks.first_failure.place.replace('`', '')}`"  # a file may have any name, this is Markdown
    if ranks.failed_first is None:
        return NextStep(f"Read {place} and the lines around it: that failed first, and no finding explains it.")
    text = (
        f"Read what rank {ranks.failed_first} printed at {place} and around it: it failed first, and no finding "
        "explains it."
    )
    return NextStep(f"{text} What the other ranks printed followed.")


def ask_more(failures: Sequence[str]) -> NextStep | None:
    """The step for an unexplained error that does not name its reason, if kb knows where to find the reason."""
    return next((NextStep(text) for error, text in REASONS if any(map(error.search, failures))), None)


def _read_absent(absent: Sequence[int], rivals: Sequence[Finding]) -> NextStep:
    names = name_ranks(absent)
    text = f"Read what {names} did: the others waited. The log of {names}, or `py-spy dump` there while the job hangs."
    return NextStep(text, separates=tuple(rival.id for rival in rivals))


def _difference(rivals: Sequence[Finding], documents: Documents) -> NextStep | None:
    """The step that tells the best candidate from another one, from the entry of either."""
    best = rivals[0]
    for rival in rivals[1:]:
        for finding, other in ((best, rival), (rival, best)):
            test = next((test for test in _actions(finding, documents) if f"`{other.id}`" in test), "")
            if test:
                return _test(test, finding.id, (best.id, rival.id), _command(best, documents))
    return None


def _first_test(finding: Finding, documents: Documents) -> NextStep | None:
    test = next(_actions(finding, documents), "")
    return _test(test, finding.id, (finding.id,), _command(finding, documents)) if test else None


def _actions(finding: Finding, documents: Documents) -> Iterator[str]:
    return filter(None, map(action, documents[finding.id]["tells"]))


def _test(text: str, source: str, separates: tuple[str, ...], command: str) -> NextStep:
    """An item of an entry as a step. If its command reads a log, the log is the diagnosed one."""
    general, reads_log, _ = command.partition(" --set log=")
    if reads_log and "`" not in command:  # a file may have any name, this is Markdown
        text = re.sub(rf"{re.escape(general)} --set log=[^\s`]+", lambda _: command, text)
    return NextStep(text, source, separates, command)


def _proof(finding: Finding, documents: Documents) -> NextStep:
    command = _command(finding, documents)
    if finding.probe:
        text = f"Verify it on this machine, then apply the fix: `kb show {finding.id}`."
        return NextStep(text, finding.id, (finding.id,), command)
    return NextStep("Read its fix.", finding.id, (finding.id,), command)


def _command(finding: Finding, documents: Documents) -> str:
    """The command to run, with the log of the evidence if the entry says that its probe reads a log."""
    if not finding.probe:
        return f"kb show {finding.id}"
    command = f"kb verify {finding.id}"
    log = finding.evidence[0].source if finding.evidence else ""
    reads_log = any(f"{command} --set log=" in test for test in documents[finding.id]["tells"])
    return f"{command} --set log={shlex.quote(log)}" if reads_log and _is_plain_file(log) else command


def _is_plain_file(source: str) -> bool:
    """Whether a probe can read the source as it is, judging by its name."""
    return source not in STREAMS and not source.endswith(PACKED)
