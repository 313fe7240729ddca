"""kb.content.entry: what the front matter of an entry may hold."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from kb.content.entry import Regex

PATTERN: TypeAdapter[Any] = TypeAdapter(Regex)


@pytest.mark.parametrize(
    "pattern", ["rank (", "a**", "[z-a]", r"(?P<rank>\d+)(?P<rank>\d+)", r"\1", "(?<=a+)b", "(?<!a|bc)d"]
)
def test_a_pattern_that_does_not_compile_is_refused(pattern: str) -> None:
    with pytest.raises(re.error):
        re.compile(pattern)
    with pytest.raises(ValidationError, match="not a regular expression"):
        PATTERN.validate_python(pattern)


@pytest.mark.parametrize("pattern", [r"rank \d+ timed out", "(?<=rank )0", "(?<!ab)c"])
def test_a_pattern_that_compiles_is_accepted(pattern: str) -> None:
    assert PATTERN.validate_python(pattern) == pattern
