"""Only rank 0 reduces a metric, so its next collectives pair with the wrong ones of rank 1, and its last with none."""

from __future__ import annotations

import ast
import re
import sys
import time
from collections import Counter
from functools import partial
from types import MappingProxyType
from typing import Any, Callable, Iterator, List, Mapping, Sequence, Set, Tuple

from kb.probe import (
    GLOO_TIMEOUT,
    NCCL2_TIMEOUT,
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
    raised,
    symptom,
    unknown,
)

Call = Tuple[int, str]  # line, name


def train(ctx: Context, *, everyone_reduces: bool, barrier_before: bool = False) -> None:
    """Three steps; in the second, a metric with the shape of the gradient is reduced.

    A wrong sum raises only at the end, because in a real job nothing notices it.
    """
    import torch

    dist = ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    wrong: List[str] = []

    def add_up(name: str, value: float, total: float) -> None:
        numbers = torch.full((4,), float(value), device=ctx.device)
        try:
            dist.all_reduce(numbers)
        except RuntimeError as error:  # only with gloo: with nccl the watchdog ends the process
            raise RuntimeError(f"{error} Before that, without an error: {'; '.join(wrong)}") from error
        if numbers[0].item() != total:
            wrong.append(f"{name} is {numbers[0].item():.0f}, not {total:.0f}")
            sys.stderr.write(wrong[-1] + "\n")

    ctx.reached()
    for step in range(3):
        if step == 1 and (everyone_reduces or ctx.rank == 0):
            if barrier_before:
                dist.barrier()
            add_up("the metric", 100, 200)
        add_up(f"the gradient of step {step}", (step + 1) * (ctx.rank + 1), (step + 1) * 3)
    ctx.meet("trained", timeout_s=15)  # the rank with fewer calls is alive and busy elsewhere, as in training
    assert not wrong, wrong


def report(ctx: Context, *, everyone_reduces: bool) -> None:
    """Rank 0 logs a metric; every rank reduces it, or only rank 0 does."""
    import torch

    dist = ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    accuracy = torch.ones(1, device=ctx.device)
    logged: List[float] = []
    log = logged.append
    ctx.reached()
    if everyone_reduces:
        dist.all_reduce(accuracy)
        accuracy /= dist.get_world_size()
        if dist.get_rank() == 0:
            log(accuracy.item())
    elif dist.get_rank() == 0:
        dist.all_reduce(accuracy)
        log(accuracy.item())
    ctx.meet("reported", timeout_s=15)
    assert logged == ([1.0] if ctx.rank == 0 else []), logged


def evaluate(ctx: Context, *, through_ddp: bool) -> None:
    """Rank 1 evaluates a model with buffers, which DDP's forward broadcasts in eval mode too; the module's does not."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(ctx.device))
    tokens = torch.ones(2, 4, device=ctx.device)
    model(tokens).sum().backward()
    ctx.reached()
    if ctx.rank == 1:  # rank 1 waits for the buffers; rank 0 would send them, and a later call would take them
        model.eval()
        with torch.no_grad():
            (model if through_ddp else model.module)(tokens)
    ctx.meet("evaluated", timeout_s=15)


def skip(ctx: Context, *, together: bool) -> None:
    """Three steps; rank 1 has bad data in the second and skips it, either alone or together with rank 0."""
    import torch

    dist = ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    device, steps = ctx.device, 0
    ctx.reached()
    for step in range(3):
        wants_to_skip = ctx.rank == 1 and step == 1
        if together:
            flag = torch.tensor([float(wants_to_skip)], device=device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            if flag.item():
                continue
        elif wants_to_skip:
            continue
        dist.all_reduce(torch.ones(4, device=device))
        steps += 1
    ctx.note(steps=steps)
    ctx.meet("trained", timeout_s=15)
    assert steps == 2, steps


def score(ctx: Context, *, fixed_names: bool) -> None:
    """Each rank has values of one of two metrics, and reduces only that metric, or both from a fixed list of names.

    The first round with the list gives rank 1 no values, so that its numbers would be integers without the dtype.
    """
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    device = ctx.device
    values = {"accuracy": [1.0, 0.0]} if ctx.rank == 0 else {"length": [300.0]}
    names = ("accuracy", "length")
    ctx.reached()
    if fixed_names:
        rounds, results = [values if ctx.rank == 0 else {}, values], []
        for values in rounds:
            pairs = [[sum(values.get(name, [])), len(values.get(name, []))] for name in names]
            sums = torch.tensor(pairs, dtype=torch.float64, device=device)
            dist.all_reduce(sums)
            means = {name: (sums[at, 0] / sums[at, 1]).item() for at, name in enumerate(names) if sums[at, 1]}
            results.append(means)
        assert results[0] == {"accuracy": 0.5}, results
    else:
        means = {}
        for name, numbers in values.items():
            pair = torch.tensor([sum(numbers), float(len(numbers))], device=device)
            dist.all_reduce(pair)
            means[name] = (pair[0] / pair[1]).item()
    if means != {"accuracy": 0.5, "length": 300.0}:
        raise Symptom(f"rank {ctx.rank} has the means {means}, no error")


def stop(ctx: Context, *, own_count: bool) -> None:
    """Trains until a count of steps is reached: the rank's own, or that of a progress bar that is only on rank 0."""
    import torch

    dist = ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    bar = 0  # tqdm(disable=rank != 0).n stays 0 on the ranks that disable the bar
    done = 0
    ctx.reached()
    while (done if own_count else bar) < 2 and done < 4:
        dist.all_reduce(torch.ones(4, device=ctx.device))
        done += 1
        bar += int(ctx.rank == 0)
    ctx.note(steps=done)
    ctx.meet("trained", timeout_s=15)
    assert done == 2, f"{done} steps"


