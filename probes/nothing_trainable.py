"""The optimizer trains nothing: every tensor is frozen, its list is empty, or it has the wrong tensors."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, Tuple

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom


def build(ctx: Context) -> Any:
    """An embedding, a body and a head, all of which are trainable."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(8, 4))
    model.add_module("body", nn.Linear(4, 4))
    model.add_module("head", nn.Linear(4, 8))
    return model.to(ctx.device)


def step(ctx: Context, model: Any, optimizer: Any, *, forced: bool = False) -> None:
    """One step; raises `Symptom` if no weight changed although there was no error."""
    import torch

    before = [p.detach().clone() for p in model.parameters()]
    tokens = torch.tensor([1, 2, 3], device=ctx.device)
    loss = torch.nn.functional.cross_entropy(model(tokens), tokens)
    if forced:
        loss.requires_grad_(True)
    loss.backward()
    optimizer.step()
    moved = sum(not torch.equal(old, new) for old, new in zip(before, model.parameters()))
    if not moved:
        raise Symptom(f"no error, and 0 of {len(before)} tensors have changed after the step")


def train_part(ctx: Context, *, part: str, filtered: bool = True, hook: bool = False, forced: bool = False) -> None:
    """Trains only the tensors whose name begins with `part`."""
    from torch.optim import AdamW

    model = build(ctx)
    if hook:  # as enable_input_require_grads() does
        model.embed.register_forward_hook(lambda module, args, output: output.requires_grad_(True))  # noqa: ARG005
    ctx.reached()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(part))
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = AdamW(trainable if filtered else model.parameters(), lr=0.1)
    step(ctx, model, optimizer, forced=forced)


def train_iterator(ctx: Context, *, iterator: bool) -> None:
    """Counts the parameters first, and then passes them to the optimizer."""
    from torch.optim import AdamW

    model = build(ctx)
    ctx.reached()
    trainable: Any = filter(lambda p: p.requires_grad, model.parameters())
    if not iterator:
        trainable = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trainable) == 92
    step(ctx, model, AdamW(trainable, lr=0.1))


def train_layers(ctx: Context, *, registered: bool) -> None:
    """The layers are in a Python list or in a ModuleList."""
    from torch import nn
    from torch.optim import AdamW

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Embedding(8, 4), nn.Linear(4, 8)]
            if registered:
                self.layers = nn.ModuleList(layers)
            else:
                self.layers = layers

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Net()
    ctx.reached()
    step(ctx, model, AdamW(model.parameters(), lr=0.1))


def wrap_teacher(ctx: Context, *, wrapped: bool) -> None:
    """Trains a student with a frozen teacher."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=10)
    student, teacher = DistributedDataParallel(build(ctx)), build(ctx).requires_grad_(False).eval()
    ctx.reached()
    if wrapped:
        teacher = DistributedDataParallel(teacher)
    tokens = torch.tensor([1, 2, 3], device=ctx.device)
    with torch.no_grad():
        target = teacher(tokens) + 1.0
    (student(tokens) - target).square().mean().backward()
    assert all(p.grad is not None for p in student.parameters())


def train_with_loss_network(ctx: Context, *, without_grad: bool) -> None:
    """A frozen network computes the loss from the student's output, under no_grad or not."""
    import torch

    student, loss_network = build(ctx), build(ctx).head.requires_grad_(False)
    output = student.body(student.embed(torch.tensor([1, 2, 3], device=ctx.device)))
    ctx.reached()
    with torch.set_grad_enabled(not without_grad):
        loss = loss_network(output).square().mean()
    loss.backward()
    assert student.body.weight.grad.abs().sum() > 0


def train_without_grad(ctx: Context, *, enabled: bool) -> None:
    """An evaluation leaves autograd off. Both arms call train(), which does not turn it on."""
    import torch

    model = build(ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.set_grad_enabled(False)  # an evaluation that does not turn autograd on again
    ctx.reached()
    model.train()
    if enabled:
        torch.set_grad_enabled(True)
    step(ctx, model, optimizer)


def train_unfrozen(ctx: Context, *, late: bool) -> None:
    """The body is unfrozen before or after the optimizer is created; the bias of the head is always trainable."""
    import torch

    model = build(ctx).requires_grad_(False)
    model.head.bias.requires_grad_(True)
    if not late:
        model.body.requires_grad_(True)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert trainable, "nothing is to be trained"
    optimizer = torch.optim.AdamW(trainable, lr=0.1)
    if late:
        model.body.requires_grad_(True)
    ctx.reached()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    before = model.body.weight.detach().clone()
    step(ctx, model, optimizer)
    if torch.equal(before, model.body.weight):
        raise Symptom(f"in no optimizer: {', '.join(missing)}; body.weight has a gradient and has not moved")
    assert not missing


def train_stage(ctx: Context, *, part: Any) -> None:
    """A pipeline of two stages: each rank creates an optimizer for the trainable tensors of its own layers."""
    import torch

    model = build(ctx)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(part))
    stage, inputs = (model[:2], torch.tensor([1, 2, 3])) if ctx.rank == 0 else (model[2:], torch.ones(3, 4))
    ctx.reached()
    optimizer = torch.optim.AdamW([p for p in stage.parameters() if p.requires_grad], lr=0.1)
    before = [p.detach().clone() for p in stage.parameters()]
    stage(inputs.to(ctx.device)).sum().backward()
    optimizer.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, stage.parameters()))


