"""Logs that the signatures are tested with: what must match, what looks alike, and what healthy jobs print.

Two of an entry's fenced `log` blocks must be matched by one of its root or cascade signatures, the others at
least by one of context; its `log look-alike` blocks, logs of other incidents, by no root or cascade; and the
healthy logs (`entries/healthy/*.log` of every content root, recorded from jobs that ended well) by no root or
cascade of any entry. Pure but for reading those files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kb.content.entry import Entry, Role, Signature
from kb.content.roots import Root
from kb.lint.rule import Finding
from kb.patterns.literals import find, literals
from kb.patterns.redos import backtracking_risk

LEAST_LOGS = 2  # of an entry, that are evidence
RULES = {
    "log-not-matched": "Every log of an entry is matched by a signature, two of them by a root or a cascade.",
    "look-alike-matched": "No look-alike of an entry is matched by one of its root or cascade signatures.",
    "healthy-log-matched": "No root or cascade signature matches the log of a healthy job.",
}


@dataclass(frozen=True, slots=True)
class HealthyLog:
    """What a job that ended well printed."""

    path: Path
    text: str


def healthy_logs(roots: Iterable[Root]) -> tuple[HealthyLog, ...]:
    """Those of all content roots. Bytes that are not UTF-8 are kept as such: logs have them."""
    return tuple(
        HealthyLog(path, path.read_text(encoding="utf-8", errors="replace"))
        for root in roots
        for path in root.healthy_logs()
    )


def mismatches(entries: Iterable[Entry], healthy: Iterable[HealthyLog]) -> Iterator[Finding]:
    """One finding for every log that must match and does not, or must not and does."""
    logs = tuple(healthy)
    for entry in entries:
        evidence = tuple(_evidence(entry))
        yield from _own(entry, evidence)
        for one in evidence:
            known = literals(one.pattern)
            for log in logs:
                if not known or any(literal in log.text for literal in known):
                    yield from _matched(entry, one, log)


def _evidence(entry: Entry) -> Iterator[Signature]:
    """Signatures that say something; one that may take for ever is a finding of `kb lint` and is not run."""
    for signature in entry.meta.signatures:
        if signature.role is not Role.CONTEXT and not backtracking_risk(signature.pattern):
            yield signature


def _own(entry: Entry, evidence: tuple[Signature, ...]) -> Iterator[Finding]:
    unproven = [log for log in entry.logs if not any(find(one.pattern, log.text) for one in evidence)]
    context = [
        signature
        for signature in entry.meta.signatures
        if signature.role is Role.CONTEXT and not backtracking_risk(signature.pattern)
    ]
    for number, log in enumerate(unproven, len(entry.logs) - len(unproven)):
        if number < LEAST_LOGS:
            yield Finding(entry.path, log.line, "log-not-matched", "no root or cascade signature matches this log")
        elif not any(find(one.pattern, log.text) for one in context):
            yield Finding(entry.path, log.line, "log-not-matched", "no signature matches this log")
    for log in entry.look_alikes:
        for one in evidence:
            if match := find(one.pattern, log.text):
                line = log.line + log.text.count("\n", 0, match.start())
                yield Finding(entry.path, line, "look-alike-matched", _told(one, match.group()))


def _matched(entry: Entry, one: Signature, log: HealthyLog) -> Iterator[Finding]:
    if match := find(one.pattern, log.text):
        line = log.text.count("\n", 0, match.start()) + 1
        number = entry.meta.signatures.index(one)
        where = entry.lines.get(("signatures", number, "pattern"), 1)
        message = f"{_told(one, match.group())} in {log.path.name}:{line}"
        yield Finding(entry.path, where, "healthy-log-matched", message)


def _told(one: Signature, text: str) -> str:
    return f"the {one.role} pattern {one.pattern!r} matches {text[:120]!r}"
