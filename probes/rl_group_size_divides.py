"""GRPO samples a group of completions for each prompt, and the batch of all ranks does not hold whole groups."""

from __future__ import annotations

import importlib
import math
import os
import re
from functools import partial
from typing import Any, Dict, Mapping, Optional, Tuple
from unittest.mock import PropertyMock, patch

from kb.packages import numbers as numbers_of
from kb.packages import version
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
from kb.training_config import UnreadableConfig, read_config

KEYS = {
    "batch": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "generations": "num_generations",
    "eval_batch": "per_device_eval_batch_size",
}
UNJUDGED = (
    "generation_batch_size",
    "steps_per_generation",
    "num_generations_eval",
    "auto_find_batch_size",
    "per_gpu_train_batch_size",
    "per_gpu_eval_batch_size",
    "evaluation_strategy",  # the name of eval_strategy in older releases
)
GROUP = 4  # completions of a prompt, in the experiment without trl
DEFAULTS = {"batch": 8, "accumulation": 1, "generations": 8, "eval_batch": 8}  # of trl 0.15 to 1.16


def configure(
    ctx: Context,
    *,
    batch: int = 1,
    accumulation: int = 1,
    generations: int = 8,
    processes: int = 1,
    generation_batch: Optional[int] = None,
    eval_batch: Optional[int] = None,
) -> None:
    """The real GRPOConfig; the number of processes is that of a launcher, or what it is told."""
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(variable, None)
    hf: Any = importlib.import_module("transformers")
    trl: Any = importlib.import_module("trl")
    evaluation: Dict[str, Any] = {}
    if eval_batch is not None:
        evaluation = {"eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": eval_batch}
    ctx.reached()
    with patch.object(hf.TrainingArguments, "world_size", PropertyMock(return_value=processes)):
        args = trl.GRPOConfig(
            output_dir=ctx.path("out"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            num_generations=generations,
            generation_batch_size=generation_batch,
            **evaluation,
        )
    prompts, rest = divmod(args.generation_batch_size, generations)
    assert prompts >= 1 and rest == 0, (prompts, rest)
    ctx.note(trl=trl.__version__, generation_batch_size=args.generation_batch_size, prompts=prompts)


def gather_groups(ctx: Context, *, batch: int) -> None:
    """What the rule protects: a global batch of two ranks has all four completions of each of its prompts."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    ctx.reached()
    order = [prompt for prompt in range(4) for _ in range(GROUP)]
    mine = torch.tensor(order[ctx.rank * batch : (ctx.rank + 1) * batch])
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    prompts, counts = torch.cat(gathered).unique(return_counts=True)
    for prompt, count in torch.stack((prompts, counts), dim=1).tolist():
        if count != GROUP:
            raise Symptom(f"the batch has {count} of {GROUP} completions of prompt {prompt}")


def check(params: Mapping[str, Any]) -> Finding:
    """Do the numbers, or a recipe, hold whole groups?"""
    values: Dict[str, Any] = {name: params[name] for name in KEYS}
    if params["config"] is not None:
        try:
            kind, recipe = read_config(params["config"])
        except UnreadableConfig as error:
            return unknown(str(error))
        if kind != "arguments" or "num_generations" not in recipe:
            return unknown("%s has no num_generations" % params["config"])
        unjudged = [key for key in UNJUDGED if recipe.get(key) not in (None, False)]
        if unjudged:
            return unknown("the recipe sets %s, which is not judged here" % " and ".join(unjudged))
        if "rlhf_type" in recipe and not all(key in recipe for key in KEYS.values()):
            return unknown("a recipe of ms-swift without all batches, and its defaults are not those of trl")
        values = {name: recipe.get(key) if values[name] is None else values[name] for name, key in KEYS.items()}
        if recipe.get("eval_strategy", "no") in ("no", "false", False, None):  # YAML reads a bare no as False
            values["eval_batch"] = None
        elif values["eval_batch"] is None:
            values["eval_batch"] = DEFAULTS["eval_batch"]
    if values["generations"] is None:
        return unknown("num_generations was not given", advice="--set generations=8 --set batch=1 --set processes=7")
    numbers = {name: DEFAULTS[name] if values[name] is None else values[name] for name in KEYS}
    if not all(type(number) is int and number > 0 for number in numbers.values()):
        return unknown("these are no numbers above 0: %s" % numbers)
    processes = params["processes"]
    if processes is None and re.fullmatch(r"[0-9]{1,7}", os.environ.get("WORLD_SIZE", "")):
        processes = int(os.environ["WORLD_SIZE"])
    if not processes or processes < 0:
        return unknown(
            "the number of training processes is not known", advice="--set processes=7, without the GPUs of vLLM"
        )
    return judge(numbers, processes, has_eval=values["eval_batch"] is not None)


def judge(numbers: Mapping[str, int], processes: int, *, has_eval: bool) -> Finding:
    batch, accumulation, generations = numbers["batch"], numbers["accumulation"], numbers["generations"]
    total = processes * batch * accumulation
    line = "%d processes x batch %d x accumulation %d = %d completions" % (processes, batch, accumulation, total)
    release = numbers_of(version("trl"))
    if release and release < (0, 15):
        return unknown("trl %s counts prompts, and this rule is that of 0.15 and newer" % version("trl"))
    if generations < 2:
        return exposed("a group of %d has no advantage" % generations, advice="num_generations of 2 or more")
    if total % generations:
        factor = generations // math.gcd(processes * batch, generations)
        change = "gradient_accumulation_steps=%d (trl 0.17 and newer)" % factor
        if release and release < (0, 17):
            change, total = "per_device_train_batch_size=%d" % (batch * factor), processes * batch
        return exposed(
            "%s, which %d does not divide; trl 0.15 and newer refuse that" % (line, generations),
            advice="%s, or num_generations out of %s" % (change, divisors(total)),
        )
    if has_eval and processes * numbers["eval_batch"] % generations:
        shown = (processes, numbers["eval_batch"], generations)
        return exposed("evaluation: %d processes x batch %d, which %d does not divide" % shown)
    groups = "%s, %d prompts of %d" % (line, total // generations, generations)
    if processes * batch % generations == 0 or (release and release >= (0, 17)):
        return clear(groups)
    needed = "trl 0.15 and 0.16 do not count the accumulation, and %d does not divide %d"
    needed %= (generations, processes * batch)
    if release:
        return exposed(needed, advice="a larger per_device_train_batch_size, or trl 0.17 and newer")
    return unknown(groups, needed, "which release of trl will run is not known", advice="--python of that environment")


def divisors(total: int) -> Tuple[int, ...]:
    return tuple(number for number in range(2, min(total, 64) + 1) if total % number == 0)


TRL = Needs(packages={"torch": ">=2.1", "trl": ">=0.20"})


def arms(
    name: str,
    given: Dict[str, Any],
    fix: Dict[str, Any],
    expect: Expect,
    because: str,
    because_fixed: str,
    **changes: Any,
) -> Experiment:
    """Two configurations that differ by one number."""
    settings: Dict[str, Any] = {"world_size": 1, "needs": TRL, "deadline_s": 90.0, "expected_s": (3.0, 3.0), **changes}
    return Experiment(
        name,
        Arm(partial(configure, **given), expect, because, fidelity="cpu"),
        Arm(partial(configure, **{**given, **fix}), completed(), because_fixed, fidelity="cpu"),
        **settings,
    )


def torn(total: int, generations: int = 8) -> Expect:
    return raised(r"generation_batch_size \(%d\) must be divisible by num_generations \(%d\)" % (total, generations))


STANDS_FOR = "GRPOTrainer: the same order of prompts and the same gathering, without a model"

probe = Probe(
    check=check,
    params={
        "config": Param("path", "a recipe in YAML or JSON with num_generations"),
        "batch": Param("int", "per_device_train_batch_size"),
        "accumulation": Param("int", "gradient_accumulation_steps"),
        "generations": Param("int", "num_generations"),
        "eval_batch": Param("int", "per_device_eval_batch_size, if there is an evaluation"),
        "processes": Param("int", "training processes, without those of vLLM (default: WORLD_SIZE)"),
    },
    experiments=(
        arms(
            "trl",
            {"batch": 1},
            {"batch": 8},
            torn(1),
            "one process, one completion each time, and a group is eight",
            "eight completions are one group",
        ),
        Experiment(
            name="groups",
            control=Arm(
                partial(gather_groups, batch=1),
                expect=symptom(r"the batch has 2 of 4 completions of prompt 0"),
                because="two ranks with a completion each, and a group is four",
                fidelity="stand-in",
                stands_for=STANDS_FOR,
            ),
            treatment=Arm(
                partial(gather_groups, batch=2),
                expect=completed(),
                because="two ranks with two completions each are one group",
                fidelity="stand-in",
                stands_for=STANDS_FOR,
            ),
        ),
    ),
    variants=(
        arms(
            "accumulation",
            {"batch": 1, "accumulation": 1},
            {"accumulation": 8},
            torn(1),
            "one process, one completion each time, and a group is eight",
            "eight micro-batches of one completion are one group",
        ),
        arms(
            "seven-processes",
            {"batch": 1, "processes": 7, "accumulation": 1},
            {"accumulation": 8},
            torn(7),
            "seven training processes, as vLLM has the eighth GPU, and a group is eight",
            "56 completions are seven groups",
        ),
        arms(
            "group-of-seven",
            {"batch": 1, "processes": 7, "generations": 8},
            {"generations": 7},
            torn(7),
            "seven training processes and groups of eight",
            "groups of seven",
        ),
        arms(
            "generation-batch",
            {"batch": 1, "processes": 7, "generation_batch": 8},
            {"generation_batch": 56},
            raised(r"generation_batch_size \(8\) must be divisible by the global batch size \(7\)"),
            "generation_batch_size is a whole group, and not the same for all seven processes",
            "56 is a multiple of 7 and of 8",
        ),
        arms(
            "evaluation",
            {"batch": 8, "accumulation": 8, "eval_batch": 1},
            {"eval_batch": 8},
            raised(r"The global eval batch size \(1 \* 1\) must be divisible by"),
            "the evaluation has a rule of its own, and accumulation plays no part in it",
            "an evaluation batch of eight",
            needs=Needs(packages={"torch": ">=2.1", "trl": ">=0.22"}),
        ),
        arms(
            "group-of-one",
            {"batch": 8, "generations": 1},
            {"generations": 2},
            raised(r"GRPO requires at least 2 generations per prompt"),
            "a group of one has nothing to compare with",
            "a group of two",
        ),
    ),
)
