"""Ranks divide a sequence, but its length, labels, mean and documents must come from the whole sequence."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Tuple

from kb.cpu_arms import import_deepspeed
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
    exposed,
    raised,
    symptom,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config

TOKENS, WORDS, WIDTH, HEADS = 16, 32, 16, 4
IGNORED = -100


def shifted(labels: Any) -> Any:
    """Shifts labels by one token to the left; the last one becomes IGNORED."""
    import torch

    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def exchange(x: Any, world: int, to_heads: bool) -> Any:
    """The all-to-all of Ulysses: from all heads of a chunk to all tokens of some heads, or back."""
    import torch
    from torch.distributed.nn.functional import all_to_all_single

    if to_heads:
        x = x.reshape(x.shape[0], world, -1, x.shape[-1]).transpose(0, 1).contiguous()
        return all_to_all_single(torch.empty_like(x), x).flatten(0, 1)
    x = x.reshape(world, -1, *x.shape[1:]).contiguous()
    return all_to_all_single(torch.empty_like(x), x).transpose(0, 1).flatten(1, 2)


def build(ctx: Context) -> Any:
    """Returns the same small model on every rank."""
    import torch
    from torch import nn

    class Model(nn.Module):  # type: ignore[misc]
        """An embedding, one attention layer and a head; with `world` > 1, ranks exchange heads and tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(4 * TOKENS, WIDTH)
            self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)

        def forward(self, ids: Any, places: Any, mask: Any, world: int = 1) -> Any:
            hidden = self.words(ids) + self.places(places)
            q, k, v = (part.reshape(len(ids), HEADS, -1) for part in self.qkv(hidden).chunk(3, -1))
            if world > 1:
                q, k, v = (exchange(part, world, to_heads=True) for part in (q, k, v))
            q, k, v = (part.transpose(0, 1) for part in (q, k, v))
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)
            if world > 1:
                out = exchange(out, world, to_heads=False)
            return self.head(hidden + out.reshape(len(ids), WIDTH))

    torch.manual_seed(0)
    return Model().to(ctx.device)


def make_row(ctx: Context, prompt: int, second: int) -> Tuple[Any, Any, Any, Any]:
    """Returns ids, labels, positions and the attention mask of one row, which may have two documents."""
    import torch

    ids = torch.randint(WORDS, (TOKENS,), device=ctx.device)
    labels, places = ids.clone(), torch.arange(TOKENS, device=ctx.device)
    labels[(places < prompt) | (places == second)] = IGNORED
    mask = ((places[:, None] < second) == (places[None, :] < second)).tril()
    return ids, labels, places, mask


def train(
    ctx: Context,
    *,
    shift: str = "before the split",
    mean: str = "over tokens",
    attends_to: str = "own document",
    prompt: int = 0,
    second: int = TOKENS,
) -> None:
    """Runs one backward on the whole sequence and one on chunks; raises Symptom if loss or gradient differ.

    A second document may begin at token `second`; the first `prompt` tokens have no label.
    """
    import torch
    from torch.nn.functional import cross_entropy

    dist = ctx.init_process_group(timeout_s=15)
    model, world, rank = build(ctx), ctx.world_size, ctx.rank
    ids, labels, places, mask = make_row(ctx, prompt, second)
    expected = cross_entropy(model(ids, places, mask), shifted(labels))
    expected.backward()
    gradient = gradient_of(model)

    if attends_to == "all earlier tokens":
        mask = torch.ones_like(mask).tril()
    size = TOKENS // world
    chunk = slice(size * rank, size * (rank + 1))
    ctx.reached()
    if shift == "before the split":
        targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:][..., chunk]
    else:
        targets = shifted(labels[chunk])
    logits = model(ids[chunk], places[chunk], mask, world)
    if mean == "of ranks":
        loss = cross_entropy(logits, targets) / world
    else:
        tokens = (targets != -100).sum()
        dist.all_reduce(tokens)
        loss = cross_entropy(logits.float(), targets, reduction="sum") / tokens
    if mean == "over tokens, not scaled":
        loss.backward()
    else:
        (loss * world).backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world  # as DDP and FSDP do
    error = float((gradient_of(model) - gradient).norm() / gradient.norm())
    compare(float(loss), float(expected), error)


def gradient_of(model: Any) -> Any:
    """Returns all gradients as one vector, and clears them."""
    import torch

    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return gradient


def compare(loss: float, expected: float, error: float = 0.0) -> None:
    """Raises Symptom if the loss differs or the relative error of the gradient is not small; both may be NaN."""
    if not abs(loss - expected) < 1e-3:
        raise Symptom("loss %.4f with sequence parallelism, %.4f without" % (loss, expected))
    if not error < 1e-3:
        raise Symptom("the loss is right, the gradient is off by %.2f of that without sequence parallelism" % error)


