"""A connection to PostgreSQL that gives up when the server stops answering. libpq would wait forever."""

from __future__ import annotations

from collections.abc import Generator
from time import monotonic
from typing import Any, TypeVar

import psycopg

STATEMENT_S = 6.0  # longer than the server's `statement_timeout`, whose error says more

Result = TypeVar("Result")


class DeadlineConnection(psycopg.Connection[Any]):
    """A connection that closes if a statement takes more than `deadline_s`, which raises `OperationalError`."""

    deadline_s = STATEMENT_S

    def wait(self, gen: Generator[Any, Any, Result], *args: Any, **named: Any) -> Result:
        return super().wait(self._limited(gen), *args, **named)

    def rollback(self) -> None:
        """Called at the end of every transaction in the pool, so it restores the usual deadline."""
        self.deadline_s = STATEMENT_S
        super().rollback()

    def _limited(self, steps: Generator[Any, Any, Result]) -> Generator[Any, Any, Result]:
        """The steps of a statement. psycopg resumes them ten times a second, even if nothing has arrived."""
        end = monotonic() + self.deadline_s
        try:
            state = next(steps)
            while True:
                ready = yield state
                if not ready and monotonic() > end:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"the server does not answer within {self.deadline_s:.0f} s")
                state = steps.send(ready)
        except StopIteration as ended:
            result: Result = ended.value
            return result
