"""The optimizer of a resumed job is made over other parameters, or other groups, than the one that was saved."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Callable, Dict, List, Tuple

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

SIZE = raised(r"loaded state dict contains a parameter group that doesn't match the size of optimizer's group")
NUMBER = raised(r"loaded state dict has a different number of parameter groups")


def network(ctx: Context) -> Any:
    """A backbone and a head of the same shape, the same numbers in each arm."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("backbone", torch.nn.Linear(4, 4))
    model.add_module("head", torch.nn.Linear(4, 4))
    return model.to(ctx.device)


def freeze_backbone(model: Any) -> None:
    model.backbone.requires_grad_(False)


def trainable(model: Any) -> List[Any]:
    return [p for p in model.parameters() if p.requires_grad]


def decay_groups(model: Any) -> List[Dict[str, Any]]:
    decay = [p for p in trainable(model) if p.ndim > 1]
    no_decay = [p for p in trainable(model) if p.ndim <= 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]


def make_scheduler(optimizer: Any) -> Any:
    import torch

    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)


def train(model: Any, optimizer: Any) -> None:
    import torch

    device = next(model.parameters()).device
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4, device=device)).square().mean().backward()
        optimizer.step()


def moments(model: Any, optimizer: Any) -> Dict[str, Any]:
    """Adam's first moments by the parameter's name."""
    state = optimizer.state
    return {name: state[p]["exp_avg"].clone() for name, p in model.named_parameters() if p in state}


def saved_run(ctx: Context, groups: Callable[[Any], Any], frozen: bool) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """The checkpoint of a run with such an optimizer, and the moments that it holds."""
    import torch

    model = network(ctx)
    if frozen:
        freeze_backbone(model)
    optimizer = torch.optim.AdamW(groups(model))
    scheduler = make_scheduler(optimizer)
    model.head.weight.requires_grad_(False)  # its first gradient is late, so the state is in another order
    train(model, optimizer)
    model.head.weight.requires_grad_(True)
    train(model, optimizer)
    scheduler.step()
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint["scheduler"] = scheduler.state_dict()
    return checkpoint, moments(model, optimizer)


def must_be(found: Dict[str, Any], expected: Dict[str, Any]) -> None:
    import torch

    wrong = [name for name, value in expected.items() if name not in found or not torch.equal(found[name], value)]
    if wrong:
        raise Symptom("%d of %d parameters have the moments of another, and no error" % (len(wrong), len(expected)))


def resume(ctx: Context, *, frozen_first: bool) -> None:
    """The run froze its backbone before it made the optimizer; the resumed job does so, too, or too late."""
    import torch

    checkpoint, expected = saved_run(ctx, trainable, frozen=True)
    model = network(ctx)
    model.load_state_dict(checkpoint["model"])
    ctx.reached()
    if frozen_first:
        freeze_backbone(model)
    optimizer = torch.optim.AdamW(trainable(model))
    optimizer.load_state_dict(checkpoint["optimizer"])
    must_be(moments(model, optimizer), expected)
    train(model, optimizer)


def resume_groups(ctx: Context, *, same: bool) -> None:
    """The run had groups with and without weight decay."""
    import torch

    checkpoint, expected = saved_run(ctx, decay_groups, frozen=False)
    model = network(ctx)
    model.load_state_dict(checkpoint["model"])
    ctx.reached()
    optimizer = torch.optim.AdamW(decay_groups(model) if same else trainable(model))
    optimizer.load_state_dict(checkpoint["optimizer"])
    must_be(moments(model, optimizer), expected)


def rates_must_be(optimizer: Any, steps: int) -> None:
    """The rates of a run that was never interrupted, after so many steps of its scheduler."""
    rate = 0.001 * (0.1 + 0.9 * steps / 20)
    found = [group["lr"] for group in optimizer.param_groups]
    if any(abs(lr / rate - 1) > 1e-6 for lr in found):
        raise Symptom("the groups have %s of their learning rate, and no error" % [round(lr / rate, 1) for lr in found])


def schedule(ctx: Context, *, first: bool) -> None:
    """The same optimizer again; its scheduler is made before the optimizer's state is loaded, or after it."""
    import torch

    checkpoint, _ = saved_run(ctx, trainable, frozen=False)
    model = network(ctx)
    model.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.AdamW(trainable(model))
    ctx.reached()
    if not first:
        optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler = make_scheduler(optimizer)
    if first:
        optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    train(model, optimizer)
    scheduler.step()
    rates_must_be(optimizer, steps=2)


def order(ctx: Context, *, same: bool) -> None:
    """As many parameters of the same shapes, in another order: nothing is checked, nothing fails."""
    import torch

    checkpoint, expected = saved_run(ctx, trainable, frozen=False)
    model = network(ctx)
    model.load_state_dict(checkpoint["model"])
    parameters = trainable(model)
    optimizer = torch.optim.AdamW(parameters if same else parameters[2:] + parameters[:2])
    ctx.reached()
    optimizer.load_state_dict(checkpoint["optimizer"])
    must_be(moments(model, optimizer), expected)


def trainer(ctx: Context, *, frozen_first: bool) -> None:
    """transformers' Trainer, resumed from its own checkpoint."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # one process, and no launcher
    import torch
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(ctx)

        def forward(self, x: Any) -> Any:
            return {"loss": self.inner(x).square().mean()}

    def job(steps: int, frozen: bool) -> Any:
        model = Model()
        if frozen:
            freeze_backbone(model.inner)
        arguments = TrainingArguments(
            output_dir=ctx.path("out"),
            max_steps=steps,
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        return Trainer(model=model, args=arguments, train_dataset=[{"x": torch.ones(4)}] * 8)

    job(2, frozen=True).train()
    resumed = job(4, frozen=frozen_first)
    ctx.reached()
    resumed.train(resume_from_checkpoint=ctx.path("out/checkpoint-2"))
    assert resumed.state.global_step == 4


def pair(
    name: str, job: Callable[..., None], keyword: str, expect: Expect, because: str, fix: str, **options: Any
) -> Experiment:
    """The keyword is False in the control and True in the treatment."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: False}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{keyword: True}), expect=completed(), because=fix, fidelity="cpu"),
        **{"world_size": 1, "expected_s": (0.3, 0.3), **options},
    )


FREEZES_LATE = "the saved run trained the head alone, the resumed job makes its optimizer over the backbone as well"
SWAPPED = symptom(r"4 of 4 parameters have the moments of another, and no error")

probe = Probe(
    experiments=(
        pair("frozen", resume, "frozen_first", SIZE, FREEZES_LATE, "it freezes the backbone first, as the run did"),
    ),
    variants=(
        pair(
            "groups",
            resume_groups,
            "same",
            NUMBER,
            "the saved run had two groups, with and without weight decay, the resumed job has one",
            "it makes the same two",
        ),
        pair(
            "scheduler",
            schedule,
            "first",
            symptom(r"the groups have \[0\.1\] of their learning rate, and no error"),
            "the scheduler is made after the load, and sets the loaded rate back to its first factor",
            "it is made before the load",
        ),
        pair(
            "order",
            order,
            "same",
            SWAPPED,
            "as many parameters of the same shapes, in another order",
            "in the same order",
        ),
        pair(
            "trainer",
            trainer,
            "frozen_first",
            SIZE,
            "the Trainer resumes, and the backbone is not frozen as it was",
            "it is frozen before the Trainer is made",
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=4.41", "accelerate": ">=0.30"}),
            deadline_s=60.0,
            expected_s=(6.0, 6.0),
        ),
    ),
)
