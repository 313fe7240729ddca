"""The tokenizer has one token more than the model has embedding rows, and only one rank's batch contains it."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from kb.checkpoint import Unreadable, read_checkpoint
from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown

ROWS, NEW_ID = 32, 32  # the ids 0 to 31 have a row
FIXES = ("resize", "resize-late", "shrink")


def train(ctx: Context, *, fixed: bool) -> None:
    """Three steps of DDP on two ranks. The new token is in the batch of rank 1 in step 1, as a pad token would be."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    dist = ctx.init_process_group(timeout_s=10)
    fix = ctx.params["fix"] if fixed else ""
    torch.manual_seed(0)

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(ROWS, 8)
            self.head = torch.nn.Linear(8, 4)

        def resize(self, rows: int) -> None:
            """New rows get the mean of the old ones. A new embedding is a new parameter."""
            old = self.embedding.weight.detach()
            grown = torch.cat([old, old.mean(0).repeat(max(0, rows - len(old)), 1)])[:rows]
            self.embedding = torch.nn.Embedding.from_pretrained(grown, freeze=False)

        def forward(self, ids: Any) -> Any:
            return self.head(self.embedding(ids)).mean(1)

    model = Model().to(ctx.device)
    if fix in ("resize", "shrink"):
        model.resize(NEW_ID + 1 if fix == "resize" else ROWS - 2)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    if fix == "resize-late":  # after DDP and the optimizer took their parameters
        model.resize(NEW_ID + 1)
    first = model.embedding.weight.detach().clone()
    ctx.reached()
    for step in range(3):
        ids = torch.arange(step * 4 + ctx.rank * 16, step * 4 + ctx.rank * 16 + 4).reshape(2, 2)
        if step == 1 and ctx.rank == 1:
            ids[1, 1] = NEW_ID
        optimizer.zero_grad()
        cross_entropy(wrapped(ids.to(ctx.device)), torch.tensor([step, 3], device=ctx.device)).backward()
        optimizer.step()
    weight = model.embedding.weight.detach()
    everyones = [torch.empty_like(weight) for _ in range(ctx.world_size)]
    dist.all_gather(everyones, weight)
    assert all(torch.equal(everyone, weight) for everyone in everyones), "the ranks trained different embeddings"
    assert not torch.equal(weight[NEW_ID], first[NEW_ID]), "the new row was never trained"


