"""ZeRO-3 shards only the parameter of a quantized layer, but bitsandbytes keeps 8-bit weights in an attribute too."""

import json
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping

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
    completed,
    exposed,
    symptom,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config

WIDTH = 128


def judge(held: int, full: int, share: float = 0.75) -> None:
    """Raises Symptom if a rank holds more than this share of the layer; sizes are in bytes.

    Between two forwards, a rank of two should hold about half of the weights in stage 3, and all of them in stage 2.
    """
    if held > share * full:
        raise Symptom("this rank holds %d bytes of a layer of %d bytes under ZeRO-3" % (held, full))


def partition(ctx: Context, *, copy: bool) -> None:
    """Replaces a parameter by its shard, which frees nothing while another attribute refers to the whole tensor."""
    import torch

    layer = torch.nn.Module()
    packed = torch.arange(WIDTH * WIDTH).to(torch.uint8)
    layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    if copy:
        layer.weight.CB = packed
    ctx.init_process_group(timeout_s=20)
    ctx.reached()
    layer.weight.data = packed.chunk(ctx.world_size)[ctx.rank].clone()
    parts = [torch.empty_like(layer.weight.data) for _ in range(ctx.world_size)]
    torch.distributed.all_gather(parts, layer.weight.data)
    assert torch.equal(torch.cat(parts), packed)
    tensors = (layer.weight.data, getattr(layer.weight, "CB", None))
    judge(sum(tensor.numel() for tensor in tensors if tensor is not None), packed.numel())


def train(ctx: Context, *, bits: int, stage: int = 3, storage: str = "uint8") -> None:
    """Trains a trainable layer before a quantized one in DeepSpeed's engine, as QLoRA does."""
    from kb.cpu_arms import import_deepspeed

    deepspeed = import_deepspeed()
    import bitsandbytes as bnb  # type: ignore[import-not-found]
    import torch

    torch.manual_seed(0)
    ctx.init_process_group(timeout_s=20)
    if bits == 8:
        base = bnb.nn.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False)
    else:
        options = {"compute_dtype": torch.bfloat16, "quant_storage": getattr(torch, storage)}
        base = bnb.nn.Linear4bit(WIDTH, WIDTH, bias=False, **options)
    base = base.to("cpu")  # this packs the weights
    base.weight.requires_grad_(False)
    packed = base.weight.data.view(torch.uint8).clone().flatten()
    full = packed.numel()
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False), base)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    }
    ctx.reached()
    engine = deepspeed.initialize(model=model, config=config)[0]
    with deepspeed.zero.GatheredParameters([base.weight] if stage == 3 else []):
        changed = int((base.weight.data.view(torch.uint8).flatten() != packed).sum())
    if changed:
        raise Symptom("%d of %d packed bytes are others after deepspeed.initialize" % (changed, full))
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
    losses = []
    for _ in range(3):
        loss = engine(x).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    weight, state = base.weight, getattr(base, "state", None)
    tensors = [weight.data, getattr(weight, "ds_tensor", None), getattr(weight, "CB", None), getattr(state, "CB", None)]
    storages = {
        t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in tensors if t is not None and t.numel()
    }
    judge(sum(storages.values()), full, 0.75 if stage == 3 else 1.0)


def save_fp8(folder: Path) -> None:
    """Turns the saved model into one in FP8, as some models are published."""
    import torch
    from safetensors.torch import load_file, save_file  # type: ignore[import-not-found]

    weights = load_file(str(folder / "model.safetensors"))
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name] = (weights[name] * 64).to(torch.float8_e4m3fn)
        weights[name + "_scale_inv"] = torch.full((1, 1), 1 / 64)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [WIDTH, WIDTH]}
    (folder / "config.json").write_text(json.dumps(config))


