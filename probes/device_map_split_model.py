"""The loader spreads one copy of a model over all visible devices, but data parallelism needs a whole copy per rank."""

import os
from functools import partial
from typing import Any, Callable

from kb.cpu_arms import without_launcher
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

REFUSED = r"You can't train a model that has been loaded with `device_map='auto'` in any distributed mode"
TWO_TYPES = r"input module must be on the same type of devices, but input module parameters locate in \{'\w+', '\w+'\}"
ONE_DEVICE = r"device_ids and output_device arguments only work with single-device/multiple-device GPU modules"


def wrap(ctx: Context, *, split: bool) -> None:
    """Two layers in DDP, on one or two devices; the other device is the second GPU, or meta without GPUs."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=20)
    here = ctx.device
    on_gpus = here.type == "cuda"
    other = torch.device("cuda", 1 - ctx.rank) if on_gpus else torch.device("meta")
    model = nn.Sequential(nn.Linear(4, 4, device=here), nn.Linear(4, 4, device=other if split else here))
    ctx.reached()
    ddp = DistributedDataParallel(model, device_ids=[here.index] if on_gpus else None)
    ddp(torch.ones(2, 4, device=here)).sum().backward()
    assert all(weight.grad is not None and weight.device == here for weight in model.parameters())


def set_launcher_variables(ctx: Context, processes: int) -> None:
    """Sets the variables of torchrun by which accelerate recognises a distributed job."""
    rank, size = str(ctx.rank), str(processes)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)


def load(ctx: Context, device_map: Any) -> Any:
    """Places the weights and attaches hooks, as from_pretrained does with a device map."""
    import torch
    from accelerate import dispatch_model  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    return dispatch_model(model, device_map=device_map, offload_dir=ctx.path("offload"))


def train(model: Any) -> None:
    """Calls Accelerator.prepare, as the Trainer does, and runs a step. Every weight must get a gradient."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    loss = model(torch.ones(2, 4, device=accelerator.device)).sum()
    accelerator.backward(loss)
    without_gradient = sum(weight.grad is None for weight in model.parameters())
    if without_gradient:
        raise Symptom(
            "%d of %d weights got no gradient, without an error" % (without_gradient, len(list(model.parameters())))
        )


def prepare(ctx: Context, *, device_map: Any) -> None:
    """Two ranks, each of which loads a model with this map."""
    ctx.init_process_group(timeout_s=20)
    set_launcher_variables(ctx, ctx.world_size)
    model = load(ctx, device_map)
    ctx.reached()
    train(model)


def prepare_alone(ctx: Context, *, under_torchrun: bool = False, last: str = "cpu") -> None:
    """One process and a map of two entries, with or without the variables of torchrun."""
    if under_torchrun:
        ctx.init_process_group(timeout_s=20)
        set_launcher_variables(ctx, 1)
    else:
        without_launcher()
    model = load(ctx, {"0": "cpu", "1": last})
    ctx.reached()
    train(model)


def prepare_part(ctx: Context, *, part_map: Any) -> None:
    """The job loads only the tower inside the model with a map."""
    import torch

    class Captioner(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tower = load(ctx, part_map)
            self.head = torch.nn.Linear(1, 1)

        def forward(self, pixels: Any) -> Any:
            return self.head(self.tower(pixels))

    ctx.init_process_group(timeout_s=20)
    set_launcher_variables(ctx, ctx.world_size)
    model = Captioner()
    ctx.reached()
    train(model)


def step(ctx: Context, *, moves_labels: bool) -> None:
    """One process with layers on two devices; the labels stay with the batch or move to the logits."""
    import torch
    from torch import nn

    here = ctx.device
    other = torch.device("cuda", 1) if here.type == "cuda" else torch.device("meta")
    body, head = nn.Linear(4, 4, device=here), nn.Linear(4, 3, device=other)
    inputs, labels = torch.ones(2, 4, device=here), torch.tensor([0, 2], device=here)
    ctx.reached()
    logits = head(body(inputs).to(other))  # a hook moves the input of a layer in the same way
    if moves_labels:
        labels = labels.to(logits.device)
    loss = nn.functional.cross_entropy(logits, labels)
    assert loss.device == other and loss.requires_grad


SPLIT = "the layers of one model copy are on two devices, which DDP rejects"
WHOLE = "each rank has its whole copy on one device"
SECOND_DEVICE = "two GPUs; the second device is meta, which stores no values and prints different messages"


def pair(
    name: str,
    job: Callable[..., None],
    keyword: str,
    values: Any,
    expect: Expect,
    because: Any,
    ranks: int = 2,
    stands_for: str = "",
) -> Experiment:
    """`keyword` has the first of `values` in the control arm and the second in the treatment arm."""
    fidelity = "stand-in" if stands_for else "cpu"
    control, treatment = (partial(job, **{keyword: value}) for value in values)
    accelerate = {} if stands_for else {"accelerate": ">=1.0"}
    return Experiment(
        name=name,
        control=Arm(control, expect, because[0], fidelity, stands_for),
        treatment=Arm(treatment, completed(), because[1], fidelity, stands_for),
        world_size=ranks,
        needs=Needs(packages={"torch": ">=2.2", **accelerate}),
        deadline_s=60,
        expected_s=(4.0, 4.0) if accelerate else (0.5, 0.5),
    )


gloo = pair("gloo", wrap, "split", (True, False), raised(TWO_TYPES), (SPLIT, WHOLE), stands_for=SECOND_DEVICE)
labels = pair(
    "labels",
    step,
    "moves_labels",
    (False, True),
    raised(r"is not on the expected device|Expected all tensors to be on the same device"),
    (
        "the labels are on the first device, but the logits are on the last",
        "the job moves the labels to the device of the logits",
    ),
    ranks=1,
    stands_for=SECOND_DEVICE,
)

probe = Probe(
    experiments=(gloo.on_gpus(expect=raised(ONE_DEVICE)), gloo),
    variants=(
        pair(
            "accelerate",
            prepare,
            "device_map",
            ({"0": "cpu", "1": "disk"}, {"": "cpu"}),
            raised(REFUSED),
            ("the map puts the layers on two devices", "the map has one entry, the device of the rank"),
        ),
        pair(
            "entries",
            prepare,
            "device_map",
            ({"0": "cpu", "1": "cpu"}, {"": "cpu"}),
            raised(REFUSED),
            (
                "the map has two entries, although both name the same device",
                "the map has one entry for the same placement",
            ),
        ),
        pair(
            "part",
            prepare_part,
            "part_map",
            ({"0": "cpu", "1": "disk"}, {"": "cpu"}),
            raised(REFUSED),
            ("the map puts a part of the model on two devices", "the map puts the whole part on one device"),
        ),
        pair(
            "one-process",
            prepare_alone,
            "under_torchrun",
            (True, False),
            raised(REFUSED),
            (
                "a single process has the variables of torchrun, so accelerate takes it for a distributed job",
                "the process does not have the variables of torchrun",
            ),
            ranks=1,
        ),
        pair(
            "offloaded",
            prepare_alone,
            "last",
            ("disk", "cpu"),
            symptom(r"2 of 4 weights got no gradient, without an error"),
            ("the map puts the last layer on the disk, whose weights get no gradient", "the map offloads no layer"),
            ranks=1,
        ),
        labels.on_gpus(
            name="labels-on-gpus",
            expect=raised(r"Expected all tensors to be on the same device"),
            world_size=1,
            expected_s=(10.0, 10.0),
        ),
        labels,
    ),
)
