"""Two ranks save: both rename, delete or make the same folder, or each its own where one was meant."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Mapping, Optional

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
    """The end of a save, as the entry has it."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        os.rename(tmp, final)
    dist.barrier()


def publish_otherwise(tmp: str, final: str, *, by: str, waits: bool) -> None:
    import torch.distributed as dist

    if waits:
        dist.barrier()
    if by == "all" or int(os.environ["LOCAL_RANK"] if by == "local rank 0" else dist.get_rank()) == 0:
        os.rename(tmp, final)
    if waits:
        dist.barrier()


def make_folder(path: str) -> None:
    """The start of a save, as the entry has it."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        os.makedirs(path, exist_ok=True)
    dist.barrier()
    with suppress(FileExistsError):
        os.makedirs(path, exist_ok=True)


def make_if_missing(path: str) -> None:
    import torch.distributed as dist

    if not os.path.exists(path):
        dist.barrier()  # both have looked
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


def save(ctx: Context, *, publishes: Callable[[str, str], None], late: str = "") -> None:
    """A checkpoint is written into tmp-checkpoint-5 and renamed. Rank 1 may be late with its folder or its file."""
    ctx.init_process_group(timeout_s=15)
    os.environ["LOCAL_RANK"] = "0"  # each rank is the only one of its node
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
    """Both ranks write into checkpoint-5: on one disk, on a disk per node, or where rank 1 sees the folder late."""
    dist = ctx.init_process_group(timeout_s=15)
    folder = ctx.path("disk-%d" % (ctx.rank % disks)) + "/checkpoint-5"
    looks = os.path.isdir
    if is_stale and ctx.rank == 1:
        os.path.isdir = lambda s: s != folder and looks(s)
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


def rotate(ctx: Context, *, by_rank_0: bool) -> None:
    """The old checkpoint is deleted."""
    dist = ctx.init_process_group(timeout_s=15)
    os.makedirs("checkpoint-1", exist_ok=True)
    write_files(ctx, "checkpoint-1")
    old = "checkpoint-1"
    ctx.reached()
    dist.barrier()
    if dist.get_rank() == 0 or not by_rank_0:
        shutil.rmtree(old)
    dist.barrier()
    assert not os.path.exists(old)


def clean_up(ctx: Context, *, by_one: bool) -> None:
    """Rank 0 renames the folder while rank 1, of another node, removes what it takes for a left-over."""
    ctx.init_process_group(timeout_s=15)
    os.makedirs("tmp-checkpoint-5", exist_ok=True)
    write_files(ctx, "tmp-checkpoint-5")
    ctx.reached()
    if by_one:
        publish("tmp-checkpoint-5", "checkpoint-5")
    elif ctx.rank == 0:
        assert ctx.meet("deletes")
        os.rename("tmp-checkpoint-5", "checkpoint-5")
        assert ctx.meet("renamed")
    else:
        unlinks = os.unlink

        def unlink_after_rename(*args: Any, **options: Any) -> None:
            assert ctx.meet("deletes") and ctx.meet("renamed")
            unlinks(*args, **options)

        os.unlink = unlink_after_rename
        shutil.rmtree("tmp-checkpoint-5", ignore_errors=True)
    assert ctx.meet("saved")
    kept = [name for name in FILES if os.path.exists("checkpoint-5/" + name)]
    if len(kept) < len(FILES):
        raise Symptom("checkpoint-5 holds %d of %d files after the save" % (len(kept), len(FILES)))
    assert_whole("checkpoint-5")


def name_folder(ctx: Context, *, is_shared: bool) -> None:
    """The folder's name has the time in it, and rank 1 starts a second later."""
    dist = ctx.init_process_group(timeout_s=15)
    ctx.reached()
    time.sleep(1.1 * ctx.rank)
    name = [time.strftime("runs/%Y%m%d-%H%M%S")]
    if is_shared:
        dist.broadcast_object_list(name, src=0)
    make_folder(name[0])
    write_files(ctx, name[0])
    assert ctx.meet("saved")
    if len(os.listdir("runs")) > 1:
        raise Symptom("the files of one save lie in %d folders" % len(os.listdir("runs")))
    assert_whole(name[0])


