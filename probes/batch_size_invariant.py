"""DeepSpeed gets a train_batch_size that is not a multiple of micro batch times ranks, such as 256 with 2 on 7 GPUs."""

from __future__ import annotations

import importlib
import json
from functools import partial
from types import SimpleNamespace
from typing import Any, Mapping, Optional, Tuple

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Unavailable,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config

MICRO, RANKS = 2, 7  # OpenRLHF issue 346: one of eight GPUs was out of order
MOST_RANKS = 4096  # world sizes that are tried when others are suggested
KEYS = {
    "train_batch_size": "train_batch_size",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "grad_accum": "gradient_accumulation_steps",
}
Triple = Tuple[Optional[int], Optional[int], Optional[int]]  # train batch, micro batch, accumulation steps


def configure(ctx: Context, *, train_batch_size: int) -> None:
    """The real DeepSpeedConfig, told that there are seven ranks.

    Real ranks would compile a C++ extension on the CPU (deepspeed.comm), and the rule reads only their number.
    """
    try:
        deepspeed = importlib.import_module("deepspeed")
        rules = importlib.import_module("deepspeed.runtime.config")
    except Exception as error:  # a half-built installation raises anything, MissingCUDAException for one
        raise Unavailable("deepspeed cannot be imported: %s: %s" % (type(error).__name__, error)) from error
    rules.dist = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda *_: RANKS)  # type: ignore[attr-defined]
    ctx.reached()
    config = rules.DeepSpeedConfig({"train_batch_size": train_batch_size, "train_micro_batch_size_per_gpu": MICRO})
    assert MICRO * config.gradient_accumulation_steps * RANKS == train_batch_size
    ctx.note(deepspeed=deepspeed.__version__, gradient_accumulation_steps=config.gradient_accumulation_steps)


def calculate(ctx: Context, *, given: Triple, ranks: int = RANKS) -> None:
    """The same rule without deepspeed."""
    ctx.reached()
    fault = violation(given, ranks)
    assert not fault, fault
    ctx.note(settled=list(settle(given, ranks)))


