"""The command `kb`: registers the subcommands and maps every outcome to an exit code.

| code | meaning |
|------|---------|
| 0 | found, clean, verified, clear |
| 1 | nothing found, findings, exposed, fix-ineffective, inverted, other-failure |
| 2 | usage or bad input |
| 3 | not-reproduced, inconclusive |
| 4 | not-applicable |
| 5 | internal error |
| 124 | overall deadline |
| 130 | interrupted |
"""

import os
import signal
import sys
from collections.abc import Set
from contextlib import suppress
from importlib import import_module
from typing import Annotated

import typer

from kb import __version__
from kb.errors import Interrupted, KbError, OutputLost, UsageError

from .terminal.output import PatientStdout, claim_streams, complain, emit_error

HELP = "Distributed-training incidents, each with a probe that verifies its fix on your own machine."

COMPLETION = "_KB_COMPLETE"  # set by the completion script of the shell

# Command: its module here, which has a function of the same name, and its line in `kb --help`.
COMMANDS = {
    "search": ("search", "Find the entry for a failure."),
    "show": ("show", "Read an entry."),
    "diagnose": ("diagnose", "Find what made a job fail, from its logs."),
    "capture": ("capture", "Collect evidence from a hanging job and diagnose it."),
    "verify": ("verify", "Verify an entry on this machine."),
    "check": ("check", "Show what this machine is exposed to."),
    "list": ("list_", "List the entries."),
    "env": ("env", "Show this machine."),
    "history": ("history", "Show earlier verifications."),
    "serve": ("serve", "Serve search and entries over HTTP."),
    "key": ("key", "Make, list and revoke API keys of a service."),
    "mcp": ("mcp", "Serve the tools for a language model over stdio."),
    "graph": ("graph", "Show what leads to an incident and what it leads to."),
    "redact": ("redact", "Hide secrets, people and machines in a log."),
    "new": ("new", "Write the files of a new incident."),
    "lint": ("lint", "Check entries and probes."),
    "test": ("test", "Test signatures with logs."),
    "index": ("index", "Build the search index (normally automatic)."),
    "doctor": ("doctor", "Check kb itself."),
}


def app(names: tuple[str, ...] = tuple(COMMANDS)) -> typer.Typer:
    """The Typer app with these commands. A search registers only its own: building the others would double its time."""
    built = typer.Typer(
        name="kb",
        help=HELP,
        no_args_is_help=True,
        add_completion=len(names) > 1 or COMPLETION in os.environ,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    built.callback()(kb)
    for name in names:
        module, short_help = COMMANDS[name]
        command = getattr(import_module(f".commands.{module}", __package__), module)
        if isinstance(command, typer.Typer):
            built.add_typer(command, name=name, short_help=short_help)
        else:
            built.command(name, short_help=short_help)(command)
    return built


def _with_separator(argv: list[str]) -> list[str]:
    """The arguments with `--` before a question that begins with a dash. Only a question contains spaces."""
    questions = [argument for argument in argv if argument[:1] == "-" and len(argument.split()) > 1]
    if argv[:1] != ["search"] or "--" in argv or not questions:
        return argv
    return [*(argument for argument in argv if argument not in questions), "--", *questions]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kb {__version__}")
        raise typer.Exit(0)


def kb(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(mask: Set[signal.Signals | int] | None = None) -> None:
    """Run this process's command line and exit with its code. `mask` is the signal mask to set from here on."""
    claim_streams()
    argv = sys.argv[1:]
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and argv[:1] not in (["serve"], ["mcp"]):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # schedulers send it; kb then ends as on Ctrl-C
    try:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # signals that arrived during the start are raised here
        code = run(argv)
    except KeyboardInterrupt:
        code = _interrupted(argv)
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code. This is the only place that maps errors to codes."""
    try:
        first = _completed_command() if COMPLETION in os.environ else argv[0] if argv else ""
        built = app((first,)) if first in COMMANDS else app()
        code = int(built(_with_separator(argv), standalone_mode=False, prog_name="kb") or 0)
        if code == Interrupted.exit_code:  # how Typer reports Ctrl-C; no command returns it
            return _interrupted(argv)
        sys.stdout.flush()
        return code
    except KbError as error:
        return _fail(argv, error)
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # not exported by Typer; its message is the help
            print(error.format_message(), file=sys.stderr)
            return UsageError.exit_code
        return _fail(
            argv,
            UsageError(error.format_message(), f"`kb {_command(argv)} --help` lists what it takes".replace("  ", " ")),
        )
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(argv)
    except Exception as error:  # the last line of defence: an exit code, one JSON document, no raw traceback
        if os.environ.get("KB_DEBUG"):
            raise
        hint = "KB_DEBUG=1 shows the traceback; please report it"
        return _fail(argv, KbError(f"internal error: {type(error).__name__}: {error}", hint))


def _completed_command() -> str:
    """The command whose arguments the shell completes; "" while the command itself is being typed."""
    words = (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")).split(maxsplit=2)
    return words[1] if len(words) > 2 else ""


def _interrupted(argv: list[str]) -> int:
    """Report an interruption only under `--json`, to a program: whoever pressed Ctrl-C knows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # `timeout` sends a second one, which would cut off the document
    return _fail(argv, Interrupted()) if "--json" in argv else Interrupted.exit_code


def _fail(argv: list[str], error: KbError) -> int:
    """Report an error, as a document under `--json` or as text if a document has begun or cannot be written."""
    if "--json" in argv and not _has_begun():
        try:
            emit_error(_command(argv) or "error", error)
            sys.stdout.flush()
            return error.exit_code
        except OutputLost as lost:
            error = lost
    with suppress(OutputLost):  # if the interpreter did it, the exit code could change
        sys.stdout.flush()
    complain(error)
    return error.exit_code


def _has_begun() -> bool:
    return isinstance(sys.stdout, PatientStdout) and sys.stdout.has_begun


def _command(argv: list[str]) -> str:
    return next((word for word in argv if word in COMMANDS), "")
