"""Two documents are packed into one row. Does the model compute the second as if it were alone?"""

import math
import re
from functools import partial
from importlib.util import find_spec
from typing import Any, Callable, List, Mapping, Optional, Tuple

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
    Unavailable,
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config

END = 0  # the end-of-sequence token, which ends each document
FIRST, SECOND = [3, 4, 5, 6, 7, 8, END], [11, 12, 13, 14, END]
PACKED = [len(FIRST), len(SECOND)]


def build_model(vocabulary: int, rotary: bool = False, flex: bool = False) -> Any:
    """Builds two layers of attention, with learned position vectors or (`rotary`) rotated queries and keys."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(vocabulary, 32)
            self.places = torch.nn.Embedding(64, 32)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 96) for _ in range(2))
            self.head = torch.nn.Linear(32, vocabulary)

        def attend(self, x: Any, layer: Any, position_ids: Any, mask: Any) -> Any:
            query, key, value = layer(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
            if rotary:
                angles = position_ids[:, None, :, None] * 0.5 ** torch.arange(8)
                query, key = (turn(part, angles) for part in (query, key))
            if flex:
                from torch.nn.attention.flex_attention import flex_attention

                y = flex_attention(query, key, value, block_mask=mask)
            else:
                y = scaled_dot_product_attention(query, key, value, attn_mask=mask)
            return torch.as_tensor(y).transpose(1, 2).reshape(x.shape)

        def forward(self, input_ids: Any, position_ids: Any, mask: Any) -> Any:
            x = self.words(input_ids) if rotary else self.words(input_ids) + self.places(position_ids)
            for layer in self.layers:
                x = x + self.attend(torch.nn.functional.layer_norm(x, (32,)), layer, position_ids, mask)
            return self.head(x)

    def turn(x: Any, angles: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    torch.manual_seed(0)
    return Model()


def arrange(lengths: List[int], *, documents: bool, restart: bool, flex: bool = False) -> Tuple[Any, Any]:
    """Returns the position ids and the mask of a row that holds documents of these lengths."""
    import torch

    document_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    length = len(document_ids)
    position_ids = torch.arange(length)[None]
    if restart:
        position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    if flex:
        from torch.nn.attention.flex_attention import create_block_mask

        def allowed(batch: Any, head: Any, query: Any, key: Any) -> Any:
            same = document_ids[query] == document_ids[key]
            return (query >= key) & same if documents else query >= key

        return position_ids, create_block_mask(allowed, None, None, length, length, device="cpu")
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    if documents:
        mask = mask & (document_ids[:, None] == document_ids[None, :])
    return position_ids, mask


def compare(packed: Any, alone: Any) -> None:
    """Raises `Symptom` if the second document of the row does not have the logits that it has alone."""
    difference = float((packed[0, len(FIRST) :] - alone[0]).abs().max())
    if difference > 1e-3:
        raise Symptom("the second document of the row differs by %.3f from the same document alone" % difference)
    assert difference < 1e-5, difference


def pack(
    ctx: Context, *, documents: bool = True, restart: bool = True, rotary: bool = False, flex: bool = False
) -> None:
    """Compares two documents, each with an end token, in one row and alone."""
    import torch

    model = build_model(32, rotary, flex)
    ctx.reached()
    with torch.no_grad():
        alone = model(torch.tensor([SECOND]), *arrange([len(SECOND)], documents=False, restart=True, flex=flex))
        row = torch.tensor([FIRST + SECOND])
        packed = model(row, *arrange(PACKED, documents=documents, restart=restart, flex=flex))
    assert packed.shape == (1, sum(PACKED), 32)
    compare(packed, alone)


def label(ctx: Context, *, border: bool) -> None:
    """Compares the loss of the row, with the right mask, with the losses of its documents."""
    import torch
    from torch.nn.functional import cross_entropy

    model = build_model(32)
    ctx.reached()
    row = torch.tensor([FIRST + SECOND])
    position_ids, mask = arrange(PACKED, documents=True, restart=True)
    labels = row.clone()
    if border:
        labels[position_ids == 0] = -100  # no token precedes the first one of a document
    with torch.no_grad():
        logits = model(row, position_ids, mask)
        loss = cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
        expected = torch.tensor(0.0)
        for document in (FIRST, SECOND):
            single = model(torch.tensor([document]), *arrange([len(document)], documents=True, restart=True))
            expected += cross_entropy(single[0, :-1], torch.tensor(document[1:]), reduction="sum")
    if abs(loss - expected) > 1e-2:
        message = "the row has a loss of %.2f over its tokens, its documents have %.2f"
        raise Symptom(message % (float(loss), float(expected)))
    assert int((labels[0, 1:] != -100).sum()) == sum(PACKED) - 2


def train(ctx: Context, *, documents: bool) -> None:
    """Trains on rows whose two documents share an answer that the second document alone does not reveal."""
    import torch
    from torch.nn.functional import cross_entropy

    model = build_model(10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    arranged, single = arrange([3, 3], documents=documents, restart=True), arrange([3], documents=True, restart=True)
    generator = torch.Generator().manual_seed(1)
    ctx.reached()
    for _ in range(80):
        answers = 2 + torch.randint(8, (32,), generator=generator)
        document = torch.stack((torch.ones_like(answers), answers, torch.full_like(answers, END)), 1)
        mask = arranged[1].expand(32, 1, 6, 6)
        logits = model(torch.cat((document, document), 1), arranged[0], mask)
        loss = cross_entropy(logits[:, 3], answers) + cross_entropy(logits[:, 0], answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        packed = float(cross_entropy(logits[:, 3], answers))
        alone = float(cross_entropy(model(document, *single)[:, 0], answers))
    if alone > packed + 0.5:
        raise Symptom("the answer has a loss of %.2f in the row and of %.2f alone" % (packed, alone))
    assert abs(packed - math.log(8)) < 0.4 and abs(alone - packed) < 0.2, (packed, alone)


def build_llama(implementation: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()


def call(ctx: Context, *, given: str, cache: bool = False, implementation: str = "sdpa") -> None:
    """Runs a Llama of transformers on a packed row. `given` says which position ids and mask the model gets."""
    import torch
    from transformers import DataCollatorWithFlattening

    model = build_llama(implementation)
    samples = [{"input_ids": FIRST}, {"input_ids": SECOND}]
    if given == "nothing":
        collator = DataCollatorWithFlattening(return_position_ids=False)
    else:
        collator = DataCollatorWithFlattening()
    batch = collator(samples, return_tensors="pt")
    assert batch["labels"][0, len(FIRST)] == -100
    del batch["labels"]
    if given == "ones":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    elif given == "4d":
        allowed = arrange(PACKED, documents=True, restart=True)[1][None, None]
        batch["attention_mask"] = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    if not cache:
        model.config.get_text_config().use_cache = False
    ctx.reached()
    with torch.no_grad():
        alone = model(torch.tensor([SECOND]), use_cache=False).logits
        compare(model(**batch).logits, alone)


def call_multimodal(ctx: Context, *, rows: int) -> None:
    """Runs text through a Qwen2.5-VL, which finds document boundaries in the first of four rows of position ids."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    config = Qwen2_5_VLConfig(
        text_config={"vocab_size": 32, "pad_token_id": END, "rope_parameters": rope, **size, **heads},
        vision_config={"depth": 1, "num_heads": 2, "out_hidden_size": 32, **size},
        **{name + "_token_id": 28 + n for n, name in enumerate(("image", "video", "vision_start", "vision_end"))},
    )
    model = Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()
    position_ids = arrange(PACKED, documents=True, restart=True)[0]
    if rows == 4:
        position_ids = position_ids[None].expand(4, -1, -1)
    ctx.reached()
    with torch.no_grad():
        packed = model(torch.tensor([FIRST + SECOND]), position_ids=position_ids, use_cache=False).logits
        compare(packed, model(torch.tensor([SECOND]), use_cache=False).logits)


