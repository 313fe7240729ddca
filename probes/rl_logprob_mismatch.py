"""The sampler and the trainer compute different log-probabilities for the same tokens."""

from __future__ import annotations

import copy
import importlib
from functools import partial
from typing import Any, Dict, List, Mapping, Tuple

from kb.cpu_arms import without_launcher
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
    symptom,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config

ENGINE = "vLLM or SGLang; the probe uses a sampler in plain torch with the same order of steps"
DIFFER = r"log-probs of sampler and trainer differ by (0\.0[2-9]|0\.[1-9]|[1-9])\S* nats"
VOCABULARY, WIDTH, LENGTH = 64, 32, 8


def build_policy() -> Any:
    """Returns a recurrent language model; its state stands for the KV cache, and its logits are near 20."""
    import torch

    class Policy(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
            self.body = torch.nn.GRU(WIDTH, WIDTH, batch_first=True)
            self.lm_head = torch.nn.Linear(WIDTH, VOCABULARY)

        def forward(self, token_ids: Any, state: Any = None) -> Tuple[Any, Any]:
            return self.body(self.embedding(token_ids), state)  # type: ignore[no-any-return, unused-ignore]

    torch.manual_seed(0)
    policy = Policy()
    with torch.no_grad():
        policy.lm_head.weight.mul_(8)
        policy.lm_head.bias.fill_(20)
    return policy


def head(policy: Any, hidden: Any, dtype: Any) -> Any:
    """Returns logits of hidden states in bf16; lm_head multiplies in `dtype`."""
    import torch

    hidden, weight = hidden.bfloat16(), policy.lm_head.weight.bfloat16()
    return torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype), policy.lm_head.bias.to(dtype)).float()


def truncate(logits: Any, top_p: float) -> Any:
    """Sets logits to -inf outside the smallest set of tokens whose probability reaches top_p."""
    ordered, index = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    removed = probabilities.cumsum(-1) - probabilities >= top_p
    return logits.masked_fill(removed.scatter(-1, index, removed), float("-inf"))


class Sampler:
    """Performs the steps of an engine: own weights, a prefix cache, temperature, truncation, sampling."""

    def __init__(self, policy: Any) -> None:
        self.policy = copy.deepcopy(policy)
        self.cache: Dict[Any, Any] = {}

    def generate(self, prompt: Any, temperature: float, top_p: float, processed: bool, dtype: Any) -> Tuple[Any, ...]:
        """Samples 256 rows of LENGTH tokens; returns tokens, log-probabilities, and which tokens truncation kept."""
        import torch

        key = tuple(prompt[0].tolist())
        if key not in self.cache:
            self.cache[key] = self.policy(prompt[:, :-1])[1]
        state, token = self.cache[key].repeat(1, 256, 1), prompt[:, -1:].repeat(256, 1)
        tokens: List[Any] = []
        logprobs: List[Any] = []
        kept: List[Any] = []
        for _ in range(LENGTH):
            hidden, state = self.policy(token, state)
            raw = head(self.policy, hidden[:, -1], dtype)
            final = truncate(raw / temperature, top_p)
            token = final.softmax(-1).multinomial(1)
            tokens.append(token)
            logprobs.append((final if processed else raw).log_softmax(-1).gather(-1, token))
            kept.append(final.isfinite())
        return torch.cat(tokens, 1), torch.cat(logprobs, 1), torch.stack(kept, 1)


