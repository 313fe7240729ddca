"""Rank 0 saves a sharded model without gathering its parameters, so most weights in the file are empty."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any, List, Mapping, Optional

from kb.checkpoint import Checkpoint, Tensor, Unreadable, read_checkpoint
from kb.cpu_arms import import_deepspeed
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config

SAMPLE = (2, 16)
LONGEST_VECTOR = 100_000  # elements; the weight of a norm layer has far fewer


def build() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4))


def save(ctx: Context, *, how: str, strict: bool = True) -> None:
    """FSDP with use_orig_params: outside forward and backward, a rank holds a piece of each parameter, or nothing."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel

    warnings.simplefilter("ignore")  # FSDP1 calls itself deprecated
    dist = ctx.init_process_group(timeout_s=10)
    model = FullyShardedDataParallel(build().to(ctx.device), device_id=ctx.device, use_orig_params=True)
    device, file = ctx.device, ctx.path("model.pt")
    sample = torch.ones(SAMPLE, device=device)
    model(sample).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected = model(sample).detach().cpu()
    ctx.reached()
    if how == "full state dict":
        options = StateDictOptions(full_state_dict=True, cpu_offload=device.type == "cuda")
        state = get_model_state_dict(model, options=options)
        if dist.get_rank() == 0:
            assert all(tensor.numel() for tensor in state.values() if torch.is_tensor(tensor))
            torch.save(state, file)
    elif how == "summoned":
        with FullyShardedDataParallel.summon_full_params(model):  # a collective, so every rank calls it
            write(ctx, dict(model.named_parameters()))
    else:
        write(ctx, dict(model.named_parameters()))
    load(ctx, expected, strict)


def save_deepspeed(ctx: Context, *, gathered: bool) -> None:
    """ZeRO-3 on CPU: rank 0 saves the state dict of the module, or all ranks call save_16bit_model with gathering."""
    import torch

    deepspeed = import_deepspeed()
    ctx.init_process_group(timeout_s=30)
    deepspeed.init_distributed(dist_backend="gloo")
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    model = build()
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
    engine.backward(engine(torch.ones(SAMPLE)).sum())
    engine.step()
    ctx.reached()
    if gathered:
        engine.save_16bit_model(str(ctx.dir), "model.pt")  # a collective, so every rank calls it
    else:
        write(ctx, engine.module.state_dict())
    expected = engine(torch.ones(SAMPLE)).detach()
    shapes = {name: list(item.shape) for name, item in engine.module.state_dict().items()}
    ctx.note(shapes_after_one_more_forward=shapes)
    assert all(0 not in shape for shape in shapes.values()), shapes
    load(ctx, expected)


def write(ctx: Context, state: Mapping[str, Any]) -> None:
    import torch

    if ctx.rank == 0:
        plain = {name.replace("_fsdp_wrapped_module.", ""): value.detach().cpu() for name, value in state.items()}
        ctx.note(shapes={name: list(value.shape) for name, value in plain.items()})
        torch.save(plain, ctx.path("model.pt"))


def load(ctx: Context, expected: Any, strict: bool = True) -> None:
    """Loads the file into a plain model, as for evaluation; its output must equal that of the trained model."""
    import torch

    if ctx.rank == 0:
        ctx.note(file_bytes=os.path.getsize(ctx.path("model.pt")))
        fresh = build()
        fresh.load_state_dict(torch.load(ctx.path("model.pt"), map_location="cpu"), strict=strict)
        assert torch.allclose(fresh(torch.ones(SAMPLE)), expected, rtol=1e-4, atol=1e-5)


def check(params: Mapping[str, Any]) -> Finding:
    """Does this file contain tensors without elements, and does this DeepSpeed configuration gather before a save?"""
    checks = (("checkpoint", check_file), ("config", check_config))
    findings = [check_path(Path(params[name])) for name, check_path in checks if params[name]]
    for state in ("exposed", "unknown", "clear"):
        for finding in findings:
            if finding.state == state:
                return finding
    return unknown("no checkpoint and no configuration was named", advice="--set checkpoint=model.safetensors")


def check_file(path: Path) -> Finding:
    try:
        read: Checkpoint = read_checkpoint(path)
    except Unreadable as error:
        return unknown(str(error))
    weights = [tensor for tensor in read.tensors if _is_weight(tensor.name)]
    whole = any(len(tensor.shape) > 1 for tensor in read.tensors)
    empty: List[str] = [tensor.name for tensor in weights if 0 in tensor.shape or _is_lone(tensor, whole)]
    message = "%d of %d weights are empty or have a single element" % (len(empty), len(weights))
    if not weights:
        return unknown("the file has %d tensors, but none is named like a weight" % len(read.tensors))
    if not empty:
        doubt = "but this is one shard of the checkpoint" if "-of-" in path.name else _doubt(read, whole)
        return unknown(message, doubt) if doubt else clear(message)
    if path.name.endswith("_model_states.pt"):
        return unknown(message + ", which is normal for this file: DeepSpeed saves the weights in *_optim_states.pt")
    advice = "run zero_to_fp32.py on the DeepSpeed checkpoint, if there is one; gather before the next save"
    return exposed(message, *empty[:5], advice=advice)


