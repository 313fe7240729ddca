"""A script passes from_pretrained a device map, or low_cpu_mem_usage, for a model that ZeRO-3 should shard."""

from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

WIDTH = 64
REFUSED = raised(r"DeepSpeed Zero-3 is not compatible with (`low_cpu_mem_usage=True` or with )?passing a `device_map`")
REQUIRED = raised(r"Passing along a `device_map`( or a `tp_plan`)? requires `low_cpu_mem_usage=True`")
WHOLE = symptom(r"this rank holds \d+ of the \d+ numbers of a layer under ZeRO-3")


def prepare(ctx: Context) -> Any:
    """Saves a small model, joins the group, and returns the class whose from_pretrained loads the model."""
    from kb.cpu_arms import import_deepspeed

    import_deepspeed()
    import transformers  # type: ignore[import-not-found]

    make, sizes = transformers.AutoModelForCausalLM, {"hidden_size": WIDTH, "intermediate_size": WIDTH}
    if ctx.rank == 0:
        config = transformers.LlamaConfig(num_attention_heads=2, num_hidden_layers=1, vocab_size=WIDTH, **sizes)
        make.from_config(config).save_pretrained(ctx.path("model"))
    ctx.meet("saved")
    ctx.init_process_group(timeout_s=20)
    return make


def register_config() -> Any:
    """Makes ZeRO-3 known to transformers while the returned object lives, as TrainingArguments and Accelerator do."""
    from transformers.integrations import HfDeepSpeedConfig  # type: ignore[import-not-found]

    return HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})


def layer(model: Any) -> Any:
    return model.model.layers[0].mlp.up_proj.weight


def judge(ctx: Context, model: Any) -> None:
    """Raises `Symptom` if a rank holds a whole layer; asserts that both ranks together have the saved values."""
    import deepspeed  # type: ignore[import-not-found]
    import torch
    from safetensors.torch import load_file  # type: ignore[import-not-found]

    weight = layer(model)
    held = sum(part.numel() for part in (weight.data, getattr(weight, "ds_tensor", None)) if part is not None)
    if held > 0.75 * WIDTH * WIDTH:
        raise Symptom("this rank holds %d of the %d numbers of a layer under ZeRO-3" % (held, WIDTH * WIDTH))
    saved = load_file(str(Path(ctx.path("model")) / "model.safetensors"))["model.layers.0.mlp.up_proj.weight"]
    with deepspeed.zero.GatheredParameters([weight]):
        assert torch.equal(weight.data, saved)


def load(ctx: Context, **arguments: Any) -> None:
    """Calls from_pretrained with these arguments while transformers knows a configuration of stage 3."""
    make = prepare(ctx)
    kept = register_config()
    ctx.reached()
    model = make.from_pretrained(
        ctx.path("model"), **{key: value for key, value in arguments.items() if value is not None}
    )
    assert kept.is_zero3()
    judge(ctx, model)


def load_quantized(ctx: Context, *, device_map: Any) -> None:
    """Quantizes a model while loading it under stage 3; without a device map, the loader chooses the device."""
    make = prepare(ctx)
    from transformers import BitsAndBytesConfig

    kept = register_config()
    ctx.reached()
    model = make.from_pretrained(
        ctx.path("model"), device_map=device_map, quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )
    assert kept.is_zero3() and layer(model).data.dtype == layer(model).quant_storage


def load_by_flag(ctx: Context, *, device_map: Any, flag: bool) -> None:
    """Does what Accelerator does with a DeepSpeed plugin whose zero3_init_flag is false, or true and switched off."""
    make = prepare(ctx)
    from accelerate import DeepSpeedPlugin  # type: ignore[import-not-found]

    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 3}}
    plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=flag)
    plugin.set_deepspeed_weakref()
    ctx.reached()
    with plugin.zero3_init_context_manager(enable=False):
        model = make.from_pretrained(ctx.path("model"), device_map=device_map)
    judge(ctx, model)


def load_in_order(ctx: Context, *, config_first: bool) -> None:
    """Loads with a map before transformers knows the configuration, or without a map afterwards."""
    make = prepare(ctx)
    ctx.reached()
    if config_first:
        kept = register_config()
        model = make.from_pretrained(ctx.path("model"))
    else:
        model = make.from_pretrained(ctx.path("model"), device_map={"": "cpu"})
        kept = register_config()
    assert kept.is_zero3()
    judge(ctx, model)


