"""Detects the kind of an input by its content: names are unreliable, and a dump may have any name.

An input whose first bytes fit no structured format is text, unless it has many control characters or the magic bytes of
a format that contains no log. Runs of NUL bytes are allowed: a log begins with them if it was truncated while its
writer went on, and ends with them if the machine died. So are a few NUL bytes that a job printed.
"""

from __future__ import annotations

import json
import re
from enum import Enum

from kb.diagnose.inputs.bundle import is_bundle, is_own, is_record


class Kind(Enum):
    """The kind of an input, which decides whether it is read line by line, by one of the readers, or not at all."""

    TEXT = "text"
    FLIGHT_PICKLE = "flight recorder dump (pickle)"
    FLIGHT_JSON = "flight recorder dump (JSON)"
    ERROR_FILE = "torchrun error file"
    RAS_JSON = "NCCL RAS report (JSON)"
    CAPTURE = "bundle of kb capture"
    CAPTURE_RECORD = "record of kb capture"
    OWN = "a record of kb verify or kb capture"
    BINARY = "binary"


PICKLE = re.compile(rb"\x80[\x02-\x05]")
JSON_OBJECT = re.compile(rb"(?:\xef\xbb\xbf)?\s*\{")
# Keys that are near the front. The keys of the JSON form are sorted, so its `version` comes after all entries.
FLIGHT_KEYS = re.compile(rb"pg_config|pg_status|record_id|collective_seq_id|nccl_comm_state|nccl_version")
FLIGHT_JSON_KEYS = re.compile(
    rb'"(?:pg_config|pg_status|nccl_comm_state|comm_lib_version|collective_seq_id|record_id)"\s*:'
)
RAS_KEYS = re.compile(rb'"nccl_version"\s*:[^{}]{0,500}"communicators(?:_count)?"\s*:')
# Records that `kb verify --keep-logs` writes next to the logs and that repeat them: first bytes, and a later key.
OWN = (
    (b'{"outcome": "', b'"max_rss_mib": '),
    (b'{"ending": "', b'"exits": '),
    (b'{"arm_id": "', b'"memory_cap_bytes": '),
    (b'[{"group": "', b'"retired": '),
)
ERROR_OBJECT = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"message"\s*:\s*\{')
ERROR_DETAILS = re.compile(rb'"(?:extraInfo|py_callstack|errorCode)"\s*:')
ERROR_KEYS = {"message", "timestamp", "errorCode", "extraInfo"}

FOREIGN = (
    b"\x7fELF",
    b"PK\x03\x04",  # zip: checkpoints of torch.save, wheels, npz
    b"PK\x05\x06",
    b"\x93NUMPY",
    b"\x89PNG",
    b"\x89HDF",
    b"GIF8",
    b"\xff\xd8\xff",
    b"%PDF",
    b"PAR1",
    b"ARROW1",
    b"SQLite format 3",
    b"BZh",
    b"\xfd7zXZ",
    b"7z\xbc\xaf",
    b"\x04\x22\x4d\x18",  # lz4
    b"\x1f\x8b",  # gzip inside gzip
    b"\x28\xb5\x2f\xfd",
)
NUL_RUN = re.compile(rb"\0{16,}")
CONTROL = bytes(number for number in range(32) if number not in b"\t\n\v\f\r\b\a\x1b")  # no log prints many of them
MOST_CONTROL = 0.02  # share of control characters in a log; random bytes have 0.1
SAFETENSORS = re.compile(rb'.{8}\{\s*"', re.DOTALL)  # eight bytes of length, then a JSON header


def detect_kind(head: bytes, name: str = "") -> Kind:
    """The kind of an input; `head` is its first 64 KiB (or less), decompressed and as UTF-8.

    `name` decides only what the content leaves open: whether `{"message": "..."}` is an error file or a line of a log.
    """
    if PICKLE.match(head):
        return Kind.FLIGHT_PICKLE if FLIGHT_KEYS.search(head) else Kind.BINARY
    if head.startswith(FOREIGN) or _is_safetensors(head):
        return Kind.BINARY
    if is_bundle(head):
        return Kind.CAPTURE
    if is_record(head):
        return Kind.CAPTURE_RECORD
    if (
        is_own(head)
        or name.endswith(".facts.json")
        or any(head.startswith(begin) and key in head for begin, key in OWN)
    ):
        return Kind.OWN
    text = head.strip(b"\0")
    if (head and not text) or (b"\0" in text and not _is_text(text)):
        return Kind.BINARY
    return _structured(text, name) if JSON_OBJECT.match(text) else Kind.TEXT


def _structured(head: bytes, name: str) -> Kind:
    if _is_error_file(head, name):
        return Kind.ERROR_FILE
    if RAS_KEYS.search(head):
        return Kind.RAS_JSON
    if len({match.group() for match in FLIGHT_JSON_KEYS.finditer(head)}) >= 2 and not _is_lines(head):
        return Kind.FLIGHT_JSON
    return Kind.TEXT


def _is_text(head: bytes) -> bool:
    text = NUL_RUN.sub(b"", head)
    return len(text) - len(text.translate(None, CONTROL)) <= MOST_CONTROL * len(text)


def _is_safetensors(head: bytes) -> bool:
    return bool(SAFETENSORS.match(head)) and b"\0" in head[:8]


def _is_error_file(head: bytes, name: str) -> bool:
    if ERROR_OBJECT.match(head):
        return bool(ERROR_DETAILS.search(head))
    if not re.match(rb'\s*\{\s*"message"', head):
        return False
    try:
        data = json.loads(head)
    except (ValueError, RecursionError):
        return False
    return data.keys() <= ERROR_KEYS and (len(data) > 1 or name.endswith(".json"))


def _is_lines(head: bytes) -> bool:
    """Whether there is one JSON object per line, as structured loggers print: that is a log, whatever its keys."""
    return bool(re.search(rb"\}[ \t]*\r?\n[ \t]*\{", head))