def step(
    ctx: Context,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    processed: bool = True,
    trainer_scales: bool = True,
    replays: bool = False,
    synchronised: bool = True,
    resets_cache: bool = True,
    fp32_head: str = "both",
    looks_at_tail: bool = False,
) -> None:
    """Updates the policy, samples a rollout, and scores it with the trainer; both should agree within 0.02 nats."""
    import torch

    policy = build_policy()
    sampler = Sampler(policy)
    engine_dtype = torch.float32 if fp32_head == "both" else torch.bfloat16
    prompt = torch.tensor([[5, 9, 2, 7, 1]])
    with torch.no_grad():
        sampler.generate(prompt, temperature, top_p, processed, engine_dtype)  # this fills the cache
        for weight in policy.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight))  # an optimizer step
        if synchronised:
            sampler.policy.load_state_dict(policy.state_dict())
        if resets_cache:
            sampler.cache.clear()
        ctx.reached()
        token_ids, sampler_logprobs, kept = sampler.generate(prompt, temperature, top_p, processed, engine_dtype)
        inputs = torch.cat((prompt.expand(256, -1), token_ids), 1)[:, :-1]
        hidden = policy(inputs)[0][:, -LENGTH:]
        logits = head(policy, hidden, torch.float32)
        if trainer_scales:
            logits = logits.float() / temperature
        if replays:
            logits = logits.masked_fill(~kept, float("-inf"))
        trainer_logprobs = logits.log_softmax(-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
        tail = logits.softmax(-1).masked_fill(kept, 0).sum(-1).mean().item()
    difference = trainer_logprobs - sampler_logprobs
    numbers = (difference.abs().mean().item(), difference.exp().mean().item())
    ctx.note(nats=round(numbers[0], 4), ratio=round(numbers[1], 4))
    message = "log-probs of sampler and trainer differ by %.4f nats a token, mean ratio %.4f" % numbers
    if numbers[0] >= 0.02:
        raise Symptom(message)
    assert abs(numbers[1] - 1) < 0.02, message
    if looks_at_tail and tail > 0.01:
        raise Symptom("the ratio is 1, and tokens with %.0f %% of the probability are never drawn" % (100 * tail))


def weigh(ctx: Context, *, weighted: bool) -> None:
    """Compares the expected gradient under a different sampler with that under the policy itself."""
    import torch

    torch.manual_seed(0)
    logits = torch.randn(VOCABULARY)
    advantages = torch.randn(VOCABULARY)
    policy, sampler = logits.softmax(-1), (logits / 1.3).softmax(-1)
    ctx.reached()
    weights = (policy / sampler).clamp(max=3.0) if weighted else torch.ones(VOCABULARY)
    score = torch.eye(VOCABULARY) - policy  # row a: gradient of log policy[a]
    expected = (policy * advantages) @ score
    gradient = (sampler * weights * advantages) @ score
    error = ((gradient - expected).norm() / expected.norm()).item()
    if error > 0.1:
        raise Symptom("the gradient is %.0f %% away from that of the policy" % (100 * error))


def pass_tokens(ctx: Context, *, as_ids: bool) -> None:
    """Passes sampled tokens to the trainer as ids, or as text that a byte-pair tokenizer encodes again."""
    tokenizers: Any = importlib.import_module("tokenizers")
    vocabulary = {letter: number for number, letter in enumerate("helo")}
    vocabulary.update({"he": 4, "ll": 5, "llo": 6, "hello": 7})
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    sampled = [4, 6, 7]  # the sampler drew "he" and then "llo"
    ctx.reached()
    learned = sampled if as_ids else tokenizer.encode(tokenizer.decode(sampled)).ids
    if learned != sampled:
        raise Symptom("sampled tokens %s are learned as %s" % (sampled, learned))


def build_llama(hf: Any) -> Tuple[Any, Any]:
    """Returns a small Llama and a tokenizer whose tokens are the words w0, w1 and so on."""
    import torch

    tokenizers: Any = importlib.import_module("tokenizers")
    words = {f"w{number}": number for number in range(VOCABULARY)}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="w0", eos_token="w1", unk_token="w0")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = hf.LlamaConfig(vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=None, **sizes)
    return hf.LlamaForCausalLM(config), tokenizer


