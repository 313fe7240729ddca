"""One bad batch on one rank: the gradient all-reduce carries its NaN into the weights of every rank, permanently."""

from __future__ import annotations

import importlib
import os
import struct
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

from kb.checkpoint import Unreadable, read_checkpoint
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
    symptom,
    unknown,
)

STEPS, BAD_STEP = 8, 3
WHYS = ("overflow", "masked-row", "no-label")
FIXES = ("bfloat16", "at-source", "skip-together", "clip")


def train(ctx: Context, *, fixed: bool) -> None:
    """A DDP model of one layer; in step 3 the batch of rank 1 is a bad one. No loss scaler, as in bf16 training."""
    import torch
    from torch.nn.functional import cross_entropy, linear
    from torch.nn.parallel import DistributedDataParallel

    dist = ctx.init_process_group(timeout_s=20)
    why, fix = ctx.params["why"], ctx.params["fix"] if fixed else ""
    half = torch.bfloat16 if fix == "bfloat16" else torch.float16
    lowest = torch.finfo(torch.float32).min if fix == "at-source" else float("-inf")

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(8)[:2])

        def forward(self, x: Any, visible: Any, labels: Any) -> Any:
            scores = (x @ x.T).masked_fill(~visible, lowest)
            hidden = scores.softmax(-1) @ x
            logits = linear(hidden.to(half), self.weight.to(half)).float()
            if fix != "at-source":
                return cross_entropy(logits, labels)  # the mean over this rank's labels
            counted = (labels != -100).sum()
            dist.all_reduce(counted)  # the mean over the labels of all ranks, of which some rank has one
            return cross_entropy(logits, labels, reduction="sum") * ctx.world_size / counted

    model = DistributedDataParallel(Model().to(ctx.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.reached()
    used: List[float] = []
    for step in range(STEPS):
        x = torch.eye(8, device=ctx.device)[:4]
        visible = torch.ones(4, 4, dtype=torch.bool, device=ctx.device)
        labels = torch.tensor([0, 1, 0, 1], device=ctx.device)
        if step == BAD_STEP and ctx.rank == 1:
            if why == "overflow":
                x = x * (250.0 if fix == "at-source" else 72000.0)  # float16 ends at 65504
            visible[0] = why != "masked-row"
            labels = torch.full_like(labels, -100) if why == "no-label" else labels
        optimizer.zero_grad()
        loss = model(x, visible, labels)
        finite = loss.isfinite().float().reshape(1)
        if fix == "skip-together":
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)  # every rank, every step: no rank decides alone
            loss = loss if finite.item() else loss.nan_to_num(0.0) * 0.0  # keeps the backward of DDP in step
        loss.backward()
        if fix == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if fix != "skip-together" or finite.item():
            used.append(loss.item())
            optimizer.step()
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    broken = int((~weights.isfinite()).sum())
    lost = sum(item != item for item in used)
    ctx.note(losses_used=[round(item, 4) for item in used], nan_weights=broken)
    if lost:
        raise Symptom(
            f"the loss is nan in {lost} of {len(used)} steps, then {broken} of {len(weights)} weights are nan"
        )
    assert not broken and used[-1] < used[0], f"{broken} weights are nan, losses {used}"


def log_with_trainer(ctx: Context, *, filtered: bool) -> None:
    """The Hugging Face Trainer on a model whose loss is NaN from the first step: what does it log?"""
    import torch

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # one process: accelerate would look for a MASTER_ADDR
    hf: Any = importlib.import_module("transformers")

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any, labels: Any) -> Dict[str, Any]:
            return {"loss": (self.layer(x) - labels).mean() * float("nan")}

    message = {"logging_nan_inf_filter": filtered, "logging_steps": 1, "max_steps": 3, "report_to": []}
    arguments = hf.TrainingArguments(output_dir=ctx.path("out"), use_cpu=True, save_strategy="no", **message)
    data = [{"x": torch.ones(4), "labels": torch.zeros(1)} for _ in range(4)]
    trainer = hf.Trainer(model=Model(), args=arguments, train_dataset=data)
    ctx.reached()
    trainer.train()
    line = trainer.state.log_history[1]
    ctx.note(logged=line, weights_nan=bool(trainer.model.layer.weight.isnan().all()))
    assert trainer.model.layer.weight.isnan().all(), "the weights are not NaN"
    if line["loss"] == 0:
        raise Symptom(
            f"all weights are nan and the log says {{'loss': {line['loss']}, 'grad_norm': {line['grad_norm']}"
        )
    assert line["loss"] != line["loss"], line


