"""`kb lint`: check entries and probes against the rules and print one violation per line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kb.content.roots import configured_roots
from kb.errors import UsageError

from ..terminal.output import JsonFlag, RootOption, emit, notice, print_json, shown, style

if TYPE_CHECKING:  # the rules import pydantic and YAML, which slows the start of every command
    from kb.lint.linter import Result


def lint(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[PATH]...", help="Entry files; all content without any.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the front matter.")] = False,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Check the form of entries and probes, and that every claim is backed.

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
        "findings": len(result.violations),
    }
    if sys.platform != "linux":
        notice("probes are checked without loading them, which requires Linux")
    if as_json:
        emit("lint", findings=[violation.to_json() for violation in result.violations], counts=counts)
    else:
        _print(result, counts)
    return 1 if result.violations else 0


def _entry_file(path: Path) -> Path:
    """The absolute path of an entry file. Raises `UsageError` for any other path."""
    path = path.expanduser()
    path = path.parent.resolve() / path.name
    if not path.is_file() or path.suffix != ".md" or path.parent.name != "entries":
        raise UsageError(
            f"{path} is not an entry file",
            "entries are the .md files in the folder entries/ of a content root; --root checks another root",
        )
    return path


def _print(result: Result, counts: dict[str, int]) -> None:
    for violation in result.violations:
        print(f"{shown(violation.path)}:{violation.line}: {style(violation.rule, 'cyan')}: {violation.message}")
    checked = f"{_count(result.entries, 'entry', 'entries')}, {_count(result.probes, 'probe')}, {counts['rules']} rules"
    print(f"{checked}: {_count(len(result.violations), 'finding') if result.violations else 'clean'}")


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
