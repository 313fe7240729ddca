"""Logs that were made to harm the reading of stories: bounded work, no exception, nobody accused by nonsense.

What is measured is work, not time: lines of Python that are run, and their ratio between two sizes of a log.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kb.diagnose.inputs.sources import Stream
from kb.diagnose.scan.result import Scan
from kb.diagnose.scan.scan import scan
from kb.diagnose.scan.signature_matcher import Matcher
from kb.diagnose.story.excerpt import HEAD, MARKED, SAMPLED, TAIL, Excerpt, Part
from kb.diagnose.story.lines import read_lines
from kb.diagnose.story.picture import svg_picture, text_picture
from kb.diagnose.story.story import read_story
from kb.diagnose.story.summary import Story
from kb.diagnose.story.tracebacks import MOST_FRAMES, MOST_OPEN, read_tracebacks

MATCHER = Matcher(())
LIMIT = HEAD + TAIL + MARKED + SAMPLED
OPENING = "Traceback (most recent call last):"
GAVE_UP = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 6000ms for send operation"
STACK = (OPENING, '  File "/work/t.py", line 44, in fit', "    f()", GAVE_UP)


def excerpt(text: str) -> Excerpt:
    return Excerpt("job.log", None, None, (Part(1, text.encode("utf-8", "replace")),))


def story(text: str) -> Story:
    """Read and drawn, as it is where somebody asks for all of it."""
    found = read_story([excerpt(text)])
    found.to_json()
    for attempt in found.attempts:
        text_picture(attempt)
        svg_picture(attempt)
    return found


def scanned(*pieces: bytes) -> Scan:
    return scan([Stream("job.log", iter(pieces))], MATCHER)


def work_of(action: Callable[[], object]) -> int:
    """How many lines of Python are run, each turn of a comprehension among them."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def ranks_in_prefixes(size: int) -> str:
    return "".join(f"[rank{number}]: step {number % 9} loss 1.5\n" for number in range(size))


def spoken_ranks(size: int) -> str:
    return "".join(f"rank {number % 100_000} step {number % 9} loss 1.5\n" for number in range(size))


def open_tracebacks(size: int) -> str:
    return f'{OPENING}\n  File "/work/t.py", line 44, in fit\n' * size


def raising_ranks(size: int) -> str:
    return "".join(f"[rank{number}]: {line}\n" for number in range(size) for line in STACK)


def chained(size: int) -> str:
    link = "During handling of the above exception, another exception occurred:\n"
    return "".join("".join(f"[rank0]: {line}\n" for line in STACK) + f"[rank0]: {link}" for _ in range(size))


def paints(size: int) -> str:
    return "\r".join(f" {number % 100}%|###| {number}/{size} [00:01<00:02]" for number in range(size)) + "\n"


def other_layouts(size: int) -> str:
    return "".join(f"[rank{number % 4}]: step{'x' * (number % 50)} {number} {chr(97 + number % 26)} loss 1.5\n" for number in range(size))  # fmt: skip


def restarts(size: int) -> str:
    return "".join(f"[rank0]: step {number % 6}\n{'Restarting worker group' if number % 6 == 5 else ''}\n" for number in range(size))  # fmt: skip


def agents(size: int) -> str:
    line = "E1122 01:39:08.25 77 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: 1) local_rank: 2 (pid: 71) of binary"
    return "".join(f"step {number}\n" * 5 + f"{line}\n" for number in range(size))


def nan_of_many(size: int) -> str:
    return "".join(f"[rank{number % 97}]: step {number} loss nan grad_norm inf\n" for number in range(size))


def survivals(size: int) -> str:
    return "".join("".join(f"[rank0]: {line}\n" for line in ("step 7", *STACK)) for _ in range(size))


def half_lost(size: int) -> str:
    lost = (*STACK[:3], "RuntimeError: Connection closed by peer")
    waiting = "".join(f"[rank{rank}]: {line}\n" for rank in range(0, size, 2) for line in STACK)
    return ranks_in_prefixes(size) + waiting + "".join(f"[rank{rank}]: {line}\n" for rank in range(1, size, 2) for line in lost)  # fmt: skip


