"""A job calls FlashAttention on a GPU that it does not support, because of a setting that turns it on."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

from kb.host import compute_capabilities
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
    Unavailable,
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config

AMPERE = (8, 0)


def attend(ctx: Context, *, fallback: bool) -> None:
    """The script allows torch only the flash kernel, or others as well.

    On a CPU, `v` is narrower than `q` and `k`, which torch's flash kernel for the CPU does not support.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    dtype, width = torch.float32, 8
    if ctx.device.type == "cuda":
        dtype, width, capability = torch.float16, 16, torch.cuda.get_device_capability(ctx.device)
        if capability >= AMPERE:
            raise Unavailable(f"the flash kernel supports this GPU, which has compute capability {capability}")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, size, device=ctx.device, dtype=dtype) for size in (16, 16, width))
    ctx.reached()
    if not fallback:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            output = scaled_dot_product_attention(q, k, v)
    else:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            output = scaled_dot_product_attention(q, k, v)
    weights = (q.double() @ k.double().transpose(-1, -2) / 4).softmax(-1)
    assert torch.allclose(output.double(), weights @ v.double(), atol=5e-3)


def small_model(attn_implementation: str) -> Any:
    """A small Llama; its config may name `pinned`, an attention that allows only torch's flash kernel.

    The model has dropout in its attention, which torch's flash kernel for the CPU does not support.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # type: ignore[import-not-found]

    def flash_only(*args: Any, **options: Any) -> Any:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            return sdpa_attention_forward(*args, **options)

    AttentionInterface.register("pinned", flash_only)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 16)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2)
    config = LlamaConfig(**sizes, **heads, attention_dropout=0.1, attn_implementation=attn_implementation)
    return LlamaForCausalLM(config)


def forward(model: Any) -> None:
    """Runs the model once in training mode, so that dropout is on."""
    assert model.train()(model.lm_head.weight.new_zeros(1, 8).long()).logits.isfinite().all()


def from_config_file(ctx: Context, *, sdpa: bool, line: str = "attn_implementation") -> None:
    """Loads a model whose config.json requests flash attention under the key `line`; '' means without that line."""
    from transformers import AutoModelForCausalLM

    model_path, file = ctx.path("model"), Path(ctx.path("model"), "config.json")
    small_model("sdpa").save_pretrained(model_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), **({line: "pinned"} if line else {})}))
    ctx.reached()
    if sdpa:
        model = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="sdpa")
        capped = any(getattr(m, "attn_logit_softcapping", None) for m in model.modules())
        assert not capped, "sdpa may leave this out: take eager"
    else:
        model = AutoModelForCausalLM.from_pretrained(model_path)
    forward(model)
    assert model.config._attn_implementation == "sdpa"


def own_switch(ctx: Context, *, use_flash_attn: bool) -> None:
    """Makes a model that ignores attn_implementation for its inner model and uses its own switch, as InternVL did."""
    from transformers import PretrainedConfig, PreTrainedModel

    class ChatModel(PreTrainedModel):  # type: ignore[misc]
        config_class = PretrainedConfig
        _supports_sdpa = True

        def __init__(self, config: Any, use_flash_attn: bool = True) -> None:
            super().__init__(config)
            self.language_model = small_model("pinned" if use_flash_attn else "eager")
            self.post_init()

    ctx.reached()
    model = ChatModel._from_config(PretrainedConfig(), attn_implementation="sdpa", use_flash_attn=use_flash_attn)
    assert model.config._attn_implementation == "sdpa"
    forward(model.language_model)


def packed(ctx: Context, *, without_cache: bool) -> None:
    """Packs two samples of four tokens in one row, under sdpa: does the second one change with the first?"""
    import torch

    model = small_model("sdpa").eval()
    positions = torch.arange(4).repeat(2)[None]
    row, other = torch.arange(8)[None], torch.arange(8)[None]
    other[0, :4] += 8
    ctx.reached()
    options = {"use_cache": False} if without_cache else {}
    with torch.no_grad():
        outputs = [model(ids, position_ids=positions, **options).logits[0, 4:] for ids in (row, other)]
    change = (outputs[0] - outputs[1]).abs().max().item()
    if change > 0:
        raise Symptom(f"the second sample changes by {change:.1e} with the first, without an error")


SWITCH = re.compile(r"_?attn_impl(ementation)?(_internal)?|(use_)?flash_attn|(use_)?flash_attention(_2)?")


def requests(values: Mapping[str, Any], parent: str = "", named: bool = False) -> Iterator[str]:
    """The settings that turn FlashAttention on in a config.json or the arguments of a trainer, nested ones included."""
    for key, value in values.items():
        switch = named or bool(SWITCH.fullmatch(key))
        if isinstance(value, list):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, dict):
            yield from requests(value, f"{parent}{key}.", switch)
        elif switch and (value is True or re.search(r"^fa\d|flash|^true$", str(value).lower())):
            yield f"{parent}{key}: {value}"


def check(params: Mapping[str, Any]) -> Finding:
    """Do the GPUs of this node and the installed flash-attn support the attention that a configuration requests?"""
    found, version = compute_capabilities(params["capability"]), release("flash-attn")
    if not found:
        advice = "run this on the GPU node, or with --set capability=7.5"
        return unknown("nvidia-smi does not say which compute capability the GPUs have", advice=advice)
    values: dict[str, Any] = {}
    if params["config"] is not None:
        try:
            values = read_config(params["config"]).values
        except UnreadableConfig as error:
            return unknown(str(error))
    requested = list(requests(values))
    evidence = [
        "compute capability " + ", ".join(f"{major}.{minor}" for major, minor in sorted(set(found))),
        "flash-attn " + (".".join(map(str, version)) or "is not installed in this interpreter"),
        *(f"the configuration has {request}" for request in requested),
    ]
    if min(found) < AMPERE:
        if requested:
            advice = 'use attn_implementation="sdpa", and turn off the switch of the model\'s own code'
            return exposed(*evidence, advice=advice)
        return unknown(*evidence, "kb does not read whether the model's own code turns FlashAttention on")
    if max(found) > (9, 0):
        if version and version < (2, 7, 3):
            return exposed(*evidence, advice="install flash-attn 2.8.0 or newer, which supports GPUs above 9.0")
        return unknown(*evidence, "kb does not read copies of flash-attn in other packages, such as xformers")
    if any(re.search(r"3|4", request.rsplit(":", 1)[1]) for request in requested):
        return unknown(*evidence, "FlashAttention 3 and 4 have requirements of their own, which kb does not check")
    return clear(*evidence, "FlashAttention-2 runs on every GPU that nvidia-smi lists here")


Job = Callable[[Context], None]
NO_KERNEL = raised(r"No available kernel\. +Aborting execution")
NARROW = "a GPU below 8.0; the probe uses values of another width, which the CPU's flash kernel does not support"
DROPOUT = "flash_attention_2 on a GPU below 8.0; the probe uses dropout, which the CPU's flash kernel does not support"
QUIET = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def pair(name: str, jobs: tuple[Job, Job], because: tuple[str, str], needs: Needs, stands_for: str = "") -> Experiment:
    """An experiment whose control arm raises torch's `No available kernel`."""
    fidelity, env = ("stand-in", QUIET) if stands_for else ("hardware", {})
    return Experiment(
        name=name,
        control=Arm(jobs[0], NO_KERNEL, because[0], fidelity, stands_for, env),
        treatment=Arm(jobs[1], completed(), because[1], fidelity, stands_for, env),
        world_size=1,
        backend="gloo" if stands_for else "nccl",
        needs=needs,
        deadline_s=60,
        expected_s=(4.0, 4.0),
    )