def train_grpo(ctx: Context, *, top_p: float = 1.0, lora_dropout: float = 0.0, disable_dropout: bool = True) -> None:
    """Runs one step of TRL's GRPOTrainer, with generate() of transformers instead of vLLM, and reads its metrics."""
    without_launcher()
    import torch

    hf: Any = importlib.import_module("transformers")
    trl: Any = importlib.import_module("trl")
    model, tokenizer = build_llama(hf)

    class Generation:
        """Has the methods of trl.generation.vllm_generation that GRPOTrainer calls."""

        def sync_weights(self) -> None:
            self.model = copy.deepcopy(model).eval()
            self.model.generation_config.eos_token_id = None

        def generate(self, prompts: Any, **_: Any) -> Tuple[Any, Any, Any, None]:
            options = {"do_sample": True, "top_p": top_p, "top_k": 0, "max_new_tokens": 16}
            options.update(return_dict_in_generate=True, output_scores=True)
            with torch.no_grad():
                output = self.model.generate(torch.tensor(prompts), **options)
            ids = output.sequences[:, -16:]
            scores = torch.stack(output.scores, 1).log_softmax(-1).gather(-1, ids.unsqueeze(-1))
            return prompts, ids.tolist(), scores.tolist(), None

    options = {"output_dir": ctx.path("out"), "use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1}
    options.update(per_device_train_batch_size=4, num_generations=4, max_completion_length=16, logging_steps=1)
    options.update(top_p=top_p, learning_rate=1e-3, gradient_checkpointing=False, disable_dropout=disable_dropout)
    options["vllm_importance_sampling_mode"] = "token_truncate"
    adapter = None
    if lora_dropout:
        lora = {"lora_dropout": lora_dropout, "lora_alpha": 32, "init_lora_weights": False}
        adapter = importlib.import_module("peft").LoraConfig(target_modules="all-linear", **lora)
    data = importlib.import_module("datasets").Dataset.from_list([{"prompt": "w5 w6"}] * 16)
    rewards = lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids]  # noqa: E731
    arguments = trl.GRPOConfig(**options)
    trainer = trl.GRPOTrainer(model, rewards, arguments, data, processing_class=tokenizer, peft_config=adapter)
    model = trainer.model
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, Generation(), -1
    ctx.reached()
    trainer.train()
    metrics = trainer.state.log_history[0]
    names = ("sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/mean")
    ctx.note(trl=trl.__version__, **{name.split("/")[1]: round(metrics[name], 4) for name in names})
    if metrics[names[0]] >= 0.02:
        raise Symptom(str({name: metrics[name] for name in names}))


def check(params: Mapping[str, Any]) -> Finding:
    """Does a TRL recipe truncate the sampling of vLLM? A file shows no other cause."""
    advice = "run --set config=grpo.yaml, with the arguments of GRPOConfig"
    if params["config"] is None:
        return unknown("no configuration was given", advice=advice)
    try:
        kind, values = read_config(params["config"])
    except UnreadableConfig as error:
        return unknown(str(error), advice=advice)
    if kind != "arguments" or values.get("use_vllm") is not True:
        return unknown("%s has no use_vllm: true" % params["config"], advice=advice)
    if values.get("generation_kwargs") or values.get("vllm_importance_sampling_correction") is False:
        return unknown("the recipe sets generation_kwargs or switches the correction off; kb does not judge these")
    limits = []
    for name, low, high in (("top_p", 0, 1), ("min_p", 0, 1), ("top_k", 0, 32000)):
        value = values.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and low < value < high:
            limits.append("%s: %s" % (name, value))
    if limits:
        return exposed(
            "vLLM samples with %s and normalises over the remaining tokens" % " and ".join(limits),
            advice="set top_p: 1.0, top_k: 0 and no min_p (Fix 2)",
        )
    return unknown("top_p, min_p and top_k of the recipe do not truncate; a file does not show the other causes")


def pair(name: str, job: Any, keyword: str, values: Any, because: str, fix: str, **more: Any) -> Experiment:
    """Returns an experiment; the arms differ in `keyword`, whose `values` are for control and treatment."""
    fails: Expect = more.get("fails", symptom(DIFFER))
    fidelity, stands_for = more.get("fidelity", "stand-in"), more.get("stands_for", ENGINE)
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: values[0]}), fails, because, fidelity, stands_for),
        treatment=Arm(partial(job, **{keyword: values[1]}), completed(), fix, fidelity, stands_for),
        needs=Needs(packages={"torch": ">=2.1", **more.get("packages", {})}),
        world_size=1,
        deadline_s=more.get("deadline_s", 30),
        expected_s=more.get("expected_s", (0.5, 0.5)),
    )


