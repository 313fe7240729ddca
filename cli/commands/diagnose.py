"""`kb diagnose`: the entries that explain the logs and dumps of a failed job."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kb.content.languages import Language
from kb.content.roots import Root, configured_roots
from kb.errors import UsageError
from kb.search.index_cache import open_index

from ..terminal.fields import field, labelled
from ..terminal.hints import root_options
from ..terminal.labels import LangOption, label, language, sentence
from ..terminal.output import JsonFlag, RootOption, emit, notice
from ..terminal.stdin import stdin

if TYPE_CHECKING:
    from kb.content.triage import Observation
    from kb.diagnose.diagnosis import Diagnosis


def diagnose(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="FILE|DIR|-", help="Logs, flight-recorder dumps, stacks, error files; `-`: stdin."),
    ],
    limit: Annotated[
        int | None, typer.Option(min=1, max=10, help="Show at most this many entries. [default: 3, with --json all]")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Run the probes of the best candidates here.")] = False,
    python: Annotated[
        Path | None, typer.Option(help="With --verify: interpreter of your training environment.")
    ] = None,
    save_unexplained: Annotated[
        bool, typer.Option("--save-unexplained", help="Save a redacted excerpt if no entry explains the logs.")
    ] = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Draw what each rank did, as far as the logs show.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the answer and the timeline to one HTML file.")
    ] = None,
    lang: LangOption = "en",
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Find what made a job fail, from its logs and dumps: the cause first, then its consequences.

    Exit code 0 when an entry explains it, 1 when none does; with --verify, the exit code of `kb verify`.
    """
    from kb.diagnose.diagnosis import diagnose as conclude
    from kb.diagnose.inputs.sources import find_sources
    from kb.diagnose.scan.scan import scan
    from kb.diagnose.scan.signature_matcher import Matcher

    from ..terminal.progress import ReadingLine

    spoken = language(lang)
    if timeline and as_json:
        raise UsageError("--timeline and --json exclude each other", "the timeline is in the JSON, under `story`")
    if python and not verify:
        raise UsageError("--python requires --verify", "--python is the interpreter that runs the probes")
    if "-" in paths:
        stdin()  # raises without standard input; reading it would not
    chosen = configured_roots(tuple(roots or ()))
    sources = find_sources(paths)
    with open_index(chosen, notice) as index, ReadingLine() as reading:
        diagnosis = conclude(index, scan(sources.inputs, Matcher(index.signatures), reading.read))
    problems = (*sources.problems, *diagnosis.problems)
    saved = _save(sources.inputs, diagnosis) if save_unexplained and diagnosis.unexplained else None
    triage = _triage(diagnosis, chosen)
    instead = [observation.to_json(in_chinese=spoken is Language.CHINESE) for observation in triage]
    document = {**diagnosis.to_json(), "triage": instead, "problems": problems, "saved": saved}
    document["findings"] = document["findings"][:limit]
    if as_json and not verify:
        emit("diagnose", **document)
    elif not as_json:
        for problem in problems:
            notice(sentence(problem, spoken))
        _print(diagnosis, spoken, limit, chosen, roots)
        if timeline:
            _print_timeline(diagnosis, spoken)
        _print_triage(triage, spoken)
        _print_excerpt(diagnosis, saved, paths, spoken, roots)
    if html:
        _write_html(diagnosis, html)
    if verify:
        return _verify(diagnosis, python, tuple(roots or ()), document if as_json else None, spoken)
    return 0 if diagnosis.findings and not diagnosis.unexplained else 1


def _triage(diagnosis: Diagnosis, chosen: tuple[Root, ...]) -> Sequence[Observation]:
    """What to look at when no entry explains the logs."""
    if not diagnosis.unexplained:
        return ()
    from kb.content.triage import first_observations, load_triage

    return first_observations(load_triage(chosen), diagnosis.facets)


def _print_triage(triage: Sequence[Observation], lang: Language) -> None:
    if triage:
        from ..terminal.gap import print_triage

        print_triage(triage, lang)


def _print(
    diagnosis: Diagnosis, lang: Language, limit: int | None, chosen: tuple[Root, ...], roots: list[Path] | None
) -> None:
    from kb.diagnose.chinese_step import chinese_step

    from ..terminal.diagnosis import MOST_FINDINGS, Printer

    if lang is Language.CHINESE:
        from kb.content.catalog import load_catalog  # an index has only the English text

        diagnosis = replace(diagnosis, next_step=chinese_step(diagnosis, load_catalog(chosen).get))
    Printer(diagnosis, lang, limit or MOST_FINDINGS, roots).print()


def _print_timeline(diagnosis: Diagnosis, lang: Language) -> None:
    """Draw each attempt below the answer."""
    from kb.diagnose.story.picture import text_picture

    attempts = diagnosis.story.attempts
    for number, attempt in enumerate(attempts, 1):
        if picture := text_picture(attempt):
            print(label("attempt {} of {}", lang).format(number, len(attempts)) if len(attempts) > 1 else "")
            print(picture)


def _write_html(diagnosis: Diagnosis, path: Path) -> None:
    from kb.diagnose.html_report import html_report

    try:
        path.write_text(html_report(diagnosis), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", "name another file with --html") from None
    notice(f"written: {path}")


def _print_excerpt(
    diagnosis: Diagnosis, saved: str | None, paths: list[str], lang: Language, roots: list[Path] | None
) -> None:
    """Print where the excerpt of an unexplained log was saved, or how to save one."""
    if saved:
        print(field("saved", saved, lang))
        print(field("then", label("kb new ID --from {} makes an entry of it", lang).format(Path(saved).stem), lang))
    elif diagnosis.unexplained:
        again = "--save-unexplained" if "-" in paths else _again(paths, roots)
        print(labelled("save", label("`{}` saves a redacted excerpt, for a new entry", lang).format(again), lang))


def _again(paths: list[str], roots: list[Path] | None) -> str:
    return shlex.join(["kb", "diagnose", *paths, "--save-unexplained", *root_options(roots)])


def _save(inputs: tuple[Any, ...], diagnosis: Diagnosis) -> str:
    from kb.authoring import unexplained_queue

    lines = [f"{failure.line.source}:{failure.line.number}: {failure.line.text}" for failure in diagnosis.failures]
    observations = [line.text for line in diagnosis.observations]
    return str(unexplained_queue.save("\n".join(lines), [source.name for source in inputs], observations))


def _verify(
    diagnosis: Diagnosis,
    python: Path | None,
    roots: tuple[Path, ...],
    document: dict[str, Any] | None,
    lang: Language,
) -> int:
    """Run the probes of the best candidates. `document`, the output of `--json`, is printed with their reports.

    An unexplained log has no candidates.
    """
    from kb.diagnose.next_step import candidates
    from kb.verify.report import summary

    from .verify import verify_quietly

    likely = () if diagnosis.unexplained else candidates(diagnosis.findings)
    ids = [finding.id for finding in likely if finding.probe]
    if not ids:
        notice(label("there is nothing to verify: no entry with a probe explains this", lang))
    is_json = document is not None
    if ids and not is_json:
        print()
    code, run = verify_quietly(ids, python, roots, as_json=is_json) if ids else (1, None)
    if document is not None:
        reports = run.reports if run else ()
        emit("diagnose", **document, reports=[report.to_json() for report in reports], summary=summary(reports))
    return code
