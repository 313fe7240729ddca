"""MkDocs hooks: a page per entry, an index by area and the graph of causes, generated at every build.

kb's own parser renders the entries, which are CommonMark. MkDocs gets the headings as Markdown, for its table of
contents and its search, and the text under them as HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from kb.content import causes_svg, gpu_records
from kb.content.area import Area
from kb.content.catalog import Catalog, load_catalog
from kb.content.causes import Graph, graph
from kb.content.entry import SECTIONS, Entry
from kb.content.html import section_html
from kb.content.roots import builtin_root

WIDE = "---\nhide: [navigation, toc]\n---\n"
Proofs = Mapping[str, tuple[gpu_records.Proof, ...]]  # by entry

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
    """Adds the generated pages. Raises `ContentError` for an entry that cannot be read."""
    roots = (builtin_root(),)
    catalog = load_catalog(roots)
    if catalog.problems:
        raise catalog.problems[0]
    proofs, links = gpu_records.proofs(roots), graph(catalog.current())
    pages = {
        f"entries/{entry.id}.md": entry_page(entry, catalog, links, proofs.get(entry.id, ()))
        for entry in catalog.current()
    }
    pages["entries/index.md"] = index_page(catalog, proofs)
    pages["graph.md"] = graph_page(links)
    pages["index.md"] = home_page(len(pages) - 2)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, "kb.css", content=STYLE))
    return files


def entry_page(entry: Entry, catalog: Catalog, links: Graph, proofs: tuple[gpu_records.Proof, ...]) -> str:
    def address(entry_id: str) -> str:
        return f"../{entry_id}/" if entry_id in catalog.entries else ""

    meta = entry.meta
    facts = [f"`{entry.id}`", meta.status.value, meta.severity.value, *(f"#{tag}" for tag in meta.tags)]
    if meta.area:
        facts.insert(3, f"[{meta.area}](index.md#{meta.area})")
    parts = [
        f"---\ntitle: {_yaml(meta.title)}\nhide: [navigation]\n---\n",
        f"# {meta.title}\n\n{' · '.join(facts)}\n",
        html(f"<p>{escape(meta.title_zh)} · <a href='#_1'>中文</a></p>"),
        html(causes_svg.neighbourhood(links, entry.id, address)),
    ]
    for heading in SECTIONS:
        if heading == "中文":
            parts += ["## Verdicts\n", verdicts(entry, catalog, proofs)]
        parts += [f"## {heading}\n", html(section_html(entry.section(heading), address))]
    parts += ["## References\n", html(references(entry))]
    return "\n".join(parts)


def verdicts(entry: Entry, catalog: Catalog, proofs: tuple[gpu_records.Proof, ...]) -> str:
    """The verdicts in the hardware records, and the command for a verdict on the reader's machine."""
    command = f"On your machine: `kb verify {entry.id}`.\n"
    if not proofs:
        summary = gpu_records.gpu_summary(catalog.probe_file(entry), proofs, entry.digest)
        return f"{command}\n{summary}\n" if summary else command
    rows = [f"| {proof.machine} | {proof.verdict} | {proof.day} |" for proof in proofs]
    return f"{command}\n| machine | verdict | day |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"


def references(entry: Entry) -> str:
    items = []
    for number, reference in enumerate(entry.meta.references, 1):
        link = f'<a href="{escape(reference.url)}">{escape(reference.url)}</a>'
        items.append(f'<li id="ref-{number}">{escape(reference.shows)} ({reference.grade}): {link}</li>')
    return f"<ol>{''.join(items)}</ol>"


def index_page(catalog: Catalog, proofs: Proofs) -> str:
    entries = catalog.current()
    text = f"{len(entries)} incidents. Status `confirmed`: the probe reproduces the mechanism.\n"
    return f"{WIDE}# Entries\n\n{text}\n" + "\n".join(
        part for area in Area for part in _area_section(area, entries, catalog, proofs)
    )


def _area_section(area: Area, entries: list[Entry], catalog: Catalog, proofs: Proofs) -> Iterator[str]:
    yield f"## {area}\n\n{area.meaning[0].upper()}{area.meaning[1:]}.\n"
    yield "| incident | status | severity | GPU arms |\n| --- | --- | --- | --- |"
    for entry in entries:
        meta = entry.meta
        if meta.area is area:
            summary = gpu_records.gpu_summary(catalog.probe_file(entry), proofs.get(entry.id, ()))
            title = meta.title.replace("|", "\\|")
            yield f"| [{title}]({entry.id}.md) | {meta.status} | {meta.severity} | {summary.partition(': ')[2]} |"
    yield ""


def graph_page(links: Graph) -> str:
    linked = {entry_id for edge in links.causes for entry_id in edge}
    unlinked = sorted(set(links.titles) - linked)
    legend = "An arrow leads from a cause to its consequence. A timeout is nearly always a consequence."
    rest = ", ".join(f"[{entry_id}](entries/{entry_id}.md)" for entry_id in unlinked)
    picture = html(causes_svg.whole(links, lambda link: f"../entries/{link}/"))
    return f"{WIDE}# Graph of causes\n\n{legend}\n\n{picture}\n\nNot linked to another incident: {rest or 'none'}.\n"


def home_page(entries: int) -> str:
    return f"""# kb

For engineers whose distributed GPU training job hangs, times out or crashes: {entries} incidents, each with a probe
that reproduces the incident without its fix, and shows that the fix removes it, on your own machine.

```bash
kb search "ALLGATHER timeout save"            # paste an error, in English or Chinese
kb verify checkpoint-save-allgather-timeout   # control must fail, treatment must pass, here
kb check --config ds_config.json              # what is this machine exposed to?
```

[Entries by area](entries/index.md) · [Graph of causes](graph.md) · [What ran on hardware](verified/README.md)
"""


def html(text: str) -> str:
    """One block of HTML, which Python-Markdown leaves unchanged."""
    return f"<div>\n{text}\n</div>\n" if text else ""


def _yaml(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
