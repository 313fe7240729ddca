"""ZeRO-Offload steps on the CPU, where DeepSpeed refuses optimizer objects other than its own CPU optimizers."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Callable, Dict, Mapping, Optional

from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Needs,
    Probe,
    Symptom,
    completed,
    raised,
    symptom,
)

ADAMW = {"lr": 0.1, "weight_decay": 0.01}
GRADIENT = [3.0, 4.0]
START = [1.0, 1.0]


def settings(**more: Any) -> Dict[str, Any]:
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": offload,
        "zero_allow_untested_optimizer": True,
        **more,
    }


def import_deepspeed(ctx: Context, *, op: bool = False) -> Any:
    """Imports DeepSpeed on the CPU; with `op`, torch does the arithmetic of the compiled op of its CPU Adam."""
    from kb import cpu_arms

    deepspeed = cpu_arms.import_deepspeed()
    ctx.init_process_group(timeout_s=20)
    if op:
        import deepspeed.ops.adam.cpu_adam as cpu_adam  # type: ignore[import-not-found]

        cpu_adam.CPUAdamBuilder.load = lambda *_: Op()
    return deepspeed


class Op:
    """The methods of the compiled op that DeepSpeed's CPU Adam calls."""

    def create_adam(
        self, _id: int, _lr: float, _b1: float, _b2: float, _e: float, _wd: float, adamw: bool, _: Any
    ) -> None:
        self.adamw = adamw

    def destroy_adam(self, _id: int) -> None:
        pass

    def adam_update(
        self, _id: int, step: int, lr: float, b1: float, b2: float, eps: float, decay: float, _: bool, *tensors: Any
    ) -> None:
        weight, gradient, mean, square = tensors
        if self.adamw:
            weight.mul_(1 - lr * decay)
        mean.mul_(b1).add_(gradient, alpha=1 - b1)
        square.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        weight.addcdiv_(mean / (1 - b1**step), (square / (1 - b2**step)).sqrt() + eps, value=-lr)


def small_model() -> Any:
    import torch

    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data.copy_(torch.tensor([START]))
    return model


def reference(optimizer: Callable[..., Any], **options: float) -> Any:
    """The weights after two steps of torch, without DeepSpeed."""
    import torch

    weight = torch.nn.Parameter(torch.tensor([START]))
    stepper = optimizer([weight], **options)
    for _ in range(2):
        weight.grad = torch.tensor([GRADIENT])
        stepper.step()
    return weight.detach()


def two_steps(engine: Any) -> Any:
    import torch

    for _ in range(2):
        engine.backward(engine(torch.tensor([GRADIENT])).sum())
        engine.step()
    return engine.module.weight.detach()


def train(ctx: Context, *, optimizer: str = "torch", config: Optional[Mapping[str, Any]] = None) -> None:
    """Makes two steps with AdamW: an object of torch or of DeepSpeed, or as the configuration names it."""
    deepspeed = import_deepspeed(ctx, op=optimizer != "torch")
    import torch

    model = small_model()
    client: Any = None
    if optimizer == "torch":
        client = torch.optim.AdamW(model.parameters(), **ADAMW)
    elif optimizer == "deepspeed":
        client = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), **ADAMW)
    ctx.reached()
    engine, returned = deepspeed.initialize(
        model=model, optimizer=client, model_parameters=model.parameters(), config=settings(**(config or {}))
    )[:2]
    assert engine.basic_optimizer.param_groups[0]["params"][0].dim() == 1  # a vector, whatever the shapes of the layers
    assert not isinstance(returned, torch.optim.Optimizer)  # a scheduler of torch requires an Optimizer
    torch.optim.lr_scheduler.ConstantLR(engine.basic_optimizer, factor=1.0)
    assert torch.allclose(two_steps(engine), reference(torch.optim.AdamW, **ADAMW), atol=1e-5)


