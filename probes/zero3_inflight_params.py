"""ZeRO-3 prefetches weights in the order that it recorded; a forward in another order leaves a gather in flight.

DeepSpeed before 0.15.3 raises at the end of a step like this; later releases wait for the gather and free its weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

from kb.cpu_arms import import_deepspeed
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

LAYERS, RECORDED, STEPS = 6, 3, 6


class Stop(Exception):
    """Ends a forward early, as code does that only needs the output of a layer in the middle."""


def build(empty: str = "none") -> Any:
    import torch
    from torch import nn

    class Quantized(nn.Module):  # type: ignore[misc]
        """Has an empty tensor in place of a weight that it does not use, as a parameter or as a buffer."""

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
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def batch(ctx: Context, step: int) -> Any:
    import torch

    return torch.randn(2, 16, generator=torch.Generator().manual_seed(step * ctx.world_size + ctx.rank))


def skipped(ctx: Context, *, call_it: bool = False, **zero: Any) -> None:
    """Calls layer 3 in the first steps; later it skips the layer, or, with `call_it`, adds its output times 0."""
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
    """An evaluation that needs the output of layer 1 stops the forward after it, or runs the `whole` forward."""
    import torch

    one_layer = 16 * 16 + 16  # ZeRO-3 prefetches one layer, whose gather is still in flight when the forward stops
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


def stale(ctx: Context, *, call_it: bool, **zero: Any) -> None:
    """Without prefetching no release raises, but a step that skips layer 3 must not change its weights."""
    deepspeed = import_deepspeed()
    engine = engine_of(ctx, build(), stage3_prefetch_bucket_size=0, **zero)
    skipped_layer = engine.module.layers[3]

    def weights() -> Any:
        if zero:  # stage 2 does not shard weights
            return skipped_layer.weight.detach().clone()
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
    """The only weight of a module has no elements, so ZeRO-3 never starts to gather it if it is a parameter."""
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
SKIPS = "from the fourth step on, the forward skips a layer that ZeRO-3 has already begun to gather"
CALLS = "every forward calls the layer, and adds its output times 0 if the step does not need it"
NO_PREFETCH = "stage3_prefetch_bucket_size is 0, so ZeRO-3 gathers no weights ahead"


def pair(
    name: str,
    control: Callable[[Context], None],
    treatment: Callable[[Context], None],
    expect: Expect,
    because: str,
    fix: str,
    packages: Any,
) -> Experiment:
    two_devices = {"LOCAL_SIZE": "2"}  # without it, DeepSpeed 0.14 runs numactl to count CPUs as devices
    return Experiment(
        name=name,
        control=Arm(control, expect=expect, because=because, fidelity="cpu", env=two_devices),
        treatment=Arm(treatment, expect=completed(), because=fix, fidelity="cpu", env=two_devices),
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
            NO_PREFETCH,
            OLD,
        ),
        pair(
            "empty",
            partial(empty, kind="parameter"),
            partial(empty, kind="buffer"),
            EMPTY,
            "a module's only parameter has no elements, so ZeRO-3 never starts to gather it",
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
            CALLS,
            OLD,
        ),
        pair(
            "stale",
            partial(stale, call_it=False),
            partial(stale, call_it=True),
            CHANGED,
            "a step skips layer 3, and ZeRO-3 applies the layer's gradient of the previous step again",
            CALLS + ", so its gradient is 0",
            ANY,
        ),
        pair(
            "offload",
            partial(stale, call_it=False, stage=2, offload_optimizer={"device": "cpu"}),
            partial(stale, call_it=False, stage=2),
            CHANGED,
            "a step skips layer 3, and ZeRO-2 with its optimizer on the CPU applies an old gradient of the layer",
            "ZeRO-2 without offload_optimizer leaves the skipped layer as it is",
            ANY,
        ),
        pair(
            "interrupted",
            partial(interrupted, whole=False),
            partial(interrupted, whole=True),
            INFLIGHT,
            "an evaluation stops the forward in the middle, so a gather is still in flight in the training step",
            "the evaluation runs the whole forward",
            OLD,
        ),
        pair(
            "futile",
            partial(skipped, overlap_comm=False, stage3_max_live_parameters=10**9),
            partial(skipped, stage3_prefetch_bucket_size=0),
            LEFT,
            SKIPS + ", and changing overlap_comm and stage3_max_live_parameters does not help",
            NO_PREFETCH,
            OLD,
        ),
    ),
)
