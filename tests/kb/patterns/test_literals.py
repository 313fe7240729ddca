"""Every match of a pattern contains one of its literals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kb.patterns.literals import find, literals
from tests.kb.patterns.test_redos import FAST

LITERALS: dict[str, set[str]] = {
    r"Timed out waiting \d+ms for (recv|send) operation": {
        "ms for recv operation",
        "ms for send operation",
    },
    r"Watchdog caught (collective) operation": {"Watchdog caught collective operation"},
    r"[Rr]an out of memory": {"Ran out of memory", "ran out of memory"},
    r"CUDA out of memory\. Tried|CUDA error: out of memory": {
        "CUDA out of memory. Tried",
        "CUDA error: out of memory",
    },
    r"it snapped|[wW]e lo[os]e": {"it snapped", "We looe", "We lose", "we looe", "we lose"},
    r"\bexits\b with( return)? code": {"exits with code", "exits with return code"},
    r"pair\.cc:\d+\] (Connection closed|Read error)": {"] Connection closed", "] Read error"},
    r"(?:ab){2}c?": {"ab"},
    r"(?:ab){0,2}": set(),
    r"(?i)Socket Timeout": set(),
    r"x(?!not this)y": {"xy"},
    r"[^a]|[ab]": set(),
    r"oom|nan": {"oom", "nan"},
    r"a.*|bcd": {"a", "bcd"},
    r"(?P<q>'|\")(?P=q) 超时": {" 超时"},
}


@pytest.mark.parametrize("pattern, texts", LITERALS.items(), ids=LITERALS)
def test_literals(pattern: str, texts: set[str]) -> None:
    assert literals(pattern) == texts


@pytest.mark.parametrize("pattern", [*LITERALS, *FAST], ids=repr)
@given(data=st.data())
@settings(max_examples=30, database=None)
def test_every_match_contains_a_literal(pattern: str, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(pattern))
    known = literals(pattern)
    assert not known or any(literal in text for literal in known)


def test_a_signature_is_case_sensitive() -> None:
    assert find("broke", "it broke")
    assert not find("Broke", "it broke")
    assert find("(?i)Broke", "it broke")


def test_anchors_match_at_the_ends_of_every_line() -> None:
    log = "epoch 3\nCuda failure 'out of memory'\nbye"
    assert find(r"^Cuda failure '.*'$", log)
    assert not find(r"^failure", log)
