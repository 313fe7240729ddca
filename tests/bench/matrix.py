"""A confusion matrix as SVG, with a row per actual and a column per diagnosed entry. Pure: cells in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape

SIZE, LABEL = 14, 220  # pixels of a cell and of the longest label
COLOURS = ("#1a7f37", "#0969da", "#bf8700", "#cf222e")
SHARE = {1: 1.0, 2: 0.55, 3: 0.3}  # share of a cell's width, by the place of the finding


@dataclass(frozen=True)
class Cell:
    """A finding. `kind` is a key of the legend, `place` 1 to 3, `confidence` 0 to 1."""

    row: str
    column: str
    kind: str
    place: int
    confidence: float


def picture(cells: Iterable[Cell], legend: Mapping[str, str]) -> str:
    """Draw the matrix. Rows are in the order of the cells, as are columns, with columns that have no row at the end.

    `legend` describes each kind, in the order of the colours.
    """
    colours = dict(zip(legend, COLOURS, strict=True))
    cells = list(cells)
    rows = list(dict.fromkeys(cell.row for cell in cells))
    others = sorted({cell.column for cell in cells} - set(rows))
    columns = rows + others
    width, height = LABEL + SIZE * len(columns) + 90, LABEL + SIZE * len(rows) + 40
    across = {column: LABEL + SIZE * number for number, column in enumerate(columns)}
    down = {row: LABEL + SIZE * number for number, row in enumerate(rows)}
    drawn = [_grid(down.values(), across.values(), width, height)]
    drawn += [_text(LABEL - 6, y + SIZE - 4, row, ' text-anchor="end"') for row, y in down.items()]
    drawn += [_column_name(x + SIZE - 4, column) for column, x in across.items()]
    drawn += [
        _cell(cell, across[cell.column], down[cell.row], colours[cell.kind])
        for cell in sorted(cells, key=lambda cell: -cell.place)
    ]
    drawn.append(_legend(legend, height - 16))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="10" role="img" aria-label="confusion matrix of control arms">\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _grid(down: Iterable[int], across: Iterable[int], width: int, height: int) -> str:
    lines = [f"M{LABEL} {y}H{width - 90}" for y in down] + [f"M{x} {LABEL}V{height - 40}" for x in across]
    return f'<path d="{"".join(lines)}" stroke="#e6e8eb"/>'


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}"{more}>{escape(text)}</text>'


def _column_name(x: float, name: str) -> str:
    return _text(0, 0, name, f' transform="translate({x} {LABEL - 6}) rotate(-60)"')


def _cell(cell: Cell, x: float, y: float, colour: str) -> str:
    side = SIZE * SHARE[cell.place]
    at = (SIZE - side) / 2
    title = f"{cell.row}: {cell.column} is finding {cell.place}, confidence {cell.confidence:.2f}"
    return (
        f'<rect x="{x + at:.1f}" y="{y + at:.1f}" width="{side:.1f}" height="{side:.1f}" fill="{colour}" '
        f'fill-opacity="{0.25 + 0.75 * cell.confidence:.2f}"><title>{escape(title)}</title></rect>'
    )


def _legend(legend: Mapping[str, str], y: float) -> str:
    drawn, x = [], 20
    for colour, words in zip(COLOURS, legend.values(), strict=True):
        drawn += [f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>', _text(x + 14, y, words)]
        x += 40 + 5 * len(words)
    drawn.append(_text(x, y, "large: first finding, small: second and third; pale: low confidence"))
    return "".join(drawn) + _text(20, LABEL - 6, "rows: the arm, columns: the findings")
