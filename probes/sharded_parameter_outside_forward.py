"""Code uses a weight of a sharded model outside the forward that gathers it, or in a second model without an engine."""

from __future__ import annotations

import importlib
import os
import warnings
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Callable, Mapping, Tuple

from kb.cpu_arms import import_deepspeed
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

WORDS, WIDTH = 32, 16
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def build(wrap: Callable[[Any], Any] = lambda layer: layer) -> Any:
    """Returns an embedding with a linear body, which `wrap` may shard, and a head tied to the embedding."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.body = wrap(nn.Linear(WIDTH, WIDTH))

        def features(self, ids: Any) -> Any:
            return self.embed(ids)

        def score(self, ids: Any) -> Any:
            return functional.linear(self.body(self.features(ids)), self.embed.weight)  # the head is tied

        def forward(self, ids: Any, only_features: bool = False) -> Any:
            return self.features(ids) if only_features else self.score(ids)

    return Net()


def sample(ctx: Context) -> Any:
    """Returns token ids of shape (2, 5)."""
    import torch

    return torch.arange(10, device=ctx.device).view(2, 5)


def shard(ctx: Context, layers: bool = False) -> Any:
    """Wraps the model in FSDP1, and its body in a unit of its own if `layers`."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    warnings.simplefilter("ignore")  # FSDP1 warns that it is deprecated
    ctx.init_process_group(timeout_s=10)
    wrap = partial(FullyShardedDataParallel, device_id=ctx.device, use_orig_params=True)
    return wrap(build(wrap if layers else lambda layer: layer).to(ctx.device))


def call(ctx: Context, *, through_wrapper: bool) -> None:
    """Calls a method of the inner module, as evaluation code does, or the same method through the wrapper."""
    import torch

    model, ids = shard(ctx), sample(ctx)
    ctx.note(shape_here=list(model.module.embed.weight.shape))
    ctx.reached()
    if through_wrapper:
        hidden = model(ids, only_features=True)
    else:
        hidden = model.module.features(ids)
    assert torch.equal(hidden.cpu(), build().features(ids.cpu()))


def measure(ctx: Context, *, gathered: bool) -> None:
    """Computes the norm of a weight, as custom code does for a log or a penalty; nothing checks the shape."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = shard(ctx)
    expected = build().embed.weight.norm().item()
    ctx.reached()
    if gathered:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            norm = model.module.embed.weight.norm()
    else:
        norm = model.module.embed.weight.norm()
    if not torch.allclose(norm.cpu(), torch.tensor(expected)):
        raise Symptom("rank %d measures a norm of %.2f, and it is %.2f; no error" % (ctx.rank, norm.item(), expected))


def look(ctx: Context, *, gathered: bool) -> None:
    """Looks at a weight after a step with use_orig_params=False, torch's default: its shape is whole, its memory freed.

    Any operation on it reads freed memory, which ends a rank on CPU with a segmentation fault.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    warnings.simplefilter("ignore")
    ctx.init_process_group(timeout_s=10)
    model = FullyShardedDataParallel(build().to(ctx.device), device_id=ctx.device, use_orig_params=False)
    ctx.reached()
    model(sample(ctx)).sum().backward()
    summoned = FullyShardedDataParallel.summon_full_params(model, writeback=False)
    with summoned if gathered else nullcontext():
        weight = model.module.embed.weight
        shape, size = tuple(weight.shape), weight.untyped_storage().size()
    if not size:
        raise Symptom("the weight has shape %s and %d bytes; no error" % (shape, size))


def start_inside(ctx: Context, *, root_first: bool, summons: bool = False) -> None:
    """Calls a layer that is its own unit; such a unit gathers by itself, but the first forward makes it the root.

    With `summons`, summon_full_params gathers that layer instead.
    """
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, ids = shard(ctx, layers=True), sample(ctx)
    expected = build()
    ctx.reached()
    if root_first:
        model(ids)
    if summons:
        with FullyShardedDataParallel.summon_full_params(model.module.body, writeback=False):
            assert torch.equal(model.module.body.weight.cpu(), expected.body.weight)
        assert torch.allclose(model(ids).cpu(), expected(ids.cpu()), atol=1e-5)
        return
    hidden = torch.ones(2, WIDTH, device=ctx.device)
    assert torch.allclose(model.module.body(hidden).cpu(), expected.body(hidden.cpu()), atol=1e-5)
    assert torch.allclose(model(ids).cpu(), expected(ids.cpu()), atol=1e-5)


