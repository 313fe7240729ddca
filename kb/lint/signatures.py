"""Rules for signatures: what a pattern must match, must not match, and may cost.

A pattern that is open to ReDoS is not run: what it matches is checked once it is fixed.
"""

from __future__ import annotations

from collections.abc import Iterator

from kb.content.entry import Role, Signature
from kb.lint.healthy_lines import HEALTHY_LINES
from kb.lint.rule import EntryFile, EntryRule, Remark
from kb.patterns.literals import find, literals
from kb.patterns.redos import backtracking_risk

SHORTEST_LITERAL = 4


def sample_not_matched(file: EntryFile) -> Iterator[Remark]:
    """Every pattern matches its own sample."""
    for number, signature in enumerate(file.meta.signatures):
        if signature.pattern not in file.slow and not find(signature.pattern, signature.sample):
            yield file.line("signatures", number, "sample"), "the pattern does not match this sample"


def not_signature_matched(file: EntryFile) -> Iterator[Remark]:
    """No pattern matches a line of not_signatures."""
    for number, line in enumerate(file.meta.not_signatures):
        for _, signature in _runnable(file):
            if find(signature.pattern, line):
                message = f"the {signature.role} pattern {signature.pattern!r} matches this line"
                yield file.line("not_signatures", number), message


def matches_empty_text(file: EntryFile) -> Iterator[Remark]:
    """No pattern matches the empty string: it would match every log."""
    for line, signature in _runnable(file):
        if find(signature.pattern, ""):
            yield line, "the pattern matches the empty string"


def matches_healthy_log(file: EntryFile) -> Iterator[Remark]:
    """No root or cascade pattern matches a line of a healthy job, or a failure line without information."""
    for line, signature in _runnable(file):
        healthy = next((text for text in HEALTHY_LINES if find(signature.pattern, text)), "")
        if healthy and signature.role is not Role.CONTEXT:
            yield line, f"the {signature.role} pattern matches a line that is not evidence: {healthy!r}"


def ambiguous_repeat(file: EntryFile) -> Iterator[Remark]:
    """No pattern has a structure that can take exponential or high polynomial time."""
    for line, signature in _patterns(file):
        if risk := backtracking_risk(signature.pattern):
            yield line, f"{risk}; use character classes that exclude the text that follows, or bounded repeats"


def slow_pattern(file: EntryFile) -> Iterator[Remark]:
    """Every pattern searches long texts made of its own repeats within two seconds."""
    for line, signature in _patterns(file):
        if signature.pattern in file.slow and not backtracking_risk(signature.pattern):
            yield line, "the pattern took more than 2 s on a long text made of its own repeats or its sample"


def no_literal(file: EntryFile) -> Iterator[Remark]:
    """Every match of a pattern contains a literal of at least four characters, for which logs can be searched."""
    for line, signature in _runnable(file):
        shortest = min(map(len, literals(signature.pattern)), default=0)
        if shortest < SHORTEST_LITERAL and not find(signature.pattern, ""):
            yield line, "no literal of four characters is in every match (a pattern that ignores case has no literals)"


def only_context(file: EntryFile) -> Iterator[Remark]:
    """At least one signature is a root or a cascade: context alone is not evidence."""
    if not list(_evidence(file)):
        yield file.line("signatures"), "every signature has the role context"


def duplicate_pattern(file: EntryFile) -> Iterator[Remark]:
    """No entry has the same pattern twice."""
    seen: set[str] = set()
    for line, signature in _patterns(file):
        if signature.pattern in seen:
            yield line, "the entry has this pattern twice"
        seen.add(signature.pattern)


def _patterns(file: EntryFile) -> Iterator[tuple[int, Signature]]:
    for number, signature in enumerate(file.meta.signatures):
        yield file.line("signatures", number, "pattern"), signature


def _runnable(file: EntryFile) -> Iterator[tuple[int, Signature]]:
    return ((line, signature) for line, signature in _patterns(file) if signature.pattern not in file.slow)


def _evidence(file: EntryFile) -> Iterator[tuple[int, Signature]]:
    return ((line, signature) for line, signature in _patterns(file) if signature.role is not Role.CONTEXT)


RULES: tuple[EntryRule, ...] = (
    sample_not_matched,
    not_signature_matched,
    matches_empty_text,
    matches_healthy_log,
    ambiguous_repeat,
    slow_pattern,
    no_literal,
    only_context,
    duplicate_pattern,
)