PINNED = (partial(attend, fallback=False), partial(attend, fallback=True))
PINNED_BECAUSE = (
    "the script allows only the flash kernel, which cannot run here",
    "the script lets torch fall back to another kernel",
)
LIBRARY = Needs(packages={"torch": ">=2.4", "transformers": ">=5"})
library = partial(pair, needs=LIBRARY, stands_for=DROPOUT)
WITH_CACHE, WITHOUT_CACHE = partial(packed, without_cache=False), partial(packed, without_cache=True)
LEAK = symptom(r"the second sample changes by \S+ with the first, without an error")

probe = Probe(
    check=check,
    params={
        "config": Param("path", "config.json of the model, or the trainer's configuration"),
        "capability": Param("str", "compute capability of the job's GPUs; default: what nvidia-smi says", ""),
    },
    experiments=(
        pair("old-gpu", PINNED, PINNED_BECAUSE, Needs(gpus=1, packages={"torch": ">=2.3"})),
        pair("pinned", PINNED, PINNED_BECAUSE, Needs(packages={"torch": ">=2.3"}), NARROW),
    ),
    variants=(
        library(
            "config-file",
            (partial(from_config_file, sdpa=False), partial(from_config_file, sdpa=True)),
            ("config.json requests the flash kernel", "the argument requests sdpa, which overrides config.json"),
        ),
        library(
            "underscore",
            (
                partial(from_config_file, sdpa=True, line="_attn_implementation"),
                partial(from_config_file, sdpa=True, line=""),
            ),
            ("config.json has the name with the underscore, which overrides the argument", "the line was deleted"),
        ),
        library(
            "own-switch",
            (partial(own_switch, use_flash_attn=True), partial(own_switch, use_flash_attn=False)),
            ("the argument requests sdpa, but the model's own switch decides", "the model's own switch is off"),
        ),
        Experiment(
            name="packed",
            control=Arm(
                WITH_CACHE,
                LEAK,
                "the model uses a cache, so it makes no mask from the position ids",
                "cpu",
                env=QUIET,
            ),
            treatment=Arm(
                WITHOUT_CACHE,
                completed(),
                "use_cache=False, so the model masks the other sample",
                "cpu",
                env=QUIET,
            ),
            world_size=1,
            needs=LIBRARY,
            deadline_s=60,
            expected_s=(4.0, 4.0),
        ),
    ),
)
