"""Collects flight-recorder dumps: existing ones, and with `--trigger` those that torch writes on request.

Nothing here sends a signal: without a handler it would end the rank, and one cannot see from outside whose handler it
is. kb asks only through windows that torch itself opened: the pipe of NCCL's monitor thread, and the debug server of a
rank that started one. It connects to no other port.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from functools import partial
from typing import Any, Dict, List, Optional

from .processes import threads
from .ranks import connections
from .steps import Step

ASK_S, SERVER_S, READ_S = 1.0, 8.0, 3.0
DUMP_WAIT_S = 6.0  # the monitor thread reads its pipe once a second
MOST_DUMP = 16 << 20  # bytes
SERVER_THREAD = "pt_workerserver"
HANDLERS = ("dump_traceback", "fr_trace_json", "dump_nccl_trace_json", "wait_counter_values", "c10d_health_check")
STEMS = {  # variable, depending on the release: torch's default
    "TORCH_FR_DUMP_TEMP_FILE": "",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/nccl_trace_rank_",
}


def windows(pid: int, rank: Optional[int], environment: Dict[str, str]) -> Dict[str, Any]:
    """The pipe and debug server that could be asked; the bundle names them whether or not they are."""
    stem = environment.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    pipe = "%s%d.pipe" % (stem, rank) if stem and rank is not None else ""
    has_server = any(thread["name"] == SERVER_THREAD for thread in threads(pid))
    return {"pipe": pipe if pipe and os.path.exists(_inside(pid, pipe)) else "", "has_debug_server": has_server}


def ask_pipe(pid: int, pipe: str) -> str:
    """Ask for a dump through the pipe. Raises OSError: ENXIO if nobody reads it, as before the first collective."""
    descriptor = os.open(_inside(pid, pipe), os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(descriptor, b"1\n")
    finally:
        os.close(descriptor)
    return "asked"


def ask_server(pid: int, environment: Dict[str, str]) -> Dict[str, Any]:
    """The answers of torch's debug server by handler. Raises ValueError if its port is not certain."""
    ports = [port for port in _wildcard_ports(pid) if str(port) != environment.get("MASTER_PORT")]
    if len(ports) != 1:
        raise ValueError("the port of the debug server is not known: the process listens on %d" % len(ports))
    base = "http://127.0.0.1:%d/handler/" % ports[0]
    offered = json.loads(_get(base, None))
    answers = {}
    for name in HANDLERS:
        if name in offered:
            try:
                answers[name] = _get(base + name, b"")
            except OSError as error:
                answers[name] = "failed: %s" % error
    return answers


def _get(url: str, body: Optional[bytes]) -> str:
    """Request a URL without using a proxy or following redirects."""
    opener = urllib.request.OpenerDirector()
    opener.add_handler(urllib.request.HTTPHandler())
    with opener.open(urllib.request.Request(url, data=body), timeout=READ_S) as answer:
        return str(answer.read(MOST_DUMP).decode("utf-8", "replace"))


def _wildcard_ports(pid: int) -> List[int]:
    """The ports on which the process listens on all addresses, like the debug server; gloo and NCCL use one address."""
    inodes = connections(pid)
    ports = set()
    for table in ("tcp", "tcp6"):
        with open("/proc/%d/net/%s" % (pid, table)) as file:
            rows = [line.split() for line in file.readlines()[1:]]
        for row in rows:
            address, _, port = row[1].rpartition(":")
            if row[3] == "0A" and row[9] in inodes and set(address) == {"0"}:
                ports.add(int(port, 16))
    return sorted(ports)


def dump_files(pid: int, rank: int, environment: Dict[str, str], is_asked: bool) -> List[str]:
    """The dumps of the rank that are newer than the process. If one was asked for, wait for it."""
    home = os.path.expanduser("~%s" % _user(pid)) if _user(pid) else "/root"
    stems = [environment.get(name) or default for name, default in STEMS.items()]
    stems.append(os.path.join(environment.get("XDG_CACHE_HOME", home + "/.cache"), "torch/comm_lib_trace_rank_"))
    paths = [_inside(pid, "%s%d" % (stem, rank)) for stem in dict.fromkeys(stems) if stem]
    started = os.stat("/proc/%d" % pid).st_mtime
    asked_at = time.time() - ASK_S
    until = time.time() + (DUMP_WAIT_S if is_asked else 0)
    while True:
        written = [path for path in paths if os.path.isfile(path) and os.stat(path).st_mtime >= started]
        is_new = any(os.stat(path).st_mtime >= asked_at for path in written)
        if is_new or time.time() >= until:
            return written
        time.sleep(0.2)


def read_dump(pid: int, rank: int, environment: Dict[str, str], is_asked: bool) -> bytes:
    """The newest dump of the rank; empty if there is none."""
    paths = dump_files(pid, rank, environment, is_asked)
    if not paths:
        return b""
    with open(max(paths, key=lambda path: os.stat(path).st_mtime), "rb") as file:
        return file.read(MOST_DUMP)


def ask_steps(where: str, pid: int, window: Dict[str, Any], environment: Dict[str, str]) -> List[Step]:
    chosen = []
    if window.get("pipe"):
        chosen.append(Step("trigger-pipe", where, ASK_S, function=partial(ask_pipe, pid, window["pipe"])))
    if window.get("has_debug_server"):
        chosen.append(Step("trigger-server", where, SERVER_S, function=partial(ask_server, pid, environment)))
    return chosen


def _inside(pid: int, path: str) -> str:
    """The path as the process sees it, which may be in a container."""
    return "/proc/%d/root%s" % (pid, path) if path.startswith("/") else "/proc/%d/cwd/%s" % (pid, path)


def _user(pid: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(os.stat("/proc/%d" % pid).st_uid).pw_name
    except (ImportError, KeyError, OSError):
        return ""
