"""A frozen layer and two trainable adapter matrices in one FSDP1 unit, which keeps one requires_grad for all of it."""

from __future__ import annotations

import copy
import functools
import importlib
from functools import partial
from typing import Any, Dict, Mapping

from kb.packages import release
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    raised,
    symptom,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config

RATE = 0.01
WHERE = "--python of the training environment"


def wrap_and_train(ctx: Context, *, fix: str) -> None:
    """LoRA by hand: 1056 frozen numbers, 128 trainable ones. One step must do what a single process does."""
    import torch
    from torch import nn
    from torch.distributed import fsdp
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    dist = ctx.init_process_group(timeout_s=10)
    device, policy = ctx.device, None
    torch.manual_seed(0)
    base = nn.Linear(32, 32)
    model: Any = nn.Sequential(base, nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False))
    data = torch.randn(2, 4, 32)
    base.requires_grad_(False)
    should = trained_alone(model, data)

    def trains(module: torch.nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        return not list(module.children()) and weight is not None and weight.requires_grad

    model.to(device)
    ctx.reached()
    if fix == "fully_shard":
        fsdp.fully_shard(model)
    elif fix == "use_orig_params":
        model = FullyShardedDataParallel(model, use_orig_params=True, auto_wrap_policy=policy, device_id=device)
    elif fix == "own-units":
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=trains)
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device)
    elif fix == "freeze afterwards":
        model = FullyShardedDataParallel(model.requires_grad_(True), device_id=device)
        for weight in base.parameters():
            weight.requires_grad_(False)
    else:
        model = FullyShardedDataParallel(model, device_id=device)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, RATE * ctx.world_size)
    model(data[ctx.rank].to(device)).square().sum().backward()  # gradients are averaged over the ranks
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    held = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() // 4 for item in map(local, gradients)}
    most = torch.tensor(sum(held.values()), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    ctx.note(trainable_numbers_per_rank=64, gradient_numbers_per_rank=most.item())
    optimizer.step()
    for name, weight in whole_weights(model, fsdp, fix).items():
        moved = (weight.cpu() - should[name]).abs().max().item()
        if moved > 1e-4:
            raise Symptom(f"{name} is {moved:.3f} from what one process with a frozen base makes of it")


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


def wrap_lora(ctx: Context, *, use_orig_params: bool, on_embedding: bool = False) -> None:
    """The same with get_peft_model and nothing else changed, or with PEFT's policy for an adapter without `weight`."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel

    ctx.init_process_group(timeout_s=10)
    peft: Any = importlib.import_module("peft")
    base = nn.Sequential(nn.Embedding(16, 16) if on_embedding else nn.Linear(16, 16), nn.Linear(16, 16))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))
    policy = importlib.import_module("peft.utils.other").fsdp_auto_wrap_policy(model) if on_embedding else None
    inputs = torch.ones(2, 16, device=ctx.device, dtype=torch.long if on_embedding else torch.float32)
    ctx.reached()
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=ctx.device, use_orig_params=use_orig_params
    )
    wrapped(inputs).sum().backward()
    trained = sum(weight.requires_grad for weight in wrapped.parameters())
    assert trained == 2, f"{trained} weights are trainable, not lora_A and lora_B"


def check(params: Mapping[str, Any]) -> Finding:
    """Does the configuration ask for FSDP1 with use_orig_params off? Who chooses the units, it does not say."""
    if params["config"] is None:
        return unknown("no configuration was named", advice="--set config=fsdp.yaml, or the YAML of your trainer")
    try:
        values = read_config(params["config"]).values
    except UnreadableConfig as error:
        return unknown(str(error))
    options = values.get("fsdp_config")
    options = options if isinstance(options, dict) else {}
    if not (options or values.get("fsdp") or str(values.get("distributed_type", "")).upper() == "FSDP"):
        return unknown(f"{params['config']} does not ask for FSDP; flags of the launcher and code cannot be seen")
    fsdp_options = {
        str(key)[len("fsdp_") :] if str(key).startswith("fsdp_") else str(key): options[key] for key in options
    }
    version = fsdp_options.get("version", values.get("fsdp_version"))
    if str(version) == "2":
        launched = str(values.get("distributed_type", "")).upper() == "FSDP"  # a file of accelerate, else of a trainer
        package, first = ("accelerate", (1, 6)) if launched else ("transformers", (5,))
        if not release(package):
            return unknown(f"fsdp_version is 2, and which {package} will read it is not known", advice=WHERE)
        if release(package) < first:
            return unknown(f"fsdp_version is 2, and this {package} may pass over it", advice=f"a newer {package}")
        return clear("fsdp_version is 2: FSDP2 keeps every parameter as it is")
    orig = str(fsdp_options.get("use_orig_params", "not given")).lower()
    if orig in ("true", "1", "yes", "y", "t", "on"):
        if not release("torch"):
            return unknown("use_orig_params is on, and which torch will run is not known", advice=WHERE)
        if release("torch") < (2, 1):
            return unknown("use_orig_params is on, which does not help before torch 2.1", advice="a newer torch")
        return clear("use_orig_params is on: a unit may mix both kinds, unless a flag or code turns it off")
    adapter = [key for key in ("adapter", "peft_type", "use_peft", "lora_r", "finetuning_type") if values.get(key)]
    adapter = [f"{key}: {values[key]}" for key in adapter if values[key] != "full"]
    message = f"FSDP with use_orig_params {orig}, version {version or 'not given'}"
    advice = "set fsdp_use_orig_params: true, or fsdp_version: 2, or give trainable modules units of their own"
    if orig == "not given":
        return unknown(f"{message}: the default is the launcher's or the library's", advice=advice)
    if adapter:
        seen = f"an adapter on a frozen base ({', '.join(adapter)})"
        return unknown(message, seen + ": the Trainer gives it units of its own, an own loop must", advice=advice)
    return unknown(f"{message}: refused as soon as one unit mixes frozen and trainable weights", advice=advice)


MESSAGE = r"Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"
MIXED = "frozen and trainable parameters in one FSDP1 unit, use_orig_params=False"

FLAT = Arm(partial(wrap_and_train, fix=""), expect=raised(MESSAGE), because=MIXED, fidelity="cpu")
gloo = Experiment(
    name="gloo",
    control=FLAT,
    treatment=Arm(
        partial(wrap_and_train, fix="use_orig_params"),
        expect=completed(),
        because="use_orig_params=True: each parameter keeps its own requires_grad",
        fidelity="cpu",
    ),
    expected_s=(0.4, 0.6),
)
own_units = Experiment(
    name="own-units",
    control=FLAT,
    treatment=Arm(
        partial(wrap_and_train, fix="own-units"),
        expect=completed(),
        because="a policy makes a unit of each module that trains, so no unit mixes",
        fidelity="cpu",
    ),
    expected_s=(0.4, 0.6),
)
second_generation = Experiment(
    name="fully-shard",
    control=FLAT,
    treatment=Arm(
        partial(wrap_and_train, fix="fully_shard"),
        expect=completed(),
        because="FSDP2 shards each parameter by itself",
        fidelity="cpu",
    ),
    needs=Needs(packages={"torch": ">=2.9"}),  # on the CPU 2.7 and 2.8 train with gradients not yet reduced
    expected_s=(0.4, 0.6),
)
afterwards = Experiment(
    name="freeze-afterwards",
    control=Arm(
        partial(wrap_and_train, fix="freeze afterwards"),
        expect=symptom(r"0\.(weight|bias) is \d\.\d+ from what one process with a frozen base makes of it"),
        because="the base is frozen after the wrapping, when its module has no parameters any more, and trains",
        fidelity="cpu",
    ),
    treatment=gloo.treatment,
    expected_s=(0.4, 0.6),
)

probe = Probe(
    check=check,
    params={"config": Param("path", "your accelerate YAML, or the YAML of a trainer with an fsdp_config")},
    experiments=(gloo.on_gpus(), gloo),
    variants=(
        own_units,
        second_generation,
        afterwards,
        *(
            Experiment(
                name=name,
                control=Arm(
                    partial(wrap_lora, use_orig_params=False, on_embedding=on_embedding),
                    expect=raised(MESSAGE),
                    because=because,
                    fidelity="cpu",
                ),
                treatment=Arm(
                    partial(wrap_lora, use_orig_params=True, on_embedding=on_embedding),
                    expect=completed(),
                    because="use_orig_params=True",
                    fidelity="cpu",
                ),
                needs=Needs(packages={"torch": ">=2.1", "peft": ">=0.8"}, memory_mib=2048),
                deadline_s=90,
                expected_s=(7, 7),
            )
            for name, on_embedding, because in (
                ("peft", False, MIXED),
                ("peft-embedding", True, "PEFT's policy makes no unit of lora_embedding_A, which has no weight"),
            )
        ),
    ),
)
