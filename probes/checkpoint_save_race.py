"""Two ranks save a checkpoint: both rename, delete or create one folder, or each creates a folder of its own."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping

from kb.host import mount_of
from kb.packages import version
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config, spans_nodes

FILES = ["model.pt", "rng_state_0.pt", "rng_state_1.pt"]
SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "wekafs", "panfs", "fuse.glusterfs"}
OF_ONE_NODE = {"tmpfs", "ramfs", "overlay"}  # ext4 or xfs may be exported to the other nodes


def publish(tmp: str, final: str) -> None:
    """Ends a save with the code that the entry prints."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        os.rename(tmp, final)
    dist.barrier()


def publish_over(tmp: str, final: str) -> None:
    """Ends a save as `publish` does, but first removes the folder of an earlier run."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        if os.path.isdir(final):
            shutil.rmtree(final)
        os.rename(tmp, final)
    dist.barrier()


def publish_otherwise(tmp: str, final: str, *, by_rank_0: bool, waits: bool) -> None:
    import torch.distributed as dist

    if waits:
        dist.barrier()
    if dist.get_rank() == 0 or not by_rank_0:
        os.rename(tmp, final)
    if waits:
        dist.barrier()


def make_folder(path: str) -> None:
    """Starts a save with the code that the entry prints."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        os.makedirs(path, exist_ok=True)
    dist.barrier()
    with suppress(FileExistsError):
        os.makedirs(path, exist_ok=True)


def make_if_missing(path: str) -> None:
    import torch.distributed as dist

    if not os.path.exists(path):
        dist.barrier()  # now both ranks have checked
        os.makedirs(path)


def make_by_rank_0(path: str) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        os.makedirs(path, exist_ok=True)
    dist.barrier()


def write_files(ctx: Context, folder: str) -> None:
    import torch

    torch.save({"rank": ctx.rank}, os.path.join(folder, "rng_state_%d.pt" % ctx.rank))
    if ctx.rank == 0:
        torch.save({"step": 5}, os.path.join(folder, "model.pt"))


def assert_whole(folder: str) -> None:
    import torch

    assert sorted(os.listdir(folder)) == FILES, os.listdir(folder)
    assert torch.load(os.path.join(folder, "model.pt"))["step"] == 5
    for rank in (0, 1):
        assert torch.load(os.path.join(folder, "rng_state_%d.pt" % rank))["rank"] == rank


def save(ctx: Context, *, publishes: Callable[[str, str], None], late: str = "", again: bool = False) -> None:
    """Writes a checkpoint into tmp-checkpoint-5 and renames it. Rank 1 may create its folder or its file late."""
    ctx.init_process_group(timeout_s=15)
    if again and ctx.rank == 0:
        os.makedirs("checkpoint-5/of-an-earlier-run")
    if late != "folder":
        os.makedirs("tmp-checkpoint-5", exist_ok=True)
    ctx.reached()
    end = time.monotonic() + (0.6 if late and ctx.rank == 1 else 0)
    while time.monotonic() < end and not os.path.exists("checkpoint-5"):
        time.sleep(0.01)
    if late == "folder":
        os.makedirs("tmp-checkpoint-5", exist_ok=True)
    write_files(ctx, "tmp-checkpoint-5")
    publishes("tmp-checkpoint-5", "checkpoint-5")
    assert ctx.meet("saved")
    assert_whole("checkpoint-5")
    assert not os.path.exists("tmp-checkpoint-5")


def start_save(ctx: Context, *, makes: Callable[[str], None], disks: int = 1, is_stale: bool = False) -> None:
    """Both ranks write into checkpoint-5, on one disk or one disk each. If `is_stale`, rank 1 sees the folder late."""
    dist = ctx.init_process_group(timeout_s=15)
    folder = ctx.path("disk-%d" % (ctx.rank % disks)) + "/checkpoint-5"
    isdir = os.path.isdir
    if is_stale and ctx.rank == 1:
        os.path.isdir = lambda s: s != folder and isdir(s)
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    if is_stale and ctx.rank == 0:
        os.makedirs(folder)
    ctx.reached()
    makes(folder)
    write_files(ctx, folder)
    dist.barrier()
    if disks == 1:
        assert_whole(folder)
    else:
        assert "rng_state_%d.pt" % ctx.rank in os.listdir(folder)


