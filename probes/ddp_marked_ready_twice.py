"""Reentrant checkpointing under DDP delivers a parameter's gradient twice, or one that DDP had written off as unused.

`why` chooses the way there, `fix` what the treatment arm does about it. The note `gradients_of_layer_weight` counts
how often autograd handed DDP a gradient of the same parameter in one backward.
"""

import os
from functools import partial
from typing import Any, Dict

from kb.cpu_arms import import_deepspeed
from kb.probe import Arm, Context, Expect, Experiment, Needs, Param, Probe, Symptom, completed, raised, symptom

WHYS = ("find-unused", "default", "reused", "two-forwards", "outside", "opaque-output", "branches", "elsewhere")
FIXES = ("non-reentrant", "no-find-unused", "static_graph", "patched", "tensor", "static_graph-tensor")


class Opaque:
    """An output that is not a tuple, list, dict or dataclass: DDP does not see the tensor in it."""

    def __init__(self, logits: Any) -> None:
        self.logits = logits


def train(ctx: Context, *, fixed: bool = True, why: str = "", fix: str = "", bypasses: bool = False) -> None:
    """Three steps. The arms of the first experiment take `why` and `fix` from the parameters."""
    import functools

    import torch
    import torch.utils.checkpoint as c
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    assert ctx.params["why"] in WHYS and ctx.params["fix"] in FIXES, "why is one of %s, fix one of %s" % (WHYS, FIXES)
    why = why or ctx.params["why"]
    fix = (fix or ctx.params["fix"]) if fixed else ""
    if fix == "patched":
        c.checkpoint = functools.partial(c.checkpoint, use_reentrant=False)

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, skips: bool = False) -> Any:
            x, layer = self.embed(x), self.layer
            if why in ("branches", "elsewhere"):
                return x if skips else layer(x)
            if why == "opaque-output":
                return layer(x) if fix.endswith("tensor") else Opaque(layer(x))
            for _ in range(2 if why == "reused" else 1):
                if fix == "non-reentrant":
                    x = checkpoint(layer, x, use_reentrant=False)
                elif why == "default":
                    x = c.checkpoint(layer, x)
                else:
                    x = checkpoint(layer, x, use_reentrant=True)
            return x

    dist = ctx.init_process_group(timeout_s=5)
    model = Model().to(ctx.device)
    parallel = DistributedDataParallel(
        model,
        find_unused_parameters=why not in ("reused", "two-forwards", "outside") and fix != "no-find-unused",
        static_graph=fix.startswith("static_graph"),
    )
    weight = model.layer.weight
    weight.register_post_accumulate_grad_hook(
        lambda _: ctx.note(gradients_of_layer_weight=ctx.facts["gradients_of_layer_weight"] + 1)
    )
    torch.manual_seed(ctx.rank)  # other data on every rank: gradients are equal only if they are averaged
    averaged = []
    ctx.reached()
    for step in range(3):
        ctx.note(step=step + 1, gradients_of_layer_weight=0)
        parallel.zero_grad()
        call = parallel.module if bypasses else parallel
        outputs = [call(torch.randn(2, 4, device=ctx.device)) for _ in range(2 if why == "two-forwards" else 1)]
        if why == "branches":  # the second forward takes a path without the layer
            outputs.append(call(torch.randn(2, 4, device=ctx.device), skips=True))
        elif why == "elsewhere":  # no forward uses the layer, the loss does
            outputs = [
                call(torch.randn(2, 4, device=ctx.device), skips=True),
                model.layer(torch.ones(1, 4).to(ctx.device)),
            ]
        loss = sum(getattr(out, "logits", out).sum() for out in outputs)
        if why == "outside":
            loss = loss + weight.pow(2).sum()  # a regularizer, as AdaLoRA has one; a tied weight does the same
        loss.backward()
        everyones = [torch.empty_like(weight.grad) for _ in range(ctx.world_size)]
        dist.all_gather(everyones, weight.grad)
        averaged.append(all(torch.equal(everyone, weight.grad) for everyone in everyones))
    if not all(averaged):
        raise Symptom("no error, and the ranks have different gradients; averaged in steps 1, 2, 3: %s" % averaged)


