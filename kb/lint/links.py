"""Rules for links: between entries, and from an entry to its probe."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from kb.content.entry import ID, TRANSLATION, Status
from kb.lint.body import Kind
from kb.lint.rule import EntryFile, EntryRule, Remark

LINKS = ("causes", "caused_by", "masked_by")
CLOSE = 0.85
ITEM = re.compile(r"^(\d+)\. ", re.MULTILINE)
NUMBER = re.compile(r"(`[a-z0-9-]+`,? )?\b(fix|cause) (\d+)\b(?: of (`))?", re.IGNORECASE)  # of another entry or this


def unknown_link(file: EntryFile) -> Iterator[Remark]:
    """Every id in causes, caused_by and masked_by is the id of an entry."""
    for line, field, target in _links(file):
        if target not in file.ids:
            near = difflib.get_close_matches(target, file.ids, n=1)
            yield (
                line,
                f"{field}: no entry has the id {target!r}"
                + "".join(f"; did you mean {entry_id!r}?" for entry_id in near),
            )


def link_to_itself(file: EntryFile) -> Iterator[Remark]:
    """No entry links to itself."""
    for line, field, target in _links(file):
        if target == file.entry.id:
            yield line, f"{field}: the entry links to itself"


def circular_link(file: EntryFile) -> Iterator[Remark]:
    """No entry is both a cause and a consequence of another."""
    for number, target in enumerate(file.meta.caused_by):
        if target in file.meta.causes:
            yield file.line("caused_by", number), f"{target!r} is also listed in causes"


def misspelt_id(file: EntryFile) -> Iterator[Remark]:
    """No code span in the body is a misspelt id of an entry."""
    for block in file.texts():
        for line, span in block.spans:
            if span.count("-") < 2 or not ID.fullmatch(span) or span in file.ids:
                continue
            for near in difflib.get_close_matches(span, file.ids, n=1, cutoff=CLOSE):
                yield line, f"no entry has the id `{span}`; did you mean `{near}`?"


def missing_item(file: EntryFile) -> Iterator[Remark]:
    """Every fix or cause that a text or signature names by number exists; 修复 has as many numbers as Fix."""
    entry = file.entry
    counts = {kind: _items(entry.section(section)) for kind, section in (("fix", "Fix"), ("cause", "Root cause"))}
    for position, signature in enumerate(file.meta.signatures):
        if signature.fix > max(1, counts["fix"]):
            yield file.line("signatures", position), f"there is no fix {signature.fix}"
    for section in (entry.sections[name] for name in entry.sections if name != TRANSLATION):
        for match in NUMBER.finditer(section.text):
            other, kind, number, of_other = match.groups()
            if not (other or of_other) and int(number) > counts[kind.lower()]:
                yield section.line + section.text.count("\n", 0, match.start()), f"there is no {kind.lower()} {number}"
    translated = _items(entry.translation().get("修复", ""))
    if translated and translated != counts["fix"]:
        line = next(block.line for block in file.blocks(Kind.HEADING, TRANSLATION) if block.part == "修复")
        yield line, f"修复 has {translated} items, Fix has {counts['fix']}"


def probe_or_waiver(file: EntryFile) -> Iterator[Remark]:
    """Every entry has either a probe or a waiver that gives the reason."""
    if file.meta.probe and file.meta.probe_waiver:
        yield file.line("probe_waiver"), "the entry has a probe: use `probe` or `probe_waiver`, not both"
    if not file.meta.probe and not file.meta.probe_waiver:
        yield file.line("id"), "name the `probe`, or give the reason in `probe_waiver`"


def missing_probe(file: EntryFile) -> Iterator[Remark]:
    """The probe that an entry names exists."""
    if file.meta.probe and file.probe is None:
        yield file.line("probe"), f"probes/{file.meta.probe}.py does not exist"


def probe_name(file: EntryFile) -> Iterator[Remark]:
    """A probe has the name of its entry, with underscores."""
    expected = file.entry.id.replace("-", "_")
    if file.meta.probe and file.meta.probe != expected:
        yield file.line("probe"), f"the probe of this entry must be named {expected!r}"


def confirmed_without_probe(file: EntryFile) -> Iterator[Remark]:
    """A confirmed entry has a probe that shows its mechanism."""
    if file.meta.status is Status.CONFIRMED and not file.meta.probe:
        yield file.line("status"), "an entry without a probe is `reported`"


def _items(text: str) -> int:
    """The number of the last numbered item."""
    return max(map(int, ITEM.findall(text)), default=0)


def _links(file: EntryFile) -> Iterator[tuple[int, str, str]]:
    for field in LINKS:
        for number, target in enumerate(getattr(file.meta, field)):
            yield file.line(field, number), field, target


RULES: tuple[EntryRule, ...] = (
    unknown_link,
    link_to_itself,
    circular_link,
    misspelt_id,
    missing_item,
    probe_or_waiver,
    missing_probe,
    probe_name,
    confirmed_without_probe,
)