def call_hybrid(ctx: Context, *, packed: bool) -> None:
    """Runs a Qwen3-Next, whose first layer carries a state along the row, on a packed row or a padded batch."""
    if find_spec("fla") or find_spec("causal_conv1d"):
        raise Unavailable("the kernels installed here (fla, causal_conv1d) do not run on the CPU")
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    size = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "initializer_range": 0.2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 0}
    linear = {"linear_%s" % name: 2 for name in ("num_key_heads", "num_value_heads")}
    linear.update({"linear_%s" % name: 16 for name in ("key_head_dim", "value_head_dim")})
    kinds = ["linear_attention", "full_attention"]
    config = Qwen3NextConfig(num_hidden_layers=2, layer_types=kinds, **size, **heads, **linear)
    model = Qwen3NextForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    position_ids = arrange(PACKED, documents=True, restart=True)[0]
    missing = PACKED[0] - PACKED[1]
    rows = torch.tensor([FIRST, SECOND + [END] * missing])
    attention_mask = torch.ones_like(rows)
    attention_mask[1, PACKED[1] :] = 0
    ctx.reached()
    with torch.no_grad():
        alone = model(torch.tensor([SECOND]), use_cache=False).logits
        if packed:
            row = torch.tensor([FIRST + SECOND])
            compare(model(row, position_ids=position_ids, use_cache=False).logits, alone)
        else:
            logits = model(rows, attention_mask=attention_mask, use_cache=False).logits
            assert float((logits[1, : PACKED[1]] - alone[0]).abs().max()) < 1e-5


