"""An entry as Markdown to read: what one needs beside a dead job, or everything."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from kb.content.entry import TRANSLATION, Entry
from kb.content.parser import text_blocks

CODE = re.compile(r"`([^`\n]+)`")
REFERENCE = re.compile(r" ?\[(?:probe(?: [^\]]+)?|(?:source|thread) \d+)\]")  # where somebody checked it
CLAIM = re.compile(r"\[claimed \d+\]")


def sections(entry: Entry, lang: str) -> dict[str, str]:
    """The text in this language, by heading. What has no Chinese text is there as it was written."""
    translation = entry.translation() if lang == "zh" else {}
    if translation:
        return translation
    return {heading: section.text for heading, section in entry.sections.items() if heading != TRANSLATION}


def whole_page(entry: Entry, lang: str, records: Sequence[str]) -> str:
    """Every section of one language, and the references that its marks point to. `records`: verdicts on record."""
    meta = entry.meta
    facts = [f"`{entry.id}`", meta.status, meta.severity, meta.area or "", ", ".join(meta.tags), entry.origin]
    references = "\n".join(
        f"{number}. {reference.shows} ({reference.grade}): {reference.url}"
        for number, reference in enumerate(meta.references, 1)
    )
    texts = {**sections(entry, lang), "参考" if lang == "zh" else "References": references}
    return _page(entry, lang, facts, texts, records)


def short_page(entry: Entry, lang: str, records: Sequence[str], ids: Collection[str]) -> str:
    """Cause, how to tell, fix and how to verify it. `ids` are those of all entries.

    Marks that point to references are left out with them; what nobody checked is still marked.
    """
    meta = entry.meta
    facts = [f"`{entry.id}`", meta.status, f"{meta.severity} severity", meta.area or ""]
    facts += [] if entry.origin == "built-in" else [f"from {entry.origin}"]
    texts = sections(entry, lang)
    others = set(ids) - {entry.id}
    if "Root cause" in texts:
        how_to_tell = _without_look_alikes(texts.get("How to tell", ""), others)
        short = {"Cause": entry.cause, "How to tell": how_to_tell, "Fix": texts.get("Fix", "")}
        rest = "`--all` adds logs, look-alikes, environment, reasons, known cases, references."
    else:
        short = {heading: text for heading, text in texts.items() if heading != "环境"}
        if "判断" in short:
            short["判断"] = _without_look_alikes(short["判断"], others, "不是：{}。")
        rest = "`--all` 另有环境和参考。"
    short = {heading: CLAIM.sub("[claimed]", REFERENCE.sub("", text)) for heading, text in short.items() if text}
    return f"{_page(entry, lang, facts, short, records)}\n\n{rest}"


def _page(entry: Entry, lang: str, facts: list[str], texts: dict[str, str], records: Sequence[str]) -> str:
    meta = entry.meta
    title = meta.title_zh if lang == "zh" else meta.title
    command = f"`kb verify {entry.id}`" if meta.probe else f"no probe: {meta.probe_waiver}"
    verify = "在本机验证" if lang == "zh" else "Verify on this machine"
    texts = {**texts, verify: "  \n".join(filter(None, [command, *records]))}
    body = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in texts.items())
    return f"# {title}\n\n{' · '.join(filter(None, facts))}\n\n{body}"


def _without_look_alikes(text: str, ids: Collection[str], label: str = "Not this: {}.") -> str:
    """How to tell this incident: without what is about others, whose ids end the text."""
    lines, kept, others = text.splitlines(), [], []
    blocks = list(text_blocks(text))
    for (start, end, info), (_, _, next_info) in zip(blocks, [*blocks[1:], (0, 0, None)], strict=True):
        block = "\n".join(lines[start:end])
        named = [word for word in CODE.findall(block) if word in ids]
        others += named
        if not (named or "look-alike" in (info or "") or "look-alike" in (next_info or "")):
            kept.append(block.rstrip())
    if others:
        kept.append("\n" + label.format(", ".join(f"`{other}`" for other in dict.fromkeys(others))))
    return "\n".join(kept)
