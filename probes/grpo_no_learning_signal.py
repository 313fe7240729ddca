"""All rewards of a group are equal, so GRPO computes no advantage and no gradient, and no weight changes."""

from __future__ import annotations

import importlib
import json
import math
from functools import partial, wraps
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

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
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)

ANSWERS, STEPS = 16, 30


def learn(
    ctx: Context,
    *,
    reward: str = "graded",
    prompts: str = "mixed",
    temperature: float = 1.0,
    beta: float = 0.0,
    learning_rate: float = 0.2,
) -> None:
    """GRPO without a library: a policy answers with a number, and each update uses a group of eight per prompt."""
    import torch

    torch.manual_seed(0)
    policy = torch.nn.Linear(2, ANSWERS, device=ctx.device)  # the policy knows the answer to prompt 0, not to prompt 1
    with torch.no_grad():
        policy.weight.zero_()
        policy.weight[3, 0] = 50.0
        policy.bias.zero_()
    questions = torch.eye(2, device=ctx.device)[[0, 0] if prompts == "solved" else [0, 1]]
    reference = torch.log_softmax(policy(questions), dim=-1).detach()
    before = [p.detach().clone() for p in policy.parameters()]
    optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    losses, norms, means = [], [], []
    ctx.reached()
    for _ in range(STEPS):
        logps = torch.log_softmax(policy(questions), dim=-1)
        if temperature == 0:
            answers = logps.argmax(dim=-1, keepdim=True).expand(-1, 8)
        else:
            answers = torch.multinomial((logps / temperature).softmax(dim=-1), 8, replacement=True)
        rewards = _score(answers, reward)
        advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-4)
        chosen = logps.gather(1, answers)
        ratio = torch.exp(chosen - chosen.detach())  # 1, because the same weights generated the answers
        log_ratio = reference.gather(1, answers) - chosen
        loss = (-ratio * advantages + beta * (log_ratio.exp() - log_ratio - 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(math.sqrt(sum(p.grad.pow(2).sum().item() for p in policy.parameters())))
        means.append(rewards.mean().item())
        optimizer.step()
    changed = sum(not torch.equal(old, new) for old, new in zip(before, policy.parameters()))
    _judge_run(losses, norms, changed, len(before))
    assert beta or max(map(abs, losses)) < 1e-5, losses  # the loss is 0 with a gradient as well
    assert sum(means[-5:]) / 5 > means[0] + 0.05, means


def _score(answers: Any, reward: str) -> Any:
    """0 for every answer, or a reward that grows towards answer 3."""
    if reward == "exact":  # no answer matches
        return (answers == ANSWERS).float()
    return 1 - (answers - 3).abs().float() / ANSWERS


def _judge_run(losses: List[float], norms: List[float], changed: int, tensors: int) -> None:
    """Raises `Symptom` if no step had a gradient."""
    if max(norms) == 0:
        numbers = (losses[-1], len(norms), len(norms), changed, tensors)
        raise Symptom("grad_norm 0.0 and loss %.1f in %d of %d steps, %d of %d tensors changed" % numbers)
    assert changed == tensors, changed


def count_groups(ctx: Context, *, group: int) -> None:
    """One answer in eight is right: how many groups have only right or only wrong answers?"""
    import torch

    generator = torch.Generator().manual_seed(0)
    ctx.reached()
    rewards = (torch.rand(256, group, generator=generator) < 0.125).float()
    equal = int((rewards.std(dim=1) == 0).sum())
    if equal > 128:
        raise Symptom("%d of 256 groups of %d have no advantage" % (equal, group))
    assert equal < 64 and rewards.mean() < 0.25, (equal, rewards.mean())


def score(completions: List[str], *, way: str, **_: Any) -> List[float]:
    if way == "graded":
        return [text.count("d") / 4 + text.count("e") / 8 for text in completions]
    return [float("<answer>" in text) if way == "exact" else 0.7 for text in completions]


def train(ctx: Context, *, reward: str = "graded", minimum: Optional[int] = None, **options: Any) -> None:
    """TRL's GRPOTrainer makes three steps with one group of eight and a model of 16 words."""
    import torch

    without_launcher()
    trl: Any = importlib.import_module("trl")
    rows = importlib.import_module("datasets").Dataset.from_dict({"prompt": ["a b c"] * 8})
    model, tokenizer = model_of_16()
    steps = {"max_steps": 3, "logging_steps": 1, "learning_rate": 0.01, "lr_scheduler_type": "constant"}
    batch = {"per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": 6}
    quiet = {"use_cpu": True, "bf16": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    words_only = {"generation_kwargs": {"suppress_tokens": [1], "min_new_tokens": minimum}}  # never generates padding
    args = trl.GRPOConfig(output_dir=ctx.path("out"), **{**steps, **batch, **quiet, **words_only, **options})
    before = [p.detach().clone() for p in model.parameters()]
    judge = wraps(score)(partial(score, way=reward))
    trainer = trl.GRPOTrainer(model, judge, args=args, train_dataset=rows, processing_class=tokenizer)
    ctx.reached()
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    changed = sum(not torch.equal(old, new) for old, new in zip(before, model.parameters()))
    assert len(logs) == 3, logs
    losses, norms = [log["loss"] for log in logs], [log["grad_norm"] for log in logs]
    ctx.note(trl=trl.__version__, log=logs[0])
    _judge_run(losses, norms, changed, len(before))
    if options.get("loss_type") == "grpo" and max(map(abs, losses)) < 1e-6:
        raise Symptom("loss 0 in 3 of 3 steps, grad_norm %.2f, %d tensors changed" % (max(norms), changed))
    if reward == "same":
        share = logs[0]["frac_reward_zero_std"]
        raise Symptom("equal rewards, and frac_reward_zero_std %.1f, %d tensors changed" % (share, changed))
    assert max(map(abs, losses)) > 0.01, losses
    assert any(log["reward_std"] > 0 and log["frac_reward_zero_std"] == 0 for log in logs), logs


def model_of_16() -> Tuple[Any, Any]:
    """A tiny Llama with 16 words, and its tokenizer."""
    import torch

    hf: Any = importlib.import_module("transformers")
    tk: Any = importlib.import_module("tokenizers")
    words = {word: number for number, word in enumerate(["</s>", "<pad>", *"abcdefghijklmn"])}
    plain = tk.Tokenizer(tk.models.WordLevel(words, unk_token="a"))
    plain.pre_tokenizer = tk.pre_tokenizers.WhitespaceSplit()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", pad_token="<pad>", unk_token="a")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"eos_token_id": 0, "pad_token_id": 1, "bos_token_id": None}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=16, **ids, **sizes)), tokenizer


def check(params: Mapping[str, Any]) -> Finding:
    """Does the log of a TRL or ms-swift run show equal rewards and no gradient, or a gradient despite a loss of 0?"""
    path = params["state"]
    if path is None:
        return unknown("no trainer_state.json was given", advice="--set state=output/checkpoint-50/trainer_state.json")
    try:
        if not path.is_file() or path.stat().st_size > 64 << 20:
            return unknown("%s is not a file, or is larger than 64 MiB" % path)
        logs = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        steps = [log for log in logs if "grad_norm" in log and "reward" in log]
        norms = [float(log["grad_norm"]) for log in steps]
        shares = [float(log["frac_reward_zero_std"]) for log in steps if "frac_reward_zero_std" in log]
        spread = [float(log["reward_std"]) for log in steps if "reward_std" in log]
        cut = [float(log.get("completions/clipped_ratio") or 0) for log in steps]
        extra = any(float(log.get(key) or 0) != 0 for log in steps for key in ("kl", "entropy_coef"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        return unknown("%s is not a valid trainer_state.json: %s" % (path, type(error).__name__))
    if not all(map(math.isfinite, norms)):
        return unknown("grad_norm is not finite in every step", advice="see `kb show nan-loss`")
    if min(norms, default=0) < 0 or not all(0 <= share <= 1 for share in shares):
        return unknown("the log has a negative grad_norm, or a frac_reward_zero_std outside 0 to 1")
    if len(steps) < 5:
        return unknown("the log has %d GRPO steps with a grad_norm, but kb needs at least five" % len(steps))
    without_gradient = sum(norm == 0 for norm in norms)
    line = "%d of %d logged steps have grad_norm 0" % (without_gradient, len(steps))
    equal = len(spread) == len(steps) and max(spread) == 0
    if equal or (len(shares) == len(steps) and min(shares) == 1):
        kl = ", and any gradient comes from KL or entropy" if without_gradient < len(steps) else " in every step"
        return exposed(line, "every group has equal rewards" + kl, advice="print completions and rewards")
    if without_gradient == len(steps):
        truncated = "%.0f%% of the completions were truncated and may be masked" % (100 * sum(cut) / len(cut))
        advice = "check mask_truncated_completions, and see `kb show nothing-trainable`"
        return unknown(line, "the rewards differ", truncated, advice=advice)
    if len(shares) < len(steps):
        return unknown(line, "not every step logs frac_reward_zero_std, so kb does not know the share of equal groups")
    late = shares[-max(5, len(shares) // 5) :]
    mean, end = sum(shares) / len(shares), sum(late) / len(late)
    line += ", frac_reward_zero_std is %.2f on average and %.2f at the end" % (mean, end)
    if without_gradient or max(mean, end) > 0.5:
        return unknown(line, "many groups give no gradient")
    if max(norms) < 0.01:
        return unknown(line, "grad_norm is always below 0.01, because the rewards are small, or by rounding")
    if extra and all(share in (0, 1) for share in shares):  # TRL also logs 0 or 1 for the deviation of a whole batch
        return unknown(line, "the gradient may come from the rewards, or only from KL and entropy")
    return clear(line, "the rewards give a gradient; a loss of 0 is normal in GRPO")


STILL = symptom(r"grad_norm 0\.0 and loss -?0\.0 in \d+ of \d+ steps, 0 of \d+ tensors changed")
FEW = symptom(r"\d+ of 256 groups of 2 have no advantage")
VALUE = symptom(r"loss 0 in 3 of 3 steps, grad_norm \d\.\d\d, 12 tensors changed")
NOISE = symptom(r"equal rewards, and frac_reward_zero_std 0\.0, \d+ tensors changed")
LIBRARY = Needs(packages={"torch": ">=2.1", "trl": ">=0.22", "transformers": "", "datasets": "", "tokenizers": ""})


Change = Dict[str, Tuple[Any, Any]]


def pair(
    name: str, job: Callable[..., None], change: Change, because: str, fix: str, expect: Expect = STILL, **both: Any
) -> Experiment:
    """`change` maps a keyword to its values in the control arm and in the treatment arm."""
    broken, fixed = ({key: values[arm] for key, values in change.items()} for arm in (0, 1))
    return Experiment(
        name,
        Arm(partial(job, **broken, **both), expect, because, fidelity="cpu"),
        Arm(partial(job, **fixed, **both), completed(), fix, fidelity="cpu"),
        world_size=1,
        needs=LIBRARY if job is train else Needs(memory_mib=512),
        deadline_s=90.0,
        expected_s=(4.0, 4.0) if job is train else (0.5, 0.5),
    )


EQUAL = "the reward asks for a pattern that no answer matches, so every answer gets 0"
GRADED = "the reward is graded, so the answers of a group get different rewards"
REWARD = {"reward": ("exact", "graded")}
LENGTH = {"max_completion_length": (6, 48)}
CUT: Dict[str, Any] = {"mask_truncated_completions": True, "minimum": 6}

probe = Probe(
    check=check,
    params={"state": Param("path", "trainer_state.json in the last checkpoint of a GRPO run")},
    experiments=(pair("reward", learn, REWARD, EQUAL, GRADED),),
    variants=(
        pair(
            "solved",
            learn,
            {"prompts": ("solved", "mixed")},
            "the policy has already solved every prompt, so all answers get the same reward",
            "the policy has not solved one of the prompts yet",
        ),
        pair(
            "greedy",
            learn,
            {"temperature": (0.0, 1.0)},
            "at temperature 0 all eight answers of a group are equal, and so are their rewards",
            "at temperature 1 the answers of a group differ",
        ),
        pair(
            "group",
            count_groups,
            {"group": (2, 16)},
            "in most groups of two answers both rewards are equal, because only one answer in eight is right",
            "most groups of 16 answers contain right and wrong answers",
            FEW,
        ),
        pair("rate", learn, REWARD, EQUAL + ", and a learning rate of 5 does not help", GRADED, learning_rate=5.0),
        pair("beta", learn, REWARD, EQUAL + ", and a KL term does not help", GRADED, beta=0.04),
        pair("trl", train, REWARD, EQUAL, GRADED),
        pair(
            "truncated",
            train,
            LENGTH,
            "all completions reach the maximum length, and mask_truncated_completions masks them",
            "most completions end before the maximum length",
            **CUT,
        ),
        pair(
            "value",
            train,
            {"loss_type": ("grpo", "dapo")},
            "loss_type=grpo averages over answers, so the loss is 0 although the model trains",
            "loss_type=dapo averages over tokens, so the loss is not 0",
            VALUE,
        ),
        pair(
            "rounding",
            train,
            {"reward": ("same", "graded")},
            "every reward is 0.7, but rounding hides that from frac_reward_zero_std, and noise trains the model",
            GRADED,
            NOISE,
        ),
    ),
)
