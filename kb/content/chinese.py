"""Chinese for what the core prints: the values of its closed lists and the sentences that it composes (`chinese.toml`).

JSON documents stay English: the pages and the terminal translate what they show.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path

LONGEST = 4000  # characters of a sentence that is compared with the table
RANKS = re.compile(r"ranks? (\d[\d, -]*(?: and (?:\d[\d-]*|others))?)")  # as `kb.harness.collective` names them


class Dictionary:
    """English to Chinese: `labels` are words; `sentences` have `{}` for what varies, and the first match counts."""

    def __init__(self, labels: Mapping[str, str], sentences: Mapping[str, str]) -> None:
        self.labels = labels
        self.sentences = sentences

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str]]:
        return [(_pattern(english), chinese) for english, chinese in self.sentences.items()]

    def label(self, value: str) -> str:
        """Translate a value of a closed list, or a list of ranks; anything else is returned unchanged."""
        return self.labels.get(value) or _ranks(value)

    def sentence(self, text: str) -> str:
        """Translate a sentence; "" if the table does not have it."""
        if len(text) > LONGEST:
            return ""
        matches = ((pattern.fullmatch(text), chinese) for pattern, chinese in self._patterns)
        return next((chinese.format(*map(self.label, match.groups())) for match, chinese in matches if match), "")


@cache
def dictionary() -> Dictionary:
    """The dictionary of the core."""
    tables = tomllib.loads(Path(__file__).with_name("chinese.toml").read_text("utf-8"))
    return Dictionary(tables["labels"], tables["sentences"])


def _pattern(sentence: str) -> re.Pattern[str]:
    return re.compile("(.*?)".join(map(re.escape, sentence.split("{}"))), re.DOTALL)


def _ranks(value: str) -> str:
    match = RANKS.fullmatch(value)
    if not match:
        return value
    listed = match[1].replace(" and others", " 等").replace(" and ", "、").replace(", ", "、")
    return f"rank {listed}"
