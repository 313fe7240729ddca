"""A quantized model is not completely on the GPU where its rank trains, or is cast after it was loaded."""

import os
from functools import partial
from typing import Any, Callable, Mapping

from kb.cpu_arms import without_launcher
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

OTHER_DEVICE = (
    r"You can't train a model that has been loaded in 8-bit (or 4-bit )?precision on a different device than the one"
)
SPREAD = r"You can't train a model that has been loaded in 8-bit (or 4-bit )?precision on multiple devices"
OFFLOADED = r"Some modules are dispatched on the CPU or the disk"
CAST = r"You cannot cast a bitsandbytes model in a new `dtype`"


def prepare(ctx: Context, *, own_gpu: bool) -> None:
    """Calls Accelerator.prepare_model on two ranks, with the attributes that the loader sets on an 8-bit model."""
    import torch
    from accelerate import Accelerator  # type: ignore[import-not-found]

    ctx.init_process_group(timeout_s=20)
    on_gpus, index = ctx.device.type == "cuda", ctx.rank if own_gpu else 0
    set_launch_variables(ctx)
    model = torch.nn.Linear(4, 4, device=torch.device("cuda", index) if on_gpus else "cpu")
    model.is_loaded_in_8bit = True
    model.hf_device_map = {"": index}
    accelerator = Accelerator(cpu=not on_gpus)
    assert accelerator.device == torch.device("cuda", ctx.rank), accelerator.device
    ctx.reached()
    prepared = accelerator.prepare_model(model, evaluation_mode=not on_gpus)  # no DDP without GPUs
    assert prepared(torch.ones(2, 4, device=model.weight.device)).shape == (2, 4)


def prepare_alone(ctx: Context, *, on_first: bool) -> None:
    """Calls Accelerator.prepare_model in a single process, whose device is `cuda` without an index."""
    import torch
    from accelerate import Accelerator

    without_launcher()
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cuda"
    model = torch.nn.Linear(4, 4)
    model.is_loaded_in_4bit = True
    model.hf_device_map = {"": 0 if on_first else 3}
    accelerator = Accelerator(cpu=True)
    assert accelerator.device == torch.device("cuda"), accelerator.device
    ctx.reached()
    assert accelerator.prepare_model(model, evaluation_mode=True) is model


def set_launch_variables(ctx: Context) -> None:
    """Sets the variables of torchrun, and without a GPU the name of the device that accelerate shall use."""
    rank, size = str(ctx.rank), str(ctx.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    if ctx.device.type != "cuda":
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cuda:" + rank


def bypass(ctx: Context, *, whole: bool) -> None:
    """Calls prepare_model with accelerate's check of device maps off; the check of quantized models stays on."""
    import torch
    from accelerate import Accelerator

    ctx.init_process_group(timeout_s=20)
    set_launch_variables(ctx)
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model.is_loaded_in_4bit = True
    model.hf_device_map = {"": ctx.rank} if whole else {"0": 0, "1": 1}
    accelerator = Accelerator(cpu=True)
    ctx.reached()
    assert accelerator.prepare_model(model, evaluation_mode=True) is model


def cast(ctx: Context, *, at_load: bool) -> None:
    """Casts 4-bit weights that are packed in bfloat16: the cast converts them as if they were numbers."""
    import torch

    packed = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)  # every pattern of 16 bits
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(packed.view(torch.bfloat16), requires_grad=False)
    layer.norm = torch.nn.LayerNorm(4, dtype=torch.float16 if at_load else torch.bfloat16)
    ctx.reached()
    if not at_load:
        layer.to(torch.float16)
    assert layer.norm.weight.dtype == torch.float16
    changed = int((layer.weight.detach().to(torch.bfloat16).view(torch.int16) != packed).sum())
    if changed:
        raise Symptom("the cast changed %d of 65536 packed values" % changed)


def load(ctx: Context, storage: str = "uint8", **arguments: Any) -> Any:
    """Saves a model of two layers, and loads it in 4-bit with transformers and bitsandbytes."""
    import torch
    from transformers import (  # type: ignore[import-not-found]
        AutoModelForCausalLM,
        BitsAndBytesConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 32, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).save_pretrained(ctx.path("model"))
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, bnb_4bit_quant_storage=storage
    )
    ctx.reached()
    model = AutoModelForCausalLM.from_pretrained(ctx.path("model"), quantization_config=quantization, **arguments)
    assert model.model.layers[1].mlp.up_proj.weight.dtype == getattr(torch, storage), "not quantized"
    return model


PARTS = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.0")


def place(ctx: Context, *, device_map: Mapping[str, str]) -> None:
    """Loads with a map like that of `auto` for a model that does not fit; the CPU stands for the GPU."""
    model = load(ctx, device_map=device_map)
    assert not hasattr(model, "hf_device_map"), "transformers 5 does not keep a map of one device"


