"""The graph of causes as SVG: the neighbourhood of one entry, and the whole. Pure: text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def whole(graph: Graph, url: Callable[[str], str]) -> str:
    """Every linked entry, each to the left of its consequences as far as cycles allow; "" without links."""
    ids = sorted({entry for edge in graph.causes for entry in edge})
    if not ids:
        return ""
    steps = _steps_to_the_end(ids, graph.causes)
    columns: list[list[str]] = []
    height: dict[str, float] = {}
    for count in range(max(steps.values(), default=0) + 1):
        column = [entry for entry in ids if steps[entry] == count]
        column.sort(
            key=lambda entry: (_mean(height[end] for end in graph.consequences_of(entry) if end in height), entry)
        )
        height.update({entry: number / len(column) for number, entry in enumerate(column)})
        columns.insert(0, column)
    return _svg(columns, graph.causes, [], url, "")


def _mean(numbers: Iterable[float]) -> float:
    """Places a box near its consequences; 0 when none of them is placed yet."""
    values = list(numbers)
    return sum(values) / len(values) if values else 0.0


def _steps_to_the_end(ids: Sequence[str], edges: Iterable[Edge]) -> dict[str, int]:
    """Length of the longest path from each id, over the edges that close no cycle."""
    followers: dict[str, list[str]] = {entry: [] for entry in ids}
    for cause, consequence in edges:
        followers[cause].append(consequence)
    steps: dict[str, int] = {}
    on_path: set[str] = set()

    def visit(entry: str) -> int:
        if entry not in steps:
            on_path.add(entry)
            steps[entry] = max((visit(other) + 1 for other in followers[entry] if other not in on_path), default=0)
            on_path.discard(entry)
        return steps[entry]

    for entry in ids:
        visit(entry)
    return steps


@dataclass(frozen=True, slots=True)
class Box:
    """Where an entry is drawn, in pixels."""

    x: float
    y: float
    width: float


def _boxes(columns: Sequence[Sequence[str]]) -> dict[str, Box]:
    """Columns from left to right, each centred vertically."""
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
    width = max(box.x + box.width for box in boxes.values()) + 2
    height = max(box.y for box in boxes.values()) + HEIGHT + 2
    lines = [_line(boxes[start], boxes[end], "causes") for start, end in edges]
    lines += [_line(boxes[start], boxes[end], "masks") for start, end in hidden]
    nodes = [_node(entry, box, url(entry), entry == here) for entry, box in boxes.items()]
    return (
        '<div class="graph">'
        # A group, since an image would hide its links from a screen reader.
        f'<svg role="group" aria-label="graph of causes" width="{width:.0f}" height="{height:.0f}">'
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z"/></marker></defs>{"".join(lines)}{"".join(nodes)}</svg></div>'
    )


def _line(start: Box, end: Box, kind: str) -> str:
    """From the right side of a box to the left side of another; within a column, a curve on the right."""
    x, y = start.x + start.width, start.y + HEIGHT / 2
    v = end.y + HEIGHT / 2
    if start.x == end.x:
        u, first, second = x, x + BETWEEN, x + BETWEEN
    else:
        x, u = (x, end.x) if start.x < end.x else (start.x, end.x + end.width)
        first = second = (x + u) / 2
    path = f"M{x:.0f} {y:.0f}C{first:.0f} {y:.0f} {second:.0f} {v:.0f} {u:.0f} {v:.0f}"
    return f'<path class="{kind}" d="{path}" marker-end="url(#arrow)"/>'


def _node(entry_id: str, box: Box, url: str, is_here: bool) -> str:
    text = f'<text x="{box.x + 10:.0f}" y="{box.y + HEIGHT / 2 + 4:.0f}">{escape(entry_id)}</text>'
    rect = f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{HEIGHT}" rx="4"/>'
    return f'<g class="here">{rect}{text}</g>' if is_here else f'<a href="{escape(url)}">{rect}{text}</a>'