def run_callback(ctx: Context, *, by_rank_0: bool) -> None:
    """A Trainer of two ranks with a callback that deletes a checkpoint once a newer one is saved."""
    dist = ctx.init_process_group(timeout_s=30)
    os.environ.update(RANK=str(ctx.rank), WORLD_SIZE="2", LOCAL_RANK=str(ctx.rank), LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # accelerate wants them; the group is there already
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
                dist.barrier()
                if state.is_world_process_zero or not by_rank_0:
                    shutil.rmtree(old)
                dist.barrier()

    options = {"max_steps": 2, "save_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(output_dir="out", per_device_train_batch_size=1, **options)
    rows = [{"features": torch.ones(2)} for _ in range(4)]
    trainer = Trainer(model=Model(2, 1), args=args, train_dataset=rows, callbacks=[DeleteOld()])
    ctx.reached()
    trainer.train()
    assert os.listdir("out") == ["checkpoint-2"], os.listdir("out")


def check(params: Mapping[str, Any]) -> Finding:
    """Does save_on_each_node of the Trainer fit the file system, and is the installed transformers one that races?"""
    nodes = spans_nodes(params["nodes"])
    version = installed("transformers")
    if nodes and version.startswith(("4.36.", "4.38.")):
        return exposed("transformers %s on several nodes" % version, advice="install transformers 4.39 or newer")
    if version == "4.36.0":
        return unknown("transformers 4.36.0 races with more than one process, and how many there are is not known")
    if params["config"] is None:
        return unknown("no configuration was given", advice="--config FILE --set nodes=NODES --set folder=OUTPUT_DIR")
    try:
        config = read_config(params["config"])
    except UnreadableConfig as error:
        return unknown(str(error))
    own, folder = config.values.get("save_on_each_node", False), params["folder"] or config.values.get("output_dir")
    if config.kind != "arguments" or "output_dir" not in config.values or not isinstance(own, bool):
        return unknown("the file is no set of arguments of the Trainer, where save_on_each_node could be read")
    if nodes is None:
        return unknown("on how many nodes the job runs is not known", advice="--set nodes=NODES")
    if not nodes:
        return clear("one node: save_on_each_node makes no difference; scripts and callbacks were not read")
    try:
        kind = file_system(Path(str(folder)))
    except (OSError, TypeError, ValueError, IndexError) as error:
        return unknown("the file system of the output folder cannot be found: %s" % ascii(error))
    seen = "save_on_each_node is %s, %s lies on %s" % (own, ascii(str(folder)), kind)
    if own and kind in SHARED:
        return exposed(seen, "every node writes the same files", advice="save_on_each_node=False on shared storage")
    if not own and kind in OF_ONE_NODE:
        return exposed(seen, "the other nodes get a part of each checkpoint", advice="a shared folder, or True")
    if kind in SHARED | OF_ONE_NODE:
        return clear(seen + ", which fit; scripts and callbacks were not read")
    return unknown(seen + ": unknown whether all nodes see it", advice="touch a file there, look from another node")


def installed(package: str) -> str:
    try:
        return metadata.version(package) or ""
    except Exception:  # a broken installation
        return ""


def file_system(folder: Path) -> str:
    """The type of the mount that the folder lies on, or would lie on."""
    while not folder.exists():
        folder = folder.parent
    real, best = os.path.realpath(str(folder)) + "/", ("", "")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            left, right = line.split(" - ", 1)
            point = left.split()[4].replace("\\040", " ").rstrip("/") + "/"
            if real.startswith(point) and len(point) >= len(best[0]):
                best = (point, right.split()[0])
    return best[1]


ONE = "barrier, rank 0 alone renames, barrier"
MADE = "rank 0 makes the folder, barrier, each rank makes it where it is missing"
LOST = r"No such file or directory: 'tmp-checkpoint-5' -> 'checkpoint-5'"
NO_PARENT = r"Parent directory \S*checkpoint-5 does not exist"
GONE = raised(r"FileNotFoundError: \[Errno 2\] No such file or directory: '[^'\n]+'")


def pair(
    name: str,
    control: Callable[[Context], None],
    treatment: Callable[[Context], None],
    expect: Expect,
    because: str,
    fix: str,
    stands_for: str = "",
    packages: Optional[Mapping[str, str]] = None,
) -> Experiment:
    options: Any = {"fidelity": "stand-in" if stands_for else "cpu", "stands_for": stands_for}
    return Experiment(
        name=name,
        control=Arm(control, expect=expect, because=because, **options),
        treatment=Arm(treatment, expect=completed(), because=fix, **options),
        needs=Needs(packages={"torch": ">=2.1", **(packages or {})}),
        deadline_s=60.0 if packages else 20.0,
        expected_s=(10.0, 10.0) if packages else (1.5, 1.5),
    )


def end_of_save(name: str, by: str, text: str, because: str, late: str = "", stands_for: str = "") -> Experiment:
    control = partial(publish_otherwise, by=by, waits=not late)
    treatment = partial(save, publishes=publish, late=late)
    return pair(
        name, partial(save, publishes=control, late=late), treatment, raised(text), because, ONE, stands_for=stands_for
    )


def start_of_save(name: str, control: Callable[..., None], text: str, because: str, **more: Any) -> Experiment:
    stands_for = more.pop("stands_for", "")
    treatment = partial(start_save, makes=make_folder, **more)
    return pair(
        name, partial(start_save, makes=control, **more), treatment, raised(text), because, MADE, stands_for=stands_for
    )


probe = Probe(
    experiments=(end_of_save("rename", "all", LOST, "every rank renames the folder"),),
    variants=(
        end_of_save(
            "not-empty",
            "all",
            r"Directory not empty: 'tmp-checkpoint-5' -> 'checkpoint-5'",
            "every rank renames as soon as it has written, rank 1 makes the folder anew",
            late="folder",
        ),
        end_of_save(
            "guard-only",
            "rank 0",
            r"Parent directory tmp-checkpoint-5 does not exist",
            "rank 0 alone renames, and does not wait for the file of rank 1",
            late="file",
        ),
        end_of_save(
            "local-rank",
            "local rank 0",
            LOST,
            "local rank 0 of each node renames, on a shared disk",
            stands_for="two nodes with one GPU each",
        ),
        pair(
            "rotation",
            partial(rotate, by_rank_0=False),
            partial(rotate, by_rank_0=True),
            GONE,
            "every rank deletes the old checkpoint",
            "barrier, rank 0 alone deletes, barrier",
        ),
        pair(
            "clean-up",
            partial(clean_up, by_one=False),
            partial(clean_up, by_one=True),
            symptom(r"checkpoint-5 holds \d of 3 files after the save"),
            "another rank deletes the folder with ignore_errors while rank 0 renames it",
            "rank 0 alone touches the folder",
            "the time that a slow disk takes between two files",
        ),
        start_of_save("make", make_if_missing, r"File exists: '\S+checkpoint-5'", "every rank looks, then makes"),
        start_of_save(
            "local-disks",
            make_by_rank_0,
            NO_PARENT,
            "rank 0 makes the folder, all wait, and the other node has a disk of its own",
            disks=2,
            stands_for="two nodes with a disk each",
        ),
        start_of_save(
            "stale",
            partial(os.makedirs, exist_ok=True),
            r"File exists: '\S+checkpoint-5'",
            "makedirs with exist_ok where rank 1 is still told that there is no such folder",
            is_stale=True,
            stands_for="a file system client that answers from its cache",
        ),
        pair(
            "names",
            partial(name_folder, is_shared=False),
            partial(name_folder, is_shared=True),
            symptom(r"the files of one save lie in 2 folders"),
            "each rank puts the time into the name",
            "rank 0 sends its name to the others",
        ),
        pair(
            "transformers",
            partial(run_callback, by_rank_0=False),
            partial(run_callback, by_rank_0=True),
            GONE,
            "a callback deletes the old checkpoint in on_save, which runs on every rank",
            "it does so where state.is_world_process_zero",
            packages={"transformers": ">=4.39", "accelerate": ""},
        ),
    ),
    check=check,
    params={
        "config": Param("path", "a file of the Trainer's arguments, YAML or JSON"),
        "folder": Param("path", "the output folder, if not that of the arguments"),
        "nodes": Param("int", "on how many nodes the job runs", 0),
    },
)
