"""MkDocs hooks: a page per entry, a home page, an index by area and the graph of causes, generated at every build.

kb's parser renders the entries, which are CommonMark. MkDocs gets the headings as Markdown, for its table of contents
and its search, and the text below them as HTML.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from kb.content import causes_svg
from kb.content.area import Area
from kb.content.catalog import Catalog, load_catalog
from kb.content.causes import Edge, Graph, graph
from kb.content.causes_map import causes_map, without_implied
from kb.content.entry import SECTIONS, TRANSLATION, Entry
from kb.content.html import section_html
from kb.content.roots import builtin_root
from kb.records import hardware
from kb.records.libraries import LibraryVerdict, library_summaries, library_verdicts
from kb.records.releases import ReleaseVerdict, experiment_summaries, release_summary, release_verdicts

WIDE = "---\nhide: [navigation, toc]\n---\n"
GRAPH_SCRIPT = Path(__file__).resolve().parents[2] / "api" / "pages" / "static" / "graph.js"
Proofs = Mapping[str, tuple[hardware.Proof, ...]]  # by entry

STYLE = """\
.graph { overflow-x: auto; }
.graph svg { display: block; max-width: 100%; height: auto; }
.graph a.near rect { stroke-dasharray: 3 3; fill: none; }
.graph .area rect { fill: none; }
.graph .area text { font-weight: 600; fill: var(--md-default-fg-color--light); }
.graph .pointed path:not(.on), .graph .pointed a:not(.on) { opacity: .2; }
.graph .pointed path.on { stroke: var(--md-accent-fg-color); }
.graph rect { fill: var(--md-code-bg-color); stroke: var(--md-default-fg-color--lighter); }
.graph .here rect { fill: var(--md-accent-fg-color--transparent); stroke: var(--md-accent-fg-color); }
.graph text { font: 11px var(--md-code-font-family, monospace); fill: var(--md-default-fg-color); }
.graph path { fill: none; stroke: var(--md-default-fg-color--light); }
.graph path.masks { stroke-dasharray: 4 3; }
.graph marker path { fill: var(--md-default-fg-color--light); stroke: none; }
@media (max-width: 45em) { .graph svg { max-width: none; } } /* to be scrolled: the letters stay legible */
.look-alike { margin: 0; }
.look-alike figcaption { color: var(--md-default-fg-color--light); font-size: 80%; text-align: left; }
.grade { color: var(--md-default-fg-color--light); font-size: 80%; }
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages. Raises `ContentError` for an entry that cannot be read."""
    roots = (builtin_root(),)
    catalog = load_catalog(roots)
    if catalog.problems:
        raise catalog.problems[0]
    proofs, releases, libraries, links = (
        hardware.proofs(roots),
        release_verdicts(roots),
        library_verdicts(roots),
        graph(catalog.current()),
    )
    pages = {
        f"entries/{entry.id}.md": entry_page(
            entry,
            catalog,
            links,
            [
                *release_lines(releases.get(entry.id, ()), libraries.get(entry.id, ())),
                verdicts(entry, catalog, proofs.get(entry.id, ())),
            ],
        )
        for entry in catalog.current()
    }
    pages["entries/index.md"] = index_page(catalog, proofs)
    pages["graph.md"] = graph_page(catalog, links)
    pages["index.md"] = home_page(catalog, proofs)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, "kb.css", content=STYLE))
    files.append(File.generated(config, "graph.js", content=GRAPH_SCRIPT.read_text(encoding="utf-8")))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Print where the site is and how to serve it: opened as files, links show folders and search does not work."""
    print(f"the site is in {config.site_dir}; to read and search it: python3 -m http.server -d {config.site_dir} 8001")


def entry_page(entry: Entry, catalog: Catalog, links: Graph, on_record: Sequence[str]) -> str:
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
        if heading == TRANSLATION:
            parts += ["## Verdicts\n", *on_record]
        parts += [f"## {heading}\n", html(section_html(entry.section(heading), address))]
    parts += ["## References\n", html(references(entry))]
    return "\n".join(parts)


def verdicts(entry: Entry, catalog: Catalog, proofs: tuple[hardware.Proof, ...]) -> str:
    """The verdicts in the hardware records, and the command for a verdict on the reader's machine."""
    command = f"On your machine: `kb verify {entry.id}`.\n"
    if not proofs:
        summary = hardware.gpu_summary(catalog.probe_file(entry), proofs, entry.digest)
        return f"{command}\n{summary}\n" if summary else command
    rows = [f"| {proof.machine} | {proof.verdict} | {proof.day} |" for proof in proofs]
    return f"{command}\n| machine | verdict | day |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"