def load_balanced(ctx: Context, *, shift: str) -> None:
    """Computes a loss in torch's context_parallel, which gives each rank a piece of the beginning and of the end."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.functional import cross_entropy

    dist = ctx.init_process_group(timeout_s=15)
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    torch.manual_seed(0)
    table = torch.randn(WORDS, WORDS)
    ids = torch.randperm(TOKENS)[None]
    labels = ids.clone()
    expected = cross_entropy(table[ids[0]], shifted(labels)[0])
    ctx.reached()
    if shift == "before the split":
        labels = shifted(labels).contiguous()
    buffers = [ids, labels]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1], no_restore_buffers={ids, labels}):
        targets = labels[0] if shift == "before the split" else shifted(labels)[0]
        loss = cross_entropy(table[ids[0]], targets, reduction="sum")
    tokens = (targets != IGNORED).sum()
    dist.all_reduce(loss)
    dist.all_reduce(tokens)
    compare(float(loss / tokens), float(expected))


def ulysses(
    ctx: Context,
    *,
    labels: str = "shift_labels",
    length: int = TOKENS,
    multiple: int = 1,
    positions: bool = True,
    packed: bool = False,
    rows: int = 1,
) -> None:
    """Compares the loss of a tiny Llama under DeepSpeed's Ulysses and its loader with the loss without Ulysses."""
    deepspeed = import_deepspeed()
    import torch
    from torch.nn.functional import pad
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]

    dist = ctx.init_process_group(timeout_s=30)
    deepspeed.init_distributed(dist_backend="gloo")
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # type: ignore[import-not-found]
        UlyssesSPAttentionHF,
        UlyssesSPDataLoaderAdapter,
    )

    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=WORDS, attn_implementation="sdpa", initializer_range=0.5, use_cache=False, **size)
    model = LlamaForCausalLM(config)
    halves = 2 if packed else 1
    ids = torch.randint(WORDS, (rows, length))
    batch = {"input_ids": ids, "labels": ids.clone()}
    places = torch.arange(length // halves).repeat(halves).expand(rows, -1)
    batch["labels"][places == 0] = IGNORED
    expected = float(model(**batch, position_ids=places).loss.detach())
    extra = -length % multiple
    batch = {key: pad(x, (0, extra), value=IGNORED if key == "labels" else 0) for key, x in batch.items()}
    if positions:
        batch["position_ids"] = torch.cat([places, torch.arange(length, length + extra).expand(rows, -1)], 1)
    group = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", ctx.world_size, 1)
    loader = UlyssesSPDataLoaderAdapter(
        [batch], ctx.rank, group.get_sequence_parallel_group(), ctx.world_size, torch.device("cpu")
    )
    ctx.reached()
    part = next(loader)
    targets = part.pop("shift_labels")
    arguments = {"labels": targets, "shift_labels": targets} if labels == "shift_labels" else {"labels": targets}
    tokens = (targets != IGNORED).sum()
    loss = model(**part, **arguments).loss.detach() * tokens
    dist.all_reduce(loss)
    dist.all_reduce(tokens)
    compare(float(loss / tokens), expected)


def check(params: Mapping[str, Any]) -> Finding:
    """Do the degrees divide the heads and the length, and can the layers be divided? Never clear: kb reads no loss."""
    sp, cp, length = params["sp"] or 1, params["cp"] or 1, params["length"]
    if params["sp"] is None and params["cp"] is None:
        return unknown("no degree was given", advice="run --set sp=8 --set length=32768 --set model_config=config.json")
    if min(sp, cp) < 1 or (length is not None and length < 1):
        return unknown("a degree or the length is below 1")
    mismatches: List[str] = []
    multiple = math.lcm(sp, 2 * cp if cp > 1 else 1)
    if length is not None and length % multiple:
        mismatches.append("length %d is no multiple of %d" % (length, multiple))
    if params["model_config"] is not None:
        try:
            mismatches += compare_model(params["model_config"], sp, cp)
        except UnreadableConfig as error:
            return unknown(str(error))
    if mismatches:
        return exposed(*mismatches, advice="see the Fix of the entry")
    why = "labels, mean and documents affect the loss, which no configuration shows"
    return unknown(why, advice="compare the loss of one step with and without sequence parallelism")


def compare_model(path: Path, sp: int, cp: int) -> List[str]:
    """Lists what in the model does not suit the degrees. Raises `UnreadableConfig`."""
    values = read_config(path).values
    text = values.get("text_config")
    config: Dict[str, Any] = {**values, **(text if isinstance(text, dict) else {})}
    mismatches = []
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is int and heads > 0 and heads % sp:
        mismatches.append("sp %d does not divide %d heads" % (sp, heads))
    if type(kv_heads) is int and kv_heads > 0 and kv_heads % sp and sp % kv_heads:
        mismatches.append("%d key-value heads do not suit sp %d" % (kv_heads, sp))
    kinds = config.get("layer_types")
    kinds = [str(kind)[:40] for kind in kinds] if isinstance(kinds, list) else []
    if not kinds and config.get("sliding_window") and config.get("use_sliding_window", True):
        kinds = ["sliding_attention"]
    refused = {kind for kind in kinds if kind != "full_attention" and (cp > 1 or "linear_attention" in kind)}
    if refused and max(sp, cp) > 1:
        mismatches.append("layers of %s cannot be divided" % ", ".join(sorted(refused)))
    return mismatches


def pair(
    name: str,
    job: Callable[..., None],
    change: Tuple[str, Any, Any],
    because: str,
    fix: str,
    expect: Expect,
    **common: Any,
) -> Experiment:
    """Returns an experiment; `change` is the keyword that differs, with its values in control and treatment."""
    key, wrong, right = change
    library = job is ulysses
    needs = {"torch": ">=2.6"} if job is load_balanced else {"torch": ">=2.1"}
    if library:
        needs.update(deepspeed=">=0.19", transformers=">=5.0")
    return Experiment(
        name=name,
        control=Arm(partial(job, **common, **{key: wrong}), expect, because, "cpu"),
        treatment=Arm(partial(job, **common, **{key: right}), completed(), fix, "cpu"),
        needs=Needs(packages=needs),
        deadline_s=120.0 if library else 40.0,
        expected_s=(10.0, 10.0) if library else (1.5, 1.5),
    )


LOSS = symptom(r"loss \d+\.\d+ with sequence parallelism, \d+\.\d+ without")
NAN = symptom(r"loss nan with sequence parallelism, \d+\.\d+ without")
HALF = symptom(r"the loss is right, the gradient is off by 0\.50 of that without sequence parallelism")
BEFORE = "before the split"
TOKEN_MEAN = "the sum is divided by the labels of all ranks"
SHIFTED = "the labels are shifted before the split"
shift = pair(
    "shift", train, ("shift", "in each chunk", BEFORE), "each rank shifts the labels of its chunk", SHIFTED, LOSS
)
probe = Probe(
    check=check,
    params={
        "sp": Param("int", "Ulysses degree: sp_size, ulysses_sequence_parallel_size"),
        "cp": Param("int", "degree of ring attention or context parallelism: cp_size"),
        "length": Param("int", "tokens of a row, or the multiple to which rows are padded"),
        "model_config": Param("path", "config.json of the model, for its heads and layers"),
    },
    experiments=(shift.on_gpus(), shift),
    variants=(
        pair(
            "load-balance",
            load_balanced,
            ("shift", "in each chunk", BEFORE),
            "the labels are shifted after torch's split, which joins a piece of the beginning and one of the end",
            SHIFTED,
            LOSS,
        ),
        pair(
            "weights",
            train,
            ("mean", "of ranks", "over tokens"),
            "the loss is the mean of the ranks' means",
            TOKEN_MEAN,
            LOSS,
            prompt=5,
        ),
        pair(
            "prompt",
            train,
            ("mean", "of ranks", "over tokens"),
            "one chunk has no label, so its mean is nan",
            TOKEN_MEAN,
            NAN,
            prompt=9,
        ),
        pair(
            "gradient",
            train,
            ("mean", "over tokens, not scaled", "over tokens"),
            "the loss is summed over ranks, but the gradients are averaged",
            "the loss is multiplied by the number of ranks",
            HALF,
        ),
        pair(
            "documents",
            train,
            ("attends_to", "all earlier tokens", "own document"),
            "a row has two documents, and the mask is plain causal",
            "the mask separates the documents",
            LOSS,
            second=5,
        ),
        pair(
            "ulysses-shift",
            ulysses,
            ("labels", "labels", "shift_labels"),
            "the model gets the loader's shifted labels as labels and shifts them again",
            "the model gets them as shift_labels",
            LOSS,
        ),
        pair(
            "ulysses-length",
            ulysses,
            ("multiple", 1, 2),
            "a row has 15 tokens",
            "the row is padded to 16 tokens",
            raised(r"ValueError: batch's seqlen=15 isn't divisible by sp-size=2"),
            length=15,
        ),
        pair(
            "ulysses-positions",
            ulysses,
            ("positions", False, True),
            "the collator returns no position ids",
            "the collator returns position ids",
            raised(r"ValueError: Ulysses SP requires `position_ids` in every dataloader batch"),
        ),
        pair(
            "ulysses-packed",
            ulysses,
            ("packed", True, False),
            "a row has two documents, which sdpa under Ulysses does not separate",
            "a row has one document",
            LOSS,
        ),
        pair(
            "ulysses-rows",
            ulysses,
            ("rows", 2, 1),
            "a batch has another size than the registered one, as the last batch can have",
            "the batch has the registered size",
            raised(r"query input tensor does not match the required shape"),
        ),
    ),
)