def load(ctx: Context, *, quantized: str) -> None:
    """Calls from_pretrained while a configuration of stage 3 exists; `quantized` says how the model is quantized."""
    from kb.cpu_arms import import_deepspeed

    import_deepspeed()
    import torch
    import transformers  # type: ignore[import-not-found]
    from transformers.integrations import HfDeepSpeedConfig  # type: ignore[import-not-found]

    make, folder = transformers.AutoModelForCausalLM, Path(ctx.path("model"))
    fp8 = {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)} if "fp8" in quantized else {}
    if ctx.rank == 0:
        sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "vocab_size": 64, "num_hidden_layers": 1}
        make.from_config(transformers.LlamaConfig(num_attention_heads=2, **sizes)).save_pretrained(folder)
        if fp8:
            save_fp8(folder)
        if quantized == "fp8, saved again":
            model = make.from_pretrained(folder, dtype=torch.bfloat16, **fp8)
            model.save_pretrained(folder / "again", save_original_format=False)
    ctx.meet("saved")
    ctx.init_process_group(timeout_s=20)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    stage_3 = HfDeepSpeedConfig(config)  # transformers reads it as long as this reference exists
    options = fp8
    if quantized == "fp8, saved again":
        folder, options = folder / "again", {}
        assert quantization(folder) is None
    elif quantized == "4bit":
        options = {"quantization_config": transformers.BitsAndBytesConfig(load_in_4bit=True)}
    ctx.reached()
    model = make.from_pretrained(folder, dtype=torch.bfloat16, **options)
    assert stage_3.is_zero3()
    weight = model.model.layers[0].mlp.up_proj.weight
    full = WIDTH * WIDTH // 2 if quantized == "4bit" else WIDTH * WIDTH * 2
    tensors = [weight.data, getattr(weight, "ds_tensor", None)]
    judge(sum(t.numel() * t.element_size() for t in tensors if t is not None), full)


def copy(ctx: Context, *, as_loaded: bool) -> None:
    """Loads an FP8 model as bfloat16, saves it, loads the copy and compares the weights."""
    import torch
    import transformers

    make, folder = transformers.AutoModelForCausalLM, Path(ctx.path("copy%d" % ctx.rank))
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "vocab_size": 64, "num_hidden_layers": 1}
    make.from_config(transformers.LlamaConfig(num_attention_heads=2, **sizes)).save_pretrained(folder)
    save_fp8(folder)
    model = make.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    ctx.reached()
    model.save_pretrained(folder / "again", **({"save_original_format": False} if as_loaded else {}))
    assert quantization(folder / "again") is None
    again = make.from_pretrained(folder / "again", dtype=torch.bfloat16)
    before, after = (float(one.model.layers[0].mlp.up_proj.weight.float().std()) for one in (model, again))
    if abs(after / before - 1) > 0.01:
        raise Symptom("the weights of the copy are %.0f times the weights of the model" % (after / before))
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, again.model.layers[0].mlp.up_proj.weight)


def quantization(model: Path) -> Any:
    """Returns the quantization_config in a model's config.json, or None. Raises UnreadableConfig."""
    try:
        path = model / "config.json" if model.is_dir() else model
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableConfig("kb cannot read %s: %s" % (model, str(error)[:120])) from None
    text = values.get("text_config") if isinstance(values, dict) else None
    sections = [part.get("quantization_config") for part in (values, text) if isinstance(part, dict)]
    return next((section for section in sections if section), None)


def stage_of(values: Mapping[str, Any]) -> Any:
    """Returns the ZeRO stage in a DeepSpeed JSON or an accelerate YAML, or None."""
    section = values.get("zero_optimization") or values.get("deepspeed_config") or {}
    return section.get("stage", section.get("zero_stage")) if isinstance(section, dict) else None


def check(params: Mapping[str, Any]) -> Finding:
    """Does the configuration use ZeRO stage 3 with a model that is saved quantized?"""
    if params["config"] is None:
        return unknown("no configuration was given", advice="run --set config=ds_config.json --set model=FOLDER")
    try:
        stage = stage_of(read_config(Path(params["config"])).values)
        section = quantization(Path(params["model"])) if params["model"] is not None else None
    except UnreadableConfig as error:
        return unknown(str(error))
    if stage is None:
        return unknown("the configuration names no ZeRO stage")
    if stage in (0, 1, 2) and not isinstance(stage, bool):
        why = "ZeRO stage %s does not shard parameters" % stage
        return unknown(why, "these files do not show whether 4-bit weights are packed in the float type of the engine")
    if stage != 3 or isinstance(stage, bool) or not isinstance(section, dict):
        return unknown(
            "ZeRO stage %s is set, but kb cannot see whether the script quantizes the model at loading" % stage
        )
    bits = [name for name in ("load_in_4bit", "load_in_8bit") if section.get(name)]  # older models name no method
    method = section.get("quant_method", "bitsandbytes" if bits else None)
    if not isinstance(method, str):
        return unknown("the model's quantization_config names no method")
    if method in ("mxfp4", "fp8") or (method == "bitsandbytes" and section.get("load_in_4bit")):
        return unknown("ZeRO stage 3 with %s: every rank loads the whole model, quantized or dequantized" % method)
    why = "ZeRO stage 3 is set, and the model is saved quantized: %s" % method
    return exposed(why, advice="use stage 2 with LoRA, or the unquantized model")


