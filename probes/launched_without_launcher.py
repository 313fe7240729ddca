"""A script that wants a process per GPU is one process: nobody has set its rank, and nobody starts the others."""

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
# The ranks would look for the host by its name, which not every container can resolve. The last two options fork them
# from this process, which has imported torch.
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

# A rank that exits first would break the connections of one that is still at work.
TOGETHER = """
import glob, os, time

with open("trained-%d" % os.getpid(), "w") as note:
    note.write("%d" % processes)
while len(glob.glob("trained-*")) < processes:
    time.sleep(0.01)
"""


def start(ctx: Context, *, script: str, launched: bool) -> None:
    """What `python train.py` or `torchrun --standalone --nproc-per-node 2 train.py` runs, in this process."""
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
        raise Symptom(f"2 processes are wanted, and those that trained counted {processes}")


def forget_launcher() -> None:
    for name in VARIABLES:
        os.environ.pop(name, None)


def start_alone(ctx: Context, *, filled_in: bool) -> None:
    """A script that nobody has launched."""
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
    """torchrun, and a script that brings a rank and a world size of its own."""
    value = "os.environ.setdefault(name, value)" if respected else "os.environ[name] = value"
    start(ctx, script=BY_HAND % value, launched=True)


def sample(ctx: Context, *, group_first: bool) -> None:
    """The sampler asks the group for the number of ranks as soon as it is made."""
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
    """One process, no group; the code was written for several."""
    import torch.distributed as dist

    ctx.reached()
    if guarded:
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
    else:
        dist.barrier()


def finish(ctx: Context, *, destroyed_last: bool) -> None:
    """The end of the job: a last barrier, and the group is destroyed."""
    dist = ctx.init_process_group(timeout_s=10)
    steps = [dist.barrier, dist.destroy_process_group]
    ctx.reached()
    for step in steps if destroyed_last else reversed(steps):
        step()


def start_deepspeed(ctx: Context, *, launched: bool) -> None:
    """DeepSpeed looks for MPI where the variables of a launcher are missing."""
    from importlib.util import find_spec

    from kb.cpu_arms import import_deepspeed

    if find_spec("mpi4py"):
        raise Unavailable("mpi4py is installed here")
    comm = import_deepspeed().comm
    forget_launcher()
    ctx.reached()
    if launched:
        os.environ.update(ALONE)
    comm.init_distributed("gloo")
    assert comm.get_world_size() == 1


# --- the check: left-over variables in this shell, and a script that plain `python` cannot start -------------------

OTHERWISE = re.compile(
    r"\b(spawn|Process|Popen|notebook_launcher|start_processes|elastic_launch|putenv|load_dotenv|submitit)\b"
    r"|\b(environ\.get|getenv)\( *['\"](RANK|WORLD_SIZE)\b"
    r"|\b(subprocess|os)\.(run|call|check_call|check_output|system|exec\w+)\b"
    r"|\benviron(\.(update|setdefault)\b|\[.{1,20}\] *=[^=])|\b(mpi|MPI)"
)
UNSURE = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.comprehension)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check(params: Mapping[str, Any]) -> Finding:
    found = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    missing = [name for name in VARIABLES if name not in found and name != "LOCAL_RANK"]
    evidence = "set here: " + (", ".join(map("=".join, found.items())) or "none of " + ", ".join(VARIABLES))
    code = params["code"]
    if not missing:
        whose = "of a launcher, of the platform, or left over: which, and whether the other ranks run, cannot be seen"
        return unknown(evidence, whose, advice="one process without them: ( unset %s; ... )" % " ".join(found))
    if code is None:
        return unknown(evidence, "no code was given to read", advice="--set code=train.py")
    try:
        text = code.read_text("utf-8")
        body = ast.parse(text).body
        functions = {one.name: one for one in body if isinstance(one, ast.FunctionDef) and is_plain(one)}
        calls = list(filter(from_environment, certain(body, functions)))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return unknown(evidence, f"{code} cannot be read: {type(error).__name__}")
    if not calls or OTHERWISE.search(text) or not re.search(r"\btorch\b.*\bdistributed\b", text):
        return unknown(evidence, f"{code}: whether a launcher has to start it cannot be seen")
    where = f"{code}:{calls[0].lineno}: init_process_group takes {missing[0]} from the environment"
    return exposed(evidence, where, advice=f"not python, but torchrun --standalone --nproc-per-node N {code.name}")


