"""Two ranks save a sharded model and its optimizer, one rank resumes, from its own file or a format that reshards."""

from __future__ import annotations

import importlib
import os
import re
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Set, Tuple

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
    """The old job has two ranks with FSDP2 and Adam. The new job is rank 0 alone, with the same code.

    With `files_first`, the old job writes a file per rank, and two ranks read these files before they may save again.
    """
    import torch

    dist = ctx.init_process_group(timeout_s=10)
    model, optimizer = build(ctx, ranks=2)
    step(ctx, model, optimizer)
    trained = weight_and_average(model, optimizer)
    path = ctx.path("checkpoint")
    if files_first or not resharding_format:
        save_file_of_rank(ctx, model, optimizer)
    if files_first:
        model, optimizer = build(ctx, ranks=2)
        step(ctx, model, optimizer)  # creates the state of the optimizer
        load_file_of_rank(ctx, model, optimizer)
    if resharding_format:
        save_for_any_ranks(model, optimizer, path)
    dist.barrier()
    dist.destroy_process_group()
    ctx.reached()
    if ctx.rank:
        return
    store = dist.FileStore(ctx.path("store of the new job"), 1)
    dist.init_process_group(ctx.backend, store=store, rank=0, world_size=1)
    model, optimizer = build(ctx, ranks=1)
    if resharding_format:
        load_on_any_ranks(model, optimizer, path)
    else:
        load_file_of_rank(ctx, model, optimizer)
    assert torch.equal(weight_and_average(model, optimizer), trained)
    step(ctx, model, optimizer)


def build(ctx: Context, *, ranks: int) -> Tuple[Any, Any]:
    """A sharded model and its optimizer; each number of ranks starts from other weights, so equal ones were loaded."""
    import torch

    torch.manual_seed(ranks)
    model = torch.nn.Linear(6, 6, device=ctx.device)
    shard(model, ctx.device.type, ranks)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(ctx: Context, model: Any, optimizer: Any) -> None:
    import torch

    if old_fsdp2():  # torch 2.5 cannot multiply DTensors on one rank
        for weight in model.parameters():
            weight.square().sum().backward()
    else:
        model(torch.ones(2, 6, device=ctx.device)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def weight_and_average(model: Any, optimizer: Any) -> Any:
    """The full weight and the full average of its gradients."""
    import torch

    average = optimizer.state[model.weight]["exp_avg"]
    return torch.stack([model.weight.full_tensor(), average.full_tensor()])


def save_file_of_rank(ctx: Context, model: Any, optimizer: Any) -> None:
    import torch

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, ctx.path("world_size_2_rank_%d.pt" % ctx.rank))


