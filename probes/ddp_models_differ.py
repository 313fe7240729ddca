"""DDP compares the models of the ranks when it is made, and finds another count or size; some it cannot see."""

from functools import partial
from typing import Any, Callable, List, Tuple

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

DATA = (["cat", "dog", "fox"], ["dog", "cat"])  # the labels that a rank has seen in its part of the data


def wrap(ctx: Context, model: Any) -> Any:
    """DDP with an option that people try first: it changes nothing here. The parameters are those of rank 0 then."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(model.to(ctx.device), find_unused_parameters=True)
    mine = torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])
    theirs = mine.clone()
    torch.distributed.broadcast(theirs, src=0)
    assert torch.equal(mine, theirs)
    return ddp


def build(ctx: Context, *, same: bool) -> None:
    """A layer has a bias on one rank only, as where a setting is read on each rank for itself."""
    import torch

    ctx.init_process_group(timeout_s=10)
    ctx.reached()
    wrap(ctx, torch.nn.Linear(5, 4, bias=same or ctx.rank == 0))


def agree(ctx: Context, *, from_rank_0: bool) -> None:
    """The same, and the setting is taken from rank 0."""
    import torch

    dist = ctx.init_process_group(timeout_s=10)
    config = {"bias": ctx.rank == 0}
    ctx.reached()
    if from_rank_0:
        holder = [config]
        dist.broadcast_object_list(holder, src=0)
        config = holder[0]
    wrap(ctx, torch.nn.Linear(5, 4, bias=config["bias"]))


def freeze(ctx: Context, *, same: bool) -> None:
    """DDP counts the parameters that are trained."""
    import torch

    ctx.init_process_group(timeout_s=10)
    model = torch.nn.Linear(5, 4)
    model.bias.requires_grad_(same or ctx.rank == 0)
    ctx.reached()
    wrap(ctx, model)


def lay_out(ctx: Context, *, rewritten: bool) -> None:
    """channels_last on one rank: other strides, although a 1x1 kernel counts as contiguous in both layouts."""
    import torch

    ctx.init_process_group(timeout_s=10)
    model = torch.nn.Conv2d(3, 4, 1, bias=False)
    if ctx.rank == 1:
        model = model.to(memory_format=torch.channels_last)
    ctx.reached()
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    if rewritten:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    wrap(ctx, model)


def name_labels(ctx: Context, *, gathered: bool) -> List[str]:
    """The labels of this rank's data, or those of all ranks."""
    dist = ctx.init_process_group(timeout_s=10)
    names = labels = DATA[ctx.rank]
    found: Any
    ctx.reached()
    if gathered:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, sorted(set(labels)))
        names = sorted(set().union(*found))
    return names


def classify(ctx: Context, *, gathered: bool) -> None:
    """One output for each label."""
    import torch

    names = name_labels(ctx, gathered=gathered)
    wrap(ctx, torch.nn.Linear(5, len(names)))
    assert names == ["cat", "dog", "fox"]


def number(ctx: Context, *, in_order: bool) -> None:
    """As many labels on each rank, in another order: DDP cannot see it. `set` has another order in each process."""
    import torch

    ctx.init_process_group(timeout_s=10)
    labels = ["cat", "dog", "fox"] if ctx.rank == 0 else ["fox", "cat", "dog"]  # list(set(...)) of two processes
    ctx.reached()
    names = sorted(labels) if in_order else labels
    wrap(ctx, torch.nn.Linear(5, len(names)))
    if names.index("cat") != 0:
        raise Symptom("DDP accepted it, and cat is label %d on rank %d" % (names.index("cat"), ctx.rank))


def report(ctx: Context, *, in_step: bool) -> None:
    """Rank 1 gathers a number of its own in front of DDP, rank 0 does not: what DDP reads there is that number."""
    import torch

    dist = ctx.init_process_group(timeout_s=10)
    seconds = torch.tensor([1506656875])
    ctx.reached()
    if in_step or ctx.rank == 1:
        dist.all_gather([torch.zeros_like(seconds) for _ in range(2)], seconds)
    wrap(ctx, torch.nn.Linear(5, 4))


COUNT = raised(
    r"DDP expects same model across all ranks, but Rank \d has \d params, while rank \d has inconsistent [12] "
)
SIZES = raised(
    r"params\[0\] in this process with sizes \[2, 5\] appears not to match sizes of the same param in process 0"
)
STRIDES = raised(r"params\[0\] in this process with sizes .{1,20} appears not to match strides of the same param")
GARBAGE = raised(r"but Rank 0 has 2 params, while rank 1 has inconsistent 1506656875 params")
SILENT = symptom(r"DDP accepted it, and cat is label 1 on rank 1")


def pair(name: str, job: Callable[..., Any], keyword: str, expect: Expect, because: Tuple[str, str]) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: False}), expect, because=because[0], fidelity="cpu"),
        treatment=Arm(partial(job, **{keyword: True}), completed(), because=because[1], fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.1"}),
        expected_s=(0.5, 0.5),
    )


structure = pair("structure", build, "same", COUNT, ("a bias on rank 0 only", "a bias on both"))
probe = Probe(
    experiments=(structure,),
    variants=(
        pair("config", agree, "from_rank_0", COUNT, ("each rank reads its own setting", "all have that of rank 0")),
        pair("frozen", freeze, "same", COUNT, ("a parameter is frozen on rank 1 only", "it is trained on both")),
        pair("labels", classify, "gathered", SIZES, ("each rank counts the labels of its data", "of all data")),
        pair("order", number, "in_order", SILENT, ("labels in the order of a set", "labels in order")),
        pair(
            "strides", lay_out, "rewritten", STRIDES, ("channels_last on rank 1 only", "weights copied in one layout")
        ),
        pair("other-call", report, "in_step", GARBAGE, ("rank 1 makes another call first", "both ranks make it")),
    ),
)
