"""A resumed job creates its optimizer over other parameters, or other groups, than those of the saved optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, Tuple

from kb.cpu_arms import without_launcher
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

SIZE = raised(r"loaded state dict contains a parameter group that doesn't match the size of optimizer's group")
NUMBER = raised(r"loaded state dict has a different number of parameter groups")


def network(ctx: Context) -> Any:
    """A backbone and a head of the same shape, with the same weights in each arm."""
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
    """Adam's first moments by parameter name."""
    state = optimizer.state
    return {name: state[p]["exp_avg"].clone() for name, p in model.named_parameters() if p in state}


def saved_run(ctx: Context, groups: Callable[[Any], Any], frozen: bool) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """The checkpoint of a run whose optimizer has these groups, and the moments in it."""
    import torch

    model = network(ctx)
    if frozen:
        freeze_backbone(model)
    optimizer = torch.optim.AdamW(groups(model))
    scheduler = make_scheduler(optimizer)
    # this weight gets its first gradient last, so the state is not in the order of the parameters
    model.head.weight.requires_grad_(False)
    train(model, optimizer)
    model.head.weight.requires_grad_(True)
    train(model, optimizer)
    scheduler.step()
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint["scheduler"] = scheduler.state_dict()
    return checkpoint, moments(model, optimizer)


def judge_moments(found: Dict[str, Any], expected: Dict[str, Any]) -> None:
    import torch

    wrong = [name for name, value in expected.items() if name not in found or not torch.equal(found[name], value)]
    if wrong:
        raise Symptom("%d of %d parameters have the moments of another, and no error" % (len(wrong), len(expected)))


def resume(ctx: Context, *, frozen_first: bool) -> None:
    """The saved run froze its backbone before it created the optimizer; the resumed job does so too, or does not."""
    import torch

    checkpoint, expected = saved_run(ctx, trainable, frozen=True)
    model = network(ctx)
    model.load_state_dict(checkpoint["model"])
    ctx.reached()
    if frozen_first:
        freeze_backbone(model)
    optimizer = torch.optim.AdamW(trainable(model))
    optimizer.load_state_dict(checkpoint["optimizer"])
    judge_moments(moments(model, optimizer), expected)
    train(model, optimizer)


def resume_groups(ctx: Context, *, same: bool) -> None:
    """The saved run had one group with weight decay and one without; the resumed job has the same, or only one."""
    import torch

    checkpoint, expected = saved_run(ctx, decay_groups, frozen=False)
    model = network(ctx)
    model.load_state_dict(checkpoint["model"])
    ctx.reached()
    optimizer = torch.optim.AdamW(decay_groups(model) if same else trainable(model))
    optimizer.load_state_dict(checkpoint["optimizer"])
    judge_moments(moments(model, optimizer), expected)


def judge_rates(optimizer: Any, steps: int) -> None:
    """Raises `Symptom` unless the rates are those of an uninterrupted run after so many steps of its scheduler."""
    rate = 0.001 * (0.1 + 0.9 * steps / 20)
    found = [group["lr"] for group in optimizer.param_groups]
    if any(abs(lr / rate - 1) > 1e-6 for lr in found):
        raise Symptom("the groups have %s of their learning rate, and no error" % [round(lr / rate, 1) for lr in found])


def resume_scheduler(ctx: Context, *, first: bool) -> None:
    """The optimizer is the same; its scheduler is created before the optimizer's state is loaded, or after that."""
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
    judge_rates(optimizer, steps=2)


def resume_order(ctx: Context, *, same: bool) -> None:
    """The optimizer has as many parameters of the same shapes, in the same order or in another one."""
    import torch

    checkpoint, expected = saved_run(ctx, trainable, frozen=False)
    model = network(ctx)
    model.load_state_dict(checkpoint["model"])
    parameters = trainable(model)
    optimizer = torch.optim.AdamW(parameters if same else parameters[2:] + parameters[:2])
    ctx.reached()
    optimizer.load_state_dict(checkpoint["optimizer"])
    judge_moments(moments(model, optimizer), expected)


def resume_trainer(ctx: Context, *, frozen_first: bool) -> None:
    """transformers' Trainer resumes from its own checkpoint."""
    without_launcher()
    import torch
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(ctx)

        def forward(self, x: Any) -> Any:
            return {"loss": self.inner(x).square().mean()}

    def make_trainer(steps: int, frozen: bool) -> Any:
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

    make_trainer(2, frozen=True).train()
    resumed = make_trainer(4, frozen=frozen_first)
    ctx.reached()
    resumed.train(resume_from_checkpoint=ctx.path("out/checkpoint-2"))
    assert resumed.state.global_step == 4


def resume_adapter(ctx: Context, *, leaves_original: bool) -> None:
    """PEFT loads an adapter and a module of modules_to_save; the job makes this whole module trainable, or does not."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model  # type: ignore[import-not-found]

    model = get_peft_model(network(ctx), LoraConfig(r=2, target_modules=["backbone"], modules_to_save=["head"]))
    optimizer = torch.optim.AdamW(trainable(model))
    train(model, optimizer)
    model.save_pretrained(ctx.path("adapter"))
    expected = moments(model, optimizer)
    model = PeftModel.from_pretrained(network(ctx), ctx.path("adapter"), is_trainable=True)
    ctx.reached()
    if not leaves_original:
        model.base_model.model.head.requires_grad_(True)
    resumed = torch.optim.AdamW(trainable(model))
    resumed.load_state_dict(optimizer.state_dict())
    judge_moments(moments(model, resumed), expected)


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


FREEZES_LATE = "the saved run trained only the head, but the resumed job's optimizer also has the backbone"
FREEZES_FIRST = "the resumed job freezes the backbone before it creates the optimizer, as the saved run did"
SWAPPED = symptom(r"4 of 4 parameters have the moments of another, and no error")

probe = Probe(
    experiments=(pair("frozen", resume, "frozen_first", SIZE, FREEZES_LATE, FREEZES_FIRST),),
    variants=(
        pair(
            "groups",
            resume_groups,
            "same",
            NUMBER,
            "the saved run had a group with and a group without weight decay, but the resumed job has one group",
            "the resumed job creates the same two groups as the saved run",
        ),
        pair(
            "scheduler",
            resume_scheduler,
            "first",
            symptom(r"the groups have \[0\.1\] of their learning rate, and no error"),
            "the job creates the scheduler after the load, which sets the loaded rate back to that of the first step",
            "the job creates the scheduler before it loads the optimizer's state",
        ),
        pair(
            "order",
            resume_order,
            "same",
            SWAPPED,
            "the optimizer has as many parameters of the same shapes, but in another order, and torch checks no more",
            "the optimizer has its parameters in the same order as the saved one",
        ),
        pair(
            "adapter",
            resume_adapter,
            "leaves_original",
            SIZE,
            "the job makes a whole module of modules_to_save trainable, and with it the unused original in that module",
            "the job leaves it to is_trainable=True which parameters are trainable",
            needs=Needs(packages={"torch": ">=2.1", "peft": ">=0.13"}),
            deadline_s=90.0,
            expected_s=(8.0, 8.0),
        ),
        pair(
            "trainer",
            resume_trainer,
            "frozen_first",
            SIZE,
            "the saved run froze the backbone, but the Trainer resumes without freezing it",
            "the script freezes the backbone before it creates the Trainer",
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=4.41", "accelerate": ">=0.30"}),
            deadline_s=60.0,
            expected_s=(6.0, 6.0),
        ),
    ),
)
