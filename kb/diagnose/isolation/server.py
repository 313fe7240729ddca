"""A process that has loaded everything a scan needs and forks for each scan; `python -m` runs it.

Standard input is a socket that receives the signatures first, then one connection per scan. The process ends, with all
its scans, when the other end is closed.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection

from kb.diagnose.isolation import job
from kb.diagnose.scan.signature_matcher import Matcher


def main() -> None:
    control = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    with suppress(EOFError, ConnectionError):
        setup = Connection(os.dup(control.fileno()))
        matcher = Matcher(setup.recv())
        setup.close()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no one waits for a scan: its connection shows how it ended
        gc.collect()
        gc.freeze()
        while descriptors := socket.recv_fds(control, 1, 1)[1]:
            _start(descriptors[0], matcher, control)
    os.killpg(0, signal.SIGKILL)


def _start(descriptor: int, matcher: Matcher, control: socket.socket) -> None:
    """Scan in a new process. If none can be started, the connection closes without an answer."""
    with Connection(descriptor) as connection, suppress(OSError):
        if os.fork():
            return
        try:
            control.close()
            os.close(sys.stdin.fileno())
            job.run(connection, matcher)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


if __name__ == "__main__":
    main()
