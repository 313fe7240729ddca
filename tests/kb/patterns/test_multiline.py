"""How far a match of a pattern may reach."""

from __future__ import annotations

import pytest

from kb.patterns.multiline import looks_behind, spans_lines, spans_text


@pytest.mark.parametrize(
    "pattern, lines, text",
    [
        (r"boom \d+.*", False, False),
        (r"boom\s+\d", True, False),
        (r"boom\n\d", True, True),
        (r"boom[^\n]{0,9}x", False, False),
        (r"boom[^,]{0,9}x", True, True),
        (r"boom(?:[\s\S]{0,9}|y)x", True, True),
        (r"(?s)boom.x", True, True),
        (r"boom\Dx", True, True),
    ],
)
def test_matches_over_several_lines(pattern: str, lines: bool, text: bool) -> None:
    assert (spans_lines(pattern), spans_text(pattern)) == (lines, text)


@pytest.mark.parametrize("pattern, expected", [(r"^boom", True), (r"(?<!no )boom", True), (r"[^a]boom\^", False)])
def test_patterns_that_depend_on_the_text_before_them(pattern: str, expected: bool) -> None:
    assert looks_behind(pattern) is expected
