"""From the outbox to a service: each report once, within a few seconds, and what could not be sent stays queued."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread

from kb.errors import KbError
from kb.sharing.client import Service
from kb.sharing.outbox import Outbox, Queued
from kb.sharing.response import Ending, Response

BUDGET_S = 20.0  # for all of a sending: a verification must not wait for a service
TRY_S = 10.0  # for a connection and for each wait on an answer: a busy store takes seconds
GRACE_S = 1.0  # for the last try to end by itself
MOST_PROBLEMS = 5  # that a delivery tells of, the last ones: a thousand reports may have as many
TRIES = 3  # of one report while the service asks to come again


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a sending came to: reports `sent` and `refused` in it, those still `queued`, and what was wrong."""

    sent: int = 0
    queued: int = 0
    refused: int = 0
    problems: tuple[str, ...] = ()


class _Courier:
    """One sending under way. Counts as it goes, so that one that is given up has still said what it did."""

    def __init__(self, outbox: Outbox, service: Service, end: float) -> None:
        self._outbox = outbox
        self._service = service
        self._end = end
        self.sent = 0
        self.refused = 0
        self.problems: dict[str, None] = {}

    def run(self) -> None:
        for queued in self._outbox.waiting(self._service.url):
            if time.monotonic() >= self._end:
                self.problems["there was no time left to send all reports"] = None
                return
            if not self._deliver(queued):
                return

    def _deliver(self, queued: Queued) -> bool:
        """Whether it makes sense to go on with the next one."""
        with self._outbox.claim(queued) as is_ours:
            if not is_ours:
                return True
            response = self._response(queued)
            self._settle(queued, response)
        return response.ending not in (Ending.BUSY, Ending.CLOSED)

    def _response(self, queued: Queued) -> Response:
        response = self._try(queued)
        for _ in range(TRIES - 1):
            if response.ending is not Ending.BUSY or time.monotonic() + response.wait_s >= self._end:
                break
            time.sleep(response.wait_s)
            response = self._try(queued)
        return response

    def _try(self, queued: Queued) -> Response:
        left = max(0.1, self._end - time.monotonic())
        return self._service.post(queued.key, queued.body, min(TRY_S, left))

    def _settle(self, queued: Queued, response: Response) -> None:
        if response.ending is Ending.TAKEN:
            self.sent += 1
            self._outbox.remove(queued)
        elif response.ending is Ending.REFUSED:
            self.refused += 1
            path = self._outbox.refuse(queued, response.problem)
            self.problems[f"{response.problem} (the report is kept in {path.parent})"] = None
        else:
            self.problems[response.problem] = None


def send(outbox: Outbox, service: Service, budget_s: float = BUDGET_S) -> Delivery:
    """Send what waits for this service. What goes wrong is part of the delivery, never raised; nor is Ctrl-C.

    A thread does it, because no timeout bounds the resolver or a server that sends one byte a second.
    """
    courier = _Courier(outbox, service, time.monotonic() + budget_s)
    problems: tuple[str, ...] = ()
    queued = 0
    try:
        problems = _wait(courier, budget_s + GRACE_S)
        queued = len(outbox.waiting(service.url))
    except KbError as error:
        problems = (error.message,)
    return Delivery(courier.sent, queued, courier.refused, (*courier.problems, *problems)[-MOST_PROBLEMS:])


def _begin(courier: _Courier) -> Future[None]:
    done: Future[None] = Future()

    def run() -> None:
        try:
            courier.run()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    Thread(target=run, name="kb-sending", daemon=True).start()
    return done


def _wait(courier: _Courier, seconds: float) -> tuple[str, ...]:
    try:
        _begin(courier).result(seconds)  # in here: Ctrl-C may come as soon as the thread has begun
    except TimeoutError:
        return (f"given up after {seconds:g} s",)
    except KeyboardInterrupt:
        return ("interrupted",)
    return ()
