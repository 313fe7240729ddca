"""Weights, gradients and Adam's state exceed a card under DDP, which keeps them all on each rank; FSDP divides them."""

from __future__ import annotations

import gc
import json
import os
import subprocess
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

from kb.checkpoint import Unreadable, read_checkpoint
from kb.cpu_arms import GPU_OOM, HOST_OOM, LIMITED_ADDRESS_SPACE, import_deepspeed, limit_address_space
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)

MIB, GIB = 1 << 20, 1 << 30
WIDTH = 2048  # a float32 layer has 4 Mi parameters, 16 MiB
# For four layers, DDP keeps 20 bytes per parameter, 320 MiB; FSDP2 keeps half of 16, and one or two whole layers.
CPU_ROOM = 240 * MIB
ADAPTER_ROOM = 176 * MIB  # training four layers takes 16 bytes per parameter, 256 MiB; frozen weights take 4, 64 MiB
LOAD_ROOM = 168 * MIB  # twelve layers take 192 MiB; a rank needs half of that, and one or two whole layers
LAYERS, NARROW, BUDGET = 8, 1024, 12  # size of the model whose bytes are counted, and bytes per parameter of a rank
FLOATS = ("bfloat16", "float16", "float32")


def build(layers: int, width: int = WIDTH) -> Any:
    """A model of linear layers of `width` x `width`."""
    from torch import nn

    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def sharded(layers: int, device: Any, width: int = WIDTH, **options: Any) -> Any:
    """Builds a model under FSDP2 on the meta device, each layer a unit, and allocates only the part of this rank."""
    import torch
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = build(layers, width)
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    assert names == set(model.state_dict()), "shared weights, or buffers of no checkpoint: build on the CPU"
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.to_empty(device=device)
    return model


def read_tensor(name: str) -> Any:
    """Stands for a checkpoint from which one tensor at a time is read."""
    import torch

    return torch.full((WIDTH, WIDTH), 1.0 + int(name.split(".")[0]))


def fill(model: Any, device: Any) -> None:
    """Copies the checkpoint into the model, and into the part of this rank if the model is sharded."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        for name, part in model.state_dict().items():
            tensor = read_tensor(name).to(device)
            if isinstance(part, DTensor):
                tensor = distribute_tensor(tensor, part.device_mesh, part.placements)
            part.copy_(tensor)


def step(model: Any, optimizer: Any, device: Any, autocast: bool = False) -> None:
    """Makes one step with a batch of one row."""
    import torch

    weight = next(iter(model.parameters()))
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        loss = model(torch.ones(1, weight.shape[1], device=device, dtype=weight.dtype)).float().sum()
    loss.backward()
    optimizer.step()


def train(ctx: Context, *, shards: bool) -> None:
    """Makes one step with AdamW, with all states on each rank or with a part of them."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    dist = ctx.init_process_group(timeout_s=30)
    on_gpu = ctx.device.type == "cuda"
    dist.all_reduce(torch.ones(1, device=ctx.device))
    if not on_gpu:
        limit_address_space(CPU_ROOM)
    ctx.reached()
    layers = 16 if on_gpu else 4
    model = sharded(layers, ctx.device) if shards else DistributedDataParallel(build(layers).to(ctx.device))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 1 / WIDTH)
    before = next(iter(model.parameters())).detach().sum().item()
    step(model, torch.optim.AdamW(model.parameters()), ctx.device)
    assert next(iter(model.parameters())).detach().sum().item() != before, "the step changed no weight"


