"""The tokenizer has one more token than the model has embedding rows, and only one rank's batch contains that token."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

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
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

ROWS, NEW_ID = 32, 32  # ids 0 to 31 have a row, id 32 does not


def build_model() -> Any:
    """An embedding with one row per old token, and a linear head."""
    import torch

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = torch.nn.Embedding(ROWS, 8)
            self.head = torch.nn.Linear(8, 4)

        def resize(self, rows: int) -> None:
            """Replaces the embedding by one of `rows` rows, a new parameter; a new row is the mean of the old rows."""
            old = self.embed_tokens.weight.detach()
            grown = torch.cat([old, old.mean(0).repeat(max(0, rows - len(old)), 1)])[:rows]
            self.embed_tokens = torch.nn.Embedding.from_pretrained(grown, freeze=False)

        def forward(self, ids: Any) -> Any:
            return self.head(self.embed_tokens(ids)).mean(1)

    return Model()


def make_batch(ctx: Context, step: int) -> Any:
    """Four ids. Rank 1 has the new token in step 1, as it would have a pad token."""
    import torch

    ids = torch.arange(step * 4 + ctx.rank * 16, step * 4 + ctx.rank * 16 + 4).reshape(2, 2)
    if step == 1 and ctx.rank == 1:
        ids[1, 1] = NEW_ID
    return ids


def train(ctx: Context, *, fix: str) -> None:
    """Three steps of DDP on two ranks."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=10)
    torch.manual_seed(0)
    model = build_model().to(ctx.device)
    if fix in ("resize", "vocab-size"):
        model.resize(ROWS + (fix == "resize"))  # tokenizer.vocab_size does not count the added token
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    if fix == "late":  # DDP and the optimizer hold the old parameter
        model.resize(ROWS + 1)
    first = model.embed_tokens.weight.detach().clone()
    ctx.reached()
    for step in range(3):
        ids = make_batch(ctx, step)
        if fix == "clamp":
            ids = ids.clamp(max=ROWS - 1)
        optimizer.zero_grad()
        try:
            cross_entropy(wrapped(ids.to(ctx.device)), torch.tensor([step, 3], device=ctx.device)).backward()
        except RuntimeError as error:
            if fix != "late":
                raise
            moved = (model.embed_tokens.weight - first).abs().max().item()
            raise Symptom("in step %d the new rows have moved by %s; DDP: %s" % (step, moved, error)) from error
        optimizer.step()
    judge(model.embed_tokens.weight.detach(), first, clamped=fix == "clamp")


def judge(weight: Any, first: Any, *, clamped: bool) -> None:
    """All ranks have the same embedding, and training moved the row of the new token and no other token's row."""
    import torch
    import torch.distributed as dist

    everyones = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, weight)
    assert all(torch.equal(everyone, weight) for everyone in everyones), "the ranks trained different embeddings"
    if clamped:
        moved = (weight[ROWS - 1] - first[ROWS - 1]).abs().max().item()
        raise Symptom("id %d is in no batch, and its row has moved by %.4f" % (ROWS - 1, moved))
    assert not torch.equal(weight[NEW_ID], first[NEW_ID]), "the new row was never trained"


def reload(ctx: Context, *, cuts: bool) -> None:
    """A model that has more rows than its tokenizer has tokens; cut down to the tokenizer, it no longer loads."""
    import torch

    def build(rows: int) -> Any:
        return torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(rows, 8)})

    original = build(ROWS + 4)
    tokens = ROWS + 1
    tuned = build(tokens if cuts else ROWS + 4)
    ctx.reached()
    original.load_state_dict(tuned.state_dict())


def tokenizer_of_16() -> Any:
    hf: Any = importlib.import_module("transformers")
    tk: Any = importlib.import_module("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", *"abcdefghijklmno"])}
    plain = tk.Tokenizer(tk.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tk.pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")


def model_of_16(*, tied: bool = False) -> Any:
    import torch

    hf: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=16, tie_word_embeddings=tied, **sizes))


def train_with_transformers(ctx: Context, *, fix: str) -> None:
    """A tokenizer that gets a pad token, and a tiny model with one row per old token."""
    import torch

    tokenizer, model = tokenizer_of_16(), model_of_16()
    if fix == "existing":
        tokenizer.pad_token = tokenizer.unk_token
    else:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
    if fix == "resize":
        weight = model.get_input_embeddings().weight
        rows = getattr(weight, "ds_shape", weight.shape)[0]
        need = max(tokenizer.get_vocab().values()) + 1
        if need > rows:
            model.resize_token_embeddings(need, pad_to_multiple_of=64)
        model.config.pad_token_id = tokenizer.pad_token_id
    batch = tokenizer(["a b c d", "e f"], padding=True, return_tensors="pt", return_token_type_ids=False)
    ctx.note(
        tokenizer_vocab_size=tokenizer.vocab_size, tokenizer_len=len(tokenizer), highest=int(batch.input_ids.max())
    )
    ctx.reached()
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    assert torch.isfinite(loss), loss


