"""The neighbourhood of one entry in the graph of causes, as SVG. Pure: text in, text out.

`kb.content.causes_map` draws the whole graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from kb.content.causes import Edge, Graph

LETTER, HEIGHT, GAP, BETWEEN = 6.7, 24, 8, 56  # pixels: letter width, box height, between boxes, between columns


def neighbourhood(graph: Graph, entry_id: str, url: Callable[[str], str]) -> str:
    """Causes on the left, consequences on the right, masking and masked entries below; "" without neighbours."""
    causes, consequences = graph.causes_of(entry_id), graph.consequences_of(entry_id)
    beside = {*causes, *consequences}
    masks = [
        neighbour
        for neighbour in dict.fromkeys((*graph.masked_by(entry_id), *graph.hides(entry_id)))
        if neighbour not in beside
    ]
    if not (beside or masks):
        return ""
    columns = [
        list(causes),
        [entry_id, *masks],
        [consequence for consequence in consequences if consequence not in causes],
    ]
    drawn = {entry for column in columns for entry in column}
    edges = [edge for edge in graph.causes if entry_id in edge and set(edge) <= drawn]
    hidden = [edge for edge in graph.masks if entry_id in edge and set(edge) <= {entry_id, *masks}]
    return _svg(columns, edges, hidden, url, entry_id)


@dataclass(frozen=True, slots=True)
class Box:
    """Where an entry is drawn, in pixels."""

    x: float
    y: float
    width: float


def _boxes(columns: Sequence[Sequence[str]]) -> dict[str, Box]:
    """Lay out the columns from left to right, each centred vertically."""
    rows = max(map(len, columns))
    boxes: dict[str, Box] = {}
    x = 2.0
    for column in filter(None, columns):
        width = max(map(len, column)) * LETTER + 20
        for number, entry in enumerate(column):
            boxes[entry] = Box(x, 2 + (number + (rows - len(column)) / 2) * (HEIGHT + GAP), width)
        x += width + BETWEEN
    return boxes


def _svg(
    columns: Sequence[Sequence[str]],
    edges: Iterable[Edge],
    hidden: Iterable[Edge],
    url: Callable[[str], str],
    here: str,
) -> str:
    boxes = _boxes(columns)
    lines = [arrow(edge, boxes, "causes") for edge in edges] + [arrow(edge, boxes, "masks") for edge in hidden]
    nodes = [
        node(entry, box, "", "here") if entry == here else node(entry, box, url(entry)) for entry, box in boxes.items()
    ]
    return document([*lines, *nodes], *size(boxes.values()))


def size(boxes: Iterable[Box]) -> tuple[float, float]:
    """Width and height of a picture with these boxes."""
    boxes = tuple(boxes)
    return max(box.x + box.width for box in boxes) + 2, max(box.y for box in boxes) + HEIGHT + 2


def document(parts: Iterable[str], width: float, height: float) -> str:
    """A scrollable SVG. Its role is `group`, since `img` would hide its links from a screen reader."""
    return (
        '<div class="graph">'
        f'<svg role="group" aria-label="graph of causes" viewBox="0 0 {width:.0f} {height:.0f}"'
        f' width="{width:.0f}" height="{height:.0f}">'
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z"/></marker></defs>{"".join(parts)}</svg></div>'
    )


def arrow(edge: Edge, boxes: Mapping[str, Box], kind: str) -> str:
    """An arrow from the right side of one box to the left side of another; within a column, a curve on the right."""
    start, end = boxes[edge[0]], boxes[edge[1]]
    x, y = start.x + start.width, start.y + HEIGHT / 2
    v = end.y + HEIGHT / 2
    if start.x == end.x:
        bend = min(BETWEEN, 12 + abs(v - y) / 6)  # a short distance gets a flat curve
        u, first, second = end.x + end.width, x + bend, x + bend
    else:
        x, u = (x, end.x) if start.x < end.x else (start.x, end.x + end.width)
        first = second = (x + u) / 2
    path = f"M{x:.0f} {y:.0f}C{first:.0f} {y:.0f} {second:.0f} {v:.0f} {u:.0f} {v:.0f}"
    ends = f'data-from="{escape(edge[0])}" data-to="{escape(edge[1])}"'
    return f'<path class="{kind}" {ends} d="{path}" marker-end="url(#arrow)"/>'


def node(entry_id: str, box: Box, url: str, kind: str = "") -> str:
    """The box of an entry; a link unless `url` is ""."""
    text = f'<text x="{box.x + 10:.0f}" y="{box.y + HEIGHT / 2 + 4:.0f}">{escape(entry_id)}</text>'
    rect = f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{HEIGHT}" rx="4"/>'
    name = f' class="{kind}"' if kind else ""
    if not url:
        return f"<g{name}>{rect}{text}</g>"
    return f'<a href="{escape(url)}" data-id="{escape(entry_id)}"{name}>{rect}{text}</a>'
