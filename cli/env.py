"""`kb env`: a snapshot of this machine, ready to paste into a bug report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .output import JsonFlag, emit


def env(
    python: Annotated[Path | None, typer.Option(help="Interpreter of your training environment.")] = None,
    as_json: JsonFlag = False,
) -> int:
    """Show this machine: driver, CUDA, NCCL, torch, libraries, GPUs, topology, network, limits, container.

    Works with torch absent or broken: what is unknown says why. Never waits for a wedged driver.
    """
    from kb import environment

    from .progress import StatusLine

    with StatusLine() as progress:
        progress.begin("env", "looking at this machine, importing torch in a child process")
        found = environment.capture(
            python.expanduser().absolute() if python else Path(sys.executable), import_torch=True
        )
    document = found.to_json()
    if as_json:
        emit("env", **document)
    else:
        _print(document, "")
    return 0


def _print(value: object, indent: str) -> None:
    """Nested data as indented lines; long texts keep their line breaks."""
    assert isinstance(value, dict)
    for key, one in value.items():
        if isinstance(one, dict):
            print(f"{indent}{key}:")
            _print(one, indent + "  ")
        elif isinstance(one, list) and one and isinstance(one[0], dict):
            print(f"{indent}{key}:")
            for item in one:
                print(f"{indent}  -")
                _print(item, indent + "    ")
        else:
            text = str(one).rstrip() if one is not None else "unknown"
            lines = text.split("\n")
            print(f"{indent}{key}: {lines[0]}" if len(lines) == 1 else f"{indent}{key}:")
            for line in lines if len(lines) > 1 else ():
                print(f"{indent}  {line}")
