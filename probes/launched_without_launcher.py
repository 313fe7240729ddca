"""A script written for one process per GPU starts without a launcher: it has no rank, and nothing starts the others."""

from __future__ import annotations

import ast
import os
import re
from functools import partial
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any, Callable, Dict, Iterator, List, Mapping

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
    Unavailable,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# --local-addr, because not every container can resolve its host's name. The options in FORKED fork the ranks from this
# process, which has already imported torch.
TORCHRUN = ("--standalone", "--local-addr=localhost", "--nproc-per-node=2", "--monitor-interval=0.1")
FORKED = ("--run-path", "--start-method=fork")
ALONE = dict(zip(VARIABLES, ("0", "1", "0", "127.0.0.1", "0")))

TRAIN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
processes = torch.ones(1)
dist.all_reduce(processes)
processes = processes.item()
"""

COUNT = """
from accelerate import Accelerator

processes = Accelerator(cpu=True).num_processes
"""

BY_HAND = """
import os
import torch.distributed as dist

for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
    %s
dist.init_process_group("gloo")
processes = dist.get_world_size()
"""

# Each rank waits for the other one, whose connections would break if this rank exited first.
TOGETHER = """
import glob, os, time

with open("trained-%d" % os.getpid(), "w") as note:
    note.write("%d" % processes)
while len(glob.glob("trained-*")) < processes:
    time.sleep(0.01)
"""


def start(ctx: Context, *, script: str, launched: bool) -> None:
    """Runs `python train.py`, or `torchrun --standalone --nproc-per-node 2 train.py`, in this process."""
    path = Path(ctx.path("train.py"))
    path.write_text(script + TOGETHER)
    forget_launcher()
    ctx.reached()
    if launched:
        import_module("torch.distributed.run").main([*TORCHRUN, *FORKED, str(path)])
    else:
        run_path(str(path), run_name="__main__")
    processes = [note.read_text() for note in path.parent.glob("trained-*")]
    if processes != ["2", "2"]:
        raise Symptom(f"2 processes were expected, but those that trained counted {processes}")


def forget_launcher() -> None:
    for name in VARIABLES:
        os.environ.pop(name, None)


def start_alone(ctx: Context, *, filled_in: bool) -> None:
    """A script that starts without a launcher, and fills in the missing variables or does not."""
    import torch.distributed as dist

    forget_launcher()
    ctx.reached()
    if filled_in:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        tasks = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        if any(int(os.environ.get(name, "1")) > 1 for name in tasks):
            raise RuntimeError("srun or mpirun started several of these: each would train alone")
        for name, value in alone.items():
            os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 1


def start_by_hand(ctx: Context, *, respected: bool) -> None:
    """torchrun starts a script that sets its own rank and world size, always or only where they are missing."""
    value = "os.environ.setdefault(name, value)" if respected else "os.environ[name] = value"
    start(ctx, script=BY_HAND % value, launched=True)


def sample(ctx: Context, *, group_first: bool) -> None:
    """The sampler asks the process group for the number of ranks as soon as it is created."""
    from torch.utils.data.distributed import DistributedSampler

    dataset = list(range(6))
    ctx.reached()
    if group_first:
        ctx.init_process_group(timeout_s=10)
    sampler = DistributedSampler(dataset, shuffle=False)
    if not group_first:
        ctx.init_process_group(timeout_s=10)
    assert list(sampler) == [ctx.rank, ctx.rank + 2, ctx.rank + 4]


def save(ctx: Context, *, guarded: bool) -> None:
    """One process without a group runs code with a barrier, which was written for several processes."""
    import torch.distributed as dist

    ctx.reached()
    if guarded:
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
    else:
        dist.barrier()


def finish(ctx: Context, *, destroyed_last: bool) -> None:
    """At the end of the job, a last barrier comes before or after the group is destroyed."""
    dist = ctx.init_process_group(timeout_s=10)
    steps = [dist.barrier, dist.destroy_process_group]
    ctx.reached()
    for step in steps if destroyed_last else reversed(steps):
        step()


def start_deepspeed(ctx: Context, *, launched: bool) -> None:
    """DeepSpeed looks for MPI if the variables of a launcher are missing."""
    from importlib.util import find_spec

    from kb.cpu_arms import import_deepspeed

    if find_spec("mpi4py"):
        raise Unavailable("mpi4py is installed, so DeepSpeed would use MPI")
    comm = import_deepspeed().comm
    forget_launcher()
    ctx.reached()
    if launched:
        os.environ.update(ALONE)
    comm.init_distributed("gloo")
    assert comm.get_world_size() == 1


# --- the check: variables in this shell, and a script that plain `python` cannot start -----------------------------

OTHER_START = re.compile(  # signs that the script starts its ranks, or sets the variables, in another way
    r"\b(spawn|Process|Popen|notebook_launcher|start_processes|elastic_launch|putenv|load_dotenv|submitit)\b"
    r"|\b(environ\.get|getenv)\( *['\"](RANK|WORLD_SIZE)\b"
    r"|\b(subprocess|os)\.(run|call|check_call|check_output|system|exec\w+)\b"
    r"|\benviron(\.(update|setdefault)\b|\[.{1,20}\] *=[^=])|\b(mpi|MPI)"
)
UNSURE = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.comprehension)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check(params: Mapping[str, Any]) -> Finding:
    """Does this shell lack variables that the script's init_process_group reads?"""
    present = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    missing = [name for name in VARIABLES if name not in present and name != "LOCAL_RANK"]
    evidence = "set here: " + (", ".join(map("=".join, present.items())) or "none of " + ", ".join(VARIABLES))
    code = params["code"]
    if not missing:
        origin = "kb cannot see whether a launcher or the platform set them or they are left over, nor the other ranks"
        return unknown(
            evidence, origin, advice="to run one process without them: ( unset %s; ... )" % " ".join(present)
        )
    if code is None:
        return unknown(evidence, "no code was given", advice="--set code=train.py")
    try:
        text = code.read_text("utf-8")
        body = ast.parse(text).body
        functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef) and is_plain(node)}
        calls = list(filter(from_environment, certain_calls(body, functions)))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return unknown(evidence, f"kb cannot read {code}: {type(error).__name__}")
    if not calls or OTHER_START.search(text) or not re.search(r"\btorch\b.*\bdistributed\b", text):
        return unknown(evidence, f"kb cannot see whether {code} needs a launcher")
    where = f"{code}:{calls[0].lineno}: init_process_group reads {missing[0]} from the environment"
    return exposed(evidence, where, advice=f"start it with torchrun --standalone --nproc-per-node N {code.name}")


