"""Padding samples of unequal length fails or harms, because the tokenizer or the model's config has no pad token."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

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

END, SPARE = 1, 2
WORDS = ["<s>", "</s>", "<|finetune_right_pad_id|>", *"abcdefghijklm"]  # like Llama 3, without an unknown token
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
transformers: Callable[[], Any] = partial(importlib.import_module, "transformers")
tokenizers: Callable[[], Any] = partial(importlib.import_module, "tokenizers")


def tokenizer_of_16(**names: str) -> Any:
    tk = tokenizers()
    plain = tk.Tokenizer(tk.models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    plain.pre_tokenizer = tk.pre_tokenizers.WhitespaceSplit()
    return transformers().PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", **names)


def model_of_16(name: str) -> Any:
    import torch

    torch.manual_seed(0)
    config = transformers().LlamaConfig(vocab_size=16, num_labels=1, bos_token_id=0, eos_token_id=END, **SIZES)
    return getattr(transformers(), name)(config).eval()


def collate(ctx: Context, *, pad_id: Optional[int]) -> None:
    """A custom collate function, in which torch pads with the tokenizer's id."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.tensor([3, 4, 5, 6]), torch.tensor([7, 8])]
    ctx.reached()
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_id)
    try:
        torch.nn.Embedding(16, 4)(ids)
    except IndexError as error:
        raise Symptom("id %d in a padded batch reached the embedding: %s" % (ids.min(), error)) from error
    assert ids.tolist() == [[3, 4, 5, 6], [7, 8, pad_id, pad_id]], ids


def pad(ctx: Context, *, choice: str, **names: str) -> None:
    """A collator of transformers pads two samples.

    If `choice` sets the id in the model's config, padding must not change what the model computes.
    """
    import torch

    tokenizer = tokenizer_of_16(**names)
    model: Any = model_of_16("LlamaForCausalLM") if choice in ("added", "spare") else None
    if choice == "unknown token":
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.unk_token  # None
    elif choice == "unknown name":
        tokenizer.pad_token = "<pad>"
    elif choice == "added":
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
        weight = model.get_input_embeddings().weight
        if len(tokenizer) > getattr(weight, "ds_shape", weight.shape)[0]:
            model.resize_token_embeddings(len(tokenizer))
        model.config.pad_token_id = tokenizer.pad_token_id
    elif choice == "spare":
        spare = "<|finetune_right_pad_id|>"  # a token that the model reserves
        if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
            assert spare in tokenizer.get_vocab(), "name one that this model reserves, or take fix 2"
            tokenizer.pad_token = spare
        model.config.pad_token_id = tokenizer.pad_token_id
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in ("a b c d", "e f")]
    ctx.reached()
    batch = transformers().DataCollatorWithPadding(tokenizer)(rows)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]], batch
    if model is not None:
        together, alone = model(**batch).logits[1, :2], model(torch.tensor([rows[1]["input_ids"]])).logits[0]
        assert torch.allclose(together, alone, atol=1e-5), "padding changed what the model computes"


def label(ctx: Context, *, pad_token: str) -> None:
    """Which labels does the collator for language modelling make from samples that end with EOS?"""
    tokenizer = tokenizer_of_16(pad_token=pad_token)
    rows = [tokenizer(text) for text in ("a b c d </s>", "e f </s>")]
    ctx.reached()
    labels = transformers().DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)["labels"]
    ends = int((labels == END).sum())
    if not ends:
        raise Symptom("2 samples end with id %d, but no label is %d: %s" % (END, END, labels[1].tolist()))
    assert ends == 2, labels


def scores(texts: List[str], pad_token: str, config_pad_id: Optional[int]) -> List[float]:
    """The scores of a head that scores the last token; the config's pad_token_id decides which token is the last."""
    tokenizer, model = tokenizer_of_16(pad_token=pad_token), model_of_16("LlamaForSequenceClassification")
    model.config.pad_token_id = config_pad_id
    batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    return [float(logit) for logit in model(**batch).logits.detach()]


def score(ctx: Context, *, config_pad_id: Optional[int]) -> None:
    """Does a sample get the same score alone and in a padded batch?"""
    ctx.reached()
    together = scores(["a b c d", "e f"], WORDS[SPARE], config_pad_id)[1]
    alone = scores(["e f"], WORDS[SPARE], config_pad_id)[0]
    if abs(together - alone) > 1e-5:
        raise Symptom("the same sample scores %.4f alone and %.4f in a padded batch" % (alone, together))