def half_missing(size: int) -> str:
    return ranks_in_prefixes(size) + "".join(f"[rank{rank}]: {line}\n" for rank in range(0, size, 2) for line in STACK)


def different_errors(size: int) -> str:
    words = ("".join(chr(97 + int(digit)) for digit in str(number)) for number in range(0, size, 2))
    own = "".join(f"[rank{2 * at}]: {line}\n" for at, word in enumerate(words) for line in (*STACK[:3], f"KeyError: {word}"))  # fmt: skip
    return own + "".join(f"[rank{rank}]: {line}\n" for rank in range(1, size, 2) for line in STACK)


def different_nans(size: int) -> str:
    return "".join(f"[rank{rank}]: step {rank} loss nan\n" for rank in range(size))


def half_killed(size: int) -> str:
    killed = "".join(f"rank      : {rank} (local_rank: 0)\nexitcode  : -9 (pid: 7)\n" for rank in range(1, size, 2))
    return raising_ranks(size // 2) + "".join(f"[rank{rank}]: step 1\n" for rank in range(size)) + killed


SHAPES = [
    *(ranks_in_prefixes, spoken_ranks, open_tracebacks, raising_ranks, chained),
    *(paints, other_layouts, agents, nan_of_many),
]
PAIRS = (half_lost, survivals, half_missing, different_errors, different_nans, half_killed)  # ranks beside ranks


@pytest.mark.parametrize("shape", [*SHAPES, *PAIRS], ids=lambda shape: shape.__name__)
def test_the_work_grows_no_faster_than_the_log(shape: Callable[[int], str]) -> None:
    small, large = shape(300), shape(1200)
    story(small)  # what is read once and cached does not count
    growth = work_of(lambda: story(large)) / work_of(lambda: story(small))
    assert growth < 1.4 * len(large) / len(small)


@pytest.mark.parametrize("shape", [*SHAPES, *PAIRS, restarts], ids=lambda shape: shape.__name__)
def test_a_full_excerpt_of_it_is_read(shape: Callable[[int], str]) -> None:
    text = shape(1000)
    found = story(text)
    assert all(1 <= line.number <= text.count("\n") + 1 for fact in found.facts for line in fact.lines)


def test_a_million_ranks_are_a_bounded_excerpt_and_a_bounded_answer() -> None:
    pieces = ("".join(f"[rank{rank}]: step 1 loss 1.5\n" for rank in range(at, at + 10_000)).encode() for at in range(0, 1_000_000, 10_000))  # fmt: skip
    found = scanned(*pieces)
    assert found.lines == 1_000_000
    (attempt,) = found.story.attempts
    assert attempt.lines <= LIMIT / 20
    assert len(attempt.rows) <= 64
    assert all(len(fact.text) <= 400 for fact in found.story.facts)


def test_100_000_open_tracebacks_are_no_more_than_some() -> None:
    lines = list(read_lines([excerpt(open_tracebacks(100_000))]))
    found = read_tracebacks([*lines, *read_lines([excerpt(f"{GAVE_UP}\n" * 1000)])])
    assert len(found) <= MOST_OPEN
    assert all(len(one.frames) <= MOST_FRAMES for one in found)


def test_a_stack_of_endless_recursion_is_cut() -> None:
    text = f"{OPENING}\n" + '  File "/work/t.py", line 44, in fit\n    fit()\n' * 50_000 + "RecursionError: too deep\n"
    (only,) = read_tracebacks(read_lines([excerpt(text)]))
    assert len(only.frames) == MOST_FRAMES
    assert only.place == "t.py:44 fit"


@pytest.mark.parametrize("text", ["x", "Error ", '  File "', "\r", "]:[rank1]: ", "}{", "│", "[rank1]: ", "loss nan "])
def test_one_line_of_many_megabytes_is_a_bounded_excerpt(text: str) -> None:
    piece = (text * (1 << 20))[: 1 << 20].encode()
    found = scanned(*([piece] * 8))
    assert len(found.story.facts) <= 12
    assert all(line.number == 1 for fact in found.story.facts for line in fact.lines)


def test_clocks_that_run_backwards_accuse_nobody() -> None:
    lines = [f"2026-11-22 01:{59 - step:02}:00,000 - INFO - rank {rank} step {step} loss 1.{step}" for step in range(60) for rank in range(4)]  # fmt: skip
    found = story("\n".join(lines))
    assert [fact.text for fact in found.facts if not fact.is_context] == []
    assert all(0 <= span.start <= 1 and 0 <= span.end <= 1 for row in found.attempts[0].rows for span in row.spans)


@pytest.mark.parametrize("clock", ["9999-12-31 23:59:59", "0001-01-01 00:00:00", "2026-02-30 25:61:61", "1999999999.9"])
def test_clocks_that_are_none_are_read(clock: str) -> None:
    lines = "".join(f"{clock} - INFO - [rank{rank}]: {line}\n" for rank in range(3) for line in ("step 1", *STACK))
    story(lines + '{"ts": 1e999, "rank": 1}\n{"ts": 1999999999999, "rank": 99999}\n')


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 30))
@settings(max_examples=80)
def test_interleaved_halves_of_lines_are_read(order: list[int], width: int) -> None:
    texts = ["".join(f"[rank{rank}]: {line}\n" for line in ("step 1", "step 2", *STACK)) for rank in range(4)]
    parts = [[text[at : at + width] for at in range(0, len(text), width)] for text in texts]
    mixed = "".join(parts[rank].pop(0) for rank in order if parts[rank])
    story(mixed + "".join(part for left in parts for part in left))


