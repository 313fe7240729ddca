"""What is said of a pattern without running it holds when it is run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kb.patterns import redos_timing
from kb.patterns.literals import find, literals
from kb.patterns.redos import backtracking_risk

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

FAST = [
    r"WorkNCCL\(SeqNum=\d+, OpType=(\w+).*Timeout\(ms\)=(\d+)",
    r"Saving (FSDP model|model checkpoint|checkpoint)|Retrieving (full model|optimizer) state dict",
    r"failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: \d+\) of binary",
    r"store->get\(.{1,40}\) got error: (Socket Timeout|wait timeout after \d+ ?ms)|socket .* after \d+ ?ms",
    r"\(num_proc=\d+\):\s+\d+%\|",
    r"(?:\w+\.)+Error: .*",
    r"(?:[^\"\\]|\\.)*\"",
    r"(?:foo|bar){1,3}baz",
    r"(\d+,)*\d+ of \d+",
    r"(a|b)*c",
    r"broke.*twice.*",
    r"^\s*\[rank\d+\]:\s*\[E",
    r"(?:.*\n){2}end",
]

SLOW = [
    r"(a+)+$",
    r"(a*)*$",
    r"(a|aa)+$",
    r"(a|ab|b)*c",
    r"(\w+\s?)+!",
    r"(\w+\.\w*)+!",
    r"(.*a){20}",
    r"(x+x+)+y",
    r"((a?|b?)c)*!",
    r".*.*.*x",
    r".*a.*b.*c",
    r"(\s*,?\s*)+x",
    r"(?i)(a|A[bB]?|b)*!",
    r"x(?=(a+)+$)",
]

ONLY_TRIED = [r"(?:a?){30}a{30}", r"(\d{1,40}){1,40}x"]


@pytest.mark.parametrize("pattern, texts", LITERALS.items(), ids=LITERALS)
def test_the_literals_are_found(pattern: str, texts: set[str]) -> None:
    assert literals(pattern) == texts


@pytest.mark.parametrize("pattern", [*LITERALS, *FAST], ids=repr)
@given(data=st.data())
@settings(max_examples=30, database=None)
def test_every_match_contains_a_literal(pattern: str, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(pattern))
    known = literals(pattern)
    assert not known or any(literal in text for literal in known)


@pytest.mark.parametrize("pattern", FAST, ids=repr)
def test_ordinary_patterns_carry_no_risk(pattern: str) -> None:
    assert backtracking_risk(pattern) == ""


@pytest.mark.parametrize("pattern", SLOW, ids=repr)
def test_patterns_that_may_take_for_ever_are_named(pattern: str) -> None:
    assert "unbounded repeat" in backtracking_risk(pattern)


def test_what_carries_no_risk_is_fast_when_it_is_tried() -> None:
    assert redos_timing.slow({pattern: redos_timing.pumped(pattern, "Error: 7") for pattern in FAST}) == frozenset()


def test_trying_finds_what_the_structure_hides_and_goes_on_after_it() -> None:
    patterns = [FAST[0], ONLY_TRIED[0], FAST[1], ONLY_TRIED[1], FAST[2]]
    assert [backtracking_risk(pattern) for pattern in ONLY_TRIED] == ["", ""]
    texts = {pattern: redos_timing.pumped(pattern, "a sample") for pattern in patterns}
    assert redos_timing.slow(texts, limit_s=0.5) == set(ONLY_TRIED)


def test_trying_ends_the_patterns_that_would_not_end() -> None:
    texts = {pattern: redos_timing.pumped(pattern, "a sample") for pattern in (r"(a+)+$", r"(x+x+)+y", FAST[0])}
    assert redos_timing.slow(texts, limit_s=0.2) == {r"(a+)+$", r"(x+x+)+y"}


def test_pumped_texts_stay_small() -> None:
    for pattern in (*FAST, *SLOW, r"(a{1000}){1000}", "".join(f"(a{n}+b)*" for n in range(200))):
        assert sum(map(len, redos_timing.pumped(pattern, "s" * 400))) < 2_000_000


def test_a_signature_is_searched_case_as_written() -> None:
    assert find("broke", "it broke")
    assert not find("Broke", "it broke")
    assert find("(?i)Broke", "it broke")


def test_a_pattern_may_be_tied_to_the_ends_of_any_line() -> None:
    log = "epoch 3\nCuda failure 'out of memory'\nbye"
    assert find(r"^Cuda failure '.*'$", log)
    assert not find(r"^failure", log)
