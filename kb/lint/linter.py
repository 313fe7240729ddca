"""Content roots to findings: every entry and probe against one named rule per requirement.

Nothing here executes a probe in this process: its declaration is read through the launcher, and the patterns
of signatures are tried in a child that has a budget. What is left is data, and the rules judge it.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from kb.content.catalog import Catalog, load_catalog
from kb.content.entry import Entry
from kb.content.roots import BUILT_IN, Root
from kb.errors import UsageError
from kb.harness.launcher import Launcher, Task
from kb.lint import claims, glossary, links, probes, sections, signatures
from kb.lint.body import blocks
from kb.lint.glossary import GlossaryRule
from kb.lint.healthy import HEALTHY
from kb.lint.rule import Draft, EntryRule, Finding, ProbeFile, ProbeRule, name_of
from kb.patterns import redos_timing
from kb.patterns.redos import backtracking_risk
from kb.runtime.declaration import from_description
from kb.search.synonyms import FILE
from kb.verify.checks import why
from kb.verify.plan import DESCRIBE_S

AT_ONCE = 4  # probes that are loaded at one time

ENTRY_RULES: tuple[EntryRule, ...] = (
    *signatures.RULES,
    *links.RULES,
    *claims.RULES,
    *sections.RULES,
)
PROBE_RULES: tuple[ProbeRule, ...] = probes.RULES
GLOSSARY_RULES = glossary.RULES
READING_RULES = {  # of kb.markdown and kb.catalog: what breaks one of these cannot be read any further
    "too-large": "An entry has at most a mebibyte.",
    "unreadable": "An entry file can be read.",
    "not-utf8": "An entry is UTF-8.",
    "no-front-matter": "An entry starts with a YAML block between two `---` lines.",
    "yaml": "The front matter is YAML without anchors.",
    "duplicate-key": "No key stands twice in the front matter.",
    "front-matter": "The front matter keeps the schema that `kb lint --schema` prints.",
    "id-is-not-file-name": "The id is the file's name without .md.",
    "duplicate-section": "No section stands twice.",
    "duplicate-id": "An id is used once in all roots, unless the later entry says `replaces`.",
    "replaces-nothing": "What an entry replaces is the entry of this id in an earlier root.",
}


@dataclass(frozen=True, slots=True)
class Result:
    """Findings in the order of files and lines, and how many entries and probes were looked at."""

    findings: tuple[Finding, ...]
    entries: int
    probes: int


def rules() -> dict[str, str]:
    """Name and requirement of every rule."""
    judging: tuple[EntryRule | ProbeRule | GlossaryRule, ...] = (*ENTRY_RULES, *PROBE_RULES, *GLOSSARY_RULES)
    judged = {name_of(rule): (rule.__doc__ or "").strip() for rule in judging}
    return {**READING_RULES, **glossary.READING_RULES, **judged}


def lint(roots: tuple[Root, ...], only: frozenset[Path] = frozenset()) -> Result:
    """Check all entries and probes of the roots, or these entry files and their probes alone.

    The glossary is checked with the root that it ships with.

    Raises `LaunchError` when no child process can be started, `UsageError` for a file that no root has.
    """
    found = load_catalog(roots)
    problems = [problem for problem in found.problems if not only or problem.path in only]
    entries = [entry for entry in found if not only or entry.path in only]
    for path in only.difference((problem.path for problem in problems), (entry.path for entry in entries)):
        raise UsageError(f"{path} is no entry of a content root, or another root replaces it")
    files = _with_declarations(_probe_files(found, entries, () if only else roots))
    findings = [Finding(problem.path, problem.line, problem.rule, problem.detail) for problem in problems]
    findings += [finding for draft in _drafts(found, entries) for finding in check_entry(draft)]
    findings += [finding for file in files for finding in check_probe(file)]
    if not only and any(root.name == BUILT_IN for root in roots):
        findings += check_glossary(FILE)
    return Result(tuple(sorted(findings)), len(entries) + len(problems), len(files))


def check_entry(draft: Draft) -> Iterator[Finding]:
    for rule in ENTRY_RULES:
        for line, message in rule(draft):
            yield Finding(draft.entry.path, line, name_of(rule), message)


def check_probe(file: ProbeFile) -> Iterator[Finding]:
    for rule in PROBE_RULES:
        for line, message in rule(file):
            yield Finding(file.path, line, name_of(rule), message)


def check_glossary(path: Path) -> Iterator[Finding]:
    try:
        draft = glossary.draft(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, no TOML, or something else in it
        yield Finding(path, 1, glossary.UNREADABLE, str(error))
        return
    for rule in GLOSSARY_RULES:
        for line, message in rule(draft):
            yield Finding(path, line, name_of(rule), message)


def _drafts(found: Catalog, entries: list[Entry]) -> Iterator[Draft]:
    ids = frozenset(found.entries) | {problem.path.stem for problem in found.problems}
    slow = slow_patterns(entries)
    today = datetime.date.today()
    for entry in entries:
        probe = found.probe_file(entry)
        text = entry.path.read_text(encoding="utf-8")
        yield Draft(entry, text, blocks(text), ids, bool(probe and probe.is_file()), slow, today)


def slow_patterns(entries: Iterable[Entry]) -> frozenset[str]:
    """Patterns that may take for ever: by their structure, or because they did, in a child process.

    Tried are their own repeats and every text that a rule will match them with.
    """
    risky: set[str] = set()
    texts: dict[str, list[str]] = {}
    for entry in entries:
        for signature in entry.meta.signatures:
            if backtracking_risk(signature.pattern):
                risky.add(signature.pattern)
            else:
                texts.setdefault(signature.pattern, [*HEALTHY]).extend(
                    redos_timing.pumped(signature.pattern, signature.sample)
                )
                texts[signature.pattern] += entry.meta.not_signatures
    return redos_timing.slow(texts) | risky


def _probe_files(found: Catalog, entries: list[Entry], roots: Iterable[Root]) -> list[ProbeFile]:
    """The probes of the entries, and what else lies in the roots' probe folders."""
    named = {path: entry.id for entry in entries if (path := found.probe_file(entry))}
    lying = [path for root in roots for path in root.probes.glob("*.py") if path.name != "__init__.py"]
    paths = sorted(path for path in {*named, *lying} if path.is_file())
    return [ProbeFile(path, _source(path), named.get(path) or _namesake(path), ()) for path in paths]


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # it cannot be loaded either, and that is said


def _namesake(probe: Path) -> str:
    """The id of an entry that could not be read, or was replaced, and that the probe belongs to by its name."""
    entry = probe.parent.parent / "entries" / f"{probe.stem.replace('_', '-')}.md"
    return entry.stem if entry.is_file() else ""


def _with_declarations(files: list[ProbeFile]) -> list[ProbeFile]:
    """The files with what a child process says of them. The launcher needs Linux; elsewhere nothing is said."""
    if sys.platform != "linux":
        return files
    with Launcher(Path(sys.executable)) as launcher, ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda one: _with_declaration(one, launcher), files))


def _with_declaration(file: ProbeFile, launcher: Launcher) -> ProbeFile:
    result, outcome = launcher.rank_results(Task("describe", file.path, DESCRIBE_S))
    if result is None or result.get("outcome") != "completed":
        return replace(file, faults=(f"it cannot be loaded: {why(result, outcome)}",))
    needs_gpus = any(one.needs.gpus for one in from_description(result["probe"]).every)
    return replace(file, faults=tuple(result["faults"]), needs_gpus=needs_gpus)
