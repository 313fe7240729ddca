"""What the scanner sees in a log is what its signatures match in it, however the log is cut, coloured or mixed."""

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
from kb.diagnose.evidence import Scan
from kb.diagnose.inputs.sources import Stream
from kb.diagnose.scan import log_scanner
from kb.diagnose.scan.match_budget import ENOUGH
from kb.diagnose.scan.scan import scan
from kb.diagnose.scan.signature_matcher import Matcher
from kb.patterns.literals import find, literals
from kb.patterns.redos import backtracking_risk

Seen = set[tuple[str, str]]


@cache
def entries() -> tuple[Entry, ...]:
    return tuple(load_catalog((builtin_root(),)))


@cache
def every_signature() -> Matcher:
    return Matcher(
        signature(one.pattern, entry.id, one.role.value)
        for entry in entries()
        for one in entry.meta.signatures
        if not backtracking_risk(one.pattern)
    )


def signature(pattern: str, entry: str = "one", role: str = "root") -> dict[str, Any]:
    return {"id": entry, "role": role, "pattern": pattern, "literals": sorted(literals(pattern))}


def look(data: bytes | Iterable[bytes], *patterns: str, name: str = "train.log") -> Scan:
    """Scan a log, or pieces of one, for these patterns, or for those of all entries."""
    matcher = Matcher(map(signature, patterns)) if patterns else every_signature()
    return scan([Stream(name, iter([data] if isinstance(data, bytes) else data))], matcher)


def seen(found: Scan) -> Seen:
    return {
        (sighting.id, sighting.pattern)
        for sighting in found.sightings
        if sighting.role != "last" and sighting.lines[0].number
    }


def cut(data: bytes, size: int) -> Iterator[bytes]:
    yield from (data[at : at + size] for at in range(0, len(data), size))


def expected(text: str) -> Seen:
    return {(pattern.id, pattern.text) for pattern in every_signature().patterns if find(pattern.text, text)}


def fixtures() -> list[Any]:
    logs = [(f"{entry.id}-{number}", log.text) for entry in entries() for number, log in enumerate(entry.logs)]
    alike = [(f"{entry.id}-look-alike", log.text) for entry in entries() for log in entry.look_alikes]
    return [pytest.param(text, id=name) for name, text in logs + alike]


