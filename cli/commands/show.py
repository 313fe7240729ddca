"""`kb show`: one entry, for a terminal, as Markdown or as JSON."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kb.content.gpu_records import gpu_summary, proofs
from kb.content.roots import configured_roots
from kb.errors import UsageError

from ..terminal.output import JsonFlag, RootOption, emit

if TYPE_CHECKING:  # the model pulls in pydantic, and every command would pay for it
    from kb.content.entry import Entry

WIDEST = 110


def show(
    entry_id: Annotated[str, typer.Argument(metavar="ID", help="The id of an entry, as `kb search` prints it.")],
    lang: Annotated[str, typer.Option(help="en, or zh for the Chinese text.")] = "en",
    section: Annotated[str, typer.Option(help="Only this section, for instance fix; its beginning is enough.")] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the file as it is written.")] = False,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Read an entry: symptom, how to tell, root cause, fix, known cases, references."""
    from kb.content.catalog import load_catalog

    if lang not in ("en", "zh"):
        raise UsageError(f"--lang {lang}: entries are written in en and zh")
    chosen = configured_roots(tuple(roots or ()))
    catalog = load_catalog(chosen)
    entry = catalog.get(entry_id)
    probe = catalog.probe_file(entry)
    hardware = gpu_summary(probe, proofs(chosen).get(entry.id, ()), entry.digest)
    if as_json:
        emit("show", **entry.to_json(), probe_file=str(probe) if probe else None, hardware=hardware or None)
    elif markdown:
        sys.stdout.write(entry.path.read_text(encoding="utf-8"))
    elif section:
        _render(_section(entry, section))
    else:
        _render(page(entry, lang, hardware))
    return 0


def _section(entry: Entry, name: str) -> str:
    """The first section whose heading starts with `name`. Raises `UsageError` when there is none."""
    for heading, section in entry.sections.items():
        if heading.lower().startswith(name.lower()):
            return f"## {heading}\n\n{section.text}\n"
    raise UsageError(f"{entry.id} has no section {name!r}", f"one of: {', '.join(entry.sections)}")


def page(entry: Entry, lang: str, hardware: str = "") -> str:
    """The entry as Markdown to read: the sections of one language, and the references its marks point to."""
    from kb.content.entry import TRANSLATION

    meta = entry.meta
    title = meta.title_zh if lang == "zh" else meta.title
    facts = [
        f"`{entry.id}`",
        meta.status,
        meta.severity,
        *filter(None, [meta.area]),
        ", ".join(meta.tags),
        entry.origin,
    ]
    head = f"# {title}\n\n{' · '.join(facts)}"
    if lang == "zh" and TRANSLATION in entry.sections:  # a root may be written in English alone
        body = entry.section(TRANSLATION)
    else:
        body = "\n\n".join(
            f"## {name}\n\n{section.text}" for name, section in entry.sections.items() if name != TRANSLATION
        )
    references = "\n".join(
        f"{number}. {reference.shows} ({reference.grade}): {reference.url}"
        for number, reference in enumerate(meta.references, 1)
    )
    proof = f"`kb verify {entry.id}`" if meta.probe else f"no probe: {meta.probe_waiver}"
    label = ("参考", "在本机验证") if lang == "zh" else ("References", "Prove it on this machine")
    return f"{head}\n\n{body}\n\n## {label[0]}\n\n{references}\n\n## {label[1]}\n\n{proof}\n\n{hardware}\n"


def _render(text: str) -> None:
    from rich.console import Console

    from ..terminal.markdown import Terminal

    console = Console(soft_wrap=False)
    console.width = min(console.width, WIDEST)
    console.print(Terminal(text, code_theme="ansi_dark", hyperlinks=False), crop=False)
