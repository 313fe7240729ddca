"""The Trainer removes columns that forward does not name, so no column is left or the labels are missing."""

from __future__ import annotations

import inspect
from functools import partial
from importlib import import_module
from typing import Any

from kb.cpu_arms import without_launcher
from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, completed, symptom

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXTS, LABELS = ["a b c d", "e f"] * 2, [0, 1] * 2


def tokenizer_of_16() -> Any:
    tk: Any = import_module("tokenizers")
    words = ["<s>", "</s>", "<pad>", *"abcdefghijklm"]
    plain = tk.Tokenizer(tk.models.WordLevel({word: number for number, word in enumerate(words)}))
    plain.pre_tokenizer = tk.pre_tokenizers.WhitespaceSplit()
    hf: Any = import_module("transformers")
    return hf.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", pad_token="<pad>")


def model_of_16(name: str = "LlamaForSequenceClassification") -> Any:
    import torch

    torch.manual_seed(0)
    hf: Any = import_module("transformers")
    return getattr(hf, name)(hf.LlamaConfig(vocab_size=16, num_labels=2, pad_token_id=2, eos_token_id=1, **SIZES))


def wrap_model(model: Any, names_arguments: bool) -> Any:
    """Wraps the model in a custom module, whose forward names its arguments or takes only **batch."""
    import torch

    class Named(torch.nn.Module):  # type: ignore[misc]
        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
            return self.body(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    class Unnamed(torch.nn.Module):  # type: ignore[misc]
        def forward(self, **batch: Any) -> Any:
            batch.pop("num_items_in_batch", None)  # the Trainer adds it for a forward with **
            return self.body(**batch)

    wrapper = Named() if names_arguments else Unnamed()
    wrapper.body = model
    return wrapper


def dataset_of(columns: dict[str, Any]) -> Any:
    return import_module("datasets").Dataset.from_dict(columns)


def tokenized(**columns: Any) -> Any:
    return dataset_of({**tokenizer_of_16()(TEXTS, return_token_type_ids=False), **columns})


def trainer_of(ctx: Context, model: Any, data: Any, collator: Any = None, kind: Any = None, **arguments: Any) -> Any:
    hf = import_module("transformers")
    common = {"max_steps": 1, "per_device_train_batch_size": 2, "save_strategy": "no", "use_cpu": True, "report_to": []}
    args = hf.TrainingArguments(output_dir=str(ctx.path("out")), disable_tqdm=True, **common, **arguments)
    collator = collator or hf.DataCollatorWithPadding(tokenizer_of_16())
    return (kind or hf.Trainer)(model, args, train_dataset=data, eval_dataset=data, data_collator=collator)


def train(*parts: Any, **arguments: Any) -> Any:
    trainer = trainer_of(*parts, **arguments)
    assert trainer.train().training_loss > 0
    return trainer


def raw_text(ctx: Context, fixed: bool) -> None:
    from transformers import DataCollatorForLanguageModeling  # type: ignore[import-not-found]

    dataset, collator, tokenizer = dataset_of({"text": TEXTS}), None, tokenizer_of_16()
    if fixed:
        assert tokenizer.pad_token_id != tokenizer.eos_token_id, "the collator would mask the end: pad-token-missing"
        dataset = dataset.map(
            lambda row: tokenizer(row["text"] + tokenizer.eos_token, truncation=True, max_length=2048),
            remove_columns=dataset.column_names,
        )
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    train(ctx, model_of_16("LlamaForCausalLM"), dataset, collator)


def own_module(ctx: Context, fixed: bool) -> None:
    trainer = train(ctx, wrap_model(model_of_16(), names_arguments=fixed), tokenized(labels=LABELS))
    assert trainer.evaluate()["eval_loss"] > 0


def compiled(ctx: Context, fixed: bool) -> None:
    """The job compiles the model before it passes it to the Trainer, or lets the Trainer compile it."""
    import torch

    model = model_of_16() if fixed else torch.compile(model_of_16(), backend="eager")
    train(ctx, model, tokenized(labels=LABELS), torch_compile=fixed, torch_compile_backend="eager" if fixed else None)


def wrapped(ctx: Context, fixed: bool) -> None:
    import torch

    train(ctx, model_of_16() if fixed else torch.nn.DataParallel(model_of_16()), tokenized(labels=LABELS))


def padding_only(ctx: Context, fixed: bool) -> None:
    """The dataset has token ids without labels, and a collator that only pads creates no labels."""
    causal = import_module("transformers").DataCollatorForLanguageModeling
    train(ctx, model_of_16("LlamaForCausalLM"), tokenized(), causal(tokenizer_of_16(), mlm=False) if fixed else None)


def label_name(ctx: Context, fixed: bool) -> None:
    dataset = tokenized(target=LABELS)
    if fixed:
        dataset = dataset.rename_column("target", "labels")
    train(ctx, model_of_16(), dataset)


def no_head(ctx: Context, fixed: bool) -> None:
    """The labels reach the model, but a class without a head computes no loss from them."""
    train(ctx, model_of_16("LlamaForSequenceClassification" if fixed else "LlamaModel"), tokenized(labels=LABELS))


def flag_alone(ctx: Context, fixed: bool) -> None:
    """All columns stay, as the message suggests; the collator converts them for forward, or does not."""
    import torch

    tokenizer = tokenizer_of_16()

    def collate(rows):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        texts = [row["text"] for row in rows]
        batch = tokenizer(texts, padding=True, truncation=True, max_length=2048, return_tensors="pt")
        labels = torch.tensor([row["label"] for row in rows])
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}

    dataset = dataset_of({"text": TEXTS, "label": LABELS})
    train(ctx, model_of_16(), dataset, collate if fixed else None, remove_unused_columns=False)


