"""At its creation, DDP compares the count, sizes and strides of the parameters across ranks, but not their meaning."""

from functools import partial
from typing import Any, Callable, List, Tuple

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

DATA = (["cat", "dog", "fox"], ["dog", "cat"])  # the labels in the data of each rank


def wrap(ctx: Context, model: Any) -> Any:
    """Wraps the model in DDP; find_unused_parameters does not help. Checks that all ranks have rank 0's weights."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(model.to(ctx.device), find_unused_parameters=True)
    weights = torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])
    rank_0_weights = weights.clone()
    torch.distributed.broadcast(rank_0_weights, src=0)
    assert torch.equal(weights, rank_0_weights)
    return ddp


def build(ctx: Context, *, same: bool) -> None:
    """Wraps a layer that has a bias on rank 0 only, unless `same`."""
    import torch

    ctx.init_process_group(timeout_s=10)
    ctx.reached()
    wrap(ctx, torch.nn.Linear(5, 4, bias=same or ctx.rank == 0))


def agree(ctx: Context, *, from_rank_0: bool) -> None:
    """Wraps the same layer; each rank uses its own setting, or with `from_rank_0` the setting of rank 0."""
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
    """Wraps a layer whose bias is frozen on rank 1, unless `same`: DDP counts only trained parameters."""
    import torch

    ctx.init_process_group(timeout_s=10)
    model = torch.nn.Linear(5, 4)
    model.bias.requires_grad_(same or ctx.rank == 0)
    ctx.reached()
    wrap(ctx, model)


def lay_out(ctx: Context, *, rewritten: bool) -> None:
    """Wraps a 1x1 convolution that is channels_last on rank 1: its strides differ, although it counts as contiguous."""
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
    """Returns the labels in this rank's data, or with `gathered` those in the data of all ranks, sorted."""
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
    """Wraps a layer with one output for each label."""
    import torch

    names = name_labels(ctx, gathered=gathered)
    wrap(ctx, torch.nn.Linear(5, len(names)))
    assert names == ["cat", "dog", "fox"]


def number(ctx: Context, *, in_order: bool) -> None:
    """Numbers the same labels on each rank, in the order of a set or sorted; DDP does not notice a different order."""
    import torch

    ctx.init_process_group(timeout_s=10)
    labels = ["cat", "dog", "fox"] if ctx.rank == 0 else ["fox", "cat", "dog"]  # as list(set(...)) of two processes
    ctx.reached()
    names = sorted(labels) if in_order else labels
    wrap(ctx, torch.nn.Linear(5, len(names)))
    if names.index("cat") != 0:
        raise Symptom("DDP accepted it, and cat is label %d on rank %d" % (names.index("cat"), ctx.rank))


def report(ctx: Context, *, in_step: bool) -> None:
    """Rank 1 makes one more all-gather than rank 0, unless `in_step`; DDP on rank 0 takes its number for a count."""
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


structure = pair(
    "structure", build, "same", COUNT, ("the layer has a bias on rank 0 only", "the layer has a bias on both ranks")
)
probe = Probe(
    experiments=(structure,),
    variants=(
        pair(
            "config",
            agree,
            "from_rank_0",
            COUNT,
            ("each rank reads its own setting", "all ranks use the setting of rank 0"),
        ),
        pair(
            "frozen", freeze, "same", COUNT, ("a parameter is frozen on rank 1 only", "both ranks train the parameter")
        ),
        pair(
            "labels",
            classify,
            "gathered",
            SIZES,
            ("each rank counts the labels in its own data", "each rank counts the labels in all data"),
        ),
        pair(
            "order",
            number,
            "in_order",
            SILENT,
            ("each rank numbers labels in the order of a set", "each rank sorts the labels"),
        ),
        pair(
            "strides",
            lay_out,
            "rewritten",
            STRIDES,
            ("the model is channels_last on rank 1 only", "all ranks copy the weights to one layout"),
        ),
        pair(
            "other-call",
            report,
            "in_step",
            GARBAGE,
            ("rank 1 makes an extra all-gather before DDP", "both ranks make the extra all-gather"),
        ),
    ),
)
