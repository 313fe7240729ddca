"""The checks of all probes on this machine: what it, its environment or a configuration is exposed to.

No arm runs and no GPU is touched. Every check gets a process and a deadline of its own, so that a broken one
is an answer (`unknown`, with its failure) and not the end.
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
from kb.probe import Finding

CHECK_S = 10.0  # a check is below a second; a slow file system is not its fault
AT_ONCE = 4  # they mostly wait for files and for nvidia-smi
SEVEREST = (Severity.CRITICAL, Severity.HIGH, Severity.MEDIUM, Severity.LOW)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one entry's check said. `is_asked` when it takes one of the files that the caller named."""

    entry: Entry
    finding: Finding
    is_asked: bool

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
            "takes_given_file": self.is_asked,
        }


def check_all(found: Catalog, launcher: Launcher, files: Mapping[str, Path]) -> tuple[Answer, ...]:
    """Run every check there is; exposed first, the severest first. `files` go to the params of these names."""
    params = {name: ("path", path) for name, path in files.items()}

    def ask(entry: Entry) -> Answer | None:
        probe = found.probe_file(entry)
        if probe is None or not probe.is_file():
            return None
        finding, taken = run_check(probe, launcher, params)
        return Answer(entry, finding, bool(taken)) if finding else None

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kb-check") as pool:
        answers = [answer for answer in pool.map(ask, found.current()) if answer]
    return tuple(sorted(answers, key=_urgency))


def run_check(
    probe: Path, launcher: Launcher, params: Mapping[str, tuple[str, Any]]
) -> tuple[Finding | None, tuple[str, ...]]:
    """One check, and which of these params it takes; None when the probe has no check."""
    task = Task("check", probe, CHECK_S, params=params, env=launcher.of_caller)
    result, outcome = launcher.rank_results(task)
    if result is None or result.get("outcome") != "completed":
        return Finding("unknown", [f"the check failed: {why(result, outcome)}"]), ()
    taken = tuple(result["takes"])
    if not result["state"]:
        return None, taken
    return Finding(result["state"], result["evidence"], result["advice"]), taken


def why(result: Mapping[str, Any] | None, outcome: ArmOutcome) -> str:
    """Why a describing or checking process gave nothing, in one line."""
    if result and result.get("message") is not None:
        return f"{result.get('type', 'error')}: {result['message']}"
    rank = outcome.ranks[0] if outcome.ranks else None
    if outcome.failure or rank is None:
        return outcome.failure or "it did not start"
    if rank.signal:
        return f"its process died of {rank.signal}"
    return "it was not done in time" if rank.exit_code is None else f"its process ended with exit code {rank.exit_code}"


def exit_code(answers: Iterable[Answer]) -> int:
    """1 when something is exposed; else 3 when a check of a given file, or every check, could not tell; else 0."""
    answers = tuple(answers)
    if any(answer.is_exposed for answer in answers):
        return 1
    asked = [answer for answer in answers if answer.is_asked] or answers
    return 0 if any(answer.finding.state == "clear" for answer in asked) else 3


def _urgency(answer: Answer) -> tuple[int, int, str]:
    order = ("exposed", "clear", "unknown")
    return order.index(answer.finding.state), SEVEREST.index(answer.entry.meta.severity), answer.entry.id
