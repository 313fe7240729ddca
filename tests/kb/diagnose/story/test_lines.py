"""Lines of a log: the rank, the time and the text of each, in every form in which launchers and loggers print them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb.diagnose.story.excerpt import Excerpt, Part
from kb.diagnose.story.lines import LONGEST, MOST_PIECES, StoryLine, read_lines


def lines(log: str, rank: int | None = None, number: int = 1) -> list[StoryLine]:
    return list(read_lines([Excerpt("job.log", rank, None, (Part(number, log.encode()),))]))


def line(log: str) -> StoryLine:
    (only,) = lines(log)
    return only


@pytest.mark.parametrize(
    "prefix",
    [
        "[rank3]: ",
        "[default3]:",
        "[default3]:[rank3]: ",
        "[default1]:[rank3]: ",  # the second node of two
        "[trainer3]:",
        "3: ",
        " 3: ",
        "[1,3]<stdout>: ",
        "[1,3]<stderr>:",
        "(VllmWorker rank=3 pid=12) ",
        "2026-11-22T01:38:57.154123456Z stdout F [rank3]: ",
    ],
)
def test_a_launcher_names_the_rank(prefix: str) -> None:
    read = line(f"{prefix}loading the model")
    assert (read.rank, read.message) == (3, "loading the model")


@pytest.mark.parametrize(
    "text",
    [
        "rank 3 loading the model",
        "Rank 3: loading the model",
        "[Rank 3] loading the model",
        "[RANK 3] loading the model",
        "global rank 3 loading the model",
        "rank=3 loading the model",
        "worker 3: loading the model",
        "进程 3 加载模型",
        "第 3 号卡 加载模型",
        "第3卡 加载模型",
        '{"rank": 3, "event": "load"}',
        '{"event": "load", "global_rank": "3"}',
        "2026-11-22 01:38:57,154 - INFO - train - rank 3 loading the model",
        "2026-11-22 01:38:57,154 - INFO - train - [3] loading the model",
        "2026-11-22 01:38:57.154 | INFO     | train:main:40 - [3] loading the model",
        "[2026-11-22 01:38:57] INFO: [3] loading the model",
        "I1122 01:38:57.154000 712 train.py:40] [3] loading the model",
        "INFO:root:rank 3 loading the model",
    ],
)
def test_the_text_itself_names_the_rank(text: str) -> None:
    assert line(text).rank == 3


def test_a_bracket_behind_the_default_header_of_logging_is_a_rank() -> None:
    assert line("INFO:root:[3] loading the model").rank == 3


@pytest.mark.parametrize(
    "text",
    [
        "[3] loss 2.1",  # no header: a footnote, a list, an epoch
        "rank 3 failed with exit code 1",
        "frank 3",
        "step 3 loss 2.1",
        '{"ranked": 3}',
        "the best rank 3 times",
    ],
)
def test_other_numbers_are_no_ranks(text: str) -> None:
    assert line(text).rank is None


def test_the_file_names_the_rank_where_no_line_does() -> None:
    assert [read.rank for read in lines("step 1\n[rank5]: step 1", rank=2)] == [2, 5]


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-22T03:00:00Z stderr F step 1",
        "2026-11-22 03:00:00,000 - INFO - step 1",
        '{"ts": 1795316400.0, "step": 1}',
    ],
)
def test_clocks_of_containers_loggers_and_json_are_read(text: str) -> None:
    assert line(text).time == 1795316400.0


def test_headers_of_loggers_are_not_part_of_the_message() -> None:
    read = line("2026-11-22 01:38:57,154 - INFO - train - rank 3 step 40 loss 2.5")
    assert (read.text, read.message) == (
        "INFO - train - rank 3 step 40 loss 2.5",
        "rank 3 step 40 loss 2.5",
    )


def test_a_bar_without_a_newline_does_not_hide_the_prefix_behind_it() -> None:
    bar, opening = lines(" 35%|###  | 14/40 [00:06<00:11][rank1]: Traceback (most recent call last):\n")
    assert (bar.rank, bar.text) == (None, " 35%|###  | 14/40 [00:06<00:11]")
    assert (opening.rank, opening.text) == (1, "Traceback (most recent call last):")


def test_a_bar_without_a_newline_does_not_hide_the_traceback_behind_it() -> None:
    texts = [read.text for read in lines(" 35%|###  | 14/40 [00:06<00:11]Traceback (most recent call last):\n")]
    assert texts == [" 35%|###  | 14/40 [00:06<00:11]", "Traceback (most recent call last):"]


def test_glued_lines_of_json_are_two() -> None:
    read = lines('{"rank": 0, "step": 4}{"rank": 1, "step": 4}\n\n')
    assert [one.rank for one in read] == [0, 1]
    assert [one.number for one in read] == [1, 1]


def test_what_carriage_returns_overwrite_is_read_in_order() -> None:
    read = lines("  5%| 1/20\r 10%| 2/20\r 15%| 3/20\nstep 4\n")
    assert [(one.number, one.text.strip()) for one in read] == [
        (1, "5%| 1/20"),
        (1, "10%| 2/20"),
        (1, "15%| 3/20"),
        (2, "step 4"),
    ]


def test_windows_line_ends_change_nothing() -> None:
    assert [read.text for read in lines("step 1\r\nstep 2\r\n")] == ["step 1", "step 2"]


def test_of_very_many_paints_the_last_ones_count() -> None:
    read = lines("\r".join(f"paint {number}" for number in range(3 * MOST_PIECES)))
    assert len(read) == MOST_PIECES
    assert read[-1].text == f"paint {3 * MOST_PIECES - 1}"


def test_a_long_line_is_cut() -> None:
    assert len(line("x" * 100_000).text) <= LONGEST


def test_logs_are_ordered_one_after_the_other_and_cited_by_their_names() -> None:
    excerpts = [Excerpt(name, None, None, (Part(7, b"a\n\nb\n"),)) for name in ("rank0.log", "rank1.log")]
    read = list(read_lines(excerpts))
    assert [(one.source, one.number) for one in read] == [
        ("rank0.log", 7),
        ("rank0.log", 9),
        ("rank1.log", 7),
        ("rank1.log", 9),
    ]
    assert [one.order for one in read] == [1, 2, 3, 4]


def test_evidence_is_escaped_and_short() -> None:
    evidence = line(f"[rank2]: loss \x07{'x' * 4000}").evidence
    assert evidence.rank == 2
    assert evidence.text.startswith("loss \\x07")
    assert len(evidence.text) < 450


@given(st.text(max_size=300))
def test_any_text_gives_lines_of_its_own_numbers(text: str) -> None:
    read = lines(text)
    ends = text.encode("utf-8", "replace").decode().count("\n") + 1
    assert all(1 <= one.number <= ends for one in read)
    assert [one.order for one in read] == list(range(1, len(read) + 1))
