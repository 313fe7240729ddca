"""Evidence of an arm that hangs: flight records, stacks and kernel wait channels. Both sides of the exchange.

The guard asks for evidence by creating a file. A thread of each rank answers with its flight record while the main
thread is blocked, and faulthandler writes the stacks on SIGUSR1. Runs in the reader's training interpreter: standard
library and Python 3.9 only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Tuple  # works on Python 3.9

from kb.runtime import processes

REQUEST = "evidence-wanted"  # file in the arm's directory
FLIGHT_RECORDS_S = 0.5  # how long the guard waits for flight records
STACKS_S = 0.1
POLL_S = 0.01
MOST_COLLECTIVES = 50  # only the last ones of a rank


def collect(spec: Dict[str, Any], ranks: Mapping[int, int]) -> Dict[str, str]:
    """In the guard: have ranks (pid to rank) write flight records and stacks. Returns rank to kernel wait channel."""
    Path(spec["dir"], REQUEST).touch()
    waiting = {
        str(rank): processes.waiting_in(process)
        for pid, rank in ranks.items()
        if (process := processes.read_process(pid))
    }
    records = [_flight_path(spec["dir"], rank) for rank in ranks.values() if spec["world_size"] > 1]
    end = time.monotonic() + FLIGHT_RECORDS_S
    while time.monotonic() < end and not all(map(os.path.exists, records)):
        time.sleep(POLL_S)
    for pid in ranks:  # last: the signal interrupts system calls and may un-hang the rank
        process = processes.read_process(pid)
        if process and process.state != "T":
            processes.send_signal(process, signal.SIGUSR1)
    time.sleep(STACKS_S if ranks else 0)
    return waiting


def answer_request(spec: Dict[str, Any], rank: int) -> None:
    """In a thread of a rank: write its flight record once the guard asks for it."""
    request = os.path.join(spec["dir"], REQUEST)
    while not os.path.exists(request):
        time.sleep(0.05)
    write_flight_record(spec, rank)


def write_flight_record(spec: Dict[str, Any], rank: int) -> None:
    """Write the collectives this rank issued, from torch's flight recorder.

    `nccl_trace_rank_<N>` is what torch writes for its own analyzer, `rank<N>.flight.json` what
    `kb.harness.flight_compare` compares.
    """
    try:
        dumps = _flight_recorder()
        record = json.loads(dumps[0]()) if dumps else None
    except Exception:  # evidence is optional: its absence must not change an outcome
        return
    if record is None or dumps is None:
        return
    if spec["world_size"] > 1:
        with contextlib.suppress(Exception):
            write_atomically(os.path.join(spec["dir"], "nccl_trace_rank_%d" % rank), dumps[1]())
    collectives = [_collective(entry) for entry in record.get("entries", [])]
    write_atomically(_flight_path(spec["dir"], rank), json.dumps(collectives[-MOST_COLLECTIVES:]).encode())


def write_atomically(path: str, data: bytes) -> None:
    """Write under another name first, so that a reader sees the whole file or none."""
    with open(path + ".part", "wb") as file:
        file.write(data)
    os.rename(path + ".part", path)


def _flight_path(directory: str, rank: int) -> str:
    return os.path.join(directory, "rank%d.flight.json" % rank)


def _flight_recorder() -> Optional[Tuple[Callable[[], str], Callable[[], bytes]]]:
    """torch's dump functions for JSON and pickle, by their names in this release and backend; None without them."""
    if "torch" not in sys.modules:
        return None
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist

    name = "_dump_nccl_trace" if dist.is_initialized() and dist.get_backend() == "nccl" else "_dump_fr_trace"
    as_json, as_pickle = getattr(c10d, name + "_json", None), getattr(c10d, name, None)
    return (as_json, as_pickle) if as_json and as_pickle else None


def _collective(entry: Dict[str, Any]) -> Dict[str, Any]:
    return {
        "group": entry["process_group"][1],
        "seq": entry["collective_seq_id"],
        "op": entry["profiling_name"],
        "sizes": entry["input_sizes"],
        "dtypes": entry["input_dtypes"],
        "retired": entry.get("retired", entry.get("state") == "completed"),
    }
