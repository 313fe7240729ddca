"""`device_map="auto"` plans a quantized model for less memory than is free, and puts the rest on the CPU or disk."""

import json
import os
import subprocess
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Tuple

from kb.checkpoint import Unreadable, read_checkpoint
from kb.cpu_arms import without_launcher
from kb.host import ranks_here
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
    raised,
    symptom,
    unknown,
)

CPU_REFUSED = (
    r"Some modules are dispatched on the CPU or the disk\. Make sure you have enough GPU RAM to fit the quantized"
)
OFFLOAD_REFUSED = r"You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk offload"
SINGLE, QUANTIZED = 0.9, 0.9  # the share that `auto` uses of a single GPU, and that bitsandbytes uses of this
EMBEDDING, LAYER, LAYERS = 1002, 104, 32  # MiB of an 8B model in 4 bits; its two embeddings stay in 16 bits
GIB = 1 << 30
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes; a model with another dtype was saved quantized
EMBEDDINGS = ("embed", "lm_head", "wte", "wpe")
MOST_FILES = 40  # because a check must finish within a second
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "vocab_size": 32, "num_hidden_layers": 4}


def plan(ctx: Context, *, device_map: str) -> None:
    """Counts the layers that `auto` places on a GPU that could hold them all; a named device takes all."""
    size, free = 2 * EMBEDDING + LAYERS * LAYER, 5800
    budget = free * SINGLE * QUANTIZED if device_map == "auto" else free
    ctx.reached()
    placed = min(LAYERS, int((budget - 2 * EMBEDDING) // LAYER))
    if placed < LAYERS:
        raise Symptom(
            "%d of %d layers on the CPU; the model has %d MiB, free are %d" % (LAYERS - placed, LAYERS, size, free)
        )
    assert placed == LAYERS and size <= free


def save(ctx: Context, kind: str, **sizes: int) -> int:
    """Saves a small model; returns its size in bytes with linear layers in 4 bits and the rest in 16 bits."""
    import transformers  # type: ignore[import-not-found]

    config = getattr(transformers, kind + "Config")(**{**SIZES, "intermediate_size": 64, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(ctx.path("model"))
    packed = ("_proj", "_proj.weight")
    return int(sum(p.numel() * (0.5 if name.endswith(packed) else 2) for name, p in model.named_parameters()))


def load(
    ctx: Context,
    *,
    budget: float,
    device_map: str = "auto",
    bits: int = 4,
    kind: str = "Llama",
    offload: bool = False,
    trains: bool = False,
    cards: int = 1,
    sizes: Mapping[str, int] = {},
) -> None:
    """Loads the model with `budget` times the memory that it needs in 4 bits, on one or more devices."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    device: Any = ctx.device.index if ctx.device.type == "cuda" else "cpu"
    room = int(budget * save(ctx, kind, **sizes))
    memory: Dict[Any, int] = {device: room, **({"cpu": GIB} if device != "cpu" else {})}
    if cards > 1:
        memory = {**dict.fromkeys(range(cards), room // cards), "cpu": GIB}
    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, llm_int8_enable_fp32_cpu_offload=offload
    )
    ctx.reached()
    model = AutoModelForCausalLM.from_pretrained(
        ctx.path("model"),
        dtype=torch.bfloat16,
        quantization_config=config,
        **({"device_map": "auto", "max_memory": memory} if device_map == "auto" else {"device_map": {"": device}}),
    )
    if trains:
        from accelerate import Accelerator  # type: ignore[import-not-found]

        without_launcher()
        Accelerator(cpu=device == "cpu").prepare_model(model)
    weight = model.model.layers[-1].self_attn.q_proj.weight
    assert weight.dtype == torch.uint8 and weight.device.type == ctx.device.type, weight.device
    assert model.get_memory_footprint() <= room, model.get_memory_footprint()


# --- the check: is enough memory of the GPUs free for the plan of `auto`? -----------------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """Does the model, in 4 or 8 bits, fit into the share of the free GPU memory that `auto` uses?"""
    if params["model"] is None:
        return unknown("no model was named", advice="--set model=/path/of/the/folder --set bits=4")
    if params["bits"] not in (4, 8):
        return unknown("bits must be 4 or 8, not %s" % params["bits"])
    ranks = max(1, ranks_here(None)[0])
    try:
        least, most, stored = (size * ranks / GIB for size in sizes_of(params["model"], params["bits"]))
    except Unreadable as error:
        return unknown(str(error))
    free, reason = free_gib()
    needs = "%d x the model in %d bits: %.2f GiB, or %.2f GiB if the experts of a MoE stay in 16 bits" % (
        ranks,
        params["bits"],
        least,
        most,
    )
    if not free:
        return unknown(needs, reason)
    available = "free now: %s GiB" % ", ".join("%.2f" % card for card in free)
    if least > sum(free):
        return exposed(needs, available, advice="use 4 bits, a free GPU, more GPUs, or a smaller model")
    share = QUANTIZED * (SINGLE if len(free) == 1 else 1)
    if least > sum(free) * share:
        used = "`auto` uses at most %.0f %% of that" % (100 * share)
        return exposed(
            needs,
            available,
            used,
            advice='name the device of each rank: device_map={"": int(os.environ.get("LOCAL_RANK", 0))}',
        )
    if stored > min(free) * SINGLE * QUANTIZED:
        return unknown(
            needs,
            available,
            "kb does not know max_memory, the skipped modules or how `auto` divides the model over the GPUs",
        )
    return clear(needs, available, "`auto` places even the unquantized model on one GPU; kb does not know max_memory")


def sizes_of(path: Path, bits: int) -> Tuple[float, float, float]:
    """Bytes of the weights: quantized with the experts of a MoE, quantized without them, and as stored."""
    least = most = stored = 0.0
    for file in files_of(path):
        for tensor in read_checkpoint(file).tensors:
            if tensor.dtype not in WIDTHS:
                raise Unreadable("%s has a weight that is not in 16 or 32 bits, but %s" % (file.name, tensor.dtype))
            number, expert = prod(tensor.shape), "expert" in tensor.name
            stored += number * WIDTHS[tensor.dtype]
            whole = any(word in tensor.name for word in EMBEDDINGS) or (len(tensor.shape) != 2 and not expert)
            least += number * (2 if whole else bits / 8)
            most += number * (WIDTHS[tensor.dtype] if whole or expert else bits / 8)
    return least, most, stored


def files_of(path: Path) -> List[Path]:
    """All files of a saved model. Raises `Unreadable` if one may be missing, since its weights would not count."""
    index = path / "model.safetensors.index.json"
    try:
        if index.exists():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        else:
            names = {"model.safetensors"}
        if not 0 < len(names) <= MOST_FILES:
            raise Unreadable("%s lists %d files" % (index, len(names)))
        return [path / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable("%s cannot be read: %r" % (index, error)) from None


def free_gib() -> Tuple[List[float], str]:
    """The free memory of each GPU that nvidia-smi lists, or why kb does not know it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()
    if visible in ("", "-1"):
        return [], "CUDA_VISIBLE_DEVICES hides all GPUs from processes that start here"
    query = ["nvidia-smi", "--query-gpu=memory.free,mig.mode.current", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=0.8, check=True).stdout
        rows = [line.split(",") for line in output.splitlines() if line.strip()]
        if any("Enabled" in row[1] for row in rows):
            return [], "MIG divides the GPUs, so kb does not know the free memory"
        if not all(row[0].strip().isdecimal() for row in rows):
            return [], "nvidia-smi does not report the free memory: %s" % rows[0][0]
        if rows and not all(name.strip().isdecimal() and int(name) < len(rows) for name in visible.split(",")):
            return [], "CUDA_VISIBLE_DEVICES=%s may name other GPUs than nvidia-smi lists" % visible
        return [int(row[0]) / 1024 for row in rows], "nvidia-smi lists no GPU"
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        return [], "kb cannot read the free memory from nvidia-smi: %s" % type(error).__name__


PLANNER = "the plan that transformers makes for one GPU"
CPU = "a GPU; the CPU is the device with a memory limit, and the disk takes the rest"
LOADER = Needs(packages={"torch": ">=2.4", "accelerate": ">=1.5", "transformers": ">=5.0", "bitsandbytes": ">=0.48"})
SPILLS = raised(CPU_REFUSED)
SMALL = "max_memory is smaller than the model, so `auto` puts layers on the CPU or disk"
LARGE = "max_memory is larger than the model, so `auto` puts all layers on the device"


def pair(
    name: str,
    fails: Callable[[Context], None],
    works: Callable[[Context], None],
    because: Tuple[str, str],
    expect: Expect = SPILLS,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(fails, expect, because[0], "stand-in", CPU),
        treatment=Arm(works, completed(), because[1], "stand-in", CPU),
        world_size=1,
        needs=LOADER,
        deadline_s=90,
        expected_s=(5.0, 5.0),
    )


limited = pair("limited", partial(load, budget=0.6), partial(load, budget=2.0), (SMALL, LARGE))

probe = Probe(
    check=check,
    params={
        "model": Param("path", "folder of the model, in safetensors"),
        "bits": Param("int", "bits of the quantized weights: 4 or 8", 4),
    },
    experiments=(
        limited.on_gpus(gpus=1, expected_s=(15.0, 15.0)),
        Experiment(
            name="margin",
            control=Arm(
                partial(plan, device_map="auto"),
                symptom(r"\d+ of 32 layers on the CPU; the model has \d+ MiB, free are \d+"),
                "`auto` plans with only 81 % of the free memory",
                "model",
                PLANNER,
            ),
            treatment=Arm(
                partial(plan, device_map="0"),
                completed(),
                "the map names the device, so it takes all layers",
                "model",
                PLANNER,
            ),
            world_size=1,
            needs=Needs(packages={}),
        ),
    ),
    variants=(
        limited,
        pair(
            "named",
            partial(load, budget=1.05),
            partial(load, budget=1.05, device_map="here"),
            (
                "`auto` has 5 % more memory than the model needs, but leaves more than that unused",
                "the map names the device, which takes the whole model",
            ),
        ),
        pair(
            "bits",
            partial(load, budget=1.6, bits=8),
            partial(load, budget=1.6, bits=4),
            ("8-bit weights do not fit into the memory", "4-bit weights fit into the same memory"),
        ),
        pair(
            "experts",
            partial(load, budget=1.5, kind="Mixtral", sizes={"num_local_experts": 8, "num_key_value_heads": 2}),
            partial(load, budget=1.5, sizes={"intermediate_size": 512}),
            (
                "all experts are one parameter, which bitsandbytes leaves in 16 bits",
                "as many weights are in linear layers, which bitsandbytes quantizes",
            ),
        ),
        pair(
            "skipped",
            partial(load, budget=2.0, cards=2, sizes={"vocab_size": 4096}),
            partial(load, budget=2.0, sizes={"vocab_size": 4096}),
            (
                "two GPUs share the memory, and the embedding is too large for one of them",
                "one GPU has all of the memory",
            ),
        ),
        pair(
            "offload",
            partial(load, budget=0.6, offload=True, trains=True),
            partial(load, budget=2.0, offload=True, trains=True),
            (
                "the job sets llm_int8_enable_fp32_cpu_offload, as the message advises, then trains",
                "the model fits, so nothing is offloaded",
            ),
            raised(OFFLOAD_REFUSED),
        ),
    ),
)
