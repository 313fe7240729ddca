"""A model never saw the end token as a label, or ends with a token that is not a stop: answers run to the limit."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)

EOS, ASK, REPLY, MARKER = range(4)  # MARKER ends a turn, as `###` or <|im_end|> does
ANSWERS = {4: [10, 11], 5: [12, 10, 13], 6: [14], 7: [11, 13, 12, 15], 8: [15, 10], 9: [13, 14, 11]}
VOCABULARY, WIDTH, LIMIT = 16, 24, 60
PACKED_STEPS, PADDED_STEPS = 100, 60  # the model has learned the answers after 75 and 40 steps


def answer_all(ctx: Context, *, cause: str, ends: bool, penalty: float = 1.0) -> None:
    """Trains a small recurrent model, lets it answer every question, and checks where each answer stops.

    `ends`: the end token is a label in training (packed, masked, truncated) or is in the stop list (marker).
    """
    import torch

    torch.manual_seed(0)
    model = _network()
    ctx.reached()
    expected = dict(ANSWERS)
    if cause == "truncated" and ends:
        expected = {question: answer[:3] for question, answer in ANSWERS.items()}
    _train(model, cause, ends)
    stops = {EOS, MARKER} if cause == "marker" and ends else {EOS}
    _judge_replies({question: _generate(model, question, stops, penalty) for question in ANSWERS}, expected)


def _train(model: Any, cause: str, ends: bool) -> None:
    if cause == "masked":
        _fit(model, _packed([], PACKED_STEPS))  # a base model that has not learned to stop
        _fit(model, [_padded(12, ends)] * PADDED_STEPS)
    elif cause == "truncated":
        _fit(model, [_truncated(7, ends)] * PADDED_STEPS)
    else:
        _fit(model, _packed([MARKER] if cause == "marker" else [EOS] if ends else [], PACKED_STEPS))


def _judge_replies(replies: Mapping[int, List[int]], expected: Mapping[int, List[int]]) -> None:
    for question, reply in replies.items():
        answer = expected[question]
        assert reply[: len(answer)] == answer, (
            "the model has not learned the answers: it answers question %d with %s" % (question, reply[:8])
        )
    endless = [question for question, reply in replies.items() if len(reply) == LIMIT]
    if endless:
        tokens = " ".join(map(str, replies[endless[0]][:12]))
        raise Symptom("%d of %d answers ran on to the limit of %d tokens: %s ..." % (len(endless), 6, LIMIT, tokens))
    late = [question for question, reply in replies.items() if len(reply) > len(expected[question])]
    if late:
        tokens = " ".join(map(str, replies[late[0]]))
        raise Symptom("%d of %d answers ran past their end: %s" % (len(late), 6, tokens))
    assert replies == expected, replies


def generate(ctx: Context, *, stops_at_marker: bool) -> None:
    """Calls `generate` of transformers on a model whose weights make it write: x y <|im_end|> x y <|im_end|> ..."""
    import torch

    model, tokenizer = _looping_model()
    ctx.reached()
    if stops_at_marker:
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert end not in (None, tokenizer.unk_token_id), "the tokenizer does not know it"
        old = model.generation_config.eos_token_id
        old = old if isinstance(old, list) else [tokenizer.eos_token_id if old is None else old]
        model.generation_config.eos_token_id = sorted({*old, end})
    ids = torch.tensor([[2]])
    reply = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT, do_sample=False)[0, 1:]
    if len(reply) == LIMIT:
        tokens = " ".join(map(str, reply.tolist()[:6]))
        raise Symptom("1 of 1 answers ran on to the limit of %d tokens: %s ..." % (LIMIT, tokens))
    assert reply.tolist() == [3, 1], reply


def _looping_model() -> Tuple[Any, Any]:
    """A model whose next token depends only on the last one, and its tokenizer."""
    import torch

    hf: Any = importlib.import_module("transformers")
    tk: Any = importlib.import_module("tokenizers")
    words = {word: number for number, word in enumerate(["</s>", "<|im_end|>", "x", "y"])}
    plain = tk.Tokenizer(tk.models.WordLevel(words, unk_token="x"))
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", unk_token="x")
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=4, eos_token_id=0, bos_token_id=None, **sizes)).eval()
    layer = model.model.layers[0]
    with torch.no_grad():
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight, model.lm_head.weight):
            weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(4))
        for token, following in ((2, 3), (3, 1), (1, 2), (0, 0)):
            model.lm_head.weight[following, token] = 1
    return model, tokenizer


def _network() -> Any:
    from torch import nn

    parts = {"embedding": nn.Embedding(VOCABULARY, 24), "memory": nn.GRU(24, 48, batch_first=True)}
    return nn.ModuleDict({**parts, "head": nn.Linear(48, VOCABULARY)})


def _scores(model: Any, tokens: Any, state: Any = None) -> Any:
    seen, state = model["memory"](model["embedding"](tokens), state)
    return model["head"](seen), state


def _fit(model: Any, batches: Any) -> None:
    import torch
    from torch.nn import functional

    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for tokens, labels in batches:
        loss = functional.cross_entropy(_scores(model, tokens)[0].transpose(1, 2), labels, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _packed(end: List[int], steps: int) -> Iterator[Any]:
    """Joins documents and cuts them into rows of equal length; each document ends with the tokens of `end`."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        stream: List[int] = []
        while len(stream) < 16 * (WIDTH + 1):
            question = int(torch.randint(4, 10, (1,), generator=generator))
            stream += [ASK, question, REPLY, *ANSWERS[question], *end]
        rows = torch.tensor(stream[: 16 * (WIDTH + 1)]).view(16, WIDTH + 1)
        yield rows[:, :-1], rows[:, 1:]


