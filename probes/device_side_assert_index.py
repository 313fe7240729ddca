"""An index outside its table in one rank's batch. On a GPU a kernel asserts, later; on the CPU torch names it."""

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
    """Three steps of DDP on two ranks; the bad index is in the batch of rank 1 in step 1."""
    import torch
    from torch.nn import functional as F  # noqa: N812
    from torch.nn.parallel import DistributedDataParallel

    dist = ctx.init_process_group(timeout_s=10)
    why = why or ctx.params["why"]
    torch.manual_seed(0)
    wide = 8 if why == "label" and in_range else CLASSES  # as many outputs as the data has classes
    model = DistributedDataParallel(torch.nn.Linear(6, wide).to(ctx.device))
    positions = torch.eye(6, device=ctx.device)  # a table for texts of up to six tokens
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
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.item() > 0, loss
    weights = next(model.parameters()).detach()
    everyones = [torch.empty_like(weights) for _ in range(ctx.world_size)]
    dist.all_gather(everyones, weights)
    assert all(torch.equal(everyone, weights) for everyone in everyones), "the ranks trained different weights"


def half(ctx: Context, *, is_float: bool) -> None:
    """The mean over 40,000 tokens, summed in fp16 or in float32."""
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
    """Look for labels outside the classes in a .jsonl or .csv file of data."""
    path, key, classes = params["data"], params["key"], params["classes"]
    if path is None or classes is None or classes < 1:
        return unknown("no data or no classes", advice="--set data=train.jsonl --set classes=10, and --set key=label")
    end = time.monotonic() + 0.5
    result: List[str] = []
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
                    result.append(f"{path}:{number}: {key} {value}")
            rows = number
            if time.monotonic() > end or len(result) >= 10:
                break
        else:
            rows = -rows  # all of them
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        return unknown(f"{path} cannot be read: {error}")
    message = f"{values} values of {key} in {abs(rows)} rows"
    if result:
        return exposed(
            f"outside 0 to {classes - 1}, and not -100, after {message}",
            *result,
            advice="repair data or model, or name it ignore_index",
        )
    if rows >= 0 or not values:
        return unknown(f"nothing outside 0 to {classes - 1} in {message}; the rest was not read, or there is no {key}")
    if unread:
        return unknown(
            f"nothing outside 0 to {classes - 1} in {message}; {unread} more are no whole numbers or missing"
        )
    if ignored:
        return unknown(
            f"all {message} are inside 0 to {classes - 1} or -100, which cross_entropy ignores, and gather does not"
        )
    return clear(f"all {message} are inside 0 to {classes - 1}")


def rows_of(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
            return
        for line in file:
            row = json.loads(line) if line.strip() else {}
            if not isinstance(row, dict):
                raise ValueError("a line holds no object")
            yield row


def numbers_in(value: Any) -> Iterator[Optional[int]]:
    """The class of a row, or the classes of a sequence; None for what is no whole number."""
    if isinstance(value, list):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, str) and value.strip().lstrip("-").isdigit():
        yield int(value)
    else:
        yield None


STANDS_FOR = "the assertion in a CUDA kernel: the CPU checks the same index at once and says which one it is"

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
        because="as many classes as labels, the ignore_index of the data, ignored labels filled, or fewer tokens",
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
        "255 means 'ignore' in the data, and cross_entropy ignores -100",
        "ignore_index is what the data uses",
        r"Target 255 is out of bounds",
    ),
    variant(
        "gather",
        "a label of -100 goes into gather, which ignores nothing",
        "the ignored labels are filled for gather and masked afterwards",
        r"index -100 is out of bounds for dimension 1 with size 5",
    ),
    variant(
        "position",
        "nine tokens for a table of six positions",
        "the tokens are cut to the length of the table",
        r"index \d is out of bounds for dimension 0 with size 6",
    ),
    Experiment(
        name="half",
        world_size=1,
        control=Arm(
            partial(half, is_float=False),
            expect=symptom(r"the loss is inf, not 4\.\d+"),
            because="40,000 log-probabilities are summed in fp16, whose largest number is 65504",
            fidelity="cpu",
        ),
        treatment=Arm(
            partial(half, is_float=True), expect=completed(), because="they are summed in float32", fidelity="cpu"
        ),
        needs=Needs(packages={"torch": ">=2.3"}),
        expected_s=(1, 1),
    ),
)

probe = Probe(
    check=check,
    params={
        "why": Param("str", "which index is wrong: %s" % ", ".join(WHYS), "label"),
        "data": Param("path", "a .jsonl or .csv file with your labels"),
        "key": Param("str", "the field of the label", "label"),
        "classes": Param("int", "how many classes the model has (for a language model: rows of its output)"),
    },
    experiments=(gloo.on_gpus(expect=raised(r"CUDA error: device-side assert triggered")), gloo),
    variants=variants,
)