def compare(ctx: Context, *, pad_id: int) -> None:
    """Do two answers to one prompt, whose turn ends with EOS, get different scores?"""
    ctx.reached()
    chosen, rejected = scores(["a b </s> c d </s>", "a b </s> e </s>"], WORDS[pad_id], pad_id)
    if abs(chosen - rejected) < 1e-6:
        raise Symptom("two answers to one prompt have the same score, %.4f" % chosen)


# In transformers 4.30 to 5.23 these classes have no default pad token, unless tokenizer.json enables padding.
LLAMA, GPT2 = ("LlamaTokenizer", "LlamaTokenizerFast"), ("GPT2Tokenizer", "GPT2TokenizerFast")
WITHOUT_DEFAULT = (*LLAMA, *GPT2, "PreTrainedTokenizerFast", "TokenizersBackend")
# For some other types (Qwen2), transformers 5 uses another class than the files name, which may have a pad token.
TYPES = (None, "llama", "mistral", "mixtral", "gpt2")
# These heads score the last token, and their config has no default pad_token_id.
HEADS = [name + "ForSequenceClassification" for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "GPT2")]


def check(params: Mapping[str, Any]) -> Finding:
    """Does the tokenizer in this model's folder have a pad token, and does the model's config name the same one?"""
    folder = params["model"]
    if folder is None:
        advice = "--set model=FOLDER, which contains tokenizer_config.json and config.json"
        return unknown("no model folder was given", advice=advice)
    tokenizer, config = read_object(folder / "tokenizer_config.json"), read_object(folder / "config.json")
    if tokenizer is None:
        return unknown(f"kb cannot read a tokenizer_config.json in {folder}", advice="print(tokenizer.pad_token)")
    special, fast = (read_object(folder / file) or {} for file in ("special_tokens_map.json", "tokenizer.json"))
    name = content(tokenizer.get("pad_token"))
    elsewhere = "" if name else content(special.get("pad_token"))
    kind = str(tokenizer.get("tokenizer_class"))
    if elsewhere:
        where = f"only special_tokens_map.json names a pad_token, {elsewhere!r}"
        ignored = "some releases of transformers do not read it when tokenizer_config.json lists the added tokens"
        return unknown(where, ignored, advice="print(tokenizer.pad_token)")
    if not name:
        missing = f"tokenizer_config.json names no pad_token, and its tokenizer_class is {kind}"
        no_default = fast and not fast.get("padding") and not tokenizer.get("auto_map")
        if no_default and kind in WITHOUT_DEFAULT and (config or {}).get("model_type") in TYPES:
            return exposed(missing, advice="set tokenizer.pad_token in the script to a token that exists")
        default = "the class, the model type or tokenizer.json may provide one"
        return unknown(missing, default, advice="print(tokenizer.pad_token)")
    number = special_ids(tokenizer, fast).get(name)
    of_tokenizer = f"the tokenizer pads with {name!r}, id {number}"
    if number is None:
        return unknown(
            of_tokenizer, "the lists of special tokens do not contain it, so it may not be in the vocabulary"
        )
    if config is None:
        return unknown(of_tokenizer, f"kb cannot read a config.json in {folder}")
    text = config.get("text_config")
    declared = (text if isinstance(text, dict) else config).get("pad_token_id")
    of_model = f"config.json has pad_token_id {declared}"
    if declared != number and any(head in str(config.get("architectures")) for head in HEADS):
        trainer = "Trainer.train() sets it since transformers 4.56, but evaluation and inference do not"
        return exposed(of_tokenizer, of_model, trainer, advice="model.config.pad_token_id = tokenizer.pad_token_id")
    if declared != number:
        harm = "this is harmless in causal training, but not for a score, reward or classification head"
        return unknown(of_tokenizer, of_model, harm)
    rows = (text if isinstance(text, dict) else config).get("vocab_size")
    if not isinstance(rows, int) or number >= rows:
        no_row = f"config.json has vocab_size {rows}, so the model may have no embedding row for this id"
        return unknown(of_tokenizer, of_model, no_row)
    if name == (content(tokenizer.get("eos_token")) or content(special.get("eos_token"))):
        also_eos = "it is also the EOS token, which is harmful if code finds labels or the last token by its id"
        return unknown(of_tokenizer, of_model, also_eos)
    ends = (text if isinstance(text, dict) else config).get("eos_token_id")
    if number == ends or (isinstance(ends, list) and number in ends):
        also_end = f"config.json has eos_token_id {ends}, so generation ends with the pad token too"
        return unknown(of_tokenizer, of_model, also_end)
    return clear(of_tokenizer, of_model)


