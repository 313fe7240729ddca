"""A launcher hands the local rank to the script in a spelling that the script does not know, or not at all."""

from __future__ import annotations

import argparse
import ast
import base64
import inspect
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from glob import glob
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence, Set, Tuple

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

LAUNCH = "torch.distributed.launch"
TORCHRUN = "torch.distributed.run"
TWO_RANKS = ("--standalone", "--local-addr=localhost", "--nproc-per-node=2", "--monitor-interval=0.1")
NO_PYTHON = ("--no-python", "bash", "-c", 'exec "$0" "$@" --local_rank="$LOCAL_RANK"', sys.executable)
UNDERSCORE, HYPHEN = "--local_rank", "--local-rank"


def parse_nothing() -> int:
    argparse.ArgumentParser().parse_args()
    return int(os.environ["LOCAL_RANK"])


def parse_underscore() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    return int(parser.parse_args().local_rank)


def parse_hyphen() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", type=int, default=0)
    return int(parser.parse_args().local_rank)


def parse_both() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return int(parser.parse_args().local_rank)


def write_script(ctx: Context, parse: Callable[[], int]) -> str:
    """A training script as far as its arguments go: it notes which card it would take."""
    note = 'open("card-" + os.environ["RANK"], "w").write(str(%s()))' % parse.__name__
    script = Path(ctx.path("train.py"))
    script.write_text("import argparse, os\n\n" + inspect.getsource(parse) + "\n" + note + "\n")
    return str(script)


def start(ctx: Context, *, parse: Callable[[], int], module: str = LAUNCH, options: Sequence[str] = ()) -> None:
    """`python -m MODULE OPTIONS train.py` for two ranks, in this process, which has imported torch."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    output = Path(ctx.path("output"))
    with output.open("w") as file:
        os.dup2(file.fileno(), 2)
    command = [*TWO_RANKS, *options, write_script(ctx, parse)]
    ctx.reached()
    with suppress(ChildFailedError):
        import_module(module).main(command)
    look(ctx, output.read_text())


def start_deepspeed(ctx: Context, *, parse: Callable[[], int], options: Sequence[str] = ()) -> None:
    """What `deepspeed --num_gpus 2 train.py` starts on a node."""
    world = base64.urlsafe_b64encode(b'{"localhost": [0, 1]}').decode()
    where = (f"--world_info={world}", "--master_addr=127.0.0.1", "--master_port=29511")
    command = [sys.executable, "-m", "deepspeed.launcher.launch", *where, *options, write_script(ctx, parse)]
    ctx.reached()
    look(ctx, subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False).stderr)


def look(ctx: Context, errors: str) -> None:
    """Did each rank start, and with a card of its own?"""
    refused = re.search(r"error: unrecognized arguments: .*", errors)
    if refused:
        raise Symptom(refused.group())
    cards = [Path(path).read_text() for path in sorted(glob(ctx.path("card-*")))]
    if cards != ["0", "1"]:
        raise Symptom(f"the two ranks take cards {cards}; {errors[-300:]}")


@dataclass
class Arguments:
    lr: float = 1e-4


@dataclass
class ArgumentsWithRank(Arguments):
    local_rank: int = -1


def parse_dataclass(ctx: Context, *, arguments: type) -> None:
    """The parser of transformers, with what DeepSpeed's launcher adds to the command."""
    from transformers import HfArgumentParser  # type: ignore[import-not-found]

    ctx.reached()
    (parsed,) = HfArgumentParser(arguments).parse_args_into_dataclasses(args=["--lr=0.1", "--local_rank=1"])
    assert parsed.lr == 0.1 and parsed.local_rank == 1


# --- the check: which spellings does the script accept, and which does its launcher use? ----------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """Reads the script and the command that starts it; runs neither."""
    if params["code"] is None:
        return unknown("no script was given to read", advice="--set code=train.py --set command=run.sh")
    try:
        text = params["code"].read_text("utf-8")
        spellings, others = accepted(text)
        command = params["command"].read_text("utf-8") if params["command"] else ""
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return unknown(f"a file cannot be read: {type(error).__name__}")
    evidence = f"{params['code'].name} defines " + (" and ".join(sorted(spellings)) or "no --local_rank")
    if others:
        return unknown(evidence, "it also parses what it does not know, or not by argparse alone")
    passed = passed_by(" ".join(line for line in command.splitlines() if not line.lstrip().startswith("#")))
    if passed is None:
        return unknown(
            evidence, "which launcher starts it, and what that passes, is not known", advice="--set command=run.sh"
        )
    if passed and passed not in spellings:
        return exposed(evidence, f"its launcher passes {passed}=N", advice="torchrun, and the rank from LOCAL_RANK")
    if spellings and not passed and "LOCAL_RANK" not in text:
        return unknown(
            evidence, "its launcher passes no local rank: whether the default is right for all cannot be seen"
        )
    return clear(evidence, f"its launcher passes {passed or 'no local rank'}")