def adapt(ctx: Context, *, adapter: bool) -> None:
    """Makes one step of all weights, or of an adapter of rank 8 next to each frozen layer."""
    import torch
    from torch import nn

    class Adapted(nn.Module):  # type: ignore[misc]
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.lora_a, self.lora_b = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

        def forward(self, x: Any) -> Any:
            return self.base(x) + self.lora_b(self.lora_a(x))

    on_gpu = ctx.device.type == "cuda"
    if not on_gpu:
        limit_address_space(ADAPTER_ROOM)
    ctx.reached()
    model = build(20 if on_gpu else 4)
    if adapter:
        model = nn.Sequential(*(Adapted(layer) for layer in model))
    model.to(ctx.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    step(model, torch.optim.AdamW(trained), ctx.device)
    share = sum(parameter.numel() for parameter in trained) / sum(parameter.numel() for parameter in model.parameters())
    ctx.note(trained_share=round(share, 4))
    assert share < 0.01, share


def load(ctx: Context, *, whole_first: bool) -> None:
    """Loads a sharded model: builds it whole and then divides it, or allocates the part of each rank and fills it."""
    import torch
    from torch.distributed.fsdp import fully_shard

    ctx.init_process_group(timeout_s=30).all_reduce(torch.ones(1))
    limit_address_space(LOAD_ROOM)
    ctx.reached()
    if whole_first:
        model = build(12)
        for unit in (*model, model):
            fully_shard(unit)
    else:
        model = sharded(12, ctx.device)
    fill(model, ctx.device)
    for name, part in model.state_dict().items():
        assert torch.equal(part.to_local(), read_tensor(name)[: WIDTH // 2]), name


def resident() -> int:
    """The resident memory of this process, in bytes."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def count(ctx: Context, *, shards: bool) -> None:
    """Measures the bytes per parameter on a rank after a step with AdamW, for methods with whole or divided states."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    def ddp(dtype: Any = torch.float32, **options: Any) -> Any:
        return DistributedDataParallel(build(LAYERS, NARROW).to(dtype), **options)

    ctx.init_process_group(timeout_s=30)
    torch.set_num_threads(1)
    limit_address_space(4 * GIB)  # the limit itself is not reached, but with it freed blocks go back to the system
    single = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))["parts"]
    fsdp = partial(sharded, LAYERS, torch.device("cpu"), NARROW)
    divided: Dict[str, Callable[[], Any]] = {
        "fsdp of 1": partial(fsdp, mesh=single),
        "fsdp of 2": fsdp,
        "fsdp of 2, bf16 policy": partial(fsdp, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    }
    whole: Dict[str, Callable[[], Any]] = {
        "ddp of 1": partial(ddp, process_group=single.get_group()),
        "ddp of 2": ddp,
        "ddp, gradient_as_bucket_view": partial(ddp, gradient_as_bucket_view=True),
        "ddp, bf16 autocast": ddp,
        "ddp, bf16 weights": partial(ddp, dtype=torch.bfloat16),
        "ZeroRedundancyOptimizer of 2": ddp,
    }
    ctx.reached()
    measured: Dict[str, float] = {}
    methods = divided if shards else whole
    for name in [list(methods)[-1], *methods]:  # the first round loads what torch loads only once
        before = resident()
        model = methods[name]()
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 1 / NARROW)
        if name.startswith("Zero"):
            optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW)
        else:
            optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, ctx.device, autocast="autocast" in name)
        measured[name] = round((resident() - before) / (LAYERS * NARROW * NARROW), 1)
        del model, optimizer, parameter
    ctx.note(bytes_per_parameter=measured)
    if any(size > BUDGET for name, size in measured.items() if name.endswith("of 2")):
        raise Symptom("bytes a parameter on each of 2 ranks: %s" % json.dumps(measured))
    for name, size in {"fsdp of 1": 16, "fsdp of 2": 8, "fsdp of 2, bf16 policy": 8}.items():
        assert abs(measured[name] - size) < 1, measured


def partition(ctx: Context, *, stage: int) -> None:
    """Measures the bytes per parameter of the weights on a rank after a step with DeepSpeed, bf16 and AdamW."""
    import torch

    deepspeed = import_deepspeed()
    ctx.init_process_group(timeout_s=60)
    numbers = LAYERS * 512 * 512
    zero = {"stage": stage, "reduce_bucket_size": 512 * 512, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    ctx.reached()
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = build(LAYERS, 512)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    config["zero_allow_untested_optimizer"] = True
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.ones(1, 512, dtype=torch.bfloat16)).float().sum())
    engine.step()
    weights = sum((p.ds_tensor if stage == 3 else p).nbytes for p in parameters) / numbers
    ctx.note(stage=stage, weights=round(weights, 1))
    if weights > 1.5:
        raise Symptom("stage %d: weights of %.1f bytes a parameter on each of 2 ranks" % (stage, weights))
    assert abs(weights - 1) < 0.1, weights


# --- the check: do the states of this model fit on one of these GPUs? ------------------------------------------------

