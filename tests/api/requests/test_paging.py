"""Cursors: given back as they were they go on, and anything else is refused."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kb.errors import UsageError

paging = resolve_name("kb.api.requests.paging")
PRINTABLE = st.characters(exclude_categories=("C", "Z"), include_characters=" ")  # as `str.isprintable` has it


@given(st.text(PRINTABLE, max_size=80))
def test_a_cursor_holds_its_position(place: str) -> None:
    cursor = paging.cursor("a-list", place)
    assert paging.position("a-list", cursor) == place
    assert cursor.replace("-", "").replace("_", "").isalnum()


@given(place=st.integers(0, 10**12), where=st.integers(0, 10), by=st.integers(1, 63))
def test_a_cursor_that_was_changed_is_refused(place: int, where: int, by: int) -> None:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    cursor = paging.cursor("a-list", str(place))
    assume(where < len(cursor))
    changed = letters[(letters.index(cursor[where]) + by) % 64]
    with pytest.raises(UsageError):
        paging.number("a-list", cursor[:where] + changed + cursor[where + 1 :])


@pytest.mark.parametrize("given", ["", "=", "AAAA", "é", "AAAAAAAA", "A" * 400, "\x00"])
def test_a_cursor_that_was_made_up_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="does not belong to this list"):
        paging.position("a-list", given)


def test_a_cursor_of_another_list_is_refused() -> None:
    with pytest.raises(UsageError):
        paging.position("a-list", paging.cursor("another-list", "7"))


def test_without_a_cursor_a_list_begins() -> None:
    assert paging.position("a-list", None) is None
    assert paging.number("a-list", None) is None


def test_a_page_is_full_and_the_last_one_has_no_cursor() -> None:
    shown, following = paging.page("a-list", [5, 4, 3], 2, str)
    assert shown == [5, 4]
    assert paging.number("a-list", following) == 4
    assert paging.page("a-list", [5, 4], 2, str) == ([5, 4], None)
    assert paging.page("a-list", [], 2, str) == ([], None)
