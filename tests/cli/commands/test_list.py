"""`kb list`: the entries by area, those of a private root without an area last."""

from __future__ import annotations

import re

from kb.content.area import Area
from tests.support.console import ContentRoot, Kb

HEADING = re.compile(r"^(\w+)(?:: .+| area)$", re.MULTILINE)


def test_the_list_is_grouped_by_area_in_the_order_of_the_areas(kb: Kb, content: ContentRoot) -> None:
    entry = content.entry("older-than-areas")
    entry.write_text(entry.read_text().replace("area: data\n", ""))
    printed = kb("list").out
    assert HEADING.findall(printed) == [*Area, "no"]
    assert printed.index("no area\n") < printed.index("  older-than-areas")
    documents = {document["id"]: document for document in kb("list", "--json").json["entries"]}
    assert documents["older-than-areas"]["area"] is None
    assert documents["address-in-use"]["area"] == "launch"
    assert list(documents) == sorted(documents)


def test_a_list_of_one_area_has_its_entries_only(kb: Kb, content: ContentRoot) -> None:
    content.entry("broken-thing")
    documents = kb("list", "--area", "Data", "--area", "launch", "--json").json["entries"]
    assert {document["area"] for document in documents} == {"data", "launch"}
    assert "broken-thing" in {document["id"] for document in documents}
    refused = kb("list", "--area", "disks", "--json")
    assert refused.code == 2
    assert refused.json["error"]["hint"] == f"one of {', '.join(sorted(Area))}"