# Bytes per parameter on each of N ranks, with Adam: (whole, divided by N) at least, and the same at most.
STATES: Dict[str, Tuple[Tuple[float, float], Tuple[float, float]]] = {
    # all methods but the last train all weights
    "ddp-fp32": ((16, 0), (24, 0)),  # with or without autocast
    "ddp-bf16": ((8, 0), (14, 0)),  # weights, gradients and moments in bf16
    "zero1": ((2, 12), (8, 18)),
    "zero2": ((2, 12), (8, 18)),
    "zero3": ((0, 14), (8, 18)),  # at most: the layers are not units, so the whole model is gathered
    "fsdp": ((0, 8), (8, 20)),  # at least: everything in bf16
    "ddp-lora": ((2, 0), (4, 0)),  # the frozen weights, in 16 or 32 bits
}
DENSE = ("llama", "mistral", "qwen2", "qwen3")
ADVICE = "run --set model=config.json (or model.safetensors.index.json, or --set params=8, in billions)"


def check(params: Mapping[str, Any]) -> Finding:
    """Do weights, gradients and the state of Adam of one model fit on a GPU?"""
    method, gpus = str(params["method"]).lower(), params["gpus"]
    if method not in STATES:
        advice = "run --set method=zero2, or another one of %s" % ", ".join(STATES)
        return unknown("kb needs the method that distributes the model", advice=advice)
    if gpus is None and method.startswith(("zero", "fsdp")):
        return unknown("kb needs the number of GPUs that share the states", advice="run --set gpus=8")
    billions, source = params["params"], "as given"
    if billions is None:
        billions, source = parameters_of(params["model"]) if params["model"] else (None, "kb needs the model")
    if billions is None or not 0 < billions < 1e5 or not 0 < (gpus or 1) < 1e6:
        why = source if billions is None else "params (in billions) and gpus must be above zero"
        return unknown(why, advice=ADVICE)
    largest, free, memory_source = gpu_memory(params["gpu_memory"])
    least, most = (billions * 1e9 * (whole + part / (gpus or 1)) / GIB for whole, part in STATES[method])
    text = "%.2f billion parameters (%s), %s: %.1f to %.1f GiB per GPU, AdamW in 32 bits, no offload, not quantized"
    message = text % (billions, source, method + (" on %d" % gpus if gpus else ""), least, most)
    if largest is None or free is None:
        return unknown(message, memory_source, advice="run --set gpu_memory=79.1 (GiB of one GPU)")
    memory = "the largest GPU has %.1f GiB, and the fullest one has %.1f GiB free (%s)" % (largest, free, memory_source)
    if least > largest:
        advice = "use ZeRO-3 or FSDP over more GPUs, an adapter, offload, or a smaller model"
        return exposed(message, memory, advice=advice)
    if least > free:
        return unknown(message, memory, "the states would fit on an empty card: see gpu-held-by-other-process")
    if most > 0.6 * free or "MIG" in memory_source or method == "ddp-lora":
        return unknown(message, memory, "kb does not know how much memory activations and other programs need")
    return clear(message, memory, "this counts one model, without activations, a reference model or an engine")


def parameters_of(path: Path) -> Tuple[Optional[float], str]:
    """Billions of parameters from a config.json, a safetensors index or a single file; or None and the reason."""
    if path.suffix == ".safetensors":
        try:
            tensors = read_checkpoint(path).tensors
        except Unreadable as error:
            return None, str(error)
        if "-of-" in path.name or any(tensor.dtype not in FLOATS for tensor in tensors):
            return None, "%s is one file of several, or quantized" % path.name
        return sum(prod(tensor.shape) for tensor in tensors) / 1e9, path.name
    try:
        values: Dict[str, Any] = json.loads(path.read_text()) if path.stat().st_size < 64 * MIB else {}
        if "weight_map" in values:
            return float(values["metadata"]["total_parameters"]) / 1e9, path.name
        if values["model_type"] not in DENSE or "quantization_config" in values:
            return None, "kb cannot count the parameters of a %s" % values["model_type"]
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        per_head = values.get("head_dim") or hidden // heads
        attention = 2 * hidden * per_head * (heads + values.get("num_key_value_heads", heads))
        layer = attention + 3 * hidden * values["intermediate_size"]
        embeddings = values["vocab_size"] * hidden * (1 if values.get("tie_word_embeddings") else 2)
        return (values["num_hidden_layers"] * layer + embeddings) / 1e9, path.name
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        return None, "%s does not say how many parameters there are: %r" % (path.name, error)


