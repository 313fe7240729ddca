"""Reads torchrun's `error.json`, which `record` of torch.distributed.elastic writes to TORCHELASTIC_ERROR_FILE.

It has two forms (`torch/distributed/elastic/multiprocessing/errors/`): the message is an object with `message`,
`extraInfo` and, if the agent has copied it, `errorCode`; or it is text, with `timestamp` next to it.
"""

from __future__ import annotations

from typing import Any

from kb.diagnose.evidence import LONGEST_EVIDENCE, Line
from kb.diagnose.readers.structured import MOST_VALUES, Unreadable, as_integer, load_json

LARGEST = 16 << 20  # bytes
MOST_LINES = 2000  # the last lines of a traceback
LATEST = 1 << 33  # seconds since the epoch; a larger number is not a time


def read_error_file(data: bytes, source: str, rank: int | None = None, most_values: int = MOST_VALUES) -> list[Line]:
    """The traceback, then the lines of the message that it does not contain. Raises `Unreadable`."""
    if len(data) > LARGEST:
        raise Unreadable(f"it is larger than {LARGEST >> 20} MiB")
    document = load_json(data, most_values)
    if not isinstance(document, dict) or not isinstance(document.get("message"), (str, dict)):
        raise Unreadable("not a torchrun error file: it has no message")
    inner = document["message"] if isinstance(document["message"], dict) else document
    extra = inner.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    traceback = _lines(extra.get("py_callstack"))
    message = [line for line in _lines(inner.get("message")) if line not in traceback]
    code = as_integer(inner.get("errorCode"))
    exit_code = [f"torchrun recorded the exit code {code}"] if code else []
    time = _time(extra.get("timestamp", inner.get("timestamp")))
    return [Line(source, 0, line, rank, time) for line in traceback + message + exit_code]


def _lines(value: Any) -> list[str]:
    """The lines of a text, without the placeholder that torch writes if there is no message."""
    lines = value.splitlines() if isinstance(value, str) and value != "<NONE>" else []
    return [line.rstrip()[:LONGEST_EVIDENCE] for line in lines[-MOST_LINES:] if line.strip()]


def _time(value: Any) -> float | None:
    seconds = as_integer(value)
    return float(seconds) if seconds is not None and 0 < seconds < LATEST else None