def train_fsdp(ctx: Context, *, use_orig_params: bool) -> None:
    """Creates an optimizer for a part of a model that FSDP1 wraps."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    ctx.init_process_group(timeout_s=10)
    model = build(ctx)
    FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=ctx.device)
    ctx.reached()
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=0.1)
    assert len(optimizer.param_groups[0]["params"]) == 2


def train_deepspeed(ctx: Context, *, part: str) -> None:
    """Passes DeepSpeed two parameter groups, with and without weight decay, as the Trainer creates them."""
    import torch

    from kb.cpu_arms import import_deepspeed

    deepspeed = import_deepspeed()
    ctx.init_process_group(timeout_s=20)
    model = build(ctx)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(part))
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.requires_grad and p.dim() < 2], "weight_decay": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(groups, lr=0.1)
    ctx.reached()
    deepspeed.initialize(model=model, optimizer=optimizer, config=config)


def load_adapter(ctx: Context, *, is_trainable: bool) -> None:
    """Saves a PEFT adapter and loads it again to continue training."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model  # type: ignore[import-not-found]

    folder = ctx.path("adapter")
    get_peft_model(build(ctx), LoraConfig(target_modules=["body"], r=2)).save_pretrained(folder)
    base = build(ctx)
    if is_trainable:
        model = PeftModel.from_pretrained(base, folder, is_trainable=True)
    else:
        model = PeftModel.from_pretrained(base, folder)
    ctx.reached()
    model.print_trainable_parameters()
    step(ctx, model, torch.optim.AdamW(model.parameters(), lr=0.1))


EMPTY = raised(r"optimizer got an empty parameter list")
NO_GRAD = raised(r"element 0 of tensors does not require grad and does not have a grad_fn")
SILENT = symptom(r"no error, and 0 of 5 tensors have changed after the step")
NO_DDP = raised(r"DistributedDataParallel is not needed when a module doesn't have any parameter")
LATE = symptom(r"in no optimizer: body\.weight, body\.bias; body\.weight has a gradient and has not moved")
NO_GROUP = raised(r"list index out of range")
PART = {"part": ("classifier.", "head.")}
STAGE = {"part": ("head.", ("body.", "head."))}


def pair(
    name: str,
    job: Callable[..., None],
    change: Dict[str, Tuple[Any, Any]],
    expect: Expect,
    because: str,
    fix: str,
    *needed: str,
    ranks: int = 1,
    **both: bool,
) -> Experiment:
    """`change` maps a keyword to its values in the control arm and in the treatment arm."""
    broken, fixed = ({key: values[arm] for key, values in change.items()} for arm in (0, 1))
    packages = {"torch": ">=2.2" if name in ("fsdp1", "deepspeed") else ">=2.1", **dict.fromkeys(needed, "")}
    return Experiment(
        name=name,
        control=Arm(partial(job, **broken, **both), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **fixed, **both), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages=packages),
        world_size=ranks,
        expected_s=(0.3, 0.3),
    )


FROZEN = "the filter names a layer that this model does not have, so every tensor is frozen"
NAMED = "the filter names a layer of this model, so its tensors are trainable"
probe = Probe(
    experiments=(pair("frozen", train_part, PART, EMPTY, FROZEN, NAMED),),
    variants=(
        pair(
            "backward",
            train_part,
            PART,
            NO_GRAD,
            FROZEN + "; AdamW accepts them",
            NAMED,
            filtered=False,
        ),
        pair(
            "silent",
            train_part,
            PART,
            SILENT,
            FROZEN + "; a hook creates a graph",
            NAMED,
            filtered=False,
            hook=True,
        ),
        pair(
            "loss-requires-grad",
            train_part,
            PART,
            SILENT,
            FROZEN + "; requires_grad_ does not help",
            NAMED,
            filtered=False,
            forced=True,
        ),
        pair(
            "iterator",
            train_iterator,
            {"iterator": (True, False)},
            EMPTY,
            "counting the parameters exhausts a filter object, so AdamW gets an empty one",
            "the trainable parameters are in a list, which counting does not exhaust",
        ),
        pair(
            "python-list",
            train_layers,
            {"registered": (False, True)},
            EMPTY,
            "the layers are in a Python list, so parameters() does not find them",
            "the layers are in a ModuleList, so parameters() finds them",
        ),
        pair(
            "teacher",
            wrap_teacher,
            {"wrapped": (True, False)},
            NO_DDP,
            "DDP wraps a teacher whose parameters are all frozen",
            "DDP does not wrap the frozen teacher",
        ),
        pair(
            "loss-network",
            train_with_loss_network,
            {"without_grad": (True, False)},
            NO_GRAD,
            "the frozen loss network runs under no_grad, so the loss has no graph",
            "the frozen loss network runs with autograd on",
        ),
        pair(
            "grad-mode",
            train_without_grad,
            {"enabled": (False, True)},
            NO_GRAD,
            "an evaluation turned autograd off, and train() does not turn it on",
            "torch.set_grad_enabled(True) turns autograd on again",
        ),
        pair(
            "late",
            train_unfrozen,
            {"late": (True, False)},
            LATE,
            "a layer is unfrozen after the optimizer is created, so the optimizer does not have it",
            "the layer is unfrozen before the optimizer is created",
        ),
        pair(
            "stage",
            train_stage,
            STAGE,
            EMPTY,
            "only the last pipeline stage has trainable tensors, so the other optimizer is empty",
            "both pipeline stages have trainable tensors",
            ranks=2,
        ),
        pair(
            "fsdp1",
            train_fsdp,
            {"use_orig_params": (False, True)},
            EMPTY,
            "FSDP1 replaces the head's parameters by one flat parameter of the root module",
            "use_orig_params=True keeps the original parameters",
        ),
        pair("deepspeed", train_deepspeed, PART, NO_GROUP, FROZEN, NAMED, "deepspeed"),
        pair(
            "peft",
            load_adapter,
            {"is_trainable": (False, True)},
            NO_GRAD,
            "PeftModel.from_pretrained loads the adapter frozen",
            "is_trainable=True loads the adapter trainable",
            "peft",
        ),
    ),
)
