"""Checks all entries and probes of content roots against the rules, each of which has a name and one requirement.

No probe runs in this process: the launcher reads its declaration, and a child process with a limit times the patterns
of signatures. The rules then judge plain data.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from kb.content import languages
from kb.content.catalog import Catalog, load_catalog
from kb.content.entry import Entry
from kb.content.languages import Language
from kb.content.parser import LARGEST, front_matter_problems
from kb.content.roots import BUILT_IN, Root
from kb.errors import ContentError, UsageError
from kb.harness.launcher import Launcher, Task
from kb.lint import claims, fixes, glossary, links, probes, records, sections, signatures, triage
from kb.lint.body import blocks
from kb.lint.glossary import GlossaryRule
from kb.lint.healthy_lines import HEALTHY_LINES
from kb.lint.rule import (
    EntryFile,
    EntryRule,
    EntryText,
    OnRecord,
    ProbeFile,
    ProbeRule,
    Remark,
    TextRule,
    Violation,
    name_of,
)
from kb.patterns import redos_timing
from kb.patterns.redos import backtracking_risk
from kb.records.libraries import library_verdicts
from kb.records.names import name_record
from kb.records.releases import release_verdicts
from kb.records.wordings import wordings
from kb.runtime.declaration import from_description
from kb.search.synonyms import FILE
from kb.verify.checks import failure_reason
from kb.verify.plan import DESCRIBE_S

Declared = dict[Path, frozenset[Language]]
File = TypeVar("File", EntryFile, EntryText, ProbeFile)

MAX_LOADING = 4  # probes at a time

ENTRY_RULES: tuple[EntryRule, ...] = (
    *signatures.RULES,
    *links.RULES,
    *claims.RULES,
    *fixes.RULES,
    *sections.RULES,
    *records.RULES,
)
TEXT_RULES: tuple[TextRule, ...] = (*claims.TEXT_RULES, *fixes.TEXT_RULES, *sections.TEXT_RULES)
PROBE_RULES: tuple[ProbeRule, ...] = probes.RULES
GLOSSARY_RULES = glossary.RULES
READING_RULES = {  # for kb.content: if an entry breaks one of these, only its text is checked further
    "too-large": "An entry file is at most 1 MiB.",
    "unreadable": "An entry file is readable.",
    "not-utf8": "An entry is UTF-8.",
    "no-front-matter": "An entry starts with a YAML block between two `---` lines.",
    "yaml": "The front matter is YAML without anchors.",
    "duplicate-key": "No key occurs twice in the front matter.",
    "front-matter": "The front matter satisfies the schema that `kb lint --schema` prints.",
    "id-is-not-file-name": "The id is the file name without .md.",
    "duplicate-section": "No section occurs twice.",
    "duplicate-id": "An id is used once in all roots, unless the later entry says `replaces`.",
    "replaces-nothing": "An entry replaces the entry with its own id in an earlier root.",
    "unreadable-triage": "A triage is TOML: observations and their outcomes, as in entries/triage/hang.toml.",
    "root-declaration": "The file entries/root.toml declares the `languages` of the root: en, zh or both.",
}


@dataclass(frozen=True, slots=True)
class Result:
    """Violations by file and line, and the number of entries and probes that were checked."""

    violations: tuple[Violation, ...]
    entries: int
    probes: int


def rules() -> dict[str, str]:
    """The name and requirement of every rule."""
    functions: tuple[EntryRule | ProbeRule | GlossaryRule, ...] = (*ENTRY_RULES, *PROBE_RULES, *GLOSSARY_RULES)
    requirements = {name_of(rule): (rule.__doc__ or "").strip() for rule in functions}
    return {**READING_RULES, **glossary.READING_RULES, **triage.REQUIREMENTS, **requirements}


def lint(roots: tuple[Root, ...], only: frozenset[Path] = frozenset()) -> Result:
    """Check all entries and probes of the roots, or only these entry files and their probes.

    The glossary is checked with the built-in root.

    Raises `LaunchError` if no child process can be started, `UsageError` for a file outside the roots.
    """
    catalog = load_catalog(roots)
    problems = [problem for problem in catalog.problems if not only or problem.path in only]
    entries = [entry for entry in catalog if not only or entry.path in only]
    for path in only.difference((problem.path for problem in problems), (entry.path for entry in entries)):
        raise UsageError(f"{path} is not an entry of a content root, or another root replaces it")
    files = _with_declarations(_probe_files(catalog, entries, () if only else roots))
    declared, invalid = _declared_languages(roots)
    violations = [_violation(problem) for problem in invalid]
    violations += [violation for problem in problems for violation in check_unusable(problem, declared)]
    entry_files = _entry_files(catalog, entries, declared, files, roots)
    violations += [violation for file in entry_files for violation in check_entry(file)]
    violations += [violation for file in files for violation in check_probe(file)]
    if not only and any(root.name == BUILT_IN for root in roots):
        violations += check_glossary(FILE)
    if not only:
        violations += triage.violations(roots, catalog.entries.keys() | {problem.path.stem for problem in problems})
    return Result(tuple(sorted(violations)), len(entries) + len(problems), len(files))


def check_entry(file: EntryFile) -> Iterator[Violation]:
    yield from _broken(ENTRY_RULES, file)


def check_unusable(problem: ContentError, declared: Declared) -> Iterator[Violation]:
    """Yield the problem of an unusable entry, other problems of its front matter, and violations in its text."""
    yield _violation(problem)
    data = _entry_bytes(problem.path)
    source = data.decode("utf-8", errors="replace")
    if not source.strip() or problem.rule == "no-front-matter":
        return  # without front matter, nobody knows where the text begins
    for other in front_matter_problems(data, problem.path):
        if (other.line, other.detail) != (problem.line, problem.detail):
            yield _violation(other)
    yield from _broken(TEXT_RULES, EntryText(problem.path, source, blocks(source), declared[problem.path.parent]))


def _entry_bytes(path: Path) -> bytes:
    """Read an entry file; empty if it cannot be read or is too large, which its problem says."""
    try:
        return path.read_bytes() if path.stat().st_size <= LARGEST else b""
    except OSError:
        return b""


def _violation(problem: ContentError) -> Violation:
    return Violation(problem.path, problem.line, problem.rule, problem.detail)


def check_probe(file: ProbeFile) -> Iterator[Violation]:
    yield from _broken(PROBE_RULES, file)


def _broken(rules: Sequence[Callable[[File], Iterator[Remark]]], file: File) -> Iterator[Violation]:
    for rule in rules:
        for line, message in rule(file):
            yield Violation(file.path, line, name_of(rule), message)


def check_glossary(path: Path) -> Iterator[Violation]:
    try:
        file = glossary.parse_glossary(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, not TOML, or not a glossary
        yield Violation(path, 1, glossary.UNREADABLE, str(error))
        return
    for rule in GLOSSARY_RULES:
        for line, message in rule(file):
            yield Violation(path, line, name_of(rule), message)


def _entry_files(
    catalog: Catalog,
    entries: list[Entry],
    declared: Declared,
    probes: Iterable[ProbeFile],
    roots: Iterable[Root],
) -> Iterator[EntryFile]:
    releases, libraries = release_verdicts(roots), library_verdicts(roots)
    texts, names = wordings(roots), name_record(roots)
    by_path = {file.path: file for file in probes}
    ids = frozenset(catalog.entries) | {problem.path.stem for problem in catalog.problems}
    slow = slow_patterns(entries)
    today = datetime.date.today()
    for entry in entries:
        probe = catalog.probe_file(entry)
        try:
            text = entry.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:  # deleted since the catalog was read
            continue
        written = declared[entry.path.parent]
        probe_file = by_path.get(probe) if probe else None
        on_record = OnRecord(releases.get(entry.id, ()), libraries.get(entry.id, ()), texts, names)
        yield EntryFile(entry.path, text, blocks(text), written, entry, ids, probe_file, slow, today, on_record)


def _declared_languages(roots: Iterable[Root]) -> tuple[Declared, list[ContentError]]:
    """The languages of each `entries/` folder, and the problems of the declarations."""
    declared: Declared = {}
    problems: list[ContentError] = []
    for root in roots:
        try:
            declared[root.entries] = languages.languages(root.entries)
        except ContentError as problem:
            declared[root.entries] = languages.DEFAULT
            problems.append(problem)
    return declared, problems


def slow_patterns(entries: Iterable[Entry], limit_s: float = redos_timing.LIMIT_S) -> frozenset[str]:
    """Patterns that are open to ReDoS, by their structure or because they were slow in a child process.

    They are timed on their own repeats and on every text that a rule matches them against.
    """
    risky: set[str] = set()
    texts: dict[str, list[str]] = {}
    for entry in entries:
        for signature in entry.meta.signatures:
            if backtracking_risk(signature.pattern):
                risky.add(signature.pattern)
            else:
                texts.setdefault(signature.pattern, [*HEALTHY_LINES]).extend(
                    redos_timing.pumped(signature.pattern, signature.sample)
                )
                texts[signature.pattern] += entry.meta.not_signatures
    return redos_timing.slow(texts, limit_s) | risky


def _probe_files(catalog: Catalog, entries: list[Entry], roots: Iterable[Root]) -> list[ProbeFile]:
    """The probes of the entries, and the other files in the roots' probe folders."""
    named = {path: entry.id for entry in entries if (path := catalog.probe_file(entry))}
    present = [path for root in roots for path in root.probes.glob("*.py") if path.name != "__init__.py"]
    paths = sorted(path for path in {*named, *present} if path.is_file())
    return [ProbeFile(path, _source(path), named.get(path) or _namesake(path), ()) for path in paths]


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # loading it fails too, and that is reported


def _namesake(probe: Path) -> str:
    """The id of the entry that the probe belongs to by name, if that entry is invalid or replaced; else ""."""
    entry = probe.parent.parent / "entries" / f"{probe.stem.replace('_', '-')}.md"
    return entry.stem if entry.is_file() else ""


def _with_declarations(files: list[ProbeFile]) -> list[ProbeFile]:
    """Add the declarations that child processes load, if the launcher can run on this platform."""
    if sys.platform != "linux":
        return files
    with Launcher(Path(sys.executable)) as launcher, ThreadPoolExecutor(MAX_LOADING) as pool:
        return list(pool.map(lambda file: _with_declaration(file, launcher), files))


def _with_declaration(file: ProbeFile, launcher: Launcher) -> ProbeFile:
    result, outcome = launcher.rank_results(Task("describe", file.path, DESCRIBE_S))
    if result is None or result.get("outcome") != "completed":
        return replace(file, faults=(f"it cannot be loaded: {failure_reason(result, outcome)}",))
    return replace(file, faults=tuple(result["faults"]), declaration=from_description(result["probe"]))
