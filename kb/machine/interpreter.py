"""Finds what is installed in the training interpreter by running `kb.runtime.machine_survey` in it, with a deadline."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

from kb.harness.subprocesses import Command, CommandResult
from kb.runtime import start
from kb.runtime.survey_fields import Reader, Unknown

START = Path(start.__file__)
SURVEY_S = {False: 15.0, True: 60.0}  # without and with importing torch, perhaps from a cold network disk


def survey(python: Path, import_torch: bool) -> Command:
    """The command of the survey. Start it with a `with` block and call `read_survey` in that block."""
    flags = ["--import-torch"] if import_torch else []
    return Command([str(python), "-B", str(START), "machine_survey", *flags], SURVEY_S[import_torch])


def read_survey(reader: Reader, python: Path, running: Command, import_torch: bool) -> dict[str, Any]:
    """The survey's document; if importing torch ended the survey, it is repeated without the import."""
    try:
        return _document(reader, running.result())
    except Unknown as failed:
        if not import_torch:
            raise
        with survey(python, import_torch=False) as second:
            document = _document(reader, second.result())
        reader.reasons["python.torch_import"] = f"importing torch: {failed}"
        return document


def _document(reader: Reader, ran: CommandResult) -> dict[str, Any]:
    if ending := _ending(ran):
        raise Unknown(ending)
    try:
        document: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])  # a sitecustomize may print before it
        reasons: dict[str, str] = document.pop("reasons")
    except (ValueError, LookupError, TypeError, AttributeError):  # not JSON, or not the survey's
        raise Unknown(f"it answered something else: {ran.stdout[:200]!r}") from None
    reader.reasons.update({f"python.{path}": reason for path, reason in reasons.items()})
    return document


def _ending(ran: CommandResult) -> str:
    """How a survey ended without an answer, and where it hung, since it dumps its stack when it is ended."""
    if ran.exit_code == 0:
        return ""
    stack = re.search(r"^ +(File .+)$", ran.stderr, re.MULTILINE)
    if ran.failure:
        return f"{ran.failure}; it was at {stack.group(1)}" if stack else ran.failure
    if ran.exit_code and ran.exit_code < 0:
        return f"died of {signal.Signals(-ran.exit_code).name}"
    _, _, last_line = ran.stderr.strip().rpartition("\n")
    return f"exit code {ran.exit_code}: {last_line}"