def prepare(ctx: Context, *, wanted: str = "SGD", config: Optional[Mapping[str, Any]] = None) -> None:
    """The script passes accelerate an optimizer of torch; two steps should equal those of torch without DeepSpeed."""
    import_deepspeed(ctx, op=True)
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs  # type: ignore[import-not-found]

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings(**(config or {}))),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model = small_model()
    ctx.reached()
    make, options = (torch.optim.SGD, {"lr": 0.1}) if wanted == "SGD" else (torch.optim.AdamW, ADAMW)
    engine, _ = accelerator.prepare(model, make(model.parameters(), **options))
    used = type(engine.basic_optimizer).__name__
    weights = two_steps(engine)
    if not torch.allclose(weights, reference(make, **options), atol=1e-5):
        change = ", ".join("%.2f" % value for value in (weights - torch.tensor([START])).flatten().tolist())
        raise Symptom("passed %s, got %s: two steps change the weights by %s" % (wanted, used, change))
    if wanted == "SGD":
        assert used == wanted, used


REFUSED = raised(r"ZeRORuntimeException: You are using ZeRO-Offload with a client provided optimizer")
REPLACED = symptom(r"passed SGD, got DeepSpeedCPUAdam: two steps change the weights by -0\.20, -0\.20")
DS = {"torch": ">=2.1", "deepspeed": ">=0.14"}
OP = "the compiled op cpu_adam, which takes a minute to build; torch does its arithmetic"
REPLACES = "accelerate replaces the SGD of the script by a DeepSpeedCPUAdam"
IN_JSON = {"optimizer": {"type": "AdamW", "params": ADAMW}}
TORCH_ADAM = {"optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}}
NOT_FORCED = {"zero_force_ds_cpu_optimizer": False}


def pair(
    name: str,
    works: Callable[[Context], None],
    fix: str,
    fails: Callable[[Context], None] = train,
    expect: Expect = REFUSED,
    because: str = "the script passes an AdamW of torch to deepspeed.initialize",
    stands_for: str = "",
    **packages: str,
) -> Experiment:
    fidelity = "stand-in" if stands_for else "cpu"
    return Experiment(
        name=name,
        control=Arm(fails, expect, because, fidelity, stands_for),
        treatment=Arm(works, completed(), fix, fidelity, stands_for),
        world_size=1,
        needs=Needs(packages={**DS, **packages}),
        deadline_s=90,
        expected_s=(5.0, 5.0),
    )


probe = Probe(
    experiments=(
        pair(
            "torch-adam",
            partial(train, optimizer="json", config=TORCH_ADAM),
            "the script passes no optimizer; the configuration names AdamW with torch_adam, which needs no compiled op",
        ),
    ),
    variants=(
        pair(
            "force",
            partial(train, config=NOT_FORCED),
            "with zero_force_ds_cpu_optimizer false, DeepSpeed uses torch's AdamW",
        ),
        pair(
            "json",
            partial(train, optimizer="json", config=IN_JSON),
            "the script passes no optimizer; the configuration names AdamW, and DeepSpeed makes its CPU Adam",
            stands_for=OP,
        ),
        pair(
            "both",
            partial(train, optimizer="json", config=IN_JSON),
            "the script passes no optimizer, so DeepSpeed makes the one that the configuration names",
            partial(train, config=IN_JSON),
            because="the configuration names an optimizer, but the script passes another one",
            stands_for=OP,
        ),
        pair(
            "cpu-adam",
            partial(train, optimizer="deepspeed"),
            "the script passes a DeepSpeedCPUAdam",
            stands_for=OP,
        ),
        pair(
            "accelerate",
            partial(prepare, config=NOT_FORCED),
            "with zero_force_ds_cpu_optimizer false, accelerate keeps the SGD of the script",
            prepare,
            REPLACED,
            REPLACES,
            OP,
            accelerate=">=1.2",
        ),
        pair(
            "accelerate-adamw",
            partial(prepare, wanted="AdamW"),
            "accelerate replaces torch's AdamW by a DeepSpeedCPUAdam with the same weight decay",
            prepare,
            REPLACED,
            REPLACES,
            OP,
            accelerate=">=1.2",
        ),
    ),
)
