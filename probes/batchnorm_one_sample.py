"""In training mode BatchNorm needs two values of each channel; a batch of one sample may have only one."""

from collections.abc import Callable
from functools import partial
from typing import Any

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom


def build(ctx: Context) -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)).to(ctx.device)


def epoch(ctx: Context, *, samples: int, drop_last: bool) -> None:
    """Trains one epoch in batches of 4."""
    import torch
    from torch.utils.data import DataLoader

    dataset = torch.randn(samples, 4)
    model = build(ctx)
    ctx.reached()
    if drop_last:
        loader = DataLoader(dataset, batch_size=4, shuffle=True, drop_last=True)
    else:
        loader = DataLoader(dataset, batch_size=4, shuffle=True)
    steps = 0
    for batch in loader:
        model(batch.to(ctx.device)).sum().backward()
        steps += 1
    if not steps:
        raise Symptom(f"{steps} steps in an epoch of {samples} samples")
    assert steps == -(-samples // 4) - int(drop_last)


def epoch_on_ranks(ctx: Context, *, drop_last: bool) -> None:
    """Divides 10 samples into batches of 4: one process has 4, 4 and 2, each of two ranks has 4 and 1."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    ctx.init_process_group(timeout_s=10)
    dataset = torch.arange(40.0).view(10, 4)
    model = build(ctx)
    for batch in DataLoader(dataset, batch_size=4):
        model(batch.to(ctx.device))
    ddp = DistributedDataParallel(model)
    sampler = DistributedSampler(dataset, drop_last=True)
    ctx.reached()
    sizes = []
    for batch in DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=drop_last):
        ddp(batch.to(ctx.device)).sum().backward()
        sizes.append(len(batch))
    assert sizes == [4]


def epoch_dispatched(ctx: Context, *, drop_last: bool = False) -> None:
    """accelerate reads a stream of 9 samples on rank 0 and dispatches it to both ranks."""
    import os

    rank, size = str(ctx.rank), str(ctx.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    ctx.init_process_group(timeout_s=10)
    from accelerate import Accelerator  # type: ignore[import-not-found]
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            import torch

            return iter(torch.arange(36.0).view(9, 4))

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=4, drop_last=drop_last))
    model = build(ctx)
    ctx.reached()
    sizes = []
    for batch in loader:
        model(batch).sum().backward()
        sizes.append(len(batch))
    assert sizes == [4], sizes


def pool(ctx: Context, *, grouped: bool) -> None:
    """The batch is one image: the first norm layer sees 6 x 6 pixels, the layer after the pooling a single value."""
    import torch

    channels = 8
    if grouped:
        norm = torch.nn.GroupNorm(2, channels)
    else:
        norm = torch.nn.BatchNorm2d(channels)
    features = torch.nn.Sequential(torch.nn.Conv2d(3, channels, 3), torch.nn.BatchNorm2d(channels))
    image = torch.randn(1, 3, 8, 8)
    hidden = features(image)
    ctx.reached()
    output = norm(torch.nn.AdaptiveAvgPool2d(1)(hidden + 0.1 * torch.arange(8).view(1, 8, 1, 1)))
    assert output.shape == (1, channels, 1, 1) and output.abs().max().item() > 0.1


def tune(ctx: Context, *, frozen: bool) -> None:
    """Fine-tunes a trained model with one sample per step."""
    import torch

    model = build(ctx)
    for _ in range(8):
        model(torch.randn(16, 4, device=ctx.device))
    mean = model[1].running_mean.clone()
    sample = torch.randn(1, 4, device=ctx.device)
    ctx.reached()
    model.train()
    if frozen:
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                assert module.track_running_stats and (module.running_var != 1).any(), (
                    "a layer without trained statistics"
                )
                module.eval()
    model(sample).sum().backward()
    assert torch.equal(model[1].running_mean, mean)
    assert model[0].weight.grad.abs().sum().item() > 0


def start(ctx: Context, *, grouped: bool) -> None:
    """A new head is in evaluation mode from its first step: BatchNorm uses mean 0 and variance 1 for any input."""
    import torch

    torch.manual_seed(0)
    norm = torch.nn.GroupNorm(2, 8) if grouped else torch.nn.BatchNorm2d(8).eval()
    untrained = not grouped and not (norm.running_var != 1).any()
    ctx.reached()
    largest = norm(50 * torch.randn(1, 8, 1, 1)).abs().max().item()
    if largest > 10:
        raise Symptom(f"the largest output of the norm layer is {largest:.0f}; untrained statistics: {untrained}")


def infer(ctx: Context, *, evaluating: bool) -> None:
    """Predicts the output for one sample."""
    import torch

    model = build(ctx)
    sample = torch.randn(1, 4, device=ctx.device)
    ctx.reached()
    if evaluating:
        model.eval()
    with torch.no_grad():
        output = model(sample)
    assert output.shape == (1, 1)


def repeat(ctx: Context, *, copies: bool) -> None:
    """The batch of two is one sample repeated, or two samples."""
    import torch

    layer = build(ctx)[1]
    ctx.reached()
    batch = torch.randn(1, 8).repeat(2, 1) if copies else torch.randn(2, 8)
    largest = layer(batch.to(ctx.device)).abs().max().item()
    variance = layer.running_var.max().item()
    if largest < 0.001:
        raise Symptom(f"the largest output is {largest:.3f}, the running variance {variance:.2f}")


def group(ctx: Context, *, four_channels: bool) -> None:
    """GroupNorm gets two samples with a single position; each group has one channel or four."""
    import torch

    norm = torch.nn.GroupNorm(2 if four_channels else 8, 8)
    ctx.reached()
    largest = norm(torch.randn(2, 8, 1, 1)).abs().max().item()
    if largest < 0.001:
        raise Symptom(f"the largest output is {largest:.3f}")


def pair(
    name: str,
    job: Callable[..., None],
    expect: Expect,
    because: str,
    fix: str,
    control: dict[str, Any],
    treatment: dict[str, Any],
    ranks: int = 1,
    **packages: str,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(partial(job, **control), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **treatment), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.1", **packages}),
        world_size=ranks,
        expected_s=(0.4, 0.4),
    )


ONE = raised(r"Expected more than 1 value per channel when training, got input size torch\.Size\(\[1, 8(, 1, 1)?\]\)")
probe = Probe(
    experiments=(
        pair(
            "last-batch",
            epoch,
            ONE,
            "9 samples make batches of 4, 4 and 1, so BatchNorm sees one value per channel in the last batch",
            "drop_last=True drops the last batch",
            {"samples": 9, "drop_last": False},
            {"samples": 9, "drop_last": True},
        ),
    ),
    variants=(
        pair(
            "ranks",
            epoch_on_ranks,
            ONE,
            "each of two ranks has 5 samples, in batches of 4 and 1; drop_last=True is set only on the sampler",
            "drop_last=True is set on the DataLoader",
            {"drop_last": False},
            {"drop_last": True},
            ranks=2,
        ),
        pair(
            "dispatched",
            epoch_dispatched,
            ONE,
            "accelerate splits a stream of 9 samples, so each of two ranks has batches of 4 and 1",
            "drop_last=True is set on the DataLoader",
            {"drop_last": False},
            {"drop_last": True},
            ranks=2,
            accelerate=">=0.28",
        ),
        pair(
            "no-steps",
            epoch,
            symptom(r"0 steps in an epoch of 3 samples"),
            "drop_last=True with 3 samples and batches of 4 leaves no batch",
            "without drop_last there is one batch of 3 samples",
            {"samples": 3, "drop_last": True},
            {"samples": 3, "drop_last": False},
        ),
        pair(
            "pooled",
            pool,
            ONE,
            "BatchNorm2d after a global pooling sees one value per channel if the batch is one image",
            "GroupNorm with 4 channels per group normalises each image by itself",
            {"grouped": False},
            {"grouped": True},
        ),
        pair(
            "frozen",
            tune,
            ONE,
            "the BatchNorm layers of a trained model are in training mode and get one sample",
            "the BatchNorm layers are in evaluation mode and use their running statistics",
            {"frozen": False},
            {"frozen": True},
        ),
        pair(
            "new-layer",
            start,
            symptom(r"the largest output of the norm layer is \d\d+; untrained statistics: True"),
            "the BatchNorm of a new head is in evaluation mode, so it never normalises",
            "GroupNorm needs no running statistics, so it normalises from the first step",
            {"grouped": False},
            {"grouped": True},
        ),
        pair(
            "inference",
            infer,
            ONE,
            "the code predicts one sample under no_grad, but the model is still in training mode",
            "the code calls model.eval() before it predicts",
            {"evaluating": False},
            {"evaluating": True},
        ),
        pair(
            "repeated",
            repeat,
            symptom(r"the largest output is 0\.000, the running variance 0\.90"),
            "the batch is one sample twice, so BatchNorm subtracts the sample from itself",
            "the batch has two different samples",
            {"copies": True},
            {"copies": False},
        ),
        pair(
            "one-channel-groups",
            group,
            symptom(r"the largest output is 0\.000"),
            "GroupNorm with one channel per group and one position outputs 0 and raises no error",
            "GroupNorm has four channels per group",
            {"four_channels": False},
            {"four_channels": True},
        ),
    ),
)
