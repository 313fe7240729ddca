"""Splits entries into claims, each with its grade and the addresses where it can be checked.

A claim is the text of the entry up to the marks that end it (`kb.content.graded_text`), unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kb.content.entry import TRANSLATION, Entry
from kb.content.graded_text import Mark, graded_texts
from kb.content.grades import GRADES, Grade

FIRST = ("Root cause", "Fix")  # the sections that a reader needs most
AFTERWARDS = ("How to tell", "Why it works", "Environment", "Symptom", "Known cases")
FIRST_ZH, AFTERWARDS_ZH = ("原因", "修复"), ("判断", "症状", "环境")
CAUSES, FIXES = zip(FIRST, FIRST_ZH, strict=True)

PROBE, STATED = "seen in the probe", "stated"
SIGN = "§"  # begins the section of a citation; nothing else in a context contains it
ENCODED = str.maketrans({"[": "%5B", "]": "%5D", SIGN: "%C2%A7"})  # for the address in a citation
STRENGTH = (
    Grade.INFERRED,
    Grade.CLAIMED,
    PROBE,
    Grade.SOURCE,
    Grade.THREAD,
)  # the grade of a claim is the first of these that its marks have


@dataclass(frozen=True, slots=True)
class Evidence:
    """One mark: its grade, and what shows the claim: the address of a page, or an experiment of the probe."""

    grade: str
    url: str = ""
    experiment: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """One statement of an entry, in Markdown without its marks. `status` is the status of the entry.

    `grade` is `seen in the probe`, `read in source`, `read in thread`, `claimed` or `inferred`; `stated` without a
    mark. If there are several marks, `inferred` or `claimed` decides, since part of the claim is no better known;
    otherwise the strongest does.
    """

    entry: str
    section: str
    status: str
    text: str
    evidence: tuple[Evidence, ...]

    @property
    def grade(self) -> str:
        grades = {evidence.grade for evidence in self.evidence}
        return str(next((grade for grade in STRENGTH if grade in grades), STATED))

    @property
    def references(self) -> tuple[str, ...]:
        """The addresses where the claim can be checked."""
        return tuple(dict.fromkeys(evidence.url for evidence in self.evidence if evidence.url))

    @property
    def citation(self) -> str:
        """`[nan-loss § Fix, seen in the probe: sum; read in thread: https://...]`"""
        shown_by: dict[str, list[str]] = {}
        for evidence in self.evidence:
            shown_by.setdefault(evidence.grade, []).append(evidence.url.translate(ENCODED) or evidence.experiment)
        grades = [": ".join(filter(None, (grade, ", ".join(filter(None, by))))) for grade, by in shown_by.items()]
        return f"[{self.entry} {SIGN} {self.section}, {'; '.join(grades) or f'stated in a {self.status} entry'}]"

    @property
    def cited(self) -> str:
        """The claim and its citation on one line; after a claim with code the citation has its own line.

        The sign of citations in the text becomes a word, so that no claim can forge a citation.
        """
        text = self.text.replace(SIGN, "section")
        return f"{text}\n{self.citation}" if "\n" in text else f"{text} {self.citation}"


@dataclass(frozen=True, slots=True)
class Context:
    """Claims in the order of use, and their text. `truncated`: some claims did not fit."""

    claims: tuple[Claim, ...]
    text: str
    truncated: bool


def context(entries: Iterable[Entry], most: int, *, in_chinese: bool = False) -> Context:
    """The cited claims of some entries, in at most `most` characters. No claim is cut.

    Claims are in the order of the entries, with the causes and fixes of all entries before everything else. The most
    useful claims are chosen first: of each entry the first claim of its cause, then its fix, then the rest of its
    cause. Choosing ends at the first claim that does not fit, once at least one has been chosen.
    """
    entries = tuple(entries)
    headings = [_headings(entry, in_chinese=in_chinese) for entry in entries]
    candidates = [
        claim
        for part in (0, 1)
        for entry, parts in zip(entries, headings, strict=True)
        for claim in claims(entry, parts[part])
    ]
    numbers: list[int] = []
    room = most + 1  # the last line has no newline
    for number in _most_useful_first(candidates):
        size = len(candidates[number].cited) + 1
        if size <= room:
            numbers.append(number)
            room -= size
        elif numbers:
            break
    chosen = tuple(candidates[number] for number in sorted(numbers))
    return Context(chosen, "\n".join(claim.cited for claim in chosen), len(chosen) < len(candidates))


def _headings(entry: Entry, *, in_chinese: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The headings of cause and fix, and the headings after them; English if the entry has no Chinese."""
    is_chinese = in_chinese and TRANSLATION in entry.sections
    return (FIRST_ZH, AFTERWARDS_ZH) if is_chinese else (FIRST, AFTERWARDS)


def _most_useful_first(candidates: list[Claim]) -> list[int]:
    """The indexes of the claims, entry by entry, with causes and fixes before all others."""
    first_causes: dict[str, int] = {}
    places: dict[str, int] = {}

    def rank(number: int) -> tuple[int, int]:
        claim = candidates[number]
        place = places.setdefault(claim.entry, len(places))
        if claim.section in FIXES:
            return place, 1
        if claim.section not in CAUSES:
            return len(candidates), 0
        return place, 0 if first_causes.setdefault(claim.entry, number) == number else 2

    return sorted(range(len(candidates)), key=rank)


def claims(entry: Entry, headings: Iterable[str]) -> Iterator[Claim]:
    """The claims under some headings, or under some parts of the Chinese section, in the order of the headings."""
    for heading in headings:
        for text, marks in graded_texts(_text(entry, heading)):
            evidence = tuple(dict.fromkeys(_evidence(entry, mark) for mark in marks))
            yield Claim(entry.id, heading, entry.meta.status.value, text, evidence)


def _text(entry: Entry, heading: str) -> str:
    if heading in entry.sections:
        return entry.section(heading)
    return entry.translation().get(heading, "")


def _evidence(entry: Entry, mark: Mark) -> Evidence:
    if mark.word == "probe":
        return Evidence(PROBE, experiment=mark.experiment)
    if mark.word == "inferred":
        return Evidence(Grade.INFERRED)
    references = entry.meta.references  # the linter reports a number that no reference has
    return Evidence(GRADES[mark.word], references[mark.number - 1].url if mark.number <= len(references) else "")
