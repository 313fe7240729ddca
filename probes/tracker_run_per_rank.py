"""A tracker that every rank starts, and steps that count differently in training and evaluation."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, symptom

STEPS = 4


class Tracker:
    """What wandb and MLflow have in common: each start makes a run."""

    def __init__(self, path: str) -> None:
        self.database = sqlite3.connect(path, timeout=20, isolation_level=None)
        self.database.execute("create table if not exists runs (id integer primary key)")
        self.database.execute("create table if not exists points (run, value, step)")
        self.run: Any = None

    def start(self, run: Any = None) -> None:
        self.run = run or self.database.execute("insert into runs default values").lastrowid

    def log(self, value: float, step: int) -> None:
        self.database.execute("insert into points values (?, ?, ?)", [self.run, value, step])

    def count(self, table: str) -> int:
        return int(self.database.execute("select count(*) from " + table).fetchone()[0])


def judge(runs: int, points: int) -> None:
    if runs != 1 or points != STEPS:
        raise Symptom("%d runs for one job of 2 processes, %d points for %d steps" % (runs, points, STEPS))


def starts(ctx: Context, *, way: str) -> None:
    """Who starts the run: every rank; every rank, with the id of rank 0; or rank 0."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    tracker = Tracker(ctx.path("tracker.db"))
    ctx.reached()
    rank = dist.get_rank()
    if rank == 0 or way == "every":
        tracker.start()
    if way == "one id":
        shared = [tracker.run]
        dist.broadcast_object_list(shared)
        tracker.start(shared[0])
    for step in range(STEPS):
        loss = torch.ones(1)
        dist.all_reduce(loss)
        if tracker.run is not None:
            tracker.log(loss.item(), step)
        dist.barrier()
    if rank == 0:
        judge(tracker.count("runs"), tracker.count("points"))