BITS = {"float32": ("I", 0x7F800000), "float16": ("H", 0x7C00), "bfloat16": ("H", 0x7F80)}  # exponent of inf and NaN
SAMPLE = 1024


def check(params: Mapping[str, Any]) -> Finding:
    """Are there NaN or inf in a saved checkpoint? Reads the first numbers of every tensor."""
    path = params["checkpoint"]
    if path is None:
        return unknown("no checkpoint was named", advice="--set checkpoint=model.safetensors (or a file of torch.save)")
    try:
        tensors = [tensor for tensor in read_checkpoint(path).tensors if tensor.dtype in BITS]
    except Unreadable as error:
        return unknown(str(error))
    end = time.monotonic() + 0.5
    bad: List[str] = []
    looked = 0
    with Bytes(path) as file:
        for tensor in tensors:
            if time.monotonic() > end:
                break
            letter, exponent = BITS[tensor.dtype]
            width = struct.calcsize(letter)
            count = min(SAMPLE, (tensor.stop - tensor.start) // width)
            data = file.read(tensor.storage, tensor.start, count * width)
            values = struct.unpack(f"<{len(data) // width}{letter}", data[: len(data) // width * width])
            broken = sum(value & exponent == exponent for value in values)
            bad += [f"{tensor.name}: {broken} of the first {len(values)} numbers"] if broken else []
            looked += 1
    message = f"the first {SAMPLE} numbers of {looked} of {len(tensors)} tensors in {path}"
    if bad:
        advice = "go back to a checkpoint in which this check finds none"
        return exposed(f"{len(bad)} tensors with nan or inf among {message}", *bad[:8], advice=advice)
    if looked < len(tensors) or not tensors:
        return unknown(f"no nan or inf in {message}", "the rest was not read in half a second")
    return clear(f"no nan or inf in {message}; an update with a NaN gradient norm would have spread over whole tensors")


class Bytes:
    """Reads bytes of a storage of a safetensors file or a torch.save archive."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")
        self.archive = zipfile.ZipFile(self.file) if zipfile.is_zipfile(self.file) else None
        self.file.seek(0)
        self.header = 0 if self.archive else 8 + int.from_bytes(self.file.read(8), "little")
        names = self.archive.namelist() if self.archive else []
        self.members: Dict[str, str] = {name.rsplit("/", 1)[-1]: name for name in names if "/data/" in name}

    def __enter__(self) -> Bytes:
        return self

    def __exit__(self, *_: Tuple[Any, ...]) -> None:
        self.file.close()

    def read(self, storage: str, start: int, size: int) -> bytes:
        if self.archive is None:
            self.file.seek(self.header + start)
            return self.file.read(size)
        with self.archive.open(self.members[storage]) as member:
            member.seek(start)
            return member.read(size)


SPREADS = "a NaN in one rank's batch becomes a NaN gradient of all ranks (--set why=overflow, masked-row or no-label)"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(train, fixed=False),
        expect=symptom(r"the loss is nan in \d+ of \d+ steps, then \d+ of \d+ weights are nan"),
        because=SPREADS,
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(train, fixed=True),
        expect=completed(),
        because="the same batch with --set fix=bfloat16, at-source, skip-together (or clip, which does not help)",
        fidelity="cpu",
    ),
    needs=Needs(packages={"torch": ">=2.3"}),
    expected_s=(0.3, 0.3),
)

probe = Probe(
    check=check,
    params={
        "why": Param("str", "where the NaN comes from: %s" % ", ".join(WHYS), "overflow"),
        "fix": Param("str", "what the treatment arm does: %s" % ", ".join(FIXES), "bfloat16"),
        "checkpoint": Param("path", "a .safetensors file or a file of torch.save, to look for NaN in"),
    },
    experiments=(gloo.on_gpus(), gloo),
    variants=(
        Experiment(
            name="transformers",
            control=Arm(
                partial(log_with_trainer, filtered=True),
                expect=symptom(r"all weights are nan and the log says"),
                because="logging_nan_inf_filter, on by default, replaces the NaN by an average of earlier losses",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(log_with_trainer, filtered=False),
                expect=completed(),
                because="with the filter off the log says nan",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.3", "transformers": ">=4.40", "accelerate": ""}, memory_mib=2048),
            deadline_s=90,
            expected_s=(6, 6),
        ),
    ),
)
