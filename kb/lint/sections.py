"""Rules for form: headings, languages, lengths, dates, and folklore that nobody should paste."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence

from packaging.utils import canonicalize_name

from kb.content.area import Area
from kb.content.entry import CHINESE_PARTS, SECTIONS, TRANSLATION
from kb.content.facets import FACETS
from kb.content.grades import without_marks
from kb.content.languages import CHINESE, Language
from kb.lint.body import Block, Kind
from kb.lint.rule import EntryFile, EntryRule, EntryText, Remark, TextRule
from kb.printable import printable

LONGEST_CAUSE = 240
LONGEST_TEXT = 1_000
LEAST_LOGS = 2
HALF_WIDTH = re.compile(rf"{CHINESE.pattern}[,;:?!(]|[,;:?!)]{CHINESE.pattern}|{CHINESE.pattern}\.(?=\s|$)")
ENGLISH = re.compile(r"[A-Za-z]{2}")
NAME = re.compile(  # the name of a function, option, file, class or status
    r"(?<![\w./-])(?:[A-Za-z]\w*(?:[._]\w*[A-Za-z]\w*)+|_\w{3,}|[A-Z][a-z0-9]+(?:[A-Z]+[a-z0-9]+)+|[A-Z]{3,}\d*)(?![\w-])"
)
TRANSPORT_FOLKLORE = ("NCCL_P2P_DISABLE=1", "NCCL_IB_DISABLE=1")
CACHE_FOLKLORE = re.compile(r"rm -\w+ (~|\$HOME)/\.cache(/huggingface)?/?\*?(\s|;|&|$)")


def headings(file: EntryText) -> Iterator[Remark]:
    """The body has exactly the level-two headings, in order; 中文 is required in a root with two languages."""
    present = [(block.section, block.line) for block in file.blocks(Kind.HEADING) if block.tag == "h2"]
    optional = () if file.is_translated else (TRANSLATION,)
    yield from _order(present, SECTIONS, 1, optional)


def empty_section(file: EntryText) -> Iterator[Remark]:
    """No section is empty."""
    for block in file.blocks(Kind.HEADING):
        if block.tag == "h2" and not any(_has_text(other) for other in file.body if other.section == block.section):
            yield block.line, f"the section {block.section!r} is empty"


def few_logs(file: EntryText) -> Iterator[Remark]:
    """Symptom has at least two fenced log blocks, of two frameworks, versions or rank layouts."""
    count = sum(block.tag == "log" for block in file.blocks(Kind.CODE, "Symptom"))
    if "Symptom" in file.sections and count < LEAST_LOGS:
        yield _heading_line(file, "Symptom"), f"Symptom has {count} ```log blocks; at least {LEAST_LOGS} are required"


def no_look_alike(file: EntryText) -> Iterator[Remark]:
    """How to tell shows the log of a similar incident, fenced as ```log look-alike."""
    has_look_alike = any(block.tag == "log look-alike" for block in file.blocks(Kind.CODE))
    if "How to tell" in file.sections and not has_look_alike:
        yield _heading_line(file, "How to tell"), "How to tell has no ```log look-alike block"


def long_cause(file: EntryFile) -> Iterator[Remark]:
    """The first sentence of Root cause, which a search result shows, has at most 240 characters."""
    if len(file.entry.cause) > LONGEST_CAUSE:
        line = next((block.line for block in file.blocks(Kind.PROSE, "Root cause")), 1)
        yield line, f"the first sentence has {len(file.entry.cause)} characters; the limit is {LONGEST_CAUSE}"


def long_text(file: EntryText) -> Iterator[Remark]:
    """The English text has at most 1,000 words outside logs and code, because its reader has a minute."""
    words = sum(
        len(without_marks(block.text).split())
        for block in file.body
        if block.kind is not Kind.CODE and block.section != TRANSLATION
    )
    if words > LONGEST_TEXT:
        yield _heading_line(file, "Symptom"), f"the text has {words} words; the limit is {LONGEST_TEXT}"


def chinese_parts(file: EntryText) -> Iterator[Remark]:
    """中文 has the level-three headings 症状, 环境, 原因, 修复 and 判断, in this order, and text under each."""
    if TRANSLATION not in file.sections:
        return
    present = [(block.part, block.line) for block in file.blocks(Kind.HEADING, TRANSLATION) if block.tag == "h3"]
    yield from _order(present, CHINESE_PARTS, _heading_line(file, TRANSLATION))
    for part, line in present:
        if not any(_has_text(block) for block in file.body if (block.section, block.part) == (TRANSLATION, part)):
            yield line, f"the part {part!r} is empty"


def chinese_text(file: EntryFile) -> Iterator[Remark]:
    """title_zh and every part of 中文 are written in Chinese; a root with two languages requires title_zh."""
    if ("title_zh",) in file.entry.lines and not CHINESE.search(file.meta.title_zh):
        yield file.line("title_zh"), "title_zh is not in Chinese"
    elif file.is_translated and ("title_zh",) not in file.entry.lines:
        yield file.line("title"), "title_zh is missing: the root is written in English and Chinese"
    parts: dict[str, list[Block]] = {}
    for block in file.blocks(Kind.PROSE, TRANSLATION):
        parts.setdefault(block.part, []).append(block)
    for part, texts in parts.items():
        if not any(CHINESE.search(text.text) for text in texts):
            yield texts[0].line, f"the text under {part!r} is not in Chinese"


