"""Which lines report a failure, which are advice, and which only follow from another rank's failure."""

from __future__ import annotations

import pytest

from kb.diagnose.advice import strip_advice
from kb.diagnose.failure_lines import is_aftermath, is_failure, is_interruption, is_launcher, is_raised

FAILURES = [
    "Traceback (most recent call last):",
    "RuntimeError: shape mismatch",
    "acme.sharding.ShardError: shard 3 is odd",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "[E1121 03:14:05.118 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(",
    "E1121 03:14:10.001 71242 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: 1) local_rank: 0",
    "node1:7:9 [0] transport/net_socket.cc:556 NCCL WARN NET/Socket : message truncated",
    "/opt/cuda/Indexing.cu:1553: operator(): block: [3,0,0] Assertion `srcIndex < size` failed.",
    "Memory cgroup out of memory: Killed process 71302 (python) total-vm:289kB",
    "NVRM: Xid (PCI:0000:1b:00): 79, pid=123, GPU has fallen off the bus.",
    "slurmstepd: error: *** JOB 17 ON node3 CANCELLED AT 2026-11-21T03:14:00 DUE TO TIME LIMIT ***",
    "make: *** [Makefile:3: main.o] Error 1",
    "[PG ID 0 PG GUID 0 Rank 2] Process group watchdog thread terminated with exception: CUDA error: misaligned address",
    "fused.cu:12:5: error: unknown type name 'half2'",
    "保存检查点失败",
    "第 3 步 训练卡住",
]
REMARKS = [
    "",
    "step 100: loss 2.31, lr 1e-5",
    "UserWarning: Error bars are not drawn",
    "[2026-11-21 03:00:01] [WARNING] [launch.py:12] Unable to find hostfile, will proceed with local resources only.",
    "node1:7:9 [0] NCCL INFO NET/IB : No device found, failed over to Socket.",
    "INFO: retry, error was transient",
    "E0000 00:00:1.0 7 cuda_fft.cc:485] Unable to register cuFFT factory: one has already been registered",
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f55 in libc10.so)",
    "Exception raised from checkTimeout at ProcessGroupNCCL.cpp:686 (most recent call first):",
    "error_rate: 0.03, eval/failures: 0",
    "开始训练，共 8 卡",
]
ADVICE = [
    "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU "
    "operations might run on corrupted/incomplete data.",
    "To avoid data inconsistency, we are taking the entire process down.",
    "Stack trace of the failed collective not found, potentially because FlightRecorder is disabled. You can enable it "
    "by setting TORCH_NCCL_TRACE_BUFFER_SIZE to a non-zero value.",
    "This may indicate a possible application crash on rank 0 or a network set up issue.",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace might be incorrect.",
    "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
    "This is typically caused by a remote worker crashing.",
    "Please check that the file is not corrupt.",
]


@pytest.mark.parametrize("text", FAILURES)
def test_a_line_that_reports_a_failure(text: str) -> None:
    assert is_failure(text)


@pytest.mark.parametrize("text", REMARKS)
def test_a_remark_is_no_failure(text: str) -> None:
    assert not is_failure(text)


@pytest.mark.parametrize("text", ADVICE)
@pytest.mark.parametrize("head", ["", "[E1121 03:14:06.220 ProcessGroupNCCL.cpp:744] [Rank 3] ", "[rank3]: "])
def test_advice_is_no_failure_whoever_gives_it(text: str, head: str) -> None:
    if head != "[rank3]: ":  # which the scanner has taken off
        assert not is_failure(head + text)
    assert "failed or timed out" not in strip_advice(head + text)


def test_what_stands_before_advice_counts() -> None:
    text = "RuntimeError: Connection closed by peer. This is typically caused by a remote worker crashing."
    assert is_failure(text)
    assert strip_advice(text).strip() == "RuntimeError: Connection closed by peer."


@pytest.mark.parametrize(
    "text",
    [
        FAILURES[4],
        "RuntimeError: [../gloo/pair.cc:553] Connection closed by peer [10.1.1.1]:4",
        "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "W1121 03:14:09 71242 api.py:900] Sending process 71300 closing signal SIGTERM",
    ],
)
def test_what_follows_from_another_ranks_end(text: str) -> None:
    assert is_aftermath(text)


@pytest.mark.parametrize(
    "text",
    [
        FAILURES[1],
        FAILURES[3],
        "terminate called after throwing an instance of 'std::bad_alloc'",
        FAILURES[12],
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address.",
    ],
)
def test_what_a_rank_did_itself(text: str) -> None:
    assert is_failure(text)
    assert not is_aftermath(text)


def test_a_launcher_is_told_from_a_rank() -> None:
    assert is_launcher(FAILURES[5])
    assert is_launcher("  exitcode  : -6 (pid: 71300)")
    assert is_launcher("[2025-03-04 11:20:31,544] [ERROR] [launch.py:325:sigkill_handler] exits with return code = -9")
    assert not any(is_launcher(text) for text in FAILURES[:5])


def test_an_interruption_is_what_one_does_to_a_job_that_hangs() -> None:
    assert is_interruption("KeyboardInterrupt")
    assert is_interruption(FAILURES[10])
    assert not is_interruption(FAILURES[3])


def test_the_last_line_of_a_traceback_is_known() -> None:
    assert is_raised("acme.sharding.ShardError: shard 3 is odd")
    assert is_raised("KeyboardInterrupt")
    assert not is_raised("Traceback (most recent call last):")
    assert not is_raised("Error: retrying the download")
    assert not is_raised("ERROR trainer: acme.sharding.ShardError: shard 3 is odd")
