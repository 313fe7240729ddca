"""The languages of a content root, which `entries/root.toml` declares: `languages = ["en", "zh"]`.

A root without that file is in English. Only `kb lint` and `kb new` use this: readers are shown whatever is there.
"""

from __future__ import annotations

import re
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any

from kb.errors import ContentError

FILE = "root.toml"
CHINESE = re.compile(r"[\u4e00-\u9fff]")  # any character of Chinese text


class Language(StrEnum):
    """A language of entries. Section headings are English in both languages."""

    ENGLISH = "en"
    CHINESE = "zh"


DEFAULT = frozenset({Language.ENGLISH})


def languages(entries: Path) -> frozenset[Language]:
    """The languages of the root with this `entries/` folder. Raises `ContentError` for an invalid declaration."""
    path = entries / FILE
    try:
        return _validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return DEFAULT
    except (OSError, ValueError) as error:
        raise ContentError(path, 1, "root-declaration", str(error)) from None


def _validate(declaration: dict[str, Any]) -> frozenset[Language]:
    unknown = [key for key in declaration if key != "languages"]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; the only key is `languages`")
    values = declaration.get("languages", [])
    if not isinstance(values, list) or not values or not all(value in list(Language) for value in values):
        raise ValueError(f"languages: a list of {', '.join(Language)}, with at least one of them")
    return frozenset(Language(value) for value in values)
