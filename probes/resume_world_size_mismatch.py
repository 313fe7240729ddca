"""Two ranks save a sharded model and its optimizer, one rank resumes: every rank its own file, or one that reshards."""

from __future__ import annotations

import importlib
import os
import re
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Set

from kb.cpu_arms import import_deepspeed
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Unavailable,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)


def resume(ctx: Context, *, resharding_format: bool, files_first: bool = False) -> None:
    """The old job is two ranks with FSDP2 and Adam. The new one is rank 0 alone, with the same code.

    With `files_first` the old job wrote a file per rank; two ranks read these, then save or do not save anew.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def build(ranks: int) -> Any:
        torch.manual_seed(ranks)  # another start on purpose: what is equal at the end came out of the file
        model = nn.Linear(6, 6, device=ctx.device)
        shard(model, ctx.device.type, ranks)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any) -> None:
        if old_fsdp2():  # torch 2.5 cannot multiply DTensors of one rank
            for weight in model.parameters():
                weight.square().sum().backward()
        else:
            model(torch.ones(2, 6, device=ctx.device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def write_own(model: Any, optimizer: Any) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, ctx.path("world_size_2_rank_%d.pt" % ctx.rank))

    def read_own(model: Any, optimizer: Any) -> None:
        state = torch.load(ctx.path("world_size_2_rank_%d.pt" % ctx.rank), weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def whole(model: Any, optimizer: Any) -> Any:
        average = optimizer.state[model.weight]["exp_avg"]
        return torch.stack([model.weight.full_tensor(), average.full_tensor()])

    dist = ctx.init_process_group(timeout_s=10)
    model, optimizer = build(2)
    step(model, optimizer)
    trained = whole(model, optimizer)
    path = ctx.path("checkpoint")
    if files_first or not resharding_format:
        write_own(model, optimizer)
    if files_first:
        model, optimizer = build(2)
        step(model, optimizer)  # fills the optimizer's state
        read_own(model, optimizer)
    if resharding_format:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments}
        dcp.save(state, checkpoint_id=path)
    dist.barrier()
    dist.destroy_process_group()
    ctx.reached()
    if ctx.rank:
        return
    store = dist.FileStore(ctx.path("store of the new job"), 1)
    dist.init_process_group(ctx.backend, store=store, rank=0, world_size=1)
    model, optimizer = build(1)
    if resharding_format:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    else:
        read_own(model, optimizer)
    assert torch.equal(whole(model, optimizer), trained)
    step(model, optimizer)


def old_fsdp2() -> bool:
    """FSDP2 before torch 2.6 wants CUDA; its tensors, DTensors, do not."""
    import torch

    return tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7)


def shard(model: Any, device: str, ranks: int) -> None:
    """By rows, as FSDP2 does it."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device, (ranks,))
    if old_fsdp2():
        from torch.distributed._tensor import Shard, distribute_tensor

        for name, weight in list(model.named_parameters()):
            model.register_parameter(name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh)


