"""The graph of causes as SVG: the neighbourhood of one entry, and the whole. Pure: text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from kb.content.causes import Edge, Graph

LETTER, HEIGHT, GAP, BETWEEN = 6.7, 24, 8, 56  # pixels: of a letter, of a box, between boxes, between columns


def neighbourhood(graph: Graph, entry_id: str, url: Callable[[str], str]) -> str:
    """Causes on the left, consequences on the right, what hides it and what it hides below; "" without neighbours."""
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
    drawn = {one for column in columns for one in column}
    edges = [edge for edge in graph.causes if entry_id in edge and set(edge) <= drawn]
    hidden = [edge for edge in graph.masks if entry_id in edge and set(edge) <= {entry_id, *masks}]
    return _svg(columns, edges, hidden, url, entry_id)


def whole(graph: Graph, url: Callable[[str], str]) -> str:
    """Every entry that has a link, each left of what it brings about as far as circles allow; "" without links."""
    ids = sorted({one for edge in graph.causes for one in edge})
    if not ids:
        return ""
    steps = _steps_to_the_end(ids, graph.causes)
    columns: list[list[str]] = []
    height: dict[str, float] = {}
    for count in range(max(steps.values(), default=0) + 1):
        column = [id_ for id_ in ids if steps[id_] == count]
        column.sort(key=lambda one: (_mean(height[end] for end in graph.consequences_of(one) if end in height), one))
        height.update({one: number / len(column) for number, one in enumerate(column)})
        columns.insert(0, column)
    return _svg(columns, graph.causes, [], url, "")


def _mean(numbers: Iterable[float]) -> float:
    """Boxes stand near what they lead to."""
    some = list(numbers)
    return sum(some) / len(some) if some else 0.0


def _steps_to_the_end(ids: Sequence[str], edges: Iterable[Edge]) -> dict[str, int]:
    """Length of the longest path from each id over the edges that close no circle."""
    followers: dict[str, list[str]] = {id_: [] for id_ in ids}
    for cause, consequence in edges:
        followers[cause].append(consequence)
    steps: dict[str, int] = {}
    on_path: set[str] = set()

    def visit(one: str) -> int:
        if one not in steps:
            on_path.add(one)
            steps[one] = max((visit(other) + 1 for other in followers[one] if other not in on_path), default=0)
            on_path.discard(one)
        return steps[one]

    for one in ids:
        visit(one)
    return steps


@dataclass(frozen=True, slots=True)
class Box:
    """Where an entry is drawn, in pixels."""

    x: float
    y: float
    width: float


def _boxes(columns: Sequence[Sequence[str]]) -> dict[str, Box]:
    """Columns from left to right, each in the middle of the height."""
    rows = max(map(len, columns))
    boxes: dict[str, Box] = {}
    x = 2.0
    for column in filter(None, columns):
        width = max(map(len, column)) * LETTER + 20
        for number, one in enumerate(column):
            boxes[one] = Box(x, 2 + (number + (rows - len(column)) / 2) * (HEIGHT + GAP), width)
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
    width = max(box.x + box.width for box in boxes.values()) + 2
    height = max(box.y for box in boxes.values()) + HEIGHT + 2
    lines = [_line(boxes[start], boxes[end], "causes") for start, end in edges]
    lines += [_line(boxes[start], boxes[end], "masks") for start, end in hidden]
    drawn = [_drawn(one, box, url(one), one == here) for one, box in boxes.items()]
    return (
        '<div class="graph">'
        # A group, since an image would hide its links from a screen reader.
        f'<svg role="group" aria-label="graph of causes" width="{width:.0f}" height="{height:.0f}">'
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z"/></marker></defs>{"".join(lines)}{"".join(drawn)}</svg></div>'
    )


def _line(start: Box, end: Box, kind: str) -> str:
    """From the right of a box to the left of another; within a column around its right side."""
    x, y = start.x + start.width, start.y + HEIGHT / 2
    v = end.y + HEIGHT / 2
    if start.x == end.x:
        u, first, second = x, x + BETWEEN, x + BETWEEN
    else:
        x, u = (x, end.x) if start.x < end.x else (start.x, end.x + end.width)
        first = second = (x + u) / 2
    path = f"M{x:.0f} {y:.0f}C{first:.0f} {y:.0f} {second:.0f} {v:.0f} {u:.0f} {v:.0f}"
    return f'<path class="{kind}" d="{path}" marker-end="url(#arrow)"/>'


def _drawn(one: str, box: Box, url: str, is_here: bool) -> str:
    text = f'<text x="{box.x + 10:.0f}" y="{box.y + HEIGHT / 2 + 4:.0f}">{escape(one)}</text>'
    rect = f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{HEIGHT}" rx="4"/>'
    return f'<g class="here">{rect}{text}</g>' if is_here else f'<a href="{escape(url)}">{rect}{text}</a>'
