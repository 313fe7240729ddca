"""Text to terms: English prose, code identifiers, versions and Chinese in one stream.

Every form of a word is stemmed by the same function, so that `ALLGATHER`, `all_gather` and `all-gather` match. An
identifier gives itself as a whole, without separators, and in parts. Chinese gives overlapping bigrams (no dictionary,
no missing words). Offsets let a phrase of parts match a phrase of words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import NamedTuple, TypeVar, TypeVarTuple

from whoosh.lang.porter import stem

ASCII_RUN = r"""
    \d+(?:\.\d+)+ | (?<![\w.\-])-\d+ | 0[xX][0-9a-fA-F]+  # numbers, versions, exit codes
    | [A-Za-z0-9_]+(?:[.\-/:]+[A-Za-z0-9_]+)*  # words and identifiers
"""
CJK_RUN = r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+"
HEXADECIMAL = re.compile(r"0[xX][0-9a-fA-F]+")
SEPARATORS = re.compile(r"[_\-./:]+")
PARTS = re.compile(r"[A-Z]{2,}(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
RELEASE = re.compile(r"\d+(?:\.\d+)+")
VERSION = re.compile(r"v(?=\d+\.)", re.IGNORECASE)
MANGLED = re.compile(r"_Z[A-Z0-9]")
NUMBER = re.compile(r"\d+")
COUNT = re.compile(r"\d+x(?=[A-Z])")
STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """a an and are as at be but by do does for from had has have how i in is it its my of on or our so that the
        then there this to was we were what when where which while why with you your""",
    )
)
LONGEST = 64

MOST_CACHED = 1 << 16

Forms = tuple[tuple[str, int], ...]  # of one run of text: each form with its offset in words
Run = tuple[Forms, int]  # with its width in words


class Term(NamedTuple):
    """One indexed form. `position` counts words; `run` numbers the stretch of text it came from."""

    text: str
    position: int
    run: int
    surface: str
    is_cjk: bool


Made = TypeVar("Made")
More = TypeVarTuple("More")


def _remembered(make: Callable[[str, *More], Made]) -> Callable[[str, *More], Made]:
    """`lru_cache` for words of ordinary length; longer ones rarely come again, and would stay in memory for good."""
    kept = lru_cache(MOST_CACHED)(make)

    def cached(word: str, /, *more: *More) -> Made:
        return kept(word, *more) if len(word) <= LONGEST else make(word, *more)

    return cached


@_remembered
def normal(word: str) -> str:
    """The word in lower case and stemmed; anything but a plain English word is only lower-cased."""
    word = word.lower()
    return str(stem(word)) if word.isascii() and word.isalpha() and 3 < len(word) < 25 else word


def terms(text: str) -> Iterator[Term]:
    """The terms of a text in order. Forms of one identifier share a `run`."""
    position = 0
    for number, surface in enumerate(_surfaces(text)):
        forms, width = _RUNS[surface]
        for form, offset in forms:
            yield Term(form, position + offset, number, surface, _is_cjk(surface))
        position += width


def runs(text: str) -> Iterator[Run]:
    """The forms and width of each run of a text, without what only queries need."""
    return map(_RUNS.__getitem__, _surfaces(text))


def _surfaces(text: str) -> list[str]:
    """The runs of a text as they are written."""
    pattern = ASCII_RUN if text.isascii() else f"{CJK_RUN} | {ASCII_RUN}"
    return _pattern(pattern).findall(normalized(text))


def normalized(text: str) -> str:
    """The text in Unicode's NFKC form, for instance with full-width letters as ASCII."""
    if text.isascii():
        return text
    import unicodedata  # not needed for most searches

    return unicodedata.normalize("NFKC", text)


@cache
def _pattern(pattern: str) -> re.Pattern[str]:
    """A compiled pattern. It is compiled when needed, since 28,000 ideographs take longer than everything else."""
    return re.compile(pattern, re.VERBOSE)


def _is_cjk(surface: str) -> bool:
    return (
        "\u3400" <= surface[0] <= "\u4dbf" or "\u4e00" <= surface[0] <= "\u9fff" or "\uf900" <= surface[0] <= "\ufaff"
    )


