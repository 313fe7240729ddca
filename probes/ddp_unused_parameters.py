"""A parameter of a DDP model gets no gradient: its bucket is never reduced, and the next forward raises.

Nothing fails in the step that causes it: its optimizer step uses gradients that were not averaged. `why` chooses how
the parameter comes to have no gradient, `fix` what the treatment arm does about it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from kb.probe import Arm, Context, Experiment, Param, Probe, completed, raised

WHYS = ("unused", "output", "dataclass", "rank", "frozen-late")
FIXES = ("find_unused_parameters", "freeze", "static_graph")


@dataclass
class Output:
    """What the forward returns with `why=dataclass`: DDP looks into it in one place and not in the other."""

    text: Any
    vision: Any


def train(ctx: Context, *, fixed: bool) -> None:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    why, fix = ctx.params["why"], ctx.params["fix"] if fixed else ""
    assert why in WHYS and ctx.params["fix"] in FIXES, "why is one of %s, fix one of %s" % (WHYS, FIXES)

    class TwoTowers(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.text, self.vision = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, has_image: bool) -> Any:
            text, vision = self.text(x), self.vision(x) if has_image else None
            return Output(text, vision) if why == "dataclass" else (text, vision)

    dist = ctx.init_process_group(timeout_s=5)
    model = TwoTowers().to(ctx.device)
    if fix == "freeze":
        model.vision.requires_grad_(False)
    parallel = DistributedDataParallel(
        model, find_unused_parameters=fix == "find_unused_parameters", static_graph=fix == "static_graph"
    )
    if why == "frozen-late":
        model.vision.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(ctx.rank)  # other data on every rank: weights stay equal only if gradients are averaged
    has_image = why in ("output", "dataclass", "frozen-late") or (why == "rank" and ctx.rank == 0)
    ctx.reached()
    for step in range(3):
        ctx.note(forward=step + 1)
        output = parallel(torch.randn(2, 4, device=ctx.device), has_image)
        text, vision = (output.text, output.vision) if why == "dataclass" else output
        loss = text.sum() if vision is None or why in ("output", "dataclass") else text.sum() + vision.sum()
        loss.backward()
        if step == 0:
            ctx.note(without_gradient=[n for n, p in model.named_parameters() if p.requires_grad and p.grad is None])
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            ctx.note(sum_of_text_weights_after_step_1=round(model.text.weight.sum().item(), 5))
    mine = model.text.weight.detach()
    everyones = [torch.empty_like(mine) for _ in range(ctx.world_size)]
    dist.all_gather(everyones, mine)
    assert all(torch.equal(everyone, mine) for everyone in everyones), "the ranks trained different weights"


MESSAGE = r"Expected to have finished reduction in the prior iteration before starting a new one"
WAITS = "DDP waits for the gradient of a parameter that gets none"
DECLARED = "DDP knows that no gradient is coming (--set fix=find_unused_parameters, freeze or static_graph)"

gloo = Experiment(
    name="gloo",
    control=Arm(partial(train, fixed=False), expect=raised(MESSAGE), because=WAITS, fidelity="cpu"),
    treatment=Arm(partial(train, fixed=True), expect=completed(), because=DECLARED, fidelity="cpu"),
    expected_s=(0.3, 0.3),
)

probe = Probe(
    params={
        "why": Param("str", "how the parameter comes to have no gradient: %s" % ", ".join(WHYS), "unused"),
        "fix": Param("str", "what the treatment arm does: %s" % ", ".join(FIXES), "find_unused_parameters"),
    },
    experiments=(gloo.on_gpus(expected_s=(10, 10)), gloo),
)