def set_dtype(ctx: Context, *, at_load: bool) -> None:
    """Sets the dtype of the unquantized weights in from_pretrained (`at_load`), or by a cast afterwards."""
    import torch

    model = load(ctx, device_map={"": "cpu"}, **({"dtype": torch.bfloat16} if at_load else {}))
    if not at_load:
        model = model.to(torch.bfloat16)
    assert model.model.norm.weight.dtype == torch.bfloat16


def wrap(ctx: Context, *, at_load: bool) -> None:
    """Casts a PeftModel: its own `.to` casts weights that the model inside would refuse to cast."""
    import torch
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

    model = load(ctx, "bfloat16", device_map={"": "cpu"}, **({"dtype": torch.float16} if at_load else {}))
    layer = model.model.layers[1].mlp.up_proj
    packed = layer.weight.detach().view(torch.uint8).clone()
    wrapper = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    if not at_load:
        wrapper.to(torch.float16)
    assert model.model.norm.weight.dtype == torch.float16
    changed = int((layer.weight.detach().view(torch.uint8) != packed).sum())
    if changed:
        raise Symptom("the cast changed %d of %d packed bytes" % (changed, packed.numel()))


MARKED = (
    "a bitsandbytes model on two GPUs; a layer has the attributes that its loader sets, and devices only have names"
)
PACKED = "4-bit weights of bitsandbytes with bnb_4bit_quant_storage=torch.bfloat16"
ON_0, OWN = "every rank has loaded its copy on GPU 0", "every rank has loaded its copy on its own GPU"


def pair(
    name: str,
    job: Callable[..., None],
    keyword: str,
    expect: Expect,
    because: Any,
    packages: Mapping[str, str],
    values: Any = (False, True),
    ranks: int = 1,
    stands_for: str = "",
    seconds: float = 1.0,
) -> Experiment:
    """The argument `keyword` has the first of `values` in the control arm and the second in the treatment."""
    fidelity = "stand-in" if stands_for else "cpu"
    control, treatment = (partial(job, **{keyword: value}) for value in values)
    return Experiment(
        name=name,
        control=Arm(control, expect, because[0], fidelity, stands_for),
        treatment=Arm(treatment, completed(), because[1], fidelity, stands_for),
        world_size=ranks,
        needs=Needs(packages=packages),
        deadline_s=90,
        expected_s=(seconds, seconds),
    )


# accelerate below 1.13 uses torch.device(0), which builds of torch without GPU support refuse.
ACCELERATE = {"torch": ">=2.2", "accelerate": ">=1.13"}
ON_GPUS = Needs(packages={"torch": ">=2.2", "accelerate": ">=1.0"}, gpus=2, gpu_memory_mib=1024)
LOADER = {"torch": ">=2.4", "accelerate": ">=1.0", "transformers": ">=5.0", "bitsandbytes": ">=0.50"}
placed = pair(
    "accelerate", prepare, "own_gpu", raised(OTHER_DEVICE), (ON_0, OWN), ACCELERATE, ranks=2, stands_for=MARKED
)

probe = Probe(
    experiments=(
        placed.on_gpus(expected_s=(20.0, 20.0), needs=ON_GPUS),
        placed,
        pair(
            "cast",
            cast,
            "at_load",
            symptom(r"the cast changed \d+ of 65536 packed values"),
            (
                "the whole module is cast, with its packed weights",
                "the weights that are not packed are created with the dtype",
            ),
            {"torch": ">=2.2"},
            stands_for=PACKED,
        ),
    ),
    variants=(
        pair(
            "one-process",
            prepare_alone,
            "on_first",
            raised(OTHER_DEVICE),
            ("the only process has loaded the model on GPU 3", "the only process has loaded the model on its GPU 0"),
            ACCELERATE,
            stands_for=MARKED.replace("two GPUs", "one of several GPUs"),
        ),
        pair(
            "bypass",
            bypass,
            "whole",
            raised(SPREAD),
            (
                "the model is spread over two GPUs, and ACCELERATE_BYPASS_DEVICE_MAP=true does not help",
                "every rank has a whole copy on its own GPU",
            ),
            ACCELERATE,
            ranks=2,
            stands_for=MARKED,
        ),
        pair(
            "offload",
            place,
            "device_map",
            raised(OFFLOADED),
            ("the device map puts one layer on the disk", "the device map puts all layers on one device"),
            LOADER,
            values=({**dict.fromkeys(PARTS, "cpu"), "model.layers.1": "disk"}, {"": "cpu"}),
            seconds=8.0,
        ),
        pair(
            "dtype",
            set_dtype,
            "at_load",
            raised(CAST),
            ("the model is cast after it was loaded", "the dtype is passed to from_pretrained"),
            LOADER,
            seconds=8.0,
        ),
        pair(
            "wrapper",
            wrap,
            "at_load",
            symptom(r"the cast changed \d+ of \d+ packed bytes"),
            ("the PeftModel around the model is cast after loading", "the dtype is passed to from_pretrained"),
            {**LOADER, "peft": ">=0.18"},
            seconds=8.0,
        ),
    ),
)
