"""Under DDP, reentrant checkpointing computes a parameter's gradient twice, or after DDP has called it unused.

`why` chooses the cause, and `fix` what the treatment arm changes. The note `gradients_of_layer_weight` counts how often
autograd passed DDP a gradient of the same parameter in one backward.
"""

import os
from functools import partial
from typing import Any, Callable, Dict

from kb.cpu_arms import import_deepspeed
from kb.probe import Arm, Context, Expect, Experiment, Needs, Param, Probe, Symptom, completed, raised, symptom

WHYS = ("find-unused", "default", "reused", "two-forwards", "outside", "opaque-output", "branches", "elsewhere")
FIXES = ("non-reentrant", "no-find-unused", "static_graph", "patched", "tensor", "static_graph-tensor")


class Opaque:
    """An output that is not a tuple, list, dict or dataclass: DDP does not see the tensor in it."""

    def __init__(self, logits: Any) -> None:
        self.logits = logits


def train(ctx: Context, *, fixed: bool = True, why: str = "", fix: str = "", bypasses: bool = False) -> None:
    """Trains three steps. The arms of the first experiment take `why` and `fix` from the parameters."""
    import functools

    import torch
    import torch.utils.checkpoint as c

    assert ctx.params["why"] in WHYS and ctx.params["fix"] in FIXES, "why is one of %s, fix one of %s" % (WHYS, FIXES)
    why = why or ctx.params["why"]
    fix = (fix or ctx.params["fix"]) if fixed else ""
    if fix == "patched":
        c.checkpoint = functools.partial(c.checkpoint, use_reentrant=False)
    ctx.init_process_group(timeout_s=5)
    model = build_model(why, fix).to(ctx.device)
    parallel = wrap(model, why, fix)
    weight = model.layer.weight
    weight.register_post_accumulate_grad_hook(
        lambda _: ctx.note(gradients_of_layer_weight=ctx.facts["gradients_of_layer_weight"] + 1)
    )
    torch.manual_seed(ctx.rank)  # the ranks have different data, so gradients are equal only if they are averaged
    averaged = []
    ctx.reached()
    for step in range(3):
        ctx.note(step=step + 1, gradients_of_layer_weight=0)
        parallel.zero_grad()
        compute_loss(ctx, model, parallel.module if bypasses else parallel, why).backward()
        averaged.append(is_equal_on_all_ranks(ctx, weight.grad))
    if not all(averaged):
        raise Symptom("the ranks silently have different gradients; averaged in steps 1, 2, 3: %s" % averaged)


def build_model(why: str, fix: str) -> Any:
    import torch
    import torch.utils.checkpoint as c
    from torch import nn
    from torch.utils.checkpoint import checkpoint

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

    return Model()


def wrap(model: Any, why: str, fix: str) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(
        model,
        find_unused_parameters=why not in ("reused", "two-forwards", "outside") and fix != "no-find-unused",
        static_graph=fix.startswith("static_graph"),
    )


def compute_loss(ctx: Context, model: Any, call: Callable[..., Any], why: str) -> Any:
    import torch

    outputs = [call(torch.randn(2, 4, device=ctx.device)) for _ in range(2 if why == "two-forwards" else 1)]
    if why == "branches":  # the second forward takes a path without the layer
        outputs.append(call(torch.randn(2, 4, device=ctx.device), skips=True))
    elif why == "elsewhere":  # no forward uses the layer, but the loss does
        outputs = [
            call(torch.randn(2, 4, device=ctx.device), skips=True),
            model.layer(torch.ones(1, 4).to(ctx.device)),
        ]
    loss: Any = sum(getattr(out, "logits", out).sum() for out in outputs)
    if why == "outside":
        loss = loss + model.layer.weight.pow(2).sum()  # a regularizer, as in AdaLoRA; a tied weight has the same effect
    return loss


def is_equal_on_all_ranks(ctx: Context, gradient: Any) -> bool:
    import torch
    import torch.distributed as dist

    gradients = [torch.empty_like(gradient) for _ in range(ctx.world_size)]
    dist.all_gather(gradients, gradient)
    return all(torch.equal(other, gradient) for other in gradients)