def release_lines(releases: Sequence[ReleaseVerdict], libraries: Sequence[LibraryVerdict]) -> Iterator[str]:
    """Lines for the entry's and each experiment's verdicts by release of torch, then by releases of libraries."""
    if releases:
        yield f"{release_summary(releases)}\n"
        lines = [*experiment_summaries(releases), *library_summaries(libraries)]
        yield "\n".join(f"- {line}" for line in lines) + "\n"


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
            summary = hardware.gpu_summary(catalog.probe_file(entry), proofs.get(entry.id, ()))
            title = meta.title.replace("|", "\\|")
            yield f"| [{title}]({entry.id}.md) | {meta.status} | {meta.severity} | {summary.partition(': ')[2]} |"
    yield ""


def graph_page(catalog: Catalog, links: Graph) -> str:
    """The whole graph, followed by every area with its direct neighbours, as a picture and as a list."""
    legend = "An arrow leads from a cause to its consequence. A timeout is nearly always a consequence."
    implied = "Arrows that others imply are not drawn here; the areas below have all of them."
    parts = [f"{WIDE}# Graph of causes\n\n{legend} {implied}\n", html(_map(catalog, without_implied(links.causes)))]
    for area in Area:
        inside = [entry.id for entry in catalog.current() if entry.meta.area is area]
        edges = [edge for edge in links.causes if set(inside) & set(edge)]
        near = {entry_id for edge in edges for entry_id in edge} - set(inside)
        parts += [f"## {area}\n", html(_map(catalog, edges, near)), *_effects(links, inside)]
    return "\n".join(parts)


def _map(catalog: Catalog, edges: Collection[Edge], near: Collection[str] = ()) -> str:
    linked = {entry_id for edge in edges for entry_id in edge}
    groups = {
        str(area): [entry.id for entry in catalog.current() if entry.meta.area is area and entry.id in linked]
        for area in Area
    }
    return causes_map(groups, edges, lambda link: f"../entries/{link}/", near)


def _effects(links: Graph, ids: Iterable[str]) -> Iterator[str]:
    for entry_id in ids:
        effects = ", ".join(f"[{other}](entries/{other}.md)" for other in links.consequences_of(entry_id))
        yield f"- [{entry_id}](entries/{entry_id}.md){f' leads to {effects}' if effects else ''}"
    yield ""


def home_page(catalog: Catalog, proofs: Proofs) -> str:
    """The home page: what kb is, how to begin, the areas with their number of entries, and how to read an entry."""
    entries = catalog.current()
    count = sum(bool(proofs.get(entry.id)) for entry in entries)
    on_gpus = f"{count} of them have run on GPUs: see [what was verified there](verified/README.md).\n" if count else ""
    areas = "\n".join(
        f"| [{area}](entries/index.md#{area}) | {sum(entry.meta.area is area for entry in entries)} | {area.meaning} |"
        for area in Area
    )
    return f"""---
hide: [navigation]
---
# kb

For engineers whose distributed GPU training job hangs, times out or crashes: **{len(entries)} incidents**, each with a
probe that reproduces the incident without its fix, and shows that the fix removes it, on your own machine.
{on_gpus}
Press <kbd>/</kbd> to search this site for an error message or a word, or let kb read the whole log:

```bash
kb diagnose train.log                         # which incident is it? with the lines that say so
kb search "ALLGATHER timeout save"            # paste an error, in English or Chinese
kb verify checkpoint-save-allgather-timeout   # the job must fail without the fix and complete with it, here
```

## Incidents by area

| area | entries | what belongs there |
| --- | ---: | --- |
{areas}

[All entries](entries/index.md) · [Which incident leads to which](graph.md)

## How to read an entry

1. **Symptom** and **Root cause**: what you see, and why it happens. If the log of a look-alike is shown there, compare.
2. **How to tell**: one observation that separates this incident from others that look the same.
3. **Fix**, with code, and **Why it works**. A workaround is called one.
4. **Verdicts**: on which GPUs the probe ran, and the command that runs it on your machine.

A mark ends every claim and says how it is known: `[probe]` the probe of the entry shows it, `[source]` read in the
code, `[thread]` read in an issue, `[claimed]` somebody asserts it, `[inferred]` we conclude it. The number leads to the
reference. Status `confirmed`: the probe reproduces the mechanism; `reported`: only threads say so.
"""


def html(text: str) -> str:
    """One block of HTML, which Python-Markdown leaves unchanged."""
    return f"<div>\n{text}\n</div>\n" if text else ""


def _yaml(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
