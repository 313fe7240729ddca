"""Dumps of torch's flight recorder, as ProcessGroupNCCL writes them."""

from __future__ import annotations

import pickle
from typing import Any

from kb.diagnose.readers.flight_recorder import FlightDump, read_dump


def entry(seq: int, **fields: Any) -> dict[str, Any]:
    """A completed all-reduce."""
    return {
        "record_id": seq - 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "state": "completed",
        "retired": True,
        "time_created_ns": 1_700_000_000_000_000_000 + seq,
        **fields,
    }


def dump_of(rank: int, entries: list[dict[str, Any]], **fields: Any) -> FlightDump:
    content = {"version": "2.10", "entries": entries, **fields}
    return read_dump(pickle.dumps(content), f"/dumps/nccl_trace_rank_{rank}")