def load_second(ctx: Context, *, unregistered: bool) -> None:
    """Loads a second model, which is not trained, with a device map, and shards the model that is trained."""
    make = prepare(ctx)
    from transformers.integrations.deepspeed import (  # type: ignore[import-not-found]
        set_hf_deepspeed_config,
        unset_hf_deepspeed_config,
    )

    folder, kept = ctx.path("model"), register_config()
    ctx.reached()
    if unregistered:
        unset_hf_deepspeed_config()
        try:
            judge_model = make.from_pretrained(folder, device_map={"": "cpu"})
        finally:
            set_hf_deepspeed_config(kept)
    else:
        judge_model = make.from_pretrained(folder, device_map={"": "cpu"})
    model = make.from_pretrained(folder)
    assert layer(judge_model).numel() == WIDTH * WIDTH
    judge(ctx, model)


ALL = {"torch": ">=2.4", "deepspeed": ">=0.16", "transformers": ">=4.50", "safetensors": ""}
OLD, NEW = {**ALL, "transformers": ">=4.50,<4.51"}, {**ALL, "transformers": ">=4.51"}
BITS = {**ALL, "transformers": ">=5.0", "bitsandbytes": ">=0.48"}
PLAN = {**ALL, "transformers": ">=4.50,<5.25"}  # transformers has deprecated the argument


def pair(
    name: str,
    job: Callable[..., None],
    keyword: str,
    values: Any,
    because: str,
    fix: str = "without the argument, the loader shards the model and each rank has its half",
    packages: Mapping[str, str] = ALL,
    expect: Expect = REFUSED,
) -> Experiment:
    """`keyword` has the first of `values` in the control arm and the second in the treatment."""
    control, treatment = (partial(job, **{keyword: value}) for value in values)
    return Experiment(
        name=name,
        control=Arm(control, expect, because, "cpu"),
        treatment=Arm(treatment, completed(), fix, "cpu"),
        needs=Needs(packages=packages, memory_mib=1500),
        deadline_s=120,
        expected_s=(8.0, 8.0),
    )


FALSE = partial(load, low_cpu_mem_usage=False)
AUTO, ONE = ("auto", None), ({"": 0}, None)
FLAG, SWITCH = partial(load_by_flag, flag=False), partial(load_by_flag, flag=True)
PLUGIN = {**ALL, "accelerate": ">=1.0"}
DISCARDED = "transformers ignores low_cpu_mem_usage=False, so it still refuses the device map"
NEEDS_TRUE = "transformers 4.50 accepts a device map only with low_cpu_mem_usage=True"
EMPTY_WEIGHTS = "low_cpu_mem_usage=True creates empty weights, which transformers refuses under ZeRO-3"
PLAN_IS_MAP = "transformers makes a device map from the tensor-parallel plan, and ZeRO-3 refuses it"
FOUR_BIT = "the device map names the GPU of the rank, and ZeRO-3 refuses every map"
CHOSEN = "without a device map, the loader gives bitsandbytes the device of the process"
NO_INIT = "zero3_init_flag is false, but accelerate still makes the configuration known to transformers"
SWITCHED_OFF = "the init context is switched off, but transformers still knows the configuration"
LATE = "transformers gets the configuration after the model, which is therefore whole on each rank"
SECOND = "the ZeRO-3 configuration applies to every load of the process, also to the second model"
UNREGISTERED = "the script removes the configuration while it loads the second model"

probe = Probe(
    experiments=(pair("device-map", load, "device_map", AUTO, "from_pretrained gets device_map='auto' under ZeRO-3"),),
    variants=(
        pair("one-device", load, "device_map", ONE, "a device map with a single entry is a map, too"),
        pair("false", FALSE, "device_map", AUTO, DISCARDED, packages=NEW),
        pair("false-old", FALSE, "device_map", AUTO, NEEDS_TRUE, packages=OLD, expect=REQUIRED),
        pair("low-cpu", load, "low_cpu_mem_usage", (True, None), EMPTY_WEIGHTS, packages=OLD),
        pair("tp-plan", load, "tp_plan", AUTO, PLAN_IS_MAP, packages=PLAN),
        pair("four-bit", load_quantized, "device_map", ONE, FOUR_BIT, CHOSEN, packages=BITS),
        pair("init-flag", FLAG, "device_map", ONE, NO_INIT, packages=PLUGIN),
        pair("init-context", SWITCH, "device_map", ONE, SWITCHED_OFF, packages=PLUGIN),
        pair(
            "order",
            load_in_order,
            "config_first",
            (False, True),
            LATE,
            "transformers knows the configuration before the load, so each rank has its half",
            expect=WHOLE,
        ),
        pair("second-model", load_second, "unregistered", (False, True), SECOND, UNREGISTERED),
    ),
)
