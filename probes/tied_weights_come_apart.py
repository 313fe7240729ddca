"""A set-up step makes two parameters of the one weight that embedding and head share, so they train apart."""

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
FULLY_SHARD = Needs(packages={"torch": ">=2.9"})  # on CPU 2.7.1 and 2.8.0 step otherwise, although tied
TRANSFORMERS = Needs(packages={"torch": ">=2.2", "transformers": ">=4.40"}, memory_mib=2048)
PEFT = Needs(packages={**TRANSFORMERS.packages, "peft": ">=0.18"}, memory_mib=2048)


def make_model(*, tied: bool = True) -> Any:
    """An embedding, a block, and a head that uses the embedding's weight."""
    import torch
    from torch import nn

    class Model(nn.Module):  # type: ignore[misc, unused-ignore]  # without torch its class is unknown
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
    """All rows of a weight, sharded or not."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu()


def shard_from_meta(model: Any, device: Any, *, retie: bool) -> Any:
    """To meta, sharded, materialised, loaded. Whoever ties again does it on meta, and once more after to_empty."""
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
    for name, weight in model.named_parameters():  # both names have the same values
        part = distribute_tensor(values[name].to(weight.device), weight.device_mesh, weight.placements)
        weight.data.copy_(part)
    return model


def shard_units(model: Any, device: Any, *, retie: bool) -> Any:
    """The tie is kept by one unit for both."""
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
    """assign=True puts the tensors of the file into the model: two, as of a file that has a copy under each name."""
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    if retie:
        model.lm_head.weight = model.embed.weight
    return model.to(device)


def load_without_head(model: Any, device: Any, *, retie: bool) -> Any:
    """The checkpoint omits the head, as of a tied model; the model that loads it was built without the tie."""
    values = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model = make_model(tied=False)
    model.load_state_dict(values, strict=False)
    if retie:
        model.lm_head.weight = model.embed.weight
    return model.to(device)


def step(model: Any, device: Any, **rest: Any) -> None:
    """One step of SGD. Every rank has the same batch."""
    import torch

    tokens = torch.arange(WORDS, device=device)
    answer = model(tokens[None], **rest)
    logits = getattr(answer, "logits", answer)[0]
    torch.nn.functional.cross_entropy(logits, tokens.roll(1)).backward()
    torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=RATE).step()


def train(ctx: Context, *, prepare: Callable[[Any, Any], Any]) -> None:
    """One step, compared with the same step of a tied model in one process."""
    ctx.init_process_group(timeout_s=20)
    ctx.reached()
    model = prepare(make_model(), ctx.device)
    step(model, ctx.device)
    compare(whole(model.embed.weight), whole(model.lm_head.weight), len(list(model.parameters())))


def compare(embed: Any, head: Any, parameters: int) -> None:
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
    """The embedding on the first stage, the head with its own copy on the last: who adds the gradients?"""
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


def llama(ctx: Context, *, prepare: Callable[[Any, Any], Any]) -> None:
    """A tied Llama of transformers, trained one step."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
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
    """LoRA that also trains both, as their own copies."""
    peft: Any = importlib.import_module("peft")
    both = ["embed_tokens", "lm_head"]
    options = {"ensure_weight_tying": True} if retie else {}
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=both, **options))


def merge(ctx: Context, *, unties: bool, ensures: bool = False) -> None:
    """A LoRA layer on the embedding of a tied Llama is trained and merged: does the model stay the same?"""
    import torch

    transformers: Any = importlib.import_module("transformers")
    peft: Any = importlib.import_module("peft")
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    torch.manual_seed(0)
    options = {"ensure_weight_tying": True} if ensures else {}
    lora = peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], **options)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora).to(ctx.device)
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
    """Which of the two names does a checkpoint file have? Whether the job ties them no file can say."""
    path: Optional[Path] = params["checkpoint"]
    if path is None:
        return unknown("no checkpoint was named", advice="--set checkpoint=/path/to/model.safetensors")
    try:
        names = "\n".join(tensor.name for tensor in read_checkpoint(path).tensors)
    except Unreadable as error:
        return unknown(str(error))
    head = re.search(r"^(.*\.)?(lm_head|output|output_layer|embed_out)\.weight$", names, re.M)
    first = re.search(r"^(.*\.)?(embed_tokens|wte|tok_embeddings|word_embeddings|embed_in)\.weight$", names, re.M)
    if head and first:
        return unknown(
            f"{first[0]} and {head[0]} are both in the file: a model that ties them may drop one",
            advice="compare them: torch.equal; if they differ, they were trained apart",
        )
    if first:
        return unknown(
            f"{first[0]} is in the file and no head that kb knows: a model that is not tied starts with a random one",
            advice="after the load: model.get_input_embeddings().weight is model.get_output_embeddings().weight",
        )
    return unknown("no input embedding that kb knows is in the file; other files may have it")


APART = symptom(r"\d+ parameters instead of \d+: after one step embedding and head differ by \d")
MERGED = symptom(r"after the merge the logits differ by \d")
ONE = "one parameter: it gets both gradients, and the step is that of the tied model"
LIBRARY: Mapping[str, Any] = {"job": llama, "world_size": 1, "deadline_s": 90, "expected_s": (5.0, 5.0)}


def apart(
    name: str,
    prepare: Callable[..., Any],
    because: str,
    *,
    job: Callable[..., None] = train,
    expect: Expect = APART,
    **rest: Any,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(partial(job, prepare=partial(prepare, retie=False)), expect, because, "cpu"),
        treatment=Arm(partial(job, prepare=partial(prepare, retie=True)), completed(), ONE, "cpu"),
        **{"expected_s": (0.6, 0.6), **rest},
    )


gloo = apart("gloo", shard_from_meta, "moved to meta, the two names are two parameters", needs=FULLY_SHARD)

probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "one file of the model: model.safetensors or pytorch_model.bin")},
    experiments=(gloo.on_gpus(), gloo),
    variants=(
        apart(
            "units",
            shard_units,
            "each is sharded as a unit of its own; torch 2.13 finds it at the first forward",
            expect=raised(r"is shared with a parameter already managed by another FSDP group"),
            needs=Needs(packages={"torch": ">=2.13"}),
            world_size=1,
        ),
        apart("assign", load_clones, "assign=True puts two tensors in the place of one", world_size=1),
        apart("omitted", load_without_head, "nobody fills the head: it keeps its random values", world_size=1),
        Experiment(
            name="pipeline",
            control=Arm(partial(pipeline, reduce=False), APART, "each steps with its half of the gradient", "cpu"),
            treatment=Arm(partial(pipeline, reduce=True), completed(), "the copies add their gradients", "cpu"),
            expected_s=(0.6, 0.6),
        ),
        apart("transformers", meta_and_back, "to_empty after meta", needs=TRANSFORMERS, **LIBRARY),
        *(
            Experiment(
                name=name,
                control=Arm(partial(merge, unties=False, ensures=ensures), MERGED, "one weight gets both", "cpu"),
                treatment=Arm(partial(merge, unties=True, ensures=ensures), completed(), "the head is its own", "cpu"),
                needs=PEFT,
                world_size=1,
                deadline_s=90,
                expected_s=(5.0, 5.0),
            )
            for name, ensures in (("peft-merge", False), ("peft-merge-tied", True))
        ),
        apart("peft", adapter, "modules_to_save makes a copy of each", needs=PEFT, **LIBRARY),
    ),
)
