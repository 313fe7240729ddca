"""Draws the timelines of an attempt as text for a terminal, and as SVG.

Letters carry the meaning, not colours. If the lines have no clock, the axis is the order of lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from kb.diagnose.story.progress import EVALUATE, LOAD, RESUME, SAVE, TEARDOWN, TOKENIZE, TRAIN
from kb.diagnose.story.summary import DIED, FAILED, WAITED, AttemptSummary, RankRow
from kb.harness.collective import name_ranks
from kb.printable import printable

LETTERS = {LOAD: "l", TOKENIZE: "t", TRAIN: "=", EVALUATE: "e", SAVE: "s", RESUME: "r", TEARDOWN: "d", "": "-"}
LEGEND = "l load  t tokenize  = train  e evaluate  s save  r resume  d teardown"
MARKS = f"{WAITED} gave up waiting  {FAILED} failed by itself  {DIED} killed"
WIDTH = 80  # columns of a terminal
AXIS = 40
LABEL = 10  # columns for the ranks of a row
MOST_ROWS = 12  # on a terminal; equal rows count once

COLOURS = {
    LOAD: "#8aa0b8",
    TOKENIZE: "#b08ad0",
    TRAIN: "#4c9f70",
    EVALUATE: "#d0a94c",
    SAVE: "#4c86d0",
    RESUME: "#8aa0b8",
    TEARDOWN: "#999999",
    "": "#bbbbbb",
}
CALL_PATH = re.compile(r"(?: in \S+:\d+ \S+)? called from ")  # in a place, between the call and the user's code
LEFT, LENGTH, HEIGHT, TOP = 76, 640, 22, 8  # pixels


def text_picture(attempt: AttemptSummary) -> str:
    """The text; equal rows of consecutive ranks are merged, as in `ranks 1-7`. Empty for an attempt without rows."""
    folded = _folded(attempt.rows)
    if not folded:
        return ""
    rest = WIDTH - LABEL - AXIS - 4
    rows = [
        f"{_shortened(_label(ranks), LABEL):<{LABEL}}|{axis}| {_shortened(printable(end), rest)}"
        for ranks, axis, end in folded[:MOST_ROWS]
    ]
    if len(folded) > MOST_ROWS:
        rows.append(f"{'':<{LABEL}} and {len(folded) - MOST_ROWS} more rows: --json has them")
    return "\n".join((f"{'':<{LABEL}}|{'-' * AXIS}| {_shortened(extent(attempt), rest)}", *rows, LEGEND, MARKS))


def extent(attempt: AttemptSummary) -> str:
    """The length of the axis: `83 s`, or `198 lines, no common clock`."""
    return f"{attempt.seconds:,.0f} s" if attempt.seconds is not None else f"{attempt.lines:,} lines, no common clock"


def svg_picture(attempt: AttemptSummary) -> str:
    """The SVG: a row per rank and a bar per span, whose title is its last progress.

    It has no script and no style sheet, which a page's policy may refuse.
    """
    rows = "".join(_svg_row(row, TOP + index * HEIGHT) for index, row in enumerate(attempt.rows))
    ranks = [row.rank for row in attempt.rows if row.rank is not None]
    label = escape(f"timeline of {name_ranks(ranks)}" if ranks else "timeline of the job")
    size = f"0 0 {LEFT + LENGTH + 16} {2 * TOP + len(attempt.rows) * HEIGHT}"
    return (
        f'<svg viewBox="{size}" role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg"'
        f' font-family="system-ui, sans-serif" font-size="12" fill="currentColor">{rows}</svg>'
    )


def row_text(row: RankRow) -> str:
    """The end of a row: `barrier train.py:203`, or its exit code or signal, or its last progress."""
    return CALL_PATH.sub(" ", row.place).rsplit(" ", 1)[0] if row.place else row.ending


def _svg_row(row: RankRow, y: int) -> str:
    name = f"rank {row.rank}" if row.rank is not None else "no rank"
    axis = (
        f'<line x1="{LEFT}" y1="{y + 9}" x2="{LEFT + LENGTH}" y2="{y + 9}" stroke="currentColor" stroke-opacity=".25"/>'
    )
    parts = [f'<text x="0" y="{y + 13}">{name}</text>', axis]
    for span in row.spans:
        x, length = LEFT + LENGTH * span.start, max(2.0, LENGTH * (span.end - span.start))
        title = f"<title>{escape(printable(span.last))}</title>"
        colour = COLOURS[span.phase]
        parts.append(f'<rect x="{x:.1f}" y="{y + 2}" width="{length:.1f}" height="14" fill="{colour}">{title}</rect>')
    if row.mark:
        x, title = LEFT + LENGTH * row.marked_at, escape(printable(f"{row.error or row.ending} {row.place}".strip()))
        mark = f"{row.mark}<title>{title}</title>"
        parts.append(
            f'<text x="{x:.1f}" y="{y + 14}" fill="#c0392b" font-weight="700" text-anchor="middle">{mark}</text>'
        )
    return "".join(parts)


def _folded(rows: Sequence[RankRow]) -> list[tuple[list[int | None], str, str]]:
    """(ranks, axis, end) of consecutive rows that look equal."""
    folded: list[tuple[list[int | None], str, str]] = []
    for row in rows:
        axis, end = _axis(row), row_text(row)
        if folded and folded[-1][1:] == (axis, end):
            folded[-1][0].append(row.rank)
        else:
            folded.append(([row.rank], axis, end))
    return folded


def _axis(row: RankRow) -> str:
    columns = [" "] * AXIS
    for span in row.spans:
        first, last = _column(span.start), _column(span.end)
        columns[first : last + 1] = LETTERS[span.phase] * (last + 1 - first)
    if row.mark:
        columns[_column(row.marked_at)] = row.mark
    return "".join(columns)


def _column(fraction: float) -> int:
    return min(AXIS - 1, int(fraction * AXIS))


def _label(ranks: Sequence[int | None]) -> str:
    """`ranks 0-3`, `ranks 0,2`, or only the numbers if that is too long."""
    known = [rank for rank in ranks if rank is not None]
    if not known:
        return "no rank"
    is_run = len(known) > 1 and known[-1] - known[0] == len(known) - 1
    numbers = f"{known[0]}-{known[-1]}" if is_run else ",".join(map(str, known))
    named = f"rank{'s' * (len(known) > 1)} {numbers}"
    return named if len(named) <= LABEL else _shortened(numbers, LABEL)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
