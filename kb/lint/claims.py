"""Rules for claims: each has a mark, each mark a reference of the same grade, and each reference is cited."""

from __future__ import annotations

from collections.abc import Iterator

from kb.content.grades import GRADES, LIKE_A_MARK, MARK, Grade
from kb.lint.body import Kind
from kb.lint.rule import EntryFile, EntryRule, EntryText, Remark, TextRule

CLAIMING = ("Root cause", "Fix", "Why it works", "Known cases")


def unmarked_claim(file: EntryText) -> Iterator[Remark]:
    """Every paragraph and list item of Root cause, Fix, Why it works and Known cases has a mark, except lead-ins."""
    texts: dict[int, str] = {}
    for block in file.blocks(Kind.PROSE, *CLAIMING):
        is_lead_in = not block.item and block.text.rstrip().endswith((":", "："))
        if not is_lead_in:
            start = block.item or block.line
            texts[start] = texts.get(start, "") + " " + block.text
    for line, text in texts.items():
        if not MARK.search(text):
            yield line, f"no mark says how this is known: {' '.join(text.split())[:60]!r}"


def unknown_mark(file: EntryText) -> Iterator[Remark]:
    """Marks are `[probe NAME]`, `[source N]`, `[thread N]`, `[claimed N]` and `[inferred]`."""
    for line, text in _in_brackets(file):
        if not MARK.fullmatch(text):
            yield line, f"{text} is not a mark; put words of a log or of code between backticks"


def dangling_mark(file: EntryFile) -> Iterator[Remark]:
    """The number of a mark is the number of a reference, counted from one."""
    for line, word, number in _numbered(file):
        if number > len(file.meta.references):
            yield line, f"[{word} {number}]: the entry has only {len(file.meta.references)} references"


def wrong_grade(file: EntryFile) -> Iterator[Remark]:
    """The word of a mark is the grade of its reference."""
    for line, word, number in _numbered(file):
        if number <= len(file.meta.references):
            grade = file.meta.references[number - 1].grade
            if grade is not GRADES[word]:
                yield line, f"[{word} {number}]: reference {number} has the grade {grade.value!r}"


def unknown_experiment(file: EntryFile) -> Iterator[Remark]:
    """`[probe NAME]` names an experiment of the entry's probe, or `check`."""
    declaration = file.probe.declaration if file.probe and not file.probe.faults else None
    names = [experiment.name for experiment in declaration.every] if declaration else []
    names += ["check"] if declaration and declaration.check else []
    for line, text in _in_brackets(file):
        mark = MARK.fullmatch(text)
        if not mark or not mark["probe"]:
            continue
        if not file.meta.probe:
            yield line, "the entry has no probe to show this"
        elif not mark["experiment"] or (declaration and mark["experiment"] not in names):
            yield line, f"{text} does not say what shows this: name one of {', '.join(names) or 'its experiments'}"


def no_reference(file: EntryFile) -> Iterator[Remark]:
    """An entry has at least one reference."""
    if not file.meta.references:
        yield file.line("references"), "the entry cannot be checked: add a reference"


def duplicate_reference(file: EntryFile) -> Iterator[Remark]:
    """No URL is listed twice with the same grade; a thread may show one thing and claim another."""
    seen: dict[tuple[str, Grade], int] = {}
    for number, reference in enumerate(file.meta.references):
        first = seen.setdefault((reference.url, reference.grade), number)
        if first != number:
            yield file.line("references", number), f"this repeats reference {first + 1}"


def unused_reference(file: EntryFile) -> Iterator[Remark]:
    """Every reference is cited by a mark in the body, except inferred ones, whose marks have no number."""
    used = {number for _, _, number in _numbered(file)}
    for number, reference in enumerate(file.meta.references, 1):
        if number not in used and reference.grade is not Grade.INFERRED:
            yield file.line("references", number - 1), f"no mark in the body cites reference {number}"


def _in_brackets(file: EntryText) -> Iterator[tuple[int, str]]:
    """The line and text of every mark, and of everything that looks like one."""
    for block in file.texts():
        for match in LIKE_A_MARK.finditer(block.text):
            yield block.line + block.text.count("\n", 0, match.start()), match.group()


def _numbered(file: EntryFile) -> Iterator[tuple[int, str, int]]:
    for line, text in _in_brackets(file):
        mark = MARK.fullmatch(text)
        if mark and mark["number"]:
            yield line, mark["word"], int(mark["number"])


TEXT_RULES: tuple[TextRule, ...] = (
    unmarked_claim,
    unknown_mark,
)
RULES: tuple[EntryRule, ...] = (
    *TEXT_RULES,
    dangling_mark,
    wrong_grade,
    unknown_experiment,
    no_reference,
    duplicate_reference,
    unused_reference,
)
