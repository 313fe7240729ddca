"""`kb mcp`: the tools of kb for a language model on this machine, over stdio."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated

import typer

from kb.content.roots import configured_roots
from kb.errors import UsageError
from kb.installation import install_command

from ..terminal.output import RootOption, interpreter_of

SERVER = "kb.api.mcp.server:over_stdio"


def mcp(
    allow_verify: Annotated[
        bool,
        typer.Option("--allow-verify", help="Let the model run probes here; you are asked for consent each time."),
    ] = False,
    python: Annotated[Path | None, typer.Option(help="Interpreter of your training environment.")] = None,
    roots: RootOption = None,
) -> int:
    """Serve search, diagnosis and entries to a language model over stdio (Model Context Protocol).

    A client starts it: claude mcp add kb -- kb mcp. Needs kb's extra `server`. For HTTP, use /mcp of `kb serve`.
    """
    from ..service.this_machine import ThisMachine

    if sys.__stdin__ is None or sys.__stdout__ is None:
        raise UsageError("standard input or output is closed, and the protocol needs both", "let a client start it")
    chosen = configured_roots(tuple(roots or ()))
    serve = _server()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="kb: %(message)s")
    sys.stdout = sys.__stdout__  # reserved for the protocol
    for number in (signal.SIGINT, signal.SIGTERM):  # arms end with this process, and there is nothing else to save
        signal.signal(number, signal.SIG_DFL)
    try:
        serve(chosen, ThisMachine(interpreter_of(python)), allows_verify=allow_verify)
    except* BrokenPipeError:  # the client disconnected during an answer
        pass
    return 0


def _server() -> Callable[..., None]:
    """The server, resolved by name because cli does not import api. Raises `UsageError` without the extra."""
    try:
        server: Callable[..., None] = resolve_name(SERVER)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("fastapi", "mcp"):
            raise
        message = f"`kb mcp` needs {missing}, which is not installed here"
        raise UsageError(message, install_command("server")) from None
    return server