def train_zero(ctx: Context, *, together: bool) -> None:
    """Trains on two losses of two forwards under ZeRO-2: one backward for their sum, or one for each loss."""
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
        raise Symptom(f"the step is silently {moved:.1f} instead of {planned:.1f}: it leaves out a loss")


MESSAGE = r"Expected to mark a variable ready only once"
MARKED = raised(MESSAGE)
TWICE = "DDP marks a parameter ready a second time"
NON_REENTRANT = "the same with a non-reentrant checkpoint"
OFF = "find_unused_parameters is off"
OWN_CLASS = "the forward returns an object of a custom class"
ONCE = "each parameter gets one gradient per backward (--set fix=non-reentrant or no-find-unused)"

SILENT = symptom(r"the ranks silently have different gradients; averaged in steps 1, 2, 3: \[False, False, False\]")


def variant(
    name: str, control: Dict[str, Any], because: str, treatment: Dict[str, Any], fix: str, expect: Expect = MARKED
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(partial(train, **control), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(train, **treatment), expect=completed(), because=fix, fidelity="cpu"),
        expected_s=(0.3, 0.3),
    )


def cause(why: str, because: str, fix: str, because_fixed: str) -> Experiment:
    return variant(why, {"why": why, "fixed": False}, because, {"why": why, "fix": fix}, because_fixed)


gloo = Experiment(
    name="gloo",
    control=Arm(partial(train, fixed=False), expect=raised(MESSAGE), because=TWICE, fidelity="cpu"),
    treatment=Arm(partial(train, fixed=True), expect=completed(), because=ONCE, fidelity="cpu"),
    expected_s=(0.3, 0.3),
)

probe = Probe(
    params={
        "why": Param("str", "why DDP marks the parameter twice: %s" % ", ".join(WHYS), "find-unused"),
        "fix": Param("str", "what the treatment arm does: %s" % ", ".join(FIXES), "non-reentrant"),
    },
    experiments=(gloo.on_gpus(expected_s=(10, 10)), gloo),
    variants=(
        cause("reused", "the model checkpoints one layer twice in one forward", "non-reentrant", NON_REENTRANT),
        cause("two-forwards", "two forwards run before one backward", "non-reentrant", NON_REENTRANT),
        cause("outside", "the loss also uses a checkpointed weight", "non-reentrant", NON_REENTRANT),
        cause("opaque-output", OWN_CLASS, "tensor", "the forward returns the tensor"),
        cause("branches", "of two forwards, the second does not use the layer", "no-find-unused", OFF),
        cause("elsewhere", "only the loss uses the layer", "no-find-unused", OFF),
        cause("default", "checkpoint() is called without use_reentrant", "patched", "its default is non-reentrant"),
        variant(
            "no-find-unused",
            {"why": "find-unused", "fixed": False},
            "find_unused_parameters is on, and a reentrant checkpoint hides the layer",
            {"why": "find-unused", "fix": "no-find-unused"},
            "find_unused_parameters is off, and no parameter is unused",
        ),
        variant(
            "static-opaque",
            {"why": "opaque-output", "fix": "static_graph"},
            OWN_CLASS + ", and static_graph is set",
            {"why": "opaque-output", "fix": "static_graph-tensor"},
            "the forward returns the tensor, and static_graph is set",
            SILENT,
        ),
        variant(
            "bypass",
            {"why": "find-unused", "fix": "no-find-unused", "bypasses": True},
            "the code calls the module inside DDP instead of DDP, so DDP averages nothing",
            {"why": "find-unused", "fix": "no-find-unused"},
            "the code calls DDP, also with a reentrant checkpoint",
            SILENT,
        ),
        Experiment(
            name="zero-two-backwards",
            control=Arm(
                partial(train_zero, together=False),
                symptom(r"the step is silently \d+\.\d instead of \d+\.\d: it leaves out a loss"),
                "engine.backward runs for each loss, but ZeRO-2 steps with the gradients of the last one",
                "cpu",
            ),
            treatment=Arm(partial(train_zero, together=True), completed(), "engine.backward runs for the sum", "cpu"),
            needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.19.8"}, memory_mib=2048),
            world_size=1,
            deadline_s=90,
            expected_s=(10, 10),
        ),
    ),
)