def accepted(text: str) -> Tuple[Set[str], bool]:
    """The spellings that add_argument gets, and whether something else reads the command line as well."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func).split(".")[-1] for call in calls]
    spellings = {
        argument.value
        for call, name in zip(calls, names)
        for argument in call.args
        if name == "add_argument" and isinstance(argument, ast.Constant) and argument.value in (UNDERSCORE, HYPHEN)
    }
    return spellings, "parse_args" not in names or "add_argument" not in names or "add_config_arguments" in names


def passed_by(command: str) -> Any:
    """The spelling that the launcher of this command passes, "" for none; None where that cannot be seen."""
    launchers = re.findall(
        r"torch\.distributed\.launch|torch\.distributed\.run|\btorchrun|\bdeepspeed|\baccelerate", command
    )
    if len(set(launchers)) != 1 or "$" in command.split(launchers[0])[0]:
        return None
    if launchers[0] in ("torchrun", TORCHRUN):
        return ""
    if launchers[0] == LAUNCH:
        return "" if re.search(r"--use[-_]env", command) else spelling_of_torch()
    if launchers[0] == "deepspeed":
        return "" if "--no_local_rank" in command else UNDERSCORE
    return None


def spelling_of_torch() -> Any:
    try:
        return HYPHEN if int(version("torch").split(".")[0]) >= 2 else UNDERSCORE
    except (PackageNotFoundError, ValueError):
        return None


TORCH_2 = Needs(packages={"torch": ">=2.0"})
DEEPSPEED = Needs(packages={"torch": ">=2.0", "deepspeed": ""})
REFUSED_HYPHEN = symptom(r"error: unrecognized arguments: --local-rank=\d")
REFUSED_UNDERSCORE = symptom(r"error: unrecognized arguments: --local_rank=\d")


def pair(
    name: str, control: Callable[..., None], treatment: Callable[..., None], expect: Expect, because: str, fix: str,
    needs: Needs = TORCH_2,
) -> Experiment:  # fmt: skip
    return Experiment(
        name=name,
        control=Arm(control, expect, because=because, fidelity="cpu"),
        treatment=Arm(treatment, completed(), because=fix, fidelity="cpu"),
        needs=needs,
        world_size=1,
        deadline_s=60,
    )


LAUNCH_PASSES = "torch.distributed.launch passes --local-rank, with a hyphen"


probe = Probe(
    check=check,
    params={"code": Param("path", "your training script"), "command": Param("path", "the shell script that starts it")},
    experiments=(
        pair(
            "spelling",
            partial(start, parse=parse_underscore),
            partial(start, parse=parse_both),
            REFUSED_HYPHEN,
            f"{LAUNCH_PASSES}; the script knows --local_rank",
            "the script knows both spellings",
        ),
    ),
    variants=(
        pair(
            "torchrun",
            partial(start, parse=parse_nothing),
            partial(start, parse=parse_nothing, module=TORCHRUN),
            REFUSED_HYPHEN,
            f"{LAUNCH_PASSES}; the script knows none",
            "torchrun passes no argument, and the script reads LOCAL_RANK",
        ),
        pair(
            "default",
            partial(start, parse=parse_underscore, module=TORCHRUN),
            partial(start, parse=parse_both, module=TORCHRUN),
            symptom(r"the two ranks take cards \['0', '0'\]"),
            "torchrun passes no argument, so that the default of the script holds on all ranks",
            "the default is LOCAL_RANK",
        ),
        pair(
            "use-env",
            partial(start, parse=parse_nothing),
            partial(start, parse=parse_nothing, options=("--use-env",)),
            REFUSED_HYPHEN,
            f"{LAUNCH_PASSES}; the script knows none",
            "--use-env: it passes no argument",
        ),
        pair(
            "unchanged-script",
            partial(start, parse=parse_underscore),
            partial(start, parse=parse_underscore, module=TORCHRUN, options=NO_PYTHON),
            REFUSED_HYPHEN,
            f"{LAUNCH_PASSES}; the script knows --local_rank, and cannot be changed",
            "torchrun starts a shell, which adds the argument in the script's own spelling",
        ),
        pair(
            "deepspeed",
            partial(start_deepspeed, parse=parse_hyphen),
            partial(start_deepspeed, parse=parse_both),
            REFUSED_UNDERSCORE,
            "DeepSpeed's launcher passes --local_rank, with an underscore; the script knows --local-rank",
            "the script knows both spellings",
            needs=DEEPSPEED,
        ),
        pair(
            "no-local-rank",
            partial(start_deepspeed, parse=parse_nothing),
            partial(start_deepspeed, parse=parse_nothing, options=("--no_local_rank",)),
            REFUSED_UNDERSCORE,
            "DeepSpeed's launcher passes --local_rank; the script knows none",
            "--no_local_rank: it passes no argument",
            needs=DEEPSPEED,
        ),
        pair(
            "dataclass",
            partial(parse_dataclass, arguments=Arguments),
            partial(parse_dataclass, arguments=ArgumentsWithRank),
            raised(r"Some specified arguments are not used by the HfArgumentParser: \['--local_rank=1'\]"),
            "no dataclass of the script has the field",
            "one has local_rank, as TrainingArguments does",
            needs=Needs(packages={"transformers": ""}),
        ),
    ),
)
