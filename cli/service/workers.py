"""Several worker processes behind one address: one that dies is replaced."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from functools import partial
from socket import socket
from typing import Any

from uvicorn import Config
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from kb.errors import KbError, UsageError

from ..terminal.output import complain

SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"  # where the workers combine their metrics for /metrics
ENDINGS: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

log = logging.getLogger("kb.workers")


class Workers(Multiprocess):
    """uvicorn's supervisor, but replaces a dead worker at once, logs that, and remembers the signal that ended it."""

    ended_by: signal.Signals | None = None

    def keep_subprocess_alive(self) -> None:
        """Replace dead workers. uvicorn would also ping every worker, and wait seconds for one that does not answer."""
        for place, process in enumerate(self.processes):
            if not process.process.is_alive() and not self.should_exit.is_set():
                process.kill()  # closes its pipes
                process.join()
                self._replace(place, process)

    def _replace(self, place: int, gone: Process) -> None:
        if gone.exitcode == STARTUP_FAILURE:  # a replacement would end the same way
            self.should_exit.set()
            return
        self.processes[place] = new = Process(self.config, self.sockets)
        new.start()
        log.warning("worker %s is gone, %s takes its place", gone.pid, new.pid)

    def handle_int(self) -> None:
        self.ended_by = signal.SIGINT
        super().handle_int()

    def handle_term(self) -> None:
        self.ended_by = signal.SIGTERM
        super().handle_term()


def run(config: Config, listener: socket) -> None:
    """Serve until a signal arrives, and end the way it requires. `config.app` creates the application, and pickles."""
    config.app = partial(_in_worker, config.app)
    with tempfile.TemporaryDirectory(prefix="kb-metrics-") as folder:
        os.environ[SHARED_METRICS] = folder
        workers = Workers(config, [listener])
        workers.run()
    if workers.ended_by is None:
        raise UsageError("the workers did not start", "see their output above")
    signal.signal(workers.ended_by, ENDINGS[workers.ended_by])
    signal.raise_signal(workers.ended_by)


def _in_worker(make: Any) -> Any:
    """The application. A worker that cannot create it exits with the code that tells the supervisor to stop."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: no worker holds the port for a dead supervisor
    supervisor = multiprocessing.parent_process()
    if supervisor and not supervisor.is_alive():  # it died before prctl
        sys.exit(STARTUP_FAILURE)
    try:
        return make()
    except KbError as error:
        complain(error)
        sys.exit(STARTUP_FAILURE)