def coalesce(ctx: Context) -> None:
    """Every rank gathers two tensors in one coalesced call, which is correct."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    ctx.reached()
    wholes = [torch.zeros(2 * ctx.world_size, device=ctx.device) for _ in range(2)]
    try:
        with dist.distributed_c10d._coalescing_manager():
            for whole in wholes:
                dist.all_gather_into_tensor(whole, torch.ones(2, device=ctx.device))
    except RuntimeError as error:
        raise Symptom(f"a call that every rank makes ended with: {error}") from error
    assert all(whole.tolist() == [1.0] * 2 * ctx.world_size for whole in wholes), wholes


def meet_barrier(ctx: Context, *, alike: bool) -> None:
    """Rank 0 enters a barrier while rank 1 reduces a tensor, or both ranks make both calls."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    ctx.reached()
    if alike or ctx.rank == 0:
        dist.barrier()
    if alike or ctx.rank == 1:
        dist.all_reduce(torch.ones(4, device=ctx.device))


def send(ctx: Context) -> None:
    """Rank 0 sends a tensor to rank 1, then all three ranks enter a barrier, which is correct."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    received = torch.zeros(4, device=ctx.device)
    ctx.reached()
    if ctx.rank == 0:
        dist.send(torch.ones(4, device=ctx.device), 1)
    elif ctx.rank == 1:
        dist.recv(received, 0)
    try:
        dist.barrier()
    except RuntimeError as error:
        raise Symptom(f"a call that every rank makes ended with: {error}") from error
    assert received.tolist() == [float(ctx.rank == 1)] * 4, received


RANK = re.compile(r"(^|(?<!lora)_)rank$|main_process(?!_only)|global_zero|is_master|process_index")
COLLECTIVE = re.compile(
    r"all_reduce|all_gather\w*|all_to_all\w*|broadcast|broadcast_object_list|reduce_scatter\w*|(monitored_)?barrier"
    r"|gather_object|gather_for_metrics|wait_for_everyone"
)
OWNED = re.compile(r"(.+\.)?(dist|distributed|accelerator|fabric)\.(gather|reduce|scatter)")  # else common names


def check(params: Mapping[str, Any]) -> Finding:
    """Looks in the user's code for collectives that only some ranks call."""
    code = params["code"]
    if code is None or not code.exists():
        why = "no code was given" if code is None else f"{code} does not exist"
        return unknown(why, advice="--set code=train.py, or a folder of Python files")
    files = sorted(code.rglob("*.py")) if code.is_dir() else [code]
    end = time.monotonic() + 0.5
    result: List[str] = []
    read = 0
    for file in files:
        if time.monotonic() > end:
            break
        try:
            tree = ast.parse(file.read_text(errors="replace"))
            result += [f"{file}:{line}: only some ranks call {name}" for line, name in lopsided(tree)]
            read += 1
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
    if result:
        return exposed(*result[:10], advice="call the collective on every rank, and guard only the use of its result")
    return unknown(
        f"kb read {read} of {len(files)} files and found no collective that only some ranks call",
        "kb cannot see conditions on data, metrics or time, nor calls inside libraries;"
        " it takes calls of one name under two conditions on the rank for a pair",
    )


