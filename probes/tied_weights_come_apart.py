"""A set-up step turns the weight that embedding and head share into two parameters, which then train apart."""

from __future__ import annotations

import importlib
import re
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, Optional

from kb.checkpoint import Unreadable, read_checkpoint
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
    raised,
    symptom,
    unknown,
)

WORDS, WIDTH, RATE = 32, 8, 0.5
FULLY_SHARD = Needs(packages={"torch": ">=2.9"})  # on the CPU, 2.7.1 and 2.8.0 take another step although tied
TRANSFORMERS = Needs(packages={"torch": ">=2.2", "transformers": ">=4.40"}, memory_mib=2048)
PEFT = Needs(packages={**TRANSFORMERS.packages, "peft": ">=0.18"}, memory_mib=2048)


def make_model(*, tied: bool = True) -> Any:
    """An embedding, a block, and a head, which uses the embedding's weight if `tied`."""
    import torch
    from torch import nn

    class Model(nn.Module):  # type: ignore[misc, unused-ignore]  # mypy may run without torch
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.block = nn.Linear(WIDTH, WIDTH)
            self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
            if tied:
                self.lm_head.weight = self.embed.weight

        def forward(self, tokens: Any) -> Any:
            return self.lm_head(self.block(self.embed(tokens)))

    torch.manual_seed(0)
    return Model()


def whole(tensor: Any) -> Any:
    """All rows of a weight, whether it is sharded or not."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu()


def shard_from_meta(model: Any, device: Any, *, retie: bool) -> Any:
    """Moves the model to meta, shards it, allocates and loads it; ties again on meta and after to_empty, or not."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta")
    if retie:
        model.lm_head.weight = model.embed.weight
    fully_shard(model)
    model.to_empty(device=device)
    if retie:
        model.lm_head.weight = model.embed.weight
    for name, weight in model.named_parameters():  # if tied, only one of the two names, which have the same values
        part = distribute_tensor(values[name].to(weight.device), weight.device_mesh, weight.placements)
        weight.data.copy_(part)
    return model


def shard_units(model: Any, device: Any, *, retie: bool) -> Any:
    """Shards embedding and head as one FSDP unit, which keeps them tied, or as two."""
    from torch.distributed.fsdp import fully_shard

    model.to(device)
    if retie:
        fully_shard([model.embed, model.lm_head])
    else:
        fully_shard(model.embed)
        fully_shard(model.lm_head)
    fully_shard(model)
    return model


def load_clones(model: Any, device: Any, *, retie: bool) -> Any:
    """Loads with assign=True from a checkpoint that has a copy of the weight under each of the two names."""
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    if retie:
        model.lm_head.weight = model.embed.weight
    return model.to(device)


def load_without_head(model: Any, device: Any, *, retie: bool) -> Any:
    """Loads the checkpoint of a tied model, which omits the head, into a model that was built without the tie."""
    values = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model = make_model(tied=False)
    model.load_state_dict(values, strict=False)
    if retie:
        model.lm_head.weight = model.embed.weight
    return model.to(device)


def step(model: Any, device: Any, **rest: Any) -> None:
    """One step of SGD with the same batch on every rank."""
    import torch

    tokens = torch.arange(WORDS, device=device)
    answer = model(tokens[None], **rest)
    logits = getattr(answer, "logits", answer)[0]
    torch.nn.functional.cross_entropy(logits, tokens.roll(1)).backward()
    torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=RATE).step()


def train(ctx: Context, *, prepare: Callable[[Any, Any], Any]) -> None:
    """Trains one step and compares it with the same step of a tied model in one process."""
    ctx.init_process_group(timeout_s=20)
    ctx.reached()
    model = prepare(make_model(), ctx.device)
    step(model, ctx.device)
    compare(whole(model.embed.weight), whole(model.lm_head.weight), len(list(model.parameters())))


def compare(embed: Any, head: Any, parameters: int) -> None:
    """Raises `Symptom` if embedding and head differ, or differ from those of a tied model after the same step."""
    reference = make_model()
    step(reference, "cpu")
    apart = float((embed - head).abs().max())
    off = float((embed - reference.embed.weight.detach()).abs().max())
    if apart > 1e-4 or off > 1e-4:
        expected = len(list(reference.parameters()))
        raise Symptom(
            f"{parameters} parameters instead of {expected}: after one step embedding and head differ by {apart:.4f}, "
            f"the embedding is {off:.4f} from the tied model's"
        )


