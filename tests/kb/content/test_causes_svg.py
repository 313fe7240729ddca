"""The graph of causes as SVG: every neighbour is there, as a link that a keyboard reaches."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from kb.content.causes import Graph
from kb.content.causes_svg import neighbourhood

CHAIN = Graph(
    {name: name for name in ("cause", "middle", "consequence", "mask", "alone")},
    (("cause", "middle"), ("middle", "consequence")),
    (("mask", "middle"),),
)


def links(svg: str) -> list[str]:
    return re.findall(r'<a href="([^"]+)"', svg)


def test_the_neighbours_of_an_entry_are_links_and_itself_is_not() -> None:
    svg = neighbourhood(CHAIN, "middle", lambda item: f"/{item}")
    assert sorted(links(svg)) == ["/cause", "/consequence", "/mask"]
    ElementTree.fromstring(svg)


def test_what_hides_an_entry_is_drawn_apart_from_what_causes_it() -> None:
    svg = neighbourhood(CHAIN, "middle", str)
    assert (svg.count('class="causes"'), svg.count('class="masks"')) == (2, 1)


def test_an_entry_without_neighbours_has_no_picture() -> None:
    assert neighbourhood(CHAIN, "alone", str) == ""


def test_links_are_not_hidden_by_the_role_of_an_image() -> None:
    assert 'role="img"' not in neighbourhood(CHAIN, "middle", str)


def test_addresses_are_escaped() -> None:
    assert '"><script>' not in neighbourhood(CHAIN, "middle", lambda _: '/"><script>')
