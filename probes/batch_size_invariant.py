"""DeepSpeed gets a train_batch_size that is not a multiple of micro batch times ranks: 256 with 2 on 7 GPUs."""

from __future__ import annotations

import importlib
import json
from functools import partial
from types import SimpleNamespace
from typing import Any, Mapping, Optional, Tuple

from kb.cpu_arms import import_deepspeed
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

MICRO, RANKS = 2, 7  # OpenRLHF issue 346: one of eight GPUs was broken
MOST_RANKS = 4096  # the largest world size that the check tries for a suggestion
KEYS = {
    "train_batch_size": "train_batch_size",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "grad_accum": "gradient_accumulation_steps",
}
Triple = Tuple[Optional[int], Optional[int], Optional[int]]  # train batch, micro batch and accumulation steps


def configure(ctx: Context, *, train_batch_size: int) -> None:
    """Runs the real DeepSpeedConfig, with a stand-in for deepspeed.comm that reports seven ranks.

    With real ranks, deepspeed.comm would compile a C++ extension on the CPU, and the rule reads only their number.
    """
    try:
        deepspeed = importlib.import_module("deepspeed")
        rules = importlib.import_module("deepspeed.runtime.config")
    except Exception as error:  # an incomplete installation can raise any error, such as MissingCUDAException
        raise Unavailable("deepspeed cannot be imported: %s: %s" % (type(error).__name__, error)) from error
    rules.dist = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda *_: RANKS)  # type: ignore[attr-defined]
    ctx.reached()
    config = rules.DeepSpeedConfig({"train_batch_size": train_batch_size, "train_micro_batch_size_per_gpu": MICRO})
    assert MICRO * config.gradient_accumulation_steps * RANKS == train_batch_size
    ctx.note(deepspeed=deepspeed.__version__, gradient_accumulation_steps=config.gradient_accumulation_steps)


def calculate(ctx: Context, *, given: Triple, ranks: int = RANKS) -> None:
    """Applies the same rule without DeepSpeed."""
    ctx.reached()
    fault = violation(given, ranks)
    assert not fault, fault
    ctx.note(settled=list(settle(given, ranks)))


def configure_ranks(ctx: Context, *, through_deepspeed: bool) -> None:
    """Runs the real DeepSpeedConfig on two real ranks, whose group torch created; DeepSpeed takes it over, or not."""
    deepspeed = import_deepspeed()
    rules = importlib.import_module("deepspeed.runtime.config")
    ctx.init_process_group(timeout_s=30)
    if through_deepspeed:
        deepspeed.init_distributed()
    ctx.reached()
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
    config = rules.DeepSpeedConfig(sizes)
    assert config.world_size == 2, config.world_size
    ctx.note(deepspeed=deepspeed.__version__)


def settle(given: Triple, world: int) -> Tuple[int, int, int]:
    """All three values; missing ones are inferred by integer division, as in DeepSpeed."""
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
    """The error message of DeepSpeed, or "" if the equation holds."""
    try:
        settled = settle(given, world)
    except ValueError as error:
        return str(error)
    except ZeroDivisionError:
        return "micro batch, accumulation and ranks must be greater than 0, because DeepSpeed divides by them"
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
    """Does the equation hold for the numbers or the DeepSpeed JSON that the user names?"""
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
        return exposed(fault, *ways, advice="use one of these values, or omit train_batch_size" if ways else "")
    return clear(
        "%s = %s * %s * %s (train batch = micro batch * accumulation * data-parallel ranks)"
        % (*settle(given, world), world),
        "kb cannot tell whether DeepSpeed will see %d ranks: see cause 2" % world,
    )


