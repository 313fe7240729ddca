"""One FSDP unit holds the whole model, so each rank gathers all of it, or the class to wrap is not in the model."""

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
MOST = 0.75  # of the parameters: two ranks hold half of them, and one block of eight beside it


def make_model() -> Any:
    """Eight blocks of one class, in a list, as a transformer has them."""
    from torch import nn

    class Block(nn.Module):  # type: ignore[misc, unused-ignore]  # without torch its class is unknown
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
    """None is torch's own default, a hundred million."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    policy: Any = size_based_auto_wrap_policy
    if numbers is not None:
        policy = functools.partial(policy, min_num_params=numbers)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)


def wrap_checkpointed(model: Any, device: Any) -> Any:
    """Gradient checkpointing of each block, but still one unit."""
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
    """What `Accelerator.prepare` does with the plugin of the configuration."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    accelerate: Any = importlib.import_module("accelerate")
    plugin = accelerate.FullyShardedDataParallelPlugin(auto_wrap_policy=policy, transformer_cls_names_to_wrap=names)
    plugin.set_auto_wrap_policy(model)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=plugin.auto_wrap_policy, use_orig_params=True, device_id=device
    )


def shard_with_accelerate(model: Any, device: Any, *, own: bool) -> Any:
    """What `Accelerator.prepare` shards with FSDP2: a policy of one's own, or the name of the class."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    accelerate: Any = importlib.import_module("accelerate")
    utils: Any = importlib.import_module("accelerate.utils.fsdp_utils")
    policy: Any = ModuleWrapPolicy({type(model.layers[0])}) if own else "transformer_based_wrap"
    names = None if own else ["Block"]
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
    """One step. How many of the parameters has a rank while a block runs?"""
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
    """Numbers of all parameters that this rank holds now: its shards, and units that are gathered."""
    local = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in model.parameters())
    return sum(weight.numel() for weight in local)


def check(params: Mapping[str, Any]) -> Finding:
    """Does the configuration ask for FSDP and for no units? Flags and code may still say otherwise."""
    if params["config"] is None:
        return unknown("no configuration was named", advice="--set config=fsdp.yaml, or the YAML of your trainer")
    try:
        values = read_config(params["config"]).values
    except UnreadableConfig as error:
        return unknown(str(error))
    options = values.get("fsdp_config")
    if not isinstance(options, dict):
        return unknown(f"{params['config']} has no fsdp_config to read; flags, another file and code cannot be seen")
    named = {str(key).replace("fsdp_", "", 1): value for key, value in options.items()}
    policy = named.get("auto_wrap_policy", os.environ.get("FSDP_AUTO_WRAP_POLICY"))
    classes = named.get("transformer_layer_cls_to_wrap", os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP"))
    advice = "auto_wrap_policy: TRANSFORMER_BASED_WRAP, and transformer_layer_cls_to_wrap: the class of a decoder layer"
    if str(policy).upper() == "NO_WRAP":
        return unknown("auto_wrap_policy is NO_WRAP: one unit, unless the code wraps the blocks itself", advice=advice)
    if policy is None:
        return unknown("no auto_wrap_policy: the library's default decides, and it differs", advice=advice)
    if "SIZE" in str(policy).upper() and not named.get("min_num_params"):
        return unknown("SIZE_BASED_WRAP without min_num_params: accelerate makes one unit of it", advice=advice)
    if isinstance(classes, str) and classes != classes.replace(" ", ""):
        return unknown(
            f"spaces in {classes!r} become part of a class name", advice="separate the names by commas alone"
        )
    if "TRANSFORMER" in str(policy).upper() and classes:
        return unknown(
            f"{policy} with {classes}: only the model can say whether it has that class",
            advice="print the wrapped model; the Trainer of transformers 4 needs auto_wrap in the option fsdp as well",
        )
    if classes:
        return unknown(
            f"auto_wrap_policy {policy!r} with {classes}: what it does depends on the library", advice=advice
        )
    return unknown(f"{policy} without a class: the model's own list decides, and it may be empty", advice=advice)


WHOLE = symptom(r"(\d+) of \1 parameters are on each rank while one block of \d+ runs")
BLOCK_UNITS = "each block is a unit: a rank has its half of the model and one block"


def units(name: str, bad: Any, good: Any, *, because: str, fixed: str, **rest: Any) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(partial(gather, wrap=bad), expect=WHOLE, because=because, fidelity="cpu"),
        treatment=Arm(partial(gather, wrap=good), expect=completed(), because=fixed, fidelity="cpu"),
        expected_s=(0.5, 0.5),
        **rest,
    )


gloo = units("gloo", wrap_root, wrap_blocks, because="no policy: the model is one unit", fixed=BLOCK_UNITS)
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
            because="fully_shard of the model alone makes one group, also with reshard_after_forward=True",
            fixed=BLOCK_UNITS,
            needs=Needs(packages={"torch": ">=2.7"}),
        ),
        units(
            "size",
            partial(wrap_by_size, numbers=None),
            partial(wrap_by_size, numbers=WIDTH * WIDTH),
            because="the default of min_num_params is a hundred million, no block is as large",
            fixed="min_num_params below the size of a block",
        ),
        units(
            "checkpointed",
            wrap_checkpointed,
            wrap_blocks,
            because="gradient checkpointing makes no units",
            fixed=BLOCK_UNITS,
        ),
        units(
            "accelerate-default",
            partial(wrap_with_accelerate, policy="no_wrap", names=None),
            named_blocks,
            because="accelerate's own default, no_wrap",
            fixed="transformer_based_wrap with the class of a block",
            needs=ACCELERATE,
            deadline_s=60,
        ),
        units(
            "no-split-modules",
            partial(wrap_with_accelerate, policy="transformer_based_wrap", names=None),
            named_blocks,
            because="the model has no _no_split_modules, so the policy has no class, and no error is raised",
            fixed="the class is named",
            needs=ACCELERATE,
            deadline_s=60,
        ),
        units(
            "accelerate-callable",
            partial(shard_with_accelerate, own=True),
            partial(shard_with_accelerate, own=False),
            because="FSDP2 in accelerate drops a policy that is neither transformer_based_wrap nor size_based_wrap",
            fixed="transformer_based_wrap with the class of a block",
            needs=Needs(packages={"torch": ">=2.7", "accelerate": ">=1.8"}, memory_mib=2048),
            deadline_s=60,
        ),
        units(
            "shard-grad-op",
            partial(wrap_by_strategy, strategy="SHARD_GRAD_OP"),
            partial(wrap_by_strategy, strategy="FULL_SHARD"),
            because="SHARD_GRAD_OP: units are there, and stay gathered from forward to backward",
            fixed="FULL_SHARD",
        ),
        units(
            "not-resharded",
            partial(shard_and_keep, reshard=False),
            partial(shard_and_keep, reshard=True),
            because="reshard_after_forward=False for each block, the same with FSDP2",
            fixed="reshard_after_forward=True",
            needs=Needs(packages={"torch": ">=2.7"}),
        ),
        Experiment(
            name="other-class",
            control=Arm(
                partial(
                    gather, wrap=partial(wrap_with_accelerate, policy="transformer_based_wrap", names=["GPT2Block"])
                ),
                expect=raised(r"Could not find the transformer layer class GPT2Block in the model"),
                because="the class of another model is named",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(gather, wrap=named_blocks),
                expect=completed(),
                because="the class that the model prints",
                fidelity="cpu",
            ),
            needs=ACCELERATE,
            deadline_s=60,
            expected_s=(3.0, 3.0),
        ),
    ),
)
