"""The agent runs anywhere: Python 3.8, the standard library, one text on stdin."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kb.capture import gather
from kb.capture.agent import processes, stacks, steps
from kb.capture.session import packed_py_spy
from tests.support.console import CHECKOUT

MODULES = sorted((CHECKOUT / "kb" / "capture" / "agent").glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_is_python_3_8_and_imports_the_standard_library_and_its_neighbours(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= set(sys.stdlib_module_names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert (node.module or "").split(".")[0] in sys.stdlib_module_names
        elif isinstance(node, ast.Attribute):
            assert node.attr not in ("removeprefix", "removesuffix", "pidfd_open"), "newer than 3.8"
        elif isinstance(node, ast.keyword):
            assert node.arg != "strict", "zip has it since 3.10"


def test_every_module_is_sent() -> None:
    assert {path.stem for path in MODULES} == {"__init__", *gather.MODULES}


def test_the_text_lists_this_process_where_nothing_of_kb_is_installed(tmp_path: Path) -> None:
    script = gather.agent_script({"mode": "list", "pid": os.getpid(), "is_here": True, "as_root": "", "limit_s": 60})
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-"], input=script.encode(), capture_output=True, cwd=tmp_path, timeout=60
    )
    assert json.loads(ended.stdout)["has_pid"], ended.stderr
    assert list(tmp_path.iterdir()) == []


def outcome(step: steps.Step, seconds: float = 20) -> steps.Outcome:
    return run_apart([step], seconds)[0]


def run_apart(given: list[steps.Step], seconds: float) -> list[steps.Outcome]:
    """pytest has threads and signals of its own: restore what the agent changes."""
    import signal

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        return steps.run(given, time.monotonic() + seconds)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_step_that_does_not_return_is_ended_and_the_others_go_on() -> None:
    hangs = steps.Step("hangs", "node", 3.0, ("sh", "-c", "trap '' TERM INT HUP; echo begun; sleep 1000"))
    works = [steps.Step(f"works-{number}", "node", 5, function=lambda: [1, 2]) for number in range(8)]
    began = time.monotonic()
    first, *others = run_apart([hangs, *works], 60)
    assert time.monotonic() - began < 50, "it sleeps for 1000"
    assert first.error.startswith("did not return in 3.")
    assert first.output == b"begun\n", "what it printed is kept"
    assert [other.json() for other in others] == [[1, 2]] * 8


def test_the_deadline_holds_for_all_steps_together() -> None:
    began = time.monotonic()
    given = [steps.Step(f"s{number}", "node", 5, ("sleep", "30")) for number in range(12)]
    outcomes = run_apart(given, 1.0)
    assert time.monotonic() - began < 25, "each sleeps for 30"
    assert outcomes[-1].error == "left out: the time was over"


def test_the_output_of_a_step_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MOST_OUTPUT", 1 << 20)
    flood = outcome(steps.Step("flood", "node", 20, ("sh", "-c", "exec yes")))
    assert "was cut" in flood.error or "too large" in flood.error.lower(), flood.error
    assert len(flood.output) <= 1 << 20


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (steps.Step("fails", "node", 5, ("sh", "-c", "echo why >&2; exit 3")), "why"),
        (steps.Step("missing", "node", 5, ("no-such-program-of-kb",)), "No such file or directory"),
        (steps.Step("raises", "node", 5, function=lambda: 1 // 0), "integer division or modulo by zero"),
    ],
)
def test_a_step_that_fails_says_why(step: steps.Step, error: str) -> None:
    assert outcome(step).error == error


def test_the_archive_is_a_tar_that_can_be_read_where_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "capture.tar"
    with path.open("wb") as file:
        archive = steps.Archive(os.dup(file.fileno()))
        for number in range(3):
            assert archive.add(f"rank-{number}/sample-1.json", b"x" * 700)
        archive.close()
    data = path.read_bytes()
    names = [name for name, _ in gather.read_parts(data)]
    assert names == [f"rank-{number}/sample-1.json" for number in range(3)]
    assert [name for name, _ in gather.read_parts(data[: 1536 + 512 + 100])] == names[:1]


def test_only_listed_variables_leave_a_process_and_options_called_like_secrets_are_masked() -> None:
    secrets = {"AWS_SECRET_ACCESS_KEY": "aKiAsEcReT", "HF_TOKEN": "hf_aaaa", "NCCL_API_KEY": "kkkk", "HOME_PATH": "/x"}
    kept = {"RANK": "3", "NCCL_DEBUG": "INFO", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    command = ["sh", "-c", "sleep 30; true", "--api-key", "sk-1", "--wandb-token=w", "--keys", "--lr", "0.1"]
    with subprocess.Popen(command, env={**secrets, **kept, "PATH": os.environ["PATH"]}) as process:
        try:
            while "sleep 30" not in " ".join(processes.arguments(process.pid)):
                time.sleep(0.01)
            assert processes.environment(process.pid) == kept
            words = processes.arguments(process.pid)[3:]
            assert words == ["--api-key", "***", "--wandb-token=***", "--keys", "--lr", "0.1"]
        finally:
            process.kill()


def test_a_sample_has_what_a_diagnosis_compares() -> None:
    sample = processes.sample(os.getpid())
    assert sample["state"] == "R"
    assert sample["cpu_s"] > 0
    assert len(sample["switches"]) == 2
    assert {thread["tid"] for thread in sample["threads"]} >= {os.getpid()}


def test_a_pid_that_was_used_again_is_another_process() -> None:
    now = processes.stat(os.getpid())
    assert now is not None
    assert processes.is_still(os.getpid(), now.start)
    assert not processes.is_still(os.getpid(), now.start - 1)


@pytest.mark.parametrize(
    ("yama", "capabilities", "owner", "uid", "expected"),
    [
        (0, 0, 1001, 1000, "it belongs to user 1001"),
        (1, 0, 1000, 1000, "sysctl kernel.yama.ptrace_scope=0"),
        (2, 0, 1000, 1000, "ptrace_scope is 2"),
        (3, stacks.SYS_PTRACE, 0, 0, "until the machine is started again"),
        (0, 0, 1000, 0, "--cap-add SYS_PTRACE"),
    ],
)
def test_a_refusal_names_the_exact_remedy(
    monkeypatch: pytest.MonkeyPatch, yama: int, capabilities: int, owner: int, uid: int, expected: str
) -> None:
    fields = {"Uid": str(owner), "CapEff": f"{capabilities:x}"}
    monkeypatch.setattr(stacks, "_yama", lambda: yama)
    monkeypatch.setattr(stacks, "_status_field", lambda _, name: fields[name])
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(os, "stat", lambda _: os.stat_result((0, 0, 0, 0, uid, 0, 0, 0, 0, 0)))
    assert expected in stacks.remedy(4711, "`sudo kb capture`")


def test_a_stack_that_fails_is_tried_again_unless_the_reason_lasts(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\necho x >> "$0.calls"\nexit 1\n')
    tool.chmod(0o755)
    (failed,) = run_take(str(tool))
    assert failed.error == "exit code 1"
    assert (tmp_path / "tool.calls").read_text().count("x") == stacks.TRIES
    tool.write_text('#!/bin/sh\necho x >> "$0.refused"\necho "Permission denied (os error 13)" >&2\nexit 1\n')
    (refused,) = run_take(str(tool))
    assert (tmp_path / "tool.refused").read_text().count("x") == 1
    assert "ptrace is refused" in stacks.explain(refused, os.getpid(), "")["error"]


def test_a_py_spy_that_was_sent_runs_from_memory() -> None:
    tool = stacks.sent_tool(packed_py_spy())
    assert outcome(steps.Step("version", "node", 10, (tool, "--version"))).output.startswith(b"py-spy ")


def test_a_py_spy_of_somebody_else_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "py-spy"
    tool.touch(0o755)
    monkeypatch.setenv("PATH", "")
    assert stacks.find_tool([str(tmp_path / "python3"), "python"]) == str(tool)
    if os.geteuid() == 0:
        os.chown(tool, 1000, 1000)
        assert stacks.find_tool([str(tmp_path / "python3")]) == ""


def run_take(tool: str) -> Any:
    import signal

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        return stacks.take(tool, [stacks.Target("rank-0", os.getpid(), 0)], "stack-1", time.monotonic() + 20)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
