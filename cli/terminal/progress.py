"""A status line on a terminal: what is running, or how much was read. Prints nothing anywhere else.

It does not hide the cursor or change the terminal mode, so that even a SIGKILL leaves the terminal usable.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from types import TracebackType
from typing import Self

from .output import draw, notice

TURN_S = 0.2
PATIENCE_S = 1.0  # before the first line about reading


class StatusLine:
    """A `kb.verify.runner.Progress` on stderr."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self._drawing = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)
        self._is_terminal = sys.stderr.isatty()

    def __enter__(self) -> Self:
        if self._is_terminal:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stopped.set()
        if self._is_terminal:
            self._thread.join()
            self._write("")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the line during the block, which may print, and draw it again below."""
        with self._drawing:
            if self._is_terminal:
                self._write("")
            yield

    def notify(self, text: str) -> None:
        """Print a notice above the line."""
        with self.paused():
            notice(text)

    def begin(self, key: str, text: str) -> None:
        with self._lock:
            self._running[key] = (text, time.monotonic())

    def end(self, key: str) -> None:
        with self._lock:
            self._running.pop(key, None)

    def _draw(self) -> None:
        while not self._stopped.wait(TURN_S):
            with self._lock:
                running = list(self._running.values())
            now = time.monotonic()
            with self._drawing:
                self._write(" | ".join(f"{now - since:4.1f} s  {text}" for text, since in running))

    def _write(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        draw(text[:width])


class ReadingLine:
    """Shows on a terminal how much was read, once that takes a while. Prints nothing anywhere else."""

    def __init__(self, *, is_shown: bool = True) -> None:
        self._bytes = 0
        self._began = time.monotonic()
        self._next = self._began + PATIENCE_S if is_shown and sys.stderr.isatty() else inf
        self._has_drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._has_drawn:
            draw("")

    def read(self, count: int) -> None:
        self._bytes += count
        now = time.monotonic()
        if now < self._next:
            return
        self._next, self._has_drawn = now + TURN_S, True
        rate = self._bytes / 1e6 / (now - self._began)
        draw(f"read {self._bytes / 1e6:,.0f} MB, {rate:,.1f} MB/s")
