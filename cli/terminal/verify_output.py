"""Output of `kb verify`: the reports, or the plans with --plan, as one JSON document or as text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kb.errors import DeadlineExceeded, Interrupted, KbError

from ..service.delivery import Recipient, print_destination
from .output import emit, emit_error, notice

if TYPE_CHECKING:
    from kb.verify.report import Report
    from kb.verify.runner import RunResult
    from kb.verify.session import Session

    from .progress import StatusLine

LATE = DeadlineExceeded("the overall deadline passed before every entry was done", "allow more time with --timeout")


class ReportLines:
    """Prints each report of a run above the status line when it is ready. `total` is the expected number of reports."""

    def __init__(self, total: int, status: StatusLine, roots: Sequence[Path] | None, *, as_list: bool) -> None:
        self._total = total
        self._status = status
        self._roots = roots
        self._as_list = as_list
        self._count = 0

    def print(self, report: Report) -> None:
        from .reports import print_report

        self._count += 1
        width = len(str(self._total))
        counter = f"{self._count:>{width}}/{self._total}  " if self._as_list else ""
        with self._status.paused():
            print_report(report, self._roots, is_short=self._as_list, counter=counter)
            sys.stdout.flush()  # somebody may be watching a pipe or file


def exit_code_of(run: RunResult) -> int:
    """The exit code of the verdicts, or of the interruption if the run was cut short."""
    from kb.verify.report import exit_code

    error = _cut_by(run)
    return error.exit_code if error else exit_code(run.reports)


def show_run(run: RunResult, recipient: Recipient | None, *, as_json: bool, as_list: bool) -> int:
    """Show the summary, or the document if `as_json`, and send the reports to the recipient. Returns the exit code."""
    error = _cut_by(run)
    if as_json:
        _emit_reports(run, recipient, error, as_list=as_list)
        return exit_code_of(run)
    if as_list and run.reports:
        from .reports import print_summary

        print_summary(run.reports)
    if error:
        notice(error.message)
    sys.stdout.flush()  # the verdict does not wait for the service
    if recipient:
        _report(run, recipient)
    return exit_code_of(run)


def _emit_reports(run: RunResult, recipient: Recipient | None, error: KbError | None, *, as_list: bool) -> None:
    from kb.verify.report import summary

    documents = [report.to_json() for report in run.reports]
    body: dict[str, Any] = {"reports": documents, "summary": summary(run.reports)}
    if not as_list:
        body = documents[0] if documents else {}
    if recipient:
        body["reported"] = _report(run, recipient)
    if error:
        emit_error("verify", error, **body)
    else:
        emit("verify", **body)


def _report(run: RunResult, recipient: Recipient) -> dict[str, Any] | None:
    """Send the reports; after an interruption only queue them, since nobody who presses Ctrl-C waits for a service."""
    from kb.verify.runner import Ending

    if run.ending is not Ending.INTERRUPTED:
        return recipient.report(run.reports)
    recipient.queue(run.reports)
    return None


def _cut_by(run: RunResult) -> KbError | None:
    from kb.verify.runner import Ending

    if run.ending is Ending.INTERRUPTED:
        count = len(run.reports)
        saved = f": {count} of the entries {'is' if count == 1 else 'are'} done, and in `kb history`" if count else ""
        return Interrupted(f"interrupted{saved}")
    return LATE if run.ending is Ending.DEADLINE else None


def show_plans(session: Session, status: StatusLine, recipient: Recipient | None, *, as_json: bool) -> int:
    """Show what would run and what would be sent, without doing either."""
    if as_json:
        emit(
            "verify-plan",
            python=str(session.launcher.python),
            removed_variables=list(session.launcher.removed),
            plans=[plan.to_json() for plan in session.plans],
            report={"url": recipient.service.url, "queued": recipient.waiting()} if recipient else None,
        )
    else:
        _print_plans(session, status, recipient)
    return 0


def _print_plans(session: Session, status: StatusLine, recipient: Recipient | None) -> None:
    from .reports import print_plan

    for plan in session.plans:
        with status.paused():
            print_plan(plan)
            sys.stdout.flush()
    launcher = session.launcher
    print(f"interpreter  {launcher.python}")
    print("files        one temporary directory per arm, deleted afterwards; the report goes into the store")
    print(f"environment  yours, without {', '.join(launcher.removed) or 'any change'}")
    if recipient:
        print_destination(recipient)
