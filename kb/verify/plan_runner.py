"""Runs one plan and returns its report: the check, then pairs of arms until the verdict is decided."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event, Lock, Semaphore
from typing import Any, Protocol

from kb.content.catalog import file_digest
from kb.errors import KbError
from kb.harness.launcher import Launcher
from kb.harness.outcome import ArmOutcome
from kb.machine import gpus
from kb.patterns.redos import backtracking_risk
from kb.probe import ARMS, Experiment, Finding
from kb.verify.bounded_judge import judge_in_time
from kb.verify.checks import run_check
from kb.verify.plan import Plan
from kb.verify.report import ExperimentResult, Report, overall
from kb.verify.statistics import is_decided, judge_repeats, majority
from kb.verify.verdict import Judgement, Verdict, judge_check


class Progress(Protocol):
    """Called when a check or an arm begins and ends; `key` identifies it."""

    def begin(self, key: str, text: str) -> None: ...
    def end(self, key: str) -> None: ...


@dataclass(frozen=True, slots=True)
class SharedArms:
    """The arms that experiments of one plan share: the first caller runs an arm, the others wait for its outcome."""

    lock: Lock = field(default_factory=Lock)
    outcomes: list[tuple[object, Future[ArmOutcome]]] = field(default_factory=list)

    def run(self, what_runs: object, run: Callable[[], ArmOutcome]) -> ArmOutcome:
        with self.lock:
            known = next((outcome for ran, outcome in self.outcomes if ran == what_runs), None)
            outcome = known or Future[ArmOutcome]()
            if not known:
                self.outcomes.append((what_runs, outcome))
        if not known:
            try:
                outcome.set_result(run())
            except BaseException as error:  # callers that wait get the same error
                outcome.set_exception(error)
        return outcome.result()


@dataclass(frozen=True, slots=True)
class PlanRunner:
    """Turns one plan into a report, in any thread. `slots` limits how many arms of all plans run at a time."""

    launcher: Launcher
    slots: Semaphore
    environment: Mapping[str, Any]
    repeat: int
    progress: Progress
    gpu_lock: Lock
    gpu_failure: Event
    stop: Event
    shared: SharedArms = field(default_factory=SharedArms)

    def report(self, plan: Plan) -> Report:
        """Run a plan. Never raises: an error becomes the report's reason."""
        started, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
        blank = Report(
            entry_id=plan.entry.id,
            title=plan.entry.meta.title,
            judgement=Judgement(Verdict.INCONCLUSIVE, "nothing ran"),
            entry_digest=plan.entry.digest,
            probe_digest=file_digest(plan.probe_file),
            started_at=started,
            duration_s=0.0,
            environment=self.environment,
            skipped=plan.skipped,
            params={name: value for name, (_, value) in plan.params.items()},
            has_named_file=plan.has_named_file,
        )
        try:
            if self.stop.is_set():
                raise KbError("the overall deadline passed before it could start")
            report = self._run_plan(plan, blank)
        except KbError as error:
            reason = "the overall deadline passed first" if self.stop.is_set() else error.message
            report = replace(blank, judgement=Judgement(Verdict.INCONCLUSIVE, reason))
        except Exception as error:  # what one probe did to its files must not cost the others their reports
            reason = f"internal error: {type(error).__name__}: {error}"[:500]
            report = replace(blank, judgement=Judgement(Verdict.INCONCLUSIVE, reason))
        return replace(report, duration_s=time.monotonic() - clock)

    def _run_plan(self, plan: Plan, blank: Report) -> Report:
        if plan.waiver:
            return replace(blank, judgement=Judgement(Verdict.NOT_APPLICABLE, plan.waiver))
        if plan.fault:
            return replace(blank, judgement=Judgement(Verdict.INCONCLUSIVE, plan.fault))
        finding = self._check(plan) if plan.probe.check else None
        if not plan.experiments:
            return replace(
                blank, check=finding, judgement=judge_check(finding, plan.skipped, is_asked=plan.has_settings)
            )
        results = tuple(self._run_experiments(plan))
        counted = tuple(result for result in results if not result.is_refused) or results[:1]
        refused = tuple(
            (result.experiment.name, result.judgement.reason) for result in results if result not in counted
        )
        return replace(
            blank, check=finding, judgement=overall(counted), results=counted, skipped=plan.skipped + refused
        )

    def _run_experiments(self, plan: Plan) -> list[ExperimentResult]:
        """Run the first applicable experiment and all variants, side by side. Returns them in the order of the plan."""
        tried = [plan.runnable, *((variant,) for variant in plan.variants)]
        with ThreadPoolExecutor(len(tried), "kb-experiment") as pool:  # waits for all, even if one fails
            results = pool.map(partial(self._until_applicable, plan), tried)
            return [result for each in results for result in each]

    def _until_applicable(self, plan: Plan, experiments: Sequence[Experiment]) -> list[ExperimentResult]:
        """Run experiments from the strongest on, until one does not raise `Unavailable`."""
        results: list[ExperimentResult] = []
        for experiment in experiments:
            results.append(self._run_experiment(plan, experiment))
            if not results[-1].is_refused:
                break
        return results

    def _run_experiment(self, plan: Plan, experiment: Experiment) -> ExperimentResult:
        return (self._gpu_experiment if experiment.needs.gpus else self._experiment)(plan, experiment)

    def _gpu_experiment(self, plan: Plan, experiment: Experiment) -> ExperimentResult:
        """Run experiments one at a time, but none after one that left something on a GPU: it would prove nothing."""
        with self.gpu_lock:
            if self.gpu_failure.is_set():
                raise KbError("an earlier probe left something on a GPU: see the leftovers of its report")
            result = self._experiment(plan, experiment)
            if result.leftovers:
                self.gpu_failure.set()
            return result

    def _check(self, plan: Plan) -> Finding | None:
        assert plan.probe_file is not None
        key = f"{plan.entry.id} check"
        self.progress.begin(key, key)
        try:
            finding, _ = run_check(plan.probe_file, self.launcher, plan.params)
        finally:
            self.progress.end(key)
        return finding

    def _experiment(self, plan: Plan, experiment: Experiment) -> ExperimentResult:
        """Run pairs of arms until the verdict is decided."""
        patterns = [pattern for pattern in plan.entry.failure_patterns if not backtracking_risk(pattern)]
        judgements: list[Judgement] = []
        while True:
            control, treatment = (self._arm(plan, experiment, name, len(judgements)) for name in ARMS)
            judgements.append(judge_in_time(experiment, control, treatment, patterns))
            if is_decided(judgements, experiment, self.repeat):
                break
        if len(judgements) == 1:
            return ExperimentResult(experiment, judgements[0], control, treatment)
        judgement, counts = judge_repeats(judgements)
        if not (self.repeat or experiment.stochastic):
            judgement = majority(judgements) or Judgement(Verdict.INCONCLUSIVE, "three runs ended in three ways")
        return ExperimentResult(experiment, judgement, control, treatment, counts)

    def _arm(self, plan: Plan, experiment: Experiment, name: str, pair: int) -> ArmOutcome:
        """Run an arm; in the first pair, unless stochastic, share the outcome of arms of the plan that run the same."""
        if pair or experiment.stochastic:
            return self._run_arm(plan, experiment, name, pair)
        first = partial(self._run_arm, plan, *plan.first_like(experiment, name), pair)
        return self.shared.run(plan.what_runs(experiment, name), first)

    def _run_arm(self, plan: Plan, experiment: Experiment, name: str, pair: int) -> ArmOutcome:
        key = f"{plan.entry.id} {experiment.name} {name}"
        label = f"{plan.entry.id}-{experiment.name}-{name}" + (f"-pair{pair + 1}" if pair else "")
        with self.slots:
            self.progress.begin(key, f"{key}: {getattr(experiment, name).because}")
            before = gpus.used_memory(plan.gpus) if experiment.needs.gpus else {}
            try:
                outcome = self.launcher.run(plan.task(experiment, name), label)
            finally:
                self.progress.end(key)
        if before:
            outcome = replace(outcome, leftovers=(*outcome.leftovers, *gpus.not_released(before)))
        return outcome