WHOLE = symptom(r"this rank holds \d+ bytes of a layer of \d+ bytes under ZeRO-3")
REAL = {"torch": ">=2.4", "deepspeed": ">=0.16", "bitsandbytes": ">=0.48"}
LOADER = {**REAL, "transformers": ">=5.0"}
FP8 = {"torch": ">=2.4", "deepspeed": ">=0.16", "transformers": ">=5.0"}
PACKS_AGAIN = {"torch": ">=2.4", "transformers": ">=5.10,<5.24"}  # 5.24 drops the conversion after it dequantized


def pair(
    name: str,
    fails: Callable[[Context], None],
    works: Callable[[Context], None],
    because: str,
    fix: str,
    packages: Any = REAL,
    expect: Expect = WHOLE,
    stands_for: str = "",
) -> Experiment:
    fidelity = "stand-in" if stands_for else "cpu"
    return Experiment(
        name=name,
        control=Arm(fails, expect, because, fidelity, stands_for),
        treatment=Arm(works, completed(), fix, fidelity, stands_for),
        needs=Needs(packages=packages, memory_mib=1500),
        deadline_s=60,
        expected_s=(1.0, 1.0) if stands_for else (7.0, 7.0),
    )


COPY, ALONE = (
    "another attribute refers to the whole tensor, as in 8-bit layers",
    "only the parameter refers to the packed weights, as in 4-bit layers",
)
TWICE = "a rank holds the whole 8-bit layer and its shard in stage 3"
ONCE = "a rank holds the whole 8-bit layer once in stage 2"
CAST, SAME = (
    "4-bit weights are packed as float16, and the engine casts them to bfloat16",
    "4-bit weights are packed as bfloat16, the dtype of the engine",
)
LATE, SHARDED = "the model is quantized while it is loaded", "the model is not quantized"
AGAIN = "one process has dequantized the model and saved it without quantization"
PACKED, FLOATS = (
    "save_pretrained packs the dequantized weights into FP8 again, but config.json does not say so",
    "save_original_format=False saves the dequantized weights",
)
WRONG = symptom(r"the weights of the copy are \d+ times the weights of the model")
OTHERS = symptom(r"\d+ of \d+ packed bytes are others after deepspeed.initialize")
STANDS_FOR = "the ZeRO-3 engine and layers of bitsandbytes; the probe shards one parameter itself"
half, bf16 = (partial(train, bits=4, storage=storage) for storage in ("float16", "bfloat16"))
packed, fp8, again, whole = (partial(load, quantized=how) for how in ("4bit", "fp8", "fp8, saved again", ""))
copied, alone = (partial(partition, copy=twice) for twice in (True, False))

probe = Probe(
    check=check,
    params={
        "config": Param("path", "your DeepSpeed JSON or accelerate YAML, for the check"),
        "model": Param("path", "the folder of your model, or its config.json, for the check"),
    },
    experiments=(pair("partition", copied, alone, COPY, ALONE, {"torch": ">=2.1"}, stands_for=STANDS_FOR),),
    variants=(
        pair(
            "deepspeed",
            partial(train, bits=8),
            partial(train, bits=4),
            "the layer is quantized to 8 bits",
            "the layer is quantized to 4 bits",
        ),
        pair("stage-2", partial(train, bits=8, stage=3), partial(train, bits=8, stage=2), TWICE, ONCE),
        pair("storage", half, bf16, CAST, SAME, expect=OTHERS),
        pair("storage-stage-2", partial(half, stage=2), partial(bf16, stage=2), CAST, SAME, expect=OTHERS),
        pair("loading", packed, whole, LATE, SHARDED, LOADER),
        pair("dequantized", fp8, again, "the model is saved in FP8, and from_pretrained dequantizes it", AGAIN, FP8),
        pair("copy", partial(copy, as_loaded=False), partial(copy, as_loaded=True), PACKED, FLOATS, PACKS_AGAIN, WRONG),
    ),
)