def tied(ctx: Context, *, own_unit: bool) -> None:
    """Runs a forward whose head is tied to the embedding, which is a unit of its own if `own_unit`."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    warnings.simplefilter("ignore")
    ctx.init_process_group(timeout_s=10)
    wrap = partial(FullyShardedDataParallel, device_id=ctx.device, use_orig_params=True)
    model, expected, ids = build().to(ctx.device), build(), sample(ctx)
    if own_unit:
        model.embed = wrap(model.embed)
    model = wrap(model)
    ctx.reached()
    assert torch.allclose(model(ids).cpu(), expected(ids.cpu()), atol=1e-5)


def start_deepspeed(ctx: Context) -> Any:
    """Imports DeepSpeed and initializes it with gloo."""
    deepspeed = import_deepspeed()
    ctx.init_process_group(timeout_s=30)
    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed


def second_model(ctx: Context, *, own_engine: bool) -> None:
    """Builds a teacher under zero.Init, as from_pretrained does with a ZeRO-3 configuration, and calls it."""
    import torch

    deepspeed, config, ids = start_deepspeed(ctx), CONFIG, sample(ctx)
    with deepspeed.zero.Init(config_dict_or_path=config):
        teacher = build()
    ctx.reached()
    if own_engine:
        teacher = deepspeed.initialize(model=teacher, config=config)[0]
    teacher.eval()
    with torch.no_grad():
        logits = teacher(ids)
    assert torch.allclose(logits, build()(ids), atol=1e-5)


def load_whole(ctx: Context, *, own_engine: bool) -> None:
    """Builds a teacher with transformers inside accelerate's zero3_init_context_manager(enable=False), and calls it."""
    import torch

    deepspeed = start_deepspeed(ctx)
    for name in ("accelerate.utils", "transformers"):
        importlib.import_module(name)
    from accelerate.utils import DeepSpeedPlugin  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, GPT2Config  # type: ignore[import-not-found]

    os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
    plugin.deepspeed_config.update(CONFIG, train_batch_size=2 * ctx.world_size)
    plugin.set_deepspeed_weakref()
    small = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=WORDS, n_positions=16, bos_token_id=0, eos_token_id=0)
    ctx.reached()
    with plugin.zero3_init_context_manager(enable=False):
        teacher = AutoModelForCausalLM.from_config(small)
    if own_engine:
        teacher = deepspeed.initialize(model=teacher, config=CONFIG)[0]
    with torch.no_grad():
        logits = teacher(sample(ctx)).logits
    assert logits.shape == (2, 5, WORDS)


def load_early(ctx: Context, *, early: bool) -> None:
    """Builds a frozen model with transformers before or after the ZeRO-3 configuration of accelerate exists."""
    import torch

    start_deepspeed(ctx)
    for name in ("accelerate.utils", "transformers"):
        importlib.import_module(name)
    from accelerate.utils import DeepSpeedPlugin
    from transformers import AutoModelForCausalLM, GPT2Config

    os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    small = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=WORDS, n_positions=16, bos_token_id=0, eos_token_id=0)
    ctx.reached()
    encoder = AutoModelForCausalLM.from_config(small) if early else None
    plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
    plugin.deepspeed_config.update(CONFIG, train_batch_size=2 * ctx.world_size)
    plugin.set_deepspeed_weakref()
    if encoder is None:
        encoder = AutoModelForCausalLM.from_config(small)
    with torch.no_grad():
        assert encoder(sample(ctx)).logits.shape == (2, 5, WORDS)


def set_late(ctx: Context, *, in_optimizer: bool) -> None:
    """Sets a weight of a trained engine, and in the optimizer's copy too if `in_optimizer`; then it steps."""
    import torch

    deepspeed, model, engine = train_engine(ctx)
    value = torch.full((WORDS, WIDTH), 7.0)
    ctx.reached()
    with deepspeed.zero.GatheredParameters(model.embed.weight, modifier_rank=0):
        model.embed.weight.data.copy_(value)
    if in_optimizer:
        deepspeed.utils.safe_set_full_fp32_param(model.embed.weight, value)
    engine.backward(engine(sample(ctx)).sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(model.embed.weight):
        mean = model.embed.weight.mean().item()
    if mean < 6:
        raise Symptom("every number is set to 7, and after one step the mean is %.1f; no error" % mean)


def train_engine(ctx: Context) -> Tuple[Any, Any, Any]:
    """Returns DeepSpeed, a model, and its ZeRO-3 engine with AdamW."""
    import torch

    deepspeed, model = start_deepspeed(ctx), build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return deepspeed, model, deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]


