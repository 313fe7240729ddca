"""Only rank 0 reduces a metric: its next calls pair with later ones of the other rank, and its last one with none."""

from __future__ import annotations

import ast
import re
import sys
import time
from collections import Counter
from functools import partial
from typing import Any, Iterator, List, Mapping, Sequence, Tuple

from kb.probe import GLOO_TIMEOUT, Arm, Context, Experiment, Finding, Param, Probe, completed, exposed, raised, unknown

Call = Tuple[int, str]  # line, name


def train(ctx: Context, *, everyone_reduces: bool) -> None:
    """Three steps; a metric is reduced in the second, as long as the gradient. A wrong sum is noted, never raised."""
    import torch

    dist = ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    wrong: List[str] = []

    def add_up(what: str, mine: float, total: float) -> None:
        tensor = torch.full((4,), float(mine), device=ctx.device)
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:  # gloo; with nccl the watchdog ends the process
            raise RuntimeError(f"{error} Before that, without an error: {'; '.join(wrong)}") from error
        if tensor[0].item() != total:
            wrong.append(f"{what} is {tensor[0].item():.0f}, not {total:.0f}")
            sys.stderr.write(wrong[-1] + "\n")

    ctx.reached()
    for step in range(3):
        if step == 1 and (everyone_reduces or ctx.rank == 0):
            add_up("the metric", 100, 200)
        add_up(f"the gradient of step {step}", (step + 1) * (ctx.rank + 1), (step + 1) * 3)
    ctx.meet("trained", timeout_s=15)  # the rank with fewer calls is alive and busy elsewhere, as in training
    assert not wrong, wrong


def evaluate(ctx: Context, *, through_ddp: bool) -> None:
    """One rank evaluates a model with buffers. DDP's forward broadcasts these, in eval mode too; the module's not."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(ctx.device))
    tokens = torch.ones(2, 4, device=ctx.device)
    model(tokens).sum().backward()
    ctx.reached()
    if ctx.rank == 1:  # it gets the buffers; those of rank 0 would be sent, and meet a later call
        model.eval()
        with torch.no_grad():
            (model if through_ddp else model.module)(tokens)
    ctx.meet("evaluated", timeout_s=15)


def stop(ctx: Context, *, own_count: bool) -> None:
    """Training until enough steps are done, counted by a progress bar that counts on rank 0 only."""
    import torch

    dist = ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    bar = 0  # tqdm(disable=rank != 0).n stays 0 where the bar is disabled
    done = 0
    ctx.reached()
    while (done if own_count else bar) < 2 and done < 4:
        dist.all_reduce(torch.ones(4, device=ctx.device))
        done += 1
        bar += int(ctx.rank == 0)
    ctx.note(steps=done)
    ctx.meet("trained", timeout_s=15)
    assert done == 2, f"{done} steps"


RANK = re.compile(r"(^|_)rank$|main_process|global_zero|is_master|process_index")
COLLECTIVE = re.compile(
    r"all_reduce|all_gather\w*|all_to_all\w*|broadcast|broadcast_object_list|reduce_scatter\w*|(monitored_)?barrier"
    r"|gather_object|gather_for_metrics|wait_for_everyone"
)


def check(params: Mapping[str, Any]) -> Finding:
    """Look in the user's own code for collectives that only some ranks call."""
    code = params["code"]
    if code is None or not code.exists():
        why = "no code was given to read" if code is None else f"there is no {code}"
        return unknown(why, advice="--set code=train.py, or a folder")
    files = sorted(code.rglob("*.py")) if code.is_dir() else [code]
    end = time.monotonic() + 0.5
    result: List[str] = []
    read = 0
    for file in files:
        if time.monotonic() > end:
            break
        try:
            tree = ast.parse(file.read_text(errors="replace"))
            result += [f"{file}:{line}: {name} is called on some ranks only" for line, name in lopsided(tree)]
            read += 1
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
    if result:
        return exposed(*result[:10], advice="call it on every rank; guard only what is done with the result")
    return unknown(
        f"no collective under a condition on the rank in the {read} of {len(files)} files that were read",
        "conditions on data, metrics or time, and calls inside libraries, cannot be seen like this",
    )


def lopsided(tree: ast.AST) -> Iterator[Call]:
    """Collectives in one branch of an `if` over the rank that the other branch calls more or less often."""
    blocks = [getattr(node, field, None) for node in ast.walk(tree) for field in ("body", "orelse", "finalbody")]
    for block in [block for block in blocks if isinstance(block, list)]:
        for index, item in enumerate(block):
            if not isinstance(item, ast.If) or not asks_for_rank(item.test):
                continue
            rest = block[index + 1 :] if isinstance(item.body[-1], (ast.Return, ast.Continue)) else []
            in_branch, in_other = collectives(item.body), collectives(item.orelse or rest)
            counts, other_counts = Counter(name for _, name in in_branch), Counter(name for _, name in in_other)
            yield from sorted({call for call in in_branch + in_other if counts[call[1]] != other_counts[call[1]]})


def asks_for_rank(test: ast.AST) -> bool:
    return any(RANK.search(str(getattr(node, "id", getattr(node, "attr", "")))) for node in ast.walk(test))


def collectives(block: Sequence[ast.AST]) -> List[Call]:
    """Calls by name, without those in a group of their own, which do not concern the other ranks."""
    calls = [node for item in block for node in ast.walk(item) if isinstance(node, ast.Call)]
    named = [
        (call.lineno, ast.unparse(call.func).split(".")[-1], {word.arg for word in call.keywords}) for call in calls
    ]
    return [(line, name) for line, name, words in named if COLLECTIVE.fullmatch(name) and "group" not in words]


SOME = "rank 0 alone reduces a metric, so each later call of its meets another one of the other rank"
ALL = "every rank reduces the metric, rank 0 alone could print it"

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
through_ddp = Experiment(
    name="evaluation",
    control=Arm(
        partial(evaluate, through_ddp=True),
        expect=TIMEOUT,
        because="one rank evaluates through DDP",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(evaluate, through_ddp=False),
        expect=completed(),
        because="one rank evaluates with the module inside DDP, which communicates nothing",
        fidelity="cpu",
    ),
    expected_s=(2.4, 0.3),
)
bar = Experiment(
    name="progress-bar",
    control=Arm(
        partial(stop, own_count=False),
        expect=TIMEOUT,
        because="the loop ends when the progress bar is full, and it is disabled off rank 0",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(stop, own_count=True),
        expect=completed(),
        because="the loop ends when the rank's own count says so",
        fidelity="cpu",
    ),
    expected_s=(2.4, 0.3),
)

probe = Probe(
    check=check,
    params={"code": Param("path", "your training script, or a folder of Python files, to look for such calls")},
    experiments=(
        gloo.on_gpus(expect=raised(r"Watchdog caught collective operation timeout: WorkNCCL\(.*OpType=ALLREDUCE")),
        gloo,
    ),
    variants=(through_ddp, bar),
)
