"""ZeRO-Offload steps on the CPU, and DeepSpeed refuses an optimizer object that it did not write for that."""

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
    """DeepSpeed on the CPU, and its CPU Adam, where `op` asks for it, with the arithmetic of the compiled op."""
    from kb import cpu_arms

    deepspeed = cpu_arms.import_deepspeed()
    ctx.init_process_group(timeout_s=20)
    if op:
        import deepspeed.ops.adam.cpu_adam as cpu_adam  # type: ignore[import-not-found]

        cpu_adam.CPUAdamBuilder.load = lambda *_: Op()
    return deepspeed


class Op:
    """What DeepSpeed's CPU Adam asks of its compiled op."""

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
    """The weights after two steps of torch alone."""
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
    """Two steps with AdamW: as an object of torch or of DeepSpeed, or as the configuration names it."""
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
    assert engine.basic_optimizer.param_groups[0]["params"][0].dim() == 1  # a vector, whatever shapes the layers have
    assert not isinstance(returned, torch.optim.Optimizer)  # which a scheduler of torch asks for
    torch.optim.lr_scheduler.ConstantLR(engine.basic_optimizer, factor=1.0)
    assert torch.allclose(two_steps(engine), reference(torch.optim.AdamW, **ADAMW), atol=1e-5)


def prepare(ctx: Context, *, wanted: str = "SGD", config: Optional[Mapping[str, Any]] = None) -> None:
    """accelerate gets an optimizer of torch: two steps are to be those of torch alone."""
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
        raise Symptom("asked for %s, got %s: two steps change the weights by %s" % (wanted, used, change))
    if wanted == "SGD":
        assert used == wanted, used


REFUSED = raised(r"ZeRORuntimeException: You are using ZeRO-Offload with a client provided optimizer")
REPLACED = symptom(r"asked for SGD, got DeepSpeedCPUAdam: two steps change the weights by -0\.20, -0\.20")
DS = {"torch": ">=2.1", "deepspeed": ">=0.14"}
OP = "the compiled op cpu_adam, which takes a minute to build: its arithmetic in torch"
IN_JSON = {"optimizer": {"type": "AdamW", "params": ADAMW}}
TORCH_ADAM = {"optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}}
OWN = {"zero_force_ds_cpu_optimizer": False}


def pair(
    name: str,
    works: Callable[[Context], None],
    fix: str,
    fails: Callable[[Context], None] = train,
    expect: Expect = REFUSED,
    because: str = "the script hands an AdamW of torch to deepspeed.initialize",
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
            "no object; the configuration names AdamW with torch_adam, which needs no compiled op",
        ),
    ),
    variants=(
        pair("force", partial(train, config=OWN), "zero_force_ds_cpu_optimizer is false: torch's AdamW steps"),
        pair(
            "json",
            partial(train, optimizer="json", config=IN_JSON),
            "no object; the configuration names AdamW, and DeepSpeed makes its CPU Adam",
            stands_for=OP,
        ),
        pair(
            "both",
            partial(train, optimizer="json", config=IN_JSON),
            "no object",
            partial(train, config=IN_JSON),
            because="the configuration names an optimizer, and the script hands over another",
            stands_for=OP,
        ),
        pair(
            "cpu-adam",
            partial(train, optimizer="deepspeed"),
            "the object is a DeepSpeedCPUAdam",
            stands_for=OP,
        ),
        pair(
            "accelerate",
            partial(prepare, config=OWN),
            "zero_force_ds_cpu_optimizer is false: SGD stays SGD",
            prepare,
            REPLACED,
            "accelerate makes a DeepSpeedCPUAdam of whatever it gets",
            OP,
            accelerate=">=1.2",
        ),
        pair(
            "accelerate-adamw",
            partial(prepare, wanted="AdamW"),
            "accelerate makes a DeepSpeedCPUAdam of torch's AdamW, with the same decay",
            prepare,
            REPLACED,
            "accelerate makes a DeepSpeedCPUAdam of whatever it gets",
            OP,
            accelerate=">=1.2",
        ),
    ),
)
