"""The whole graph of causes: every entry in the frame of its area, nothing on top of anything else."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from kb.content.causes import Edge
from kb.content.causes_map import causes_map, without_implied

Rectangle = tuple[float, float, float, float]

AREAS = {"data": ["a", "b"], "network": ["c"], "launch": ["d", "e"]}
EDGES = [("a", "c"), ("c", "d"), ("b", "d"), ("d", "e"), ("e", "d")]


def rectangles(svg: str, kind: str) -> list[Rectangle]:
    """The boxes (`a`) or the frames (`g`) of a picture: left, top, right, bottom."""
    root = ElementTree.fromstring(svg)
    boxes = [next(iter(element.findall("rect"))) for element in root.iter(kind) if element.find("rect") is not None]
    places = [{name: float(rect.get(name, "")) for name in ("x", "y", "width", "height")} for rect in boxes]
    return [(place["x"], place["y"], place["x"] + place["width"], place["y"] + place["height"]) for place in places]


def overlap(box: Rectangle, other: Rectangle) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def test_entries_are_links_within_the_frame_of_their_area_and_nothing_overlaps() -> None:
    svg = causes_map(AREAS, EDGES, lambda entry: f"/{entry}")
    assert sorted(re.findall(r'<a href="/([a-e])"', svg)) == list("abcde")
    boxes, frames = rectangles(svg, "a"), rectangles(svg, "g")
    assert len(frames) == 3
    assert not any(overlap(box, other) for group in (boxes, frames) for box, other in combinations(group, 2))
    for box in boxes:
        assert any(
            frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3] for frame in frames
        )


def test_what_follows_is_on_the_right_of_its_cause() -> None:
    svg = causes_map({"launch": ["z"], "data": ["a"]}, [("a", "z")], str)
    (end, start) = sorted(rectangles(svg, "a"), reverse=True)
    assert svg.index(f'x="{start[0]:.0f}"') and start[2] < end[0]
    assert re.findall(r'<a href="(.)"', svg) == ["a", "z"]


def test_a_graph_without_entries_has_no_picture() -> None:
    assert causes_map({}, [], str) == ""


NODES = st.sampled_from("abcdef")


def reachable(edges: list[Edge]) -> set[Edge]:
    closure = set(edges)
    while more := {(a, d) for a, b in closure for c, d in closure if b == c} - closure:
        closure |= more
    return closure


@given(st.lists(st.tuples(NODES, NODES).filter(lambda edge: edge[0] < edge[1]), unique=True))
def test_what_is_not_drawn_is_implied_by_what_is(edges: list[Edge]) -> None:
    drawn = without_implied(edges)
    assert reachable(drawn) == reachable(edges)
    assert all(reachable([other for other in drawn if other != edge]) != reachable(edges) for edge in drawn)
