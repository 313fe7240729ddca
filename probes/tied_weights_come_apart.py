"""A set-up step makes two parameters of the one weight that embedding and head share, so they train apart."""

from __future__ import annotations

import importlib
import re
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional

from kb.checkpoint import Unreadable, read_checkpoint
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

WORDS, WIDTH, RATE = 32, 8, 0.5
FULLY_SHARD = Needs(packages={"torch": ">=2.6"})


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


def fill(model: Any, values: Mapping[str, Any]) -> None:
    """Load the full values into a sharded model, name by name: both names have the same values."""
    import torch
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(distribute_tensor(values[name].to(weight.device), weight.device_mesh, weight.placements))


def shard_from_meta(model: Any, device: Any, *, retie: bool) -> Any:
    """To meta, sharded, materialised, loaded. Whoever ties again does it on meta, and once more after to_empty."""
    from torch.distributed.fsdp import fully_shard

    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta")
    if retie:
        model.lm_head.weight = model.embed.weight
    fully_shard(model)
    model.to_empty(device=device)
    if retie:
        model.lm_head.weight = model.embed.weight
    fill(model, values)
    return model


def shard_units(model: Any, device: Any, *, together: bool) -> Any:
    from torch.distributed.fsdp import fully_shard

    model.to(device)
    if together:
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


def replace_embedding(model: Any, device: Any, *, retie: bool) -> Any:
    """An embedding of one's own in place of the model's, with the same values."""
    from torch import nn

    model.embed = nn.Embedding.from_pretrained(model.embed.weight.detach().clone(), freeze=False)
    if retie:
        model.lm_head.weight = model.embed.weight
    return model.to(device)


def train(ctx: Context, *, prepare: Callable[[Any, Any], Any]) -> None:
    """One step, compared with the same step of a tied model in one process. Both ranks have the same batch."""
    import torch

    ctx.init_process_group(timeout_s=20)
    reference, model = make_model(), make_model()
    ctx.reached()
    model = prepare(model, ctx.device)
    for one, where in ((reference, torch.device("cpu")), (model, ctx.device)):
        tokens = torch.arange(WORDS, device=where)[None]
        optimizer = torch.optim.SGD(one.parameters(), lr=RATE)
        torch.nn.functional.cross_entropy(one(tokens)[0], tokens[0].roll(1)).backward()
        optimizer.step()
    compare(reference, whole(model.embed.weight), whole(model.lm_head.weight), len(list(model.parameters())))


def compare(reference: Any, embed: Any, head: Any, parameters: int) -> None:
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
    reference, model = make_model(), make_model(tied=False).to(ctx.device)
    tokens = torch.arange(WORDS, device=ctx.device)
    first = ctx.rank == 0
    weight = model.embed.weight if first else model.lm_head.weight
    dist.broadcast(weight.data, src=0)
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
        dist.all_reduce(weight.grad)
    torch.optim.SGD([weight], lr=RATE).step()
    both = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(both, weight.detach())
    reference_tokens = tokens.cpu()[None]
    optimizer = torch.optim.SGD(reference.parameters(), lr=RATE)
    torch.nn.functional.cross_entropy(reference(reference_tokens)[0], reference_tokens[0].roll(1)).backward()
    optimizer.step()
    compare(reference, both[0].cpu(), both[1].cpu(), 4)