def isolate(ctx: Context) -> None:
    """No settings of the reader, and every file in the directory of the arm."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        del os.environ[name]
    for name in ("HOME", "WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        os.environ[name] = str(ctx.dir)
    os.environ.update(WANDB_MODE="offline", WANDB_ERROR_REPORTING="false", WANDB__DISABLE_STATS="true")


def wandb_runs(ctx: Context, *, way: str) -> None:
    isolate(ctx)
    dist = ctx.init_process_group(timeout_s=60)
    import wandb  # type: ignore[import-not-found]

    ctx.reached()
    rank = dist.get_rank()
    if way == "accelerate":
        from accelerate import Accelerator  # type: ignore[import-not-found]

        accelerator = Accelerator(cpu=True, log_with="wandb")
        accelerator.init_trackers("p", config={"lr": 0.1})
        for step in range(1, STEPS + 1):
            accelerator.log({"loss": 1.0}, step=step)
        accelerator.end_training()
    elif way == "rank 0":
        config = {"lr": 0.1 + rank}
        run = wandb.init(project="p", config=config, mode=None if rank == 0 else "disabled")
        shared = [(run.id, dict(run.config))]
        dist.broadcast_object_list(shared)
        run_id, config = shared[0]
        every: List[Any] = [None, None]
        dist.all_gather_object(every, (run_id, config))
        assert every[0] == every[1] and config == {"lr": 0.1} and (run.id == run_id) == (rank == 0), every
        assert rank == 0 or run.use_artifact("a/b:latest") is None
        wandb.log({"loss": 1.0})
        run.finish()
    else:
        run = wandb.init(project="p")
        if rank == 0:
            run.log({"loss": 1.0})  # the run of the other rank stays empty
        run.finish()
    assert ctx.meet("done", 60)  # end_training of accelerate ends the process group
    folders = list(Path(ctx.path("wandb")).glob("offline-run-*"))
    if len(folders) > 1:
        raise Symptom("%d runs for one job of 2 processes" % len(folders))
    assert len(folders) == 1, folders


def wandb_steps(ctx: Context, *, way: str) -> None:
    isolate(ctx)
    import wandb

    run = wandb.init(project="p")
    ctx.reached()
    if way in ("own", "rank and definition"):
        run.define_metric("*", step_metric="global_step")
    for step in range(1, STEPS + 1):
        train_loss, eval_loss = 100.0 + step, 200.0 + step
        if way == "own":
            run.log({"train/loss": train_loss, "global_step": step})
            run.log({"eval/loss": eval_loss, "global_step": step})
        elif way == "automatic":
            run.log({"gradients": 1.0})  # no step: the run goes one further
            run.log({"train/loss": train_loss})
            run.log({"eval/loss": eval_loss}, step=step)
        else:
            run.log({"train/loss": train_loss}, step=step if way == "one counter" else 2 * step)
            run.log({"eval/loss": eval_loss, "global_step": step}, step=step)
    run.log({"done": 1})  # ends the row that step= leaves open
    summary = dict(run.summary)
    run.finish()
    if "eval/loss" not in summary:
        raise Symptom("%d of %d evaluations are not in the run" % (STEPS, STEPS))
    assert summary["eval/loss"] == 200 + STEPS and summary["train/loss"] == 100 + STEPS, summary
    assert way != "own" or summary["global_step"] == STEPS, summary


def mlflow_runs(ctx: Context, *, way: str) -> None:
    isolate(ctx)
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    dist = ctx.init_process_group(timeout_s=60)
    import mlflow  # type: ignore[import-not-found]

    mlflow.set_tracking_uri("file://" + ctx.path("mlruns"))
    client = mlflow.MlflowClient()
    rank, shared, loss = dist.get_rank(), [None], 1.0
    if rank == 0:
        experiment = client.create_experiment("e")
        shared = [client.create_run(experiment).info.run_id] if way == "one id" else [None]
    dist.broadcast_object_list(shared)
    mlflow.set_experiment("e")
    ctx.reached()
    if way == "rank 0":
        with mlflow.start_run() if rank == 0 else contextlib.nullcontext():
            for step in range(STEPS):
                if rank == 0:
                    mlflow.log_metrics({"loss": loss}, step=step)
    else:
        if rank == 0 or way != "rank 0, but all log":
            mlflow.start_run(run_id=shared[0])
        for step in range(STEPS):
            mlflow.log_metrics({"loss": loss}, step=step)
        mlflow.end_run()
    dist.barrier()
    if rank == 0:
        runs = client.search_runs([experiment])
        judge(len(runs), sum(len(client.get_metric_history(run.info.run_id, "loss")) for run in runs))


def tensorboard(ctx: Context, *, way: str) -> None:
    dist = ctx.init_process_group(timeout_s=60)
    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-not-found]
    from torch.utils.tensorboard import SummaryWriter

    folder, rank, loss = ctx.path("runs"), dist.get_rank(), 1.0
    ctx.reached()
    writer: Any
    if way == "every":
        writer = SummaryWriter(folder)
    else:
        writer = SummaryWriter(folder) if rank == 0 else None
    for step in range(STEPS):
        if writer is not None:
            writer.add_scalar("loss", loss, step)
    if writer is not None:
        writer.close()
    dist.barrier()
    if rank == 0:
        judge(1, len(event_accumulator.EventAccumulator(folder).Reload().Scalars("loss")))


MODEL = {"fidelity": "stand-in", "stands_for": "the tracker: a small one that writes into sqlite"}
TWO = symptom(r"2 runs for one job of 2 processes")
DOUBLED = symptom(r"1 runs for one job of 2 processes, 8 points for 4 steps")
LOST = symptom(r"4 of 4 evaluations are not in the run")
WANDB, MLFLOW, TORCH = {"wandb": ">=0.19.5"}, {"mlflow": ">=2.11"}, {"torch": ">=2.1"}
TENSORBOARD = {"tensorboard": ">=2.8"}
ACCELERATE = {**WANDB, "accelerate": ">=0.30"}
RANK_0, EVERY = "rank 0 starts the run, and the others write nothing", "every rank starts a run"
SAME_ID = "every rank writes into the run of rank 0, so each step has two points"
TWO_WRITERS = "two ranks write into one folder"
STARTS = "log_metrics starts a run if none is active"
MAIN = "accelerate starts the tracker on the main process only"
OWN = "the count is a value of its own, and nobody passes step="
BY_RANK = "training counts the steps of all ranks, evaluation those of one"
AUTOMATIC = "a call without step= moves the run's step one further"
DEFINED = "define_metric does not help as long as step= is passed"


def pair(
    name: str,
    job: Callable[..., None],
    arms: str,
    expect: Expect,
    because: str,
    fix: str,
    packages: Optional[Mapping[str, str]] = None,
) -> Experiment:
    """`arms`: what the job is told in both arms, as "control -> treatment"."""
    kind: Dict[str, Any] = {"fidelity": "cpu"} if packages else MODEL
    fails, works = [partial(job, way=way) for way in arms.split(" -> ")]
    control = Arm(fails, expect, because, **kind)
    treatment = Arm(works, completed(), fix, **kind)
    needs = Needs(packages={**TORCH, **(packages or {})})
    ranks = 1 if expect is LOST else 2
    return Experiment(name, control, treatment, ranks, needs=needs, deadline_s=90, expected_s=(4.0, 4.0))


probe = Probe(
    experiments=(pair("runs", starts, "every -> rank 0", TWO, EVERY, RANK_0),),
    variants=(
        pair("same-id", starts, "one id -> rank 0", DOUBLED, SAME_ID, RANK_0),
        pair("wandb-runs", wandb_runs, "every -> rank 0", TWO, EVERY, RANK_0, WANDB),
        pair("accelerate", wandb_runs, "every -> accelerate", TWO, EVERY, MAIN, ACCELERATE),
        pair("wandb-steps", wandb_steps, "rank -> own", LOST, BY_RANK, OWN, WANDB),
        pair("wandb-counter", wandb_steps, "rank -> one counter", LOST, BY_RANK, "one counter", WANDB),
        pair("wandb-automatic", wandb_steps, "automatic -> own", LOST, AUTOMATIC, OWN, WANDB),
        pair("wandb-define", wandb_steps, "rank and definition -> own", LOST, DEFINED, OWN, WANDB),
        pair("mlflow-runs", mlflow_runs, "every -> rank 0", TWO, EVERY, RANK_0, MLFLOW),
        pair("mlflow-log", mlflow_runs, "rank 0, but all log -> rank 0", TWO, STARTS, RANK_0, MLFLOW),
        pair("mlflow-one-id", mlflow_runs, "one id -> rank 0", DOUBLED, SAME_ID, RANK_0, MLFLOW),
        pair("tensorboard", tensorboard, "every -> rank 0", DOUBLED, TWO_WRITERS, RANK_0, TENSORBOARD),
    ),
)