def resume_deepspeed(ctx: Context, *, universal: bool) -> None:
    """ZeRO-3 on CPU. The old job is two children of this process, so that each job starts DeepSpeed from scratch."""
    import torch
    import torch.distributed as dist

    deepspeed = import_deepspeed()
    to_universal: Any = importlib.import_module("deepspeed.checkpoint.ds_to_universal")

    def start(rank: int, ranks: int) -> Any:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        store = dist.FileStore(ctx.path("store-%d" % ranks), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        deepspeed.init_distributed(dist_backend="gloo")
        torch.manual_seed(ranks)
        model = torch.nn.Linear(8, 8)
        named = dict(model.named_parameters(remove_duplicate=False))
        assert set(named) == set(model.state_dict()) and all(weight.requires_grad for weight in named.values())
        config: Dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        if universal and ranks == 1:
            config["checkpoint"] = {"load_universal": True}
        adam = torch.optim.AdamW(model.parameters(), lr=0.1)
        return deepspeed.initialize(model=model, optimizer=adam, config=config)[0]

    def weight(engine: Any) -> Any:
        with deepspeed.zero.GatheredParameters(engine.module.weight):
            return engine.module.weight.detach().clone()

    def step(engine: Any) -> None:
        engine.backward(engine(torch.ones(1, 8)).square().sum())
        engine.step()

    def save(rank: int) -> None:
        engine = start(rank, 2)
        step(engine)
        engine.save_checkpoint(ctx.path("checkpoint"), tag="step1")
        torch.save(weight(engine), ctx.path("weight-%d.pt" % rank))

    children = [_fork(partial(save, rank)) for rank in range(2)]
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise Unavailable("DeepSpeed does not train and save on CPU here, see the log")
    tag = "step1"
    if universal:
        folders = {"input_folder": ctx.path("checkpoint/step1"), "output_folder": ctx.path("checkpoint/universal")}
        workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
        to_universal.main(Namespace(**folders, **workers, strict=True, inject_missing_state=True))
        tag = "universal"
    trained = torch.load(ctx.path("weight-0.pt"))
    ctx.reached()
    engine = start(0, 1)
    if not universal:  # what people try instead, in this order: both return without an error
        for option in ({"load_module_only": True}, {"load_optimizer_states": False}):
            engine.load_checkpoint(ctx.path("checkpoint"), tag=tag, **option)
            loaded = "weights loaded" if torch.equal(weight(engine), trained) else "weights NOT loaded, no error"
            ctx.note(**{"%s_%s" % item: loaded for item in option.items()})
    engine.load_checkpoint(ctx.path("checkpoint"), tag=tag)
    assert torch.equal(weight(engine), trained)
    step(engine)


def _fork(job: Any) -> int:
    child = os.fork()
    if child:
        return child
    try:
        job()
    except BaseException as error:
        sys.stderr.write("%s: %s\n" % (type(error).__name__, error))
        os._exit(1)
    os._exit(0)


PER_RANK = (  # who names files so, and where the rank, the model-parallel rank or the world size stand in the name
    ("DeepSpeed ZeRO", re.compile(r"(?:\w+_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<parallel>\d+)_?optim_states\.pt")),
    ("verl", re.compile(r"(?:model|optim)_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt")),
    ("accelerate, one file per rank", re.compile(r"(?:pytorch_model_fsdp|optimizer)(?:_\d+)?_rank(?P<rank>\d+)\.bin")),
)
LOADERS = re.compile(rb"dataloader\.dp_rank_(\d{1,6})")
MOST = 20_000  # names that are looked at
MOST_METADATA = 32 << 20  # bytes


def check(params: Mapping[str, Any]) -> Finding:
    """How many processes wrote this checkpoint, by the names in its folder, and how many will read it?"""
    folder: Optional[Path] = params["checkpoint"]
    if folder is None:
        return unknown("no checkpoint folder was named", advice="--set checkpoint=checkpoint-500 --set gpus=16")
    try:
        folder = folder if folder.is_dir() else folder.parent
        latest = folder / "latest"
        tag = latest.read_text(errors="replace")[:200].strip() if latest.is_file() else ""
        folders = [folder / tag] if tag and (folder / tag).is_dir() else [folder, *sorted(_folders(folder))[:200]]
        inside = [sorted(os.listdir(folder))[:MOST] for folder in folders]
    except (OSError, ValueError) as error:
        return unknown("%s cannot be read: %s" % (folder, error))
    names = [name for names in inside for name in names][:MOST]
    converted = (folder / "latest_universal").is_file()
    world = os.environ.get("WORLD_SIZE", "")
    ranks = params["gpus"] or (int(world) if world.isdigit() else 0)
    for writer, pattern in PER_RANK:
        each = [[match.groupdict() for match in map(pattern.fullmatch, names) if match] for names in inside]
        results = [_compare(writer, files, ranks) for files in each if files]
        if results and converted:
            return unknown(
                "a universal checkpoint lies beside it; with load_universal in the config it is the one read"
            )
        if len({result.evidence[0] for result in results}) > 1:
            several = "several folders, written by other numbers of processes"
            return unknown(several, advice="--set checkpoint=FOLDER, the one that will be read")
        if results:
            return max(results, key=lambda result: ("clear", "unknown", "exposed").index(result.state))
    if any((folder / "zero" / "optimizer_state.pt").exists() for folder in folders):
        return clear("a universal checkpoint of DeepSpeed: with load_universal it loads on any number of processes")
    if any(name.endswith(".distcp") for name in names):
        if ".metadata" not in names:
            return unknown(
                "files of torch.distributed.checkpoint without .metadata: unfinished, or on another node's disk"
            )
        return _resharded(next(folder for folder in folders if (folder / ".metadata").is_file()))
    return unknown("no file in %s has a rank in its name" % ", ".join(folder.name for folder in folders[:5]))


def _resharded(folder: Path) -> Finding:
    """Weights and optimizer are cut anew, but torchtitan keeps a data loader for each data-parallel rank in there."""
    message = "written by torch.distributed.checkpoint, which reshards weights and optimizer"
    if (folder / "common.pt").exists() or (folder / "metadata.json").exists():
        text = "Megatron's torch_dist: its weights reshard, its distributed optimizer perhaps not over TP and PP"
        return unknown(text, advice="kb verify model-parallel-checkpoint-mismatch --set checkpoint=%s" % folder)
    try:
        with (folder / ".metadata").open("rb") as file:
            loaders = {int(rank) for rank in LOADERS.findall(file.read(MOST_METADATA))}
    except OSError as error:
        return unknown(message, ".metadata cannot be read: %s" % error)
    if loaders:
        message = "%s; the data loaders of %d data-parallel ranks in it do not" % (message, 1 + max(loaders))
        advice = "with another data-parallel size, torchtitan: --checkpoint.exclude_from_loading dataloader"
        return unknown(message, advice=advice)
    return clear("%s; state of data loaders beside it may not" % message)


def _folders(folder: Path) -> List[Path]:
    with os.scandir(folder) as inside:
        return [Path(item.path) for item in inside if item.is_dir()]


def _compare(writer: str, files: List[Dict[str, str]], readers: int) -> Finding:
    ranks: Set[int] = {int(item["rank"]) for item in files}
    parallel = 1 + max(int(item.get("parallel") or 0) for item in files)
    saved = max([parallel * (1 + max(ranks)), *(int(item["world"]) for item in files if item.get("world"))])
    message = ["%s, one file per rank: written by %d processes" % (writer, saved)]
    missing = sorted(set(range(saved // parallel)) - ranks)
    if missing:
        message.append("no file here of ranks %s: did each node write to a disk of its own?" % str(missing[:16])[1:-1])
    if not readers:
        return unknown(*message, advice="--set gpus=N, all processes of the job that shall read it")
    if readers != saved:
        advice = "convert it first (DeepSpeed: ds_to_universal.py and load_universal), or start %d processes" % saved
        return exposed(*message, "%d processes want to read it" % readers, advice=advice)
    if parallel > 1:
        message.append("whether the new job cuts the model into the same %d parts cannot be seen" % parallel)
    return clear(*message) if not missing and parallel == 1 else unknown(*message)


OWN = "each rank saves its own shards, and one rank reads the file of rank 0"
MESHES = (  # torch 2.7 and 2.8 only notice that the shards have other sizes
    r"different mesh(es)?:\s+(got|Found) DeviceMesh\(+\d|does not support cross-mesh operation"
    r"|Sharding propagation failed for (Op\(op=)?aten\.copy_"
    r"|The size of tensor a \(6\) must match the size of tensor b \(3\)"
)
# dcp.save takes a checkpoint_id from 2.3 on, and copies through numpy
DTENSORS = Needs(packages={"torch": ">=2.3", "numpy": ""})
gloo = Experiment(
    name="gloo",
    control=Arm(partial(resume, resharding_format=False), expect=raised(MESHES), because=OWN, fidelity="cpu"),
    treatment=Arm(
        partial(resume, resharding_format=True),
        expect=completed(),
        because="torch.distributed.checkpoint cuts the saved tensors anew for one rank",
        fidelity="cpu",
    ),
    needs=DTENSORS,
    expected_s=(0.4, 0.4),
)
converted = Experiment(
    name="same-number",
    control=Arm(
        partial(resume, resharding_format=False, files_first=True),
        expect=raised(MESHES),
        because="two ranks read their files again and train on; one rank still reads the file of rank 0",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(resume, resharding_format=True, files_first=True),
        expect=completed(),
        because="two ranks read their files and save with torch.distributed.checkpoint, which one rank loads",
        fidelity="cpu",
    ),
    needs=DTENSORS,
    expected_s=(0.4, 0.4),
)

zero3 = Experiment(
    name="deepspeed",
    control=Arm(
        partial(resume_deepspeed, universal=False),
        expect=raised(r"used a DP world size of 2 but the current world size is 1"),
        because="one rank loads the ZeRO-3 checkpoint of two",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(resume_deepspeed, universal=True),
        expect=completed(),
        because="the checkpoint is converted by ds_to_universal and loaded with load_universal",
        fidelity="cpu",
    ),
    world_size=1,
    needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.16"}, memory_mib=2048),
    deadline_s=90,
    expected_s=(10, 10),
)

probe = Probe(
    check=check,
    params={
        "checkpoint": Param("path", "folder of the checkpoint; names in it are read, and the file .metadata"),
        "gpus": Param("int", "processes of the job that shall read it; WORLD_SIZE where that is set"),
    },
    experiments=(gloo.on_gpus(), gloo),
    variants=(converted, zero3),
)
