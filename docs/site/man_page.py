"""Write `docs/kb.1`, the manual page, from the help of the commands: `python docs/site/man_page.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import typer
from typer.main import get_command

PAGE = Path(__file__).resolve().parents[1] / "kb.1"
ROW = re.compile(r"^\| (\d+) \| (.+) \|$", re.MULTILINE)  # in the table of exit codes
ENVIRONMENT = {
    "KB_ROOTS": "Content roots in addition to the built-in one, joined by colons.",
    "KB_PAGER, PAGER": "The pager of kb show and kb list, by default less; cat means none.",
    "NO_COLOR, FORCE_COLOR": "No colour, or colour also in a pipe.",
    "KB_DEBUG": "With any value an internal error shows its traceback.",
}


def manual() -> str:
    """The page in roff. A test compares it with the file."""
    main = resolve_name("kb.cli.main")
    group: Any = get_command(main.app())
    context = typer.Context(group, info_name="kb")
    lines = [
        '.TH KB 1 "" "kb" "User Commands"',
        *(".SH NAME", f"kb \\- {_escaped(_uncapitalized(group.help.rstrip('.')))}"),
        *(".SH SYNOPSIS", ".B kb", _escaped(" ".join(group.collect_usage_pieces(context)))),
        *(".SH OPTIONS", *_options(group, context)),
        ".SH COMMANDS",
        *_commands(group, context),
        ".SH EXIT STATUS",
        *(line for code, meaning in ROW.findall(main.__doc__) for line in _item(code, meaning)),
        ".SH ENVIRONMENT",
        *(line for name, meaning in ENVIRONMENT.items() for line in _item(name, meaning)),
    ]
    return "\n".join(lines) + "\n"


def _commands(group: Any, context: typer.Context) -> Iterator[str]:
    for name, command in group.commands.items():
        inner = typer.Context(command, info_name=name, parent=context)
        yield f".SS {_escaped(' '.join([inner.command_path, *command.collect_usage_pieces(inner)]))}"
        for number, paragraph in enumerate((command.help or "").split("\n\n")):
            yield from ([".PP"] if number else [])
            yield _escaped(" ".join(paragraph.split()))
        if hasattr(command, "commands"):
            yield from _commands(command, inner)
        else:
            yield from _options(command, inner)


def _options(command: Any, context: typer.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and "--help" not in parameter.opts:
            yield from _item(*record)


def _item(name: str, meaning: str) -> Iterator[str]:
    yield from (".TP", f".B {_escaped(name)}", _escaped(" ".join(meaning.split())))


def _escaped(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _uncapitalized(text: str) -> str:
    return text[:1].lower() + text[1:]


if __name__ == "__main__":
    PAGE.write_text(manual(), encoding="utf-8")
    print(PAGE)