@given(st.lists(st.sampled_from(["\x1b[2K", "\x1b]0;title\x07", "\x1b[", "\0", "\u202e", "\ud800", "\x85", "\u2028", "\r", "\n", "[rank1]: ", "[rank999999999]: ", "step ", "99999999999999999999", "loss nan ", *STACK]), max_size=60))  # fmt: skip
@settings(max_examples=200)
def test_escapes_and_odd_characters_never_reach_an_answer(parts: list[str]) -> None:
    found = scanned("".join(parts).encode("utf-8", "surrogatepass")).story
    for fact in found.facts:
        assert fact.text.isprintable() or "\x1b" not in fact.evidence.text
        assert not {"\x1b", "\0", "\u202e", "\n"} & set(fact.evidence.text)
    for attempt in found.attempts:
        assert not {"\x1b", "\0", "\u202e", "\r"} & set(text_picture(attempt))


def test_the_sentence_itself_is_printable() -> None:
    lines = (OPENING, '  File "/work/t\x07.py", line 4, in fit', "    f()", "FluxError: \x9b31m\u2028off")
    (fact, *_) = story("".join(f"[rank0]: {line}\n" for line in lines)).facts
    assert fact.text.isprintable()


@given(st.binary(max_size=2000))
@settings(max_examples=100)
def test_any_bytes_are_a_story(data: bytes) -> None:
    read_story([Excerpt("job.log", None, None, (Part(1, data),))])


def test_nul_bytes_between_lines_accuse_nobody_else() -> None:
    steps = "".join(f"[rank{rank}]: step {step}\n" for step in range(6) for rank in (0, 1))
    stack = "".join(f"[rank1]: {line}\n" for line in (*STACK[:3], "KeyError: 'x'"))
    culprit = scanned((steps + "\0" * 50 + "\n" + stack).encode()).story.culprit
    assert culprit is None or culprit.ranks == (1,)


def test_noise_in_10_000_shuffled_lines_is_read() -> None:
    lines = (ranks_in_prefixes(2000) + raising_ranks(500) + restarts(2000) + agents(100) + nan_of_many(500)).split("\n")
    random.Random(1).shuffle(lines)
    assert len(story("\n".join(lines)).facts) <= 12