def llama(ctx: Context, *, retie: bool) -> None:
    """A tied Llama of transformers, moved to meta and back, then trained one step."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    values: Dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    rotary = {name: value.clone() for name, value in model.named_buffers()}
    before = len(list(model.parameters()))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    ctx.reached()
    model.to("meta").to_empty(device=ctx.device)
    if retie:
        model.tie_weights()
    model.load_state_dict(values)
    for name, buffer in model.named_buffers():
        buffer.copy_(rotary[name])
    tokens = torch.arange(WORDS, device=ctx.device)[None]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    inside, outside = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    apart = float((inside - outside).abs().max())
    if inside is not outside:
        after = len(list(model.parameters()))
        raise Symptom(
            f"{after} parameters instead of {before}: after one step embedding and head differ by {apart:.4f}"
        )


def check(params: Mapping[str, Any]) -> Finding:
    """Which of the two names does a checkpoint file have? Whether the job ties them no file can say."""
    path: Optional[Path] = params["checkpoint"]
    if path is None:
        return unknown("no checkpoint was named", advice="--set checkpoint=/path/to/model.safetensors")
    try:
        names = [tensor.name for tensor in read_checkpoint(path).tensors]
    except Unreadable as error:
        return unknown(str(error))
    heads = [name for name in names if re.search(r"(^|\.)(lm_head|output|output_layer|embed_out)\.weight$", name)]
    inputs = [
        name
        for name in names
        if re.search(r"(^|\.)(embed_tokens|wte|tok_embeddings|word_embeddings|embed_in)\.weight$", name)
    ]
    if heads and inputs:
        return unknown(
            f"{inputs[0]} and {heads[0]} are both in the file: a model that ties them may drop one",
            advice="compare them: torch.equal; if they differ, they were trained apart",
        )
    if inputs:
        return unknown(
            f"{inputs[0]} is in the file and no head that kb knows: a model that is not tied starts with a random one",
            advice="after the load: model.get_input_embeddings().weight is model.get_output_embeddings().weight",
        )
    return unknown(f"no input embedding that kb knows among {len(names)} tensors; other files may have it")


APART = symptom(r"\d+ parameters instead of \d+: after one step embedding and head differ by \d")
ONE = "one parameter: it gets both gradients, and the step is that of the tied model"


def apart(name: str, prepare: Callable[..., Any], *, because: str, **rest: Any) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(
            partial(train, prepare=partial(prepare, retie=False)), expect=APART, because=because, fidelity="cpu"
        ),
        treatment=Arm(
            partial(train, prepare=partial(prepare, retie=True)), expect=completed(), because=ONE, fidelity="cpu"
        ),
        expected_s=(0.6, 0.6),
        **rest,
    )


gloo = apart(
    "gloo",
    shard_from_meta,
    because="moved to meta, the two names are two parameters, with equal values",
    needs=FULLY_SHARD,
)

probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "one file of the model: model.safetensors or pytorch_model.bin")},
    experiments=(gloo.on_gpus(), gloo),
    variants=(
        Experiment(
            name="units",
            control=Arm(
                partial(train, prepare=partial(shard_units, together=False)),
                expect=raised(r"is shared with a parameter already managed by another FSDP group"),
                because="each is sharded as a unit of its own; torch 2.13 finds it at the first forward",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(train, prepare=partial(shard_units, together=True)),
                expect=completed(),
                because="both in one unit: the tie is kept",
                fidelity="cpu",
            ),
            needs=Needs(packages={"torch": ">=2.13"}),
            expected_s=(0.6, 0.6),
        ),
        apart("assign", load_clones, because="assign=True puts two tensors in the place of one", world_size=1),
        apart("omitted", load_without_head, because="nobody fills the head: it keeps its random values", world_size=1),
        apart("replaced", replace_embedding, because="the head keeps the old weight", world_size=1),
        Experiment(
            name="pipeline",
            control=Arm(
                partial(pipeline, reduce=False),
                expect=APART,
                because="each stage steps with its own half of the gradient",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(pipeline, reduce=True),
                expect=completed(),
                because="the copies add their gradients before the step",
                fidelity="cpu",
            ),
            expected_s=(0.6, 0.6),
        ),
        Experiment(
            name="transformers",
            control=Arm(partial(llama, retie=False), expect=APART, because="to_empty after meta", fidelity="cpu"),
            treatment=Arm(partial(llama, retie=True), expect=completed(), because="tie_weights()", fidelity="cpu"),
            needs=Needs(packages={"torch": ">=2.2", "transformers": ">=4.40"}, memory_mib=2048),
            world_size=1,
            deadline_s=90,
            expected_s=(5.0, 5.0),
        ),
    ),
)
