"""Rules of signatures: what a pattern must match, must not match, and may cost.

A pattern that may take for ever is not run: what it matches is judged once it is mended.
"""

from __future__ import annotations

from collections.abc import Iterator

from kb.content.entry import Role, Signature
from kb.lint.healthy import HEALTHY
from kb.lint.rule import Draft, EntryRule, Remark
from kb.patterns.literals import find, literals
from kb.patterns.redos import backtracking_risk

SHORTEST_LITERAL = 4


def sample_not_matched(draft: Draft) -> Iterator[Remark]:
    """Every pattern matches its own sample."""
    for number, signature in enumerate(draft.meta.signatures):
        if signature.pattern not in draft.slow and not find(signature.pattern, signature.sample):
            yield draft.line("signatures", number, "sample"), "the pattern does not match this sample"


def not_signature_matched(draft: Draft) -> Iterator[Remark]:
    """No pattern matches a line of not_signatures."""
    for number, line in enumerate(draft.meta.not_signatures):
        for _, one in _runnable(draft):
            if find(one.pattern, line):
                yield draft.line("not_signatures", number), f"the {one.role} pattern {one.pattern!r} matches this line"


def matches_empty_text(draft: Draft) -> Iterator[Remark]:
    """No pattern matches the empty text, for then it matches every log."""
    for line, one in _runnable(draft):
        if find(one.pattern, ""):
            yield line, "the pattern matches the empty text"


def matches_healthy_log(draft: Draft) -> Iterator[Remark]:
    """No root or cascade pattern matches what healthy jobs print, or a failure that says nothing."""
    for line, one in _runnable(draft):
        healthy = next((text for text in HEALTHY if find(one.pattern, text)), "")
        if healthy and one.role is not Role.CONTEXT:
            yield line, f"the {one.role} pattern matches a line that says nothing: {healthy!r}"


def ambiguous_repeat(draft: Draft) -> Iterator[Remark]:
    """No pattern can take exponential or high polynomial time by its structure."""
    for line, one in _patterns(draft):
        if risk := backtracking_risk(one.pattern):
            yield line, f"{risk}; rewrite it with classes that exclude what follows, or with bounds"


def slow_pattern(draft: Draft) -> Iterator[Remark]:
    """Every pattern is done with texts of its own repeats, made long, within two seconds."""
    for line, one in _patterns(draft):
        if one.pattern in draft.slow and not backtracking_risk(one.pattern):
            yield line, "the pattern took more than 2 s on a text made of its own repeats or of its sample"


def no_literal(draft: Draft) -> Iterator[Remark]:
    """Every match of a pattern has a text of four characters, written in it, that a log can be searched for."""
    for line, one in _runnable(draft):
        shortest = min(map(len, literals(one.pattern)), default=0)
        if shortest < SHORTEST_LITERAL and not find(one.pattern, ""):
            yield line, "nothing of four characters is in every match (a pattern that ignores case has no such text)"


def only_context(draft: Draft) -> Iterator[Remark]:
    """At least one signature is a root or a cascade, for context alone is no evidence."""
    if not list(_evidence(draft)):
        yield draft.line("signatures"), "every signature has the role context"


def duplicate_pattern(draft: Draft) -> Iterator[Remark]:
    """No pattern stands twice in an entry."""
    seen: set[str] = set()
    for line, one in _patterns(draft):
        if one.pattern in seen:
            yield line, "this pattern stands here twice"
        seen.add(one.pattern)


def _patterns(draft: Draft) -> Iterator[tuple[int, Signature]]:
    for number, signature in enumerate(draft.meta.signatures):
        yield draft.line("signatures", number, "pattern"), signature


def _runnable(draft: Draft) -> Iterator[tuple[int, Signature]]:
    return ((line, one) for line, one in _patterns(draft) if one.pattern not in draft.slow)


def _evidence(draft: Draft) -> Iterator[tuple[int, Signature]]:
    return ((line, one) for line, one in _patterns(draft) if one.role is not Role.CONTEXT)


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
