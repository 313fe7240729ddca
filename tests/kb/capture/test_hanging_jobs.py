"""Real gloo jobs that hang: captured, the culprit named, and then they go on, to the right sum and exit code 0."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from tests.bench.capture import captured, is_named
from tests.support.console import KB, is_running, run_kb, wait_for
from tests.support.hanging import CULPRIT, KINDS, HangingJob, hanging_job, state

pytest.importorskip("torch")
QUICK = ("sleeping", "stopped")
SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin") or ""  # one that every user may start
MOST_S = 60.0  # of a capture on a machine that other tests load

DETAILS = {
    "stopped": "is stopped (state T",
    "spinning": "s of CPU",
    "lock": "waits for the lock of a file, which process",
    "loader": "has the worker process",
    "command": "waits for process",
    "disk-sleep": "is in uninterruptible sleep in",
    "missing-peer": "is in recv called from",
    "divergent": "is in monitored_barrier called from",
}


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_the_culprit_is_named_and_the_job_goes_on(kind: str, tmp_path: Path) -> None:
    with hanging_job(kind, tmp_path / "job") as job:
        before = [is_not_stopped(pid) for pid in job.pids.values()]
        began = time.monotonic()
        document = captured(job, tmp_path)
        seconds = time.monotonic() - began
        assert [is_not_stopped(pid) for pid in job.pids.values()] == before
        job.end_well()
    texts = [line["text"] for line in document["diagnosis"]["observations"]]
    assert is_named(document), (texts, document["problems"])
    assert any(DETAILS.get(kind, "") in text for text in texts), texts
    assert seconds < MOST_S
    (bundle,) = tmp_path.glob("*.tar.zst")
    assert bundle.stat().st_mode & 0o777 == 0o600
    again = run_kb("diagnose", bundle, "--json", cwd=tmp_path).json
    assert [line["text"] for line in again["observations"]] == texts, "another machine reads the same from the bundle"


def begin(job: HangingJob, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [str(KB), "capture", "--pid", str(job.pids[0]), "--out", str(folder), *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def have_ended(pids: list[int]) -> bool:
    return not any(map(is_running, pids))


def is_not_stopped(pid: int) -> bool:
    return state(pid) not in "Tt"


@pytest.mark.slow
def test_kb_that_is_killed_in_between_leaves_nothing_behind_and_nothing_stopped(tmp_path: Path) -> None:
    """Also while py-spy pauses a rank for its C++ frames."""
    with hanging_job("sleeping", tmp_path / "job") as job:
        for wait_s in (0.3, 1.0, 2.0, 3.5, 4.0, 4.5):
            with begin(job, tmp_path, "--native", "--interval", "0.5") as kb:
                wait_for(partial(children, kb.pid), "the agent")
                time.sleep(wait_s)
                below = [pid for child in children(kb.pid) for pid in (child, *children(child))]
                kb.kill()
            wait_for(partial(have_ended, below), "the agent and its steps to end", 20)
        for pid in job.pids.values():
            wait_for(partial(is_not_stopped, pid), "no rank to be stopped", 10)
        assert [path.name for path in tmp_path.glob(".kb-capture*")] == [], "no bundle that is not whole"
        job.end_well()


@pytest.mark.slow
def test_a_job_that_runs_is_not_harmed_by_captures_with_pauses(tmp_path: Path) -> None:
    with hanging_job("running", tmp_path / "job") as job:
        for _ in range(3):
            document = captured(job, tmp_path, "--native", "--interval", "0.5")
            assert document["diagnosis"]["ranks"]["absent"] == [], document["diagnosis"]["observations"]
        job.end_well()


@pytest.mark.slow
def test_a_tool_that_never_returns_is_evidence_and_left_behind(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("nvidia-smi", "dmesg"):
        (tools / name).write_text("#!/bin/sh\ntrap '' TERM INT\nsleep 600\n")
        (tools / name).chmod(0o755)
    with hanging_job("sleeping", tmp_path / "job") as job:
        path = f"{tools}:{os.environ['PATH']}"
        ended = run_kb("capture", "--pid", str(job.pids[1]), "--out", tmp_path, "--json", cwd=tmp_path, PATH=path)
        job.end_well()
    document = ended.json
    texts = [line["text"] for line in document["diagnosis"]["observations"]]
    assert is_named(document)
    assert "kb: nvidia-smi did not answer in 8 s" in texts
    assert document["seconds"] < 30


@pytest.mark.slow
def test_a_deadline_that_is_too_short_for_all_still_leaves_a_bundle(tmp_path: Path) -> None:
    with hanging_job("sleeping", tmp_path / "job") as job:
        document = captured(job, tmp_path, "--seconds", "3", "--interval", "60")
        job.end_well()
    assert document["seconds"] < 7
    assert Path(document["bundle"]).exists()


def test_a_rank_that_ends_in_between_is_said_and_the_others_are_captured(tmp_path: Path) -> None:
    from kb.capture import gather, session

    with hanging_job("sleeping", tmp_path / "job") as job:
        (listed,) = gather.list_jobs(job.pids[0])["jobs"]
        os.kill(job.pids[CULPRIT], signal.SIGKILL)
        wait_for(lambda: not is_running(job.pids[CULPRIT]), "the end of a rank")
        taken = session.capture(listed, session.Settings(interval_s=0.5))
    ended = [problem for problem in taken.problems if problem.endswith(": the process has ended")]
    assert any("rank-1" in problem for problem in ended), taken.problems  # the others soon lose their peer and end too
    assert len(taken.data) > 1000


@pytest.mark.skipif(os.geteuid() != 0 or not SYSTEM_PYTHON, reason="only root can become another user")
@pytest.mark.slow
def test_another_user_is_told_how_to_be_allowed(tmp_path: Path) -> None:
    from tests.support.ordinary_user import in_child

    with hanging_job("sleeping", tmp_path / "job") as job:
        pid = job.pids[0]

        def capture_it() -> list[object]:
            from kb.capture import gather

            listed = gather.list_jobs(pid, SYSTEM_PYTHON)
            return [len(listed["jobs"]), listed["problems"], listed["has_pid"]]

        found, problems, has_pid = in_child(capture_it)
        job.end_well()
    assert (found, has_pid) == (0, True)
    assert any("sudo kb capture" in problem for problem in problems), problems