def read_object(path: Path) -> Optional[Dict[str, Any]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size < 64 << 20 else None
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def special_ids(tokenizer: Mapping[str, Any], fast: Mapping[str, Any]) -> Dict[str, int]:
    """The special tokens that the two files list, with their ids."""
    decoder, added = tokenizer.get("added_tokens_decoder"), fast.get("added_tokens")
    pairs = [(item, number) for number, item in decoder.items()] if isinstance(decoder, dict) else []
    pairs += [(item, item.get("id")) for item in added if isinstance(item, dict)] if isinstance(added, list) else []
    return {content(item): int(number) for item, number in pairs if str(number).isdecimal() and len(str(number)) < 9}


def content(token: Any) -> str:
    """The text of a token, which the files write as a string or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def experiment(name: str, bad: Any, good: Any, expect: Expect, why: str, fix: str, hf: str = ">=4.38") -> Experiment:
    """An experiment with releases `hf` of transformers, or, if `hf` is empty, a stand-in without transformers."""
    stands_for = "" if hf else "a tokenizer; here the job has only its pad_token_id, and torch itself pads"
    arm = partial(Arm, fidelity="cpu" if hf else "stand-in", stands_for=stands_for)
    control, treatment = arm(bad, expect, why), arm(good, completed(), fix)
    needs = Needs(packages={"torch": ">=2.1", **({"transformers": hf} if hf else {})}, memory_mib=2048 if hf else 512)
    seconds = (2, 2) if hf else (0.3, 0.3)
    return Experiment(name, control, treatment, world_size=1, needs=needs, deadline_s=90, expected_s=seconds)


ASKING = raised(r"Asking to pad but the tokenizer does not have a padding token")
NOT_FLOAT = raised(r"pad_sequence\(\): argument 'padding_value' \(position 3\) must be float, not NoneType")
OTHER, COPIED = (
    "the pad token is another token than EOS",
    "the script copies the tokenizer's pad_token_id to the config",
)
NO_ID = "the tokenizer has no pad token, so torch gets None as the padding value"
FILLED = "torch pads with an id of the vocabulary"
filled, spared = partial(collate, pad_id=SPARE), partial(pad, choice="spare")
named = partial(pad, choice="unknown token", pad_token=WORDS[SPARE])
same_id = partial(score, config_pad_id=SPARE)
probe = Probe(
    check=check,
    params={"model": Param("path", "folder of a model in Hugging Face format")},
    experiments=(
        experiment(
            "transformers",
            partial(pad, choice=""),
            spared,
            ASKING,
            "the tokenizer has no pad token, and the samples differ in length",
            "the collator pads with a token of the vocabulary",
        ),
        experiment(
            "collate",
            partial(collate, pad_id=None),
            filled,
            NOT_FLOAT,
            NO_ID,
            FILLED,
            "",
        ),
    ),
    variants=(
        experiment(
            "minus-100",
            partial(collate, pad_id=-100),
            filled,
            symptom("id -100 in a padded batch reached the embedding: index out of range in self"),
            "the script pads input ids with -100, which is for labels only and has no embedding row",
            FILLED,
            "",
        ),
        experiment(
            "constructor",
            partial(pad, choice="unknown token"),
            named,
            ASKING,
            "the script sets the pad token to unk_token, which is None in a tokenizer made without special tokens",
            "the script passes the pad token to the tokenizer's constructor",
        ),
        experiment(
            "unknown-name",
            partial(pad, choice="unknown name"),
            partial(pad, choice="added"),
            raised(r"'<' not supported between instances of 'NoneType' and 'int'"),
            "the script sets pad_token to a name that is not in the vocabulary and never adds it",
            "the script adds the pad token and resizes the model",
        ),
        experiment(
            "model-config",
            partial(score, config_pad_id=None),
            same_id,
            raised(r"Cannot handle batch sizes > 1 if no padding token is defined"),
            "the tokenizer has a pad token, but the model's config has none",
            COPIED,
        ),
        experiment(
            "other-id",
            partial(score, config_pad_id=0),
            same_id,
            symptom(r"the same sample scores -?\d\.\d+ alone and -?\d\.\d+ in a padded batch"),
            "the config has another pad_token_id than the tokenizer, so the head scores a padding token",
            COPIED,
        ),
        experiment(
            "masked-end",
            partial(label, pad_token="</s>"),
            partial(label, pad_token=WORDS[SPARE]),
            symptom(r"2 samples end with id 1, but no label is 1"),
            "EOS is the pad token, so the collator also masks the EOS at the end of each sample",
            OTHER,
        ),
        experiment(
            "end-inside",
            partial(compare, pad_id=END),
            partial(compare, pad_id=SPARE),
            symptom(r"two answers to one prompt have the same score"),
            "EOS is the pad token, so the head scores the token before the first EOS, which is in the prompt",
            OTHER,
            ">=4.38,<4.49",
        ),
    ),
)