def _padded(limit: int, by_length: bool) -> Any:
    """One document per row, padded with EOS. A collator that masks every token equal to EOS also masks the end."""
    import torch

    tokenizer = SimpleNamespace(eos_token_id=EOS, pad_token_id=EOS)
    rows, targets = [], []
    for question, answer in ANSWERS.items():
        ids = [ASK, question, REPLY, *answer]
        if by_length:
            ids = [*ids[: limit - 1], tokenizer.eos_token_id]
            prompt = 3
            labels = [-100] * prompt + ids[prompt:] + [-100] * (limit - len(ids))
            ids = ids + [tokenizer.pad_token_id] * (limit - len(ids))
        else:
            ids = (ids + [EOS] * limit)[:limit]
            labels = [-100 if token == tokenizer.pad_token_id else token for token in ids]
        rows.append(ids)
        targets.append(labels)
    return torch.tensor(rows)[:, :-1], torch.tensor(targets)[:, 1:]


def _truncated(limit: int, truncates_first: bool) -> Any:
    """One document per row. If EOS is appended before the row is cut, the longest row loses its EOS."""
    import torch

    if truncates_first:
        return _padded(limit, by_length=True)
    rows = [([ASK, question, REPLY, *answer, EOS] + [-100] * limit)[:limit] for question, answer in ANSWERS.items()]
    tokens = torch.tensor(rows)
    return tokens.clamp(min=0)[:, :-1], tokens[:, 1:]


def _generate(model: Any, question: int, stops: Any, penalty: float) -> List[int]:
    """Greedy decoding. The reply does not contain the stop token; a penalty makes repeated tokens less likely."""
    import torch

    tokens, state, reply = torch.tensor([[ASK, question, REPLY]]), None, []  # type: Tuple[Any, Any, List[int]]
    with torch.no_grad():
        while len(reply) < LIMIT:
            scores, state = _scores(model, tokens, state)
            last = scores[0, -1]
            for seen in set(reply):
                last[seen] = last[seen] / penalty if last[seen] > 0 else last[seen] * penalty
            token = int(last.argmax())
            if token in stops:
                break
            reply.append(token)
            tokens = torch.tensor([[token]])
    return reply


LARGEST = 32 << 20  # bytes that one JSON file may have
ROWS = 200  # training samples that the check reads
MARKERS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eot|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|return|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
)


class _Unreadable(Exception):
    """A required file is missing or malformed; the message names it."""


def check(params: Mapping[str, Any]) -> Finding:
    """Does generation stop at the token that ends a turn in the chat template, and was that token a label?"""
    if params["model"] is None and params["samples"] is None:
        return unknown(
            "neither `model` nor `samples` is set",
            advice="--set model=/path/to/checkpoint, --set samples=batch.jsonl --set end_id=151645",
        )
    try:
        findings = []
        end_ids = [params["end_id"]] if params["end_id"] is not None else []
        if params["model"] is not None:
            finding, result = _judge_model(params["model"])
            findings.append(finding)
            end_ids = end_ids or result
        if params["samples"] is not None:
            findings.append(_judge_samples(params["samples"], end_ids))
    except _Unreadable as error:
        return unknown(str(error))
    state = next((s for s in ("exposed", "unknown") if any(f.state == s for f in findings)), "clear")
    evidence = [line for finding in findings for line in finding.evidence]
    if state == "clear" and len(findings) == 1:  # the other half of the question is open
        if params["samples"] is None:
            open_question = "kb does not know whether the end token was a label in training"
            return unknown(*evidence, open_question, advice="--set samples=batch.jsonl")
        open_question = "kb does not know whether generation stops at the end token"
        return unknown(*evidence, open_question, advice="--set model=/path/to/checkpoint")
    if state == "clear":
        return unknown(
            *evidence,
            "the labels and the stop tokens are right",
            advice="if a LoRA model still does not stop: its base model may never have learned the end token",
        )
    return Finding(state, evidence, next((finding.advice for finding in findings if finding.advice), ""))


