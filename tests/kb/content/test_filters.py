"""Filters of lists; tests/kb/search/test_search_filters.py has those of searches."""

from __future__ import annotations

from typing import Any

import pytest

from kb.content.filters import Filter
from kb.errors import UsageError


def document(name: str, *tags: str, status: str = "confirmed", frameworks: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"id": name, "tags": tags, "frameworks": frameworks, "status": status}


DOCUMENTS = [
    document("new", "storage", "FSDP", frameworks=("torch",)),
    document("folklore", "transport", "folklore", status="withdrawn"),
    document("old", "storage", status="reported", frameworks=("flash-attn",)),
]


def listed(only: Filter) -> list[str]:
    return [item["id"] for item in only.listed(iter(DOCUMENTS))]


def test_a_list_shows_withdrawn_entries_under_their_status_only() -> None:
    assert listed(Filter()) == ["new", "old"]
    assert listed(Filter.of(statuses=["withdrawn"])) == ["folklore"]
    assert listed(Filter.of(statuses=["Withdrawn", "reported"])) == ["folklore", "old"]


def test_a_list_is_filtered_as_a_search_is() -> None:
    assert listed(Filter.of(["Storage"])) == ["new", "old"]
    assert listed(Filter.of(["storage", "fsdp"])) == ["new"]
    assert listed(Filter.of(frameworks=["torch", "flash_attn"])) == ["new", "old"]
    assert listed(Filter.of(["storage"], ["torch"], ["reported"])) == []


def test_what_only_a_withdrawn_entry_has_is_known_and_not_shown() -> None:
    assert listed(Filter.of(["folklore"])) == []
    assert listed(Filter.of(["folklore"], statuses=["withdrawn"])) == ["folklore"]
    assert listed(Filter.of(["storage"], statuses=["withdrawn"])) == []


@pytest.mark.parametrize(
    ("only", "message", "hint"),
    [
        (Filter.of(["storge"]), "no entry has the tag 'storge'", "nearest: storage"),
        (Filter.of(frameworks=["pytroch"]), "no entry has the framework 'pytroch'", "nearest: torch"),
        (Filter.of(statuses=["conf"]), "no entry has the status 'conf'", "confirmed, disputed, reported, withdrawn"),
        (Filter.of(areas=["disks"]), "no entry has the area 'disks'", "one of checkpoint, collectives, data"),
    ],
)
def test_a_list_of_what_no_entry_has_is_an_error_with_the_nearest(only: Filter, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        listed(only)
    assert message in raised.value.message
    assert hint in raised.value.hint
