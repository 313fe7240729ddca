"""Short batches train, but a long one does not fit, because each layer keeps its results for the backward."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, Mapping

from kb.cpu_arms import GPU_OOM, HOST_OOM, LIMITED_ADDRESS_SPACE, limit_address_space, without_launcher
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
    exposed,
    symptom,
    unknown,
)
from kb.training_config import UnreadableConfig, micro_batch_tokens, read_config

GIB = 1 << 30
HIDDEN, WIDE, LAYERS = 128, 1024, 8
CPU_TOKENS, GPU_TOKENS = 2048, 24576  # tokens of the long batch, with 136 MiB and 1.6 GiB of activations
CPU_ROOM, GPU_MIB = 100 << 20, 1024
LLAMA_ROOM = 200 << 20  # includes the buffers of attention; without checkpointing a Llama takes 400 to 500 MiB
PER_HIDDEN = {"all": 49, "adapter": 34}  # bytes per token, layer and hidden unit of a bf16 Llama with fused attention


WAYS = ("whole", "checkpoint", "split", "truncate")


def train(ctx: Context, *, way: str, ddp: bool = False) -> None:
    """Trains three short batches, then a long one: whole, with checkpointed layers, in eight parts, or truncated."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    assert way in WAYS, way
    on_gpu = ctx.device.type == "cuda"
    torch.manual_seed(0)

    class Layers(nn.ModuleList):  # type: ignore[misc]
        def forward(self, hidden: Any, recompute: bool) -> Any:
            for layer in self:
                if recompute:
                    hidden = checkpoint(layer, hidden, use_reentrant=False)
                else:
                    hidden = layer(hidden)
            return hidden

    layers = Layers(
        nn.Sequential(nn.Linear(HIDDEN, WIDE), nn.GELU(), nn.Linear(WIDE, HIDDEN)) for _ in range(LAYERS)
    ).to(ctx.device)
    model: Any = layers
    if ddp:
        ctx.init_process_group(timeout_s=60)
        model = DistributedDataParallel(layers)

    def backward(batch: Any, recompute: bool) -> Any:
        model(batch.requires_grad_(), recompute).square().sum().backward()
        gradient, layers[0][0].weight.grad = layers[0][0].weight.grad, None
        return gradient

    long = GPU_TOKENS if on_gpu else CPU_TOKENS
    short = torch.randn(long // 8, HIDDEN, device=ctx.device)
    saved: Dict[int, int] = {weight.untyped_storage().data_ptr(): 0 for weight in layers.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(partial(count, saved), lambda tensor: tensor):
        expected = backward(short, False)
    ctx.note(saved_mib_short_batch=round(sum(saved.values()) / (1 << 20), 1), times_longer=8)
    if not on_gpu:
        limit_address_space(CPU_ROOM)
    for _ in range(3):
        torch.testing.assert_close(backward(short, way == "checkpoint"), expected)
    ctx.reached()
    batch = torch.randn(long, HIDDEN, device=ctx.device)
    if way == "truncate":
        batch = batch[: long // 8].detach()
    for part in batch.split(long // 8 if way == "split" else long):
        backward(part.detach(), way == "checkpoint")


def attend(ctx: Context, *, fused: bool) -> None:
    """Runs one attention layer over 2048 tokens, forward and backward, with a score matrix or (`fused`) without."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch import nn

    query, key, value = (torch.randn(1, 8, CPU_TOKENS, 32, requires_grad=True) for _ in range(3))

    class Attention(nn.Module):  # type: ignore[misc]
        def forward(self, query: Any, key: Any, value: Any) -> Any:
            if fused:
                output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            else:
                above = torch.ones(CPU_TOKENS, CPU_TOKENS, dtype=torch.bool).triu(1)
                scores = (query @ key.transpose(-2, -1) / 32**0.5).masked_fill(above, float("-inf"))
                output = scores.softmax(-1) @ value
            return output

    limit_address_space(CPU_ROOM)
    ctx.reached()
    Attention()(query, key, value).sum().backward()


def accumulate(ctx: Context, *, between_samples: bool) -> None:
    """Compares the gradients of a whole batch and of its four parts. The loss may compare samples of a batch."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    torch.manual_seed(0)
    batch, targets, weight = torch.randn(16, 8), torch.randn(16, 8), torch.randn(8, 8, requires_grad=True)

    def gradient(parts: int) -> Any:
        weight.grad = None
        for number in range(parts):
            part, target = batch.chunk(parts)[number], targets.chunk(parts)[number]
            output = part @ weight
            if between_samples:
                loss = F.cross_entropy(output @ target.T, torch.arange(len(part)))
            else:
                loss = F.mse_loss(output, target)
            (loss / parts).backward()
        return weight.grad

    ctx.reached()
    whole, split = gradient(1), gradient(4)
    difference = float((whole - split).norm() / whole.norm())
    ctx.note(difference=round(difference, 6))
    if difference > 1e-4:
        raise Symptom(f"the gradient of four micro batches differs by {difference:.0%} from that of the whole batch")


def count(saved: Dict[int, int], tensor: Any) -> Any:
    """Counts what autograd saves: each storage once, without those that are in `saved` already."""
    storage = tensor.untyped_storage()
    saved.setdefault(storage.data_ptr(), storage.nbytes())
    return tensor


def train_llama(ctx: Context, *, checkpointed: bool) -> None:
    """Runs a Llama of transformers, with or without its own gradient checkpointing."""
    import torch
    from transformers import LlamaConfig, LlamaModel  # type: ignore[import-not-found]

    without_launcher()
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=64
    )
    model = LlamaModel(config).train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    limit_address_space(LLAMA_ROOM)
    ctx.reached()
    model(input_ids=torch.ones(1, CPU_TOKENS, dtype=torch.long), use_cache=False).last_hidden_state.sum().backward()


SWITCHES = ("gradient_checkpointing", "activation_checkpointing", "activation_offloading", "use_unsloth_gc")


def check(params: Mapping[str, Any]) -> Finding:
    """Do the activations of the largest micro batch, by a measured factor, fit in the memory of one GPU?"""
    values: Dict[str, Any] = {}
    if params["config"] is not None:
        try:
            values = read_config(params["config"]).values
        except UnreadableConfig as error:
            return unknown(str(error))
    tokens = params["tokens"] or micro_batch_tokens(values)
    numbers = (tokens, params["hidden"], params["layers"], params["gpu_memory"])
    if any(number is None or number <= 0 for number in numbers) or params["trains"] not in PER_HIDDEN:
        return unknown(
            "kb needs the tokens of a micro batch, the hidden size, the number of layers and the memory of the GPU",
            advice="--set tokens=16384 --set hidden=4096 --set layers=32 --set gpu_memory=79 (--set trains=adapter)",
        )
    message = "%s tokens x %s hidden x %s layers" % numbers[:3]
    need = tokens * params["hidden"] * params["layers"] * PER_HIDDEN[params["trains"]] / GIB
    checkpointed = tokens * params["hidden"] * params["layers"] * 2 / GIB
    evidence = "%s need about %.1f GiB without checkpointing, %.1f GiB plus one layer with it; the GPU has %.1f GiB" % (
        *(message, need, checkpointed),
        params["gpu_memory"],
    )
    if any(values.get(name) not in (None, False) for name in SWITCHES):
        return unknown(
            evidence,
            "the configuration switches checkpointing or offloading on; kb cannot tell whether the model honours it",
        )
    is_off = values.get("disable_gradient_checkpointing") is True or any(values.get(name) is False for name in SWITCHES)
    if values and not is_off:
        return unknown(
            evidence,
            "the configuration does not mention checkpointing, which LLaMA-Factory and newer TRL switch on by default",
        )
    advice = "switch gradient checkpointing on, or use fewer tokens per micro batch"
    if not values and checkpointed <= params["gpu_memory"] < need:
        return unknown(
            evidence, "this does not fit without checkpointing, and kb does not know whether it is on", advice=advice
        )
    if params["trains"] == "all" and need * PER_HIDDEN["adapter"] / PER_HIDDEN["all"] <= params["gpu_memory"] < need:
        return unknown(evidence, "this would fit with frozen weights: --set trains=adapter", advice=advice)
    if need > params["gpu_memory"]:
        return exposed(evidence, advice=advice)
    return unknown(evidence, "kb does not know how much weights, gradients, optimizer and eager attention take")


ALL = "a batch is eight times as long as the others, and every layer keeps its results"


def experiment(
    name: str,
    treatment: Callable[[Context], None],
    fix: str,
    control: Callable[[Context], None] = partial(train, way="whole"),
    because: str = ALL,
    world_size: int = 1,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(control, HOST_OOM, because=because, fidelity="stand-in", stands_for=LIMITED_ADDRESS_SPACE),
        treatment=Arm(treatment, completed(), because=fix, fidelity="stand-in", stands_for=LIMITED_ADDRESS_SPACE),
        world_size=world_size,
        deadline_s=60,
        expected_s=(0.5, 1.5),
    )


rlimit = experiment(
    "rlimit", partial(train, way="checkpoint"), "the same batch fits, because the layers are recomputed in the backward"
)

probe = Probe(
    check=check,
    params={
        "config": Param(
            "path", "your training configuration, from which kb reads tokens per micro batch and checkpointing"
        ),
        "tokens": Param("int", "tokens of one micro batch: batch size x padded length"),
        "hidden": Param("int", "hidden_size of the model's config.json"),
        "layers": Param("int", "num_hidden_layers"),
        "gpu_memory": Param("float", "GiB of one GPU"),
        "trains": Param("str", "which weights are trained: all, adapter", "all"),
    },
    experiments=(
        rlimit.on_gpus(1, name="gpu", expect=GPU_OOM, gpu_memory_mib=GPU_MIB),
        rlimit,
    ),
    variants=(
        experiment(
            "split", partial(train, way="split"), "the same batch is split in eight parts, each with its own backward"
        ),
        experiment(
            "truncate", partial(train, way="truncate"), "the long batch is truncated to the length of the others"
        ),
        Experiment(
            name="in-batch",
            control=Arm(
                partial(accumulate, between_samples=True),
                symptom(r"the gradient of four micro batches differs by \d+% from that of the whole batch"),
                because="the loss compares the samples of a batch, and a micro batch has only a quarter of them",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(accumulate, between_samples=False),
                completed(),
                because="the loss of each sample depends on that sample alone, and is averaged over the step",
                fidelity="cpu",
            ),
            world_size=1,
            deadline_s=60,
            expected_s=(0.5, 0.5),
        ),
        experiment(
            "attention",
            partial(attend, fused=True),
            "scaled_dot_product_attention makes no score matrix",
            partial(attend, fused=False),
            "attention by matmul and softmax keeps a score for each pair of tokens",
        ),
        experiment(
            "ddp",
            partial(train, way="checkpoint", ddp=True),
            "each rank's batch fits, because the layers are recomputed in the backward",
            partial(train, way="whole", ddp=True),
            "each of two DDP ranks has a batch eight times as long as the others, and every layer keeps its results",
            world_size=2,
        ),
        Experiment(
            name="transformers",
            control=Arm(
                partial(train_llama, checkpointed=False),
                HOST_OOM,
                because="2048 tokens run through eight layers of a Llama, which all keep their results",
                fidelity="stand-in",
                stands_for=LIMITED_ADDRESS_SPACE,
            ),
            treatment=Arm(
                partial(train_llama, checkpointed=True),
                completed(),
                because="model.gradient_checkpointing_enable() makes the layers recompute in the backward",
                fidelity="stand-in",
                stands_for=LIMITED_ADDRESS_SPACE,
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=4.35"}),
            deadline_s=90,
            expected_s=(4.0, 5.0),
        ),
    ),
)