def pack_by_trl(ctx: Context, *, strategy: str) -> None:
    """Does what SFTTrainer does with packing=True: packs, with a collator that is padding-free for bfd only."""
    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from trl import pack_dataset  # type: ignore[import-not-found]
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling  # type: ignore[import-not-found]

    model = build_llama("sdpa")
    columns = {"input_ids": [FIRST, SECOND], "labels": [FIRST, SECOND]}
    dataset = pack_dataset(Dataset.from_dict(columns), sum(PACKED), strategy)
    collator = DataCollatorForLanguageModeling(pad_token_id=END, padding_free=strategy == "bfd")
    batch = collator([dataset[0]])
    assert batch["input_ids"].tolist() == [FIRST + SECOND]
    names = ("input_ids", "position_ids", "attention_mask")
    ctx.reached()
    with torch.no_grad():
        packed = model(**{name: batch[name] for name in names if name in batch}, use_cache=False).logits
        compare(packed, model(torch.tensor([SECOND]), use_cache=False).logits)


def is_on(value: Any) -> Optional[bool]:
    """Returns None if the value means neither true nor false."""
    return {"true": True, "false": False, "yes": True, "no": False}.get(str(value).strip().lower())


def check(params: Mapping[str, Any]) -> Finding:
    """Does the configuration pack documents without telling attention where each one ends?"""
    if params["config"] is None:
        return unknown("no training configuration was named", advice="kb check --config sft.yaml")
    try:
        values = read_config(params["config"]).values
    except UnreadableConfig as error:
        return unknown(str(error))
    names = ["packing", "neat_packing", "sample_packing", "padding_free", "reset_attention_mask"]
    names += ["eval_packing", "eval_sample_packing"]
    states = {name: is_on(values[name]) for name in names if name in values}
    found = ["%s: %s" % (name, str(values[name])[:40]) for name in states]
    if not states:
        return unknown("%s does not mention packing" % params["config"], "the script or a default may still pack")
    alone = "compare the logits of one document in a packed row and alone, as the entry's How to tell says"
    if None in states.values():
        return unknown(*found, "a value is neither true nor false", advice=alone)
    if any(re.search("^sft$|packed|thd|pretraining_dataset|megatron|^use_(mca|v1)", str(key)) for key in values):
        return unknown(*found, "another option in this file decides how rows are made", advice=alone)
    if states.get("reset_attention_mask") is False and "packing" not in states:
        return exposed(*found, "Megatron fills each row with several documents", advice="see the entry, Fix 4")
    in_factory = "neat_packing" in values or "cutoff_len" in values
    if states.get("packing") and not states.get("neat_packing") and in_factory:
        stage = str(values.get("stage", "sft"))
        advice = (
            "set neat_packing: true"
            if stage == "sft"
            else "set packing: false, because neat_packing raises an error in stage %s" % stage[:9]
        )
        return exposed(
            *found, "without neat_packing, LLaMA-Factory gives every token of a row the mask 1", advice=advice
        )
    if states.get("packing") and str(values.get("packing_strategy")) == "wrapped":
        return exposed(
            *found, "packing_strategy: wrapped keeps no document boundaries", advice="set packing_strategy: bfd"
        )
    if any(states.values()) or "reset_attention_mask" in states or not {"packing", "sample_packing"} & set(states):
        return unknown(
            *found, "it depends on the attention kernel and the batch, which this file does not show", advice=alone
        )
    return clear(*found, "kb cannot tell whether the job reads this file, or overrides it elsewhere")


APART = symptom(r"the second document of the row differs by \d+\.\d+ from the same document alone")
BLOCKS = "the mask lets each token see its own document only"
TORCH = {"torch": ">=2.1"}
LLAMA = {"torch": ">=2.6", "transformers": ">=4.53.1"}  # transformers up to 4.57 makes no mask with an older torch
DOCUMENTS = ("documents", False, True)


