"""Samples of unequal length are padded with a token that the tokenizer, or the model's config, does not name."""

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
WORDS = ["<s>", "</s>", "<|finetune_right_pad_id|>", *"abcdefghijklm"]  # no unknown token, as in Llama 3
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
    """A collate function of one's own, as many training scripts have: torch pads, with the id of the tokenizer."""
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
    """Two samples to a collator of transformers; where the config has the id, through a model in a batch and alone."""
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
        assert torch.allclose(together, alone, atol=1e-5), "padding has changed what the model computes"


def label(ctx: Context, *, pad_token: str) -> None:
    """What the collator for language modelling makes of samples that end with EOS."""
    tokenizer = tokenizer_of_16(pad_token=pad_token)
    rows = [tokenizer(text) for text in ("a b c d </s>", "e f </s>")]
    ctx.reached()
    labels = transformers().DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)["labels"]
    ends = int((labels == END).sum())
    if not ends:
        raise Symptom("2 samples end with id %d, and it is a label 0 times: %s" % (END, labels[1].tolist()))
    assert ends == 2, labels


def scores(texts: List[str], pad_token: str, config_pad_id: Optional[int]) -> List[float]:
    """A head that scores the last token: what it takes for the last one is decided by the model's config."""
    tokenizer, model = tokenizer_of_16(pad_token=pad_token), model_of_16("LlamaForSequenceClassification")
    model.config.pad_token_id = config_pad_id
    batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    return [float(logit) for logit in model(**batch).logits.detach()]


def score(ctx: Context, *, config_pad_id: Optional[int]) -> None:
    ctx.reached()
    together = scores(["a b c d", "e f"], WORDS[SPARE], config_pad_id)[1]
    alone = scores(["e f"], WORDS[SPARE], config_pad_id)[0]
    if abs(together - alone) > 1e-5:
        raise Symptom("the same sample scores %.4f alone and %.4f in a padded batch" % (alone, together))


def compare(ctx: Context, *, pad_id: int) -> None:
    """Two answers to one prompt, whose turn ends with EOS."""
    ctx.reached()
    chosen, rejected = scores(["a b </s> c d </s>", "a b </s> e </s>"], WORDS[pad_id], pad_id)
    if abs(chosen - rejected) < 1e-6:
        raise Symptom("two answers to one prompt have the same score, %.4f" % chosen)


# Without a pad token of their own in transformers 4.30 to 5.23, unless tokenizer.json has padding switched on.
LLAMA, GPT2 = ("LlamaTokenizer", "LlamaTokenizerFast"), ("GPT2Tokenizer", "GPT2TokenizerFast")
WITHOUT_DEFAULT = (*LLAMA, *GPT2, "PreTrainedTokenizerFast", "TokenizersBackend")
# transformers 5 prefers a class of its own for some other types (Qwen2), and that one may bring a pad token.
TYPES = (None, "llama", "mistral", "mixtral", "gpt2")
# Heads that score the last token, and whose config has no pad_token_id unless the file names one.
HEADS = [name + "ForSequenceClassification" for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "GPT2")]


