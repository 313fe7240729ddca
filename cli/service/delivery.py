"""`kb verify --report URL`: deliver reports to a team's service through the outbox, and tell the result."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from kb.errors import KbError, StoreUnavailable

from ..terminal.output import emit, notice

if TYPE_CHECKING:
    from kb.sharing.client import Service
    from kb.sharing.outbox import Outbox
    from kb.verify.report import Report

KEY_VARIABLE = "KB_API_KEY"  # not an option: command lines are visible to every user of a machine
CONTENT = "verdict, evidence, digests, versions, names of GPUs; no hosts, users, files, variables or logs"
ReportOption = Annotated[
    str | None,
    typer.Option(
        "--report",
        metavar="URL",
        envvar="KB_REPORT_URL",
        help=f"Send the redacted report to this kb service, with the key in {KEY_VARIABLE}. Reports wait while the "
        "service is unreachable; without an ID, the waiting ones are sent.",
    ),
]


@dataclass(frozen=True, slots=True)
class Recipient:
    """The service that receives the reports of this command, and the outbox where they wait for it."""

    service: Service
    outbox: Outbox

    @classmethod
    def at(cls, url: str | None) -> Self | None:
        """The recipient at a URL, or None without one. Raises `UsageError` for an invalid URL, before anything runs."""
        if not url:
            return None
        from kb.sharing.client import Service
        from kb.sharing.outbox import Outbox, default_directory

        service = Service.at(url, os.environ.get(KEY_VARIABLE, "").strip())
        if service.is_exposed:
            notice(f"warning: {KEY_VARIABLE} and the reports travel unencrypted to {service.url}: use https")
        return cls(service, Outbox(default_directory()))

    def report(self, reports: Sequence[Report] = ()) -> dict[str, Any]:
        """Queue these reports, send all that wait, and summarize on stderr. Returns `reported`, with any problem."""
        from kb.sharing.sender import send

        queueing = self.queue(reports)
        delivery = send(self.outbox, self.service)
        problem = "; ".join((*queueing, *delivery.problems)) or None
        reported = {
            "url": self.service.url,
            "sent": delivery.sent,
            "queued": delivery.queued,
            "refused": delivery.refused,
            "problem": problem,
        }
        _say(reported)
        return reported

    def waiting(self) -> int:
        """The number of reports that wait for this service, as far as the outbox can be read."""
        try:
            return len(self.outbox.waiting(self.service.url))
        except StoreUnavailable as error:
            notice(error.message)
            return 0

    def queue(self, reports: Sequence[Report]) -> list[str]:
        """Add these reports to the outbox. Returns the problems: only reports that cannot be queued are lost."""
        if not reports:
            return []
        from kb.sharing.shared_report import to_shared_report

        try:
            documents = [to_shared_report(report.to_json()).model_dump(mode="json") for report in reports]
            dropped = self.outbox.add(self.service.url, documents)
        except KbError as error:
            return [f"not queued: {error.message}: {error.hint}"]
        return [f"{_reports(dropped)} dropped, the oldest, because too many wait"] if dropped else []


def send_waiting(recipient: Recipient, *, as_json: bool) -> int:
    """Send the waiting reports, for `kb verify --report URL` without an ID. Returns 1 if a report could not be sent."""
    reported = recipient.report()
    if as_json:
        emit("verify", reports=[], summary={}, reported=reported)
    elif not any(reported[name] for name in ("sent", "queued", "refused", "problem")):
        notice(f"no report waits for {recipient.service.url}")
    return 1 if reported["queued"] or reported["problem"] else 0


def print_destination(recipient: Recipient) -> None:
    """Print the line of `--plan` about reports."""
    print(f"report       to {recipient.service.url}: {CONTENT}; {_reports(recipient.waiting())} waiting already")


def _say(reported: Mapping[str, Any]) -> None:
    url = reported["url"]
    if reported["sent"]:
        notice(f"{_reports(reported['sent'])} sent to {url}")
    if reported["problem"]:
        notice(reported["problem"])
    if reported["queued"]:
        notice(f"{_reports(reported['queued'])} waiting: `kb verify --report {url}` tries again")


def _reports(count: int) -> str:
    return f"{count} report{'' if count == 1 else 's'}"