def certain_calls(body: List[ast.stmt], functions: Dict[str, ast.FunctionDef]) -> Iterator[ast.Call]:
    """The calls that certainly run.

    Leaves out those in an `if args.distributed:`, in a loop, or in a function that may not be called.
    """
    for statement in body:
        nodes = list(ast.walk(statement))
        if isinstance(statement, (ast.Expr, ast.Assign)) and not any(isinstance(node, UNSURE) for node in nodes):
            for call in (node for node in nodes if isinstance(node, ast.Call)):
                yield call
                called = functions.pop(ast.unparse(call.func), None)
                yield from certain_calls(called.body if called else [], functions)
        elif isinstance(statement, ast.If) and re.search("__name__|is_initialized", ast.unparse(statement.test)):
            yield from certain_calls(statement.body, functions)
        elif not isinstance(statement, DEFINITIONS) and any(map(may_leave, nodes)):
            return


def is_plain(function: ast.FunctionDef) -> bool:
    """Does a call run the function's body in this process? A decorator may start processes, or run it elsewhere."""
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return all(re.search(r"\b(record|hydra\.main)\b", decorator) for decorator in decorators)


def may_leave(node: ast.AST) -> bool:
    """May the statements after this one not run?"""
    return isinstance(node, (ast.Return, ast.Raise)) or (
        isinstance(node, ast.Call) and "exit" in ast.unparse(node.func)
    )


def from_environment(call: ast.Call) -> bool:
    """Is this an init_process_group that reads rank and world size from the environment?"""
    keywords_allowed = {keyword.arg for keyword in call.keywords} <= {"backend", "timeout", "device_id"}
    only_backend = len(call.args) < 2 and not any(isinstance(argument, ast.Starred) for argument in call.args)
    return ast.unparse(call.func).split(".")[-1] == "init_process_group" and only_backend and keywords_allowed


RANK_MISSING = r"environment variable RANK expected, but not set"
NO_GROUP = raised(r"Default process group has not been initialized, please make sure to call init_process_group")


def pair(
    name: str, job: Callable[..., None], keyword: str, expect: Expect, because: str, fix: str, **changes: Any
) -> Experiment:
    """`keyword` is False in the control and True in the treatment."""
    packages = {"torch": ">=2.1", **({name: ""} if name in ("accelerate", "deepspeed") else {})}
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: False}), expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{keyword: True}), completed(), because=fix, fidelity="cpu"),
        **{"needs": Needs(packages=packages), "world_size": 1, "deadline_s": 60, **changes},
    )


ONE, TWO = "python starts one process without a rank", "torchrun starts two processes, each with its rank"
LAUNCHER = pair("launcher", partial(start, script=TRAIN), "launched", raised(RANK_MISSING), ONE, TWO)
SHARED = Needs(packages={"torch": ">=2.5"})  # before 2.5, each process with rank 0 tries to host its own store
EACH_ALONE = symptom(r"those that trained counted \['1', '1'\]")
ONE_ONLY = symptom(r"those that trained counted \['1'\]")

probe = Probe(
    check=check,
    params={"code": Param("path", "your training script")},
    experiments=(LAUNCHER,),
    variants=(
        pair(
            "one-process",
            start_alone,
            "filled_in",
            raised(RANK_MISSING),
            ONE,
            "the script sets the variables that are missing",
        ),
        pair(
            "by-hand",
            start_by_hand,
            "respected",
            EACH_ALONE,
            "torchrun starts two processes, and the script overwrites the rank and world size of each",
            "torchrun starts two processes, and the script keeps the rank and world size of each",
            needs=SHARED,
        ),
        pair(
            "order",
            sample,
            "group_first",
            NO_GROUP,
            "the script creates the sampler before the process group",
            "the script creates the sampler after the process group",
            world_size=2,
        ),
        pair(
            "guard",
            save,
            "guarded",
            NO_GROUP,
            "the script calls a barrier without a process group",
            "the script calls the barrier only if there is a process group",
        ),
        pair(
            "destroyed",
            finish,
            "destroyed_last",
            NO_GROUP,
            "the script calls a barrier after it has destroyed the process group",
            "the script calls the barrier before it destroys the process group",
            world_size=2,
        ),
        pair(
            "accelerate",
            partial(start, script=COUNT),
            "launched",
            ONE_ONLY,
            f"{ONE}, and accelerate trains with one process without an error",
            TWO,
        ),
        pair(
            "deepspeed",
            start_deepspeed,
            "launched",
            raised("No module named .mpi4py"),
            f"{ONE}, so DeepSpeed looks for MPI, which is not installed",
            "the variables of a launcher are set",
        ),
    ),
)
