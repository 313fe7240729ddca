"""A job requests bfloat16, but torch sees no GPU, or one without bfloat16 arithmetic."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, Dict, Mapping

from kb.cpu_arms import without_launcher
from kb.host import compute_capabilities
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    completed,
    exposed,
    raised,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config

AMPERE = (8, 0)
KEYS = ("bf16", "bf16_full_eval", "mixed_precision", "precision", "dtype", "torch_dtype", "bnb_4bit_compute_dtype")
PRINT = "in the job, run print(torch.cuda.is_available(), torch.cuda.get_device_capability())"


def autocast(ctx: Context, *, dtype: str) -> None:
    """Enters autocast while torch reports that the GPU has no bfloat16."""
    import torch

    torch.cuda.is_bf16_supported = lambda *_, **__: False
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    ctx.reached()
    with torch.autocast("cuda", dtype=getattr(torch, dtype)):
        assert torch.is_autocast_enabled()


def configure(ctx: Context, *, library: str, name: str, options: Dict[str, Any]) -> None:
    """Makes the arguments of a trainer while torch sees no GPU."""
    import torch

    assert not torch.cuda.is_available()
    without_launcher()
    arguments_class: Any = getattr(importlib.import_module(library), name)
    ctx.reached()
    arguments = arguments_class(output_dir=ctx.path("out"), report_to="none", **options)
    ctx.note(bf16=arguments.bf16, fp16=arguments.fp16)


def check(params: Mapping[str, Any]) -> Finding:
    """Do the GPUs of this node compute in bfloat16, and does the configuration request it?"""
    found = compute_capabilities(params["capability"])
    if not found:
        advice = "run this on the GPU node, or with --set capability=7.5"
        return unknown("nvidia-smi does not say which compute capability the GPUs have", advice=advice)
    listed = "compute capability " + ", ".join(f"{major}.{minor}" for major, minor in found)
    if found[0] >= AMPERE:  # only the job can tell whether torch sees them
        return unknown(listed, "all GPUs have bfloat16; if the job refuses it, torch sees no GPU", advice=PRINT)
    if found[-1] >= AMPERE:
        return unknown(listed, "the GPUs differ: below 8.0, torch refuses or emulates bfloat16", advice=PRINT)
    if params["config"] is None:
        return unknown(listed, "below 8.0, torch refuses or emulates bfloat16", advice="--set config=train.yaml")
    try:
        values = read_config(params["config"]).values
    except UnreadableConfig as error:
        return unknown(listed, str(error))
    requests = [f"{key}: {values[key]}" for key in KEYS if requests_bf16(values, key)]
    if requests and not any(str(values.get(key)).lower() in ("true", "yes") for key in ("use_cpu", "no_cuda")):
        advice = "set fp16: true and bf16: false"
        return exposed(listed, f"the configuration has {', '.join(requests)}", advice=advice)
    return unknown(listed, "the configuration names no bf16; kb does not read flags and defaults, such as TRL's")


def requests_bf16(values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key)
    if isinstance(value, dict):
        value = value.get("enabled")
    return str(value).lower() in ("true", "yes", "bf16", "bfloat16", "bf16-mixed", "bf16-true", "torch.bfloat16")


OLD_GPU = "a GPU below 8.0 and a torch without emulation; the probe makes is_bf16_supported return False"
NO_AUTOCAST = raised(r"Current CUDA Device does not support bfloat16\. Please switch dtype to float16")
NO_BF16 = raised(r"Your setup doesn't support bf16/gpu")
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def describe(options: Dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "its defaults"


def configured(
    name: str, library: str, arguments: str, bad: Dict[str, Any], good: Dict[str, Any], needs: Needs
) -> Experiment:
    job = partial(configure, library=library, name=arguments)
    because = f"the script makes {arguments} with {describe(bad)}, and torch sees no GPU"
    fix = f"the script makes {arguments} with {describe(good)}"
    return Experiment(
        name=name,
        control=Arm(partial(job, options=bad), NO_BF16, because, "cpu", "", NO_GPU),
        treatment=Arm(partial(job, options=good), completed(), fix, "cpu", "", NO_GPU),
        world_size=1,
        needs=needs,
        deadline_s=90,
        expected_s=(8, 8),
    )


TRANSFORMERS = Needs(packages={"torch": ">=2.2", "transformers": ">=4.52", "accelerate": ">=0.26"}, memory_mib=2048)
TRL = Needs(packages={**TRANSFORMERS.packages, "trl": ">=0.19"}, memory_mib=3072)

probe = Probe(
    check=check,
    params={
        "config": Param("path", "your accelerate YAML, DeepSpeed JSON, or the YAML of a trainer, for the check"),
        "capability": Param("str", "compute capability of the job's GPUs; default: what nvidia-smi says", ""),
    },
    experiments=(
        Experiment(
            name="autocast",
            control=Arm(
                partial(autocast, dtype="bfloat16"),
                NO_AUTOCAST,
                "the loop uses autocast in bfloat16, which the GPU does not support",
                "stand-in",
                OLD_GPU,
            ),
            treatment=Arm(
                partial(autocast, dtype="float16"),
                completed(),
                "the loop uses autocast in float16",
                "stand-in",
                OLD_GPU,
            ),
            world_size=1,
            expected_s=(0.3, 0.3),
        ),
    ),
    variants=(
        configured(
            "no-gpu", "transformers", "TrainingArguments", {"bf16": True}, {"bf16": True, "use_cpu": True}, TRANSFORMERS
        ),
        configured("off", "transformers", "TrainingArguments", {"bf16": True}, {"bf16": False}, TRANSFORMERS),
        configured("trl-default", "trl", "SFTConfig", {}, {"bf16": False}, TRL),
    ),
)
