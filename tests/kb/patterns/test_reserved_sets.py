"""Character sets that `re` warns about, detected without its warning."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kb.patterns.reserved_sets import may_change


def warns(pattern: str) -> bool:
    """Whether `re` warns about a pattern. Raises `re.error`."""
    re.purge()  # it warns once
    with warnings.catch_warnings(record=True) as output:
        warnings.simplefilter("always")
        re.compile(pattern)
    return any(item.category is FutureWarning for item in output)


@pytest.mark.parametrize("pattern", ["[[a]", "[!--a]", "[a&&b]", "x[^a~~b]", "[a||b]", r"[\]&&a]", "[]!--a]"])
def test_sets_that_re_warns_about_are_detected(pattern: str) -> None:
    assert warns(pattern)
    assert may_change(pattern)


@pytest.mark.parametrize(
    "pattern", [r"\[[a]", "[^[a]", "[--a]", "a--b&&c||d", r"[\[[a]", "[a-]--", "[]-a]", "[a-z-9]", ""]
)
def test_other_patterns_are_accepted(pattern: str) -> None:
    assert not warns(pattern)
    assert not may_change(pattern)


@given(st.text("[]^-&~|ab\\.", max_size=12))
def test_it_agrees_with_re(pattern: str) -> None:
    try:
        output = warns(pattern)
    except re.error:
        assume(False)
    assert may_change(pattern) == output