def gpu_memory(given: Optional[float]) -> Tuple[Optional[float], Optional[float], str]:
    """GiB of the largest GPU that nvidia-smi lists, the smallest free memory of any GPU, and the source."""
    if given is not None:
        return (given, given, "as given") if 0 < given < 1e6 else (None, None, "no card has %s GiB" % given)
    query = ["nvidia-smi", "--query-gpu=memory.total,memory.free,mig.mode.current", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=0.8, check=True).stdout
        gpus = [line.split(",") for line in output.splitlines() if line.strip()]
        source = "with MIG, which divides it" if any("Enabled" in gpu[2] for gpu in gpus) else "nvidia-smi"
        return max(int(gpu[0]) for gpu in gpus) / 1024, min(int(gpu[1]) for gpu in gpus) / 1024, source
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        return None, None, "nvidia-smi does not report the memory of the GPUs: %s" % type(error).__name__


FSDP2 = {"torch": ">=2.7"}  # in older releases, fully_shard does not run on the CPU


def experiment(
    name: str,
    control: Callable[[Context], None],
    treatment: Callable[[Context], None],
    because: Tuple[str, str],
    packages: Mapping[str, str] = MappingProxyType(FSDP2),
    world_size: int = 2,
    expect: Optional[Expect] = None,
    expected_s: Tuple[float, float] = (1.0, 1.5),
) -> Experiment:
    """An experiment under a memory limit; with `expect`, one that measures memory instead."""
    fidelity, stands_for = ("cpu", "") if expect else ("stand-in", LIMITED_ADDRESS_SPACE)
    return Experiment(
        name=name,
        control=Arm(control, expect or HOST_OOM, because[0], fidelity, stands_for),
        treatment=Arm(treatment, completed(), because[1], fidelity, stands_for),
        world_size=world_size,
        needs=Needs(packages=packages),
        deadline_s=60,
        expected_s=expected_s,
    )


rlimit = experiment(
    "rlimit",
    partial(train, shards=False),
    partial(train, shards=True),
    (
        "under DDP, each rank has all weights, gradients, their buckets and Adam's moments",
        "under FSDP2, each rank has half of the weights, gradients and moments",
    ),
)
adapter = experiment(
    "adapter",
    partial(adapt, adapter=False),
    partial(adapt, adapter=True),
    ("the job trains all weights", "the job freezes the weights and trains an adapter of rank 8"),
    packages={"torch": ">=2.1"},
    world_size=1,
    expected_s=(0.3, 0.3),
)

probe = Probe(
    check=check,
    params={
        "model": Param("path", "config.json, model.safetensors.index.json or one safetensors file"),
        "params": Param("float", "parameters of the model, in billions"),
        "method": Param("str", "one of " + ", ".join(STATES), ""),
        "gpus": Param("int", "number of GPUs over which ZeRO or FSDP divides the states"),
        "gpu_memory": Param("float", "GiB of one GPU; default: what nvidia-smi says"),
    },
    experiments=(
        rlimit.on_gpus(2, expect=GPU_OOM, gpu_memory_mib=1024),
        adapter.on_gpus(1, name="gpu", expect=GPU_OOM, gpu_memory_mib=1024),
        rlimit,
    ),
    variants=(
        adapter,
        experiment(
            "whole-first",
            partial(load, whole_first=True),
            partial(load, whole_first=False),
            (
                "each rank builds the whole model before it divides it",
                "each rank allocates only its part and fills it",
            ),
        ),
        experiment(
            "bytes",
            partial(count, shards=False),
            partial(count, shards=True),
            (
                "the probe measures six methods that keep a copy of the weights on each rank",
                "the probe measures FSDP2, on one rank and on two",
            ),
            expect=symptom(
                r'"Zero\w+ of 2": 1[567]\.\d, "ddp of 1": (19|20)\.\d, "ddp of 2": (19|20)\.\d, '
                r'"ddp, gradient_as_bucket_view": (15|16)\.\d, "ddp, bf16 autocast": (19|2[01])\.\d, '
                r'"ddp, bf16 weights": (9|1[01])\.\d'
            ),
            expected_s=(4.5, 3.0),
        ),
        experiment(
            "deepspeed",
            partial(partition, stage=2),
            partial(partition, stage=3),
            (
                "under ZeRO-2, each rank builds all weights and keeps them",
                "under ZeRO-3 with zero.Init, each rank has half of the weights",
            ),
            packages={"torch": ">=2.1", "deepspeed": ">=0.16.2"},  # on a CPU, older releases run numactl
            expect=symptom(r"stage 2: weights of 2\.0 bytes a parameter on each of 2 ranks"),
            expected_s=(9.0, 9.0),
        ),
    ),
)
