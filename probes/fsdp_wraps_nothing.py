"""One FSDP unit holds the whole model, so each rank gathers all of it; or the model lacks the class to wrap."""

from __future__ import annotations

import functools
import importlib
import os
from functools import partial
from typing import Any, Callable, List, Mapping, Optional

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    completed,
    raised,
    symptom,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config

WIDTH, BLOCKS = 64, 8
MOST = 0.75  # share of the parameters on a rank: its half, and one gathered block of eight, are less


def make_model() -> Any:
    """Eight blocks of one class in a ModuleList, like the layers of a transformer."""
    from torch import nn

    class Block(nn.Module):  # type: ignore[misc, unused-ignore]  # without torch, mypy does not know the class
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return x + self.linear(x).relu()

    class Model(nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    return Model()


def wrap_root(model: Any, device: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=True, device_id=device)


def wrap_blocks(model: Any, device: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.layers[0])})
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)
    assert len(FullyShardedDataParallel.fsdp_modules(model)) == BLOCKS + 1
    return model


def wrap_by_strategy(model: Any, device: Any, *, strategy: str) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(model.layers[0])})
    options = {"use_orig_params": True, "device_id": device, "sharding_strategy": ShardingStrategy[strategy]}
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)


def wrap_by_size(model: Any, device: Any, *, numbers: Optional[int]) -> Any:
    """`numbers` is min_num_params; None means the default of torch, a hundred million."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    policy: Any = size_based_auto_wrap_policy
    if numbers is not None:
        policy = functools.partial(policy, min_num_params=numbers)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)


def wrap_checkpointed(model: Any, device: Any) -> Any:
    """Checkpoints the activations of each block, but makes only one unit."""
    wrapper: Any = importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    for index, layer in enumerate(model.layers):
        model.layers[index] = wrapper.checkpoint_wrapper(layer)
    return wrap_root(model, device)


def shard_root(model: Any, device: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.to(device), reshard_after_forward=True)
    return model


def shard_blocks(model: Any, device: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    model.to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def shard_and_keep(model: Any, device: Any, *, reshard: bool) -> Any:
    from torch.distributed.fsdp import fully_shard

    model.to(device)
    for layer in [*model.layers, model]:
        fully_shard(layer, reshard_after_forward=reshard)
    return model


def wrap_with_accelerate(model: Any, device: Any, *, policy: str, names: Optional[List[str]]) -> Any:
    """Wraps as `Accelerator.prepare` does for this FSDP plugin."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    accelerate: Any = importlib.import_module("accelerate")
    plugin = accelerate.FullyShardedDataParallelPlugin(auto_wrap_policy=policy, transformer_cls_names_to_wrap=names)
    plugin.set_auto_wrap_policy(model)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=plugin.auto_wrap_policy, use_orig_params=True, device_id=device
    )