def train_zero(ctx: Context, *, together: bool) -> None:
    """Two losses of two forwards under ZeRO-2: one backward for their sum, or one for each."""
    import copy

    import torch
    from torch import nn

    deepspeed = import_deepspeed()
    os.environ["LOCAL_RANK"] = str(ctx.rank)
    ctx.init_process_group(timeout_s=20)
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 4), torch.randn(2, 2, 4)
    reference = copy.deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ctx.reached()
    losses = [engine(x).sum() for x in inputs]
    for loss in [losses[0] + losses[1]] if together else losses:
        engine.backward(loss)
    engine.step()
    sum(reference(x).sum() for x in inputs).backward()
    assert reference.bias.grad is not None
    moved = float((reference.bias.detach() - engine.module.bias.detach()).abs().max())
    planned = float(reference.bias.grad.abs().max())
    if abs(moved - planned) > 1e-4:
        raise Symptom(f"no error, and the step is {moved:.1f}, not {planned:.1f}: a loss is left out")


MESSAGE = r"Expected to mark a variable ready only once"
MARKED = raised(MESSAGE)
TWICE = "DDP is told a second time that a parameter is ready"
ONCE = "one backward, one gradient per parameter (--set fix=non-reentrant or no-find-unused)"

SILENT = symptom(
    r"no error, and the ranks have different gradients; averaged in steps 1, 2, 3: \[False, False, False\]"
)


def variant(
    name: str, control: Dict[str, Any], because: str, treatment: Dict[str, Any], fix: str, expect: Expect = MARKED
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(partial(train, **control), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(train, **treatment), expect=completed(), because=fix, fidelity="cpu"),
        expected_s=(0.3, 0.3),
    )


def way(why: str, because: str, fix: str, then: str) -> Experiment:
    return variant(why, {"why": why, "fixed": False}, because, {"why": why, "fix": fix}, then)


gloo = Experiment(
    name="gloo",
    control=Arm(partial(train, fixed=False), expect=raised(MESSAGE), because=TWICE, fidelity="cpu"),
    treatment=Arm(partial(train, fixed=True), expect=completed(), because=ONCE, fidelity="cpu"),
    expected_s=(0.3, 0.3),
)

probe = Probe(
    params={
        "why": Param("str", "how the parameter is marked twice: %s" % ", ".join(WHYS), "find-unused"),
        "fix": Param("str", "what the treatment arm does: %s" % ", ".join(FIXES), "non-reentrant"),
    },
    experiments=(gloo.on_gpus(expected_s=(10, 10)), gloo),
    variants=(
        way("reused", "a layer is checkpointed twice in one forward", "non-reentrant", "the same, not reentrant"),
        way("two-forwards", "two forwards before one backward", "non-reentrant", "the same, not reentrant"),
        way("outside", "the loss uses a checkpointed weight as well", "non-reentrant", "the same, not reentrant"),
        way("opaque-output", "the forward returns an object of an own class", "tensor", "it returns the tensor"),
        way(
            "branches", "two forwards, the second without the layer", "no-find-unused", "find_unused_parameters is off"
        ),
        way("elsewhere", "only the loss uses the layer", "no-find-unused", "find_unused_parameters is off"),
        way("default", "checkpoint() is called without use_reentrant", "patched", "its default was replaced before"),
        variant(
            "no-find-unused",
            {"why": "find-unused", "fixed": False},
            "find_unused_parameters is on, and a reentrant checkpoint hides the layer",
            {"why": "find-unused", "fix": "no-find-unused"},
            "find_unused_parameters is off, and nothing is unused",
        ),
        variant(
            "static-opaque",
            {"why": "opaque-output", "fix": "static_graph"},
            "static_graph, and the forward returns an object of an own class",
            {"why": "opaque-output", "fix": "static_graph-tensor"},
            "it returns the tensor, still with static_graph",
            SILENT,
        ),
        variant(
            "bypass",
            {"why": "find-unused", "fix": "no-find-unused", "bypasses": True},
            "the module inside DDP is called instead of DDP",
            {"why": "find-unused", "fix": "no-find-unused"},
            "DDP is called, also with a reentrant checkpoint",
            SILENT,
        ),
        Experiment(
            name="zero-two-backwards",
            control=Arm(
                partial(train_zero, together=False),
                symptom(r"no error, and the step is \d+\.\d, not \d+\.\d: a loss is left out"),
                "engine.backward for each loss; ZeRO-2 steps with the last one's gradients",
                "cpu",
            ),
            treatment=Arm(partial(train_zero, together=True), completed(), "engine.backward for their sum", "cpu"),
            needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.19.8"}, memory_mib=2048),
            world_size=1,
            deadline_s=90,
            expected_s=(10, 10),
        ),
    ),
)
