"""Several worker processes behind one address; a dead worker is replaced. Uses only the public API of uvicorn."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from socket import socket
from types import FrameType
from typing import Any

import uvicorn

from kb.errors import KbError, UsageError

from ..terminal.output import complain

SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"  # where the workers combine their metrics for /metrics
ENDINGS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
NOT_STARTED = 3  # exit code of a worker that cannot serve, as in uvicorn
CHECK_EVERY_S = 0.5

log = logging.getLogger("kb.workers")

MakeConfig = Callable[[], uvicorn.Config]


class Workers:
    """Processes that serve one listening socket until a signal arrives or one of them cannot start."""

    def __init__(self, make_config: MakeConfig, listener: socket) -> None:
        self._make_config, self._listener = make_config, listener
        self._processes: list[SpawnProcess] = []
        self._can_start = True
        self.ended_by: signal.Signals | None = None

    def run(self, count: int) -> None:
        for number in ENDINGS:
            signal.signal(number, self._note)
        try:
            self._processes += [self._start() for _ in range(count)]
            while self.ended_by is None and self._can_start:
                wait([process.sentinel for process in self._processes], CHECK_EVERY_S)
                self._replace_dead()
        finally:
            for process in self._processes:
                process.terminate()
            for process in self._processes:
                process.join()

    def _note(self, number: int, _: FrameType | None) -> None:
        self.ended_by = signal.Signals(number)

    def _start(self) -> SpawnProcess:
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(self._make_config, self._listener))
        process.start()
        return process

    def _replace_dead(self) -> None:
        for place, gone in enumerate(self._processes):
            if gone.is_alive() or self.ended_by is not None:
                continue
            if gone.exitcode == NOT_STARTED:  # a replacement would end the same way
                self._can_start = False
                return
            self._processes[place] = new = self._start()
            log.warning("worker %s has exited, %s takes its place", gone.pid, new.pid)


def run(make_config: MakeConfig, count: int, listener: socket) -> None:
    """Serve until a signal arrives, then end as it requires. Each worker calls `make_config`, which is pickled."""
    with tempfile.TemporaryDirectory(prefix="kb-metrics-") as folder:
        os.environ[SHARED_METRICS] = folder
        workers = Workers(make_config, listener)
        workers.run(count)
    if workers.ended_by is None:
        raise UsageError("the workers did not start", "see their output above")
    signal.signal(workers.ended_by, ENDINGS[workers.ended_by])
    signal.raise_signal(workers.ended_by)


def _serve(make_config: MakeConfig, listener: socket) -> None:
    """Run a worker until SIGINT or SIGTERM ends it."""
    _end_with_supervisor()
    server = uvicorn.Server(make_config())
    with suppress(KeyboardInterrupt):  # Ctrl-C reaches every process of the terminal
        try:
            server.run(sockets=[listener])
        except KbError as error:
            complain(error)
        if not server.started:
            sys.exit(NOT_STARTED)


def _end_with_supervisor() -> None:
    """Make this worker end when its supervisor dies, so that it does not keep the port."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    supervisor = multiprocessing.parent_process()
    if supervisor and not supervisor.is_alive():  # it died before prctl
        sys.exit(NOT_STARTED)