def pipeline(ctx: Context, *, reduce: bool) -> None:
    """The first stage has the embedding and the last has the head, each with a copy of the tied weight."""
    import torch
    import torch.distributed as dist

    ctx.init_process_group(timeout_s=20)
    model = make_model(tied=False).to(ctx.device)
    tokens = torch.arange(WORDS, device=ctx.device)
    first = ctx.rank == 0
    weight = model.embed.weight if first else model.lm_head.weight
    tied = dist.new_group([0, 1])
    dist.broadcast(weight.data, src=0, group=tied)
    ctx.reached()
    if first:
        hidden = model.block(model.embed(tokens))
        dist.send(hidden.detach(), dst=1)
        grad = torch.empty_like(hidden)
        dist.recv(grad, src=1)
        hidden.backward(grad)
    else:
        hidden = torch.empty(WORDS, WIDTH, device=ctx.device)
        dist.recv(hidden, src=0)
        hidden.requires_grad_()
        torch.nn.functional.cross_entropy(model.lm_head(hidden), tokens.roll(1)).backward()
        assert hidden.grad is not None
        dist.send(hidden.grad, dst=0)
    if reduce:
        dist.all_reduce(weight.grad, group=tied)
    torch.optim.SGD([weight], lr=RATE).step()
    both = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(both, weight.detach())
    compare(both[0].cpu(), both[1].cpu(), 4)


