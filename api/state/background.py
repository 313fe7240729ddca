"""Work that is done again and again in a thread of its own, beside the requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from ..requests.problems import log


@contextmanager
def repeated(work: Callable[[], object], every_s: float, name: str) -> Iterator[None]:
    """Do it now and again `every_s` seconds after it was done, until the block ends; that waits for work under way.

    When it fails that is logged, and it is done again.
    """
    stopping = Event()

    def run() -> None:
        while True:
            try:
                work()
            except Exception:
                log.exception("%s failed, and is tried again", name)
            if stopping.wait(every_s):
                return

    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
