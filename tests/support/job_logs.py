"""Logs of failed jobs for tests of `kb diagnose`, and its answers about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.console import Kb

SHM = "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-{rank:04x}Zk (size 9637888)"
OOM = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/w/train.py", line 180, in main
[rank3]:     loss = model(**batch).loss
[rank3]:   File "/opt/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1775, in _call_impl
[rank3]:     return forward_call(*args, **kwargs)
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 3 has a total capacity of 79.11 GiB
"""
SUMMARY = """\
E1121 03:14:10.001 71242 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: -6) local_rank: 0
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : -6 (pid: 71300)
  error_file: <N/A>
  traceback : Signal 6 (SIGABRT) received by PID 71300
"""
HEALTHY = "".join(f"[rank{n % 4}]: step {n}: loss {2 - n / 99:.3f}, lr 1e-5\n" for n in range(99)) + "done\n"


def watchdog(rank: int, seq: int = 812, op: str = "ALLREDUCE", second: int = 5) -> str:
    call = f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=503316, NumelOut=503316, Timeout(ms)=600000)"
    head = f"[rank{rank}]:[E1121 03:14:{second:02}.118 ProcessGroupNCCL.cpp:"
    return (
        f"{head}683] [Rank {rank}] Watchdog caught collective operation timeout: {call} ran for 600013 milliseconds\n"
        f"{head}744] [Rank {rank}] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA "
        "kernels, subsequent GPU operations might run on corrupted/incomplete data.\n"
        f"{head}758] [Rank {rank}] To avoid data inconsistency, we are taking the entire process down.\n"
        "frame #0: c10::Error::Error(c10::SourceLocation, std::__cxx11::basic_string<char>) + 0x80 (0x7f in libc10.so)\n"
    )


def diagnosed(kb: Kb, *args: str | Path, stdin: bytes = b"") -> Any:
    """Run `kb diagnose`, which must give an answer, and return its document."""
    ended = kb("diagnose", *args, "--json", stdin=stdin)
    assert ended.code in (0, 1), ended.err
    assert ended.json["schema"] == "kb.diagnose.v1"
    assert ended.json["ok"]
    return ended.json


def ids(answer: Any) -> list[str]:
    return [item["id"] for item in answer["findings"]]
