"""Rules of claims: every one carries a mark, every mark a reference of its grade, every reference is used."""

from __future__ import annotations

from collections.abc import Iterator

from kb.content.grades import GRADES, LIKE_A_MARK, MARK, Grade
from kb.lint.body import Kind
from kb.lint.rule import Draft, EntryRule, Remark

CLAIMING = ("Root cause", "Fix", "Why it works", "Known cases")


def unmarked_claim(draft: Draft) -> Iterator[Remark]:
    """Every paragraph and list item of Root cause, Fix, Why it works and Known cases has a mark, lead-ins apart."""
    texts: dict[int, str] = {}
    for block in draft.blocks(Kind.PROSE, *CLAIMING):
        is_lead_in = not block.item and block.text.rstrip().endswith((":", "："))
        if not is_lead_in:
            start = block.item or block.line
            texts[start] = texts.get(start, "") + " " + block.text
    for line, text in texts.items():
        if not MARK.search(text):
            yield line, f"no mark says how this is known: {' '.join(text.split())[:60]!r}"


def unknown_mark(draft: Draft) -> Iterator[Remark]:
    """Marks are `[probe]`, `[source N]`, `[thread N]`, `[claimed N]` and `[inferred]`."""
    for line, text in _in_brackets(draft):
        if not MARK.fullmatch(text):
            yield line, f"{text} is no mark; words of a log or of code stand between backticks"


def dangling_mark(draft: Draft) -> Iterator[Remark]:
    """The number of a mark is that of a reference, counted from one."""
    for line, word, number in _numbered(draft):
        if number > len(draft.meta.references):
            yield line, f"[{word} {number}]: there are {len(draft.meta.references)} references"


def wrong_grade(draft: Draft) -> Iterator[Remark]:
    """The word of a mark is the grade of its reference."""
    for line, word, number in _numbered(draft):
        if number <= len(draft.meta.references):
            grade = draft.meta.references[number - 1].grade
            if grade is not GRADES[word]:
                yield line, f"[{word} {number}]: reference {number} has the grade {grade.value!r}"


def probe_mark_without_probe(draft: Draft) -> Iterator[Remark]:
    """`[probe]` stands only where there is a probe."""
    for line, text in _in_brackets(draft):
        if text == "[probe]" and not draft.meta.probe:
            yield line, "the entry has no probe that could show this"


def no_reference(draft: Draft) -> Iterator[Remark]:
    """An entry has at least one reference."""
    if not draft.meta.references:
        yield draft.line("references"), "nothing to check the entry against: add a reference"


def duplicate_reference(draft: Draft) -> Iterator[Remark]:
    """No address stands twice with one grade; a thread may show one thing and claim another."""
    seen: dict[tuple[str, Grade], int] = {}
    for number, reference in enumerate(draft.meta.references):
        first = seen.setdefault((reference.url, reference.grade), number)
        if first != number:
            yield draft.line("references", number), f"this is reference {first + 1} again"


def unused_reference(draft: Draft) -> Iterator[Remark]:
    """Every reference is marked somewhere in the body; an inferred one has no mark with a number."""
    used = {number for _, _, number in _numbered(draft)}
    for number, reference in enumerate(draft.meta.references, 1):
        if number not in used and reference.grade is not Grade.INFERRED:
            yield draft.line("references", number - 1), f"reference {number} is never marked in the body"


def _in_brackets(draft: Draft) -> Iterator[tuple[int, str]]:
    """Line and text of every mark, and of what looks like one."""
    for block in draft.texts():
        for found in LIKE_A_MARK.finditer(block.text):
            yield block.line + block.text[: found.start()].count("\n"), found.group()


def _numbered(draft: Draft) -> Iterator[tuple[int, str, int]]:
    for line, text in _in_brackets(draft):
        mark = MARK.fullmatch(text)
        if mark and mark[2]:
            yield line, mark[2], int(mark[3])


RULES: tuple[EntryRule, ...] = (
    unmarked_claim,
    unknown_mark,
    dangling_mark,
    wrong_grade,
    probe_mark_without_probe,
    no_reference,
    duplicate_reference,
    unused_reference,
)
