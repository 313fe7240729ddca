"""No token of a fine-tuning batch has a label: truncation cut off the answer, or no mask marks it."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any, Callable, Dict, List, Tuple

from kb.cpu_arms import without_launcher
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, symptom

PROMPT, ANSWER = [3, 4, 5, 6] * 6, [7, 1]  # 24 and 2 tokens of 8; the last one ends the answer
SHORT, LONG = 16, 32
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
WORDS = ["<unk>", "</s>", "<pad>", "a", "b", "c", "d", "answer", "<user>", "<assistant>", "b\n###", "Response:"]


def cut_end(prompt: List[int], answer: List[int], length: int) -> Dict[str, List[int]]:
    """Truncates a sample as most libraries do: the end goes."""
    return {"input_ids": (prompt + answer)[:length], "labels": ([-100] * len(prompt) + answer)[:length]}


def keep_answer(prompt: List[int], answer: List[int], length: int) -> Dict[str, List[int]]:
    """The snippet of the entry: the beginning of the prompt goes."""
    room = length - len(answer)
    assert room > 0, "the answer alone is longer than the limit"
    prompt = prompt[-room:]
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


def train(ctx: Context, *, length: int, truncate: Callable[..., Dict[str, List[int]]] = cut_end) -> None:
    """Four steps of SGD on eight samples. Raises Symptom if no sample has a label."""
    import torch

    rows = [truncate(PROMPT, ANSWER, length) for _ in range(8)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8))
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    ctx.reached()
    losses, norms = [], []
    for step in range(4):
        batch = rows[2 * step : 2 * step + 2]
        tokens, labels = (torch.tensor([row[name] for row in batch]) for name in ("input_ids", "labels"))
        logits = model(tokens)[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(loss.item())
    labelled = sum(any(label != -100 for label in row["labels"]) for row in rows)
    changed = sum(not torch.equal(old, new) for old, new in zip(before, model.parameters()))
    if not labelled:
        raise Symptom(
            f"0 of 8 samples have a label: loss {losses[-1]}, grad_norm {norms[-1]}, {changed} weights changed"
        )
    assert labelled == 8 and losses[-1] < losses[0] and changed == 3, (labelled, losses, changed)


def train_with_trainer(ctx: Context, *, length: int) -> None:
    """The same in the Trainer of transformers, whose log shows 0.0 for the NaN of the loss."""
    import torch

    without_launcher()
    hf: Any = import_module("transformers")
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=8, max_position_embeddings=64, **SIZES))
    rows = [{**cut_end(PROMPT, ANSWER, length), "attention_mask": [1] * min(length, 26)} for _ in range(8)]
    arguments = hf.TrainingArguments(
        ctx.path("out"),
        max_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    ctx.reached()
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    log = [{name: line[name] for name in ("loss", "grad_norm")} for line in trainer.state.log_history if "loss" in line]
    if all(line["loss"] == 0 for line in log):
        raise Symptom(f"the Trainer logs {log[-1]} and reports no error")
    assert all(line["grad_norm"] > 0 for line in log), log


def tokenizer() -> Any:
    hf, tk = import_module("transformers"), import_module("tokenizers")
    words = {word: number for number, word in enumerate(WORDS)}
    plain = tk.Tokenizer(tk.models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = tk.pre_tokenizers.Split(" ", "removed")
    return hf.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def mask_by_template(ctx: Context, *, marked: bool, space: str = "") -> None:
    """Asks the chat template for the tokens of the assistant; `space` is what its generation block ends in."""
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}<assistant> "
        + begin
        + "{{ message.content }} </s>"
        + (space + end if space else end + " ")
        + "{% else %}<user> {{ message.content }} {% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a b c"}, {"role": "assistant", "content": "answer d"}]
    ctx.reached()
    encoded = tokenizer().apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    mask = encoded["assistant_masks"]
    if not any(mask):
        raise Symptom(f"0 of {len(mask)} tokens belong to the assistant")
    assert sum(mask) == 3, mask


def mask_by_response_key(ctx: Context, *, in_context: bool) -> None:
    """Collates a sample whose response key has other tokens in the text than alone, because a word is joined to it."""
    from trl import DataCollatorForCompletionOnlyLM  # type: ignore[import-not-found]

    made = tokenizer()
    key: Any = "### Response:"
    if in_context:
        key = made.encode("b\n### Response:", add_special_tokens=False)[1:]
    ctx.reached()
    collator = DataCollatorForCompletionOnlyLM(key, tokenizer=made)
    labels = collator([made("a b\n### Response: answer </s>")])["labels"]
    count = int((labels != -100).sum())
    if not count:
        raise Symptom(f"the collator does not find the response key: {count} of {labels.numel()} tokens have a label")
    assert count == 2, labels


def train_with_trl(ctx: Context, *, length: int, **options: Any) -> None:
    """Prompts and completions in TRL's SFTTrainer. Raises Symptom if no sample is left or none has a label."""
    import torch

    without_launcher()
    hf, trl = import_module("transformers"), import_module("trl")
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=64, **SIZES))
    data = import_module("datasets").Dataset.from_list([{"prompt": "a b c d " * 6, "completion": "answer d"}] * 8)
    arguments = trl.SFTConfig(
        ctx.path("out"),
        max_length=length,
        completion_only_loss=True,
        max_steps=2,
        use_cpu=True,
        report_to=[],
        bf16=False,
        **options,
    )
    ctx.reached()
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer())
    kept = len(trainer.train_dataset)
    if not kept:
        raise Symptom(f"SFTTrainer dropped {8 - kept} of 8 samples, because none has a label")
    trainer.train()
    loss = trainer.state.log_history[-1]["train_loss"]
    if not loss:
        raise Symptom(f"the Trainer logs a loss of {loss} and reports no error")
    assert kept == 8, kept


