"""ZeRO-3 gathers weights ahead in the order that it recorded; a forward in another order leaves a gather in flight.

DeepSpeed before 0.15.3 raises at the end of such a step; later releases wait for what is left and free it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

from kb.cpu_arms import import_deepspeed
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

LAYERS, RECORDED, STEPS = 6, 3, 6


class Stop(Exception):
    """Ends a forward early, as code does that only wants the output of a layer in the middle."""


def build(empty: str = "none") -> Any:
    import torch
    from torch import nn

    class Quantized(nn.Module):  # type: ignore[misc]
        """It has a place for a weight that is not used; as a parameter, or as a buffer."""

        def __init__(self) -> None:
            super().__init__()
            if empty == "parameter":
                self.packed = nn.Parameter(torch.zeros(0))
            else:
                self.register_buffer("packed", torch.zeros(0))

        def forward(self, x: Any) -> Any:
            return x + self.packed.sum()

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))
            self.last = nn.Identity() if empty == "none" else Quantized()
            self.stop_at = LAYERS

        def forward(self, x: Any, skip: int = -1, call_it: bool = False) -> Any:
            for number, layer in enumerate(self.layers):
                if number == self.stop_at:
                    raise Stop
                if number != skip:
                    x = torch.relu(layer(x))
                elif call_it:
                    x = x + 0.0 * layer(x).sum()
            return self.last(x)

    return Net()


def engine_of(ctx: Context, model: Any, **zero: Any) -> Any:
    import torch

    deepspeed = import_deepspeed()
    ctx.init_process_group(timeout_s=30)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def batch(ctx: Context, step: int) -> Any:
    import torch

    return torch.randn(2, 16, generator=torch.Generator().manual_seed(step * ctx.world_size + ctx.rank))


def skipped(ctx: Context, *, call_it: bool = False, **zero: Any) -> None:
    """Layer 3 is called in the first steps, and skipped in the later ones, on every rank."""
    engine, plain = engine_of(ctx, build(), **zero), build()
    ctx.reached()
    for step in range(STEPS):
        x, left_out = batch(ctx, step), 3 if step >= RECORDED else -1
        output = engine(x, left_out, call_it)
        if step == 0:
            assert (output - plain(x)).abs().max().item() < 1e-4
        engine.backward(output.sum())
        engine.step()
        ctx.note(steps=step + 1)
    assert engine.global_steps == STEPS


def interrupted(ctx: Context, *, whole: bool) -> None:
    """An evaluation that wants layer 2's output stops the forward there, or lets it run to its end."""
    import torch

    one_layer = 16 * 16 + 16  # a gather ahead brings one layer, so that one of them is still in flight at the stop
    engine = engine_of(ctx, build(), stage3_prefetch_bucket_size=one_layer)
    ctx.reached()
    for step in range(STEPS):
        engine.eval()
        engine.module.stop_at = LAYERS if whole or step < RECORDED else 2
        try:
            with torch.no_grad():
                engine(batch(ctx, step))
        except Stop:
            pass
        engine.module.stop_at = LAYERS
        engine.train()
        output = engine(batch(ctx, step))
        engine.backward(output.sum())
        engine.step()
        ctx.note(steps=step + 1)
    assert engine.global_steps == STEPS


def stale(ctx: Context, *, call_it: bool) -> None:
    """With nothing gathered ahead no release raises. A step that skips layer 3 must leave its weights as they are."""
    deepspeed = import_deepspeed()
    engine = engine_of(ctx, build(), stage3_prefetch_bucket_size=0)
    skipped_layer = engine.module.layers[3]

    def weights() -> Any:
        with deepspeed.zero.GatheredParameters([skipped_layer.weight]):
            return skipped_layer.weight.detach().clone()

    ctx.reached()
    for step in range(STEPS):
        before = weights()
        output = engine(batch(ctx, step), 3 if step >= RECORDED else -1, call_it)
        engine.backward(output.sum())
        engine.step()
        moved = (weights() - before).abs().max().item()
        if step < RECORDED:
            assert moved > 0.0
        elif moved > 0.0:
            raise Symptom("step %d left out layer 3, whose weights changed by up to %.1e" % (step, moved))
    assert engine.global_steps == STEPS