class _Runs(dict[str, Run]):
    """A cache of runs by surface; a lookup takes half as long as with `lru_cache`. Long surfaces are not cached."""

    def __missing__(self, surface: str) -> Run:
        forms = _forms_of(surface)
        run = forms, 1 + max(offset for _, offset in forms) if forms else 0
        if len(surface) <= LONGEST:
            if len(self) >= MOST_CACHED:
                self.clear()
            self[surface] = run
        return run


_RUNS = _Runs()


def words(identifier: str) -> tuple[str, ...]:
    """The words of an identifier, stemmed: `fine-tuning` gives `fine tuning`."""
    return tuple(normal(word) for word in SEPARATORS.split(identifier) if word and word.lower() not in STOP_WORDS)


def _forms_of(surface: str) -> Forms:
    if _is_cjk(surface):
        if len(surface) == 1:
            return ((surface, 0),)
        return tuple((surface[i : i + 2], i) for i in range(len(surface) - 1))
    if HEXADECIMAL.fullmatch(surface):
        return ((surface.lower(), 0),)
    if surface[0] == "-":  # an exit code: -9 as written, and 9
        return ((surface, 0), *_identifier_forms(surface.lstrip("-")))
    if MANGLED.match(surface):
        names = (form for name in _mangled_names(surface) for form, _ in _identifier_forms(name))
        return tuple((form, 0) for form in dict.fromkeys((surface.lower(), *names)))
    return _identifier_forms(VERSION.sub("", surface, count=1) if VERSION.match(surface) else surface)


def _mangled_names(symbol: str) -> Iterator[str]:
    """The names in a mangled C++ symbol: `_ZN3c105Error` has c10 and Error, each after its length."""
    at = 0
    while length := NUMBER.search(symbol, at):
        at = length.end() + int(length.group()[:3])
        yield symbol[length.end() : at]


@_remembered
def _identifier_forms(raw: str) -> Forms:
    """(form, offset) for a run of word characters: whole, without separators, and in parts."""
    raw = raw.strip("_-./:")
    if raw.isascii() and raw.isalpha() and (raw.islower() or raw.isupper() or raw.istitle()):
        return () if raw.lower() in STOP_WORDS else ((normal(raw), 0),)
    if raw.replace(".", "").isdigit():
        return tuple((form, 0) for form in _version_forms(raw))
    forms: dict[str, int] = {}

    def add(form: str, offset: int) -> None:
        if 1 < len(form) <= LONGEST:
            forms.setdefault(form, offset)

    add(raw.lower(), 0)
    add(normal(SEPARATORS.sub("", raw)), 0)
    for version in RELEASE.findall(raw):  # torch-2.13.0
        for form in _version_forms(version):
            add(form, 0)
    position = 0
    for segment in filter(None, SEPARATORS.split(raw)):
        position = _segment_forms(segment, position, add)
    return tuple(forms.items())


def _version_forms(number: str) -> list[str]:
    """A version and its first two numbers: 2.18.5 is also found as 2.18."""
    return [number, ".".join(number.split(".")[:2])] if number.count(".") > 1 else [number]


def _segment_forms(segment: str, position: int, add: Callable[[str, int], None]) -> int:
    """Add the parts of a segment, adjacent parts joined, and the segment itself. Returns the next free position."""
    start, before = position, ""
    add(normal(COUNT.sub("", segment)), position)  # 8xA100 has A100
    for part in PARTS.findall(segment):
        is_glued = part != segment
        too_short = is_glued and (len(part) < 3 if part.isalpha() else len(segment) < 6)
        if part.lower() in STOP_WORDS or too_short:  # ZeRO gives no "ze", P2P no "2", bf16 no "16"
            before = ""
            continue
        add(normal(part), position)
        if before and part.isalpha():
            add(normal(before + part), max(position - 1, 0))  # _ALL_GATHER_x gives allgather
        before = part if part.isalpha() else ""
        position += 1
    add(normal(segment), start)
    return max(position, start + 1)
