"""A frozen layer and two trainable adapter matrices in one FSDP1 unit, which keeps one requires_grad for all of it."""

from __future__ import annotations

import copy
import importlib
import os
from functools import partial
from typing import Any, Dict, Mapping

from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown
from kb.training_config import UnreadableConfig, read_config

RATE = 0.01
FIXES = ("use_orig_params", "own-units", "fully_shard")


def wrap_and_train(ctx: Context, *, fixed: bool) -> None:
    """LoRA by hand: 1056 frozen numbers, 128 trainable ones. One step must do what a single process does."""
    import torch
    from torch import nn
    from torch.distributed import fsdp

    dist = ctx.init_process_group(timeout_s=10)
    fix = ctx.params["fix"] if fixed else ""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32), nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)]
    layers[0].requires_grad_(False)
    model: Any = nn.Sequential(*layers)
    data = torch.randn(2, 4, 32)
    should = trained_alone(model, data)

    model.to(ctx.device)
    wrap = partial(fsdp.FullyShardedDataParallel, device_id=ctx.device, use_orig_params=fix == "use_orig_params")
    if fix == "own-units":
        model = nn.Sequential(layers[0], wrap(layers[1]), wrap(layers[2]))
    ctx.reached()
    if fix == "fully_shard":
        fsdp.fully_shard(model)
    else:
        model = wrap(model)
    optimizer = torch.optim.SGD(
        [weight for weight in model.parameters() if weight.requires_grad], RATE * ctx.world_size
    )
    model(data[ctx.rank].to(ctx.device)).square().sum().backward()  # gradients are averaged over the ranks
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    held = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() // 4 for item in map(local, gradients)}
    most = torch.tensor(sum(held.values()), device=ctx.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    ctx.note(trainable_numbers_per_rank=64, gradient_numbers_per_rank=most.item())
    optimizer.step()
    for name, weight in whole_weights(model, fsdp, fix).items():
        assert torch.allclose(weight.cpu(), should[name], atol=1e-4), f"{name} is not as one process trains it"


def trained_alone(model: Any, data: Any) -> Dict[str, Any]:
    """All weights after one step of a single process on the data of both ranks."""
    model = copy.deepcopy(model)
    model(data).square().sum().backward()
    return {
        name: weight.detach() if weight.grad is None else weight.detach() - RATE * weight.grad
        for name, weight in model.named_parameters()
    }


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole_weights(model: Any, fsdp: Any, fix: str) -> Dict[str, Any]:
    if fix == "fully_shard":
        return {name: weight.full_tensor() for name, weight in model.named_parameters()}
    with fsdp.FullyShardedDataParallel.summon_full_params(model):
        return {
            name.replace("_fsdp_wrapped_module.", ""): weight.detach().clone()
            for name, weight in model.named_parameters()
        }


def wrap_lora(ctx: Context, *, use_orig_params: bool) -> None:
    """The same with get_peft_model and nothing else changed."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel

    ctx.init_process_group(timeout_s=10)
    peft: Any = importlib.import_module("peft")
    base = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))
    ctx.reached()
    wrapped = FullyShardedDataParallel(model, device_id=ctx.device, use_orig_params=use_orig_params)
    wrapped(torch.ones(2, 16, device=ctx.device)).sum().backward()
    trained = sum(weight.requires_grad for weight in wrapped.parameters())
    assert trained == 2, f"{trained} weights are trainable, not lora_A and lora_B"


def check(params: Mapping[str, Any]) -> Finding:
    """Does the configuration ask for FSDP1 with use_orig_params off, and for an adapter?"""
    if params["config"] is None:
        return unknown("no configuration was named", advice="--set config=fsdp.yaml, or the YAML of your trainer")
    try:
        values = read_config(params["config"]).values
    except UnreadableConfig as error:
        return unknown(str(error))
    options = values.get("fsdp_config")
    options = options if isinstance(options, dict) else {}
    if not (options or values.get("fsdp") or str(values.get("distributed_type", "")).upper() == "FSDP"):
        return clear(f"{params['config']} does not ask for FSDP")
    fsdp_options = {
        str(key)[len("fsdp_") :] if str(key).startswith("fsdp_") else str(key): options[key] for key in options
    }
    version = fsdp_options.get("version", values.get("fsdp_version", os.environ.get("FSDP_VERSION")))
    if str(version) == "2":
        return clear("fsdp_version is 2: FSDP2 keeps every parameter as it is")
    orig = str(fsdp_options.get("use_orig_params", os.environ.get("FSDP_USE_ORIG_PARAMS", "not given"))).lower()
    if orig in ("true", "1", "yes"):
        return clear("use_orig_params is on: a unit may mix frozen and trainable parameters")
    adapter = [key for key in ("adapter", "peft_type", "use_peft", "lora_r", "finetuning_type") if values.get(key)]
    adapter = [f"{key}: {values[key]}" for key in adapter if values[key] != "full"]
    message = f"FSDP with use_orig_params {orig}, version {version or 'not given'}"
    advice = "set fsdp_use_orig_params: true, or fsdp_version: 2, or give trainable modules units of their own"
    if orig == "not given":
        return unknown(f"{message}: the default is the launcher's or the library's", advice=advice)
    if adapter:
        return exposed(message, f"an adapter on a frozen base ({', '.join(adapter)})", advice=advice)
    return unknown(f"{message}: refused as soon as one unit mixes frozen and trainable weights", advice=advice)


MESSAGE = r"Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"
MIXED = "frozen and trainable parameters in one FSDP1 unit, use_orig_params=False"

gloo = Experiment(
    name="gloo",
    control=Arm(partial(wrap_and_train, fixed=False), expect=raised(MESSAGE), because=MIXED, fidelity="cpu"),
    treatment=Arm(
        partial(wrap_and_train, fixed=True),
        expect=completed(),
        because="each parameter keeps its own requires_grad (--set fix=use_orig_params, own-units or fully_shard)",
        fidelity="cpu",
    ),
    needs=Needs(packages={"torch": ">=2.4"}),
    expected_s=(0.4, 0.6),
)

probe = Probe(
    check=check,
    params={
        "config": Param("path", "your accelerate YAML, or the YAML of a trainer with an fsdp_config"),
        "fix": Param("str", "what the treatment arm does: %s" % ", ".join(FIXES), "use_orig_params"),
    },
    experiments=(gloo.on_gpus(), gloo),
    variants=(
        Experiment(
            name="peft",
            control=Arm(
                partial(wrap_lora, use_orig_params=False), expect=raised(MESSAGE), because=MIXED, fidelity="cpu"
            ),
            treatment=Arm(
                partial(wrap_lora, use_orig_params=True),
                expect=completed(),
                because="use_orig_params=True",
                fidelity="cpu",
            ),
            needs=Needs(packages={"torch": ">=2.4", "peft": ">=0.8"}, memory_mib=2048),
            deadline_s=90,
            expected_s=(7, 7),
        ),
    ),
)
