"""Rules of links: between entries, and from an entry to its probe."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from kb.content.entry import ID, Status
from kb.lint.rule import Draft, EntryRule, Remark

LINKS = ("causes", "caused_by", "masked_by")
CLOSE = 0.85


def unknown_link(draft: Draft) -> Iterator[Remark]:
    """Every id in causes, caused_by and masked_by is the id of an entry."""
    for line, field, target in _links(draft):
        if target not in draft.ids:
            near = difflib.get_close_matches(target, draft.ids, n=1)
            yield line, f"{field}: no entry is called {target!r}" + "".join(f"; {one!r}?" for one in near)


def link_to_itself(draft: Draft) -> Iterator[Remark]:
    """No entry is linked to itself."""
    for line, field, target in _links(draft):
        if target == draft.entry.id:
            yield line, f"{field}: this is the entry itself"


def circular_link(draft: Draft) -> Iterator[Remark]:
    """No entry is both a cause and a consequence of another."""
    for number, target in enumerate(draft.meta.caused_by):
        if target in draft.meta.causes:
            yield draft.line("caused_by", number), f"{target!r} is in causes as well"


def misspelt_id(draft: Draft) -> Iterator[Remark]:
    """No code span of the body is an id with a slip of the pen."""
    for block in draft.texts():
        for line, span in block.spans:
            if span.count("-") < 2 or not ID.fullmatch(span) or span in draft.ids:
                continue
            for near in difflib.get_close_matches(span, draft.ids, n=1, cutoff=CLOSE):
                yield line, f"`{span}` is no entry; `{near}`?"


def probe_or_waiver(draft: Draft) -> Iterator[Remark]:
    """Every entry has either a probe or a waiver that says why not."""
    if draft.meta.probe and draft.meta.probe_waiver:
        yield draft.line("probe_waiver"), "the entry has a probe: say `probe` or `probe_waiver`, not both"
    if not draft.meta.probe and not draft.meta.probe_waiver:
        yield draft.line("id"), "name the `probe`, or give the reason in `probe_waiver`"


def missing_probe(draft: Draft) -> Iterator[Remark]:
    """The probe that an entry names exists."""
    if draft.meta.probe and not draft.has_probe_file:
        yield draft.line("probe"), f"there is no probes/{draft.meta.probe}.py"


def probe_name(draft: Draft) -> Iterator[Remark]:
    """A probe is called like its entry, with underscores."""
    expected = draft.entry.id.replace("-", "_")
    if draft.meta.probe and draft.meta.probe != expected:
        yield draft.line("probe"), f"the probe of this entry is called {expected!r}"


def confirmed_without_probe(draft: Draft) -> Iterator[Remark]:
    """A confirmed entry has a probe that shows its mechanism."""
    if draft.meta.status is Status.CONFIRMED and not draft.meta.probe:
        yield draft.line("status"), "without a probe the entry is `reported`"


def _links(draft: Draft) -> Iterator[tuple[int, str, str]]:
    for field in LINKS:
        for number, target in enumerate(getattr(draft.meta, field)):
            yield draft.line(field, number), field, target


RULES: tuple[EntryRule, ...] = (
    unknown_link,
    link_to_itself,
    circular_link,
    misspelt_id,
    probe_or_waiver,
    missing_probe,
    probe_name,
    confirmed_without_probe,
)
