"""Runs the agent on this node, within a deadline, and takes what it wrote, also of an agent that had to be ended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from kb.errors import CaptureFailed

MODULES = ("steps", "processes", "ranks", "jobs", "stacks", "node", "triggers", "main")  # in the order of their imports
LIST_S = 25.0  # for the list of jobs, with processes that do not let themselves be read
GRACE_S = 3.0  # beyond its own deadline, after which the agent is ended
MOST_BYTES = 128 << 20  # of what an agent may return
LOADER = """\
import json, sys, types
package = sys.modules["kb_agent"] = types.ModuleType("kb_agent")
package.__path__ = []
for name, source in json.loads(SOURCES):
    module = types.ModuleType("kb_agent." + name)
    module.__package__ = "kb_agent"
    sys.modules[module.__name__] = module
    setattr(package, name, module)
    exec(compile(source, "kb_agent/" + name + ".py", "exec"), module.__dict__)
sys.modules["kb_agent.main"].main(json.loads(OPTIONS))
"""


@dataclass(frozen=True, slots=True)
class Collected:
    """What the agent of a node returned: files by name, and what it could not do, in sentences."""

    parts: Mapping[str, bytes]
    problems: tuple[str, ...]
    seconds: float


def agent_script(options: Mapping[str, Any]) -> str:
    """The agent and its options as one text for `python3 -`: nothing has to be installed, nothing shows in `ps`."""
    folder = files("kb.capture.agent")
    sources = [(name, folder.joinpath(f"{name}.py").read_text(encoding="utf-8")) for name in MODULES]
    return f"SOURCES = {json.dumps(sources)!r}\nOPTIONS = {json.dumps(options)!r}\n{LOADER}"


def py_spy() -> str | None:
    """The py-spy beside the interpreter of kb, where the extra `capture` puts it, else the one on PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def list_jobs(pid: int | None = None, python: str = sys.executable) -> dict[str, Any]:
    """The training jobs of this node, or those that a process belongs to. Raises `CaptureFailed`."""
    output, error, _ = _run(python, {"mode": "list", "pid": pid}, LIST_S)
    try:
        listed: dict[str, Any] = json.loads(output)
    except ValueError:
        raise CaptureFailed(
            "the processes of this node could not be listed", error or "KB_DEBUG=1 shows more"
        ) from None
    return listed


def collect(options: Mapping[str, Any], python: str = sys.executable) -> Collected:
    """Run the capture of one job here. Raises `CaptureFailed` when nothing at all came back."""
    output, error, seconds = _run(python, {"mode": "collect", **options}, float(options["seconds"]) + GRACE_S)
    parts = dict(read_parts(output))
    problems = (
        []
        if "steps.json" in parts
        else [f"the capture of this node was cut off after {seconds:.0f} s: {error}".rstrip(": ")]
    )
    if not parts:
        raise CaptureFailed("the capture returned nothing", error)
    return Collected(parts, tuple(problems), seconds)


def _run(python: str, options: Mapping[str, Any], limit_s: float) -> tuple[bytes, str, float]:
    """What the agent wrote into memory, its last error, and how long it took.

    It has a session of its own: Ctrl-C reaches kb alone, which then ends it. It ends with kb in any case.
    """
    began = time.monotonic()
    with _memory("out") as out, _memory("err") as err:
        agent = subprocess.Popen(
            [python, "-I", "-S", "-"], stdin=subprocess.PIPE, stdout=out, stderr=err, start_new_session=True
        )
        try:
            assert agent.stdin is not None
            try:
                agent.stdin.write(agent_script(options).encode())
                agent.stdin.close()
            except BrokenPipeError:  # it could not even start; its error says why
                pass
            agent.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            agent.kill()
            _wait_a_moment(agent)
        errors = os.pread(err.fileno(), 1 << 16, 0).decode("utf-8", "replace").strip().splitlines()
        return os.pread(out.fileno(), MOST_BYTES, 0), errors[-1] if errors else "", time.monotonic() - began


def _wait_a_moment(agent: subprocess.Popen[bytes]) -> None:
    """An agent in uninterruptible sleep is left behind."""
    try:
        agent.wait(1.0)
    except subprocess.TimeoutExpired:
        agent.returncode = -9  # or Popen warns about it at its end


def _memory(name: str) -> Any:
    return os.fdopen(os.memfd_create(name), "wb")


def read_parts(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The members of a tar that may be cut off: those that are whole."""
    at = 0
    while at + tarfile.BLOCKSIZE <= len(data):
        try:
            info = tarfile.TarInfo.frombuf(data[at : at + tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
        except tarfile.TarError:  # the end, or a header that was cut
            return
        at += tarfile.BLOCKSIZE
        if at + info.size > len(data):
            return
        yield info.name, data[at : at + info.size]
        at += -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
