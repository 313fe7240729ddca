"""GRPO needs a group of completions for each prompt, and the batch of all ranks does not contain whole groups."""

from __future__ import annotations

import importlib
import math
import os
import re
from functools import partial
from typing import Any, Dict, Mapping, Optional, Tuple
from unittest.mock import PropertyMock, patch

from kb.cpu_arms import without_launcher
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
UNSUPPORTED = (
    "generation_batch_size",
    "steps_per_generation",
    "num_generations_eval",
    "auto_find_batch_size",
    "per_gpu_train_batch_size",
    "per_gpu_eval_batch_size",
    "evaluation_strategy",  # the name of eval_strategy in older releases
)
GROUP = 4  # completions per prompt in the experiment without trl
DEFAULTS = {"batch": 8, "accumulation": 1, "generations": 8, "eval_batch": 8}  # the defaults of trl 0.15 to 1.16


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
    """Creates a real GRPOConfig, which sees `processes` as the number of training processes."""
    without_launcher()
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
    """Checks what the rule protects: the global batch of two ranks has all four completions of each of its prompts."""
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
    """Does the batch of all ranks contain whole groups, according to parameters or a recipe?"""
    values: Dict[str, Any] = {name: params[name] for name in KEYS}
    if params["config"] is not None:
        try:
            kind, recipe = read_config(params["config"])
        except UnreadableConfig as error:
            return unknown(str(error))
        if kind != "arguments" or "num_generations" not in recipe:
            return unknown("%s has no num_generations" % params["config"])
        unsupported = [key for key in UNSUPPORTED if recipe.get(key) not in (None, False)]
        if unsupported:
            return unknown("the recipe sets %s, which kb does not take into account" % " and ".join(unsupported))
        if "rlhf_type" in recipe and not all(key in recipe for key in KEYS.values()):
            return unknown("the recipe of ms-swift lacks a batch size, and its defaults differ from those of trl")
        values = {name: recipe.get(key) if values[name] is None else values[name] for name, key in KEYS.items()}
        if recipe.get("eval_strategy", "no") in ("no", "false", False, None):  # YAML reads a bare no as False
            values["eval_batch"] = None
        elif values["eval_batch"] is None:
            values["eval_batch"] = DEFAULTS["eval_batch"]
    if values["generations"] is None:
        return unknown(
            "num_generations was not given", advice="run --set generations=8 --set batch=1 --set processes=7"
        )
    numbers = {name: DEFAULTS[name] if values[name] is None else values[name] for name in KEYS}
    if not all(type(number) is int and number > 0 for number in numbers.values()):
        return unknown("kb needs whole numbers above 0: %s" % numbers)
    processes = params["processes"]
    if processes is None and re.fullmatch(r"[0-9]{1,7}", os.environ.get("WORLD_SIZE", "")):
        processes = int(os.environ["WORLD_SIZE"])
    if not processes or processes < 0:
        return unknown(
            "kb does not know the number of training processes",
            advice="run --set processes=7, without the processes of vLLM",
        )
    return judge(numbers, processes, has_eval=values["eval_batch"] is not None)