def lopsided(tree: ast.AST) -> Iterator[Call]:
    """Collectives that one branch of an `if` over the rank calls more often than the other branch.

    Leaves out a call that an `if` next to it, with another condition on the rank, also makes: the two may be a pair,
    as when the other ranks wait in a barrier, rank 0 loads, and rank 0 enters the barrier.
    """
    blocks = [getattr(node, field, None) for node in ast.walk(tree) for field in ("body", "orelse", "finalbody")]
    seen: Set[int] = set()  # an `elif` belongs to the `if` above it
    for block in [block for block in blocks if isinstance(block, list)]:
        found: List[Tuple[str, Call]] = []
        for index, item in enumerate(block):
            if not isinstance(item, ast.If) or not depends_on_rank(item.test):
                continue
            rest = block[index + 1 :] if isinstance(item.body[-1], (ast.Return, ast.Continue)) else []
            if id(item) in seen:
                continue
            bodies = chain(item, rest)
            seen |= {id(each) for each in ast.walk(item) if isinstance(each, ast.If) and each.body in bodies}
            branches = [collectives(branch) for branch in bodies]
            counts = [Counter(name for _, name in branch) for branch in branches]
            every = {call for branch in branches for call in branch}
            calls = {call for call in every if len({count[call[1]] for count in counts}) > 1}
            found += [(ast.unparse(item.test), call) for call in sorted(calls)]
        for test, call in found:
            if not any(call[1] == other[1] and test != other_test for other_test, other in found):
                yield call


def chain(item: ast.If, rest: Sequence[ast.AST]) -> List[Sequence[ast.AST]]:
    """The branches of an `if` over the rank, with those of an `elif`; `rest` follows if the first one returns.

    An `elif` without `else` often covers all ranks that are left, so a missing `else` is then no branch.
    """
    branches: List[Sequence[ast.AST]] = [item.body]
    while len(item.orelse) == 1 and isinstance(item.orelse[0], ast.If) and depends_on_rank(item.orelse[0].test):
        item = item.orelse[0]
        branches.append(item.body)
    if item.orelse or len(branches) == 1:
        branches.append(item.orelse or rest)
    return branches


def depends_on_rank(test: ast.AST) -> bool:
    """False for `rank != -1`, `rank >= 0` and `rank is not None`, which test whether the job is distributed at all."""
    if isinstance(test, ast.BoolOp):
        return any(depends_on_rank(value) for value in test.values)
    if isinstance(test, ast.Compare) and is_the_same_everywhere(test):
        return False
    return any(RANK.search(str(getattr(node, "id", getattr(node, "attr", "")))) for node in ast.walk(test))


def is_the_same_everywhere(test: ast.Compare) -> bool:
    comparison = ast.unparse(test)[len(ast.unparse(test.left)) :].strip()
    return comparison in ("!= -1", "== -1", "> -1", ">= 0", "< 0", "is None", "is not None")


def collectives(block: Sequence[ast.AST]) -> List[Call]:
    """The collectives in a block, except those of a group of only some ranks.

    The group is a keyword, the third argument, or the first one of a barrier.
    """
    calls = [node for item in block for node in ast.walk(item) if isinstance(node, ast.Call)]
    calls = [call for call in calls if "group" not in {word.arg for word in call.keywords}]
    named = [(call, ast.unparse(call.func)) for call in calls]
    named = [(call, name) for call, name in named if len(call.args) < (1 if name.endswith("barrier") else 3)]
    short = [(call.lineno, name.split(".")[-1], bool(OWNED.fullmatch(name))) for call, name in named]
    return [(line, name) for line, name, owned in short if owned or COLLECTIVE.fullmatch(name)]


SOME = "only rank 0 reduces a metric, so from then on each of its calls pairs with a later one of rank 1"
ALL = "every rank reduces the metric, and only rank 0 needs to print it"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(train, everyone_reduces=False),
        expect=raised(GLOO_TIMEOUT + r".*the gradient of step 1 is 8, not 6"),
        because=SOME,
        fidelity="cpu",
    ),
    treatment=Arm(partial(train, everyone_reduces=True), expect=completed(), because=ALL, fidelity="cpu"),
    expected_s=(3.3, 0.3),
)

TIMEOUT = raised(GLOO_TIMEOUT)


