"""A parameter of a DDP model gets no gradient, so DDP never reduces its bucket, and the next forward raises.

The step that causes it does not fail, and its optimizer step uses gradients that DDP has not averaged.
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
    """What the forward returns with `why=dataclass`; DDP does not look into a dataclass for tensors."""

    text: Any
    vision: Any


def build_model(why: str) -> Any:
    import torch
    from torch import nn

    class TwoTowers(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.text, self.vision = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, has_image: bool) -> Any:
            text, vision = self.text(x), self.vision(x) if has_image else None
            return Output(text, vision) if why == "dataclass" else (text, vision)

    return TwoTowers()


def wrap(model: Any, why: str, fix: str) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    if fix == "freeze":
        model.vision.requires_grad_(False)
    parallel = DistributedDataParallel(
        model, find_unused_parameters=fix == "find_unused_parameters", static_graph=fix == "static_graph"
    )
    if why == "frozen-late":
        model.vision.requires_grad_(False)
        if fix == "wrap-again":
            parallel = DistributedDataParallel(model)
    return parallel


def run_out_of_memory(gradient: Any) -> None:
    raise MemoryError("in the middle of a backward")


def train(
    ctx: Context, *, fixed: bool = True, why: str = "", fix: str = "", measures: bool = False, steps: int = 3
) -> None:
    """Three steps. The arms of the first experiment take `why` and `fix` from the parameters."""
    import torch

    assert ctx.params["why"] in WHYS and ctx.params["fix"] in FIXES, "why is one of %s, fix one of %s" % (WHYS, FIXES)
    why = why or ctx.params["why"]
    fix = (fix or ctx.params["fix"]) if fixed else ""
    ctx.init_process_group(timeout_s=5)
    model = build_model(why).to(ctx.device)
    parallel = wrap(model, why, fix)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(
        ctx.rank
    )  # each rank has other data, so the weights stay equal only if DDP averages the gradients
    has_image = why in ("output", "dataclass", "frozen-late", "caught") or (why == "rank" and ctx.rank == 0)
    ctx.reached()
    for step in range(1 if fix == "skip" else 0, steps):
        ctx.note(forward=step + 1)
        output = parallel(torch.randn(2, 4, device=ctx.device), has_image)
        text, vision = (output.text, output.vision) if why == "dataclass" else output
        loss = text.sum() if vision is None or why in ("output", "dataclass") else text.sum() + vision.sum()
        hook = model.text.weight.register_hook(run_out_of_memory) if why == "caught" and step == 0 else None
        with suppress(MemoryError):  # as in scripts that skip a batch which does not fit
            loss.backward()
        if hook:
            hook.remove()
        if step == 0:
            ctx.note(without_gradient=[n for n, p in model.named_parameters() if p.requires_grad and p.grad is None])
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            ctx.note(sum_of_text_weights_after_step_1=round(model.text.weight.sum().item(), 5))
    judge(ctx, model.text.weight.detach(), steps, measures=measures)


def judge(ctx: Context, weight: Any, steps: int, *, measures: bool) -> None:
    """Compares the weights of the ranks; with `measures`, a difference is the symptom."""
    import torch
    from torch import distributed as dist

    weights = [torch.empty_like(weight) for _ in range(ctx.world_size)]
    dist.all_gather(weights, weight)
    difference = max((other - weight).abs().max().item() for other in weights)
    if measures and difference:
        raise Symptom(f"{steps} step(s) without an error, but the weights of the ranks differ by {difference:.3f}")
    assert not difference, "the ranks trained different weights"


EXPECTED = raised(r"Expected to have finished reduction in the prior iteration before starting a new one")
APART = symptom(r"\d step\(s\) without an error, but the weights of the ranks differ by \d")
WAITS = "DDP waits for the gradient of a parameter that gets none"
DECLARED = "DDP does not wait for that gradient (--set fix=find_unused_parameters or freeze)"


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
        "why": Param("str", "why the parameter gets no gradient: %s" % ", ".join(WHYS), "unused"),
        "fix": Param("str", "what the treatment arm does: %s" % ", ".join(FIXES), "find_unused_parameters"),
    },
    experiments=(gloo.on_gpus(expected_s=(10, 10)), gloo),
    variants=(
        fixing("freeze", "unused", "freeze", WAITS, "the job freezes the tower before it wraps the model"),
        fixing(
            "wrap-again",
            "frozen-late",
            "wrap-again",
            "the job freezes the tower after it wraps the model",
            "the job wraps the model again after it froze the tower",
        ),
        fixing(
            "output",
            "output",
            "find_unused_parameters",
            "the loss ignores an output of the forward",
            "find_unused_parameters makes DDP ignore that parameter",
        ),
        fixing(
            "rank",
            "rank",
            "find_unused_parameters",
            "only one rank has an image, so the other rank does not use the tower",
            "DDP looks for unused parameters in every forward",
        ),
        fixing(
            "caught",
            "caught",
            "skip",
            "the job catches an error in the middle of a backward",
            "the job skips that batch before its forward",
        ),
        variant(
            "dataclass",
            partial(train, why="dataclass", fix="find_unused_parameters"),
            "find_unused_parameters is set, but DDP does not look into the dataclass of the output",
            partial(train, why="output", fix="find_unused_parameters"),
            "find_unused_parameters is set, and the output is in a tuple",
        ),
        variant(
            "static-dataclass",
            partial(train, why="dataclass", fix="static_graph", measures=True),
            "static_graph is set, and the forward returns a dataclass, so DDP averages no gradient",
            partial(train, why="dataclass", fix="freeze", measures=True),
            "the job freezes the tower before it wraps the model, and the forward returns the same dataclass",
            APART,
        ),
        variant(
            "one-step",
            partial(train, fixed=False, why="unused", measures=True, steps=1),
            "the job ends after a step whose gradients DDP did not average",
            partial(train, why="unused", fix="find_unused_parameters", measures=True, steps=1),
            "find_unused_parameters shows DDP which parameter gets no gradient",
            APART,
        ),
    ),
)
