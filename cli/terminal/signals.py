"""Let Ctrl-C, SIGTERM and SIGHUP end a command cleanly: it prints what it has, as one document, and exits with 130."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kb.errors import KbError

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 2.0  # an earlier second signal counts as part of the first: `timeout` sends two


class Interruption:
    """A signal handler that raises KeyboardInterrupt; within `deferred` the first signal only sets `is_requested`."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._is_deferred = False

    @property
    def is_requested(self) -> bool:
        return self._at is not None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the block finish despite a signal; after a signal, the code that follows may finish too."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = self.is_requested

    def handle(self, *_: object) -> None:
        now = time.monotonic()
        if not self._is_deferred or (self._at is not None and now - self._at > PATIENCE_S):
            raise KeyboardInterrupt
        self._at = self._at or now


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Handle the signals in the block, except those that the parent process ignores, as nohup does."""
    current = Interruption()
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, current.handle)
    try:
        yield current
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Expired(BaseException):
    """Raised at the limit; not an `Exception`, so that no `except Exception` catches it."""


@contextmanager
def limited(seconds: float | None, error: KbError) -> Iterator[None]:
    """Raise `error` when the block takes longer than `seconds`, whatever it waits for."""

    def expire(*_: object) -> None:
        raise _Expired

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0)
    try:
        yield
    except _Expired:
        raise error from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
