"""Logs and dumps that would cost a service more memory and processor time than it has."""

from __future__ import annotations

import gzip
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kb.diagnose.inputs.sources import Stream
from kb.diagnose.isolation.client import ScanServer
from kb.diagnose.isolation.job import Answer, Excess
from kb.diagnose.scan.result import Scan
from kb.diagnose.scan.scan import Limits
from kb.runtime.processes import Process, descendants, is_running, read_process, resident_bytes
from tests.support.console import GENEROUS_S, wait_for
from tests.support.kb_serve import Serving, serving

SIGNATURES = [{"id": "broken-thing", "role": "root", "pattern": "the thing broke", "literals": ["the thing broke"]}]
LOG = b"step 1\nRuntimeError: the thing broke\n"
WIDE = "\U0001f600" + "a" * (16 << 20)  # every character of a text takes the memory of its widest
DICTIONARIES = b'{"version":"2.4","pg_config":{},"pg_status":{},"y":"%s","x":[' % WIDE.encode()
DICTIONARIES += b",".join([b'{"a":{"b":{}}}'] * 450_000) + b"]}"
GIBIBYTE = 1 << 30


@pytest.fixture
def server() -> Iterator[ScanServer]:
    result = ScanServer(SIGNATURES)
    yield result
    result.close()


def scan(server: ScanServer, *pieces: bytes, seconds: float = 60.0, memory: int = GIBIBYTE) -> Answer | None:
    return server.scan([Stream("body", iter(pieces))], seconds, memory, Limits())


def matches(answer: Answer | None) -> list[str]:
    assert answer
    assert isinstance(answer.result, Scan)
    return [match.id for match in answer.result.matches]


def test_a_dump_that_takes_too_much_memory_is_given_up_and_the_next_is_read(server: ScanServer) -> None:
    answer = scan(server, DICTIONARIES, memory=100 << 20)
    assert answer
    assert answer.result is Excess.MEMORY
    wait_for(lambda: not descendants(_server_of(server).pid), "the scan to end", GENEROUS_S)
    assert matches(scan(server, LOG, memory=100 << 20)) == ["broken-thing"]


def test_a_log_that_takes_too_long_is_given_up_and_charged_to_its_sender(server: ScanServer) -> None:
    answer = scan(server, *[b"RuntimeError: the thing broke: %d\n" % number for number in range(200_000)], seconds=0.2)
    assert answer
    assert answer.result is Excess.TIME
    assert answer.seconds >= 0.1, "most of it; the kernel's timer is not exact"


def test_several_streams_are_told_apart_when_one_is_not_read(server: ScanServer) -> None:
    streams = [Stream("dump", iter([DICTIONARIES])), Stream("train.log", iter([LOG[:10], b"", LOG[10:]]))]
    answer = server.scan(streams, 60.0, GIBIBYTE, Limits(structured=1000))
    assert matches(answer) == ["broken-thing"]
    assert answer
    assert isinstance(answer.result, Scan)
    assert answer.result.problems == ("dump: it is larger than 0 MiB",)


def test_an_error_of_a_stream_reaches_who_asked_and_ends_the_scan(server: ScanServer) -> None:
    def leaving() -> Iterator[bytes]:
        yield LOG
        raise TimeoutError("the client left")

    with pytest.raises(TimeoutError, match="the client left"):
        server.scan([Stream("body", leaving())], 60.0, GIBIBYTE, Limits())
    wait_for(lambda: not descendants(_server_of(server).pid), "the scan to end", GENEROUS_S)


def test_scans_go_on_when_the_process_that_forks_them_is_killed(server: ScanServer) -> None:
    assert matches(scan(server, LOG)) == ["broken-thing"]
    with endless_scan(server) as (running, end):
        first = _server_of(server)
        os.kill(first.pid, signal.SIGKILL)
        wait_for(lambda: not is_running(first), "it to end", GENEROUS_S)
        assert matches(scan(server, LOG)) == ["broken-thing"]
        assert _server_of(server).pid != first.pid
        end.set()
        answer = running.result(GENEROUS_S)
    assert answer


