"""Sends the reports of an outbox to a service within a few seconds. What cannot be sent stays queued."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread

from kb.errors import KbError
from kb.sharing.client import Service
from kb.sharing.outbox import Outbox, QueuedReport
from kb.sharing.response import DeliveryStatus, Response

BUDGET_S = 20.0  # for all reports, since a verification must not wait for a service
TIMEOUT_S = 10.0  # for connecting and each wait for a response, since a busy store takes seconds
GRACE_S = 1.0  # for the last attempt to end by itself
MAX_PROBLEMS = 5  # only the last ones are reported, since a thousand reports may have as many
MAX_ATTEMPTS = 3  # for one report while the service is busy


@dataclass(frozen=True, slots=True)
class Delivery:
    """The result of `send`: how many reports were sent, are still queued and were refused, and the problems."""

    sent: int = 0
    queued: int = 0
    refused: int = 0
    problems: tuple[str, ...] = ()


class _Sender:
    """One `send` in progress. It counts as it goes, so that its counts are right if it is given up."""

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
                self.problems["no time was left to send all reports"] = None
                return
            if not self._deliver(queued):
                return

    def _deliver(self, queued: QueuedReport) -> bool:
        """Deliver a report. Returns whether to continue with the next one."""
        with self._outbox.claim(queued) as is_ours:
            if not is_ours:
                return True
            response = self._post_until_ready(queued)
            self._record(queued, response)
        return response.status not in (DeliveryStatus.BUSY, DeliveryStatus.UNAVAILABLE)

    def _post_until_ready(self, queued: QueuedReport) -> Response:
        response = self._post(queued)
        for _ in range(MAX_ATTEMPTS - 1):
            if response.status is not DeliveryStatus.BUSY or time.monotonic() + response.wait_s >= self._end:
                break
            time.sleep(response.wait_s)
            response = self._post(queued)
        return response

    def _post(self, queued: QueuedReport) -> Response:
        remaining_s = max(0.1, self._end - time.monotonic())
        return self._service.post(queued.key, queued.body, min(TIMEOUT_S, remaining_s))

    def _record(self, queued: QueuedReport, response: Response) -> None:
        if response.status is DeliveryStatus.ACCEPTED:
            self.sent += 1
            self._outbox.remove(queued)
        elif response.status is DeliveryStatus.REFUSED:
            self.refused += 1
            path = self._outbox.refuse(queued, response.problem)
            self.problems[f"{response.problem} (the report is in {path.parent})"] = None
        else:
            self.problems[response.problem] = None


def send(outbox: Outbox, service: Service, budget_s: float = BUDGET_S) -> Delivery:
    """Send the reports that wait for a service. Never raises, not even on Ctrl-C; problems are part of the result.

    It runs in a thread because no timeout limits the resolver or a server that sends one byte per second.
    """
    sender = _Sender(outbox, service, time.monotonic() + budget_s)
    problems: tuple[str, ...] = ()
    queued = 0
    try:
        problems = _wait(sender, budget_s + GRACE_S)
        queued = len(outbox.waiting(service.url))
    except KbError as error:
        problems = (error.message,)
    return Delivery(sender.sent, queued, sender.refused, (*sender.problems, *problems)[-MAX_PROBLEMS:])


def _begin(sender: _Sender) -> Future[None]:
    result: Future[None] = Future()

    def run() -> None:
        try:
            sender.run()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(None)

    Thread(target=run, name="kb-sending", daemon=True).start()
    return result


def _wait(sender: _Sender, seconds: float) -> tuple[str, ...]:
    try:
        _begin(sender).result(seconds)  # inside `try`: Ctrl-C may come as soon as the thread has started
    except TimeoutError:
        return (f"given up after {seconds:g} s",)
    except KeyboardInterrupt:
        return ("interrupted",)
    return ()