def variant(
    name: str,
    job: Callable[..., None],
    change: Mapping[str, bool],
    because: str,
    fix: str,
    expect: Expect = TIMEOUT,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Experiment:
    """`change` holds the keywords of the treatment arm; the control arm negates each of them."""
    broken = {key: not value for key, value in change.items()}
    return Experiment(
        name=name,
        control=Arm(partial(job, **broken), expect=expect, because=because, fidelity="cpu", env=env),
        treatment=Arm(partial(job, **change), expect=completed(), because=fix, fidelity="cpu", env=env),
        expected_s=(2.4, 0.3),
    )


reported = variant(
    "report",
    report,
    {"everyone_reduces": True},
    "only rank 0 reduces the metric that it logs, and waits for the other rank",
    "every rank reduces the metric, and only rank 0 logs it",
)
evaluated = variant(
    "evaluation",
    evaluate,
    {"through_ddp": False},
    "rank 1 evaluates through DDP, whose forward waits for the buffers of rank 0",
    "rank 1 evaluates with the module inside DDP, whose forward does not communicate",
)
skipped = variant(
    "skip",
    skip,
    {"together": True},
    "rank 1 skips a batch alone, so it makes fewer all-reduces than rank 0",
    "the ranks first agree in one small all-reduce, and skip the batch together",
)
named = variant(
    "names",
    score,
    {"fixed_names": True},
    "each rank reduces only the metrics that it has, so two different metrics are added up",
    "each rank reduces a fixed list of metrics, with sum 0 and count 0 for those without a value",
    symptom(r"the means \{'(accuracy|length)': 100\.3\d*\}"),
)
counted = variant(
    "progress-bar",
    stop,
    {"own_count": True},
    "the loop ends when the progress bar is full, but the bar counts on rank 0 only",
    "the loop ends when the rank's own count of steps says so",
)
synchronised = variant(
    "barrier",
    train,
    {"everyone_reduces": True, "barrier_before": False},
    "only rank 0 reduces a metric, and the barrier before it is one more call that only rank 0 makes",
    ALL,
)
in_detail = variant(
    "debug-detail",
    train,
    {"everyone_reduces": True},
    "only rank 0 reduces a metric, and torch's debug mode checks each call and reports the missing rank",
    ALL,
    raised(r"Ranks 1 failed to pass monitoredBarrier in \d+ ms"),
    {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
)
coalesced = Experiment(
    name="coalesced",
    control=Arm(
        coalesce,
        expect=symptom(r"ended with: Backend \w+ does not support allgather_into_tensor_coalesced"),
        because="every rank makes the same coalesced all-gather, but torch's debug mode cannot run it",
        fidelity="cpu",
        env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    ),
    treatment=Arm(
        coalesce,
        expect=completed(),
        because="without the debug mode the same coalesced all-gather works",
        fidelity="cpu",
        env={"TORCH_DISTRIBUTED_DEBUG": "OFF"},
    ),
    needs=Needs(packages={"torch": ">=2.5,<2.12"}),  # gloo coalesces all-gathers from 2.5 on
    expected_s=(0.5, 0.5),
)
OTHER = r"is running collective: CollectiveFingerPrint\(SequenceNumber=0"
fingerprint = variant(
    "fingerprint",
    meet_barrier,
    {"alike": True},
    "rank 0 is in a barrier and rank 1 in an all-reduce; torch names a wrong operation for the other rank",
    "both ranks make both calls in the same order",
    raised(rf"OpType=(BARRIER\), but Rank 1 {OTHER}OpType=GATHER|ALLREDUCE, .*, but Rank 0 {OTHER}OpType=REDUCE)\)"),
    {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
)
sent = Experiment(
    name="sends",
    control=Arm(
        send,
        expect=symptom(
            r"OpType=BARRIER\)\.Collectives differ in the following aspects:\s+Sequence number: (0vs 1|1vs 0)"
        ),
        because="the calls are right, but torch's debug mode also counts the send and the receive of two ranks",
        fidelity="cpu",
        env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    ),
    treatment=Arm(
        send,
        expect=completed(),
        because="without the debug mode the same calls work",
        fidelity="cpu",
        env={"TORCH_DISTRIBUTED_DEBUG": "OFF"},
    ),
    world_size=3,
    expected_s=(0.5, 0.5),
)

probe = Probe(
    check=check,
    params={
        "code": Param("path", "your training script, or a folder of Python files, in which to look for such calls")
    },
    experiments=(
        gloo.on_gpus(
            expect=raised(
                rf"Watchdog caught collective operation timeout: WorkNCCL\(.*OpType=ALLREDUCE|{NCCL2_TIMEOUT}"
            )
        ),
        gloo,
    ),
    variants=(reported, evaluated, skipped, named, counted, synchronised, in_detail, fingerprint, coalesced, sent),
)
