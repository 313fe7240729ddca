"""Writes the two files of a new incident, with a `TODO` in every gap; `kb lint` lists the gaps."""

from __future__ import annotations

import datetime
from pathlib import Path

from kb.authoring.log_excerpt import NO_DRAFT, Draft
from kb.content.area import Area
from kb.content.entry import CHINESE_PARTS, ID, TRANSLATION
from kb.content.facets import FACETS
from kb.content.languages import Language, languages
from kb.errors import UsageError

ENTRY = """\
---
id: {id}
title: "TODO the symptom in one line, as an engineer would say it"
{title_zh}status: reported
severity: high
area: {area}  # TODO keep it, or one of {areas}
{facets}
tags: [TODO]
aliases:
{aliases}
signatures:
{signatures}
not_signatures: []
references:
  - url: https://example.org/TODO
    shows: TODO what this page shows, in your words
    grade: claimed
probe: {probe}
reviewed: {today}
---

## Symptom

TODO what you see first, and what does not happen.
{observations}
{fence}log
{log}
{fence}

```log
TODO another one: another framework, version or rank layout
```

## Environment

TODO versions, number of ranks, other conditions.

## Root cause

TODO one self-contained sentence: search results show it. [claimed 1]

## How to tell

TODO the observation that separates it from a look-alike, for instance this log:

```log look-alike
TODO a log of another incident: no pattern above may match it
```

## Fix

TODO something to paste, what it costs, and when not to use it. [probe gloo] [claimed 1]

```bash
TODO
```

## Why it works

TODO [probe gloo]

## Known cases

- TODO framework, model, GPUs, what was done. [claimed 1]
{translation}"""

TITLE_ZH = 'title_zh: "TODO 一句话说明症状"\n'
ALIASES = {Language.ENGLISH: "  - TODO what people type, in English", Language.CHINESE: "  - TODO 大家会怎么搜"}

PROBE = '''\
"""TODO the incident in one sentence: what the job does, and why it fails."""

from __future__ import annotations

from functools import partial

from kb.probe import Arm, Context, Experiment, Probe, completed, raised


def train(ctx: Context, *, is_fixed: bool) -> None:
    """TODO the job of both arms; the keyword is the fix, and the only difference."""
    dist = ctx.init_process_group(timeout_s=5)
    ctx.reached()  # setup is complete; next comes the incident, or its fix
    dist.barrier()
    if not is_fixed:
        raise RuntimeError("TODO")


probe = Probe(
    experiments=(
        Experiment(
            name="gloo",  # for a job without torch: needs=Needs(packages={})
            control=Arm(
                partial(train, is_fixed=False),
                expect=raised(r"TODO"),
                because="TODO what this arm does",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(train, is_fixed=True), expect=completed(), because="TODO what it does instead", fidelity="cpu"
            ),
        ),
    ),
)
'''


SIGNATURE = """\
  - pattern: '{pattern}'
    role: root{choose}
    source: TODO who prints it
    sample: '{sample}'"""


def scaffold(home: Path, entry_id: str, today: datetime.date, draft: Draft = NO_DRAFT) -> tuple[Path, Path]:
    """Write entry and probe to the content root `home`, which is created if missing. Returns their paths.

    The log of the entry and the signatures to choose from come from the draft.

    Raises `UsageError` for an invalid id or existing files, which are never overwritten, and `ContentError` for an
    invalid declaration of the root's languages.
    """
    if not ID.fullmatch(entry_id):
        raise UsageError(
            f"{entry_id!r} is not an id: use lower-case words joined by single hyphens",
            "for instance: loader-stalls-on-nfs",
        )
    stem = entry_id.replace("-", "_")
    files = {
        home / "entries" / f"{entry_id}.md": _entry(entry_id, stem, today, draft, languages(home / "entries")),
        home / "probes" / f"{stem}.py": PROBE,
    }
    for path in files:
        if path.exists():
            raise UsageError(f"{path} already exists", "choose another id, or edit the file")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name a writable folder with --root") from error
    entry, probe = files
    return entry, probe


def _entry(entry_id: str, stem: str, today: datetime.date, draft: Draft, written: frozenset[Language]) -> str:
    is_translated = len(written) > 1
    ticks = "`" * max(3, draft.longest_fence + 1)
    return ENTRY.format(
        id=entry_id,
        probe=stem,
        today=today,
        area=Area.LAUNCH,
        areas=", ".join(Area),
        facets="\n".join(
            f"{name}: [{next(iter(facet))}]  # TODO keep it, or some of {', '.join(facet)}"
            for name, facet in FACETS.items()
        ),
        title_zh=TITLE_ZH if is_translated else "",
        aliases="\n".join(ALIASES[language] for language in Language if language in written),
        translation=_translation() if is_translated else "",
        signatures="\n".join(
            SIGNATURE.format(
                pattern=_quoted(candidate.pattern),
                sample=_quoted(candidate.sample),
                choose="  # TODO keep it if only this incident prints it; root, cascade or context?"
                if draft.is_real
                else "",
            )
            for candidate in draft.candidates
        ),
        observations="".join(f"\nTODO kb observed: {sentence}\n" for sentence in draft.observations),
        fence=ticks,
        log=draft.log,
    )


def _translation() -> str:
    parts = "".join(f"\n### {part}\n\nTODO {part}\n" for part in CHINESE_PARTS)
    return f"\n## {TRANSLATION}\n{parts}"


def _quoted(text: str) -> str:
    """Escaped for a single-quoted YAML string."""
    return text.replace("'", "''")