def certain(body: List[ast.stmt], functions: Dict[str, ast.FunctionDef]) -> Iterator[ast.Call]:
    """The calls that surely run: not those behind `if args.distributed:`, a loop, or a function that nobody calls."""
    for statement in body:
        nodes = list(ast.walk(statement))
        if isinstance(statement, (ast.Expr, ast.Assign)) and not any(isinstance(node, UNSURE) for node in nodes):
            for call in (node for node in nodes if isinstance(node, ast.Call)):
                yield call
                called = functions.pop(ast.unparse(call.func), None)
                yield from certain(called.body if called else [], functions)
        elif isinstance(statement, ast.If) and re.search("__name__|is_initialized", ast.unparse(statement.test)):
            yield from certain(statement.body, functions)
        elif not isinstance(statement, DEFINITIONS) and any(map(may_leave, nodes)):
            return


def is_plain(function: ast.FunctionDef) -> bool:
    """Whether a call of it runs its body here: a decorator may start processes, or run it elsewhere."""
    return all(re.search(r"\b(record|hydra\.main)\b", ast.unparse(one)) for one in function.decorator_list)


def may_leave(node: ast.AST) -> bool:
    return isinstance(node, (ast.Return, ast.Raise)) or (
        isinstance(node, ast.Call) and "exit" in ast.unparse(node.func)
    )


def from_environment(call: ast.Call) -> bool:
    named = {keyword.arg for keyword in call.keywords} <= {"backend", "timeout", "device_id"}
    plain = len(call.args) < 2 and not any(isinstance(argument, ast.Starred) for argument in call.args)
    return ast.unparse(call.func).split(".")[-1] == "init_process_group" and plain and named


RANK_MISSING = r"environment variable RANK expected, but not set"
NO_GROUP = raised(r"Default process group has not been initialized, please make sure to call init_process_group")


def pair(
    name: str, job: Callable[..., None], keyword: str, expect: Expect, because: str, fix: str, **changes: Any
) -> Experiment:
    packages = {"torch": ">=2.1", **({name: ""} if name in ("accelerate", "deepspeed") else {})}
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: False}), expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{keyword: True}), completed(), because=fix, fidelity="cpu"),
        **{"needs": Needs(packages=packages), "world_size": 1, "deadline_s": 60, **changes},
    )


ONE, TWO = "python starts one process, without a rank", "torchrun starts two, each with its rank"
LAUNCHER = pair("launcher", partial(start, script=TRAIN), "launched", raised(RANK_MISSING), ONE, TWO)
SHARED = Needs(packages={"torch": ">=2.5"})  # before, each rank 0 wants to host a store of its own
EACH_ALONE = symptom(r"those that trained counted \['1', '1'\]")
ONE_ONLY = symptom(r"those that trained counted \['1'\]")

probe = Probe(
    check=check,
    params={"code": Param("path", "your training script")},
    experiments=(LAUNCHER,),
    variants=(
        pair("one-process", start_alone, "filled_in", raised(RANK_MISSING), ONE, "the script fills in what is missing"),
        pair(
            "by-hand",
            start_by_hand,
            "respected",
            EACH_ALONE,
            f"{TWO}, and overwrites it",
            "which it respects",
            needs=SHARED,
        ),
        pair("order", sample, "group_first", NO_GROUP, "the sampler is made before the group", "after", world_size=2),
        pair("guard", save, "guarded", NO_GROUP, "a barrier without a group", "a barrier only where there is a group"),
        pair("destroyed", finish, "destroyed_last", NO_GROUP, "a barrier after the group", "before", world_size=2),
        pair("accelerate", partial(start, script=COUNT), "launched", ONE_ONLY, f"{ONE}; accelerate accepts that", TWO),
        pair("deepspeed", start_deepspeed, "launched", raised("No module named .mpi4py"), ONE, "the variables are set"),
    ),
)
