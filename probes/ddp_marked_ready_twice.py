"""Reentrant checkpointing under DDP delivers a parameter's gradient twice, or one that DDP had written off as unused.

`why` chooses the way there, `fix` what the treatment arm does about it. The note `gradients_of_layer_weight` counts
how often autograd handed DDP a gradient of the same parameter in one backward.
"""

from functools import partial
from typing import Any

from kb.probe import Arm, Context, Experiment, Param, Probe, completed, raised

WHYS = ("find-unused", "reused", "two-forwards", "outside", "opaque-output")
FIXES = ("non-reentrant", "no-find-unused", "static_graph")


class Opaque:
    """An output that is not a tuple, list, dict or dataclass: DDP does not see the tensor in it."""

    def __init__(self, logits: Any) -> None:
        self.logits = logits


def train(ctx: Context, *, fixed: bool) -> None:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    why, fix = ctx.params["why"], ctx.params["fix"] if fixed else ""
    assert why in WHYS and ctx.params["fix"] in FIXES, "why is one of %s, fix one of %s" % (WHYS, FIXES)

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.embed(x)
            if why == "opaque-output":
                return Opaque(self.layer(x))
            for _ in range(2 if why == "reused" else 1):
                x = checkpoint(self.layer, x, use_reentrant=fix != "non-reentrant")
            return x

    dist = ctx.init_process_group(timeout_s=5)
    model = Model().to(ctx.device)
    parallel = DistributedDataParallel(
        model,
        find_unused_parameters=why in ("find-unused", "opaque-output") and fix != "no-find-unused",
        static_graph=fix == "static_graph",
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
        outputs = [parallel(torch.randn(2, 4, device=ctx.device)) for _ in range(2 if why == "two-forwards" else 1)]
        loss = sum(getattr(out, "logits", out).sum() for out in outputs)
        if why == "outside":
            loss = loss + weight.pow(2).sum()  # a regularizer, as AdaLoRA has one; a tied weight does the same
        loss.backward()
        everyones = [torch.empty_like(weight.grad) for _ in range(ctx.world_size)]
        dist.all_gather(everyones, weight.grad)
        averaged.append(all(torch.equal(everyone, weight.grad) for everyone in everyones))
    assert all(averaged), "the ranks have different gradients; averaged in steps 1, 2, 3: %s" % averaged


MESSAGE = r"Expected to mark a variable ready only once"
TWICE = "DDP is told a second time that a parameter is ready"
ONCE = "one backward, one gradient per parameter (--set fix=non-reentrant, no-find-unused or static_graph)"

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
)
