"""The whole graph of causes as SVG, with a frame for each area. Pure: text in, text out.

Areas that lead to others are on the left, areas that follow from them on the right. Arrows that a chain of other arrows
implies are left out, since most incidents end in the same few error messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from kb.content.causes import Edge
from kb.content.causes_svg import HEIGHT, LETTER, Box, arrow, document, node

COLUMNS, SWEEPS = 4, 8
GAP, BETWEEN, HEADING, PADDING, BETWEEN_FRAMES = 6, 72, 24, 8, 16  # pixels

Groups = Mapping[str, Sequence[str]]  # entries by the name of their area


@dataclass(frozen=True, slots=True)
class Frame:
    """Where an area is drawn, in pixels."""

    name: str
    x: float
    y: float
    width: float
    height: float


def causes_map(groups: Groups, edges: Collection[Edge], url: Callable[[str], str], near: Collection[str] = ()) -> str:
    """The graph of these entries and the edges among them; "" without entries. `near` are drawn as neighbours."""
    if not any(groups.values()):
        return ""
    columns = _ordered(_columns(groups, edges), edges)
    frames, boxes = _places(columns)
    width = max(frame.x + frame.width for frame in frames) + BETWEEN  # curves within the last column
    height = max(frame.y + frame.height for frame in frames) + 2
    parts = [*map(_frame, frames), *(arrow(edge, boxes, "causes") for edge in sorted(edges))]
    parts += [node(entry, box, url(entry), "near" if entry in near else "") for entry, box in boxes.items()]
    return document(parts, width, height)


def without_implied(edges: Collection[Edge]) -> list[Edge]:
    """The edges that no other chain of edges implies."""
    followers: dict[str, set[str]] = {}
    for cause, consequence in edges:
        followers.setdefault(cause, set()).add(consequence)
    return [edge for edge in edges if not _is_implied(edge, followers)]


def _is_implied(edge: Edge, followers: Mapping[str, set[str]]) -> bool:
    cause, consequence = edge
    seen, waiting = {cause}, [entry for entry in followers[cause] if entry != consequence]
    while waiting:
        entry = waiting.pop()
        if entry == consequence:
            return True
        if entry not in seen:
            seen.add(entry)
            waiting += followers.get(entry, ())
    return False


def _columns(groups: Groups, edges: Iterable[Edge]) -> list[dict[str, list[str]]]:
    """The areas in columns of about the same height, the areas with more consequences than causes first."""
    area = {entry: name for name, entries in groups.items() for entry in entries}
    balance = dict.fromkeys(groups, 0)
    count = dict.fromkeys(groups, 1)
    for cause, consequence in edges:
        if area[cause] != area[consequence]:
            balance[area[cause]] -= 1
            balance[area[consequence]] += 1
            count[area[cause]] += 1
            count[area[consequence]] += 1
    names = sorted((name for name in groups if groups[name]), key=lambda name: balance[name] / count[name])
    heights = {name: _frame_height(len(groups[name])) + BETWEEN_FRAMES for name in names}
    most = sum(heights.values()) / COLUMNS
    columns: list[dict[str, list[str]]] = [{}]
    above = 0.0
    for name in names:
        if above + heights[name] / 2 > most * len(columns) and len(columns) < COLUMNS:
            columns.append({})
        columns[-1][name] = list(groups[name])
        above += heights[name]
    return [column for column in columns if column]


def _ordered(columns: list[dict[str, list[str]]], edges: Collection[Edge]) -> list[dict[str, list[str]]]:
    """Sort entries within areas, and areas within columns, close to what they link to, so that fewer arrows cross."""
    neighbours: dict[str, list[str]] = {}
    for cause, consequence in edges:
        neighbours.setdefault(cause, []).append(consequence)
        neighbours.setdefault(consequence, []).append(cause)
    for _ in range(SWEEPS):
        for number, column in enumerate(columns):
            heights = _heights(columns, neighbours)
            columns[number] = {
                name: sorted(column[name], key=lambda entry: (heights[entry], entry))
                for name in sorted(column, key=lambda name: fmean(heights[entry] for entry in column[name]))
            }
    return columns


def _heights(
    columns: Sequence[Mapping[str, Sequence[str]]], neighbours: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """The mean height of the entries that each entry links to; its own height if it has no links."""
    y = {entry: box.y for entry, box in _places(columns)[1].items()}
    return {entry: fmean(y[other] for other in neighbours.get(entry, (entry,))) for entry in y}


def _places(columns: Sequence[Mapping[str, Sequence[str]]]) -> tuple[list[Frame], dict[str, Box]]:
    """Lay out the columns from left to right, each centred vertically."""
    heights = [
        sum(_frame_height(len(entries)) + BETWEEN_FRAMES for entries in column.values()) - BETWEEN_FRAMES
        for column in columns
    ]
    frames: list[Frame] = []
    boxes: dict[str, Box] = {}
    x = 2.0
    for column, height in zip(columns, heights, strict=True):
        width = max(len(entry) for entries in column.values() for entry in entries) * LETTER + 20
        y = 2 + (max(heights) - height) / 2
        for name, entries in column.items():
            frames.append(Frame(name, x, y, width + 2 * PADDING, _frame_height(len(entries))))
            for number, entry in enumerate(entries):
                boxes[entry] = Box(x + PADDING, y + HEADING + number * (HEIGHT + GAP), width)
            y += _frame_height(len(entries)) + BETWEEN_FRAMES
        x += width + 2 * PADDING + BETWEEN
    return frames, boxes


def _frame_height(count: int) -> float:
    return HEADING + count * (HEIGHT + GAP) - GAP + PADDING


def _frame(frame: Frame) -> str:
    place = f'x="{frame.x:.0f}" y="{frame.y:.0f}" width="{frame.width:.0f}" height="{frame.height:.0f}" rx="6"'
    text = f'<text x="{frame.x + PADDING:.0f}" y="{frame.y + 16:.0f}">{escape(frame.name)}</text>'
    return f'<g class="area"><rect {place}/>{text}</g>'
