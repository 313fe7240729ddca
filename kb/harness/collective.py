"""Describes a collective of a flight record (`kb.harness.flight_compare`), and says whether it completed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

Record = dict[str, Any]

MOST_LISTED = 8  # tensors of a call, pieces of a list of ranks


def name_ranks(ranks: Collection[int]) -> str:
    """A phrase for some ranks: `rank 3`, `ranks 0 and 2`, `ranks 0-3, 6 and 9`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [name for run in runs for name in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    if len(names) > MOST_LISTED:
        names[MOST_LISTED:] = ["others"]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"


def operation(record: Record) -> str:
    """The operation of a record: `all_reduce` for `nccl:all_reduce`, `send` for `nccl:send 0->1`."""
    return str(record["op"]).split(":")[-1].split(" ")[0]


def describe(record: Record) -> str:
    """A phrase such as `all_reduce [4] Float`, with the output sizes if they differ."""
    sizes, outputs = _sizes(record["sizes"]), _sizes(record.get("outputs") or [])
    dtypes = "/".join(dict.fromkeys(map(str, record["dtypes"])))
    into = f"-> {outputs}" if outputs and outputs != sizes else ""
    return " ".join(filter(None, (operation(record), sizes, dtypes, into)))


def _sizes(sizes: list[Any]) -> str:
    more = f" and {len(sizes) - MOST_LISTED} more" if len(sizes) > MOST_LISTED else ""
    return " ".join(map(str, sizes[:MOST_LISTED])) + more


def call_site(record: Record) -> str:
    """The line of the user's code, ` (train.py:42 step)`; "" if the record has no frames."""
    frames = record.get("frames")
    return f" ({frames[0]})" if frames else ""


def created_at(record: Record) -> float | None:
    """When the collective was issued, in seconds since the epoch."""
    at = record.get("time_created_ns")
    return at / 1e9 if at else None


def has_completed(record: Record) -> bool:
    """Whether the collective completed.

    gloo does not record states, only that a call retired; with NCCL, a call that timed out retires too.
    """
    if str(record["op"]).startswith("gloo:") or "state" not in record:
        return bool(record["retired"])
    return bool(record["state"] == "completed")