def own_loss(ctx: Context, *, by: str) -> None:
    """Computes logits with the embedding in the script, in a method of the inner module, or in the engine's forward."""
    import torch
    from torch.nn import functional

    _, model, engine = train_engine(ctx)
    ids = sample(ctx)
    ctx.reached()
    if by == "engine":
        logits = engine(ids)
    elif by == "method":
        logits = engine.module.score(ids)
    else:
        logits = functional.linear(model.body(engine(ids, only_features=True)), model.embed.weight)
    assert torch.allclose(logits, build()(ids), atol=1e-5)
    engine.backward(logits.sum())
    engine.step()
    assert not torch.allclose(engine(ids), build()(ids), atol=1e-3)


def gathered_loss(ctx: Context, *, backward_inside: bool) -> None:
    """Gathers a weight for the loss; the backward runs inside the same context or after it."""
    import torch
    from torch.nn import functional

    deepspeed, model, engine = train_engine(ctx)
    ids, plain = sample(ctx), build()
    hidden = engine(ids, only_features=True)
    ctx.reached()
    if backward_inside:
        with deepspeed.zero.GatheredParameters(model.body.weight):
            loss = functional.linear(hidden, model.body.weight).square().mean()
            engine.backward(loss)
    else:
        with deepspeed.zero.GatheredParameters(model.body.weight):
            loss = functional.linear(hidden, model.body.weight).square().mean()
        engine.backward(loss)
    engine.step()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    functional.linear(plain(ids, only_features=True), plain.body.weight).square().mean().backward()
    optimizer.step()
    for weight, expected in ((model.body.weight, plain.body.weight), (model.embed.weight, plain.embed.weight)):
        with deepspeed.zero.GatheredParameters(weight):
            assert torch.allclose(weight, expected, atol=1e-4)


def initialise(ctx: Context, *, from_rank_0: bool) -> None:
    """Sets a weight after zero.Init: first without gathering, then gathered, with or without modifier_rank."""
    import torch

    deepspeed = start_deepspeed(ctx)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = build()
    ctx.reached()
    torch.nn.init.normal_(model.embed.weight, mean=7.0)
    with deepspeed.zero.GatheredParameters(model.embed.weight):
        empty_mean = model.embed.weight.mean().item()
    if from_rank_0:
        with deepspeed.zero.GatheredParameters(model.embed.weight, modifier_rank=0):
            torch.nn.init.normal_(model.embed.weight, mean=7.0)
    else:
        with deepspeed.zero.GatheredParameters(model.embed.weight):
            torch.nn.init.normal_(model.embed.weight, mean=7.0)
    with deepspeed.zero.GatheredParameters(model.embed.weight):
        mean = model.embed.weight.mean().item()
    assert abs(empty_mean) < 1, empty_mean  # the first normal_ writes nothing in both arms
    if abs(mean - 7) > 1:
        raise Symptom("twice normal_(mean=7), and the mean is %.1f; no error" % mean)


TWO_D = r"'weight' must be 2-D"
EMPTY = r"size mismatch, got input \(10\), mat \(10x16\), vec \(0\)"