def judge(numbers: Mapping[str, int], processes: int, *, has_eval: bool) -> Finding:
    batch, accumulation, generations = numbers["batch"], numbers["accumulation"], numbers["generations"]
    total = processes * batch * accumulation
    line = "%d processes x batch %d x accumulation %d = %d completions" % (processes, batch, accumulation, total)
    release = numbers_of(version("trl"))
    if release and release < (0, 15):
        return unknown(
            "trl %s counts prompts in a batch; kb knows only the rule of 0.15 and newer, which counts completions"
            % version("trl")
        )
    if generations < 2:
        return exposed(
            "a group of %d completion has no advantages" % generations, advice="set num_generations to 2 or more"
        )
    if total % generations:
        factor = generations // math.gcd(processes * batch, generations)
        change = "set gradient_accumulation_steps=%d (with trl 0.17 and newer)" % factor
        if release and release < (0, 17):
            change, total = "set per_device_train_batch_size=%d" % (batch * factor), processes * batch
        return exposed(
            "%s, which is not a multiple of num_generations=%d; trl 0.15 and newer raise an error"
            % (line, generations),
            advice="%s, or num_generations to one of %s" % (change, divisors(total)),
        )
    if has_eval and processes * numbers["eval_batch"] % generations:
        product = (processes, numbers["eval_batch"], generations)
        return exposed("evaluation: %d processes x batch %d is not a multiple of num_generations=%d" % product)
    groups = "%s for %d prompts, %d for each" % (line, total // generations, generations)
    if processes * batch % generations == 0 or (release and release >= (0, 17)):
        return clear(groups)
    needed = "trl 0.15 and 0.16 ignore the accumulation, and processes x batch = %d is not a multiple of %d"
    needed %= (processes * batch, generations)
    if release:
        return exposed(needed, advice="set a larger per_device_train_batch_size, or install trl 0.17 or newer")
    return unknown(
        groups, needed, "kb does not know which release of trl the job uses", advice="add --python PYTHON_OF_THE_JOB"
    )


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
    """Compares two configurations that differ by one number."""
    settings: Dict[str, Any] = {"world_size": 1, "needs": TRL, "deadline_s": 90.0, "expected_s": (3.0, 3.0), **changes}
    return Experiment(
        name,
        Arm(partial(configure, **given), expect, because, fidelity="cpu"),
        Arm(partial(configure, **{**given, **fix}), completed(), because_fixed, fidelity="cpu"),
        **settings,
    )


def incomplete_group(total: int, generations: int = 8) -> Expect:
    return raised(r"generation_batch_size \(%d\) must be divisible by num_generations \(%d\)" % (total, generations))


STANDS_FOR = "GRPOTrainer, whose order of prompts and gathering the probe copies without a model"

probe = Probe(
    check=check,
    params={
        "config": Param("path", "a recipe in YAML or JSON that sets num_generations"),
        "batch": Param("int", "per_device_train_batch_size"),
        "accumulation": Param("int", "gradient_accumulation_steps"),
        "generations": Param("int", "num_generations"),
        "eval_batch": Param("int", "per_device_eval_batch_size, if the job evaluates"),
        "processes": Param("int", "training processes, without those of vLLM (default: WORLD_SIZE)"),
    },
    experiments=(
        arms(
            "trl",
            {"batch": 1},
            {"batch": 8},
            incomplete_group(1),
            "one process generates one completion per step, but a group has eight",
            "one process generates eight completions per step, which are one group",
        ),
        Experiment(
            name="groups",
            control=Arm(
                partial(gather_groups, batch=1),
                expect=symptom(r"the batch has 2 of 4 completions of prompt 0"),
                because="two ranks generate one completion each, but a group has four",
                fidelity="stand-in",
                stands_for=STANDS_FOR,
            ),
            treatment=Arm(
                partial(gather_groups, batch=2),
                expect=completed(),
                because="two ranks generate two completions each, which are one group",
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
            incomplete_group(1),
            "one process generates one completion per step, but a group has eight",
            "eight accumulated micro-batches of one completion are one group",
        ),
        arms(
            "seven-processes",
            {"batch": 1, "processes": 7, "accumulation": 1},
            {"accumulation": 8},
            incomplete_group(7),
            "seven processes generate seven completions, as vLLM has the eighth GPU, but a group has eight",
            "seven processes accumulate 56 completions, which are seven groups",
        ),
        arms(
            "group-of-seven",
            {"batch": 1, "processes": 7, "generations": 8},
            {"generations": 7},
            incomplete_group(7),
            "seven processes generate seven completions, but a group has eight",
            "seven processes generate seven completions, which are one group of seven",
        ),
        arms(
            "generation-batch",
            {"batch": 1, "processes": 7, "generation_batch": 8},
            {"generation_batch": 56},
            raised(r"generation_batch_size \(8\) must be divisible by the global batch size \(7\)"),
            "generation_batch_size=8 is one group, but seven processes cannot share it equally",
            "generation_batch_size=56 is a multiple of 7 processes and of groups of 8",
        ),
        arms(
            "evaluation",
            {"batch": 8, "accumulation": 8, "eval_batch": 1},
            {"eval_batch": 8},
            raised(r"The global eval batch size \(1 \* 1\) must be divisible by"),
            "the evaluation batch has one completion, and accumulation does not count for it",
            "the evaluation batch has eight completions, which are one group",
            needs=Needs(packages={"torch": ">=2.1", "trl": ">=0.22"}),
        ),
        arms(
            "group-of-one",
            {"batch": 8, "generations": 1},
            {"generations": 2},
            raised(r"GRPO requires at least 2 generations per prompt"),
            "a group of one completion has no other to compare it with",
            "a group has two completions",
        ),
    ),
)
