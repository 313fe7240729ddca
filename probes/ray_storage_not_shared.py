"""The head node writes a marker to the storage path, and the worker node looks for it on a disk of its own.

The worker node is a process with its own mounts. A tmpfs over the storage path is its local disk.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

from kb.namespaces import own_user, tmpfs_over
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, Unavailable, completed, symptom

EXPERIMENT, MARKER = "run", ".validate_storage_marker"


def on_worker_node(ctx: Context, job: Callable[[], None], *, shared: bool, created: bool) -> None:
    """Runs a job on the worker node. Re-raises the first line of its error as a symptom.

    The storage path is `shared` with the head node, or else on a disk of the worker, where the folder is perhaps
    `created` beforehand.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        answer = b"ok"
        try:
            if not shared:
                own_user()
                tmpfs_over(ctx.path("results"), 16)
            if created:
                os.makedirs(os.path.join(ctx.path("results"), EXPERIMENT))
            job()
        except Unavailable as error:
            answer = b"unavailable " + str(error).encode()
        except Exception:
            answer = traceback.format_exc().strip().encode()
        os.write(writing, answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    os.waitpid(pid, 0)
    if answer.startswith(b"unavailable "):
        raise Unavailable(answer.split(b" ", 1)[1].decode())
    if answer != b"ok":
        lines = [line for line in answer.decode().splitlines() if line.startswith(("RuntimeError", "Check that"))]
        raise Symptom(" ".join(lines) or answer.decode())


def check_marker(ctx: Context, *, shared: bool, created: bool = False) -> None:
    """What Ray Train does, in a few lines: the head node leaves a marker, the worker node wants to see it."""
    folder = Path(ctx.path("results"))
    (folder / EXPERIMENT).mkdir(parents=True)
    (folder / EXPERIMENT / MARKER).touch()

    def report() -> None:
        if not (folder / EXPERIMENT / MARKER).exists():
            raise RuntimeError(f"Unable to set up cluster storage at {folder}: no {MARKER} on this node")
        (folder / EXPERIMENT / "checkpoint.pt").write_bytes(b"weights")

    ctx.reached()
    on_worker_node(ctx, report, shared=shared, created=created)
    assert (folder / EXPERIMENT / "checkpoint.pt").read_bytes() == b"weights"


def report_with_ray(ctx: Context, *, shared: bool, created: bool = False) -> None:
    """Ray Train's own storage: the head node sets it up, and a worker persists a checkpoint."""
    from ray.train import Checkpoint  # type: ignore[import-not-found]
    from ray.train.v2._internal.execution.storage import StorageContext  # type: ignore[import-not-found]

    os.makedirs(ctx.path("checkpoint"))
    Path(ctx.path("checkpoint"), "weights.pt").write_bytes(b"weights")
    os.makedirs(ctx.path("results"))
    storage = StorageContext(storage_path=ctx.path("results"), experiment_dir_name=EXPERIMENT)
    ctx.reached()
    report = partial(storage.persist_current_checkpoint, Checkpoint(ctx.path("checkpoint")), "checkpoint_000000")
    on_worker_node(ctx, report, shared=shared, created=created)
    saved = Path(ctx.path("results"), EXPERIMENT, "checkpoint_000000", "weights.pt")
    assert saved.read_bytes() == b"weights"


def start_second_job(ctx: Context, *, own_name: bool) -> None:
    """Two jobs save to the same storage. The second has the `name` of the first, or a name of its own."""
    from ray.train import Checkpoint, CheckpointConfig
    from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (  # type: ignore[import-not-found]
        CheckpointManager,
    )
    from ray.train.v2._internal.execution.storage import StorageContext
    from ray.train.v2._internal.execution.training_report import _TrainingReport  # type: ignore[import-not-found]

    def start(name: str) -> Tuple[Any, Any]:
        storage = StorageContext(storage_path=ctx.path("results"), experiment_dir_name=name)
        return storage, CheckpointManager(CheckpointConfig(), storage)

    async def save() -> None:
        storage, manager = start("run")
        checkpoint = storage.persist_current_checkpoint(Checkpoint(ctx.path("checkpoint")), "checkpoint_000000")
        manager.register_checkpoint(_TrainingReport(checkpoint=checkpoint, metrics={}, validation=False))

    os.makedirs(ctx.path("checkpoint"))
    os.makedirs(ctx.path("results"))
    asyncio.run(save())
    ctx.reached()
    found = start("other" if own_name else "run")[1].latest_checkpoint_result
    if found:
        raise Symptom(f"a new job starts from {os.path.basename(found.checkpoint.path)} of another with the same name")


REFUSED = symptom(r"RuntimeError: Unable to set up cluster storage")
LOCAL = "the storage path is on a disk of each node, so the worker node has no marker"
CREATED = "somebody has created the folder on the worker node, which still has no marker"
SHARED = "the storage path is the same folder on both nodes"


def experiment(name: str, job: Callable[..., None], **changes: Any) -> Experiment:
    """Control: a disk of each node. Treatment: a shared folder. `created` makes the folder on the worker first."""
    created = changes.pop("created", False)
    because: Tuple[str, str] = (CREATED if created else LOCAL, SHARED)
    like: Dict[str, Any] = {"fidelity": "cpu"}
    if job is check_marker:
        like = {"fidelity": "stand-in", "stands_for": "the storage of Ray Train; two namespaces stand for two nodes"}
    expects: Tuple[Expect, Expect] = (REFUSED, completed())
    control, treatment = (
        Arm(partial(job, shared=shared, created=created and not shared), expect=expect, because=why, **like)
        for shared, expect, why in zip((False, True), expects, because)
    )
    return Experiment(
        name=name, control=control, treatment=treatment, world_size=1, **{"expected_s": (0.3, 0.3), **changes}
    )


WITH_RAY: Dict[str, Any] = {
    "needs": Needs(packages={"ray": ">=2.51", "pyarrow": ""}),
    "deadline_s": 60,
    "expected_s": (8, 8),
}

probe = Probe(
    experiments=(experiment("marker", check_marker, needs=Needs(packages={})),),
    variants=(
        experiment("ray", report_with_ray, **WITH_RAY),
        experiment("folder-created", report_with_ray, created=True, **WITH_RAY),
        Experiment(
            name="name-reused",
            control=Arm(
                partial(start_second_job, own_name=False),
                expect=symptom(r"a new job starts from \w+ of another with the same name"),
                because="the second job has the name of the first, and Ray takes it for a resume",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(start_second_job, own_name=True),
                expect=completed(),
                because="the second job has another name",
                fidelity="cpu",
            ),
            world_size=1,
            **WITH_RAY,
        ),
    ),
)