CUT = "the limit cuts the answer off every sample, so no token has a label"
ROOM = "the limit leaves room for the answer"
SILENT = symptom(r"0 of 8 samples have a label: loss nan, grad_norm 0\.0, 0 weights changed")
LENGTHS: Tuple[Dict[str, Any], Dict[str, Any]] = ({"length": SHORT}, {"length": LONG})


def experiment(
    name: str,
    job: Callable[..., None],
    arms: Tuple[Dict[str, Any], Dict[str, Any]],
    expect: Expect,
    because: Tuple[str, str],
    **changes: Any,
) -> Experiment:
    """One rank on the CPU; `arms` are the keywords of control and treatment."""
    control, treatment = (
        Arm(partial(job, **arm), expect=end, because=why, fidelity="cpu")
        for arm, end, why in zip(arms, (expect, completed()), because)
    )
    return Experiment(name=name, control=control, treatment=treatment, world_size=1, **changes)


probe = Probe(
    experiments=(experiment("cut", train, LENGTHS, SILENT, (CUT, ROOM)),),
    variants=(
        experiment(
            "keep-answer",
            partial(train, length=SHORT),
            ({"truncate": cut_end}, {"truncate": keep_answer}),
            SILENT,
            (CUT, "the beginning of the prompt goes instead"),
        ),
        experiment(
            "trainer",
            train_with_trainer,
            LENGTHS,
            symptom(r"the Trainer logs \{'loss': 0\.0, 'grad_norm': 0\.0\} and reports no error"),
            (CUT, ROOM),
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=4.41", "accelerate": ""}),
            deadline_s=60,
            expected_s=(6, 6),
        ),
        experiment(
            "trl",
            train_with_trl,
            LENGTHS,
            symptom(r"SFTTrainer dropped 8 of 8 samples|the Trainer logs a loss of 0\.0"),
            (CUT, ROOM),
            needs=Needs(packages={"torch": ">=2.1", "trl": ">=0.20", "transformers": "", "datasets": ""}),
            deadline_s=90,
            expected_s=(12, 12),
        ),
        experiment(
            "trl-keep-end",
            partial(train_with_trl, length=SHORT),
            ({}, {"truncation_mode": "keep_end"}),
            symptom(r"SFTTrainer dropped 8 of 8 samples|the Trainer logs a loss of 0\.0"),
            (CUT, "the beginning of the prompt goes instead"),
            needs=Needs(packages={"torch": ">=2.1", "trl": ">=1.0", "transformers": "", "datasets": ""}),
            deadline_s=90,
            expected_s=(12, 12),
        ),
        experiment(
            "trl-packing",
            partial(train_with_trl, packing=True),
            LENGTHS,
            symptom(r"the Trainer logs a loss of 0\.0"),
            (CUT, ROOM),
            needs=Needs(packages={"torch": ">=2.1", "trl": ">=1.9", "transformers": "", "datasets": ""}),
            deadline_s=90,
            expected_s=(12, 12),
        ),
        experiment(
            "template-space",
            partial(mask_by_template, marked=True),
            ({"space": " "}, {}),
            symptom(r"0 of \d+ tokens belong to the assistant"),
            ("the generation block ends in a space that the tokenizer drops", "the space is after the block"),
            needs=Needs(packages={"transformers": ">=4.46,<4.47", "tokenizers": ""}),
            deadline_s=60,
            expected_s=(4, 4),
        ),
        experiment(
            "template",
            mask_by_template,
            ({"marked": False}, {"marked": True}),
            symptom(r"0 of \d+ tokens belong to the assistant"),
            ("the chat template has no generation markers", "the template marks the answer"),
            needs=Needs(packages={"transformers": ">=4.42", "tokenizers": ""}),
            deadline_s=60,
            expected_s=(4, 4),
        ),
        experiment(
            "response-key",
            mask_by_response_key,
            ({"in_context": False}, {"in_context": True}),
            symptom(r"the collator does not find the response key: 0 of \d+ tokens have a label"),
            ("the key alone has other tokens than in the text", "the key's tokens are taken from a text"),
            needs=Needs(packages={"torch": ">=2.1", "trl": ">=0.8,<0.20", "transformers": "", "tokenizers": ""}),
            deadline_s=60,
            expected_s=(8, 8),
        ),
    ),
)
