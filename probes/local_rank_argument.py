"""A launcher passes the local rank to the script in a spelling that the script does not accept, or does not pass it."""

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
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from kb.packages import release
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

LAUNCH, TORCHRUN = "torch.distributed.launch", "torch.distributed.run"
TWO_RANKS = ("--standalone", "--local-addr=localhost", "--nproc-per-node=2", "--monitor-interval=0.1")
NO_PYTHON = ("--no-python", "bash", "-c", 'exec "$0" "$@" --local_rank="$LOCAL_RANK"', sys.executable)
UNDERSCORE, HYPHEN = "--local_rank", "--local-rank"


def parse_nothing() -> int:
    argparse.ArgumentParser().parse_args()
    return int(os.environ["LOCAL_RANK"])


def parse_one(spelling: str) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument(spelling, type=int, default=0)
    return int(parser.parse_args().local_rank)


def parse_both() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int, default=int(os.environ["LOCAL_RANK"]))
    return int(parser.parse_args().local_rank)


NOTHING, BOTH = "parse_nothing()", "parse_both()"
ONLY_UNDERSCORE, ONLY_HYPHEN = "parse_one('--local_rank')", "parse_one('--local-rank')"


def write_script(ctx: Context, rank: str) -> str:
    """A training script that only parses its arguments, and writes which GPU it would use."""
    functions = [inspect.getsource(function) for function in (parse_nothing, parse_one, parse_both)]
    note = f'open("gpu-" + os.environ["RANK"], "w").write(str({rank}))'
    Path(ctx.path("train.py")).write_text("\n\n".join(["import argparse, os", *functions, note]) + "\n")
    return str(ctx.path("train.py"))