def test_a_scan_that_is_killed_has_no_answer(server: ScanServer) -> None:
    with endless_scan(server) as (running, _):
        os.kill(descendants(_server_of(server).pid)[0].pid, signal.SIGKILL)
        assert running.result(GENEROUS_S) is None


def test_a_server_that_is_closed_leaves_no_process(server: ScanServer) -> None:
    with endless_scan(server) as (running, _):
        process = _server_of(server)
        scans = descendants(process.pid)
        assert scans
        server.close()
        assert running.result(GENEROUS_S) is None
    assert not any(map(is_running, [process, *scans]))
    with pytest.raises(OSError, match="ended"):
        scan(server, LOG)


@contextmanager
def endless_scan(server: ScanServer) -> Iterator[tuple[Any, Event]]:
    """A scan that waits for more of its stream until the event is set."""
    begun, end = Event(), Event()

    def pieces() -> Iterator[bytes]:
        while not end.is_set():
            yield b"step 1\n"
            begun.set()
            time.sleep(0.01)

    if server._process:  # an earlier scan that has answered may not have ended, and would be taken for this one
        wait_for(lambda: not descendants(_server_of(server).pid), "earlier scans to end", GENEROUS_S)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.scan, [Stream("body", pieces())], 60.0, GIBIBYTE, Limits())
        assert begun.wait(GENEROUS_S)
        wait_for(lambda: descendants(_server_of(server).pid), "the scan to begin", GENEROUS_S)
        try:
            yield running, end
        finally:
            end.set()


def _server_of(server: ScanServer) -> Process:
    assert server._process
    process = read_process(server._process.pid)
    assert process
    return process


@pytest.mark.slow
def test_costly_bodies_at_once_leave_a_service_its_memory_and_other_clients_an_answer(
    tmp_path: Path, built_in_index: Path
) -> None:
    """Some kilobytes unpack to half a million dictionaries; the shipped unit and manifest allow 2 GiB."""
    body = gzip.compress(DICTIONARIES)
    where = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(built_in_index), "XDG_DATA_HOME": str(tmp_path)}
    with serving(**where, KB_ROOTS="") as service, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(service.ask, "POST", "/v1/diagnose", body) for _ in range(8)]
        peak = 0
        while not all(request.done() for request in asked):
            peak = max(peak, _memory(service))
            time.sleep(0.02)
        answers = [request.result() for request in asked]
        assert peak < 1.5 * GIBIBYTE
        assert {status for status, _, _ in answers} == {422}
        assert all(b"too much memory" in document for _, _, document in answers)
        assert service.ask("POST", "/v1/diagnose", b"RuntimeError: CUDA out of memory")[0] == 200
        processes = descendants(service.process.pid)
        service.stop(signal.SIGTERM)
        assert not any(map(is_running, processes))


@pytest.mark.slow
def test_a_service_that_is_killed_leaves_no_process_and_holds_no_port(tmp_path: Path, built_in_index: Path) -> None:
    where = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(built_in_index), "XDG_DATA_HOME": str(tmp_path)}
    with serving(**where, KB_ROOTS="") as service:
        assert service.ask("POST", "/v1/diagnose", LOG)[0] == 200
        processes = descendants(service.process.pid)
        assert processes
        sockets = {os.readlink(file) for file in Path(f"/proc/{service.process.pid}/fd").iterdir()}
        for process in processes:
            held = {os.readlink(file) for file in Path(f"/proc/{process.pid}/fd").iterdir()}
            assert not {file for file in sockets & held if file.startswith("socket:") or file.endswith(".db")}
        service.stop(signal.SIGKILL)
        wait_for(lambda: not any(map(is_running, processes)), "its processes to end", GENEROUS_S)


def _memory(service: Serving) -> int:
    root = read_process(service.process.pid)
    return resident_bytes([*descendants(service.process.pid), *([root] if root else [])])
