"""Work that is done again and again in a thread of its own, beside the requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread


@contextmanager
def repeated(work: Callable[[], object], every_s: float, name: str) -> Iterator[None]:
    """Do it now and again `every_s` seconds after it was done, until the block ends; that waits for work under way."""
    stopping = Event()

    def run() -> None:
        work()
        while not stopping.wait(every_s):
            work()

    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