def pair(
    name: str,
    arms: Tuple[Callable[[Context], None], Callable[[Context], None]],
    expect: Expect,
    because: str,
    fix: str,
    packages: Mapping[str, str] = MappingProxyType({"torch": ">=2.1"}),
) -> Experiment:
    slow = "deepspeed" in packages
    return Experiment(
        name=name,
        control=Arm(arms[0], expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(arms[1], expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages=packages, memory_mib=2048 if slow else 1024),
        deadline_s=90 if slow else 20,
        expected_s=(9.0, 9.0) if slow else (0.4, 0.4),
    )


ZERO3 = {"torch": ">=2.1", "deepspeed": ">=0.16"}
gloo = pair(
    "gloo",
    (partial(call, through_wrapper=False), partial(call, through_wrapper=True)),
    raised(TWO_D),
    "the code calls a method of the inner module, and the FSDP1 unit around it does not gather",
    "the forward of the wrapper gathers first and then calls the same method",
)

probe = Probe(
    experiments=(gloo.on_gpus(), gloo),
    variants=(
        pair(
            "norm",
            (partial(measure, gathered=False), partial(measure, gathered=True)),
            symptom(r"rank \d measures a norm of \d+\.\d\d, and it is 2\d\.\d\d; no error"),
            "each rank computes the norm of its own shard",
            "each rank computes the norm inside summon_full_params",
        ),
        pair(
            "freed",
            (partial(look, gathered=False), partial(look, gathered=True)),
            symptom(r"the weight has shape \(32, 16\) and 0 bytes; no error"),
            "use_orig_params=False keeps the shape of a weight whose memory it has freed",
            "summon_full_params gathers the weight",
        ),
        pair(
            "inner-first",
            (partial(start_inside, root_first=False), partial(start_inside, root_first=True)),
            raised(r"Non-root FSDP instance's `_is_root` should not have been"),
            "an inner unit runs a forward before the whole model",
            "the whole model runs the first forward",
        ),
        pair(
            "inner-summon",
            (
                partial(start_inside, root_first=False, summons=True),
                partial(start_inside, root_first=True, summons=True),
            ),
            raised(r"Non-root FSDP instance's `_is_root` should not have been"),
            "summon_full_params gathers an inner unit before the first forward of the whole model",
            "the whole model runs the first forward",
            {"torch": ">=2.13"},
        ),
        pair(
            "tied",
            (partial(tied, own_unit=True), partial(tied, own_unit=False)),
            raised(r"size mismatch, got input \(10\), mat \(10x16\), vec \(\d+\)"),
            "the embedding is its own unit, and the tied head reads the weight after that unit is sharded again",
            "embedding and head are in the same unit",
        ),
        pair(
            "second-model",
            (partial(second_model, own_engine=False), partial(second_model, own_engine=True)),
            raised(TWO_D),
            "zero.Init partitions a second model, which the script never passes to initialize",
            "the second model has its own engine, without an optimizer",
            ZERO3,
        ),
        pair(
            "whole",
            (partial(load_whole, own_engine=False), partial(load_whole, own_engine=True)),
            raised(TWO_D),
            "the model is partitioned in spite of zero3_init_context_manager(enable=False) of accelerate",
            "the second model has its own engine",
            {**ZERO3, "transformers": ">=4.46", "accelerate": ">=1.0"},
        ),
        pair(
            "early",
            (partial(load_early, early=False), partial(load_early, early=True)),
            raised(TWO_D),
            "the model is loaded while a ZeRO-3 configuration exists",
            "the model is loaded before the configuration exists, and stays whole",
            {**ZERO3, "transformers": ">=4.46", "accelerate": ">=1.0"},
        ),
        pair(
            "own-loss",
            (partial(own_loss, by="script"), partial(own_loss, by="engine")),
            raised(EMPTY),
            "the script multiplies with a weight of the engine after the forward",
            "the forward multiplies; ZeRO-3 also gathers a weight of another module there",
            ZERO3,
        ),
        pair(
            "past-engine",
            (partial(own_loss, by="method"), partial(own_loss, by="engine")),
            raised(EMPTY),
            "the script calls a method past the engine: modules gather, but a weight that it reads by name is empty",
            "the forward of the engine calls the same method",
            ZERO3,
        ),
        pair(
            "gathered-loss",
            (partial(gathered_loss, backward_inside=False), partial(gathered_loss, backward_inside=True)),
            raised(r"The size of tensor a \(0\) must match the size of tensor b \(16\)"),
            "the weight is gathered for the loss, but empty again in the backward",
            "the weight is gathered for the loss and the backward",
            ZERO3,
        ),
        pair(
            "initialise",
            (partial(initialise, from_rank_0=False), partial(initialise, from_rank_0=True)),
            symptom(r"twice normal_\(mean=7\), and the mean is -?0\.\d; no error"),
            "normal_ writes to the partitioned weight, then to the gathered one without modifier_rank; both are lost",
            "normal_ writes to the weight gathered with modifier_rank=0, and all ranks get rank 0's numbers",
            ZERO3,
        ),
        pair(
            "set-late",
            (partial(set_late, in_optimizer=False), partial(set_late, in_optimizer=True)),
            symptom(r"every number is set to 7, and after one step the mean is -?0\.\d; no error"),
            "the weight is set after initialize, and the optimizer's own copy is not",
            "safe_set_full_fp32_param sets the optimizer's copy too",
            ZERO3,
        ),
    ),
)
