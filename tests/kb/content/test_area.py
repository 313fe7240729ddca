"""The built-in entries in order: each has an area, no area is empty, and a tag groups at least two of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kb.content.area import Area
from kb.content.catalog import load_catalog
from kb.content.filters import Filter
from kb.content.parser import parse_entry
from kb.content.roots import builtin_root
from tests.support.console import ENTRY

CATALOG = load_catalog((builtin_root(),))


def test_every_built_in_entry_has_an_area_and_every_area_an_entry() -> None:
    assert {entry.meta.area for entry in CATALOG} == set(Area)


def test_a_tag_is_shared_by_at_least_two_built_in_entries() -> None:
    counts = Counter(tag for entry in CATALOG for tag in set(entry.meta.tags))
    assert [tag for tag, count in counts.items() if count < 2] == []


def test_no_tag_differs_from_another_only_in_number() -> None:
    tags = {tag for entry in CATALOG for tag in entry.meta.tags}
    assert {tag for tag in tags if f"{tag}s" in tags} == {"tokenizer"}  # `tokenizers` is the package


def test_the_areas_are_few_and_their_meanings_fit_a_line() -> None:
    assert 8 <= len(Area) <= 12
    for area in Area:
        assert area.value.isalpha()
        assert 10 < len(area.meaning) < 100


@pytest.mark.parametrize(("line", "area"), [("area: data\n", Area.DATA), ("", None)])
def test_an_entry_of_a_private_root_may_lack_an_area(line: str, area: Area | None) -> None:
    text = ENTRY.format(id="thing", title="The thing", extra="probe_waiver: a test\n", symptom="It broke.")
    entry = parse_entry(text.replace("area: data\n", line).encode(), Path("/content/entries/thing.md"), "private")
    assert entry.meta.area is area
    assert entry.summary()["area"] == entry.to_json()["area"] == (area and area.value)
    documents = [entry.summary()]
    assert Filter().listed(documents) == documents
    assert Filter.of(areas=["Data"]).listed(documents) == (documents if area else [])
    assert Filter.of(areas=["data", "launch"]).admitted({0: documents[0]}) == ({0} if area else set())
