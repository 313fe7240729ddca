"""An entry as Markdown to read: what somebody with a dead job needs, or everything."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from kb.content.actions import action
from kb.content.entry import TRANSLATION, Entry
from kb.content.languages import Language
from kb.content.parser import text_blocks

from .labels import label, value
from .records import record
from .wrapping import cells

CODE = re.compile(r"`([^`\n]+)`")
REFERENCE = re.compile(r" ?\[(?:probe(?: [^\]]+)?|(?:source|thread) \d+)\]")  # marks of checked claims
HOW_TO_TELL = "How to tell"
REST = "`--all` adds logs, look-alikes, environment, reasons, known cases, references."
CLAIM = re.compile(r"\[claimed \d+\]")
SENTENCE = (  # does not end inside code or bold type
    r"(?>`[^`]*`|\*\*.+?\*\*|.)+?"
    r"(?:(?<=[.!?])(?=\s+[^a-z\s])|(?<=[.!?。！？]\*\*)|(?<=[。！？])|(?=\n\n)|\Z)"
)
FIX = re.compile(rf"(\d+)\. {SENTENCE}", re.DOTALL)  # the number and the name of a fix
CAUSE = re.compile(rf"\d+\. (?:\*\*[^*]+\*\* )?{SENTENCE}", re.DOTALL)  # a title says less than the sentence after it
MOST_OF_FIXES = 2100  # columns, about a page of a terminal; the fixes that help most often come first


def sections(entry: Entry, lang: Language) -> dict[str, str]:
    """The sections of an entry by heading, in this language, or in English if it has no translation."""
    translation = entry.translation() if lang is Language.CHINESE else {}
    if translation:
        return translation
    return {heading: section.text for heading, section in entry.sections.items() if heading != TRANSLATION}


def whole_page(entry: Entry, lang: Language, records: Sequence[str]) -> str:
    """Every section in one language, followed by the references. `records` are the verdicts on record."""
    meta = entry.meta
    severity = value(meta.severity, lang)
    facts = [*_facts(entry, severity, lang), ", ".join(meta.tags), entry.origin]
    references = "\n".join(
        f"{number}. {reference.shows} ({value(reference.grade, lang)}): {reference.url}"
        for number, reference in enumerate(meta.references, 1)
    )
    texts = {**sections(entry, lang), label("References", lang): references}
    return _page(entry, lang, facts, texts, records)


def short_page(entry: Entry, lang: Language, records: Sequence[str], ids: Collection[str]) -> str:
    """Cause, how to tell, fix and how to verify it. `ids` are the ids of all entries.

    If the fixes fill more than a page, only the first sentence of the rarer ones is shown. References are omitted
    together with the marks that point to them; claims that nobody checked stay marked.
    """
    severity = label("{} severity", lang).format(value(entry.meta.severity, lang))
    facts = _facts(entry, severity, lang)
    facts += [] if entry.origin == "built-in" else [label("from {}", lang).format(entry.origin)]
    texts = sections(entry, lang)
    others = set(ids) - {entry.id}
    if "Root cause" in texts:
        causes = _named_causes(entry.cause, texts["Root cause"])
        short = {"Cause": causes, HOW_TO_TELL: texts.get(HOW_TO_TELL, ""), "Fix": texts.get("Fix", "")}
        tells, fix, language = HOW_TO_TELL, "Fix", Language.ENGLISH
    else:
        short = {heading: text for heading, text in texts.items() if heading != "环境"}
        tells, fix, language = "判断", "修复", Language.CHINESE
    if tells in short:
        short[tells] = _without_look_alikes(short[tells], others, label("Not this: {}.", language))
    if fix in short:
        short[fix] = _first_fixes(short[fix], entry, language)
    short = {heading: CLAIM.sub("[claimed]", REFERENCE.sub("", text)) for heading, text in short.items() if text}
    return f"{_page(entry, lang, facts, short, records)}\n\n{label(REST, language)}"


def _named_causes(cause: str, text: str) -> str:
    """The root cause in one sentence, and the name of each numbered cause: other sections refer to the numbers."""
    lines = text.splitlines()
    names = [match[0] for start, end, _ in text_blocks(text) if (match := CAUSE.match("\n".join(lines[start:end])))]
    return "\n".join([cause, "", *names])


def _facts(entry: Entry, severity: str, lang: Language) -> list[str]:
    meta = entry.meta
    return [f"`{entry.id}`", value(meta.status, lang), severity, value(meta.area or "", lang)]


def _page(entry: Entry, lang: Language, facts: list[str], texts: dict[str, str], records: Sequence[str]) -> str:
    meta = entry.meta
    title = meta.title_zh if lang is Language.CHINESE else meta.title
    command = f"`kb verify {entry.id}`" if meta.probe else label("no probe: {}", lang).format(meta.probe_waiver)
    verified = [record(line, lang) for line in records]
    texts = {**texts, label("Verify on this machine", lang): "  \n".join(filter(None, [command, *verified]))}
    body = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in texts.items())
    return f"# {title}\n\n{' · '.join(filter(None, facts))}\n\n{body}"


def _without_look_alikes(text: str, ids: Collection[str], not_this: str) -> str:
    """The text of How to tell without what merely tells of other entries, whose ids are listed at the end."""
    lines, kept, others = text.splitlines(), [], []
    blocks = list(text_blocks(text))
    for (start, end, info), (_, _, next_info) in zip(blocks, [*blocks[1:], (0, 0, None)], strict=True):
        block = "\n".join(lines[start:end])
        named = [word for word in CODE.findall(block) if word in ids]
        is_log = "look-alike" in (info or "") or "look-alike" in (next_info or "")
        if is_log or (named and not action(block.lstrip("- "))):
            others += named
        else:
            kept.append(block.rstrip())
    if others:
        kept.append("\n" + not_this.format(", ".join(f"`{other}`" for other in dict.fromkeys(others))))
    return "\n".join(kept)


def _first_fixes(text: str, entry: Entry, lang: Language) -> str:
    """The first fixes in full, up to a page; then the names of the others, and the command that shows them."""
    lines, length, rare = text.splitlines(), 0, []
    for start, end, _ in text_blocks(text):
        if fix := FIX.match("\n".join(lines[start:end])):
            length += sum(map(cells, lines[start:end]))
            if length > MOST_OF_FIXES and fix[1] != "1":
                rare.append((start, end, fix))
    for start, end, fix in reversed(rare):
        lines[start:end] = [fix[0].rstrip(), *([] if lines[end - 1].strip() else [""])]
    if rare:
        command = f"`kb show {entry.id} --section fix{' --lang zh' if lang is Language.CHINESE else ''}`"
        numbers = "-".join(dict.fromkeys((rare[0][2][1], rare[-1][2][1])))
        lines += ["", label("Fix {} in full: {}", lang).format(numbers, command)]
    return "\n".join(lines)
