"""The batch of one rank has an index outside its table.

On a GPU, an assertion in a kernel fails, and Python sees it later. On the CPU, torch's error names the index.
"""

from __future__ import annotations

import csv
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Iterator, List, Mapping, Optional

from kb.probe import (
    Arm,
    Context,
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

CLASSES = 5
WHYS = ("label", "ignored-label", "gather", "position")


def train(ctx: Context, *, in_range: bool, why: str = "") -> None:
    """Trains three steps with DDP on two ranks; the bad index is in the batch of rank 1 in step 1."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    dist = ctx.init_process_group(timeout_s=10)
    why = why or ctx.params["why"]
    torch.manual_seed(0)
    outputs = 8 if why == "label" and in_range else CLASSES  # the data has 8 classes
    model = DistributedDataParallel(torch.nn.Linear(6, outputs).to(ctx.device))
    positions = torch.eye(6, device=ctx.device)  # a table of six positions
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.reached()
    for step in range(3):
        length = 9 if why == "position" and step == 1 and ctx.rank == 1 else 4
        labels = torch.arange(length, device=ctx.device) % 4
        if step == 1 and ctx.rank == 1:
            labels[3] = {"label": 7, "ignored-label": 255, "gather": -100, "position": 3}[why]
        if why == "position" and in_range:
            labels = labels[: len(positions)]
        logits = model(positions[torch.arange(len(labels), device=ctx.device)] + ctx.rank)
        loss = loss_of(logits, labels, why, in_range)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.item() > 0, loss
    weights = next(model.parameters()).detach()
    gathered = [torch.empty_like(weights) for _ in range(ctx.world_size)]
    dist.all_gather(gathered, weights)
    assert all(torch.equal(other, weights) for other in gathered), "the ranks trained different weights"


def loss_of(logits: Any, labels: Any, why: str, in_range: bool) -> Any:
    """The mean loss, computed as the incident `why` has it or, with `in_range`, as its fix has it."""
    from torch.nn import functional as F  # noqa: N812

    if why == "gather" and in_range:  # log-probabilities of the labels, as in DPO and PPO
        counted = labels != -100
        logp = logits.float().log_softmax(-1).gather(-1, labels.masked_fill(~counted, 0).unsqueeze(-1)).squeeze(-1)
        loss = -logp[counted].sum() / counted.sum().clamp(min=1)
    elif why == "gather":
        counted = labels != -100
        logp = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        loss = -(logp * counted).sum() / counted.sum().clamp(min=1)
    elif why == "ignored-label" and in_range:
        loss = F.cross_entropy(logits, labels, ignore_index=255)
    else:
        loss = F.cross_entropy(logits, labels)
    return loss


def half(ctx: Context, *, is_float: bool) -> None:
    """Averages the loss over 40,000 tokens, summed in fp16 or in float32."""
    import torch

    torch.manual_seed(0)
    logits, labels = torch.randn(40000, 64).half(), torch.randint(64, (40000,))
    ctx.reached()
    logp = (logits.float() if is_float else logits).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    loss = -logp.sum() / len(labels)
    exact = torch.nn.functional.cross_entropy(logits.double(), labels)
    if abs(loss.item() - exact.item()) > 0.01:
        raise Symptom(f"the loss is {loss.item():.4f}, not {exact.item():.4f}")


def check(params: Mapping[str, Any]) -> Finding:
    """Looks for labels outside the classes in a .jsonl or .csv file, for half a second at most."""
    path, key, classes = params["data"], params["key"], params["classes"]
    if path is None or classes is None or classes < 1:
        advice = "run --set data=train.jsonl --set key=label --set classes=10"
        return unknown("kb needs your data and the number of classes", advice=advice)
    end = time.monotonic() + 0.5
    outside: List[str] = []
    complete = False
    rows = values = unread = ignored = 0
    try:
        for number, row in enumerate(rows_of(path), 1):
            for value in numbers_in(row.get(key)):
                if value is None:
                    unread += 1
                    continue
                values += 1
                ignored += value == -100
                if not (0 <= value < classes or value == -100):
                    outside.append(f"{path}:{number}: {key} {value}")
            rows = number
            if time.monotonic() > end or len(outside) >= 10:
                break
        else:
            complete = True
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        return unknown(f"kb cannot read {path}: {error}")
    limits, message = f"0 to {classes - 1}", f"{values} values of {key} in {rows} rows"
    if outside:
        advice = "repair the data or the model, or pass the value as ignore_index"
        return exposed(
            f"kb read {message} and found values outside {limits} that are not -100", *outside, advice=advice
        )
    if not complete or not values:
        return unknown(f"all {message} are within {limits}, but kb did not read the rest, or the data has no {key}")
    if unread:
        return unknown(f"all {message} are within {limits}, but {unread} more are missing or not whole numbers")
    if ignored:
        return unknown(f"all {message} are within {limits} or -100, which cross_entropy ignores but gather does not")
    return clear(f"all {message} are within {limits}")


def rows_of(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a .csv or .jsonl file; raises ValueError if a line is not a JSON object."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
            return
        for line in file:
            row = json.loads(line) if line.strip() else {}
            if not isinstance(row, dict):
                raise ValueError("a line is not an object")
            yield row


def numbers_in(value: Any) -> Iterator[Optional[int]]:
    """The label of a row, or the labels of a sequence; None for a value that is not a whole number."""
    if isinstance(value, list):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, str) and value.strip().lstrip("-").isdigit():
        yield int(value)
    else:
        yield None


STANDS_FOR = "the assertion in a CUDA kernel; the CPU checks the same index at once and names it"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(train, in_range=False),
        expect=raised(r"Target -?\d+ is out of bounds|index -?\d+ is out of bounds for dimension"),
        because="one label of rank 1 is outside the classes (--set why=label, ignored-label, gather or position)",
        fidelity="stand-in",
        stands_for=STANDS_FOR,
    ),
    treatment=Arm(
        partial(train, in_range=True),
        expect=completed(),
        because="the model has enough classes; with another --set why, the fix of that cause is applied",
        fidelity="stand-in",
        stands_for=STANDS_FOR,
    ),
    expected_s=(0.3, 0.3),
)


def variant(why: str, because: str, fix: str, pattern: str) -> Experiment:
    control = replace(
        gloo.control, job=partial(train, in_range=False, why=why), because=because, expect=raised(pattern)
    )
    treatment = replace(gloo.treatment, job=partial(train, in_range=True, why=why), because=fix)
    return replace(gloo, name=why, control=control, treatment=treatment)


variants = (
    variant(
        "ignored-label",
        "255 means 'ignore' in the data, but cross_entropy ignores only -100",
        "ignore_index is 255, as in the data",
        r"Target 255 is out of bounds",
    ),
    variant(
        "gather",
        "gather gets a label of -100, and it ignores no value",
        "the ignored labels are replaced with 0 before gather, and masked afterwards",
        r"index -100 is out of bounds for dimension 1 with size 5",
    ),
    variant(
        "position",
        "the text has nine tokens, but the table has six positions",
        "the text is truncated to the length of the table",
        r"index \d is out of bounds for dimension 0 with size 6",
    ),
    Experiment(
        name="half",
        world_size=1,
        control=Arm(
            partial(half, is_float=False),
            expect=symptom(r"the loss is inf, not 4\.\d+"),
            because="the code sums 40,000 log-probabilities in fp16, whose largest number is 65504",
            fidelity="cpu",
        ),
        treatment=Arm(
            partial(half, is_float=True),
            expect=completed(),
            because="the code sums the log-probabilities in float32",
            fidelity="cpu",
        ),
        needs=Needs(packages={"torch": ">=2.3"}),
        expected_s=(1, 1),
    ),
)

probe = Probe(
    check=check,
    params={
        "why": Param("str", "which index is wrong: %s" % ", ".join(WHYS), "label"),
        "data": Param("path", "a .jsonl or .csv file with your labels, for the check"),
        "key": Param("str", "the field that has the label", "label"),
        "classes": Param("int", "how many classes the model has (for a language model: the rows of its output)"),
    },
    experiments=(gloo.on_gpus(expect=raised(r"CUDA error: device-side assert triggered")), gloo),
    variants=variants,
)
