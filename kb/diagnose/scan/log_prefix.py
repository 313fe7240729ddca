"""Parses the prefixes of a line: their rank and time, and the text without them.

The rank is taken from the first of these that names one:
  1. `[rank3]:`, which torch prints with the global rank, before or after the prefix of a launcher;
  2. the beginning of the text: `[Rank 3]`, `[RANK 3]`, `[PG ID 0 ... Rank 3]`, `[rank: 3]`, `GLOBAL_RANK: 3`. For a
     process group other than the first, torch prints the rank within the group, which is ignored;
  3. a launcher: `[default3]:` and `[trainer3]:` of torchrun, `3: ` of `srun -l` and Megatron, `[1,3]<stderr>:` of
     mpirun, `(VllmWorker rank=3 pid=12)`. torchrun prints the local rank, which is ambiguous in a log of several
     nodes without `[rank3]:`;
  4. the file, if the caller knows its rank (`kb.diagnose.inputs.rank_from_path`).
A pod or a container is a node, not a rank; its number is dropped with the prefix.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kb.diagnose.scan.timestamps import parse_timestamp

LONGEST_LINE = 8192  # characters of a line that are parsed
FRONT = 240  # characters at the beginning of the text that are searched for a rank
MOST_PREFIXES = 6

ESCAPES = rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\^_])"
_ESCAPES = re.compile(ESCAPES)
_ESCAPES_TEXT = re.compile(ESCAPES.decode())

_PREFIX = re.compile(
    r"""\A[ ]{0,4}(?P<task>\d{1,5}):(?:[ ]|$)                           # srun -l
    | [ ]{0,4}(?:
        \[rank(?P<rank>\d{1,6})\]:[ ]?
      | \[(?:default|trainer|worker)(?P<local>\d{1,6})\]:[ ]?           # torchrun --tee
      | \[[^][,\s]{1,80},(?P<mpi>\d{1,6})\]<std\w{3,4}>:[ ]?            # mpirun --tag-output
      | \([\w.:<>-]{1,80}(?:[ ](?:rank=(?P<ray>\d{1,6})|\w{1,40}))?[ ]pid=\d{1,9}(?:,[ ]ip=[\w.:]{1,60})?\)[ ]?
      | \[pod/[^]\s]{1,300}\][ ]?                                       # kubectl logs --prefix
      | [A-Za-z][\w.-]{0,120}[-_]\d{1,6}[ ]{1,40}\|[ ]                  # docker compose
      | [A-Za-z][\w.-]{0,80}:[ ](?=\[(?:rank|default|trainer)\d|[\w.-]{1,80}:\d{1,9}:\d{1,9}[ ]\[)  # pdsh
      | (?P<time>
          \[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:[ ]?(?:Z|UTC|[+-]\d\d:?\d\d))?\]?
            (?:[ ]std(?:out|err)[ ][FP](?=[ ]))?                        # a container's runtime
        | \[?\d\d/\d\d/(?:\d{4}|\d\d)[ ]\d\d:\d\d:\d\d\]?
        | \[(?:[A-Z][a-z]{2}[ ])?[A-Z][a-z]{2}[ ]{1,2}\d{1,2}[ ]\d\d:\d\d:\d\d[ ]\d{4}\]  # dmesg -T
        | \[[ ]{0,8}\d{1,10}\.\d{3,9}\]                                 # dmesg
        | \[?1\d{9}(?:\.\d{1,9})?\]?(?=[ ])
        | [A-Z][a-z]{2}[ ]{1,2}\d{1,2}[ ]\d\d:\d\d:\d\d(?:\.\d{1,9})?   # journal
            [ ][\w.-]{1,80}[ ][\w./@-]{1,80}(?:\[\d{1,9}\])?:
        )[ ]?(?:[-|:][ ])?
    )""",
    re.ASCII | re.VERBOSE,
)
_RANK_IN_TEXT = re.compile(
    r"""\[(?:PG[ ](?:ID[ ])?(?P<group>\d{1,9})[^][]{0,120}?[ ])?
          (?:[Gg]lobal[ _])?(?:[Rr]ank|RANK)[ =:]{0,2}(?P<rank>\d{1,6})\]
      | \bGLOBAL_RANK:[ ](?P<lightning>\d{1,6})
      | \brank(?P<composer>\d{1,6})\[\d{1,9}\]\[""",
    re.ASCII | re.VERBOSE,
)


class LogLine(NamedTuple):
    """A line without its prefixes. `rank` and `time` (seconds) are None if the prefixes do not give them.

    `text` has no colours, no launcher's prefix and no leading time; a header with a severity and the text's own
    `[Rank 3]` stay. Signatures are matched on the whole line; answers print and compare `text`.
    """

    rank: int | None
    time: float | None
    text: str


def parse_prefix(line: str, written: float | None = None, rank: int | None = None) -> LogLine:
    """Parse a line without its line end. `written` is when its log was last written (seconds since the epoch) and dates
    a line without a year; `rank` is the rank of its file, for a line without a rank."""
    text = line[:LONGEST_LINE]
    if "\x1b" in text:
        text = _ESCAPES_TEXT.sub("", text)
    end, torch_rank, launcher_rank, time_start = 0, None, None, -1
    for _ in range(MOST_PREFIXES):
        match = _PREFIX.match(text, end)
        if match is None:
            break
        kind = match.lastgroup
        if kind == "rank":
            torch_rank = torch_rank or match[kind]
        elif kind == "time":
            time_start = end if time_start < 0 else time_start
        elif kind:
            launcher_rank = launcher_rank or match[kind]
        end = match.end()
    digits = torch_rank or _rank_in_text(text, end) or launcher_rank
    time = parse_timestamp(text[end if time_start < 0 else time_start :].lstrip(), written)
    return LogLine(int(digits) if digits else rank, time, text[end:])


def strip_escapes(line: bytes) -> bytes:
    """The line without colours, cursor movements and terminal titles."""
    return _ESCAPES.sub(b"", line) if b"\x1b" in line else line


def _rank_in_text(text: str, start: int) -> str | None:
    front = text[start : start + FRONT]
    match = _RANK_IN_TEXT.search(front) if "ank" in front or "RANK" in front else None
    if match is None or match["group"] not in (None, "0"):
        return None
    return match["rank"] or match["lightning"] or match["composer"]
