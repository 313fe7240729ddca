"""The versions installed in a training environment, which `kb.content.applicability` uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kb.errors import InterpreterError
from kb.machine import interpreter
from kb.runtime.survey_fields import Reader

NCCL = re.compile(r"nvidia-nccl(-cu\d+)?")


def versions(python: Path) -> dict[str, str | None]:
    """The version of each package, of `python`, and of the `cuda` and `nccl` that torch was built with.

    An unreadable version is None. Runs the interpreter in a child process with a deadline, without importing torch.
    Raises `InterpreterError` if it does not answer.
    """
    reader = Reader()
    with interpreter.survey(python, import_torch=False) as survey:
        document = reader.value("python", lambda: interpreter.read_survey(reader, python, survey, import_torch=False))
    if document is None:
        raise InterpreterError(
            f"{python} does not say what is installed: {reader.reasons['python']}",
            "--python takes the path of a Python interpreter, 3.9 or newer",
        )
    return _named(document)


def _named(document: Mapping[str, Any]) -> dict[str, str | None]:
    """The packages of a survey, with `cuda` and `nccl` under the names that entries use."""
    packages: Mapping[str, str | None] = document["packages"]
    nccl = [version for name, version in packages.items() if NCCL.fullmatch(name)]
    cuda = (document["torch"] or {}).get("cuda")
    named = {"python": document["version"], "cuda": cuda, "nccl": nccl[0] if nccl else None}
    return {**{name: version for name, version in named.items() if version}, **packages}