def check(params: Mapping[str, Any]) -> Finding:
    """Does the tokenizer in this model's folder name a pad token, and does the model's config name the same?"""
    folder = params["model"]
    if folder is None:
        return unknown("no model was named", advice="--set model=folder with tokenizer_config.json and config.json")
    tokenizer, config = read_object(folder / "tokenizer_config.json"), read_object(folder / "config.json")
    if tokenizer is None:
        return unknown(f"no tokenizer_config.json could be read in {folder}", advice="print(tokenizer.pad_token)")
    special, fast = (read_object(folder / file) or {} for file in ("special_tokens_map.json", "tokenizer.json"))
    name = content(tokenizer.get("pad_token")) or content(special.get("pad_token"))
    kind = str(tokenizer.get("tokenizer_class"))
    if not name:
        message = f"tokenizer_config.json names no pad_token, its class is {kind}"
        plain = fast and not fast.get("padding") and not tokenizer.get("auto_map")
        if plain and kind in WITHOUT_DEFAULT and (config or {}).get("model_type") in TYPES:
            return exposed(message, advice="set tokenizer.pad_token in the script, to a token that exists")
        return unknown(message, "class, model type or tokenizer.json may give one", advice="print(tokenizer.pad_token)")
    number = special_ids(tokenizer, fast).get(name)
    message = f"the tokenizer pads with {name!r}, id {number}"
    if number is None:
        return unknown(message, "the files that list special tokens do not have it: is it in the vocabulary?")
    if config is None:
        return unknown(message, f"no config.json could be read in {folder}")
    text = config.get("text_config")
    declared = (text if isinstance(text, dict) else config).get("pad_token_id")
    message_of_model = f"config.json has pad_token_id {declared}"
    if declared != number and any(head in str(config.get("architectures")) for head in HEADS):
        repair = "Trainer.train() sets it from transformers 4.56 on, evaluation and inference do not"
        return exposed(message, message_of_model, repair, advice="model.config.pad_token_id = tokenizer.pad_token_id")
    if declared != number:
        return unknown(message, message_of_model, "harmless in causal training, not for a score, reward or class head")
    rows = (text if isinstance(text, dict) else config).get("vocab_size")
    if not isinstance(rows, int) or number >= rows:
        return unknown(message, message_of_model, f"config.json says {rows} rows: is there one for this id?")
    if name == (content(tokenizer.get("eos_token")) or content(special.get("eos_token"))):
        return unknown(
            message, message_of_model, "it is EOS too: harmful where labels or the last token are found by value"
        )
    return clear(message, message_of_model)


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
    """The text of a token, which is written as text or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def experiment(name: str, bad: Any, good: Any, expect: Expect, why: str, fix: str, hf: str = ">=4.38") -> Experiment:
    """With releases `hf` of transformers, or as a stand-in without it."""
    stands_for = "" if hf else "a tokenizer, by its pad_token_id; padding and failure are torch's own"
    arm = partial(Arm, fidelity="cpu" if hf else "stand-in", stands_for=stands_for)
    control, treatment = arm(bad, expect, why), arm(good, completed(), fix)
    needs = Needs(packages={"torch": ">=2.1", **({"transformers": hf} if hf else {})}, memory_mib=2048 if hf else 512)
    seconds = (2, 2) if hf else (0.3, 0.3)
    return Experiment(name, control, treatment, world_size=1, needs=needs, deadline_s=90, expected_s=seconds)


ASKING = raised(r"Asking to pad but the tokenizer does not have a padding token")
NOT_FLOAT = raised(r"pad_sequence\(\): argument 'padding_value' \(position 3\) must be float, not NoneType")
OTHER, COPIED = "another token is the pad token", "the config gets the id of the tokenizer"
filled, spared = partial(collate, pad_id=SPARE), partial(pad, choice="spare")
named = partial(pad, choice="unknown token", pad_token=WORDS[SPARE])
same_id = partial(score, config_pad_id=SPARE)
probe = Probe(
    check=check,
    params={"model": Param("path", "folder of a model in Hugging Face format, for the check")},
    experiments=(
        experiment(
            "transformers",
            partial(pad, choice=""),
            spared,
            ASKING,
            "the tokenizer names no pad token and the samples differ in length",
            "the collator fills up with a token that the vocabulary has",
        ),
        experiment(
            "collate",
            partial(collate, pad_id=None),
            filled,
            NOT_FLOAT,
            "the id of a pad token that is not there is None",
            "an id of the vocabulary fills up",
            "",
        ),
    ),
    variants=(
        experiment(
            "minus-100",
            partial(collate, pad_id=-100),
            filled,
            symptom("id -100 in a padded batch reached the embedding: index out of range in self"),
            "-100 is a label to leave out, and no row of an embedding",
            "an id of the vocabulary fills up",
            "",
        ),
        experiment(
            "constructor",
            partial(pad, choice="unknown token"),
            named,
            ASKING,
            "made from a tokenizers object without names, and unk_token is None, so that nothing was set",
            "the constructor is given the name of the pad token",
        ),
        experiment(
            "unknown-name",
            partial(pad, choice="unknown name"),
            partial(pad, choice="added"),
            raised(r"'<' not supported between instances of 'NoneType' and 'int'"),
            "pad_token was set to a name that is not in the vocabulary and that nothing adds",
            "the name is added and the model resized",
        ),
        experiment(
            "model-config",
            partial(score, config_pad_id=None),
            same_id,
            raised(r"Cannot handle batch sizes > 1 if no padding token is defined"),
            "the tokenizer has a pad token and the model's config has none",
            COPIED,
        ),
        experiment(
            "other-id",
            partial(score, config_pad_id=0),
            same_id,
            symptom(r"the same sample scores -?\d\.\d+ alone and -?\d\.\d+ in a padded batch"),
            "the config names another id than the tokenizer, and padding is scored",
            COPIED,
        ),
        experiment(
            "masked-end",
            partial(label, pad_token="</s>"),
            partial(label, pad_token=WORDS[SPARE]),
            symptom(r"2 samples end with id 1, and it is a label 0 times"),
            "EOS is the pad token, and the collator masks by value",
            OTHER,
        ),
        experiment(
            "end-inside",
            partial(compare, pad_id=END),
            partial(compare, pad_id=SPARE),
            symptom(r"two answers to one prompt have the same score"),
            "EOS is the pad token, and what comes before the first one is scored",
            OTHER,
            ">=4.38,<4.49",
        ),
    ),
)