def start(ctx: Context, *, rank: str, module: str = LAUNCH, options: Sequence[str] = ()) -> None:
    """Runs `python -m MODULE OPTIONS train.py` for two ranks in this process, which has imported torch already."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    output = Path(ctx.path("output"))
    with output.open("w") as file:
        os.dup2(file.fileno(), 2)
    command = [*TWO_RANKS, *options, write_script(ctx, rank)]
    ctx.reached()
    with suppress(ChildFailedError):
        import_module(module).main(command)
    judge(ctx, output.read_text())


def start_deepspeed(ctx: Context, *, rank: str, options: Sequence[str] = ()) -> None:
    """Runs the command that `deepspeed --num_gpus 2 train.py` starts on a node."""
    world = base64.urlsafe_b64encode(b'{"localhost": [0, 1]}').decode()
    placement = (f"--world_info={world}", "--master_addr=127.0.0.1", "--master_port=29511")
    command = [sys.executable, "-m", "deepspeed.launcher.launch", *placement, *options, write_script(ctx, rank)]
    ctx.reached()
    judge(ctx, subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False).stderr)


def judge(ctx: Context, errors: str) -> None:
    """Raises `Symptom` if a rank did not start, or if the ranks do not use one GPU each."""
    refused = re.search(r"error: unrecognized arguments: .*", errors)
    if refused:
        raise Symptom(refused.group())
    gpus = [path.read_text() for path in sorted(Path(ctx.path("gpu-0")).parent.glob("gpu-*"))]
    if gpus != ["0", "1"]:
        raise Symptom(f"the two ranks use GPUs {gpus}; {errors[-300:]}")


@dataclass
class Arguments:
    lr: float = 1e-4


@dataclass
class ArgumentsWithRank(Arguments):
    local_rank: int = -1


def parse_dataclass(ctx: Context, *, arguments: type) -> None:
    """The parser of transformers gets the argument that the launcher of DeepSpeed adds."""
    from transformers import HfArgumentParser  # type: ignore[import-not-found]

    ctx.reached()
    (parsed,) = HfArgumentParser(arguments).parse_args_into_dataclasses(args=["--lr=0.1", "--local_rank=1"])
    assert parsed.lr == 0.1 and parsed.local_rank == 1


# --- the check: which spellings does the script accept, and which does its launcher use? ----------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """Does the script accept the argument that its launcher passes? Reads both files, and runs neither."""
    if params["code"] is None:
        return unknown("no training script was named", advice="--set code=train.py --set command=run.sh")
    name = params["code"].name
    try:
        script = ast.parse(params["code"].read_text("utf-8"))
        defined = definitions(script)
        command = params["command"].read_text("utf-8") if params["command"] else ""
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return unknown(f"kb cannot read a file: {type(error).__name__}")
    spellings = [spelling for spelling in (UNDERSCORE, HYPHEN) if any(f"'{spelling}'" in text for text in defined)]
    evidence = f"{name} defines " + (" and ".join(spellings) or "no --local_rank")
    if not only_argparse(script):
        return unknown(evidence, "other code than the argparse calls of this file may read the command line")
    passed = {passed_by(line, name) for line in re.sub(r"\\\n", " ", command).splitlines()} - {"no launcher"}
    if len(passed) != 1 or None in passed:
        return unknown(
            evidence,
            "kb cannot tell what its launcher passes",
            advice="name the shell script that starts it: --set command=run.sh",
        )
    (argument,) = passed
    passes = f"its launcher passes {argument or 'no local rank'}, with the torch of {sys.executable}"
    if argument and argument not in spellings:
        return exposed(evidence, passes, advice="start it with torchrun, and read the local rank from LOCAL_RANK")
    if spellings and not argument and not any("LOCAL_RANK" in text for text in defined):
        return unknown(evidence, passes, "kb cannot tell whether the default is right for every process")
    return clear(evidence, passes)


def definitions(script: ast.Module) -> Sequence[str]:
    """The add_argument calls for the local rank, as strings."""
    calls = (ast.unparse(node) for node in ast.walk(script) if isinstance(node, ast.Call))
    return [call for call in calls if re.search(r"\.add_argument\((.*, )?'--local[-_]rank'", call)]


def only_argparse(script: ast.Module) -> bool:
    """Whether argparse alone reads the command line, rejects unknown arguments, and this file defines all of them."""
    calls = [node for node in ast.walk(script) if isinstance(node, ast.Call)]
    names = {ast.unparse(call.func).split(".")[-1] for call in calls}
    values = [value for call in calls for value in (*call.args, *(keyword.value for keyword in call.keywords))]
    handed_over = any(re.search(r"(?i)(^|_)(parser?|group|ap)\d*$", ast.unparse(value)) for value in values)
    unread = re.search(r"(?m)\.add_argument\(\*|\bparents=|\.add_argument$", ast.unparse(script))
    others = {"parse_known_args", "add_subparsers", "HfArgumentParser", "TrlParser"} & names
    return {"ArgumentParser", "parse_args"} <= names and not (handed_over or unread or others)


def passed_by(line: str, script: str) -> Any:
    """The spelling that the launcher on this line passes, or "" for none; None if kb cannot tell."""
    match = re.search(r"(?:^|[\s/\"'])(torchrun|deepspeed|accelerate|torch\.distributed\.(?:launch|run))\s(.*)", line)
    if not match or line.lstrip().startswith("#"):
        return "no launcher"
    launcher, (options, script_name, _) = match[1], match[2].partition(script)
    if not script_name or "no-python" in options.replace("_", "-") or launcher == "accelerate":
        return None
    if launcher in ("torchrun", TORCHRUN):
        return ""
    if re.search(r"(?<!=)\$|--launcher", options):
        return None
    if launcher == LAUNCH:
        return "" if re.search(r"--use[-_]env", options) else spelling(release("torch"))
    return "" if "--no_local_rank" in options else UNDERSCORE


def spelling(torch: tuple[int, ...]) -> Any:
    """The spelling that the launcher of this torch passes; None if its release is unknown."""
    return (HYPHEN if torch >= (2,) else UNDERSCORE) if torch else None


TORCH_2 = Needs(packages={"torch": ">=2.0"})
DEEPSPEED = Needs(packages={"torch": ">=2.0", "deepspeed": ""})
REFUSED_HYPHEN = symptom(r"error: unrecognized arguments: --local-rank=\d")
REFUSED_UNDERSCORE = symptom(r"error: unrecognized arguments: --local_rank=\d")
LAUNCH_PASSES = "torch.distributed.launch passes --local-rank, with a hyphen, but the script"
DEEPSPEED_PASSES = "the launcher of DeepSpeed passes --local_rank, with an underscore, but the script"


def pair(
    name: str,
    control: Callable[..., None],
    because: str,
    expect: Expect,
    treatment: Callable[..., None],
    fix: str,
    needs: Needs = TORCH_2,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(control, expect, because=because, fidelity="cpu"),
        treatment=Arm(treatment, completed(), because=fix, fidelity="cpu"),
        needs=needs,
        world_size=1,
        deadline_s=60,
    )


probe = Probe(
    check=check,
    params={"code": Param("path", "your training script"), "command": Param("path", "the shell script that starts it")},
    experiments=(
        pair(
            "spelling",
            partial(start, rank=ONLY_UNDERSCORE),
            f"{LAUNCH_PASSES} only accepts --local_rank",
            REFUSED_HYPHEN,
            partial(start, rank=BOTH),
            "the script accepts both spellings",
        ),
    ),
    variants=(
        pair(
            "torchrun",
            partial(start, rank=NOTHING),
            f"{LAUNCH_PASSES} accepts no arguments",
            REFUSED_HYPHEN,
            partial(start, rank=NOTHING, module=TORCHRUN),
            "torchrun passes no argument, and the script reads LOCAL_RANK",
        ),
        pair(
            "default",
            partial(start, rank=ONLY_UNDERSCORE, module=TORCHRUN),
            "torchrun passes no argument, so the script uses its default, 0, on all ranks",
            symptom(r"the two ranks use GPUs \['0', '0'\]"),
            partial(start, rank=BOTH, module=TORCHRUN),
            "the script takes its default from LOCAL_RANK",
        ),
        pair(
            "use-env",
            partial(start, rank=NOTHING),
            f"{LAUNCH_PASSES} accepts no arguments",
            REFUSED_HYPHEN,
            partial(start, rank=NOTHING, options=("--use-env",)),
            "with --use-env, torch.distributed.launch passes no argument",
        ),
        pair(
            "unchanged-script",
            partial(start, rank=ONLY_UNDERSCORE),
            f"{LAUNCH_PASSES} only accepts --local_rank",
            REFUSED_HYPHEN,
            partial(start, rank=ONLY_UNDERSCORE, module=TORCHRUN, options=NO_PYTHON),
            "torchrun starts a shell, which adds the argument in the spelling of the script",
        ),
        pair(
            "deepspeed",
            partial(start_deepspeed, rank=ONLY_HYPHEN),
            f"{DEEPSPEED_PASSES} only accepts --local-rank",
            REFUSED_UNDERSCORE,
            partial(start_deepspeed, rank=BOTH),
            "the script accepts both spellings",
            DEEPSPEED,
        ),
        pair(
            "no-local-rank",
            partial(start_deepspeed, rank=NOTHING),
            f"{DEEPSPEED_PASSES} accepts no arguments",
            REFUSED_UNDERSCORE,
            partial(start_deepspeed, rank=NOTHING, options=("--no_local_rank",)),
            "with --no_local_rank, the launcher of DeepSpeed passes no argument",
            DEEPSPEED,
        ),
        pair(
            "dataclass",
            partial(parse_dataclass, arguments=Arguments),
            "no dataclass of the script has the field local_rank",
            raised(r"Some specified arguments are not used by the HfArgumentParser: \['--local_rank=1'\]"),
            partial(parse_dataclass, arguments=ArgumentsWithRank),
            "a dataclass of the script has local_rank, as TrainingArguments does",
            Needs(packages={"transformers": ""}),
        ),
    ),
)