def pair(
    name: str,
    job: Callable[..., None],
    change: Tuple[str, Any, Any],
    because: str,
    fix: str,
    expect: Expect = APART,
    packages: Mapping[str, str] = TORCH,
) -> Experiment:
    """`change` names an argument of the job and gives its value in the control arm and in the treatment."""
    keyword, broken, fixed = change
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: broken}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{keyword: fixed}), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages=packages),
        world_size=1,
        deadline_s=60,  # flex_attention imports the compiler
        expected_s=(0.3, 0.3),
    )


def llama(name: str, change: Tuple[str, Any, Any], because: str, fix: str, **keywords: Any) -> Experiment:
    return pair(name, partial(call, **keywords), change, because, fix, APART, LLAMA)


RESTARTED = "the row has end tokens and position ids that restart, but a plain causal mask"
LOSS = symptom(r"the row has a loss of \d+\.\d\d over its tokens, its documents have \d+\.\d\d")
COPIED = symptom(r"the answer has a loss of 0\.\d\d in the row and of \d+\.\d\d alone")
ONES = ("given", "ones", "positions")
TRL = {**LLAMA, "trl": ">=1.0"}

probe = Probe(
    experiments=(pair("mask", pack, DOCUMENTS, RESTARTED, BLOCKS),),
    variants=(
        pair("mask-rotary", partial(pack, rotary=True), DOCUMENTS, RESTARTED + ", with rotary positions", BLOCKS),
        pair(
            "rotary-running",
            partial(pack, rotary=True, restart=False),
            DOCUMENTS,
            "rotary positions continue across documents, and the mask is causal",
            BLOCKS,
        ),
        pair(
            "positions",
            pack,
            ("restart", False, True),
            "the mask is right, but learned positions continue across documents",
            "the positions restart in each document",
        ),
        pair(
            "border-label",
            label,
            ("border", False, True),
            "the first token of the second document has a label, which the first document must predict",
            "the label at the boundary is -100",
            LOSS,
        ),
        pair(
            "training",
            train,
            DOCUMENTS,
            "neighbours in a row share an answer, and the model learns to copy it",
            BLOCKS,
            COPIED,
        ),
        pair(
            "flex",
            partial(pack, flex=True),
            DOCUMENTS,
            "flex_attention gets a causal block mask without document boundaries",
            "the block mask lets each token see its own document only",
            APART,
            {"torch": ">=2.6"},
        ),
        llama(
            "transformers",
            ("given", "nothing", "positions"),
            "the model gets no position ids",
            "DataCollatorWithFlattening passes position ids that restart",
        ),
        llama(
            "transformers-ones",
            ONES,
            "position ids restart, but an attention mask of all ones hides the boundaries",
            "position ids restart, and no attention mask is passed",
        ),
        llama(
            "transformers-eager",
            ONES,
            "with eager attention, an attention mask of all ones hides the boundaries",
            "with eager attention, no attention mask is passed",
            implementation="eager",
        ),
        llama(
            "transformers-cache",
            ("cache", True, False),
            "position ids restart, but the model keeps a cache, which hides the boundaries",
            "position ids restart, and the cache is off",
            given="positions",
        ),
        llama(
            "transformers-4d",
            ("given", "ones", "4d"),
            "the model gets a 2D attention mask of ones",
            "the model gets a 4D mask with the boundaries, as LLaMA-Factory builds it",
        ),
        pair(
            "transformers-rows",
            call_multimodal,
            ("rows", 2, 4),
            "Qwen2.5-VL gets position ids of two dimensions, in which it finds no boundaries",
            "Qwen2.5-VL gets four rows of position ids",
            packages={**TORCH, "transformers": ">=5.0"},
        ),
        pair(
            "transformers-hybrid",
            call_hybrid,
            ("packed", True, False),
            "a layer of linear attention carries its state into the second document, although position ids restart",
            "a padded batch has one document in each row",
            packages={**TORCH, "transformers": ">=5.0"},
        ),
        pair(
            "trl",
            pack_by_trl,
            ("strategy", "wrapped", "bfd"),
            "TRL packs with the strategy wrapped, which keeps no document boundaries",
            "TRL packs with the strategy bfd, which keeps the boundaries",
            APART,
            TRL,
        ),
    ),
    check=check,
    params={"config": Param("path", "the training configuration that the job reads")},
)
