"""Output of `kb verify`: the reports, or with --plan the plans, as one JSON document or as text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kb.errors import DeadlineExceeded

from ..service.delivery import Recipient, print_destination
from .output import emit, emit_error, notice

if TYPE_CHECKING:
    from kb.harness.launcher import Launcher
    from kb.verify.plan import Plan
    from kb.verify.runner import RunResult

LATE = DeadlineExceeded("the overall deadline came before every entry was done", "give more time with --timeout")


def show_run(run: RunResult, recipient: Recipient | None, *, as_json: bool, as_list: bool) -> int:
    """Show the reports and send them to the recipient; the exit code is that of the verdicts."""
    from kb.verify.report import exit_code

    if as_json:
        _emit_reports(run, recipient, as_list=as_list)
    else:
        _print_reports(run, as_list=as_list)
        sys.stdout.flush()  # the verdict does not wait for the service
        if recipient:
            recipient.report(run.reports)
    return LATE.exit_code if run.is_cut else exit_code(run.reports)


def _emit_reports(run: RunResult, recipient: Recipient | None, *, as_list: bool) -> None:
    from kb.verify.report import summary

    documents = [report.to_json() for report in run.reports]
    body: dict[str, Any] = {"reports": documents, "summary": summary(run.reports)} if as_list else documents[0]
    if recipient:
        body["reported"] = recipient.report(run.reports)
    if run.is_cut:
        emit_error("verify", LATE, **body)
    else:
        emit("verify", **body)


def _print_reports(run: RunResult, *, as_list: bool) -> None:
    from kb.verify.report import summary

    from .reports import print_report, print_summary

    for report in run.reports:
        print_report(report, is_short=as_list)
    if as_list:
        print_summary(summary(run.reports))
    if run.is_cut:
        notice(LATE.message)


def show_plans(plans: list[Plan], launcher: Launcher, recipient: Recipient | None, *, as_json: bool) -> int:
    """Show what would run and what would be sent. Runs and sends nothing."""
    if as_json:
        emit(
            "verify-plan",
            python=str(launcher.python),
            removed_variables=list(launcher.removed),
            plans=[plan.to_json() for plan in plans],
            report={"url": recipient.service.url, "queued": recipient.waiting()} if recipient else None,
        )
    else:
        _print_plans(plans, launcher, recipient)
    return 0


def _print_plans(plans: list[Plan], launcher: Launcher, recipient: Recipient | None) -> None:
    from .reports import print_plan

    for plan in plans:
        print_plan(plan)
    print(f"interpreter  {launcher.python}")
    print("files        one temporary directory per arm, deleted afterwards; the report goes into the store")
    print(f"environment  yours, without {', '.join(launcher.removed) or 'any change'}")
    if recipient:
        print_destination(recipient)