def half_width_punctuation(file: EntryText) -> Iterator[Remark]:
    """Punctuation next to a Chinese character is full-width in 中文."""
    for block in file.blocks(Kind.PROSE, TRANSLATION):
        for match in HALF_WIDTH.finditer(block.text):
            yield block.line + block.text.count("\n", 0, match.start()), f"{match[0]!r} has half-width punctuation"


def aliases(file: EntryFile) -> Iterator[Remark]:
    """At least one alias is in each language of the root, because people search in all of them."""
    chinese = {alias for alias in file.meta.aliases if CHINESE.search(alias)}
    english = {alias for alias in file.meta.aliases if ENGLISH.search(alias)} - chinese
    for language, written in ((Language.CHINESE, chinese), (Language.ENGLISH, english)):
        if language in file.languages and not written:
            yield file.line("aliases"), f"no alias is in {language.name.capitalize()}"


def hollow_alias(file: EntryFile) -> Iterator[Remark]:
    """Every name in an alias also occurs in the title, a signature or the body."""
    signatures = (text for each in file.meta.signatures for text in (each.pattern, each.sample, each.source))
    held = "\n".join(
        [file.meta.title, file.meta.title_zh, *signatures, *map(file.entry.section, file.sections)]
    ).lower()
    for alias in file.meta.aliases:
        for name in dict.fromkeys(NAME.findall(alias)):
            if name.lower() not in held:
                yield file.line("aliases"), f"the alias {alias!r} names {name}, of which the entry says nothing"


def missing_area(file: EntryFile) -> Iterator[Remark]:
    """Every entry has an area: the part of a training job that it is about."""
    if file.meta.area is None:
        yield file.line("id"), f"add `area:`, one of {', '.join(Area)}"


def missing_facet(file: EntryFile) -> Iterator[Remark]:
    """Every entry has symptoms, phases and components, which tell a search what the entry is not about."""
    for name, facet in FACETS.items():
        if not getattr(file.meta, name):
            yield file.line("id"), f"add `{name}:`, some of {', '.join(facet)}"


def reviewed_in_future(file: EntryFile) -> Iterator[Remark]:
    """The date of the review is not in the future, in any time zone."""
    if file.meta.reviewed > file.today + datetime.timedelta(days=1):
        yield file.line("reviewed"), f"{file.meta.reviewed} is in the future: today is {file.today}"


def unfinished(file: EntryText) -> Iterator[Remark]:
    """No TODO is left in an entry."""
    for number, line in enumerate(file.source.splitlines(), 1):
        if "TODO" in line:
            yield number, f"to do: {line.strip().partition('TODO')[2].strip() or 'everything here'}"


def package_name(file: EntryFile) -> Iterator[Remark]:
    """The packages in applies_to and fixed_in have normalised names."""
    for field in ("applies_to", "fixed_in"):
        for name in getattr(file.meta, field):
            if name != canonicalize_name(name):
                yield file.line(field, name), f"{name!r} must be written {canonicalize_name(name)!r}"


def folklore(file: EntryFile) -> Iterator[Remark]:
    """No code under Fix deletes the whole cache, and none outside transport turns off P2P or InfiniBand."""
    for block in file.blocks(Kind.CODE, "Fix"):
        for number, text in enumerate(block.text.splitlines(), 1):
            for words in TRANSPORT_FOLKLORE:
                if words in text and "transport" not in file.meta.tags:
                    yield block.line + number, f"{words} is not a fix here: the entry does not have the tag transport"
            if CACHE_FOLKLORE.search(text):
                yield block.line + number, "this deletes every downloaded model and dataset: delete one directory only"


def _order(
    present: Sequence[tuple[str, int]], expected: Sequence[str], fallback: int, optional: Sequence[str] = ()
) -> Iterator[Remark]:
    """Yield missing headings, unknown headings, and the first heading that is out of order."""
    names = [name for name, _ in present]
    for name in expected:
        if name not in names and name not in optional:
            yield fallback, f"the heading {name!r} is missing"
    for name, line in present:
        if name not in expected:
            yield line, f"{name!r} is not one of {', '.join(expected)}"
    known = [(name, line) for name, line in present if name in expected]
    ordered = [name for name in expected for other, _ in known if other == name]
    for (name, line), expected_name in zip(known, ordered, strict=True):
        if name != expected_name:
            yield line, f"{expected_name!r} must come before {name!r}"
            return


def _has_text(block: Block) -> bool:
    return block.kind is not Kind.HEADING


def _heading_line(file: EntryText, section: str) -> int:
    return next((block.line for block in file.blocks(Kind.HEADING, section)), 1)


def hidden_text(file: EntryText) -> Iterator[Remark]:
    """An entry has no control characters, invisible characters or changes of text direction."""
    for number, line in enumerate(file.source.replace("\r\n", "\n").split("\n"), 1):
        if (shown := printable(line)) != line:
            yield number, f"it has characters that nobody sees: {shown.strip()[:80]}"


TEXT_RULES: tuple[TextRule, ...] = (
    hidden_text,
    headings,
    empty_section,
    few_logs,
    no_look_alike,
    long_text,
    chinese_parts,
    half_width_punctuation,
    unfinished,
)
RULES: tuple[EntryRule, ...] = (
    *TEXT_RULES,
    long_cause,
    chinese_text,
    aliases,
    hollow_alias,
    missing_area,
    missing_facet,
    reviewed_in_future,
    package_name,
    folklore,
)
