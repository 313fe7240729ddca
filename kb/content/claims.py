"""Entries to claims: what they say, piece by piece, each with how that is known and where it can be checked.

A claim is a text of the entry up to the marks that end it (`kb.content.graded_text`). Nothing is added and none is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from kb.content.entry import Entry
from kb.content.graded_text import Mark, marked
from kb.content.grades import GRADES, Grade

FIRST = ("Root cause", "Fix")  # what a reader came for
AFTERWARDS = ("How to tell", "Why it works", "Environment", "Symptom", "Known cases")
CHINESE = "中文"
FIRST_ZH, AFTERWARDS_ZH = ("原因", "修复"), ("症状", "环境")

PROBE, STATED = "seen in the probe", "stated"
STRENGTH = (Grade.INFERRED, Grade.CLAIMED, PROBE, Grade.SOURCE, Grade.THREAD)  # the first one found is the claim's


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one mark says: how something is known, and the address where that can be checked, or ""."""

    grade: str
    url: str


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing an entry says, in Markdown without its marks. `status` is that of the entry.

    `grade` is `seen in the probe`, `read in source`, `read in thread`, `claimed`, `inferred`, or `stated` where there
    is no mark. Of several marks `inferred` or `claimed` counts, as a part of the claim is no more than that; else the
    strongest.
    """

    entry: str
    section: str
    status: str
    text: str
    evidence: tuple[Evidence, ...]

    @property
    def grade(self) -> str:
        grades = {one.grade for one in self.evidence}
        return str(next((grade for grade in STRENGTH if grade in grades), STATED))

    @property
    def references(self) -> tuple[str, ...]:
        """Where it can be checked."""
        return tuple(dict.fromkeys(one.url for one in self.evidence if one.url))

    @property
    def citation(self) -> str:
        """`[nan-loss § Fix, seen in the probe; read in thread: https://...]`"""
        known: dict[str, list[str]] = {}
        for one in self.evidence:
            known.setdefault(one.grade, []).append(one.url)
        told = [": ".join(filter(None, (grade, ", ".join(filter(None, urls))))) for grade, urls in known.items()]
        return f"[{self.entry} § {self.section}, {'; '.join(told) or f'stated in a {self.status} entry'}]"

    @property
    def cited(self) -> str:
        """The claim on one line that its citation ends; one with code has lines, and the citation is the last."""
        return f"{self.text}\n{self.citation}" if "\n" in self.text else f"{self.text} {self.citation}"


@dataclass(frozen=True, slots=True)
class Context:
    """Claims in the order of use, and the block that they make. `truncated`: there were more than had room."""

    claims: tuple[Claim, ...]
    text: str
    truncated: bool


def context(entries: Iterable[Entry], most: int, *, in_chinese: bool = False) -> Context:
    """The cited claims of some entries in at most `most` characters, whole ones.

    They stand in the order of the entries, cause and fix of all before anything else of any. Those that one needs first
    are given room first: of each entry what the cause is, the fix, the rest of the cause; up to the first that has no
    room, where the very first are passed over if they are too long for any.
    """
    parts = (FIRST_ZH, AFTERWARDS_ZH) if in_chinese else (FIRST, AFTERWARDS)
    entries = tuple(entries)
    found = list(chain.from_iterable(claims(entry, headings) for headings in parts for entry in entries))
    kept: list[int] = []
    room = most + 1  # a line more than there are line ends
    for number in _needed_first(found, *parts[0]):
        size = len(found[number].cited) + 1
        if size <= room:
            kept.append(number)
            room -= size
        elif kept:
            break
    chosen = tuple(found[number] for number in sorted(kept))
    return Context(chosen, "\n".join(claim.cited for claim in chosen), len(kept) < len(found))


def _needed_first(found: list[Claim], cause: str, fix: str) -> list[int]:
    """The numbers of claims that come entry by entry, causes and fixes before all others."""
    causes: dict[str, int] = {}
    places: dict[str, int] = {}

    def need(number: int) -> tuple[int, int]:
        claim = found[number]
        place = places.setdefault(claim.entry, len(places))
        if claim.section == fix:
            return place, 1
        if claim.section != cause:
            return len(found), 0
        return place, 0 if causes.setdefault(claim.entry, number) == number else 2

    return sorted(range(len(found)), key=need)


def claims(entry: Entry, headings: Iterable[str]) -> Iterator[Claim]:
    """The claims under some headings, or under some parts of the Chinese section, in the order of the headings."""
    for heading in headings:
        for text, marks in marked(_text(entry, heading)):
            evidence = tuple(dict.fromkeys(_evidence(entry, mark) for mark in marks))
            yield Claim(entry.id, heading, entry.meta.status.value, text, evidence)


def _text(entry: Entry, heading: str) -> str:
    if heading in entry.sections:
        return entry.section(heading)
    _, _, rest = entry.section(CHINESE).partition(f"### {heading}\n")
    return rest.partition("\n### ")[0]


def _evidence(entry: Entry, mark: Mark) -> Evidence:
    if mark.word == "probe":
        return Evidence(PROBE, "")
    if mark.word == "inferred":
        return Evidence(Grade.INFERRED, "")
    references = entry.meta.references  # a number that none of them has is for the linter to find
    return Evidence(GRADES[mark.word], references[mark.number - 1].url if mark.number <= len(references) else "")
