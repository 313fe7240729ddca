"""What of a log is kept for its story: within bounds, as whole lines, with the numbers that they have in the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kb.diagnose.scan.accumulator import Accumulator
from kb.diagnose.scan.log_scanner import Scanner
from kb.diagnose.scan.scan import PIECE
from kb.diagnose.scan.signature_matcher import Matcher
from kb.diagnose.story.excerpt import (
    HEAD,
    LEAST,
    LONGEST_LINE,
    MARKED,
    SAMPLE,
    SAMPLED,
    TAIL,
    TOTAL,
    Excerpt,
    ExcerptBuilder,
    Part,
    share,
)

MATCHER = Matcher(())
MEBIBYTE = 1 << 20
STEP = b"step %d loss 1.25 grad_norm 0.5\n"
ERROR = b"RuntimeError: Connection closed by peer\n"
LIMIT = HEAD + TAIL + MARKED + SAMPLED
OVERSHOOT = LONGEST_LINE + SAMPLE  # the last part that is added may pass a bound


def scanned(log: bytes, fraction: float = 1.0) -> Excerpt:
    """As `kb diagnose` makes it, of a log that is read in pieces."""
    excerpt = ExcerptBuilder("job.log", None, None, fraction)
    scanner = Scanner(MATCHER, Accumulator(), "job.log", None, None, excerpt)
    for start in range(0, len(log), PIECE):
        scanner.feed(log[start : start + PIECE])
    scanner.close()
    return excerpt.build()


def built(blocks: Sequence[Sequence[bytes]], mark: bytes, fraction: float = 1.0) -> Excerpt:
    """Of blocks of whole lines, with a mark on each line that contains `mark`."""
    builder, number = ExcerptBuilder("job.log", None, None, fraction), 1
    for lines in blocks:
        block = b"".join(lines)
        builder.add(block, number, list(marks(lines, mark)))
        number += block.count(b"\n")
    return builder.build()


def marks(lines: Sequence[bytes], mark: bytes) -> Iterator[tuple[int, int]]:
    start = 0
    for line in lines:
        if mark in line:
            yield start, start + len(line) - 1
        start += len(line)


def size(excerpt: Excerpt) -> int:
    return sum(len(part.data) for part in excerpt.parts)


def steps(size: int) -> bytes:
    line = STEP % 100_000_000
    return line * (size // len(line))


def test_a_short_log_is_kept_whole() -> None:
    log = b"starting\n\nstep 1 loss 2.5\nValueError: no\n"
    assert list(scanned(log).lines()) == [(1, "starting"), (3, "step 1 loss 2.5"), (4, "ValueError: no")]


def test_head_and_tail_of_a_long_log_are_kept_whole() -> None:
    log = b"first line\n" + steps(3 * MEBIBYTE) + b"last line\n"
    kept = dict(scanned(log).lines())
    assert kept[1] == "first line"
    assert kept[log.count(b"\n")] == "last line"
    assert len(kept) < log.count(b"\n") / 2


@pytest.mark.parametrize("mark", [ERROR, b'  File "/work/train.py", line 7, in main\n', b"loss nan\n"])
def test_a_mark_amid_a_long_log_is_kept_at_its_line(mark: bytes) -> None:
    before = steps(3 * MEBIBYTE)
    kept = dict(scanned(before + mark + steps(3 * MEBIBYTE)).lines())
    assert kept[before.count(b"\n") + 1] == mark.decode().rstrip("\n")


def test_the_source_line_of_a_marked_frame_is_kept() -> None:
    before = steps(3 * MEBIBYTE)
    frame = b'  File "/work/train.py", line 7, in main\n    train(model)\n'
    assert "    train(model)" in dict(scanned(before + frame + steps(3 * MEBIBYTE)).lines()).values()


def test_a_mark_between_the_head_and_the_end_of_the_first_block_is_kept() -> None:
    log = steps(300 << 10) + ERROR + steps(3 * MEBIBYTE)
    assert ERROR.decode().strip() in dict(scanned(log).lines()).values()


@pytest.mark.parametrize("logs", [17, 24, 100])
def test_marks_are_kept_however_many_logs_there_are(logs: int) -> None:
    log = steps(3 * MEBIBYTE) + ERROR + steps(3 * MEBIBYTE)
    assert ERROR.decode().strip() in dict(scanned(log, share(logs)).lines()).values()


def test_the_excerpt_of_50_megabytes_stays_below_its_limits() -> None:
    lines = STEP % 1 * 300 + ERROR + b"loss nan\n" * 3 + b'  File "/work/train.py", line 7, in main\n'
    excerpt = scanned(lines * (50 * 10**6 // len(lines)))
    assert LIMIT / 2 < size(excerpt) <= LIMIT + OVERSHOOT


@pytest.mark.parametrize("line", [ERROR, b"loss nan\n"])
def test_of_a_log_of_marks_no_more_is_kept(line: bytes) -> None:
    assert LIMIT / 2 < size(scanned(line * (3 * MEBIBYTE // len(line)))) <= LIMIT + OVERSHOOT


@pytest.mark.parametrize("logs", [1, 32, 256])
def test_the_excerpts_of_many_logs_share_the_limits(logs: int) -> None:
    fraction = share(logs)
    assert fraction <= 1
    assert fraction * logs * (HEAD + TAIL) <= TOTAL
    excerpt = scanned(ERROR * (3 * MEBIBYTE // len(ERROR)), fraction)
    assert size(excerpt) <= fraction * LIMIT + LEAST + OVERSHOOT


def test_of_each_log_some_lines_remain_however_many_there_are() -> None:
    excerpt = scanned(steps(MEBIBYTE) + ERROR, share(1_000_000))
    assert list(excerpt.lines())[-1][1] == ERROR.decode().strip()
    assert size(excerpt) <= 2 * LEAST


def test_one_line_of_many_megabytes_stays_below_the_limits() -> None:
    excerpt = scanned(b"RuntimeError: x " * (4 * MEBIBYTE // 16))
    assert size(excerpt) <= LIMIT + OVERSHOOT


def test_lines_in_several_parts_come_once() -> None:
    parts = Part(1, b"a\nb\n"), Part(2, b"b\nc\n"), Part(3, b"c\nd\n"), Part(9, b"i\n")
    assert list(Excerpt("job.log", None, None, parts).lines()) == [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (9, "i")]


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert list(scanned(b"loss \xff\xfe 1.5\n").lines()) == [(1, "loss �� 1.5")]


@given(
    st.lists(st.lists(st.sampled_from(["short", "x" * 900, "mark", ""]), min_size=1, max_size=120), max_size=12),
    st.sampled_from([1.0, 0.25, 1 / 64]),
)
@settings(max_examples=40)
def test_numbers_are_those_of_the_log_and_each_line_comes_once(blocks: list[list[str]], fraction: float) -> None:
    counted = iter(range(1, 10**6))
    lines = [[f"{next(counted)} {text}\n".encode() for text in block] for block in blocks]
    whole = b"".join(line for block in lines for line in block).decode().split("\n")
    kept = list(built(lines, b"mark", fraction).lines())
    assert [number for number, _ in kept] == sorted({number for number, _ in kept})
    assert all(text in whole[number - 1] for number, text in kept)
    assert all(number == int(text.split()[0]) for number, text in kept if " " in text and whole[number - 1] == text)


@pytest.mark.parametrize("errors", [100, 3 * MARKED // len(ERROR)])
def test_whether_all_marks_were_kept_is_known(errors: int) -> None:
    log = STEP * 40_000 + ERROR * errors + STEP * 40_000
    found = scanned(log)
    assert found.has_all_marks is (errors == 100)
    assert sum(len(part.data) for part in found.parts) <= LIMIT + OVERSHOOT