SMALL = {"transformers": ">=5", "trl": ">=1.16,<2", "datasets": "", "tokenizers": ""}
LOGGED = symptom(r"'sampling/sampling_logp_difference/mean': 0\.(0[2-9]|[1-9])")
TAIL = symptom(r"the ratio is 1, and tokens with \d+ % of the probability are never drawn")
AWAY = symptom(r"the gradient is \d+ % away from that of the policy")
LEARNED = symptom(r"sampled tokens \[4, 6, 7\] are learned as \[7, 7\]")
TRUNCATED = "the sampler normalises over the tokens that top_p keeps, the trainer over all"
COOL, CUT = partial(step, temperature=0.6), partial(step, top_p=0.8)
UNSEEN = partial(step, processed=False, looks_at_tail=True)
ALL = "top_p is 1, so the sampler draws from all tokens"
RAW = "the sampler returns log-probabilities from before the temperature"
DRAWN = "the sampler returns the log-probabilities that it draws from"
ONE_SIDE = "lm_head multiplies in float32 in the trainer and in bf16 in the sampler"
IDS = {"fails": LEARNED, "fidelity": "cpu", "stands_for": "", "packages": {"tokenizers": ""}}
GENERATE = "vLLM; the probe uses generate() of transformers"
TRL = {"fails": LOGGED, "stands_for": GENERATE, "packages": SMALL, "expected_s": (8.0, 8.0), "deadline_s": 90}
LORA = partial(train_grpo, lora_dropout=0.8)
ADAPTER = {**TRL, "packages": {**SMALL, "peft": ""}}
NO = (False, True)
MODEL = {
    "fails": AWAY,
    "fidelity": "model",
    "stands_for": "a sampled policy gradient; the probe computes the exact mean over 64 tokens",
}
STALE = "the sampler keeps the weights from before the update"
CACHED = "the prefix cache keeps the prompt's state of the old weights"
probe = Probe(
    check=check,
    params={"config": Param("path", "a YAML or JSON with the arguments of GRPOConfig, for the check")},
    experiments=(pair("truncated", step, "top_p", (0.8, 1.0), TRUNCATED, ALL),),
    variants=(
        pair("replay", CUT, "replays", NO, TRUNCATED, "the trainer normalises over the same tokens"),
        pair(
            "tail",
            UNSEEN,
            "top_p",
            (0.8, 1.0),
            "raw log-probabilities hide that top_p cuts tokens off",
            ALL,
            fails=TAIL,
        ),
        pair(
            "temperature",
            COOL,
            "trainer_scales",
            NO,
            "the trainer does not divide by the temperature",
            "both divide by it",
        ),
        pair("mode", COOL, "processed", NO, RAW, DRAWN),
        pair("stale", step, "synchronised", NO, STALE, "the sampler has the new weights"),
        pair("prefix-cache", step, "resets_cache", NO, CACHED, "the cache is emptied after the update"),
        pair("fp32-head", step, "fp32_head", ("trainer", "both"), ONE_SIDE, "it multiplies in float32 in both"),
        pair(
            "weights",
            weigh,
            "weighted",
            NO,
            "the gradient has no importance weights",
            "each token is weighted by its ratio",
            **MODEL,
        ),
        pair(
            "token-ids",
            pass_tokens,
            "as_ids",
            NO,
            "the trainer tokenizes the text again",
            "the trainer gets the token ids",
            **IDS,
        ),
        pair("grpo-trainer", train_grpo, "top_p", (0.8, 1.0), TRUNCATED, ALL, **TRL),
        pair(
            "dropout", LORA, "disable_dropout", NO, "dropout is on when the trainer scores", "dropout is off", **ADAPTER
        ),
    ),
)
