"""Shell completion of ids, tags, packages and words of closed lists, read directly from the files of entries.

No index is built and no YAML parsed, because a key press must not wait. A file that cannot be read is ignored.
Annotations are not strings here, and patterns are compiled when used, because every search imports this module.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from textwrap import shorten

import typer

from kb.content.area import Area
from kb.content.roots import configured_roots
from kb.errors import KbError

Offers = list[tuple[str, str]]  # words with their meanings

LONGEST_MEANING = 70
TITLE = r"(?m)^title: *(.+)"
TAGS = r"(?m)^tags:(.*(?:\n *- .*)*)"
TAG = r"[\w.+-]*\w"
PACKAGES = r"(?m)^(?:applies_to|fixed_in):(.*(?:\n +.*)*)"
PACKAGE = r"([\w.-]+):"
LANGUAGES = {"en": "English", "zh": "中文"}
AREAS = {area.value: area.meaning for area in Area}
SECTIONS = ("symptom", "environment", "root cause", "how to tell", "fix", "why it works", "known cases")
STATUSES = {
    "confirmed": "its probe reproduces the mechanism",
    "reported": "only threads say so",
    "disputed": "its cause or fix is disputed",
    "withdrawn": "answers no question",
}


def complete_ids(context: typer.Context, incomplete: str) -> Offers:
    return sorted((path.stem, _title(text)) for path, text in _front_matters(context, incomplete))


def complete_tags(context: typer.Context, incomplete: str) -> Offers:
    return _beginning(incomplete, _tags(context))


def complete_frameworks(context: typer.Context, incomplete: str) -> Offers:
    """Values for the framework filter: tags, and packages with a version range in some entry."""
    blocks = (block for _, text in _front_matters(context) for block in re.findall(PACKAGES, text))
    return _beginning(incomplete, {*_tags(context), *(name for block in blocks for name in re.findall(PACKAGE, block))})


def complete_areas(incomplete: str) -> Offers:
    return _explained(incomplete, AREAS)


def complete_statuses(incomplete: str) -> Offers:
    return _explained(incomplete, STATUSES)


def complete_languages(incomplete: str) -> Offers:
    return _explained(incomplete, LANGUAGES)


def complete_sections(incomplete: str) -> Offers:
    return _beginning(incomplete, SECTIONS)


def _tags(context: typer.Context) -> set[str]:
    blocks = (block for _, text in _front_matters(context) for block in re.findall(TAGS, text))
    return {tag for block in blocks for tag in re.findall(TAG, block)}


def _beginning(incomplete: str, words: Iterable[str]) -> Offers:
    return [(word, "") for word in sorted(words) if word.startswith(incomplete.lower())]


def _explained(incomplete: str, meanings: Mapping[str, str]) -> Offers:
    return [(word, _meaning_in_short(meanings[word])) for word, _ in _beginning(incomplete, meanings)]


def _front_matters(context: typer.Context, beginning: str = "") -> Iterator[tuple[Path, str]]:
    """Path and front matter of entries whose file name has this beginning, in all roots including `--root`."""
    with suppress(KbError, OSError):
        for root in configured_roots(tuple(map(Path, context.params.get("roots") or ()))):
            for path in root.entry_files():
                if path.name.startswith(beginning):
                    yield path, path.read_text(encoding="utf-8", errors="replace").partition("\n---")[0]


def _title(front_matter: str) -> str:
    match = re.search(TITLE, front_matter)
    return _meaning_in_short(match[1].strip("'\"")) if match else ""


def _meaning_in_short(text: str) -> str:
    """A meaning on one line, for zsh and fish. Typer reads it as Rich markup, where a bracket would begin a style."""
    return shorten(text, LONGEST_MEANING, placeholder="...").replace("[", "\\[")