def load_file_of_rank(ctx: Context, model: Any, optimizer: Any) -> None:
    import torch

    state = torch.load(ctx.path("world_size_2_rank_%d.pt" % ctx.rank), weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def save_for_any_ranks(model: Any, optimizer: Any, path: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    dcp.save(state, checkpoint_id=path)


def load_on_any_ranks(model: Any, optimizer: Any, path: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def old_fsdp2() -> bool:
    """Whether FSDP2 needs CUDA, as before torch 2.7; its tensors, DTensors, do not."""
    import torch

    return tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7)


def shard(model: Any, device: str, ranks: int) -> None:
    """Shards the parameters by rows, as FSDP2 does."""
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
    """ZeRO-3 on the CPU. The old job is two children of this process, so that each job starts DeepSpeed anew."""
    import torch

    import_deepspeed()
    to_universal: Any = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    children = [fork(partial(train_and_save, ctx, rank)) for rank in range(2)]
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise Unavailable("DeepSpeed cannot train and save on the CPU here; the log shows its error")
    tag = "step1"
    if universal:
        folders = {"input_folder": ctx.path("checkpoint/step1"), "output_folder": ctx.path("checkpoint/universal")}
        workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
        to_universal.main(Namespace(**folders, **workers, strict=True, inject_missing_state=True))
        tag = "universal"
    trained = torch.load(ctx.path("weight-0.pt"))
    ctx.reached()
    engine = start_engine(ctx, rank=0, ranks=1, universal=universal)
    if not universal:
        note_partial_loads(ctx, engine, tag, trained)
    engine.load_checkpoint(ctx.path("checkpoint"), tag=tag)
    assert torch.equal(weight_of(engine), trained)
    step_engine(engine)


def start_engine(ctx: Context, *, rank: int, ranks: int, universal: bool = False) -> Any:
    import torch
    import torch.distributed as dist

    deepspeed: Any = importlib.import_module("deepspeed")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    store = dist.FileStore(ctx.path("store-%d" % ranks), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(ranks)
    model = torch.nn.Linear(8, 8)
    named = dict(model.named_parameters(remove_duplicate=False))
    assert set(named) == set(model.state_dict()) and all(weight.requires_grad for weight in named.values())
    config: Dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    if universal:
        config["checkpoint"] = {"load_universal": True}
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=adam, config=config)[0]


def weight_of(engine: Any) -> Any:
    deepspeed: Any = importlib.import_module("deepspeed")
    with deepspeed.zero.GatheredParameters(engine.module.weight):
        return engine.module.weight.detach().clone()


def step_engine(engine: Any) -> None:
    import torch

    engine.backward(engine(torch.ones(1, 8)).square().sum())
    engine.step()


def train_and_save(ctx: Context, rank: int) -> None:
    import torch

    engine = start_engine(ctx, rank=rank, ranks=2)
    step_engine(engine)
    engine.save_checkpoint(ctx.path("checkpoint"), tag="step1")
    torch.save(weight_of(engine), ctx.path("weight-%d.pt" % rank))


def note_partial_loads(ctx: Context, engine: Any, tag: str, trained: Any) -> None:
    """Loads with the two options that people try first, and notes whether the weights arrive; neither raises."""
    import torch

    for option in ({"load_module_only": True}, {"load_optimizer_states": False}):
        engine.load_checkpoint(ctx.path("checkpoint"), tag=tag, **option)
        loaded = "weights loaded" if torch.equal(weight_of(engine), trained) else "weights NOT loaded, no error"
        ctx.note(**{"%s_%s" % item: loaded for item in option.items()})


def fork(job: Callable[[], None]) -> int:
    """Runs `job` in a child process; the id of the child."""
    child = os.fork()
    if child:
        return child
    try:
        job()
    except BaseException as error:
        sys.stderr.write("%s: %s\n" % (type(error).__name__, error))
        os._exit(1)
    os._exit(0)


PER_RANK = (  # who writes the files, and a pattern for their names: rank, model-parallel rank, world size
    ("DeepSpeed ZeRO", re.compile(r"(?:\w+_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<parallel>\d+)_?optim_states\.pt")),
    ("verl", re.compile(r"(?:model|optim)_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt")),
    ("accelerate", re.compile(r"(?:pytorch_model_fsdp|optimizer)(?:_\d+)?_rank(?P<rank>\d+)\.bin")),
)
LOADERS = re.compile(rb"dataloader\.dp_rank_(\d{1,6})")
MOST = 20_000  # file names that the check reads
MOST_METADATA = 32 << 20  # bytes of .metadata that the check reads


def check(params: Mapping[str, Any]) -> Finding:
    """Do as many processes read this checkpoint as wrote it? The file names in its folder show how many wrote it."""
    folder: Optional[Path] = params["checkpoint"]
    if folder is None:
        return unknown("no checkpoint folder was named", advice="--set checkpoint=checkpoint-500 --set gpus=16")
    try:
        folder = folder if folder.is_dir() else folder.parent
        latest = folder / "latest"
        tag = latest.read_text(errors="replace")[:200].strip() if latest.is_file() else ""
        folders = [folder / tag] if tag and (folder / tag).is_dir() else [folder, *sorted(subfolders(folder))[:200]]
        inside = [sorted(os.listdir(folder))[:MOST] for folder in folders]
    except (OSError, ValueError) as error:
        return unknown("%s cannot be read: %s" % (folder, error))
    names = [name for names in inside for name in names][:MOST]
    converted = (folder / "latest_universal").is_file()
    world = os.environ.get("WORLD_SIZE", "")
    ranks = params["gpus"] or (int(world) if world.isdigit() else 0)
    for writer, pattern in PER_RANK:
        each = [[match.groupdict() for match in map(pattern.fullmatch, names) if match] for names in inside]
        results = [compare(writer, files, ranks) for files in each if files]
        if results and converted:
            return unknown(
                "there is also a universal checkpoint, which DeepSpeed reads if the configuration sets load_universal"
            )
        if len({result.evidence[0] for result in results}) > 1:
            message = "different numbers of processes wrote the folders in it"
            return unknown(message, advice="name the folder that the job will read: --set checkpoint=FOLDER")
        if results:
            return max(results, key=lambda result: ("clear", "unknown", "exposed").index(result.state))
    if any((folder / "zero" / "optimizer_state.pt").exists() for folder in folders):
        return clear(
            "this is a universal checkpoint of DeepSpeed, which any number of processes can load with load_universal"
        )
    if any(name.endswith(".distcp") for name in names):
        if ".metadata" not in names:
            return unknown(
                "there are .distcp files, but no .metadata: the save is unfinished, or .metadata is on another node"
            )
        return judge_dcp(next(folder for folder in folders if (folder / ".metadata").is_file()))
    return unknown("no file name in %s contains a rank" % ", ".join(folder.name for folder in folders[:5]))


def judge_dcp(folder: Path) -> Finding:
    """Weights and optimizer reshard, but torchtitan also saves one data loader per data-parallel rank."""
    message = "torch.distributed.checkpoint wrote this checkpoint; it reshards weights and optimizer"
    if (folder / "common.pt").exists() or (folder / "metadata.json").exists():
        text = (
            "this is Megatron's torch_dist format: its weights reshard, but its optimizer may not if TP or PP changes"
        )
        return unknown(text, advice="kb verify model-parallel-checkpoint-mismatch --set checkpoint=%s" % folder)
    try:
        with (folder / ".metadata").open("rb") as file:
            loaders = {int(rank) for rank in LOADERS.findall(file.read(MOST_METADATA))}
    except OSError as error:
        return unknown(message, "kb cannot read .metadata: %s" % error)
    if loaders:
        message = "%s, but not the data loaders of the %d data-parallel ranks" % (message, 1 + max(loaders))
        advice = "if the data-parallel size changes, pass torchtitan --checkpoint.exclude_from_loading dataloader"
        return unknown(message, advice=advice)
    return clear("%s; files of data loaders next to it may not reshard" % message)


def subfolders(folder: Path) -> List[Path]:
    with os.scandir(folder) as inside:
        return [Path(item.path) for item in inside if item.is_dir()]


def compare(writer: str, files: List[Dict[str, str]], readers: int) -> Finding:
    ranks: Set[int] = {int(item["rank"]) for item in files}
    parallel = 1 + max(int(item.get("parallel") or 0) for item in files)
    saved = max([parallel * (1 + max(ranks)), *(int(item["world"]) for item in files if item.get("world"))])
    message = ["%d processes wrote one file per rank (%s)" % (saved, writer)]
    missing = sorted(set(range(saved // parallel)) - ranks)
    if missing:
        message.append(
            "the files of ranks %s are not here: did each node write to its own disk?" % str(missing[:16])[1:-1]
        )
    if not readers:
        return unknown(*message, advice="--set gpus=N, the number of processes of the job that will read it")
    if readers != saved:
        advice = "convert it first (DeepSpeed: ds_to_universal.py and load_universal), or start %d processes" % saved
        return exposed(*message, "%d processes will read it" % readers, advice=advice)
    if parallel > 1:
        message.append("kb cannot tell whether the new job splits the model into the same %d parts" % parallel)
    return clear(*message) if not missing and parallel == 1 else unknown(*message)


FILE_PER_RANK = "each of two ranks saves its own shards, and the single rank of the new job reads the file of rank 0"
MESHES = (  # torch 2.7 and 2.8 only report that the sizes of the shards differ
    r"different mesh(es)?:\s+(got|Found) DeviceMesh\(+\d|does not support cross-mesh operation"
    r"|Sharding propagation failed for (Op\(op=)?aten\.copy_"
    r"|The size of tensor a \(6\) must match the size of tensor b \(3\)"
)
# dcp.save accepts checkpoint_id since 2.3, and copies through numpy
DTENSORS = Needs(packages={"torch": ">=2.3", "numpy": ""})
gloo = Experiment(
    name="gloo",
    control=Arm(partial(resume, resharding_format=False), expect=raised(MESHES), because=FILE_PER_RANK, fidelity="cpu"),
    treatment=Arm(
        partial(resume, resharding_format=True),
        expect=completed(),
        because="torch.distributed.checkpoint reshards the saved tensors for the single rank",
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
        because="two ranks read their files, but do not save again, so the single rank reads the file of rank 0",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(resume, resharding_format=True, files_first=True),
        expect=completed(),
        because="two ranks read their files and save with torch.distributed.checkpoint; the single rank loads that",
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
        because="one rank loads the ZeRO-3 checkpoint of two ranks",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(resume_deepspeed, universal=True),
        expect=completed(),
        because="ds_to_universal converts the checkpoint, and one rank loads it with load_universal",
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
        "checkpoint": Param("path", "folder of the checkpoint; the check reads its file names and the file .metadata"),
        "gpus": Param("int", "number of processes of the job that will read it (default: WORLD_SIZE)"),
    },
    experiments=(gloo.on_gpus(), gloo),
    variants=(converted, zero3),
)