def save_shards(ctx: Context, *, disks: int) -> None:
    """Saves and loads a sharded checkpoint, on one disk or one disk each."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist = ctx.init_process_group(timeout_s=15)
    folder = ctx.path("disk-%d" % (ctx.rank % disks)) + "/checkpoint-5"
    weight = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    ctx.reached()
    dcp.save({"weight": weight}, checkpoint_id=folder)
    state = {"weight": torch.zeros_like(weight)}
    found = [False, False]
    dist.all_gather_object(found, os.path.exists(folder + "/.metadata"))
    try:
        dcp.load(state, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        raise Symptom("%d of 2 ranks find the .metadata of the sharded checkpoint" % sum(found)) from error
    assert state["weight"].full_tensor().tolist() == list(range(8))


def rotate(ctx: Context, *, by_rank_0: bool) -> None:
    """Deletes the old checkpoint."""
    dist = ctx.init_process_group(timeout_s=15)
    old = "checkpoint-1"
    os.makedirs(old, exist_ok=True)
    write_files(ctx, old)
    ctx.reached()
    dist.barrier()
    if dist.get_rank() == 0 or not by_rank_0:
        shutil.rmtree(old)
    dist.barrier()
    assert not os.path.exists(old)


def link(ctx: Context, *, by_rank_0: bool) -> None:
    """Creates the link `last` to the newest checkpoint if it does not exist."""
    dist = ctx.init_process_group(timeout_s=15)
    ctx.reached()
    is_missing = not os.path.lexists("last")
    dist.barrier()  # now both ranks have checked
    if is_missing and (dist.get_rank() == 0 or not by_rank_0):
        os.symlink("checkpoint-5", "last")
    dist.barrier()
    assert os.readlink("last") == "checkpoint-5"


def clean_up(ctx: Context, *, by_rank_0: bool) -> None:
    """Rank 0 renames the folder while rank 1, on another node, deletes it as a leftover."""
    ctx.init_process_group(timeout_s=15)
    os.makedirs("tmp-checkpoint-5", exist_ok=True)
    write_files(ctx, "tmp-checkpoint-5")
    ctx.reached()
    if by_rank_0:
        publish("tmp-checkpoint-5", "checkpoint-5")
    elif ctx.rank == 0:
        assert ctx.meet("deletes")
        os.rename("tmp-checkpoint-5", "checkpoint-5")
        assert ctx.meet("renamed")
    else:
        unlink = os.unlink

        def unlink_after_rename(*args: Any, **options: Any) -> None:
            assert ctx.meet("deletes") and ctx.meet("renamed")
            unlink(*args, **options)

        os.unlink = unlink_after_rename
        shutil.rmtree("tmp-checkpoint-5", ignore_errors=True)
    assert ctx.meet("saved")
    present = [name for name in FILES if os.path.exists("checkpoint-5/" + name)]
    if len(present) < len(FILES):
        raise Symptom("checkpoint-5 holds %d of %d files after the save" % (len(present), len(FILES)))
    assert_whole("checkpoint-5")


def name_folder(ctx: Context, *, by_rank_0: bool) -> None:
    """The folder's name contains the time, and rank 1 starts a second later."""
    dist = ctx.init_process_group(timeout_s=15)
    ctx.reached()
    time.sleep(1.1 * ctx.rank)
    name = [time.strftime("runs/%Y%m%d-%H%M%S")]
    if by_rank_0:
        dist.broadcast_object_list(name, src=0)
    make_folder(name[0])
    write_files(ctx, name[0])
    assert ctx.meet("saved")
    if len(os.listdir("runs")) > 1:
        raise Symptom("the files of one save lie in %d folders" % len(os.listdir("runs")))
    assert_whole(name[0])