def resize_late(ctx: Context, *, late: bool, wraps: bool) -> None:
    """Two steps; transformers resizes the model before, or after, DDP and the optimizer take the parameters."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=10)
    model, ids = model_of_16(), torch.tensor([[1, 16, 3, 16]])
    if not late:
        model.resize_token_embeddings(17)
    wrapped = DistributedDataParallel(model) if wraps else model
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    if late:
        model.resize_token_embeddings(17)
    weights = model.get_input_embeddings().weight, model.lm_head.weight
    first = torch.stack([weight[16].detach() for weight in weights])
    ctx.reached()
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    moved = (torch.stack([weight[16].detach() for weight in weights]) - first).abs().amax(1).tolist()
    if not all(moved):
        raise Symptom("the rows of the new token in embed_tokens and lm_head have moved by %s" % moved)


def load_adapter(ctx: Context, *, resizes: bool) -> None:
    """Loads an adapter that contains an embedding of 17 rows; the base model has 16."""
    from peft import LoraConfig, PeftModel, get_peft_model  # type: ignore[import-not-found]

    trained, model, adapter = model_of_16(), model_of_16(), ctx.path("adapter")
    trained.resize_token_embeddings(17)
    config = LoraConfig(task_type="CAUSAL_LM", modules_to_save=["embed_tokens", "lm_head"])
    get_peft_model(trained, config).save_pretrained(adapter)
    rows = 17
    ctx.reached()
    if resizes:
        model.resize_token_embeddings(rows)
        model = PeftModel.from_pretrained(model, adapter)
    else:
        model = PeftModel.from_pretrained(model, adapter)
    assert model.get_input_embeddings().weight.shape[0] == rows


def train_adapter(ctx: Context, *, rows: str, tied: bool = False) -> None:
    """One step of LoRA with the new token 16. `rows` says which of its rows train: `none`, `input` or `all`."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = model_of_16(tied=tied)
    model.resize_token_embeddings(17)
    new_ids = [16]
    if rows == "all":
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        layers = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
        config = LoraConfig(task_type="CAUSAL_LM", trainable_token_indices=dict.fromkeys(layers, new_ids))
    elif rows == "input":
        config = LoraConfig(task_type="CAUSAL_LM", trainable_token_indices={"embed_tokens": new_ids})
    else:
        config = LoraConfig(task_type="CAUSAL_LM")
    model, ids = get_peft_model(model, config), torch.tensor([[1, 16, 3, 16]])
    embedding, head, identity = model.get_input_embeddings(), model.get_output_embeddings(), torch.eye(8)
    # PEFT has wrapped both layers, so their outputs show the rows
    first, first_head = embedding(ids).detach(), head(identity).detach()
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1.0)
    ctx.reached()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    moved = (embedding(ids).detach() - first).abs().amax(-1)[0].tolist()[:3]
    if moved[1] == 0:
        raise Symptom("after a step the rows of 1, 16 and 3 have moved by %s" % moved)
    assert moved[0] == moved[2] == 0, moved
    moved_head = (head(identity).detach() - first_head).abs().amax(0)[[1, 16, 3]].tolist()
    if moved_head[1] == 0:
        raise Symptom(
            "after a step embed_tokens of 16 has moved by %s, lm_head of it by %s" % (moved[1], moved_head[1])
        )
    assert moved_head[0] == moved_head[2] == 0, moved_head


COMPARE = "print(max(tokenizer.get_vocab().values()), model.get_input_embeddings().weight.shape)"


