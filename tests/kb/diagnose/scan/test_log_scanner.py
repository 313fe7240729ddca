"""The scanner reports what the signatures match, however a log is cut, coloured or mixed."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kb.content.catalog import load_catalog
from kb.content.entry import Entry
from kb.content.roots import builtin_root
from kb.diagnose.inputs.sources import Stream
from kb.diagnose.scan import log_scanner, match_budget
from kb.diagnose.scan.match_budget import ENOUGH, MatchBudget
from kb.diagnose.scan.result import Scan
from kb.diagnose.scan.scan import scan
from kb.diagnose.scan.signature_matcher import Matcher
from kb.patterns.literals import literals

Matches = set[tuple[str, str]]


@cache
def entries() -> tuple[Entry, ...]:
    return tuple(load_catalog((builtin_root(),)))


@cache
def every_signature() -> Matcher:
    return Matcher(
        signature(item.pattern, entry.id, item.role.value) for entry in entries() for item in entry.meta.signatures
    )


def signature(pattern: str, entry: str = "one", role: str = "root") -> dict[str, Any]:
    return {"id": entry, "role": role, "pattern": pattern, "literals": sorted(literals(pattern))}


def look(data: bytes | Iterable[bytes], *patterns: str, name: str = "train.log") -> Scan:
    """Scan a log, or pieces of it, for these patterns, or else for those of all entries."""
    matcher = Matcher(map(signature, patterns)) if patterns else every_signature()
    return scan([Stream(name, iter([data] if isinstance(data, bytes) else data))], matcher)


def matches(result: Scan) -> Matches:
    return {(match.id, match.pattern) for match in result.matches if match.role != "last" and match.lines[0].number}


def cut(data: bytes, size: int) -> Iterator[bytes]:
    yield from (data[at : at + size] for at in range(0, len(data), size))


@cache
def expected(text: str) -> Matches:
    return {(pattern.id, pattern.text) for pattern in every_signature().patterns if pattern.compiled.search(text)}


def fixtures() -> list[Any]:
    logs = [(f"{entry.id}-{number}", log.text) for entry in entries() for number, log in enumerate(entry.logs)]
    alike = [(f"{entry.id}-look-alike", log.text) for entry in entries() for log in entry.look_alikes]
    return [pytest.param(text, id=name) for name, text in logs + alike]


@pytest.mark.parametrize("text", fixtures())
def test_every_log_matches_as_its_text_does(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_scanner, "BLOCK", 16 << 10)  # so that few lines fill many blocks
    noise = b"step 1 of 10\n" * 6000  # more than CONTEXT
    ways = {
        "whole": text.encode(),
        "crlf": text.replace("\n", "\r\n").encode(),
        "compressed": gzip.compress(text.encode()),
        "coloured": "\n".join(f"\x1b[36m{line[:7]}\x1b[1;31m{line[7:]}\x1b[0m" for line in text.split("\n")).encode(),
        "after many lines": noise + text.encode() + noise,
    }
    for way, data in ways.items():
        assert expected(text) <= matches(look(data)), way


@pytest.mark.parametrize("text", fixtures())
def test_a_log_matches_wherever_it_is_cut(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_scanner, "CONTEXT", 8000)
    later = b"\nstep 1 of 10" * 700
    for size in (random.Random(text).randrange(50, 2000), 1 << 20):
        monkeypatch.setattr(log_scanner, "BLOCK", size)
        assert expected(text) <= matches(look(cut(text.encode() + later, size))), size
    assert expected(text) <= matches(look(cut(text.encode(), 1)))


@pytest.mark.parametrize("text", fixtures())
def test_a_log_matches_with_prefixes_and_between_other_ranks(text: str) -> None:
    lines = [f"[rank3]: {line}" for line in text.rstrip("\n").split("\n")]
    assert expected(text) <= matches(look("\n".join(lines).encode()))
    mixed = [other for line in lines for other in (line, "[rank1]: step 5 of 9", "[rank2]: data 0.1 s")]
    assert expected(text) <= matches(look("\n".join(mixed).encode()))


def test_line_numbers_are_those_of_editors() -> None:
    log = b"one\r\ntwo\r 1%|\r 2%|\r 3%| boom 1\nthree\nboom 2\r\n\nboom 3"
    (result,) = look(log, r"boom \d").matches
    assert [(line.number, line.text) for line in result.lines][:1] == [(2, "3%| boom 1")]
    assert result.count == 3
    numbers = [look(log, rf"boom {n}").matches[0].lines[0].number for n in (1, 2, 3)]
    assert numbers == [2, 4, 6]


@pytest.mark.parametrize(("log", "lines"), [(b"", 0), (b"a", 1), (b"a\n", 1), (b"a\nb", 2), (b"a\r", 1), (b"\n\n", 2)])
def test_lines_are_counted(log: bytes, lines: int) -> None:
    assert look(log, "boom").lines == lines


@given(
    st.lists(
        st.sampled_from(["boom 1", "é boom 22", "", "\x1b[31mboom\x1b[0m 3", "中文" * 300, "x" * 5000]), max_size=30
    ),
    st.sampled_from(["\n", "\r\n"]),
    st.integers(1, 700),
)
@settings(max_examples=150)
def test_any_cut_gives_the_same_lines(parts: list[str], end: str, size: int) -> None:
    data = end.join(parts).encode()
    numbers = [number for number, part in enumerate(parts, 1) if "boom" in part]
    block, far = log_scanner.BLOCK, log_scanner.CONTEXT
    log_scanner.BLOCK, log_scanner.CONTEXT = size, 100
    try:
        result = look(cut(data, size), r"boom \d+").matches
    finally:
        log_scanner.BLOCK, log_scanner.CONTEXT = block, far
    assert sum(item.count for item in result) == len(numbers)
    assert [line.number for item in result for line in item.lines] == numbers[:5]


@given(st.integers(0, 9000), st.integers(0, 9000), st.integers(500, 5000))
@settings(max_examples=60)
def test_a_match_in_an_endless_line_is_counted_once(before: int, after: int, size: int) -> None:
    data = b"." * before + b"boom 12 and more" + b"." * after
    block, far = log_scanner.BLOCK, log_scanner.CONTEXT
    log_scanner.BLOCK, log_scanner.CONTEXT = size, 2500
    try:
        (result,) = look(cut(data, size), r"boom \d+ and more").matches
    finally:
        log_scanner.BLOCK, log_scanner.CONTEXT = block, far
    assert (result.count, result.lines[0].number) == (1, 1)


def test_overlong_lines_are_matched_around_every_literal() -> None:
    log = b"".join(b"x" * gap + b" boom: code %d " % gap for gap in (10, 1900, 2040, 2060, 100, 4000, 9000))
    for gap in (10, 1900, 2040, 2060, 100, 4000, 9000):
        assert look(log, rf"boom: code {gap} ").matches, gap


def test_a_flood_is_one_match_with_a_count_and_all_ranks() -> None:
    lines = [f"[rank{n % 16}]: boom {n}\n" for n in range(20 * ENOUGH)]
    (result,) = look("".join(lines).encode(), r"boom \d+").matches
    assert result.count == len(lines)
    assert result.ranks == tuple(range(16))
    assert len(result.lines) <= 5


def test_a_match_after_a_flood_of_look_alikes_is_reported() -> None:
    log = b"number of nan iterations:   0 |\n" * 100_000 + b"number of nan iterations:   2 |\n"
    scan_result = look(log, r"number of nan iterations:\s+[1-9]")
    (result,) = scan_result.matches
    assert (result.count, result.lines[0].number) == (1, 100_001)
    assert not scan_result.problems


BOXED = """\
[rank0]: ╭───────────────────── Traceback (most recent call last) ─────────────────────╮
[rank1]: step 7
[rank0]: │ /home/someone/train.py:71 in forward                                        │
[rank0]: │ ❱ 71     logits = logits.float()                                            │
[rank0]: ╰─────────────────────────────────────────────────────────────────────────────╯
[rank1]: step 8
[rank0]: OutOfMemoryError: CUDA out of
[rank0]: memory. Tried to allocate 1.25 GiB. GPU 0 has a total
[rank1]: step 9
[rank0]: capacity of 79.11 GiB
[rank0]:
[rank0]: memory is not wrapped any more
"""


@pytest.mark.parametrize("prefix", ["[rank0]: ", ""])
def test_a_message_wrapped_by_rich_is_one_line(prefix: str) -> None:
    log = BOXED if prefix else "".join(line[9:] + "\n" for line in BOXED.splitlines() if line.startswith("[rank0]"))
    for pattern in (
        "CUDA out of memory",
        "allocate 1.25 GiB. GPU 0 has a total capacity of",
        r", in forward",
        r"line 71, in forward\b[\s\S]{0,400}?out of memory",
    ):
        (result,) = look(log.encode(), pattern).matches
        assert result.count == 1, pattern
        assert result.ranks == ((0,) if prefix else ())
    for pattern in ("CUDA out of step", "79.11 GiB memory is not"):
        assert not look(log.encode(), pattern).matches


def test_a_pattern_over_several_lines_matches_lines_of_one_rank() -> None:
    log = "".join(
        f"[rank{rank}]: {text}\n"
        for text in ("saving", *["step"] * 40, "killed")
        for rank in range(64)
        if rank != 3 or text != "saving"
    )
    (result,) = look(log.encode(), r"saving\n(step\n){40}killed").matches
    assert result.count == 63
    assert 3 not in result.ranks


@pytest.mark.parametrize("prefix", ["3: ", "[default3]:", "[1,3]<stderr>:", "2026-11-21T10:00:00.123Z [rank3]: "])
def test_a_line_starts_after_the_prefix_of_the_launcher(prefix: str) -> None:
    (result,) = look(f"{prefix}boom\n".encode(), r"^boom$").matches
    assert result.ranks == (3,)


def test_a_signature_without_literal_is_tried_on_every_line() -> None:
    (result,) = look(b"fine\n" * 99_999 + b"all is Out Of Luck\n" + b"fine\n" * 9, r"(?i)out of luck").matches
    assert result.lines[0].number == 100_000


def test_chinese_is_matched_at_any_cut() -> None:
    data = "训练卡住了，进程 3 超时\n".encode()
    for size in range(1, 12):
        (result,) = look(cut(data, size), "进程 \\d 超时").matches
        assert result.lines[0].text == "训练卡住了，进程 3 超时"


def test_the_last_line_of_a_log_is_reported() -> None:
    matcher = Matcher([signature("loading the data", role="context")])
    for end in (b"", b"\n", b"\r\n\n", b"\r"):
        result = scan([Stream("train.log", iter([b"step 1\n" * 5 + b"loading the data" + end]))], matcher).matches
        assert [(item.role, item.lines[0].number) for item in result] == [("context", 6), ("last", 6)]


def test_a_frame_in_a_box_adds_no_match_of_the_lines_before_it() -> None:
    log = "boom 1\n│ /home/someone/train.py:71 in forward │\n".encode()
    several_lines, single_line = r"boom[^,]{1,99}, line 71, in forward", r"(boom|forward) ?\d"
    assert [(match.pattern, match.count) for match in look(log, several_lines, single_line).matches] == [
        (single_line, 1),
        (several_lines, 1),
    ]


@pytest.mark.parametrize("separator", [b" ", b"\n"], ids=["one line", "many lines"])
def test_a_log_that_may_match_everywhere_is_sampled_and_its_end_is_read(
    monkeypatch: pytest.MonkeyPatch, separator: bytes
) -> None:
    """256 MB of literals on one line took minutes."""
    almost = b"the disk of host 7 was almost broken%s%s" % (b"." * 3000, separator)
    log = almost * (3 * log_scanner.BLOCK // len(almost)) + b"\nthe disk of host 7 was broken today\n"
    pattern = r"the disk of host \d was (really )?broken"
    whole = look(cut(log, log_scanner.BLOCK), pattern)
    assert not whole.problems
    tries = 0

    def count(self: MatchBudget, number: int) -> bool:
        nonlocal tries
        tries += 1
        return may_try(self, number)

    may_try = MatchBudget.may_try
    monkeypatch.setattr(MatchBudget, "may_try", count)
    monkeypatch.setattr(match_budget, "PATIENCE_S", -1.0)
    sampled = look(cut(log, log_scanner.BLOCK), pattern)
    assert sampled.problems == ("train.log: so many of its lines may match that of a part only samples were examined",)
    assert matches(sampled) == matches(whole) != set()
    assert tries < log.count(b"almost") / 2