def empty(ctx: Context, *, kind: str) -> None:
    """A module whose only weight has no elements, so nothing makes ZeRO-3 gather it."""
    engine, plain = engine_of(ctx, build(kind)), build(kind)
    ctx.reached()
    output = engine(batch(ctx, 0))
    assert (output - plain(batch(ctx, 0))).abs().max().item() < 1e-4
    engine.backward(output.sum())
    engine.step()


OLD = {"torch": ">=2.1,<2.7", "deepspeed": ">=0.14,<0.15.3"}
ANY = {"torch": ">=2.1", "deepspeed": ">=0.14"}
LEFT = raised(r"still have inflight params \[\{'id': \d+, 'status': '(AVAILABLE|INFLIGHT)'")
INFLIGHT = raised(r"AssertionError: \{'id': \d+, 'status': 'INFLIGHT'")
CHANGED = symptom(r"step 3 left out layer 3, whose weights changed by up to \d")
EMPTY = raised(r"\{'id': \d+, 'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 0")
SKIPS = "from the fourth step on the forward skips a layer that ZeRO-3 has already begun to gather"


def pair(
    name: str,
    control: Callable[[Context], None],
    treatment: Callable[[Context], None],
    expect: Expect,
    because: str,
    fix: str,
    packages: Any,
) -> Experiment:
    counted = {"LOCAL_SIZE": "2"}  # without it DeepSpeed 0.14 counts CPUs as devices with numactl
    return Experiment(
        name=name,
        control=Arm(control, expect=expect, because=because, fidelity="cpu", env=counted),
        treatment=Arm(treatment, expect=completed(), because=fix, fidelity="cpu", env=counted),
        needs=Needs(packages=packages, memory_mib=2048),
        deadline_s=180,
        expected_s=(9.0, 9.0),
    )


probe = Probe(
    experiments=(
        pair(
            "skipped",
            skipped,
            partial(skipped, stage3_prefetch_bucket_size=0),
            LEFT,
            SKIPS,
            "stage3_prefetch_bucket_size is 0: nothing is gathered ahead",
            OLD,
        ),
        pair(
            "empty",
            partial(empty, kind="parameter"),
            partial(empty, kind="buffer"),
            EMPTY,
            "a module's only parameter has no elements, so its gather is never started",
            "the empty tensor is a buffer, which ZeRO-3 does not shard",
            ANY,
        ),
    ),
    variants=(
        pair(
            "called",
            skipped,
            partial(skipped, call_it=True),
            LEFT,
            SKIPS,
            "the forward calls the layer in each step and adds its output times 0",
            OLD,
        ),
        pair(
            "stale",
            partial(stale, call_it=False),
            partial(stale, call_it=True),
            CHANGED,
            "a step without layer 3 finds its gradient of the step before in ZeRO-3's buffer, and applies it again",
            "the forward calls the layer in each step and adds its output times 0, so its gradient is 0",
            ANY,
        ),
        pair(
            "interrupted",
            partial(interrupted, whole=False),
            partial(interrupted, whole=True),
            INFLIGHT,
            "an evaluation leaves the forward in the middle, and its gathers stay in flight into the training step",
            "the forward runs to its end, and the evaluation takes the output that it wants",
            OLD,
        ),
        pair(
            "futile",
            partial(skipped, overlap_comm=False, stage3_max_live_parameters=10**9),
            partial(skipped, stage3_prefetch_bucket_size=0),
            LEFT,
            SKIPS + "; overlap_comm is off, and stage3_max_live_parameters is large",
            "stage3_prefetch_bucket_size is 0",
            OLD,
        ),
    ),
)