def check(params: Mapping[str, Any]) -> Finding:
    """Does the tokenizer have a token id for which the model in this folder has no embedding row?"""
    model, tokenizer = params["model"], params["tokenizer"] or params["model"]
    if model is None:
        advice = "--set model=FOLDER, and --set tokenizer=FOLDER if the tokenizer is in another folder"
        return unknown("no model folder was given", advice=advice)
    config = read_json(model / "config.json")
    config = config if isinstance(config, dict) else {}
    config = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    declared = config.get("vocab_size")
    embedding = saved_rows(model)
    rows = embedding[1] if embedding else declared
    highest, token, source = highest_id(tokenizer)
    if not isinstance(rows, int) or highest is None:
        missing = (
            f"a vocab_size or an embedding in {model}" if not isinstance(rows, int) else f"token ids in {tokenizer}"
        )
        return unknown(f"kb could not read {missing}", advice=COMPARE)
    evidence = [
        f"{embedding[0]}: {rows} rows" if embedding else f"config.json: vocab_size {rows}",
        f"{source}: token {token!r} has id {highest}",
    ]
    if highest >= rows:
        resize = f"model.resize_token_embeddings({highest + 1})"
        advice = f"call {resize} after loading and before LoRA, DDP, FSDP and the optimizer"
        return exposed(f"token id {highest} has no embedding row", *evidence, advice=advice)
    if isinstance(declared, int) and declared != rows:
        differs = f"config.json says vocab_size {declared}, which is not the number of saved rows"
        return exposed(differs, *evidence, advice="save the model again together with its own config")
    if embedding is None:
        unread = "kb could not count the saved rows: it reads safetensors whose input embeddings have one size"
        return unknown(*evidence, unread)
    if not any(ids_in(name, read_json(tokenizer / name)) for name in VOCABULARIES):
        return unknown(*evidence, "kb could not read the vocabulary: it reads tokenizer.json and vocab.json only")
    spare = rows - 1 - highest
    if not spare:
        no_room = "the tokenizer fits the model, but no row is left for a token that the script adds"
        return unknown(no_room, *evidence, advice=COMPARE)
    fits = f"the highest token id {highest} is below the {rows} embedding rows"
    return clear(fits, f"the script may add up to {spare} tokens", *evidence)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size < 64 << 20 else None
    except (OSError, ValueError):
        return None


def saved_rows(model: Path) -> Optional[Tuple[str, int]]:
    """The name and number of rows of a safetensors model's input embedding; None if it has several of unequal size."""
    index = read_json(model / "model.safetensors.index.json")
    shards = index.get("weight_map") if isinstance(index, dict) else None
    shards = shards if isinstance(shards, dict) else {}
    files = {str(shards[name]) for name in shards if name.endswith(EMBEDDINGS)} or {"model.safetensors"}
    try:
        tensors = [tensor for file in sorted(files) for tensor in read_checkpoint(model / file).tensors]
    except Unreadable:
        return None
    embeddings = [tensor for tensor in tensors if tensor.name.endswith(EMBEDDINGS) and len(tensor.shape) == 2]
    if len({tensor.shape[0] for tensor in embeddings}) != 1:
        return None
    return embeddings[0].name, embeddings[0].shape[0]


VOCABULARIES = ("tokenizer.json", "vocab.json")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight", "embed_in.weight")


def highest_id(folder: Path) -> Tuple[Optional[int], str, str]:
    """The highest id in a tokenizer's folder, its token, and the file that contains it."""
    best: Tuple[Optional[int], str, str] = (None, "", "")
    for name in (*VOCABULARIES, "added_tokens.json", "tokenizer_config.json"):
        for token, number in ids_in(name, read_json(folder / name)).items():
            if isinstance(number, int) and (best[0] is None or number > best[0]):
                best = (number, str(token), name)
    return best


def ids_in(name: str, content: Any) -> Dict[str, Any]:
    if not isinstance(content, dict):
        return {}
    if name == "tokenizer.json":
        model = content.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocabulary, list):  # a unigram model has pairs of token and score
            vocabulary = {
                str(item[0] if item else ""): number for number, item in enumerate(vocabulary) if isinstance(item, list)
            }
        if not isinstance(vocabulary, dict):
            return {}
        added = [item for item in content.get("added_tokens") or () if isinstance(item, dict)]
        return {**vocabulary, **{str(item.get("content")): item.get("id") for item in added}}
    if name == "tokenizer_config.json":
        decoder = content.get("added_tokens_decoder")
        decoder = decoder if isinstance(decoder, dict) else {}
        named = {number: item for number, item in decoder.items() if number.isdigit() and isinstance(item, dict)}
        return {str(item.get("content")): int(number) for number, item in named.items()}
    return content


OUT = raised(r"index out of range in self")
ROW = "the embedding is resized for the new token before DDP and the optimizer take its parameters"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(train, fix=""),
        expect=OUT,
        because="rank 1 has a token id without an embedding row and raises; rank 0 waits for its gradients",
        fidelity="cpu",
    ),
    treatment=Arm(partial(train, fix="resize"), expect=completed(), because=ROW, fidelity="cpu"),
    expected_s=(0.3, 0.3),
)


