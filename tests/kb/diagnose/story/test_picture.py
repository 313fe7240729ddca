"""Pictures of timelines: on a terminal of 80 columns, and as SVG that is safe to put into a page."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from kb.diagnose.story.picture import LEGEND, MARKS, MOST_ROWS, extent, row_text, svg_picture, text_picture
from kb.diagnose.story.summary import AttemptSummary, RankRow, Span

SVG = "{http://www.w3.org/2000/svg}"
PLACE = "barrier in trainer.py:290 save called from train.py:203 evaluate"
HOSTILE = "\x1b[31m<script>alert(1)</script>&\"'\x00\u202e"
PHASES = ("load", "tokenize", "train", "evaluate", "save", "resume", "teardown", "")


def attempt(*rows: RankRow, seconds: float | None = None) -> AttemptSummary:
    return AttemptSummary(rows, (), seconds, 198)


def row(
    rank: int | None,
    *phases: str,
    mark: str = "",
    place: str = "",
    error: str = "",
    ending: str = "train step 8",
    marked_at: float = 1.0,
) -> RankRow:
    spans = (Span(phase, at / len(phases), (at + 1) / len(phases), f"{phase} 8") for at, phase in enumerate(phases))
    return RankRow(rank, tuple(spans), mark, marked_at, place, error, ending)


def test_a_row_shows_phases_the_mark_and_the_end() -> None:
    lines = text_picture(attempt(row(3, "load", "train", mark="T", place=PLACE))).splitlines()
    assert lines[0] == f"          |{'-' * 40}| 198 lines, no common clock"
    assert lines[1] == f"rank 3    |{'l' * 20}{'=' * 19}T| barrier train.py:203"
    assert lines[2:] == [LEGEND, MARKS]


def test_the_extent_is_seconds_where_there_is_a_clock() -> None:
    assert extent(attempt(seconds=3725.4)) == "3,725 s"


def test_equal_rows_are_one() -> None:
    rows = [row(rank, "load", "train", mark="T", place=PLACE) for rank in range(1, 8)]
    picture = text_picture(attempt(row(0, "load", "train", "evaluate"), *rows))
    assert [line.split("|")[0].strip() for line in picture.splitlines()[1:3]] == ["rank 0", "ranks 1-7"]
    assert len(picture.splitlines()) == 5


def test_rows_that_differ_are_not_folded() -> None:
    picture = text_picture(attempt(row(0, "train"), row(1, "train", mark="K"), row(2, "train", ending="SIGTERM")))
    assert len(picture.splitlines()) == 6


def test_no_more_rows_than_fit_a_screen() -> None:
    picture = text_picture(attempt(*(row(rank, "train", ending=f"train step {rank}") for rank in range(30))))
    assert len(picture.splitlines()) == MOST_ROWS + 4
    assert "and 18 more rows: --json has them" in picture


def test_without_rows_there_is_no_picture() -> None:
    assert text_picture(attempt()) == ""


def test_lines_without_a_rank_are_named_so() -> None:
    assert "no rank   |" in text_picture(attempt(row(None, "train")))


def test_control_characters_are_escaped() -> None:
    picture = text_picture(attempt(row(0, "train", ending=HOSTILE), row(1, place=f"{HOSTILE} f", mark="X")))
    assert "\x1b" not in picture
    assert "\x00" not in picture
    assert "\u202e" not in picture
    assert "\\x1b[31m" in picture


def test_the_end_of_a_row_is_the_call_and_the_line_of_the_user() -> None:
    assert row_text(row(0, place=PLACE)) == "barrier train.py:203"
    assert row_text(row(0, place="train.py:12 load")) == "train.py:12"
    assert row_text(row(0, ending="SIGKILL")) == "SIGKILL"


ROWS = st.builds(
    row,
    st.none() | st.integers(0, 99),
    st.sampled_from(PHASES),
    st.sampled_from(PHASES),
    mark=st.sampled_from(["", "T", "X", "K"]),
    place=st.sampled_from(["", PLACE, "an unknown place", HOSTILE]) | st.text(max_size=200),
    error=st.text(max_size=100),
    ending=st.text(max_size=200),
    marked_at=st.floats(0, 1),
)


@given(st.lists(ROWS, max_size=20))
def test_it_fits_80_columns(rows: list[RankRow]) -> None:
    lines = text_picture(attempt(*rows)).split("\n")
    assert max(map(len, lines)) <= 80


def test_the_axis_of_many_lines_fits_80_columns() -> None:
    long = AttemptSummary((row(0, "train"),), (), None, 1998)
    assert max(map(len, text_picture(long).splitlines())) <= 80


def test_folded_ranks_fit_80_columns() -> None:
    rows = [row(rank, "train", mark="T", place="x" * 90) for rank in range(12345, 12465, 2)]
    assert max(map(len, text_picture(attempt(*rows)).splitlines())) <= 80


@given(st.lists(ROWS, max_size=20))
def test_svg_is_xml_with_a_row_for_each_rank(rows: list[RankRow]) -> None:
    root = ET.fromstring(svg_picture(attempt(*rows)))
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert root.get("aria-label", "").startswith("timeline of ")
    assert len(root.findall(f"{SVG}line")) == len(rows)
    assert len(root.findall(f"{SVG}rect")) == 2 * len(rows)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        "svg",
        "style",
        "text",
        "line",
        "rect",
        "title",
    }


def test_svg_escapes_markup() -> None:
    hostile = row(0, "train", mark="X", error=HOSTILE, place=HOSTILE)
    picture = svg_picture(attempt(RankRow(0, (Span("train", 0, 1, HOSTILE),), "X", 1.0, HOSTILE, HOSTILE, "")))
    assert "<script" not in picture
    assert "&lt;script&gt;" in picture
    assert "\x00" not in picture + svg_picture(attempt(hostile))


def test_bars_of_svg_stay_within_the_picture() -> None:
    root = ET.fromstring(svg_picture(attempt(row(0, *PHASES), row(1, "train", mark="K"))))
    width, height = map(float, root.get("viewBox", "").split()[2:])
    for bar in root.iter(f"{SVG}rect"):
        assert float(bar.get("x", "")) + float(bar.get("width", "")) <= width
        assert float(bar.get("y", "")) + float(bar.get("height", "")) <= height
