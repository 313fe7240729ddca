"""Runs several plans at a time and returns their reports; ends cleanly when interrupted.

The only module that knows both the launcher and the verdict. It stores and prints nothing; its callers do.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from math import inf
from threading import Event, Lock, Semaphore
from typing import Any

from kb.harness.launcher import Launcher
from kb.verify.plan import Plan
from kb.verify.plan_runner import PlanRunner, Progress, SharedArms
from kb.verify.report import Report

TURN_S = 0.2  # so that signals are handled
JOBS = 8  # half of the arms mostly wait; with more jobs, arms that measure a rate disturb each other


def _never() -> bool:
    return False


def _ignore(_: Report) -> None:
    return


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`repeat` pairs of arms per experiment, 0 to let the experiment decide; `timeout_s` limits the whole run.

    `is_interrupted` is called several times a second; `on_report` is called with each report as soon as it is ready.
    Both are called in the thread that calls `verify`.
    """

    repeat: int = 0
    timeout_s: float | None = None
    is_interrupted: Callable[[], bool] = _never
    on_report: Callable[[Report], None] = _ignore


class Ending(StrEnum):
    COMPLETE = "complete"
    DEADLINE = "deadline"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class RunResult:
    """Reports in the order of the plans. After the overall deadline, unfinished ones say so; after an interruption,
    they are missing.
    """

    reports: tuple[Report, ...]
    ending: Ending = Ending.COMPLETE


def verify(
    plans: Iterable[Plan], launcher: Launcher, environment: Mapping[str, Any], options: RunOptions, progress: Progress
) -> RunResult:
    """Run all plans, CPU experiments eight at a time, GPU experiments one at a time. Nothing runs after it returns.

    Making a plan may take a while, so another thread does it while the first plans run. The longest and the shortest of
    the waiting plans start in turn: long ones mostly wait for a timeout while short ones compute, and a long one at the
    end would leave the processors idle.
    """
    end = time.monotonic() + options.timeout_s if options.timeout_s else inf
    worker = PlanRunner(launcher, Semaphore(JOBS), environment, options.repeat, progress, Lock(), Event(), Event())
    pool = ThreadPoolExecutor(JOBS, thread_name_prefix="kb-verify")
    planner = ThreadPoolExecutor(1, thread_name_prefix="kb-plan")
    unread = iter(plans)
    following: Future[Plan | None] | None = planner.submit(next, unread, None)
    waiting: list[tuple[float, int, Plan]] = []  # longest first
    futures: dict[int, Future[Report]] = {}  # by the number of the plan
    numbers = count()
    pending: set[Future[Report]] = set()
    ending, is_read = Ending.COMPLETE, False
    try:
        while pending or waiting or not is_read:
            while waiting and len(pending) < JOBS:
                _, number, plan = waiting.pop(-1 if len(futures) % 2 else 0)
                futures[number] = _begin(plan, worker, pool)
                pending.add(futures[number])
            if following is None and not is_read:
                following = planner.submit(next, unread, None)
            waited_for: set[Future[Any]] = {*pending, following} if following else {*pending}
            wait(waited_for, timeout=TURN_S, return_when=FIRST_COMPLETED)
            if following and following.done():
                read, following = following.result(), None
                if read is None:
                    is_read = True
                else:
                    insort(waiting, (-read.expected_s, next(numbers), read))
            for future in [future for future in pending if future.done()]:
                pending.remove(future)
                options.on_report(future.result())
            if ending is Ending.COMPLETE:
                ending = _cut_by(end if pending or waiting or not is_read else inf, options)
                if ending is not Ending.COMPLETE:
                    worker.stop.set()
                    launcher.close()
            if ending is Ending.INTERRUPTED:
                break
        complete = (futures[number] for number in sorted(futures) if futures[number] not in pending)
        return RunResult(tuple(future.result() for future in complete), ending)
    finally:
        worker.stop.set()
        if pending:
            launcher.close()
        for executor in (planner, pool):
            executor.shutdown(wait=True, cancel_futures=True)


def _begin(plan: Plan, worker: PlanRunner, pool: ThreadPoolExecutor) -> Future[Report]:
    """Start a plan, in a thread that lives as long as the launcher: this may start the process that imports torch."""
    if plan.has_torch:
        worker.launcher.preload()
    return pool.submit(replace(worker, shared=SharedArms()).report, plan)


def _cut_by(end: float, options: RunOptions) -> Ending:
    """What ends the run now; `COMPLETE` if nothing does."""
    if options.is_interrupted():
        return Ending.INTERRUPTED
    return Ending.DEADLINE if time.monotonic() > end else Ending.COMPLETE