def _merge_config(path: Any, given: Mapping[str, Optional[int]]) -> Any:
    """Values of the JSON, with "auto" replaced by the given ones, as the Trainer does; a Finding if that fails."""
    try:
        kind, config = read_config(path)
    except UnreadableConfig as error:
        return unknown(str(error))
    if config and kind != "deepspeed":
        return unknown("%s is not a DeepSpeed configuration" % path, advice="--set config=ds_config.json")
    elasticity = config.get("elasticity")
    if isinstance(elasticity, dict) and elasticity.get("enabled"):
        return unknown(
            "elasticity is enabled: DeepSpeed up to 0.19.7 computes the batch sizes, and 0.19.8 rejects the section"
        )
    values = dict(given)
    autos = []
    for name, key in KEYS.items():
        value = config.get(key)
        if value == "auto":
            autos.append(name)
        elif isinstance(value, str):
            return exposed(
                "%s is the string %s, but DeepSpeed needs a number without quotes" % (key, json.dumps(value)[:80])
            )
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            return unknown("%s is not an integer: %s" % (key, json.dumps(value)[:80]))
        elif value is not None:
            argument = given[name]
            if argument is not None and argument != value:
                return exposed(
                    "the configuration has %s=%d, but the arguments have %s=%d" % (key, value, name, argument),
                    advice='write "auto" in the JSON, and give the number only as an argument',
                )
            values[name] = value
    if len(autos) == len(KEYS) and all(value is None for value in given.values()):
        return unknown(
            'all three values are "auto", so the Trainer fills them in from its arguments, and they agree',
            "without the Trainer or accelerate, DeepSpeed fails on the string auto",
        )
    if "train_batch_size" in autos and all(value is None for value in given.values()):
        return unknown(
            'train_batch_size is "auto": the Trainer computes it, and the other numbers must equal its arguments',
            "without the Trainer or accelerate, DeepSpeed fails on the string auto",
            advice="--set micro_batch=N --set grad_accum=N, the numbers of the arguments",
        )
    missing = [name for name in autos if values[name] is None and name != "train_batch_size"]
    if missing:
        return unknown(*['%s is "auto", so kb needs its value: --set %s=N' % (KEYS[name], name) for name in missing])
    return values


def _derived(given: Triple, world: Optional[int]) -> Finding:
    fault = violation(given, world or 1)
    if fault:
        return exposed(fault)
    micro, accum = given[1] or 0, given[2] or 1
    total = " = %d" % (micro * accum * world) if world else ""
    return clear("train_batch_size is not set, so DeepSpeed computes it: %s * %s * ranks%s" % (micro, accum, total))


def _without_world(given: Triple) -> Finding:
    train, unit = given[0] or 0, (given[1] or 1) * (given[2] or 1)
    if train <= 0 or unit <= 0:
        return exposed(violation(given, 1))
    if train % unit:
        return exposed("%d is not a multiple of %d, so it fits no number of ranks" % (train, unit))
    fits = [world for world in range(1, MOST_RANKS) if not violation(given, world)]
    listed = ", ".join(map(str, fits[:24])) + (", ..." if len(fits) > 24 else "")
    return unknown(
        "the number of ranks was not given",
        "these numbers fit %s data-parallel ranks" % (listed or "more than %d" % MOST_RANKS),
        advice="--set world_size=N, the number of data-parallel ranks",
    )


