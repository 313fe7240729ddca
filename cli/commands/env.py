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

    Works with torch absent or broken: each unknown value has a reason. Never waits for a hung driver.
    """
    from kb.machine import snapshot

    from ..terminal.progress import StatusLine

    with StatusLine() as progress:
        progress.begin("env", "reading this machine's state, importing torch in a child process")
        machine = snapshot.capture(interpreter_of(python), import_torch=True)
    document = machine.to_json()
    if as_json:
        emit("env", **document)
    else:
        reasons = document.pop("reasons")
        for key, value in document.items():
            _print(key, value, key, reasons)
    return 0


def _print(label: str, value: Any, path: str, reasons: Mapping[str, str], indent: str = "") -> None:
    """Print a value and everything below it; `path` is its dotted name. An unknown value is printed with its reason."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        print(f"{indent}{label}:")
        for key, item in value.items():
            _print(str(key), item, f"{path}.{key}", reasons, indent + "  ")
        return
    text = "none" if value in (None, "", {}, []) else str(value)
    if value is None and path in reasons:
        text = f"unknown ({reasons[path]})"
    first, *more = text.rstrip().split("\n")
    print(f"{indent}{label}: {first}")
    for line in more:
        print(f"{indent}{' ' * len(label)}  {line}")