def run_callback(ctx: Context, *, by_rank_0: bool) -> None:
    """Runs a Trainer on two ranks, with a callback that deletes a checkpoint once a newer one is saved."""
    ctx.init_process_group(timeout_s=30)
    os.environ.update(RANK=str(ctx.rank), WORLD_SIZE="2", LOCAL_RANK=str(ctx.rank), LOCAL_WORLD_SIZE="2")
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments  # type: ignore[import-not-found]

    class Model(torch.nn.Linear):  # type: ignore[misc]
        def forward(self, features: Any) -> Any:
            return {"loss": super().forward(features).sum()}

    class DeleteOld(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            old = os.path.join(args.output_dir, "checkpoint-%d" % (state.global_step - 1))
            if state.global_step > 1:
                args.distributed_state.wait_for_everyone()
                if state.is_world_process_zero or not by_rank_0:
                    shutil.rmtree(old)
                args.distributed_state.wait_for_everyone()

    options = {"max_steps": 2, "save_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(output_dir="out", per_device_train_batch_size=1, **options)
    rows = [{"features": torch.ones(2)} for _ in range(4)]
    trainer = Trainer(model=Model(2, 1), args=args, train_dataset=rows, callbacks=[DeleteOld()])
    ctx.reached()
    trainer.train()
    assert os.listdir("out") == ["checkpoint-2"], os.listdir("out")


def check(params: Mapping[str, Any]) -> Finding:
    """Do save_on_each_node and the installed transformers match the number of nodes and the file system?"""
    release = version("transformers")
    if params["config"] is None:
        return unknown(
            "no configuration was given", advice="run --set config=ARGS.yaml --set nodes=NODES --set folder=OUTPUT_DIR"
        )
    try:
        config = read_config(params["config"])
    except UnreadableConfig as error:
        return unknown(str(error))
    every_node = config.values.get("save_on_each_node", False)
    folder = params["folder"] or config.values.get("output_dir")
    if config.kind != "arguments" or "output_dir" not in config.values or not isinstance(every_node, bool):
        return unknown("the file does not contain arguments of the Trainer, so kb cannot read save_on_each_node")
    nodes = spans_nodes(params["nodes"])
    if nodes is None:
        return unknown("kb does not know on how many nodes the job runs", advice="run --set nodes=NODES")
    doubt = ""
    if not release or "dev" in release:
        doubt = "kb does not know how transformers %s saves" % (release or "of the job")
    if nodes and not doubt and (release == "4.36.0" or (not every_node and release.startswith(("4.36.", "4.38.")))):
        return exposed("transformers %s races on multiple nodes" % release, advice="install transformers 4.39 or newer")
    if nodes:
        return judge_folder(every_node, folder, doubt)
    if release == "4.36.0":
        return unknown(
            "transformers 4.36.0 races with more than one process, and kb does not know how many the job has"
        )
    if doubt:
        return unknown(doubt, advice="add --python PYTHON_OF_THE_JOB")
    return clear("on one node save_on_each_node makes no difference; kb did not read scripts and callbacks")


def judge_folder(every_node: bool, folder: Any, doubt: str) -> Finding:
    """Does save_on_each_node match the file system of the output folder?"""
    if not isinstance(folder, (str, Path)) or set("${") & set(str(folder)):
        return unknown("the output folder %s is not a plain path" % ascii(folder), advice="run --set folder=OUTPUT_DIR")
    try:
        kind = file_system(Path(os.path.expanduser(str(folder))))
    except (OSError, ValueError, IndexError) as error:
        return unknown("kb cannot find the file system of the output folder: %s" % ascii(error))
    seen = "save_on_each_node is %s, and %s is on %s" % (every_node, ascii(str(folder)), kind)
    if every_node and kind in SHARED:
        return exposed(seen, "every node writes the same files", advice="set save_on_each_node=False on shared storage")
    if not every_node and kind in OF_ONE_NODE:
        return exposed(
            seen,
            "each node has only a part of each checkpoint",
            advice="use a shared folder, or set save_on_each_node=True",
        )
    if kind in SHARED | OF_ONE_NODE and doubt:
        return unknown(seen + ", which match, but " + doubt, advice="add --python PYTHON_OF_THE_JOB")
    if kind in SHARED | OF_ONE_NODE:
        return clear(seen + ", which match; kb did not read scripts and callbacks")
    return unknown(
        seen + "; kb cannot tell whether all nodes see this folder",
        advice="touch a file there, and list the folder on another node",
    )


def file_system(folder: Path) -> str:
    """The type of the file system that contains the folder, or will contain it."""
    while not folder.exists():
        folder = folder.parent
        if str(folder) == "/":
            raise ValueError("no part of the path exists on this machine")
    return mount_of(str(folder)).kind or "an unknown file system"


ONE = "rank 0 alone renames the folder, between two barriers"
MADE = "rank 0 creates the folder; after a barrier each rank creates it if it is still missing"
LOST = r"No such file or directory: 'tmp-checkpoint-5' -> 'checkpoint-5'"
NOT_EMPTY = r"Directory not empty: 'tmp-checkpoint-5' -> 'checkpoint-5'"
NO_TMP = r"Parent directory tmp-checkpoint-5 does not exist"
EXISTS = r"File exists: '\S+checkpoint-5'"
SPLIT = symptom(r"the files of one save lie in 2 folders")
NO_PARENT = r"Parent directory \S*checkpoint-5 does not exist"
GONE = raised(r"FileNotFoundError: \[Errno 2\] No such file or directory: '[^'\n]+'")


def pair(
    name: str, control: Any, treatment: Any, expect: Expect, because: str, fix: str, stands_for: str = "", **more: str
) -> Experiment:
    options: Any = {"fidelity": "stand-in" if stands_for else "cpu", "stands_for": stands_for}
    return Experiment(
        name=name,
        control=Arm(control, expect=expect, because=because, **options),
        treatment=Arm(treatment, expect=completed(), because=fix, **options),
        needs=Needs(packages={"torch": ">=2.1", **more}),
        deadline_s=60.0 if more else 20.0,
        expected_s=(10.0, 10.0) if more else (1.5, 1.5),
    )


def of_two(name: str, job: Callable[..., None], expect: Expect, because: str, fix: str, **more: str) -> Experiment:
    """In the control arm every rank acts; in the treatment arm rank 0 acts for all."""
    return pair(name, partial(job, by_rank_0=False), partial(job, by_rank_0=True), expect, because, fix, **more)


def end_of_save(name: str, text: str, because: str, by_rank_0: bool = False, late: str = "") -> Experiment:
    control = partial(save, publishes=partial(publish_otherwise, by_rank_0=by_rank_0, waits=not late), late=late)
    return pair(name, control, partial(save, publishes=publish, late=late), raised(text), because, ONE)


def start_of_save(name: str, makes: Any, text: str, because: str, stands_for: str = "", **more: Any) -> Experiment:
    control, treatment = partial(start_save, makes=makes, **more), partial(start_save, makes=make_folder, **more)
    return pair(name, control, treatment, raised(text), because, MADE, stands_for)


probe = Probe(
    experiments=(end_of_save("rename", LOST, "every rank renames the folder, as local rank 0 of each node would"),),
    variants=(
        end_of_save(
            "not-empty",
            NOT_EMPTY,
            "every rank renames without a barrier, and the late rank 1 creates the folder again",
            late="folder",
        ),
        end_of_save(
            "guard-only",
            NO_TMP,
            "rank 0 alone renames, but does not wait until rank 1 has written",
            by_rank_0=True,
            late="file",
        ),
        pair(
            "again",
            partial(save, publishes=publish, again=True),
            partial(save, publishes=publish_over, again=True),
            raised(NOT_EMPTY),
            "rank 0 renames onto the folder of an earlier run",
            "rank 0 first removes the folder of the earlier run",
        ),
        of_two(
            "link",
            link,
            raised(r"File exists: 'checkpoint-5' -> 'last'"),
            "every rank creates the link",
            "rank 0 alone creates the link",
        ),
        of_two(
            "rotation",
            rotate,
            GONE,
            "every rank deletes the old checkpoint",
            "rank 0 alone deletes it, between two barriers",
        ),
        of_two(
            "clean-up",
            clean_up,
            symptom(r"checkpoint-5 holds \d of 3 files after the save"),
            "another rank deletes the folder with ignore_errors while rank 0 renames it",
            "rank 0 alone touches the folder",
            stands_for="a slow disk, which takes time between two files",
        ),
        start_of_save(
            "make", make_if_missing, EXISTS, "every rank checks whether the folder exists, and then creates it"
        ),
        start_of_save(
            "local-disks",
            make_by_rank_0,
            NO_PARENT,
            "rank 0 creates the folder and all wait, but rank 1 has a disk of its own",
            "two nodes, each with its own disk",
            disks=2,
        ),
        pair(
            "sharded-local-disks",
            partial(save_shards, disks=2),
            partial(save_shards, disks=1),
            symptom("1 of 2 ranks find the .metadata of the sharded checkpoint"),
            "each rank saves its shard to its own disk",
            "both ranks save to one disk",
            "two nodes, each with its own disk",
            torch=">=2.5",
        ),
        start_of_save(
            "stale",
            partial(os.makedirs, exist_ok=True),
            EXISTS,
            "makedirs with exist_ok raises on rank 1, whose file system says that the folder is not there",
            "a file system client that answers from its cache",
            is_stale=True,
        ),
        of_two(
            "names",
            name_folder,
            SPLIT,
            "each rank puts its own time into the name",
            "rank 0 broadcasts its name to all ranks",
        ),
        of_two(
            "transformers",
            run_callback,
            GONE,
            "a callback deletes the old checkpoint in on_save, which runs on every rank",
            "the callback deletes only if state.is_world_process_zero, between two barriers",
            transformers=">=4.39",
            accelerate="",
        ),
    ),
    check=check,
    params={
        "config": Param("path", "a YAML or JSON file with the arguments of the Trainer"),
        "folder": Param("path", "the output folder, if it is not the one in the arguments"),
        "nodes": Param("int", "the number of nodes of the job", 0),
    },
)
