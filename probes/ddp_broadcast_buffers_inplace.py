"""DDP overwrites the buffers before every forward, but an earlier forward has saved them for its backward."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any, Callable, Dict, Sequence, Tuple

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom


def build(kind: str, *, cloned: bool = False) -> Any:
    import torch
    from torch import nn

    class Positions(nn.Module):  # type: ignore[misc]
        """Position ids in a buffer, as in BERT; with `writes`, the forward fills the buffer itself."""

        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.writes = writes
            self.table = nn.Embedding(8, 1)
            self.register_buffer("position_ids", torch.arange(8).unsqueeze(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.writes:
                self.position_ids.copy_(torch.arange(8))
            position_ids = self.position_ids[:, : x.size(1)]
            if cloned:
                position_ids = self.position_ids[:, : x.size(1)].clone()
            return x + self.table(position_ids).squeeze(-1)

    torch.manual_seed(0)
    if kind == "batchnorm":
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    return nn.Sequential(Positions(kind == "writes"), nn.ReLU(), nn.Linear(4, 1))


def disable_version_guard() -> None:
    """Disables in the DDP of torch 2.12 and later the line that preserves buffer versions; older releases lack it."""
    import torch

    if hasattr(torch.autograd, "_unsafe_preserve_version_counter"):
        torch.autograd._unsafe_preserve_version_counter = lambda _: contextlib.nullcontext()


def batches(ctx: Context) -> Any:
    """Fake and real samples, which differ between the ranks."""
    import torch

    generator = torch.Generator().manual_seed(ctx.rank)
    return torch.randn(2, 6, 4, generator=generator).to(ctx.device)


def step(
    ctx: Context,
    *,
    way: str = "twice",
    kind: str = "batchnorm",
    broadcast: bool = True,
    frozen: bool = False,
    cloned: bool = False,
    guarded: bool = False,
) -> None:
    """Runs one step of a discriminator, which scores fake and real samples before the backward."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    dist = ctx.init_process_group(timeout_s=10)
    if not guarded:
        disable_version_guard()
    discriminator = build(kind, cloned=cloned).to(ctx.device)
    reference = copy.deepcopy(discriminator)
    if broadcast:
        model = DistributedDataParallel(discriminator)
    else:
        model = DistributedDataParallel(discriminator, broadcast_buffers=False)
    for copied in (model, reference) if frozen else ():
        copied.eval()
    fake, real = batches(ctx)
    ctx.reached()
    if way == "separate":
        model(fake).mean().backward()
        (-model(real).mean()).backward()
    elif way == "watch":
        fake_score = model(fake)
        with torch.no_grad():
            model(real)
        fake_score.mean().backward()
    elif way == "watch module":
        fake_score = model(fake)
        with torch.no_grad():
            model.module(real)
        fake_score.mean().backward()
    else:
        fake_score = model(fake)
        real_score = model(real)
        (fake_score.mean() - real_score.mean()).backward()
    reference(fake).mean().backward()
    if not way.startswith("watch"):
        (-reference(real).mean()).backward()
    for parameter, expected in zip(model.parameters(), reference.parameters()):
        dist.all_reduce(expected.grad)
        torch.testing.assert_close(parameter.grad, expected.grad / ctx.world_size)


def evaluate(ctx: Context, *, aligned: bool) -> None:
    """Trains one step with broadcast_buffers=False, then both ranks score the same sample."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    dist = ctx.init_process_group(timeout_s=10)
    model = DistributedDataParallel(build("batchnorm"), broadcast_buffers=False)
    model(batches(ctx)[0]).mean().backward()
    ctx.reached()
    if aligned:
        for buffer in model.module.buffers():
            dist.broadcast(buffer, 0)
    model.eval()
    with torch.no_grad():
        score = model(torch.ones(1, 4))
    scores = [torch.zeros_like(score) for _ in range(ctx.world_size)]
    dist.all_gather(scores, score)
    difference = (scores[0] - scores[1]).abs().max().item()
    if difference > 1e-6:
        raise Symptom(f"the scores of the same sample on the two ranks differ by {difference:.4f}")


def rescale(ctx: Context, *, everywhere: bool) -> None:
    """Rank 0 sets a buffer between two forwards, and DDP copies it to the other rank, unless every rank sets it."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    class Scaled(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * self.scale * x

    ctx.init_process_group(timeout_s=10)
    model = DistributedDataParallel(Scaled())
    x = torch.ones(1)
    ctx.reached()
    first = model(x)  # with scale 1
    if everywhere or ctx.rank == 0:
        model.module.scale = torch.full((1,), 3.0)
    (first + model(x)).sum().backward()
    gradient = model.module.weight.grad.item()
    if abs(gradient - 4) > 1e-6:
        raise Symptom(f"the gradient is {gradient:.1f} instead of 4.0, without an error")


