"""A parameter of a DDP model gets no gradient: its bucket is never reduced, and the next forward raises.

Nothing fails in the step that causes it: its optimizer step uses gradients that were not averaged.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kb.probe import Arm, Context, Expect, Experiment, Param, Probe, Symptom, completed, raised, symptom

WHYS = ("unused", "output", "dataclass", "rank", "frozen-late", "caught")
FIXES = ("find_unused_parameters", "freeze", "static_graph", "wrap-again", "skip")


@dataclass
class Output:
    """What the forward returns with `why=dataclass`: DDP looks into it in one place and not in the other."""

    text: Any
    vision: Any


def run_out(gradient: Any) -> None:
    raise MemoryError("in the middle of a backward")


def train(
    ctx: Context, *, fixed: bool = True, why: str = "", fix: str = "", measures: bool = False, steps: int = 3
) -> None:
    """Three steps. The arms of the first experiment take `why` and `fix` from the parameters."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    assert ctx.params["why"] in WHYS and ctx.params["fix"] in FIXES, "why is one of %s, fix one of %s" % (WHYS, FIXES)
    why = why or ctx.params["why"]
    fix = (fix or ctx.params["fix"]) if fixed else ""

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
        if fix == "wrap-again":
            parallel = DistributedDataParallel(model)  # and the optimizer anew, below
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(ctx.rank)  # other data on every rank: weights stay equal only if gradients are averaged
    has_image = why in ("output", "dataclass", "frozen-late", "caught") or (why == "rank" and ctx.rank == 0)
    ctx.reached()
    for step in range(1 if fix == "skip" else 0, steps):
        ctx.note(forward=step + 1)
        output = parallel(torch.randn(2, 4, device=ctx.device), has_image)
        text, vision = (output.text, output.vision) if why == "dataclass" else output
        loss = text.sum() if vision is None or why in ("output", "dataclass") else text.sum() + vision.sum()
        hook = model.text.weight.register_hook(run_out) if why == "caught" and step == 0 else None
        with suppress(MemoryError):  # as scripts do that leave out a batch which does not fit
            loss.backward()
        if hook:
            hook.remove()
        if step == 0:
            ctx.note(without_gradient=[n for n, p in model.named_parameters() if p.requires_grad and p.grad is None])
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            ctx.note(sum_of_text_weights_after_step_1=round(model.text.weight.sum().item(), 5))
    mine = model.text.weight.detach()
    everyones = [torch.empty_like(mine) for _ in range(ctx.world_size)]
    dist.all_gather(everyones, mine)
    apart = max((everyone - mine).abs().max().item() for everyone in everyones)
    if measures and apart:
        raise Symptom(f"{steps} step(s) without an error, and the weights of the ranks differ by {apart:.3f}")
    assert not apart, "the ranks trained different weights"


EXPECTED = raised(r"Expected to have finished reduction in the prior iteration before starting a new one")
APART = symptom(r"\d step\(s\) without an error, and the weights of the ranks differ by \d")
WAITS = "DDP waits for the gradient of a parameter that gets none"
DECLARED = "DDP knows that no gradient is coming (--set fix=find_unused_parameters or freeze)"


def variant(name: str, control: Any, because: str, treatment: Any, fix: str, expect: Expect = EXPECTED) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(control, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(treatment, expect=completed(), because=fix, fidelity="cpu"),
        expected_s=(0.3, 0.3),
    )


def fixing(name: str, why: str, fix: str, because: str, then: str) -> Experiment:
    return variant(name, partial(train, fixed=False, why=why), because, partial(train, why=why, fix=fix), then)


gloo = variant("gloo", partial(train, fixed=False), WAITS, train, DECLARED)

probe = Probe(
    params={
        "why": Param("str", "how the parameter comes to have no gradient: %s" % ", ".join(WHYS), "unused"),
        "fix": Param("str", "what the treatment arm does: %s" % ", ".join(FIXES), "find_unused_parameters"),
    },
    experiments=(gloo.on_gpus(expected_s=(10, 10)), gloo),
    variants=(
        fixing("freeze", "unused", "freeze", WAITS, "the tower was frozen before the model was wrapped"),
        fixing("wrap-again", "frozen-late", "wrap-again", "the tower is frozen after the wrapping", "wrapped again"),
        fixing("output", "output", "find_unused_parameters", "the loss ignores an output", "DDP looks for such"),
        fixing("rank", "rank", "find_unused_parameters", "one rank has an image", "DDP looks for what is unused"),
        fixing("caught", "caught", "skip", "an error breaks off a backward", "that batch is left out beforehand"),
        variant(
            "dataclass",
            partial(train, why="dataclass", fix="find_unused_parameters"),
            "the flag is on; the output stands in a dataclass, which DDP does not look into",
            partial(train, why="output", fix="find_unused_parameters"),
            "the flag is on; the output stands in a tuple",
        ),
        variant(
            "static-dataclass",
            partial(train, why="dataclass", fix="static_graph", measures=True),
            "static_graph, and the forward returns a dataclass",
            partial(train, why="dataclass", fix="freeze", measures=True),
            "the tower is frozen, the forward returns the same dataclass",
            APART,
        ),
        variant(
            "one-step",
            partial(train, fixed=False, why="unused", measures=True, steps=1),
            "the job ends after the step that was not averaged",
            partial(train, why="unused", fix="find_unused_parameters", measures=True, steps=1),
            "DDP knows which parameter gets no gradient",
            APART,
        ),
    ),
)
