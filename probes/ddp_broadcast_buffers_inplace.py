"""DDP writes into the buffers before every forward, and an earlier forward had saved them for its backward."""

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
        """Position ids in a buffer, as in BERT; with `writes` the forward fills the buffer itself."""

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


def without_guard() -> None:
    """Takes from the DDP of torch 2.12 and later the one line that its forerunners lack; nothing to do before."""
    import torch

    if hasattr(torch.autograd, "_unsafe_preserve_version_counter"):
        torch.autograd._unsafe_preserve_version_counter = lambda _: contextlib.nullcontext()


def batches(ctx: Context) -> Any:
    """Fake and real samples; every rank has its own."""
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
    """One step of a discriminator, which scores fake and real samples before the backward."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    dist = ctx.init_process_group(timeout_s=10)
    if not guarded:
        without_guard()
    discriminator = build(kind, cloned=cloned).to(ctx.device)
    alone = copy.deepcopy(discriminator)
    if broadcast:
        model = DistributedDataParallel(discriminator)
    else:
        model = DistributedDataParallel(discriminator, broadcast_buffers=False)
    for copied in (model, alone) if frozen else ():
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
    alone(fake).mean().backward()
    if not way.startswith("watch"):
        (-alone(real).mean()).backward()
    for parameter, expected in zip(model.parameters(), alone.parameters()):
        dist.all_reduce(expected.grad)
        torch.testing.assert_close(parameter.grad, expected.grad / ctx.world_size)


def evaluate(ctx: Context, *, aligned: bool) -> None:
    """Trains a step with broadcast_buffers=False, and lets both ranks score the same sample."""
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
    apart = (scores[0] - scores[1]).abs().max().item()
    if apart > 1e-6:
        raise Symptom(f"the same sample scores {apart:.4f} apart on the two ranks")


def rescale(ctx: Context, *, everywhere: bool) -> None:
    """Rank 0 sets a buffer between two forwards and leaves it to DDP to tell the others."""
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
        raise Symptom(f"gradient {gradient:.1f} instead of 4.0, and no error")


MODIFIED = r"has been modified by an inplace operation: \[torch\.(cuda\.)?%s\] is at version \d+; expected version \d+"
NORM = raised(MODIFIED % r"FloatTensor \[8\]")
POSITIONS = raised(MODIFIED % r"LongTensor \[1, 4\]")
OLD, NEW = ">=2.2,<2.12", ">=2.12"
EARLIER = "DDP before torch 2.12, which does not preserve the versions of the buffers; from 2.12 on it is made so again"
AGAIN = "the second forward through DDP copies the running statistics that the first one saved"


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


IDS = "the second forward through DDP copies the position ids that the first one saved"
UNDER = "the second forward is under no_grad, and copies the statistics all the same"
EVAL = "BatchNorm is in eval mode, and its statistics are copied all the same"
LOCAL = "broadcast_buffers=False: nothing is copied, and the gradient is right"
gloo = pair("gloo", step, partial(step, broadcast=False), AGAIN, LOCAL, torch=OLD, fidelity="cpu")

STEPS: Sequence[Tuple[str, Dict[str, Any], Dict[str, Any], str, str, Expect]] = (
    ("separate", {}, {"way": "separate"}, AGAIN, "each forward has its backward before the next", NORM),
    ("clone", {"kind": "positions"}, {"cloned": True}, IDS, "the embedding saves a copy of the ids", POSITIONS),
    ("no-grad", {"way": "watch"}, {"way": "watch module"}, UNDER, "that forward goes through model.module", NORM),
    ("frozen", {"frozen": True}, {"broadcast": False}, EVAL, LOCAL, NORM),
)

probe = Probe(
    experiments=(
        gloo.on_gpus(),
        gloo,
        pair("unguarded", step, partial(step, broadcast=False), AGAIN, LOCAL, torch=NEW),
    ),
    variants=(
        pair("one-rank", step, partial(step, broadcast=False), AGAIN, LOCAL, ranks=1),
        pair("update", step, partial(step, guarded=True), AGAIN, "DDP as released since 2.12", torch=NEW),
        *(
            pair(name, partial(step, **broken), partial(step, **{**broken, **fixed}), because, fix, expect)
            for name, broken, fixed, because, fix, expect in STEPS
        ),
        pair(
            "own-write",
            partial(step, kind="writes", broadcast=False),
            partial(step, kind="writes", broadcast=False, cloned=True),
            "the forward itself writes into the buffer, so that broadcast_buffers=False does not help",
            "the embedding saves a copy of the ids",
            POSITIONS,
            fidelity="cpu",
        ),
        pair(
            "statistics-apart",
            partial(evaluate, aligned=False),
            partial(evaluate, aligned=True),
            "with broadcast_buffers=False every rank evaluates with running statistics of its own",
            "the buffers of rank 0 are sent to all before the evaluation",
            symptom(r"the same sample scores 0\.\d+ apart"),
            fidelity="cpu",
        ),
        pair(
            "silent",
            partial(rescale, everywhere=False),
            partial(rescale, everywhere=True),
            "DDP overwrites what the first forward of rank 1 saved, and reports nothing",
            "every rank sets a new tensor",
            symptom(r"gradient 5\.0 instead of 4\.0, and no error"),
            torch=NEW,
            fidelity="cpu",
        ),
    ),
)
