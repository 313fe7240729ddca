"""`kb lint`: entries and probes against the rules, one finding a line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kb.content.roots import configured_roots
from kb.errors import UsageError

from ..terminal.output import JsonFlag, RootOption, emit, notice, print_json, shown, style

if TYPE_CHECKING:  # the rules pull in pydantic and YAML, and every command would pay for it
    from kb.lint.linter import Result


def lint(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[PATH]...", help="Entry files; without any, everything.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the front matter.")] = False,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Check entries and probes: their form, and that nothing in them claims more than it shows.

    Exit code 0 when clean, 1 with findings.
    """
    from kb.content.entry import FrontMatter
    from kb.lint.linter import lint as check
    from kb.lint.linter import rules

    if schema:
        print_json(FrontMatter.model_json_schema(), indent=2)
        return 0
    only = frozenset(_entry_file(path) for path in paths or ())
    homes = sorted({path.parent.parent for path in only})
    result = check(configured_roots((*(roots or ()), *homes)), only)
    counts = {
        "entries": result.entries,
        "probes": result.probes,
        "rules": len(rules()),
        "findings": len(result.findings),
    }
    if sys.platform != "linux":
        notice("probes are read, but not loaded: that needs Linux")
    if as_json:
        emit("lint", findings=[finding.to_json() for finding in result.findings], counts=counts)
    else:
        _print(result, counts)
    return 1 if result.findings else 0


def _entry_file(path: Path) -> Path:
    """The file, absolute. Raises `UsageError` when it cannot be an entry."""
    path = path.expanduser()
    path = path.parent.resolve() / path.name
    if not path.is_file() or path.suffix != ".md" or path.parent.name != "entries":
        raise UsageError(
            f"{path} is not an entry file",
            "entries are the .md files in the folder entries/ of a content root; --root checks another root",
        )
    return path


def _print(result: Result, counts: dict[str, int]) -> None:
    for finding in result.findings:
        print(f"{shown(finding.path)}:{finding.line}: {style(finding.rule, 'cyan')}: {finding.message}")
    checked = f"{_count(result.entries, 'entry', 'entries')}, {_count(result.probes, 'probe')}, {counts['rules']} rules"
    print(f"{checked}: {_count(len(result.findings), 'finding') if result.findings else 'clean'}")


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
