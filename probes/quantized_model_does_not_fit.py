"""`device_map="auto"` plans a quantized model for less memory than is free, and gives the rest to CPU or disk."""

import json
import os
import subprocess
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Tuple

from kb.checkpoint import Unreadable, read_checkpoint
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

REFUSED = r"Some modules are dispatched on the CPU or the disk\. Make sure you have enough GPU RAM to fit the quantized"
OFFLOADED = r"You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk offload"
ALONE, QUANTIZED = 0.9, 0.9  # what `auto` leaves free on a single GPU, and bitsandbytes on top of it
EMBEDDING, LAYER, LAYERS = 1002, 104, 32  # MiB of an 8B model in 4-bit; two embeddings stay in 16 bits
GIB = 1 << 30
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes; other dtypes are of a model that is saved quantized
EMBEDDINGS = ("embed", "lm_head", "wte", "wpe")
MOST_FILES = 40  # a check has a second
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "vocab_size": 32, "num_hidden_layers": 4}


def plan(ctx: Context, *, device_map: str) -> None:
    """How many layers `auto` finds room for on a card that could hold them all; a named device takes all."""
    size, free = 2 * EMBEDDING + LAYERS * LAYER, 5800
    budget = free * ALONE * QUANTIZED if device_map == "auto" else free
    ctx.reached()
    placed = min(LAYERS, int((budget - 2 * EMBEDDING) // LAYER))
    if placed < LAYERS:
        raise Symptom(
            "%d of %d layers on the CPU; the model has %d MiB, free are %d" % (LAYERS - placed, LAYERS, size, free)
        )
    assert placed == LAYERS and size <= free


def save(ctx: Context, kind: str, **sizes: int) -> int:
    """Make a small model, and return its bytes with linear layers in 4 bits and all else in 16."""
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
    """from_pretrained with so many times the memory that the model takes in 4 bits, on one device or several."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    here: Any = ctx.device.index if ctx.device.type == "cuda" else "cpu"
    room = int(budget * save(ctx, kind, **sizes))
    memory: Dict[Any, int] = {here: room, **({"cpu": GIB} if here != "cpu" else {})}
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
        **({"device_map": "auto", "max_memory": memory} if device_map == "auto" else {"device_map": {"": here}}),
    )
    if trains:
        from accelerate import Accelerator  # type: ignore[import-not-found]

        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)  # one process without a launcher
        Accelerator(cpu=here == "cpu").prepare_model(model)
    weight = model.model.layers[-1].self_attn.q_proj.weight
    assert weight.dtype == torch.uint8 and weight.device.type == ctx.device.type, weight.device
    assert model.get_memory_footprint() <= room, model.get_memory_footprint()


# --- the check: do the free bytes of the GPUs suffice for the plan of `auto`? -----------------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """Compare what a model takes in 4 or 8 bits with what is free now, less what `auto` does not use."""
    if params["model"] is None:
        return unknown("the model was not given", advice="--set model=/path/of/the/folder --set bits=4")
    if params["bits"] not in (4, 8):
        return unknown("bits is 4 or 8")
    ranks = max(1, ranks_here(None)[0])
    try:
        least, most, stored = (size * ranks / GIB for size in sizes_of(params["model"], params["bits"]))
    except Unreadable as error:
        return unknown(str(error))
    free, why = free_gib()
    needs = "%d x the model in %d bits: %.2f GiB, %.2f with the experts of a MoE in 16" % (
        ranks,
        params["bits"],
        least,
        most,
    )
    if not free:
        return unknown(needs, why)
    seen = "free now: %s GiB" % ", ".join("%.2f" % card for card in free)
    if least > sum(free):
        return exposed(needs, seen, advice="4-bit, a free card, more cards, or a smaller model")
    share = QUANTIZED * (ALONE if len(free) == 1 else 1)
    if least > sum(free) * share:
        used = "`auto` uses %.0f %% of it at most" % (100 * share)
        return exposed(
            needs,
            seen,
            used,
            advice='name the device of each rank: device_map={"": int(os.environ.get("LOCAL_RANK", 0))}',
        )
    if stored > min(free) * ALONE * QUANTIZED:
        return unknown(
            needs, seen, "max_memory, modules to skip and the division over several cards are not known here"
        )
    return clear(needs, seen, "even unquantized it is planned for one card; max_memory is not known here")


def sizes_of(path: Path, bits: int) -> Tuple[float, float, float]:
    """Bytes of the weights: quantized with the experts of a MoE, quantized without them, and as they are stored."""
    least = most = stored = 0.0
    for file in files_of(path):
        for tensor in read_checkpoint(file).tensors:
            if tensor.dtype not in WIDTHS:
                raise Unreadable("%s is not a model in 16 or 32 bits: %s" % (file.name, tensor.dtype))
            number, expert = prod(tensor.shape), "expert" in tensor.name
            stored += number * WIDTHS[tensor.dtype]
            whole = any(word in tensor.name for word in EMBEDDINGS) or (len(tensor.shape) != 2 and not expert)
            least += number * (2 if whole else bits / 8)
            most += number * (WIDTHS[tensor.dtype] if whole or expert else bits / 8)
    return least, most, stored


def files_of(path: Path) -> List[Path]:
    """All files of a saved model. Raises `Unreadable` where a part may be missing, which would count too little."""
    index = path / "model.safetensors.index.json"
    try:
        if index.exists():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        else:
            names = {"model.safetensors"}
        if not 0 < len(names) <= MOST_FILES:
            raise Unreadable("%s names %d files" % (index, len(names)))
        return [path / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable("%s cannot be read: %r" % (index, error)) from None


def free_gib() -> Tuple[List[float], str]:
    """What is free on each GPU that nvidia-smi lists, or why nobody can say."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()
    if visible in ("", "-1"):
        return [], "CUDA_VISIBLE_DEVICES hides all GPUs from a process that is started here"
    query = ["nvidia-smi", "--query-gpu=memory.free,mig.mode.current", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=0.8, check=True).stdout
        rows = [line.split(",") for line in output.splitlines() if line.strip()]
        if any("Enabled" in row[1] for row in rows):
            return [], "MIG divides the GPUs"
        if not all(row[0].strip().isdecimal() for row in rows):
            return [], "nvidia-smi does not know what is free: %s" % rows[0][0]
        if rows and not all(name.strip().isdecimal() and int(name) < len(rows) for name in visible.split(",")):
            return [], "CUDA_VISIBLE_DEVICES=%s may name other GPUs than nvidia-smi lists" % visible
        return [int(row[0]) / 1024 for row in rows], "nvidia-smi lists no GPU"
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        return [], "nvidia-smi does not tell the free memory: %s" % type(error).__name__


PLANNER = "the plan of transformers on one GPU"
CPU = "a GPU: the CPU is the device with the limit, and the disk is what is left"
LOADER = Needs(packages={"torch": ">=2.4", "accelerate": ">=1.5", "transformers": ">=5.0", "bitsandbytes": ">=0.48"})
SPILLS = raised(REFUSED)
SMALL, LARGE = "max_memory is below the size of the model", "max_memory is above it"


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
        "model": Param("path", "the folder of the model, in safetensors"),
        "bits": Param("int", "4 or 8", 4),
    },
    experiments=(
        limited.on_gpus(gpus=1, expected_s=(15.0, 15.0)),
        Experiment(
            name="margin",
            control=Arm(
                partial(plan, device_map="auto"),
                symptom(r"\d+ of 32 layers on the CPU; the model has \d+ MiB, free are \d+"),
                "`auto` plans with 81 % of what is free",
                "model",
                PLANNER,
            ),
            treatment=Arm(partial(plan, device_map="0"), completed(), "the device is named", "model", PLANNER),
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
            ("`auto`, and 5 % more memory than the model takes", "the device is named, and the model takes less"),
        ),
        pair(
            "bits",
            partial(load, budget=1.6, bits=8),
            partial(load, budget=1.6, bits=4),
            ("8-bit", "4-bit with the same memory"),
        ),
        pair(
            "experts",
            partial(load, budget=1.5, kind="Mixtral", sizes={"num_local_experts": 8, "num_key_value_heads": 2}),
            partial(load, budget=1.5, sizes={"intermediate_size": 512}),
            ("the experts are one parameter, and stay in 16 bits", "as many weights in linear layers"),
        ),
        pair(
            "skipped",
            partial(load, budget=2.0, cards=2, sizes={"vocab_size": 4096}),
            partial(load, budget=2.0, sizes={"vocab_size": 4096}),
            ("two cards have the memory together, and an embedding that is large for one", "one has it alone"),
        ),
        pair(
            "offload",
            partial(load, budget=0.6, offload=True, trains=True),
            partial(load, budget=2.0, offload=True, trains=True),
            ("llm_int8_enable_fp32_cpu_offload, as the message says", "the model fits"),
            raised(OFFLOADED),
        ),
    ),
)
