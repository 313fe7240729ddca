"""Compares the flight records of the ranks: which rank never came to which collective, and who disagreed.

Input is what `kb.worker` takes out of torch's flight recorder: per rank, a list of collectives with
`group`, `seq` (per group, counting from 1), `op`, `sizes`, `dtypes`, `retired`.
"""

from __future__ import annotations

from typing import Any

Records = dict[int, list[dict[str, Any]]]


def compare(records: Records, world_size: int) -> tuple[str, ...]:
    """Sentences about the first collective the ranks disagree on; empty when they agree or too few reported."""
    if len(records) < 2:
        return ()
    calls: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for rank, entries in records.items():
        for entry in entries:
            calls.setdefault((str(entry["group"]), int(entry["seq"])), {})[rank] = entry
    for (_, seq), by_rank in sorted(calls.items(), key=lambda item: item[0][1]):
        missing = sorted(set(records) - set(by_rank))
        if missing:
            return (_missing(seq, by_rank, missing), *_silent(records, world_size))
        kinds = {rank: _describe(entry) for rank, entry in by_rank.items()}
        if len(set(kinds.values())) > 1:
            told = "; ".join(f"rank {rank} {kind}" for rank, kind in sorted(kinds.items()))
            return (f"collective {seq} differs: {told}", *_silent(records, world_size))
    return _silent(records, world_size)


def _missing(seq: int, by_rank: dict[int, dict[str, Any]], missing: list[int]) -> str:
    rank, entry = min(by_rank.items())
    who = " and ".join(f"rank {one}" for one in missing)
    return f"{who} never issued collective {seq} ({_describe(entry)}), which rank {rank} is in"


def _silent(records: Records, world_size: int) -> tuple[str, ...]:
    silent = [f"rank {rank}" for rank in range(world_size) if rank not in records]
    return (f"no flight record from {' and '.join(silent)}",) if silent else ()


def _describe(entry: dict[str, Any]) -> str:
    return f"{entry['op']} {entry['sizes']} {entry['dtypes']}"