MODIFIED = r"has been modified by an inplace operation: \[torch\.(cuda\.)?%s\] is at version \d+; expected version \d+"
NORM = raised(MODIFIED % r"FloatTensor \[8\]")
POSITIONS = raised(MODIFIED % r"LongTensor \[1, 4\]")
OLD, NEW = ">=2.2,<2.12", ">=2.12"
EARLIER = "DDP before torch 2.12, which does not preserve buffer versions; the probe disables this in later releases"
STATISTICS = "DDP overwrites the running statistics before the second forward, but the first forward has saved them"


def pair(
    name: str,
    broken: Callable[..., None],
    fixed: Callable[..., None],
    because: str,
    fix: str,
    expect: Expect = NORM,
    *,
    torch: str = ">=2.2",
    fidelity: str = "stand-in",
    ranks: int = 2,
) -> Experiment:
    stands_for = EARLIER if fidelity == "stand-in" else ""
    return Experiment(
        name=name,
        control=Arm(broken, expect=expect, because=because, fidelity=fidelity, stands_for=stands_for),
        treatment=Arm(fixed, expect=completed(), because=fix, fidelity=fidelity, stands_for=stands_for),
        world_size=ranks,
        needs=Needs(packages={"torch": torch}),
        expected_s=(0.5, 0.5),
    )


POSITION_IDS = "DDP overwrites the position ids before the second forward, but the first forward has saved them"
NO_GRAD = "the second forward runs under no_grad, but DDP still overwrites the statistics"
EVAL = "BatchNorm is in eval mode, but DDP still overwrites its statistics"
LOCAL = "with broadcast_buffers=False, DDP overwrites no buffer, and the gradient is right"
gloo = pair("gloo", step, partial(step, broadcast=False), STATISTICS, LOCAL, torch=OLD, fidelity="cpu")

STEPS: Sequence[Tuple[str, Dict[str, Any], Dict[str, Any], str, str, Expect]] = (
    ("separate", {}, {"way": "separate"}, STATISTICS, "each backward runs before the next forward", NORM),
    (
        "clone",
        {"kind": "positions"},
        {"cloned": True},
        POSITION_IDS,
        "the embedding saves a clone of the position ids",
        POSITIONS,
    ),
    (
        "no-grad",
        {"way": "watch"},
        {"way": "watch module"},
        NO_GRAD,
        "the second forward calls model.module, so DDP overwrites nothing",
        NORM,
    ),
    ("frozen", {"frozen": True}, {"broadcast": False}, EVAL, LOCAL, NORM),
)

probe = Probe(
    experiments=(
        gloo.on_gpus(),
        gloo,
        pair("unguarded", step, partial(step, broadcast=False), STATISTICS, LOCAL, torch=NEW),
    ),
    variants=(
        pair("one-rank", step, partial(step, broadcast=False), STATISTICS, LOCAL, ranks=1),
        pair(
            "update",
            step,
            partial(step, guarded=True),
            STATISTICS,
            "DDP of torch 2.12 and later preserves the versions of the buffers",
            torch=NEW,
        ),
        *(
            pair(name, partial(step, **broken), partial(step, **{**broken, **fixed}), because, fix, expect)
            for name, broken, fixed, because, fix, expect in STEPS
        ),
        pair(
            "own-write",
            partial(step, kind="writes", broadcast=False),
            partial(step, kind="writes", broadcast=False, cloned=True),
            "the forward itself overwrites the buffer, so broadcast_buffers=False does not help",
            "the embedding saves a clone of the position ids",
            POSITIONS,
            fidelity="cpu",
        ),
        pair(
            "statistics-apart",
            partial(evaluate, aligned=False),
            partial(evaluate, aligned=True),
            "with broadcast_buffers=False, each rank evaluates with its own running statistics",
            "rank 0 broadcasts its buffers before the evaluation",
            symptom(r"the scores of the same sample on the two ranks differ by 0\.\d+"),
            fidelity="cpu",
        ),
        pair(
            "silent",
            partial(rescale, everywhere=False),
            partial(rescale, everywhere=True),
            "DDP silently overwrites the buffer that the first forward of rank 1 has saved",
            "every rank replaces the buffer by a new tensor",
            symptom(r"the gradient is 5\.0 instead of 4\.0, without an error"),
            torch=NEW,
            fidelity="cpu",
        ),
    ),
)
