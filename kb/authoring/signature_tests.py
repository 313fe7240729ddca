"""Tests signatures with logs: those of the entry, look-alikes, and logs of healthy jobs.

Root or cascade signatures of an entry must match at least two of its fenced `log` blocks; signatures of any role must
match the others. No root or cascade signature may match a `log look-alike` block of its entry, which is the log of
another incident, or a healthy log of any content root (`entries/healthy/*.log`, recorded from jobs that succeeded).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kb.content.entry import Entry, Role, Signature
from kb.content.roots import Root
from kb.lint.rule import Violation
from kb.patterns.literals import find, literals
from kb.patterns.redos import backtracking_risk

LEAST_LOGS = 2  # logs of an entry that must be matched as evidence
RULES = {
    "log-not-matched": "A signature matches every log of its entry, and a root or cascade at least two of them.",
    "look-alike-matched": "No root or cascade signature matches a look-alike of its entry.",
    "healthy-log-matched": "No root or cascade signature matches the log of a healthy job.",
}


@dataclass(frozen=True, slots=True)
class HealthyLog:
    """The log of a job that succeeded."""

    path: Path
    text: str


def healthy_logs(roots: Iterable[Root]) -> tuple[HealthyLog, ...]:
    """The healthy logs of all content roots. Invalid UTF-8 is replaced."""
    return tuple(
        HealthyLog(path, path.read_text(encoding="utf-8", errors="replace"))
        for root in roots
        for path in root.healthy_logs()
    )


def mismatches(entries: Iterable[Entry], healthy: Iterable[HealthyLog]) -> Iterator[Violation]:
    """A violation for each log that must match but does not, or matches but must not."""
    logs = tuple(healthy)
    for entry in entries:
        evidence = tuple(_evidence(entry))
        yield from _own_logs(entry, evidence)
        for signature in evidence:
            texts = literals(signature.pattern)
            for log in logs:
                if not texts or any(text in log.text for text in texts):
                    yield from _healthy_log(entry, signature, log)


def _evidence(entry: Entry) -> Iterator[Signature]:
    return (signature for signature in _runnable(entry) if signature.role is not Role.CONTEXT)


def _runnable(entry: Entry) -> Iterator[Signature]:
    """The signatures that are safe to run; `kb lint` reports the others."""
    return (signature for signature in entry.meta.signatures if not backtracking_risk(signature.pattern))


def _own_logs(entry: Entry, evidence: tuple[Signature, ...]) -> Iterator[Violation]:
    unproven = [log for log in entry.logs if not any(find(signature.pattern, log.text) for signature in evidence)]
    context = [signature for signature in _runnable(entry) if signature.role is Role.CONTEXT]
    for number, log in enumerate(unproven, len(entry.logs) - len(unproven)):
        if number < LEAST_LOGS:
            yield Violation(entry.path, log.line, "log-not-matched", "no root or cascade signature matches this log")
        elif not any(find(signature.pattern, log.text) for signature in context):
            yield Violation(entry.path, log.line, "log-not-matched", "no signature matches this log")
    for log in entry.look_alikes:
        for signature in evidence:
            if match := find(signature.pattern, log.text):
                line = log.line + log.text.count("\n", 0, match.start())
                yield Violation(entry.path, line, "look-alike-matched", _message(signature, match.group()))


def _healthy_log(entry: Entry, signature: Signature, log: HealthyLog) -> Iterator[Violation]:
    if match := find(signature.pattern, log.text):
        line = log.text.count("\n", 0, match.start()) + 1
        number = entry.meta.signatures.index(signature)
        pattern_line = entry.lines.get(("signatures", number, "pattern"), 1)
        message = f"{_message(signature, match.group())} in {log.path.name}:{line}"
        yield Violation(entry.path, pattern_line, "healthy-log-matched", message)


def _message(signature: Signature, text: str) -> str:
    return f"the {signature.role} pattern {signature.pattern!r} matches {text[:120]!r}"
