"""Rules of form: headings, languages, lengths, dates, and folklore that must not be pasted."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence

from packaging.utils import canonicalize_name

from kb.content.entry import CHINESE_PARTS, SECTIONS
from kb.lint.body import Block, Kind
from kb.lint.rule import CHINESE, Draft, EntryRule, Remark

LONGEST_CAUSE = 240
LEAST_LOGS = 2
ENGLISH = re.compile(r"[A-Za-z]{2}")
TRANSPORT_FOLKLORE = ("NCCL_P2P_DISABLE=1", "NCCL_IB_DISABLE=1")
CACHE_FOLKLORE = re.compile(r"rm -\w+ (~|\$HOME)/\.cache(/huggingface)?/?\*?(\s|;|&|$)")


def headings(draft: Draft) -> Iterator[Remark]:
    """The body has the eight level-two headings, in their order, and no other."""
    found = [(block.section, block.line) for block in draft.blocks(Kind.HEADING) if block.tag == "h2"]
    yield from _order(found, SECTIONS, 1)


def empty_section(draft: Draft) -> Iterator[Remark]:
    """No section is empty."""
    for block in draft.blocks(Kind.HEADING):
        if block.tag == "h2" and not any(_has_text(other) for other in draft.body if other.section == block.section):
            yield block.line, f"nothing stands under {block.section!r}"


def few_logs(draft: Draft) -> Iterator[Remark]:
    """Symptom has two fenced log blocks at least, of two frameworks, versions or rank layouts."""
    count = sum(block.tag == "log" for block in draft.blocks(Kind.CODE, "Symptom"))
    if "Symptom" in draft.entry.sections and count < LEAST_LOGS:
        yield _heading_line(draft, "Symptom"), f"Symptom shows {count} ```log blocks, {LEAST_LOGS} are needed"


def no_look_alike(draft: Draft) -> Iterator[Remark]:
    """How to tell shows the log of an incident that looks alike, fenced as ```log look-alike."""
    if "How to tell" in draft.entry.sections and not draft.entry.look_alikes:
        yield _heading_line(draft, "How to tell"), "How to tell shows no ```log look-alike block"


def long_cause(draft: Draft) -> Iterator[Remark]:
    """The first sentence of Root cause, which a search result shows, has at most 240 characters."""
    if len(draft.entry.cause) > LONGEST_CAUSE:
        line = next((block.line for block in draft.blocks(Kind.PROSE, "Root cause")), 1)
        yield line, f"the first sentence has {len(draft.entry.cause)} characters, {LONGEST_CAUSE} at most"


def chinese_parts(draft: Draft) -> Iterator[Remark]:
    """中文 has the level-three headings 症状, 环境, 原因 and 修复, in this order, and text under each."""
    if "中文" not in draft.entry.sections:
        return
    found = [(block.part, block.line) for block in draft.blocks(Kind.HEADING, "中文") if block.tag == "h3"]
    yield from _order(found, CHINESE_PARTS, _heading_line(draft, "中文"))
    for part, line in found:
        if not any(_has_text(one) for one in draft.body if (one.section, one.part) == ("中文", part)):
            yield line, f"nothing stands under {part!r}"


def chinese_text(draft: Draft) -> Iterator[Remark]:
    """title_zh and every part of 中文 are written in Chinese."""
    if not CHINESE.search(draft.meta.title_zh):
        yield draft.line("title_zh"), "title_zh has no Chinese"
    parts: dict[str, list[Block]] = {}
    for block in draft.blocks(Kind.PROSE, "中文"):
        parts.setdefault(block.part, []).append(block)
    for part, texts in parts.items():
        if not any(CHINESE.search(text.text) for text in texts):
            yield texts[0].line, f"the text under {part!r} has no Chinese"


def aliases(draft: Draft) -> Iterator[Remark]:
    """At least one alias is Chinese and one English, as both are asked."""
    chinese = [bool(CHINESE.search(alias)) for alias in draft.meta.aliases]
    english = [bool(ENGLISH.search(alias)) and not CHINESE.search(alias) for alias in draft.meta.aliases]
    for language, is_there in (("Chinese", any(chinese)), ("English", any(english))):
        if not is_there:
            yield draft.line("aliases"), f"no alias is {language}"


def reviewed_in_future(draft: Draft) -> Iterator[Remark]:
    """The day of the review has come, somewhere on earth."""
    if draft.meta.reviewed > draft.today + datetime.timedelta(days=1):
        yield draft.line("reviewed"), f"{draft.meta.reviewed} is later than today, {draft.today}"


def unfinished(draft: Draft) -> Iterator[Remark]:
    """No TODO is left in an entry."""
    for number, line in enumerate(draft.source.splitlines(), 1):
        if "TODO" in line:
            yield number, f"to be written: {line.strip().partition('TODO')[2].strip() or 'the whole of it'}"


def package_name(draft: Draft) -> Iterator[Remark]:
    """The packages in applies_to and fixed_in have their normalised names."""
    for field in ("applies_to", "fixed_in"):
        for name in getattr(draft.meta, field):
            if name != canonicalize_name(name):
                yield draft.line(field, name), f"{name!r} is called {canonicalize_name(name)!r}"


def folklore(draft: Draft) -> Iterator[Remark]:
    """No code under Fix deletes the whole cache, and none outside transport turns off P2P or InfiniBand."""
    for block in draft.blocks(Kind.CODE, "Fix"):
        for number, text in enumerate(block.text.splitlines(), 1):
            for words in TRANSPORT_FOLKLORE:
                if words in text and "transport" not in draft.meta.tags:
                    yield block.line + number, f"{words} is no fix here: the entry is not tagged transport"
            if CACHE_FOLKLORE.search(text):
                yield block.line + number, "this deletes every downloaded model and data set: name the one directory"


def _order(found: Sequence[tuple[str, int]], expected: Sequence[str], fallback: int) -> Iterator[Remark]:
    """What is missing, what is too much, or the first heading that is out of its place."""
    names = [name for name, _ in found]
    for name in expected:
        if name not in names:
            yield fallback, f"the heading {name!r} is missing"
    for name, line in found:
        if name not in expected:
            yield line, f"{name!r} is not one of {', '.join(expected)}"
    known = [(name, line) for name, line in found if name in expected]
    for (name, line), should_be in zip(known, sorted(known, key=lambda one: expected.index(one[0])), strict=True):
        if name != should_be[0]:
            yield line, f"{should_be[0]!r} belongs here, before {name!r}"
            return


def _has_text(block: Block) -> bool:
    return block.kind is not Kind.HEADING


def _heading_line(draft: Draft, section: str) -> int:
    return next((block.line for block in draft.blocks(Kind.HEADING, section)), 1)


RULES: tuple[EntryRule, ...] = (
    headings,
    empty_section,
    few_logs,
    no_look_alike,
    long_cause,
    chinese_parts,
    chinese_text,
    aliases,
    reviewed_in_future,
    unfinished,
    package_name,
    folklore,
)
