"""`kb capture` as a command: what it prints, its documents and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kb.capture import gather, session
from kb.diagnose.inputs.streams import read_file
from kb.errors import CaptureFailed
from tests.support.console import Kb, run_kb
from tests.support.in_process import run_kb_here

JOBS: list[dict[str, Any]] = [
    {
        "id": pid, "launcher": None, "command": "python train.py", "address": "", "slurm_job": "", "world_size": 1,
        "local_size": None, "ranks": [{"rank": 0, "pid": pid, "rank_from": "RANK", "children": [], "environment": {}}],
    }
    for pid in (11, 22)
]  # fmt: skip


def listing(monkeypatch: pytest.MonkeyPatch, jobs: list[dict[str, Any]], *problems: str) -> None:
    listed = {"jobs": jobs, "problems": list(problems), "has_pid": True, "host": "h"}
    monkeypatch.setattr(gather, "list_jobs", lambda _: listed)


def test_a_pid_that_is_none_is_a_usage_error(kb: Kb, tmp_path: Path) -> None:
    ended = kb("capture", "--pid", "4194304", "--out", tmp_path, "--json")
    assert ended.code == 2
    assert ended.json["error"]["message"] == "there is no process 4194304"


def test_of_several_jobs_one_must_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listing(monkeypatch, JOBS)
    ended = run_kb_here("capture", "--out", tmp_path, "--json", cwd=tmp_path)
    assert ended.code == 2
    assert "`--pid 11`: rank 0 of 1, python train.py; `--pid 22`" in ended.json["error"]["hint"]


def test_without_a_job_the_reasons_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listing(monkeypatch, [], "3 processes of other users could not be looked into")
    ended = run_kb_here("capture", "--out", tmp_path, cwd=tmp_path)
    assert ended.code == 1
    assert "3 processes of other users" in ended.err
    assert "no training job is running on this node" in ended.err
    assert run_kb_here("capture", "--out", tmp_path, "--json", cwd=tmp_path).json["bundle"] is None


def test_a_bundle_that_cannot_be_written_loses_no_diagnosis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kb.capture import archive
    from kb.capture.bundle import File
    from tests.support.capture_records import SLEEPS, encoded, record

    files = [
        File(
            f"node-0/rank-{rank}/process.json", "process", encoded(record(rank, SLEEPS) if rank == 1 else record(rank))
        )
        for rank in range(3)
    ]
    taken = session.Capture("kb-capture-1", archive.pack(files, {}, 1.0), 1.0, (), ())

    def fail(*_: object) -> None:
        raise CaptureFailed("the bundle cannot be written to /full: No space left on device", "it needs 9 bytes")

    listing(monkeypatch, JOBS[:1])
    monkeypatch.setattr(session, "capture", lambda *_: taken)
    monkeypatch.setattr(archive, "write", fail)
    ended = run_kb_here("capture", "--out", tmp_path, cwd=tmp_path)
    assert ended.code == 5
    assert "rank 1 is in train.py:24" in ended.out
    assert "No space left on device" in ended.err


def test_a_process_that_is_no_rank_is_captured_by_its_pid(tmp_path: Path) -> None:
    code = "import time\ndef wait_here():\n    time.sleep(120)\nwait_here()"
    (tmp_path / "single.py").write_text(code)
    secret = {**os.environ, "DATABASE_PASSWORD": "hunter2hunter2", "NCCL_DEBUG": "WARN"}
    with subprocess.Popen([sys.executable, tmp_path / "single.py", "--token", "tttt1234"], env=secret) as process:
        try:
            command = ("capture", "--pid", str(process.pid), "--out", tmp_path, "--interval", "1")
            ended = run_kb(*command, cwd=tmp_path)
            document = run_kb(*command, "--json", "--no-diagnose", cwd=tmp_path).json
        finally:
            process.kill()
    assert ended.code == 0
    assert f"process {process.pid} is in single.py:3 wait_here" in " ".join(ended.out.split())
    assert "kb diagnose" in ended.out
    assert document["diagnosis"] is None
    assert document["ranks"] == [{"rank": None, "rank_from": "", "pid": process.pid}]
    content = b"".join(_content(path) for path in tmp_path.glob("*.tar.zst"))
    assert b"NCCL_DEBUG" in content
    for word in (b"hunter2", b"DATABASE_PASSWORD", b"tttt1234"):
        assert word not in content


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--nodes", "ssh:a", "--pid", "1"), 2, "--pid names a process of this node"),
        (("--job", "n0:29500"), 2, "--job selects a job across nodes"),
        (("--nodes", "a,b"), 2, "--nodes 'a,b' names no nodes"),
        (("--nodes", "ssh:no-host.invalid,nor-this.invalid"), 5, "none of 2 nodes answered"),
    ],
)
def test_nodes_that_cannot_be_captured(options: tuple[str, ...], code: int, message: str, tmp_path: Path) -> None:
    ended = run_kb("capture", *options, "--out", tmp_path, "--json", cwd=tmp_path)
    assert (ended.code, ended.json["error"]["message"]) == (code, message)


def _content(path: Path) -> bytes:
    with read_file(str(path), str(path), print) as stream:
        return stream.read()


def test_the_manifest_lists_every_file_with_its_checksum(tmp_path: Path) -> None:
    from hashlib import sha256

    from kb.capture.archive import pack
    from kb.capture.bundle import File
    from kb.capture.gather import read_parts

    (tmp_path / "b.tar.zst").write_bytes(pack([File("node-0/kernel.log", "kernel log", b"line\n")], {"seconds": 1}, 0))
    (name, manifest), (_, content) = read_parts(_content(tmp_path / "b.tar.zst"))
    document = json.loads(manifest)
    assert (name, document["schema"], document["seconds"]) == ("manifest.json", "kb.capture.manifest.v1", 1)
    assert document["files"]["node-0/kernel.log"]["sha256"] == sha256(content).hexdigest()