def shard_with_accelerate(model: Any, device: Any, *, custom_policy: bool) -> Any:
    """Shards as `Accelerator.prepare` does with FSDP2, for a custom policy or for the name of the class."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    accelerate: Any = importlib.import_module("accelerate")
    utils: Any = importlib.import_module("accelerate.utils.fsdp_utils")
    policy: Any = ModuleWrapPolicy({type(model.layers[0])}) if custom_policy else "transformer_based_wrap"
    names = None if custom_policy else ["Block"]
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy=policy, transformer_cls_names_to_wrap=names
    )
    plugin.set_auto_wrap_policy(model)
    chosen = utils.fsdp2_prepare_auto_wrap_policy(plugin, model)
    model.to(device)
    for module in list(model.modules())[1:]:
        if chosen is not None and chosen(module):
            fully_shard(module)
    fully_shard(model)
    return model


def gather(ctx: Context, *, wrap: Callable[[Any, Any], Any]) -> None:
    """Runs one step and counts the parameters that a rank holds while a block runs."""
    import torch

    ctx.init_process_group(timeout_s=10)
    torch.manual_seed(0)
    model = make_model()
    total = sum(weight.numel() for weight in model.parameters())
    blocks = list(model.layers)
    ctx.reached()
    model = wrap(model, ctx.device)
    alive: List[int] = []
    for block in blocks:
        block.linear.register_forward_hook(lambda *_: alive.append(count_local(model)))
    model(torch.ones(4, WIDTH, device=ctx.device)).square().mean().backward()
    ctx.note(parameters=total, most_on_one_rank=max(alive))
    if max(alive) > MOST * total:
        raise Symptom(f"{max(alive)} of {total} parameters are on each rank while one block of {BLOCKS} runs")


def count_local(model: Any) -> int:
    """The number of parameters that this rank holds now: its shards, and the units that are gathered."""
    local = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in model.parameters())
    return sum(weight.numel() for weight in local)


def check(params: Mapping[str, Any]) -> Finding:
    """Does the configuration enable FSDP without units? Flags and code may override it."""
    if params["config"] is None:
        return unknown("no configuration was named", advice="--set config=fsdp.yaml, or the YAML of your trainer")
    try:
        values = read_config(params["config"]).values
    except UnreadableConfig as error:
        return unknown(str(error))
    options = values.get("fsdp_config")
    if not isinstance(options, dict):
        return unknown(f"{params['config']} has no fsdp_config; kb does not see flags, other files and code")
    named = {str(key).replace("fsdp_", "", 1): value for key, value in options.items()}
    policy = named.get("auto_wrap_policy", os.environ.get("FSDP_AUTO_WRAP_POLICY"))
    classes = named.get("transformer_layer_cls_to_wrap", os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP"))
    advice = (
        "set auto_wrap_policy to TRANSFORMER_BASED_WRAP, transformer_layer_cls_to_wrap to the decoder layer's class"
    )
    if str(policy).upper() == "NO_WRAP":
        return unknown(
            "auto_wrap_policy is NO_WRAP, which makes one unit unless the code wraps the blocks itself", advice=advice
        )
    if policy is None:
        return unknown(
            "auto_wrap_policy is not set, so the default of the library decides, which differs between libraries",
            advice=advice,
        )
    if "SIZE" in str(policy).upper() and not named.get("min_num_params"):
        return unknown(
            "SIZE_BASED_WRAP is set without min_num_params, and accelerate makes one unit of the model", advice=advice
        )
    if isinstance(classes, str) and classes != classes.replace(" ", ""):
        return unknown(
            f"the spaces in {classes!r} become part of a class name", advice="separate the names only by commas"
        )
    if "TRANSFORMER" in str(policy).upper() and classes:
        return unknown(
            f"{policy} with {classes}: kb cannot tell whether the model has that class",
            advice="print the wrapped model; in transformers 4, also set fsdp to a value with auto_wrap",
        )
    if classes:
        return unknown(f"auto_wrap_policy {policy!r} with {classes}: its effect depends on the library", advice=advice)
    return unknown(
        f"{policy} without a class: the list of the model (_no_split_modules) decides, and it may be empty",
        advice=advice,
    )


WHOLE = symptom(r"(\d+) of \1 parameters are on each rank while one block of \d+ runs")
BLOCK_UNITS = "each block is a unit, so a rank holds its half of the model and one gathered block"


def units(name: str, bad: Any, good: Any, *, because: str, fixed: str, **rest: Any) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(partial(gather, wrap=bad), expect=WHOLE, because=because, fidelity="cpu"),
        treatment=Arm(partial(gather, wrap=good), expect=completed(), because=fixed, fidelity="cpu"),
        expected_s=(0.5, 0.5),
        **rest,
    )


gloo = units(
    "gloo",
    wrap_root,
    wrap_blocks,
    because="without a policy, the whole model is one unit, which every rank gathers",
    fixed=BLOCK_UNITS,
)
ACCELERATE = Needs(packages={"torch": ">=2.1", "accelerate": ">=0.34.1"}, memory_mib=2048)
named_blocks = partial(wrap_with_accelerate, policy="transformer_based_wrap", names=["Block"])

probe = Probe(
    check=check,
    params={"config": Param("path", "your accelerate YAML, or the YAML of a trainer with an fsdp_config")},
    experiments=(gloo.on_gpus(), gloo),
    variants=(
        units(
            "fully-shard",
            shard_root,
            shard_blocks,
            because="fully_shard on the model alone makes one group, even with reshard_after_forward=True",
            fixed=BLOCK_UNITS,
            needs=Needs(packages={"torch": ">=2.7"}),
        ),
        units(
            "size",
            partial(wrap_by_size, numbers=None),
            partial(wrap_by_size, numbers=WIDTH * WIDTH),
            because="min_num_params is a hundred million by default, and no block is that large",
            fixed="min_num_params is smaller than a block, so each block becomes a unit",
        ),
        units(
            "checkpointed",
            wrap_checkpointed,
            wrap_blocks,
            because="gradient checkpointing of the blocks does not make units",
            fixed=BLOCK_UNITS,
        ),
        units(
            "accelerate-default",
            partial(wrap_with_accelerate, policy="no_wrap", names=None),
            named_blocks,
            because="the default of accelerate, no_wrap, makes one unit of the whole model",
            fixed="transformer_based_wrap with the class of a block makes each block a unit",
            needs=ACCELERATE,
            deadline_s=60,
        ),
        units(
            "no-split-modules",
            partial(wrap_with_accelerate, policy="transformer_based_wrap", names=None),
            named_blocks,
            because="the model has no _no_split_modules, so the policy has no class, and accelerate reports no error",
            fixed="the configuration names the class of a block",
            needs=ACCELERATE,
            deadline_s=60,
        ),
        units(
            "accelerate-callable",
            partial(shard_with_accelerate, custom_policy=True),
            partial(shard_with_accelerate, custom_policy=False),
            because="FSDP2 in accelerate drops a policy that is neither transformer_based_wrap nor size_based_wrap",
            fixed="transformer_based_wrap with the class of a block makes each block a unit",
            needs=Needs(packages={"torch": ">=2.7", "accelerate": ">=1.8"}, memory_mib=2048),
            deadline_s=60,
        ),
        units(
            "shard-grad-op",
            partial(wrap_by_strategy, strategy="SHARD_GRAD_OP"),
            partial(wrap_by_strategy, strategy="FULL_SHARD"),
            because="SHARD_GRAD_OP makes units, but keeps them gathered from forward to backward",
            fixed="FULL_SHARD frees each unit after its forward",
        ),
        units(
            "not-resharded",
            partial(shard_and_keep, reshard=False),
            partial(shard_and_keep, reshard=True),
            because="FSDP2 with reshard_after_forward=False keeps each block gathered until backward",
            fixed="reshard_after_forward=True frees each block after its forward",
            needs=Needs(packages={"torch": ">=2.7"}),
        ),
        Experiment(
            name="other-class",
            control=Arm(
                partial(
                    gather, wrap=partial(wrap_with_accelerate, policy="transformer_based_wrap", names=["GPT2Block"])
                ),
                expect=raised(r"Could not find the transformer layer class GPT2Block in the model"),
                because="the configuration names a class of another model",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(gather, wrap=named_blocks),
                expect=completed(),
                because="the configuration names the class that this model prints",
                fidelity="cpu",
            ),
            needs=ACCELERATE,
            deadline_s=60,
            expected_s=(3.0, 3.0),
        ),
    ),
)
