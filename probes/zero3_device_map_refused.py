"""from_pretrained is asked to place a model by a map, or piece by piece, while ZeRO-3 is to shard it."""

from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

WIDTH = 64
REFUSED = raised(r"DeepSpeed Zero-3 is not compatible with (`low_cpu_mem_usage=True` or with )?passing a `device_map`")
REQUIRED = raised(r"Passing along a `device_map`( or a `tp_plan`)? requires `low_cpu_mem_usage=True`")
WHOLE = symptom(r"this rank holds \d+ of the \d+ numbers of a layer under ZeRO-3")


def prepare(ctx: Context) -> Any:
    """The class that loads a model, for its path of a checkpoint, on two ranks with DeepSpeed for the CPU."""
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


def known() -> Any:
    """What TrainingArguments and Accelerator do, too: transformers knows the configuration while this object lives."""
    from transformers.integrations import HfDeepSpeedConfig  # type: ignore[import-not-found]

    return HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})


def layer(model: Any) -> Any:
    return model.model.layers[0].mlp.up_proj.weight


def judge(ctx: Context, model: Any) -> None:
    """A rank of two holds half of a layer, and together they have the values of the checkpoint."""
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
    """from_pretrained with these arguments, while a configuration of stage 3 is known."""
    make = prepare(ctx)
    kept = known()
    ctx.reached()
    model = make.from_pretrained(
        ctx.path("model"), **{key: value for key, value in arguments.items() if value is not None}
    )
    assert kept.is_zero3()
    judge(ctx, model)


def load_quantized(ctx: Context, *, device_map: Any) -> None:
    """A model that is quantized at loading, under stage 3: the loader has a place for it when none is given."""
    make = prepare(ctx)
    from transformers import BitsAndBytesConfig

    kept = known()
    ctx.reached()
    model = make.from_pretrained(
        ctx.path("model"), device_map=device_map, quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )
    assert kept.is_zero3() and layer(model).data.dtype == layer(model).quant_storage


def load_by_flag(ctx: Context, *, device_map: Any, flag: bool) -> None:
    """What Accelerator does with a DeepSpeed plugin whose zero3_init_flag is false, or is true and switched off."""
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
    """Before the configuration is known a map is accepted; behind it the model is loaded without one."""
    make = prepare(ctx)
    ctx.reached()
    if config_first:
        kept = known()
        model = make.from_pretrained(ctx.path("model"))
    else:
        model = make.from_pretrained(ctx.path("model"), device_map={"": "cpu"})
        kept = known()
    assert kept.is_zero3()
    judge(ctx, model)


def load_second(ctx: Context, *, aside: bool) -> None:
    """A model that is not trained gets a place of its own; the one that is trained is sharded."""
    make = prepare(ctx)
    from transformers.integrations.deepspeed import (  # type: ignore[import-not-found]
        set_hf_deepspeed_config,
        unset_hf_deepspeed_config,
    )

    folder, kept = ctx.path("model"), known()
    ctx.reached()
    if aside:
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
PLAN = {**ALL, "transformers": ">=4.50,<5.25"}  # the argument is deprecated


def pair(
    name: str,
    job: Callable[..., None],
    keyword: str,
    values: Any,
    because: str,
    fix: str = "the loader places nothing, and each rank has its shard",
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
UNASKED = "bitsandbytes is given the device of the process by the loader"
FLAG, SWITCH = partial(load_by_flag, flag=False), partial(load_by_flag, flag=True)
PLUGIN, KNOWN = {**ALL, "accelerate": ">=1.0"}, "accelerate makes the configuration known to transformers all the same"
LATE = "the configuration comes after the model, which is whole on each rank"
SECOND, ASIDE = "the configuration holds for each load of the process", "no configuration is known while it is loaded"

probe = Probe(
    experiments=(pair("device-map", load, "device_map", AUTO, "a device map, and ZeRO-3"),),
    variants=(
        pair("one-device", load, "device_map", ONE, "a map of one entry is a map"),
        pair("false", FALSE, "device_map", AUTO, "low_cpu_mem_usage=False is thrown away", packages=NEW),
        pair("false-old", FALSE, "device_map", AUTO, "a map wants True", packages=OLD, expect=REQUIRED),
        pair("low-cpu", load, "low_cpu_mem_usage", (True, None), "True asks for empty weights", packages=OLD),
        pair("tp-plan", load, "tp_plan", AUTO, "a tensor-parallel plan makes a map", packages=PLAN),
        pair("four-bit", load_quantized, "device_map", ONE, "a map for the GPU of the rank", UNASKED, packages=BITS),
        pair("init-flag", FLAG, "device_map", ONE, KNOWN, packages=PLUGIN),
        pair("init-context", SWITCH, "device_map", ONE, KNOWN, packages=PLUGIN),
        pair("order", load_in_order, "config_first", (False, True), LATE, expect=WHOLE),
        pair("second-model", load_second, "aside", (False, True), SECOND, ASIDE),
    ),
)