def evaluation(ctx: Context, fixed: bool) -> None:
    """forward does not name the labels, so evaluation has no loss unless label_names does."""
    options = {"remove_unused_columns": False, "label_names": ["labels"] if fixed else None}
    trainer = train(ctx, wrap_model(model_of_16(), names_arguments=False), tokenized(labels=LABELS), **options)
    if "eval_loss" not in (metrics := trainer.evaluate()):
        raise Symptom("no eval_loss in %s" % ", ".join(sorted(metrics)))


def weights(ctx: Context, fixed: bool) -> None:
    """A custom loss with a weight of 0 per sample; forward does not name the weights, so the Trainer removes them."""

    class WeightedTrainer(import_module("transformers").Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
            weights = inputs.pop("weights", None)
            del rest, options  # releases of transformers pass different arguments
            loss = model(**inputs).loss
            return loss if weights is None else loss * weights.mean()

    dataset = tokenized(labels=LABELS, weights=[0.0] * 4)
    trainer = trainer_of(ctx, model_of_16(), dataset, kind=WeightedTrainer, remove_unused_columns=not fixed)
    if (loss := trainer.train().training_loss) > 0:
        raise Symptom("loss %.3f, although all weights are 0" % loss)


NONE_LEFT = "No columns in the dataset match the model's forward method signature"
NO_LOSS = "The model did not return a loss from the inputs, only the following keys: "
FORMS = {
    raw_text: NONE_LEFT,
    own_module: NONE_LEFT,
    compiled: NONE_LEFT,
    wrapped: NONE_LEFT,
    padding_only: NO_LOSS + "logits",
    label_name: NO_LOSS + "logits",
    no_head: NO_LOSS + "last_hidden_state",
    flag_alone: "You should supply an encoding or a list of encodings to this method that includes input_ids",
    evaluation: "no eval_loss in",
    weights: "loss",
}


def train_forms(ctx: Context, *, fixed: bool) -> None:
    """Runs each form of the incident; raises `Symptom` with the messages of all forms that fail."""
    without_launcher()
    ctx.reached()
    failures = []
    for form in FORMS:
        try:
            form(ctx, fixed)
        except (ValueError, Symptom) as error:
            failures.append("%s: %s" % (form.__name__, str(error)[:120]))
    if failures:
        raise Symptom("; ".join(failures))


def match(ctx: Context, *, fixed: bool) -> None:
    """Compares column names with the arguments of forward, as the Trainer does before the first batch."""
    columns = {"input_ids": 7, "labels": 1}
    model = wrap_model(lambda **batch: batch["input_ids"] + batch["labels"], names_arguments=fixed)
    ctx.reached()
    arguments = list(inspect.signature(model.forward).parameters)
    batch = {name: value for name, value in columns.items() if name in arguments}
    if not batch:
        raise Symptom("0 of %d columns are arguments of forward, which has %s" % (len(columns), arguments))
    assert model(**batch) == 8


STANDS_FOR = "the Trainer of transformers, which keeps only the columns that forward names"
ALL_FAIL = "; ".join("%s: %s.{0,120}" % (form.__name__, text) for form, text in FORMS.items())
UNNAMED = "forward takes only **batch, so no column matches an argument"
NAMED = "forward names its arguments, so the columns of these names stay"

probe = Probe(
    experiments=(
        Experiment(
            name="trainer",
            control=Arm(
                partial(train_forms, fixed=False),
                symptom(ALL_FAIL),
                "in each form, the Trainer removes columns that the job needs, or there is no loss",
                "cpu",
            ),
            treatment=Arm(
                partial(train_forms, fixed=True),
                completed(),
                "with its fix, each form trains with the right loss",
                "cpu",
            ),
            world_size=1,
            needs=Needs(packages={"transformers": ">=4.46", "datasets": "", "accelerate": ""}, memory_mib=2048),
            deadline_s=90,
            expected_s=(6, 7),
        ),
        Experiment(
            name="signature",
            control=Arm(partial(match, fixed=False), symptom("0 of 2 columns"), UNNAMED, "stand-in", STANDS_FOR),
            treatment=Arm(partial(match, fixed=True), completed(), NAMED, "stand-in", STANDS_FOR),
            world_size=1,
            expected_s=(0.3, 0.3),
        ),
    ),
)
