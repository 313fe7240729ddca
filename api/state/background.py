"""Periodic work in a separate thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from ..log import log


@contextmanager
def repeated(work: Callable[[], object], every_s: float, name: str) -> Iterator[None]:
    """Call `work` at once and `every_s` seconds after each call, until the block ends, which waits for a running call.

    A failure is logged and does not prevent the next call.
    """
    stopping = Event()

    def run() -> None:
        while True:
            try:
                work()
            except Exception:
                log.exception("%s failed and will be tried again", name)
            if stopping.wait(every_s):
                return

    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
