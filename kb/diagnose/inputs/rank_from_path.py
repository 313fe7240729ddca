"""Finds out from the path of a file which rank wrote it."""

from __future__ import annotations

import re

# A rank within a group of tensor or data parallel ranks, or on a node, does not identify a process of the job.
_FILE = re.compile(r"(?:^|[^A-Za-z])(?P<of>[A-Za-z]*)[_-]?rank[_-]?(?P<rank>\d{1,6})(?!\d)", re.ASCII | re.IGNORECASE)
_WHOLE = re.compile(r"(?:console|debug|dump|err|global|job|log|nccl|out|output|run|stderr|stdout|trace|train|world)?")
_TORCHRUN = re.compile(r"attempt_\d{1,6}/(\d{1,6})/(?:stdout\.log|stderr\.log|error\.json)(?:\.gz|\.zst)?$", re.ASCII)


def rank_from_path(path: str) -> int | None:
    """The rank that a path names, or None if the path is ambiguous.

    Unambiguous are `rank_3.log`, `rank3.out`, `rank3/stderr.log`, `nccl_trace_rank_3`, and `attempt_0/3/stderr.log` of
    torchrun's `--log-dir`, whose number is the local rank. Ambiguous are `log.3` (as often a rotated log),
    `slurm-123_3.out` (a job of an array), `worker-3` (a node) and `mp_rank_3` (a rank of a group).
    """
    path = path.replace("\\", "/")
    if match := _TORCHRUN.search(path):
        return int(match[1])
    for part in reversed(path.split("/")):
        for match in _FILE.finditer(part):
            if _WHOLE.fullmatch(match["of"].lower()):
                return int(match["rank"])
    return None
