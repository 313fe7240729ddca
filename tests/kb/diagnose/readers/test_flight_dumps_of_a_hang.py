"""The flight-recorder dumps that torch really writes after a real hang."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kb.diagnose.readers.flight_comparison import compare_dumps
from kb.diagnose.readers.flight_recorder import FlightDump, read_dump
from kb.diagnose.readers.safe_unpickler import load_pickle
from tests.support.console import GENEROUS_S

HANG = """
import datetime, os, sys
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

folder = sys.argv[1]
child = os.fork()  # importing torch takes seconds: once for both ranks
rank = 0 if child else 1
wait = datetime.timedelta(seconds=60 if rank else 2)
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)

def step():
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        dist.all_reduce(torch.ones(8))  # rank 1 skips it

try:
    step()
except RuntimeError as error:
    assert "Timed out" in str(error), error
open(f"{folder}/nccl_trace_rank_{rank}", "wb").write(_dump_fr_trace())
open(f"{folder}/trace{rank}.json", "wb").write(_dump_fr_trace_json())
store.set(f"dumped{rank}", "1")
store.wait([f"dumped{1 - rank}"], datetime.timedelta(seconds=170))  # alive and silent while the other waits
os._exit(os.waitpid(child, 0)[1] if child else 0)
"""


def read_file(path: Path) -> FlightDump:
    return read_dump(path.read_bytes(), str(path))


@pytest.fixture(scope="module")
def hang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dumps of two gloo ranks, of which rank 1 skipped the second all-reduce."""
    pytest.importorskip("torch._C._distributed_c10d", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("hang")
    script = folder / "hang.py"
    script.write_text(HANG)
    ranks = subprocess.Popen([sys.executable, str(script), str(folder)], start_new_session=True)
    try:
        assert ranks.wait(timeout=2 * GENEROUS_S) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    return folder


def test_the_pickles_of_a_real_hang_name_the_rank_that_skipped_and_the_line_that_waits(hang: Path) -> None:
    dumps = [read_file(hang / f"nccl_trace_rank_{rank}") for rank in (1, 0)]
    number = HANG.splitlines().index("        dist.all_reduce(torch.ones(8))  # rank 1 skips it") + 1
    (output,) = compare_dumps(dumps)
    assert output.text == (
        f"rank 1 never issued collective 2 (all_reduce [8] Float), which rank 0 is in (hang.py:{number} step)"
    )
    assert (output.rank, output.number, output.source) == (1, 0, str(hang / "nccl_trace_rank_1"))
    assert output.time == pytest.approx((hang / "store").stat().st_mtime, abs=300)


def test_the_json_of_a_real_hang_says_the_same_without_the_line(hang: Path) -> None:
    (output,) = compare_dumps(read_file(hang / f"trace{rank}.json") for rank in (0, 1))
    assert output.text == "rank 1 never issued collective 2 (all_reduce [8] Float), which rank 0 is in"
    assert output.rank == 1


def test_pickle_and_json_of_one_rank_count_once_and_the_one_with_stacks_wins(hang: Path) -> None:
    paths = [hang / name for name in ("nccl_trace_rank_0", "trace0.json", "trace1.json", "nccl_trace_rank_1")]
    (output,) = compare_dumps(map(read_file, paths))
    assert output.text.endswith(" step)")


def test_a_real_dump_is_read_in_full(hang: Path) -> None:
    dump = read_file(hang / "nccl_trace_rank_0")
    assert (dump.rank, dump.version.split(".")[0], len(dump.records)) == (0, "2", 2)
    assert dump.status["0:default_pg"].enqueued == 2
    record = dump.records[0]
    assert (record["group"], record["seq"], record["op"]) == ("0:default_pg", 1, "gloo:all_reduce")
    assert (record["sizes"], record["outputs"], record["dtypes"]) == ([[4]], [[4]], ["Float"])
    assert record["frames"][0].endswith(" step")
    assert not record["p2p"]


def test_a_real_pickle_reads_as_the_standard_library_reads_it(hang: Path) -> None:
    data = (hang / "nccl_trace_rank_0").read_bytes()
    assert load_pickle(data) == pickle.loads(data)