def make_llama() -> Any:
    """A small Llama of transformers whose head is tied to its embedding."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def train_llama(ctx: Context, *, prepare: Callable[[Any, Any], Any]) -> None:
    """Trains a tied Llama of transformers for one step."""
    model = make_llama()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    ctx.reached()
    step(prepare(model, ctx.device), ctx.device)
    weights = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    if weights[0] is not weights[1]:
        apart = float((weights[0] - weights[1]).abs().max())
        raise Symptom(f"2 parameters instead of 1: after one step embedding and head differ by {apart:.4f}")


def meta_and_back(model: Any, device: Any, *, retie: bool) -> Any:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    rotary = {name: value.clone() for name, value in model.named_buffers()}
    model.to("meta").to_empty(device=device)
    if retie:
        model.tie_weights()
    model.load_state_dict(values)
    for name, buffer in model.named_buffers():
        buffer.copy_(rotary[name])
    return model


def adapter(model: Any, device: Any, *, retie: bool) -> Any:
    """LoRA that also trains copies of embedding and head, which PEFT ties or not."""
    peft: Any = importlib.import_module("peft")
    layers = ["embed_tokens", "lm_head"]
    options = {"ensure_weight_tying": True} if retie else {}
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=layers, **options))


def merge(ctx: Context, *, unties: bool, ensures: bool = False) -> None:
    """Trains a LoRA layer on the embedding of a tied Llama and merges it: does the model compute the same?"""
    import torch

    peft: Any = importlib.import_module("peft")
    options = {"ensure_weight_tying": True} if ensures else {}
    lora = peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], **options)
    model = peft.get_peft_model(make_llama(), lora).to(ctx.device)
    for _ in range(3):
        model.zero_grad()
        step(model, ctx.device)
    model.eval()
    tokens = torch.arange(WORDS, device=ctx.device)[None]
    before = model(tokens).logits.detach()
    ctx.reached()
    if unties:
        base = model.get_base_model()
        head = base.get_output_embeddings()
        head = getattr(head, "base_layer", head)
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        base.config.tie_word_embeddings = False
    model = model.merge_and_unload()
    off = float((model(tokens).logits.detach() - before).abs().max())
    if off > 1e-4:
        raise Symptom(f"after the merge the logits differ by {off:.4f}")


def check(params: Mapping[str, Any]) -> Finding:
    """Does a checkpoint file have the embedding, the head, or both? No file says whether the job ties them."""
    path: Optional[Path] = params["checkpoint"]
    if path is None:
        return unknown("no checkpoint was given", advice="--set checkpoint=/path/to/model.safetensors")
    try:
        names = "\n".join(tensor.name for tensor in read_checkpoint(path).tensors)
    except Unreadable as error:
        return unknown(str(error))
    head = re.search(r"^(.*\.)?(lm_head|output|output_layer|embed_out)\.weight$", names, re.M)
    embedding = re.search(r"^(.*\.)?(embed_tokens|wte|tok_embeddings|word_embeddings|embed_in)\.weight$", names, re.M)
    if head and embedding:
        return unknown(
            f"the file has both {embedding[0]} and {head[0]}; a model that ties them may drop one",
            advice="compare the two with torch.equal; if they differ, they were trained apart",
        )
    if embedding:
        return unknown(
            f"the file has {embedding[0]} and no head that kb knows; without the tie, a model gets a random head",
            advice="after the load: model.get_input_embeddings().weight is model.get_output_embeddings().weight",
        )
    return unknown("the file has no input embedding that kb knows; another file of the model may have it")


APART = symptom(r"\d+ parameters instead of \d+: after one step embedding and head differ by \d")
MERGED = symptom(r"after the merge the logits differ by \d")
ONE = "embedding and head are one parameter, which gets both gradients, so the step is that of the tied model"
LIBRARY: Mapping[str, Any] = {"job": train_llama, "world_size": 1, "deadline_s": 90, "expected_s": (5.0, 5.0)}


def pair(
    name: str,
    prepare: Callable[..., Any],
    because: str,
    *,
    job: Callable[..., None] = train,
    expect: Expect = APART,
    **rest: Any,
) -> Experiment:
    """`prepare` is called with retie=False in the control and retie=True in the treatment."""
    return Experiment(
        name=name,
        control=Arm(partial(job, prepare=partial(prepare, retie=False)), expect, because, "cpu"),
        treatment=Arm(partial(job, prepare=partial(prepare, retie=True)), completed(), ONE, "cpu"),
        **{"expected_s": (0.6, 0.6), **rest},
    )


gloo = pair("gloo", shard_from_meta, "moving the model to meta makes two parameters of the tied one", needs=FULLY_SHARD)

probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "one file of the model: model.safetensors or pytorch_model.bin")},
    experiments=(gloo.on_gpus(), gloo),
    variants=(
        pair(
            "units",
            shard_units,
            "embedding and head are two FSDP units, which torch 2.13 rejects in the first forward",
            expect=raised(r"is shared with a parameter already managed by another FSDP group"),
            needs=Needs(packages={"torch": ">=2.13"}),
            world_size=1,
        ),
        pair("assign", load_clones, "assign=True replaces the tied weight by two tensors", world_size=1),
        pair("omitted", load_without_head, "the checkpoint has no head, so the head keeps random values", world_size=1),
        Experiment(
            name="pipeline",
            control=Arm(
                partial(pipeline, reduce=False),
                APART,
                "each stage steps its copy with only its own part of the gradient",
                "cpu",
            ),
            treatment=Arm(
                partial(pipeline, reduce=True),
                completed(),
                "the two stages all-reduce the gradient of their copies before the step",
                "cpu",
            ),
            expected_s=(0.6, 0.6),
        ),
        pair(
            "transformers",
            meta_and_back,
            "to_empty after a move to meta makes two parameters of the tied one",
            needs=TRANSFORMERS,
            **LIBRARY,
        ),
        *(
            Experiment(
                name=name,
                control=Arm(
                    partial(merge, unties=False, ensures=ensures),
                    MERGED,
                    "the merge adds the embedding's LoRA to the tied weight, so the head changes as well",
                    "cpu",
                ),
                treatment=Arm(
                    partial(merge, unties=True, ensures=ensures),
                    completed(),
                    "the head gets its own copy of the weight before the merge",
                    "cpu",
                ),
                needs=PEFT,
                world_size=1,
                deadline_s=90,
                expected_s=(5.0, 5.0),
            )
            for name, ensures in (("peft-merge", False), ("peft-merge-tied", True))
        ),
        pair("peft", adapter, "modules_to_save makes separate copies of embedding and head", needs=PEFT, **LIBRARY),
    ),
)
