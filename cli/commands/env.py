"""`kb env`: a snapshot of this machine, ready to paste into a bug report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..terminal.output import JsonFlag, emit, interpreter_of


def env(
    python: Annotated[Path | None, typer.Option(help="Interpreter of your training environment.")] = None,
    as_json: JsonFlag = False,
) -> int:
    """Show this machine: driver, CUDA, NCCL, torch, libraries, GPUs, topology, network, limits, container.

    Works with torch absent or broken: what is unknown says why. Never waits for a wedged driver.
    """
    from kb.machine import snapshot

    from ..terminal.progress import StatusLine

    with StatusLine() as progress:
        progress.begin("env", "looking at this machine, importing torch in a child process")
        found = snapshot.capture(interpreter_of(python), import_torch=True)
    document = found.to_json()
    if as_json:
        emit("env", **document)
    else:
        reasons = document.pop("reasons")
        for key, value in document.items():
            _print(key, value, key, reasons)
    return 0


def _print(label: str, value: Any, path: str, reasons: Mapping[str, str], indent: str = "") -> None:
    """One value with everything below it; what is unknown with its reason (`path` is its dotted name)."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        print(f"{indent}{label}:")
        for key, one in value.items():
            _print(str(key), one, f"{path}.{key}", reasons, indent + "  ")
        return
    text = "none" if value in (None, "", {}, []) else str(value)
    if value is None and path in reasons:
        text = f"unknown ({reasons[path]})"
    first, *more = text.rstrip().split("\n")
    print(f"{indent}{label}: {first}")
    for line in more:
        print(f"{indent}{' ' * len(label)}  {line}")