@pytest.mark.parametrize("text", fixtures())
def test_every_fixture_shows_what_its_text_shows(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected(text)
    ways = {
        "whole": text.encode(),
        "crlf": text.replace("\n", "\r\n").encode(),
        "packed": gzip.compress(text.encode()),
        "coloured": "\n".join(f"\x1b[36m{line[:7]}\x1b[1;31m{line[7:]}\x1b[0m" for line in text.split("\n")).encode(),
        "after a lot": b"step 1 of 10\n" * 100_000 + text.encode() + b"step 1 of 10\n" * 100_000,
    }
    for way, data in ways.items():
        assert wanted <= seen(look(data)), way


@pytest.mark.parametrize("text", fixtures())
def test_a_fixture_shows_the_same_wherever_the_log_is_cut(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected(text)
    monkeypatch.setattr(log_scanner, "CONTEXT", 8000)
    later = b"\nstep 1 of 10" * 700
    for size in (random.Random(text).randrange(50, 2000), 1 << 20):
        monkeypatch.setattr(log_scanner, "BLOCK", size)
        assert wanted <= seen(look(cut(text.encode() + later, size))), size
    assert wanted <= seen(look(cut(text.encode(), 1)))


@pytest.mark.parametrize("text", fixtures())
def test_a_fixture_shows_the_same_with_a_prefix_and_between_other_ranks(text: str) -> None:
    wanted = expected(text)
    lines = [f"[rank3]: {line}" for line in text.rstrip("\n").split("\n")]
    assert wanted <= seen(look("\n".join(lines).encode()))
    mixed = [other for line in lines for other in (line, "[rank1]: step 5 of 9", "[rank2]: data 0.1 s")]
    assert wanted <= seen(look("\n".join(mixed).encode()))


def test_lines_are_numbered_as_editors_do() -> None:
    log = b"one\r\ntwo\r 1%|\r 2%|\r 3%| boom 1\nthree\nboom 2\r\n\nboom 3"
    (found,) = look(log, r"boom \d").sightings
    assert [(line.number, line.text) for line in found.lines][:1] == [(2, "3%| boom 1")]
    assert found.count == 3
    numbers = [look(log, rf"boom {n}").sightings[0].lines[0].number for n in (1, 2, 3)]
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
    wanted = [number for number, part in enumerate(parts, 1) if "boom" in part]
    block, far = log_scanner.BLOCK, log_scanner.CONTEXT
    log_scanner.BLOCK, log_scanner.CONTEXT = size, 100
    try:
        found = look(cut(data, size), r"boom \d+").sightings
    finally:
        log_scanner.BLOCK, log_scanner.CONTEXT = block, far
    assert sum(one.count for one in found) == len(wanted)
    assert [line.number for one in found for line in one.lines] == wanted[:5]


@given(st.integers(0, 9000), st.integers(0, 9000), st.integers(500, 5000))
@settings(max_examples=60)
def test_a_match_in_a_line_without_end_is_seen_once(before: int, after: int, size: int) -> None:
    data = b"." * before + b"boom 12 and more" + b"." * after
    block, far = log_scanner.BLOCK, log_scanner.CONTEXT
    log_scanner.BLOCK, log_scanner.CONTEXT = size, 2500
    try:
        (found,) = look(cut(data, size), r"boom \d+ and more").sightings
    finally:
        log_scanner.BLOCK, log_scanner.CONTEXT = block, far
    assert (found.count, found.lines[0].number) == (1, 1)


def test_every_literal_of_an_overlong_line_has_its_surroundings() -> None:
    log = b"".join(b"x" * gap + b" boom: code %d " % gap for gap in (10, 1900, 2040, 2060, 100, 4000, 9000))
    for gap in (10, 1900, 2040, 2060, 100, 4000, 9000):
        assert look(log, rf"boom: code {gap} ").sightings, gap


def test_a_flood_is_one_sighting_with_a_count_and_all_ranks() -> None:
    lines = [f"[rank{n % 16}]: boom {n}\n" for n in range(20 * ENOUGH)]
    (found,) = look("".join(lines).encode(), r"boom \d+").sightings
    assert found.count == len(lines)
    assert found.ranks == tuple(range(16))
    assert len(found.lines) <= 5


def test_a_match_after_a_flood_of_lines_that_only_look_alike_is_seen() -> None:
    log = b"number of nan iterations:   0 |\n" * 300_000 + b"number of nan iterations:   2 |\n"
    (found,) = look(log, r"number of nan iterations:\s+[1-9]").sightings
    assert (found.count, found.lines[0].number) == (1, 300_001)
    assert not look(log, r"number of nan iterations:\s+[1-9]").problems


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
def test_a_message_that_rich_wrapped_is_read_as_one_line(prefix: str) -> None:
    log = BOXED if prefix else "".join(line[9:] + "\n" for line in BOXED.splitlines() if line.startswith("[rank0]"))
    for pattern in (
        "CUDA out of memory",
        "allocate 1.25 GiB. GPU 0 has a total capacity of",
        r", in forward",
        r"line 71, in forward\b[\s\S]{0,400}?out of memory",
    ):
        (found,) = look(log.encode(), pattern).sightings
        assert found.count == 1, pattern
        assert found.ranks == ((0,) if prefix else ())
    for pattern in ("CUDA out of step", "79.11 GiB memory is not"):
        assert not look(log.encode(), pattern).sightings


def test_a_pattern_over_several_lines_sees_those_of_one_rank_only() -> None:
    log = "".join(
        f"[rank{rank}]: {text}\n"
        for text in ("saving", *["step"] * 40, "killed")
        for rank in range(64)
        if rank != 3 or text != "saving"
    )
    (found,) = look(log.encode(), r"saving\n(step\n){40}killed").sightings
    assert found.count == 63
    assert 3 not in found.ranks


@pytest.mark.parametrize("prefix", ["3: ", "[default3]:", "[1,3]<stderr>:", "2026-11-21T10:00:00.123Z [rank3]: "])
def test_a_launchers_prefix_hides_no_beginning_of_a_line(prefix: str) -> None:
    (found,) = look(f"{prefix}boom\n".encode(), r"^boom$").sightings
    assert found.ranks == (3,)


def test_a_signature_without_literal_is_tried_on_every_line() -> None:
    (found,) = look(b"fine\n" * 99_999 + b"all is Out Of Luck\n" + b"fine\n" * 9, r"(?i)out of luck").sightings
    assert found.lines[0].number == 100_000


def test_chinese_is_matched_at_any_cut() -> None:
    data = "训练卡住了，进程 3 超时\n".encode()
    for size in range(1, 12):
        (found,) = look(cut(data, size), "进程 \\d 超时").sightings
        assert found.lines[0].text == "训练卡住了，进程 3 超时"


def test_the_last_line_is_where_a_log_stopped() -> None:
    matcher = Matcher([signature("loading the data", role="context")])
    for end in (b"", b"\n", b"\r\n\n", b"\r"):
        found = scan([Stream("train.log", iter([b"step 1\n" * 5 + b"loading the data" + end]))], matcher).sightings
        assert [(one.role, one.lines[0].number) for one in found] == [("context", 6), ("last", 6)]
