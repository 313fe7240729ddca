"""A frozen layer and trainable adapter matrices are in one FSDP1 unit, which has a single requires_grad for all."""

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
PYTHON = "add --python PYTHON_OF_THE_JOB"


def wrap_and_train(ctx: Context, *, fix: str) -> None:
    """LoRA by hand: 1056 frozen and 128 trainable numbers. One step must give the weights of a single process."""
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
    expected = trained_alone(model, data)

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
        moved = (weight.cpu() - expected[name]).abs().max().item()
        if moved > 1e-4:
            raise Symptom(f"{name} differs by {moved:.3f} from a single process with a frozen base")


def trained_alone(model: Any, data: Any) -> Dict[str, Any]:
    """Returns all weights after one step of a single process on the data of both ranks."""
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
    """Wraps the model of get_peft_model, or one whose adapter has no `weight`, with PEFT's policy for units."""
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
    assert trained == 2, f"{trained} weights are trainable instead of two, lora_A and lora_B"


def check(params: Mapping[str, Any]) -> Finding:
    """Does the configuration use FSDP1 with use_orig_params off? It does not say which modules become units."""
    if params["config"] is None:
        return unknown("no configuration was named", advice="run --set config=fsdp.yaml, or the YAML of your trainer")
    try:
        values = read_config(params["config"]).values
    except UnreadableConfig as error:
        return unknown(str(error))
    options = values.get("fsdp_config")
    options = options if isinstance(options, dict) else {}
    if not (options or values.get("fsdp") or str(values.get("distributed_type", "")).upper() == "FSDP"):
        return unknown(f"{params['config']} does not use FSDP; kb cannot see the launcher's flags and your code")
    fsdp_options = {
        str(key)[len("fsdp_") :] if str(key).startswith("fsdp_") else str(key): options[key] for key in options
    }
    version = fsdp_options.get("version", values.get("fsdp_version"))
    if str(version) == "2":
        launched = (
            str(values.get("distributed_type", "")).upper() == "FSDP"
        )  # then accelerate reads the file, else the Trainer
        package, first = ("accelerate", (1, 6)) if launched else ("transformers", (5,))
        if not release(package):
            return unknown(f"fsdp_version is 2, but kb does not know which {package} the job uses", advice=PYTHON)
        if release(package) < first:
            return unknown(f"fsdp_version is 2, but this {package} may ignore it", advice=f"install a newer {package}")
        return clear("fsdp_version is 2: in FSDP2 each parameter has its own requires_grad")
    orig = str(fsdp_options.get("use_orig_params", "not given")).lower()
    if orig in ("true", "1", "yes", "y", "t", "on"):
        if not release("torch"):
            return unknown("use_orig_params is on, but kb does not know which torch the job uses", advice=PYTHON)
        if release("torch") < (2, 1):
            return unknown(
                "use_orig_params is on, but does not help before torch 2.1", advice="install torch 2.1 or newer"
            )
        return clear(
            "use_orig_params is on: a unit may mix frozen and trainable weights, unless a flag or code turns it off"
        )
    adapter = [key for key in ("adapter", "peft_type", "use_peft", "lora_r", "finetuning_type") if values.get(key)]
    adapter = [f"{key}: {values[key]}" for key in adapter if values[key] != "full"]
    message = f"FSDP with use_orig_params {orig}, version {version or 'not given'}"
    advice = "set fsdp_use_orig_params: true, or fsdp_version: 2, or give trainable modules units of their own"
    if orig == "not given":
        return unknown(f"{message}: the launcher or the library chooses the default", advice=advice)
    if adapter:
        units = "the Trainer makes units of its modules; a custom training loop must do so itself"
        return unknown(message, f"an adapter on a frozen base ({', '.join(adapter)}): {units}", advice=advice)
    return unknown(f"{message}: FSDP1 raises the error if one unit mixes frozen and trainable weights", advice=advice)


MESSAGE = r"Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"
MIXED = "frozen and trainable parameters are in one FSDP1 unit, with use_orig_params=False"

FLAT = Arm(partial(wrap_and_train, fix=""), expect=raised(MESSAGE), because=MIXED, fidelity="cpu")
gloo = Experiment(
    name="gloo",
    control=FLAT,
    treatment=Arm(
        partial(wrap_and_train, fix="use_orig_params"),
        expect=completed(),
        because="with use_orig_params=True each parameter keeps its own requires_grad",
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
        because="a policy makes each trainable module a unit of its own, so no unit mixes",
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
        because="FSDP2 shards each parameter separately",
        fidelity="cpu",
    ),
    needs=Needs(packages={"torch": ">=2.9"}),  # on the CPU, 2.7 and 2.8 step before the gradients are reduced
    expected_s=(0.4, 0.6),
)
afterwards = Experiment(
    name="freeze-afterwards",
    control=Arm(
        partial(wrap_and_train, fix="freeze afterwards"),
        expect=symptom(r"0\.(weight|bias) differs by \d\.\d+ from a single process with a frozen base"),
        because="the base is frozen after the wrapping, when its module has no parameters left, so it still trains",
        fidelity="cpu",
    ),
    treatment=gloo.treatment,
    expected_s=(0.4, 0.6),
)

probe = Probe(
    check=check,
    params={"config": Param("path", "the YAML of accelerate, or that of a trainer with an fsdp_config")},
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
                    because="with use_orig_params=True each parameter keeps its own requires_grad",
                    fidelity="cpu",
                ),
                # the policy of older releases refuses a model without names of layer classes
                needs=Needs(
                    packages={"torch": ">=2.1", "peft": ">=0.14" if on_embedding else ">=0.8"}, memory_mib=2048
                ),
                deadline_s=90,
                expected_s=(7, 7),
            )
            for name, on_embedding, because in (
                ("peft", False, MIXED),
                (
                    "peft-embedding",
                    True,
                    "PEFT's policy makes no unit of lora_embedding_A, which has no `weight`, so units mix",
                ),
            )
        ),
    ),
)