def train_with_transformers(ctx: Context, *, resized: bool) -> None:
    """A tokenizer made on the spot, a pad token added to it, a tiny GPT-2 with one row per old token."""
    import torch

    hf: Any = importlib.import_module("transformers")
    tk: Any = importlib.import_module("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", *"abcdefghijklmno"])}
    plain = tk.Tokenizer(tk.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tk.pre_tokenizers.Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")
    config = hf.GPT2Config(vocab_size=len(tokenizer), n_positions=8, n_embd=8, n_layer=1, n_head=1)
    model = hf.GPT2LMHeadModel(config)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    if resized:
        model.resize_token_embeddings(len(tokenizer))
    batch = tokenizer(["a b c d", "e f"], padding=True, return_tensors="pt")
    assert batch["input_ids"].max() == 16, batch["input_ids"]
    ctx.note(tokenizer_vocab_size=tokenizer.vocab_size, tokenizer_len=len(tokenizer), rows=model.config.vocab_size)
    ctx.reached()
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    assert torch.isfinite(loss), loss


def check(params: Mapping[str, Any]) -> Finding:
    """Is there a token id without an embedding row in this model's folder?"""
    model, tokenizer = params["model"], params["tokenizer"] or params["model"]
    if model is None:
        return unknown("no model was named", advice="--set model=folder, and --set tokenizer=folder if it is another")
    config = read_json(model / "config.json")
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    declared = config.get("vocab_size")
    embedding = saved_rows(model)
    rows = embedding[1] if embedding else declared
    highest, token, source = highest_id(tokenizer)
    if not isinstance(rows, int) or highest is None:
        missing = "no vocab_size and no embedding" if not isinstance(rows, int) else f"no token ids in {tokenizer}"
        return unknown(
            f"{missing} could be read", advice="print(len(tokenizer), model.get_input_embeddings().weight.shape)"
        )
    message = [
        f"{embedding[0]}: {rows} rows" if embedding else f"config.json: vocab_size {rows}",
        f"{source}: {token!r} is {highest}",
    ]
    if highest >= rows:
        advice = (
            "model.resize_token_embeddings(len(tokenizer)) after loading and before LoRA, DDP, FSDP and the optimizer"
        )
        return exposed(f"token id {highest} has no embedding row", *message, advice=advice)
    if isinstance(declared, int) and declared != rows:
        return exposed(
            f"config.json says vocab_size {declared}", *message, advice="save the model with its own config again"
        )
    return clear(f"the highest token id {highest} is below the {rows} embedding rows", *message)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size < 64 << 20 else None
    except (OSError, ValueError):
        return None


def saved_rows(model: Path) -> Optional[Tuple[str, int]]:
    """The saved input embedding of a safetensors model: its name and rows."""
    index = read_json(model / "model.safetensors.index.json")
    shards = index.get("weight_map", {}) if isinstance(index, dict) else {}
    embeddings = [name for name in shards if name.endswith(EMBEDDINGS)]
    file = shards[embeddings[0]] if embeddings else "model.safetensors"
    try:
        tensors = read_checkpoint(model / str(file)).tensors
    except Unreadable:
        return None
    result = [tensor for tensor in tensors if tensor.name.endswith(EMBEDDINGS) and len(tensor.shape) == 2]
    return (result[0].name, result[0].shape[0]) if result else None


EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight", "embed_in.weight")


def highest_id(folder: Path) -> Tuple[Optional[int], str, str]:
    """The highest id of a tokenizer's folder, its token, and the file that says so."""
    best: Tuple[Optional[int], str, str] = (None, "", "")
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json", "tokenizer_config.json"):
        for token, number in ids_in(name, read_json(folder / name)).items():
            if isinstance(number, int) and (best[0] is None or number > best[0]):
                best = (number, str(token), name)
    return best


def ids_in(name: str, content: Any) -> Dict[str, Any]:
    if not isinstance(content, dict):
        return {}
    if name == "tokenizer.json":
        vocabulary = content.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, list):  # unigram: pairs of token and score
            vocabulary = {str(item[0]): number for number, item in enumerate(vocabulary)}
        added: List[Any] = content.get("added_tokens") or []
        return {**vocabulary, **{item.get("content", ""): item.get("id") for item in added}}
    if name == "tokenizer_config.json":
        decoder = content.get("added_tokens_decoder") or {}
        return {str(item.get("content")): int(number) for number, item in decoder.items() if number.isdigit()}
    return content


gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(train, fixed=False),
        expect=raised(r"index out of range in self"),
        because="rank 1 meets an id without a row; rank 0 waits for its gradients",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(train, fixed=True),
        expect=completed(),
        because="the embedding got a row for it before DDP and the optimizer (--set fix=resize, resize-late or shrink)",
        fidelity="cpu",
    ),
    expected_s=(0.3, 0.3),
)

probe = Probe(
    check=check,
    params={
        "fix": Param("str", "what the treatment arm does: %s" % ", ".join(FIXES), "resize"),
        "model": Param("path", "the folder of the model: config.json, safetensors"),
        "tokenizer": Param("path", "the folder of the tokenizer, when it is not the model's"),
    },
    experiments=(gloo.on_gpus(expect=raised(r"device-side assert triggered")), gloo),
    variants=(
        Experiment(
            name="transformers",
            control=Arm(
                partial(train_with_transformers, resized=False),
                expect=raised(r"index out of range in self"),
                because="add_special_tokens({'pad_token': '[PAD]'}) and nothing else",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(train_with_transformers, resized=True),
                expect=completed(),
                because="model.resize_token_embeddings(len(tokenizer)) after it",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=4.40", "tokenizers": ""}, memory_mib=2048),
            deadline_s=90,
            expected_s=(4, 4),
        ),
    ),
)