def settle(given: Triple, world: int) -> Tuple[int, int, int]:
    """All three values, as DeepSpeed infers the missing ones by integer division."""
    train, micro, accum = given
    if train is None:
        if micro is None:
            raise ValueError("Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided")
        accum = 1 if accum is None else accum
        return micro * accum * world, micro, accum
    if micro is not None:
        return train, micro, (train // micro // world if accum is None else accum)
    if accum is not None:
        return train, train // world // accum, accum
    return train, train // world, 1


def violation(given: Triple, world: int) -> str:
    """DeepSpeed's error message, or "" when the equation holds."""
    try:
        settled = settle(given, world)
    except ValueError as error:
        return str(error)
    except ZeroDivisionError:
        return "micro batch, accumulation and ranks have to be above 0: DeepSpeed divides by them"
    train, micro, accum = settled
    names = {"Train batch size": train, "Micro batch size per gpu": micro, "Gradient accumulation steps": accum}
    for name, value in names.items():
        if value <= 0:
            return "%s: %d has to be greater than 0" % (name, value)
    if train == micro * accum * world:
        return ""
    return (
        "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step"
        " * world_size %s != %s * %s * %s" % (train, micro, accum, world)
    )


def check(params: Mapping[str, Any]) -> Finding:
    """Does the equation hold for the numbers, or for the DeepSpeed JSON, that the user names?"""
    values = {name: params[name] for name in KEYS}
    world = params["world_size"]
    if params["config"] is not None:
        result = _merge_config(params["config"], values)
        if isinstance(result, Finding):
            return result
        values = result
    given = (values["train_batch_size"], values["micro_batch"], values["grad_accum"])
    if given == (None, None, None):
        return unknown(
            "no numbers were given",
            advice="--set train_batch_size=256 --set micro_batch=2 --set world_size=7, or --set config=ds_config.json",
        )
    if world is not None and world <= 0:
        return unknown("world_size %d is not a number of ranks" % world)
    if given[0] is None and given[1] is not None:
        return _derived(given, world)
    if world is None:
        return _without_world(given)
    fault = violation(given, world)
    if fault:
        ways = _ways_out(given, world)
        return exposed(fault, *ways, advice="take one of these values, or leave train_batch_size out" if ways else "")
    return clear(
        "%s = %s * %s * %s (train batch = micro batch * accumulation * data-parallel ranks)"
        % (*settle(given, world), world),
        "whether DeepSpeed will see %d ranks is not visible here: see the look-alike with world size 1" % world,
    )


def _merge_config(path: Any, given: Mapping[str, Optional[int]]) -> Any:
    """Values of the JSON with "auto" filled from the given ones, as the Trainer does; a Finding when that fails."""
    try:
        kind, config = read_config(path)
    except UnreadableConfig as error:
        return unknown(str(error))
    if config and kind != "deepspeed":
        return unknown("%s is no DeepSpeed configuration" % path, advice="--set config=ds_config.json")
    elasticity = config.get("elasticity")
    if isinstance(elasticity, dict) and elasticity.get("enabled"):
        return unknown("elasticity: DeepSpeed up to 0.19.7 computes the batch sizes itself, 0.19.8 refuses the section")
    values = dict(given)
    autos = []
    for name, key in KEYS.items():
        value = config.get(key)
        if value == "auto":
            autos.append(name)
        elif isinstance(value, str):
            return exposed("%s is the text %s: DeepSpeed needs a number without quotes" % (key, json.dumps(value)[:80]))
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            return unknown("%s is no whole number: %s" % (key, json.dumps(value)[:80]))
        elif value is not None:
            argument = given[name]
            if argument is not None and argument != value:
                return exposed(
                    "the configuration and the arguments disagree: ds %s=%d vs %s=%d" % (key, value, name, argument),
                    advice='write "auto" into the JSON and keep the number in the arguments only',
                )
            values[name] = value
    if len(autos) == len(KEYS) and all(value is None for value in given.values()):
        return unknown(
            'all three values are "auto": the Trainer fills them in from its arguments, and then they agree',
            "without the Trainer or accelerate, DeepSpeed itself fails on the text auto",
        )
    missing = [name for name in autos if values[name] is None and name != "train_batch_size"]
    if missing:
        return unknown(*['%s is "auto": also give --set %s=N' % (KEYS[name], name) for name in missing])
    return values


def _derived(given: Triple, world: Optional[int]) -> Finding:
    fault = violation(given, world or 1)
    if fault:
        return exposed(fault)
    micro, accum = given[1] or 0, given[2] or 1
    total = " = %d" % (micro * accum * world) if world else ""
    return clear("train_batch_size is not fixed, DeepSpeed computes %s * %s * ranks%s" % (micro, accum, total))


def _without_world(given: Triple) -> Finding:
    train, unit = given[0] or 0, (given[1] or 1) * (given[2] or 1)
    if train <= 0 or unit <= 0:
        return exposed(violation(given, 1))
    if train % unit:
        return exposed("%d is no multiple of %d: it fits on no number of ranks" % (train, unit))
    fits = [world for world in range(1, MOST_RANKS) if not violation(given, world)]
    listed = ", ".join(map(str, fits[:24])) + (", ..." if len(fits) > 24 else "")
    return unknown(
        "the number of ranks was not given",
        "these numbers fit on %s data-parallel ranks" % (listed or "more than %d" % MOST_RANKS),
        advice="--set world_size=N (data-parallel ranks)",
    )


def _ways_out(given: Triple, world: int) -> Tuple[str, ...]:
    """The nearest values for which the equation holds, one sentence each."""
    train, micro, accum = given
    if train is None or train <= 0 or any(value is not None and value <= 0 for value in (micro, accum)):
        return ()
    unit = (micro or 1) * (accum or 1) * world
    near = (
        [unit] if micro and accum else [value for value in (train // unit * unit, train // unit * unit + unit) if value]
    )
    ways = ["nearest train_batch_size on %d ranks: %s" % (world, " or ".join(map(str, near)))]
    fits = [ranks for ranks in range(1, MOST_RANKS) if not violation(given, ranks)]
    if fits:
        closest = sorted(sorted(fits, key=lambda ranks: abs(ranks - world))[:3])
        ways.append("%d holds on %s ranks" % (train, " or ".join(map(str, closest))))
        if world == 1 and fits[-1] > 1:
            ways.append("if you started that many and DeepSpeed saw 1, the batch is right and the world size is wrong")
    if micro and train % world == 0:
        micros = range(min(micro, train // world, MOST_RANKS), 0, -1)
        ways += ["or micro batch %d" % m for m in micros if not violation((train, m, accum), world)][:1]
    return tuple(ways)


NO_MULTIPLE = (
    "train_batch_size is no multiple of micro batch times ranks: the inferred accumulation does not multiply back"
)
MULTIPLE = "train_batch_size is the nearest multiple of micro batch times ranks"
ASSERTION = r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* world_size ?[\d.]+ != "
REAL_RULE = "seven started ranks: the real DeepSpeedConfig runs, and is told their number"
REWRITTEN = "deepspeed.runtime.config.DeepSpeedConfig, whose rule is rewritten here because deepspeed is not installed"


def arithmetic(
    name: str, broken: Triple, fixed: Triple, numbers: str, because: Tuple[str, str], ranks: Tuple[int, int] = (7, 7)
) -> Experiment:
    """The rewritten rule with the values of each arm; `numbers` ends the message of the control arm."""
    return Experiment(
        name=name,
        control=Arm(
            partial(calculate, given=broken, ranks=ranks[0]),
            expect=raised(ASSERTION + numbers),
            because=because[0],
            fidelity="model",
            stands_for=REWRITTEN,
        ),
        treatment=Arm(
            partial(calculate, given=fixed, ranks=ranks[1]),
            expect=completed(),
            because=because[1],
            fidelity="model",
            stands_for=REWRITTEN,
        ),
        world_size=1,
        needs=Needs(memory_mib=64, packages={}),
        expected_s=(0.1, 0.1),
    )


two_of_three = arithmetic(
    "two-of-three",
    (256, MICRO, 18),
    (None, MICRO, 18),
    r"2 \* 18 \* 7",
    (
        "all three values are given, and they do not multiply",
        "micro batch and accumulation are given, the rest follows",
    ),
)
batch_and_steps = arithmetic(
    "batch-and-steps",
    (256, None, 18),
    (None, MICRO, 18),
    r"2 \* 18 \* 7",
    ("the batch and the accumulation are given, and the micro batch is divided", "the batch is left out"),
)
world_of_one = arithmetic(
    "world-of-one",
    (256, 4, 8),
    (256, 4, 8),
    r"4 \* 8 \* 1$",
    ("the numbers are right for eight ranks, and one is counted", "eight ranks are counted"),
    ranks=(1, 8),
)
multiple_of_ranks = arithmetic(
    "multiple-of-ranks",
    (133, MICRO, None),
    (126, MICRO, None),
    r"2 \* 9 \* 7",
    ("133 is a multiple of the seven ranks alone", "126 is a multiple of micro batch times ranks"),
)

probe = Probe(
    check=check,
    params={
        "config": Param("path", "a DeepSpeed JSON; its values may be auto"),
        "train_batch_size": Param("int", "global batch size that DeepSpeed is given"),
        "micro_batch": Param(
            "int", "samples per rank and step: train_micro_batch_size_per_gpu, per_device_train_batch_size"
        ),
        "grad_accum": Param("int", "gradient_accumulation_steps, if you set them"),
        "world_size": Param("int", "data-parallel ranks: GPUs divided by tensor, pipeline and sequence parallelism"),
    },
    experiments=(
        Experiment(
            name="deepspeed",
            control=Arm(
                partial(configure, train_batch_size=256),
                expect=raised(ASSERTION + r"2 \* 18 \* 7"),
                because=NO_MULTIPLE,
                fidelity="stand-in",
                stands_for=REAL_RULE,
                env={"DS_ACCELERATOR": "cpu"},
            ),
            treatment=Arm(
                partial(configure, train_batch_size=252),
                expect=completed(),
                because=MULTIPLE,
                fidelity="stand-in",
                stands_for=REAL_RULE,
                env={"DS_ACCELERATOR": "cpu"},
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.10"}),
            deadline_s=60,
            expected_s=(6, 6),
        ),
        arithmetic("arithmetic", (256, MICRO, None), (252, MICRO, None), r"2 \* 18 \* 7", (NO_MULTIPLE, MULTIPLE)),
    ),
    variants=(two_of_three, batch_and_steps, world_of_one, multiple_of_ranks),
)