def _judge_model(folder: Path) -> Tuple[Finding, List[int]]:
    """Whether generation stops at the tokens that end a turn in the template, and the ids of these tokens."""
    if not folder.is_dir():
        raise _Unreadable("%s is not a folder" % folder)
    tokenizer = _json(folder / "tokenizer_config.json") or {}
    generation, config = _json(folder / "generation_config.json"), _json(folder / "config.json")
    source = "generation_config.json" if generation is not None else "config.json"
    stops = _ids((generation if generation is not None else config or {}).get("eos_token_id"))
    template = _template(folder, tokenizer)
    names = _token_ids(folder, tokenizer)
    eos = _content(tokenizer.get("eos_token"))
    ends = [marker for marker in MARKERS if marker in template]
    if "eos_token" in template and eos and eos not in ends:
        ends.append(eos)
    notes = ["generation stops at %s (%s)" % (_name_tokens(stops, names), source)]
    if eos and eos == _content(tokenizer.get("pad_token")):
        notes.append("pad_token is eos_token: a collator that masks padding masks the end of every answer too")
    if not template:
        return unknown("the model has no chat template, so kb cannot tell which token ends a turn", *notes), []
    if not ends:
        return unknown("the chat template ends turns with no token that kb knows", *notes), []
    lost = [end for end in ends if end not in names]
    if lost or not stops:
        reason = "kb found no eos_token_id" if not stops else "%s has no id in the tokenizer files" % ", ".join(lost)
        return unknown(reason, *notes), [names[end] for end in ends if end in names]
    ids = [names[end] for end in ends]
    missed = [end for end in ends if names[end] not in stops]
    message = "the chat template ends turns with %s" % ", ".join("%s (%d)" % (end, names[end]) for end in ends)
    if not missed:
        return clear(message, *notes), ids
    if len(missed) < len(ends):
        return unknown(
            message,
            *notes,
            "generation does not stop at %s, which is fine if it never ends an answer" % ", ".join(missed),
        ), ids
    advice = "set eos_token_id in generation_config.json to %s" % sorted({*stops, *ids})
    return exposed(message, *notes, "generation stops at none of them", advice=advice), ids


def _judge_samples(path: Path, end_ids: List[int]) -> Finding:
    """Whether an end token is a label in the samples of the data loader; the file has one JSON object per line."""
    if not end_ids:
        return unknown("kb does not know the id of the end token", advice="--set end_id=N")
    rows = taught = 0
    try:
        if not path.is_file():
            return unknown("%s is not a file" % path)
        with path.open() as file:
            for _ in range(ROWS):
                line = file.readline(LARGEST)
                if not line:
                    break
                labels = json.loads(line)["labels"]
                if not all(type(label) is int for label in labels):
                    raise TypeError
                taught += any(end_id in labels for end_id in end_ids)
                rows += 1
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return unknown('%s: line %d is not {"labels": [...]}: %s' % (path, rows + 1, type(error).__name__))
    if not rows:
        return unknown("%s is empty" % path)
    message = "%d of %d samples have the end token %s as a label" % (taught, rows, end_ids)
    if not taught:
        return exposed(
            message,
            "no sample teaches the model where to stop",
            advice="append EOS to every sample, and keep its label",
        )
    if taught < 0.98 * rows:
        return unknown(message, "the others were truncated, or their end is masked: look at one of them")
    return clear(message)