def variant(
    name: str,
    broken: Callable[[Context], None],
    fixed: Callable[[Context], None],
    expect: Expect,
    because: str,
    fix: str,
    packages: Optional[Mapping[str, str]] = None,
) -> Experiment:
    """An experiment in plain torch on two ranks, or, with `packages`, in one process with these libraries."""
    return Experiment(
        name=name,
        control=Arm(broken, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(fixed, expect=completed(), because=fix, fidelity="cpu"),
        world_size=1 if packages is not None else 2,
        needs=Needs(packages={"torch": ">=2.1", **(packages or {})}, memory_mib=2048 if packages else 1024),
        deadline_s=90 if packages else 20,
        expected_s=(4, 4) if packages else (0.3, 0.3),
    )


HF = {"transformers": ">=4.46", "tokenizers": ""}
PEFT = {"transformers": ">=4.46", "peft": ">=0.18"}
RESIZED = partial(train, fix="resize")

probe = Probe(
    check=check,
    params={
        "model": Param("path", "folder of the model, with config.json and safetensors files"),
        "tokenizer": Param("path", "folder of the tokenizer, if it is not the model's folder"),
    },
    experiments=(gloo.on_gpus(expect=raised(r"device-side assert triggered")), gloo),
    variants=(
        variant(
            "vocab-size",
            partial(train, fix="vocab-size"),
            RESIZED,
            OUT,
            "the embedding is resized to tokenizer.vocab_size, which does not count the added token",
            ROW,
        ),
        variant(
            "resize-late",
            partial(train, fix="late"),
            RESIZED,
            symptom(r"in step 1 the new rows have moved by 0\.0; DDP: Expected to have finished reduction"),
            "the embedding is resized after DDP and the optimizer took its parameters, so the new one never trains",
            ROW,
        ),
        variant(
            "clamp",
            partial(train, fix="clamp"),
            RESIZED,
            symptom(r"id 31 is in no batch, and its row has moved by 0\.0*[1-9]"),
            "clamping the ids turns the new token into the last old token, whose row trains in its place",
            ROW,
        ),
        variant(
            "cut-down",
            partial(reload, cuts=True),
            partial(reload, cuts=False),
            raised(r"size mismatch for embed_tokens\.weight"),
            "an embedding with spare rows is cut down to the tokenizer, so its weights no longer load",
            "the embedding is resized only if the tokenizer has more tokens than it has rows",
            {},
        ),
        variant(
            "transformers",
            partial(train_with_transformers, fix=""),
            partial(train_with_transformers, fix="resize"),
            OUT,
            "the script adds a pad token and does not resize the model",
            "the script resizes the model after it has added the pad token",
            HF,
        ),
        variant(
            "existing-token",
            partial(train_with_transformers, fix=""),
            partial(train_with_transformers, fix="existing"),
            OUT,
            "the script adds a pad token and does not resize the model",
            "the script pads with a token that the tokenizer already has",
            HF,
        ),
        variant(
            "peft-load",
            partial(load_adapter, resizes=False),
            partial(load_adapter, resizes=True),
            raised(r"size mismatch for \S*embed_tokens\S*"),
            "the adapter contains the embedding of the resized model, but the base model is not resized",
            "the base model is resized before the adapter is loaded",
            PEFT,
        ),
        variant(
            "ddp-then-resize",
            partial(resize_late, late=True, wraps=True),
            partial(resize_late, late=False, wraps=True),
            raised(r"EmbeddingBackward0 returned an invalid gradient at index 0 - got \[17, 8\] but expected"),
            "the model is resized after DDP wrapped it",
            "the model is resized before DDP wraps it",
            HF,
        ),
        variant(
            "optimizer-then-resize",
            partial(resize_late, late=True, wraps=False),
            partial(resize_late, late=False, wraps=False),
            symptom(r"in embed_tokens and lm_head have moved by \[(?!0\.0,)\S+, 0\.0\]"),
            "the model is resized after the optimizer took its parameters, so the new lm_head (not tied) never trains",
            "the model is resized before the optimizer takes its parameters",
            HF,
        ),
        variant(
            "peft-rows",
            partial(train_adapter, rows="none"),
            partial(train_adapter, rows="all"),
            symptom(r"have moved by \[0\.0, 0\.0, 0\.0\]"),
            "LoRA alone trains no embedding, so the row of the new token never moves",
            "trainable_token_indices names the new row in embed_tokens and in lm_head",
            PEFT,
        ),
        variant(
            "peft-head",
            partial(train_adapter, rows="input"),
            partial(train_adapter, rows="all"),
            symptom(r"after a step embed_tokens of 16 has moved by \S+, lm_head of it by 0\.0$"),
            "trainable_token_indices names embed_tokens only, but lm_head is not tied to it",
            "trainable_token_indices names the new row in embed_tokens and in lm_head",
            PEFT,
        ),
        variant(
            "peft-tied",
            partial(train_adapter, rows="none", tied=True),
            partial(train_adapter, rows="all", tied=True),
            symptom(r"have moved by \[0\.0, 0\.0, 0\.0\]"),
            "the weights are tied, and LoRA alone never trains the row of the new token",
            "trainable_token_indices names embed_tokens only, and the tied lm_head follows",
            PEFT,
        ),
    ),
)
