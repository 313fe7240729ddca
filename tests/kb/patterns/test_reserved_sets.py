"""Sets of characters that `re` warns of, found without its warning."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kb.patterns.reserved_sets import may_change


def warned(pattern: str) -> bool:
    """What `re` says. Raises `re.error`."""
    re.purge()  # it says it once
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        re.compile(pattern)
    return any(one.category is FutureWarning for one in said)


@pytest.mark.parametrize("pattern", ["[[a]", "[!--a]", "[a&&b]", "x[^a~~b]", "[a||b]", r"[\]&&a]", "[]!--a]"])
def test_a_set_of_which_re_warns_is_found(pattern: str) -> None:
    assert warned(pattern)
    assert may_change(pattern)


@pytest.mark.parametrize(
    "pattern", [r"\[[a]", "[^[a]", "[--a]", "a--b&&c||d", r"[\[[a]", "[a-]--", "[]-a]", "[a-z-9]", ""]
)
def test_other_patterns_are_left_alone(pattern: str) -> None:
    assert not warned(pattern)
    assert not may_change(pattern)


@given(st.text("[]^-&~|ab\\.", max_size=12))
def test_it_agrees_with_re(pattern: str) -> None:
    try:
        said = warned(pattern)
    except re.error:
        assume(False)
    assert may_change(pattern) == said