def _ways_out(given: Triple, world: int) -> Tuple[str, ...]:
    """The nearest values for which the equation holds, one string each."""
    train, micro, accum = given
    if train is None or train <= 0 or any(value is not None and value <= 0 for value in (micro, accum)):
        return ()
    unit = (micro or 1) * (accum or 1) * world
    near = (
        [unit] if micro and accum else [value for value in (train // unit * unit, train // unit * unit + unit) if value]
    )
    ways = ["the nearest train_batch_size on %d ranks is %s" % (world, " or ".join(map(str, near)))]
    fits = [ranks for ranks in range(1, MOST_RANKS) if not violation(given, ranks)]
    if fits:
        closest = sorted(sorted(fits, key=lambda ranks: abs(ranks - world))[:3])
        ways.append("%d fits %s ranks" % (train, " or ".join(map(str, closest))))
        if world == 1 and fits[-1] > 1:
            ways.append(
                "if you started that many and DeepSpeed sees 1, the batch size is right and the world size is wrong"
            )
    if micro and train % world == 0:
        micros = range(min(micro, train // world, MOST_RANKS), 0, -1)
        ways += ["or use micro batch %d" % m for m in micros if not violation((train, m, accum), world)][:1]
    return tuple(ways)


NOT_A_MULTIPLE = (
    "train_batch_size is not a multiple of micro batch times ranks, so DeepSpeed infers no valid accumulation"
)
MULTIPLE = "train_batch_size is the nearest multiple of micro batch times ranks"
ASSERTION = r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* world_size ?[\d.]+ != "
REAL_RULE = "seven running ranks; the real DeepSpeedConfig runs, and a stand-in reports their number"
COPIED_RULE = "deepspeed.runtime.config.DeepSpeedConfig, whose rule the probe copies because DeepSpeed is not installed"


def arithmetic(
    name: str, broken: Triple, fixed: Triple, numbers: str, because: Tuple[str, str], ranks: Tuple[int, int] = (7, 7)
) -> Experiment:
    """The copied rule with the values of each arm; `numbers` ends the message of the control arm."""
    return Experiment(
        name=name,
        control=Arm(
            partial(calculate, given=broken, ranks=ranks[0]),
            expect=raised(ASSERTION + numbers),
            because=because[0],
            fidelity="model",
            stands_for=COPIED_RULE,
        ),
        treatment=Arm(
            partial(calculate, given=fixed, ranks=ranks[1]),
            expect=completed(),
            because=because[1],
            fidelity="model",
            stands_for=COPIED_RULE,
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
        "all three values are given, but micro batch * accumulation * ranks is not the train batch",
        "only micro batch and accumulation are given, and DeepSpeed computes the train batch",
    ),
)
batch_and_steps = arithmetic(
    "batch-and-steps",
    (256, None, 18),
    (None, MICRO, 18),
    r"2 \* 18 \* 7",
    (
        "train batch and accumulation are given, and the inferred micro batch does not fit",
        "only micro batch and accumulation are given, and DeepSpeed computes the train batch",
    ),
)
world_of_one = arithmetic(
    "world-of-one",
    (256, 4, 8),
    (256, 4, 8),
    r"4 \* 8 \* 1$",
    ("the numbers are right for eight ranks, but DeepSpeed sees one rank", "DeepSpeed sees all eight ranks"),
    ranks=(1, 8),
)
multiple_of_ranks = arithmetic(
    "multiple-of-ranks",
    (133, MICRO, None),
    (126, MICRO, None),
    r"2 \* 9 \* 7",
    (
        "133 is a multiple of the seven ranks, but not of micro batch times ranks",
        "126 is a multiple of micro batch times ranks",
    ),
)

torch_group = Experiment(
    name="torch-group",
    control=Arm(
        partial(configure_ranks, through_deepspeed=False),
        expect=raised(ASSERTION + r"4 \* 8 \* 1$"),
        because="two ranks have a group, but only torch.distributed created it, and DeepSpeed counts one rank",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(configure_ranks, through_deepspeed=True),
        expect=completed(),
        because="deepspeed.init_distributed() takes the group over, and DeepSpeed counts two ranks",
        fidelity="cpu",
    ),
    world_size=2,
    needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.15"}),
    deadline_s=90,
    expected_s=(8, 8),
)

probe = Probe(
    check=check,
    params={
        "config": Param("path", "DeepSpeed JSON file; its values may be auto"),
        "train_batch_size": Param("int", "global batch size that you pass to DeepSpeed"),
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
                because=NOT_A_MULTIPLE,
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
        arithmetic("arithmetic", (256, MICRO, None), (252, MICRO, None), r"2 \* 18 \* 7", (NOT_A_MULTIPLE, MULTIPLE)),
    ),
    variants=(two_of_three, batch_and_steps, world_of_one, torch_group, multiple_of_ranks),
)