def _is_lone(tensor: Tensor, whole: bool) -> bool:
    """Whether DeepSpeed of 2021 left one element of a weight. In a file with matrices it may be a PReLU weight."""
    return tensor.shape == (1,) and (".lora_" in tensor.name or (tensor.name.endswith("weight") and not whole))


def _doubt(read: Checkpoint, whole: bool) -> str:
    """Why the file may be incomplete although all its weights have elements, or an empty string."""
    if not whole:
        return "but none has two dimensions: these may be the flat pieces of one rank"
    for tensor in read.tensors:
        name, shape = tensor.name, tensor.shape
        if 0 in shape:
            return "but %s is empty: it may be a parameter not named weight, or an empty buffer" % name
        if shape == (1,) and name.endswith("weight"):
            return "but %s has one element: it may be a PReLU weight, or a piece left by DeepSpeed of 2021" % name
        if len(shape) == 1 and shape[0] > LONGEST_VECTOR and name.endswith("weight"):
            return "but %s is flat and has %d elements: it may be one rank's piece of a matrix" % (name, shape[0])
    return ""


def _is_weight(name: str) -> bool:
    return name.endswith(("weight", "bias")) or ".lora_" in name


def check_config(path: Path) -> Finding:
    try:
        config = read_config(path)
    except UnreadableConfig as error:
        return unknown(str(error))
    zero: Optional[Any] = config.values.get("zero_optimization", config.values.get("deepspeed_config"))
    if not isinstance(zero, Mapping):
        return unknown("%s has no ZeRO settings" % path)
    if zero.get("deepspeed_config_file"):
        file = zero["deepspeed_config_file"]
        return unknown("%s refers to the DeepSpeed configuration %s" % (path, file), advice="name that file as config")
    stage = str(zero.get("stage", zero.get("zero_stage")))
    if stage not in ("0", "1", "2", "3"):
        return unknown("%s: the ZeRO stage is %s" % (path, "not named" if stage == "None" else stage[:20]))
    if stage != "3":
        return clear("%s does not use ZeRO-3, so every rank has whole parameters" % path)
    switches = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
    others = ("stage3_gather_fp16_weights_on_model_save", "zero3_save_16bit_model")  # an old name, and accelerate's
    gathers = any(zero.get(name) in (True, "true") for name in (*switches, *others))
    if not gathers and "auto" in [zero.get(name) for name in switches]:
        why = "%s uses ZeRO-3, and %s is auto, so accelerate's zero3_save_16bit_model decides" % (path, switches[0])
        return unknown(why)
    if not gathers:
        advice = "set %s to true" % switches[0]
        return exposed("%s uses ZeRO-3, and %s is not true" % (path, switches[0]), advice=advice)
    return unknown(
        "%s uses ZeRO-3 with %s" % (path, switches[0]),
        "kb cannot see whether your script calls a bare save_pretrained or torch.save, which still saves empty weights",
    )


EMPTY = r"copying a param with shape torch\.Size\(\[0\]\) from checkpoint"
SHARDS = "rank 0 saves its own shards of the parameters, most of which are empty"
NOT_GATHERED = Arm(partial(save, how=""), expect=raised(EMPTY), because=SHARDS, fidelity="cpu")
gloo = Experiment(
    name="gloo",
    control=NOT_GATHERED,
    treatment=Arm(
        partial(save, how="summoned"),
        expect=completed(),
        because="every rank gathers the parameters, and then rank 0 saves them",
        fidelity="cpu",
    ),
    expected_s=(0.3, 0.3),
)
whole = Experiment(
    name="full-state-dict",
    control=NOT_GATHERED,
    treatment=Arm(
        partial(save, how="full state dict"),
        expect=completed(),
        because="every rank calls get_model_state_dict with full_state_dict=True, and rank 0 saves the result",
        fidelity="cpu",
    ),
    needs=Needs(packages={"torch": ">=2.2"}),
    expected_s=(0.3, 0.3),
)
lenient = Experiment(
    name="strict-false",
    control=Arm(
        partial(save, how="", strict=False),
        expect=raised(EMPTY),
        because=f"{SHARDS}; strict=False does not help",
        fidelity="cpu",
    ),
    treatment=gloo.treatment,
    expected_s=(0.3, 0.3),
)

zero3 = Experiment(
    name="deepspeed",
    control=Arm(partial(save_deepspeed, gathered=False), expect=raised(EMPTY), because=SHARDS, fidelity="cpu"),
    treatment=Arm(
        partial(save_deepspeed, gathered=True),
        expect=completed(),
        because="every rank calls save_16bit_model with stage3_gather_16bit_weights_on_model_save",
        fidelity="cpu",
    ),
    needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.16"}, memory_mib=2048),
    deadline_s=90,
    expected_s=(10, 10),
)

probe = Probe(
    check=check,
    params={
        "checkpoint": Param("path", "a saved model: .bin, .pt, .safetensors; the check runs nothing in it"),
        "config": Param("path", "your DeepSpeed JSON or accelerate YAML, for the check"),
    },
    experiments=(gloo.on_gpus(), gloo),
    variants=(whole, lenient, zero3),
)