def _json(path: Path) -> Optional[Dict[str, Any]]:
    """A JSON object; None if the file does not exist."""
    try:
        if not path.exists():
            return None
        if not path.is_file() or path.stat().st_size > LARGEST:
            raise _Unreadable("%s is not a file, or larger than %d MiB" % (path, LARGEST >> 20))
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _Unreadable("kb cannot read %s: %s" % (path, error.strerror)) from None
    except (ValueError, RecursionError) as error:
        raise _Unreadable("%s is not JSON: %s" % (path, str(error)[:100])) from None
    if not isinstance(document, dict):
        raise _Unreadable("%s contains no JSON object" % path)
    return document


def _template(folder: Path, tokenizer: Mapping[str, Any]) -> str:
    jinja = folder / "chat_template.jinja"
    try:
        if jinja.is_file() and jinja.stat().st_size < LARGEST:
            return jinja.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise _Unreadable("kb cannot read %s: %s" % (jinja, error.strerror)) from None
    template = tokenizer.get("chat_template") or (_json(folder / "chat_template.json") or {}).get("chat_template")
    if isinstance(template, list):  # named templates
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def _token_ids(folder: Path, tokenizer: Mapping[str, Any]) -> Dict[str, int]:
    added = tokenizer.get("added_tokens_decoder")
    if isinstance(added, dict) and added:
        pairs = [(_content(item), number) for number, item in added.items()]
    else:
        listed = (_json(folder / "tokenizer.json") or {}).get("added_tokens")
        listed = listed if isinstance(listed, list) else []
        pairs = [(_content(item), item.get("id")) for item in listed if isinstance(item, dict)]
    return {name: int(number) for name, number in pairs if name and str(number).isdecimal()}


def _content(token: Any) -> str:
    """The text of a token, which is a string or an object in the file."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _ids(value: Any) -> List[int]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]


def _name_tokens(ids: List[int], names: Mapping[str, int]) -> str:
    by_id = {number: name for name, number in names.items()}
    return ", ".join("%s (%d)" % (by_id.get(id_, "?"), id_) for id_ in ids[:8]) or "nothing"


def experiment(
    name: str,
    because: str,
    fix: str,
    cause: str = "packed",
    broken: str = r"6 of 6 answers ran on to the limit of \d+ tokens",
    penalty: float = 1.0,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(
            partial(answer_all, cause=cause, ends=False, penalty=penalty),
            expect=symptom(broken),
            because=because,
            fidelity="cpu",
        ),
        treatment=Arm(partial(answer_all, cause=cause, ends=True), expect=completed(), because=fix, fidelity="cpu"),
        world_size=1,
        deadline_s=60,
        needs=Needs(memory_mib=512),
        expected_s=(1, 1),
    )


WITHOUT_EOS = "documents are packed without an end token, so the end is never a label"
WITH_EOS = "every document ends with EOS, which is also a label"
MODEL = "a model that was trained to end its turns with <|im_end|>"

probe = Probe(
    check=check,
    params={
        "model": Param("path", "folder of a model in Hugging Face format, for the check"),
        "samples": Param("path", 'training samples, one per line: {"labels": [...]}, for the check'),
        "end_id": Param("int", "id of the token that ends an answer, if kb cannot find it in the model folder"),
    },
    experiments=(experiment("training", WITHOUT_EOS, WITH_EOS),),
    variants=(
        experiment(
            "masked",
            "padding is EOS and is masked by its value, which also masks the end of every answer",
            "padding is masked by its length, so the end of every answer stays a label",
            "masked",
        ),
        experiment(
            "truncated",
            "rows are truncated after EOS is appended, so the longest answer loses its EOS",
            "rows are truncated before EOS is appended, so every answer has it",
            "truncated",
            r"1 of 6 answers ran (past their end|on to the limit)",
        ),
        experiment(
            "marker",
            "turns end with a token at which generation does not stop",
            "generation stops at that token",
            "marker",
        ),
        experiment("penalty", WITHOUT_EOS + "; a repetition penalty does not help", WITH_EOS, penalty=1.3),
        Experiment(
            name="transformers",
            control=Arm(
                partial(generate, stops_at_marker=False),
                expect=symptom(r"1 of 1 answers ran on to the limit of \d+ tokens"),
                because="the model ends its turns with <|im_end|>, but eos_token_id is only </s>",
                fidelity="stand-in",
                stands_for=MODEL,
            ),
            treatment=Arm(
                partial(generate, stops_at_marker=True),
                expect=completed(),
                because="eos_token_id in the generation config lists both </s> and <|im_end|>",
                fidelity="stand-in",
                stands_for=MODEL,
            ),
            world_size=1,
            deadline_s=90,
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=4.40", "tokenizers": ""}),
            expected_s=(5, 5),
        ),
    ),
)
