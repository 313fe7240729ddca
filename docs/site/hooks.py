"""MkDocs hooks: a page per entry, their index and the graph of causes, made from the entries at every build.

Entries are CommonMark and rendered by kb's own parser; MkDocs gets the headings as Markdown, for its table of
contents and its search, and what stands under them as HTML.
"""

from __future__ import annotations

from html import escape
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from kb.content import causes_svg, gpu_records
from kb.content.catalog import Catalog, load_catalog
from kb.content.causes import Graph, graph
from kb.content.entry import SECTIONS, Entry
from kb.content.html import rendered
from kb.content.roots import builtin_root

WIDE = "---\nhide: [navigation, toc]\n---\n"

STYLE = """\
.graph { overflow-x: auto; }
.graph svg { max-width: none; }
.graph rect { fill: var(--md-code-bg-color); stroke: var(--md-default-fg-color--lighter); }
.graph .here rect { fill: var(--md-accent-fg-color--transparent); stroke: var(--md-accent-fg-color); }
.graph text { font: 11px var(--md-code-font-family, monospace); fill: var(--md-default-fg-color); }
.graph path { fill: none; stroke: var(--md-default-fg-color--light); }
.graph path.masks { stroke-dasharray: 4 3; }
.graph marker path { fill: var(--md-default-fg-color--light); stroke: none; }
.look-alike { margin: 0; }
.look-alike figcaption { color: var(--md-default-fg-color--light); font-size: 80%; text-align: left; }
.grade { color: var(--md-default-fg-color--light); font-size: 80%; }
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages. Raises `ContentError` for an entry that cannot be read."""
    roots = (builtin_root(),)
    found = load_catalog(roots)
    if found.problems:
        raise found.problems[0]
    known, links = gpu_records.proofs(roots), graph(found.current())
    pages = {
        f"entries/{entry.id}.md": entry_page(entry, found, links, known.get(entry.id, ())) for entry in found.current()
    }
    pages["entries/index.md"] = index_page(found, known)
    pages["graph.md"] = graph_page(links)
    pages["index.md"] = home_page(len(pages) - 2)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, "kb.css", content=STYLE))
    return files


def entry_page(entry: Entry, found: Catalog, links: Graph, known: tuple[gpu_records.Proof, ...]) -> str:
    def address(one: str) -> str:
        return f"../{one}/" if one in found.entries else ""

    meta = entry.meta
    facts = [f"`{entry.id}`", meta.status.value, meta.severity.value, *(f"#{tag}" for tag in meta.tags)]
    parts = [
        f"---\ntitle: {_yaml(meta.title)}\nhide: [navigation]\n---\n",
        f"# {meta.title}\n\n{' · '.join(facts)}\n",
        html(f"<p>{escape(meta.title_zh)} · <a href='#_1'>中文</a></p>"),
        html(causes_svg.neighbourhood(links, entry.id, address)),
    ]
    for heading in SECTIONS:
        if heading == "中文":
            parts += ["## Verdicts\n", verdicts(entry, found, known)]
        parts += [f"## {heading}\n", html(rendered(entry.section(heading), address))]
    parts += ["## References\n", html(references(entry))]
    return "\n".join(parts)


def verdicts(entry: Entry, found: Catalog, known: tuple[gpu_records.Proof, ...]) -> str:
    """What this site knows of proofs, and how the reader gets one."""
    told = f"On your machine: `kb verify {entry.id}`.\n"
    standing = gpu_records.standing(found.probe_file(entry), known, entry.digest)
    if not known:
        return f"{told}\n{standing}\n" if standing else told
    rows = [f"| {one.machine} | {one.verdict} | {one.day} |" for one in known]
    return f"{told}\n| machine | verdict | day |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"


def references(entry: Entry) -> str:
    items = []
    for number, reference in enumerate(entry.meta.references, 1):
        link = f'<a href="{escape(reference.url)}">{escape(reference.url)}</a>'
        items.append(f'<li id="ref-{number}">{escape(reference.shows)} ({reference.grade}): {link}</li>')
    return f"<ol>{''.join(items)}</ol>"


def index_page(found: Catalog, known: dict[str, Any]) -> str:
    rows = []
    for entry in found.current():
        standing = gpu_records.standing(found.probe_file(entry), known.get(entry.id, ()))
        meta = entry.meta
        title = meta.title.replace("|", "\\|")
        rows.append(f"| [{title}]({entry.id}.md) | {meta.status} | {meta.severity} | {standing.partition(': ')[2]} |")
    head = f"{len(rows)} incidents. Status `confirmed`: the probe reproduces the mechanism.\n\n"
    head += "| incident | status | severity | GPU arms |\n| --- | --- | --- | --- |\n"
    return f"{WIDE}# Entries\n\n{head}" + "\n".join(rows)


def graph_page(links: Graph) -> str:
    linked = {one for edge in links.causes for one in edge}
    alone = sorted(set(links.titles) - linked)
    told = "An arrow leads from a cause to what it brings about. A timeout is nearly always a consequence."
    rest = ", ".join(f"[{one}](entries/{one}.md)" for one in alone)
    drawn = html(causes_svg.whole(links, lambda link: f"../entries/{link}/"))
    return f"{WIDE}# Graph of causes\n\n{told}\n\n{drawn}\n\nNot linked to another incident: {rest or 'none'}.\n"


def home_page(entries: int) -> str:
    return f"""# kb

What an engineer reaches for when a distributed GPU training job hangs, times out or dies: {entries} incidents, each
with a probe that shows the incident without its fix, and gone with it, on your own machine.

```bash
kb search "ALLGATHER timeout save"            # paste an error, in English or Chinese
kb verify checkpoint-save-allgather-timeout   # control must fail, treatment must pass, here
kb check --config ds_config.json              # what is this machine exposed to?
```

[All entries](entries/index.md) · [Graph of causes](graph.md) · [What ran on hardware](verified/README.md)
"""


def html(text: str) -> str:
    """One block of HTML, which Python-Markdown passes on as it is."""
    return f"<div>\n{text}\n</div>\n" if text else ""


def _yaml(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
