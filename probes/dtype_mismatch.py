"""Float32 LoRA adapters and a bfloat16 base end up in one FSDP unit, which flattens them into one tensor."""

from functools import partial
from typing import Any

from kb.probe import Arm, Context, Experiment, Needs, Probe, completed, raised


def wrap_and_train(ctx: Context, *, adapters_follow_base: bool) -> None:
    """As get_peft_model and FSDP do it, with the two settings that people try first: both are on, and neither helps."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    base, hidden = torch.bfloat16, torch.randn(4, 8)
    dist = ctx.init_process_group(timeout_s=10)
    assert "same dtype" in outcome_of(nn.Linear(8, 8, dtype=base), hidden, autocast=False)
    assert outcome_of(nn.Linear(8, 8, dtype=base), hidden, autocast=True) == "torch.bfloat16"
    assert outcome_of(nn.Linear(8, 8, dtype=base), hidden.to(base), autocast=False) == "torch.bfloat16"
    adapter_dtype = base if adapters_follow_base else torch.float32  # peft's autocast_adapter_dtype: False, True
    frozen = nn.Linear(8, 8, dtype=base).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(8, 2, dtype=adapter_dtype), nn.Linear(2, 8, dtype=adapter_dtype))
    ctx.reached()
    wrapped = FullyShardedDataParallel(
        model,
        device_id=ctx.device,
        use_orig_params=True,
        mixed_precision=MixedPrecision(param_dtype=base, reduce_dtype=base),
    )
    output = wrapped(hidden)
    output.float().sum().backward()
    assert output.dtype == base, output.dtype
    gradients = torch.tensor(sum(weight.grad is not None for weight in wrapped.parameters()))
    dist.all_reduce(gradients)  # the shard of one rank may hold frozen weights only
    assert gradients.item() >= 4, gradients


def outcome_of(layer: Any, hidden: Any, *, autocast: bool) -> str:
    """The dtype of the layer's output, or the message of its exception."""
    import torch

    try:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return str(layer(hidden).dtype)
    except RuntimeError as error:
        return str(error)


probe = Probe(
    experiments=(
        Experiment(
            name="gloo",
            control=Arm(
                partial(wrap_and_train, adapters_follow_base=False),
                expect=raised(r"Must flatten tensors with uniform dtype but got torch\.\w+ and torch\.\w+"),
                because="float32 adapters and a bfloat16 base in one FSDP unit",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(wrap_and_train, adapters_follow_base=True),
                expect=completed(),
                because="the adapters have the dtype of the base",
                fidelity="cpu",
            ),
            needs=Needs(packages={"torch": ">=2.4"}),
            expected_s=(0.3, 0.5),
        ),
    ),
)
