"""One rank has a bad batch: the gradient all-reduce carries its NaN into the weights of every rank, permanently."""

from __future__ import annotations

import importlib
import struct
import time
import zipfile
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Tuple

from kb.checkpoint import Unreadable, read_checkpoint
from kb.cpu_arms import without_launcher
from kb.probe import (
    GLOO_TIMEOUT,
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
    symptom,
    unknown,
)

STEPS, BAD_STEP = 8, 3
WHYS = ("overflow", "masked-row", "no-label")
FIXES = ("bfloat16", "at-source", "skip-together", "clip")


def build_model(fix: str, half: Any, *, own_mean: bool) -> Any:
    """Returns attention over four tokens and a linear layer in `half`; the forward returns the loss.

    `fix` "at-source" masks with a finite number and divides by the labels of all ranks; `own_mean` divides by the
    labels of this rank, without torch's cross_entropy.
    """
    import torch
    from torch import distributed as dist
    from torch.nn import functional as F  # noqa: N812

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(8)[:2])

        def forward(self, x: Any, visible: Any, labels: Any) -> Any:
            scores = x @ x.T
            if fix == "at-source":
                scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
            else:
                scores = scores.masked_fill(~visible, float("-inf"))
            hidden = scores.softmax(-1) @ x
            logits = F.linear(hidden.to(half).float(), self.weight.to(half).float())
            if fix == "at-source":
                count = (labels != -100).sum()
                dist.all_reduce(count)
                loss = F.cross_entropy(logits, labels, reduction="sum") * dist.get_world_size() / count.clamp(min=1)
            elif own_mean:
                counted = (labels != -100).float()
                logp = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
                loss = -(logp * counted).sum() / counted.sum()
            else:
                loss = F.cross_entropy(logits, labels)  # the mean over this rank's labels
            return loss

    return Model()


def batch(device: Any, *, why: str, fix: str) -> Tuple[Any, Any, Any]:
    """Returns inputs, attention mask and labels; they are bad if `why` is set."""
    import torch

    x = torch.eye(8, device=device)[:4]
    visible = torch.ones(4, 4, dtype=torch.bool, device=device)
    labels = torch.tensor([0, 1, 0, 1], device=device)
    if why == "overflow":
        x = x * (250.0 if fix == "at-source" else 72000.0)  # float16 ends at 65504
    visible[0] = why != "masked-row"
    return x, visible, torch.full_like(labels, -100) if why == "no-label" else labels


def train(
    ctx: Context,
    *,
    fixed: bool,
    why: str = "",
    fix: str = "",
    dtype: str = "float16",
    own_mean: bool = False,
    clip: bool = False,
    skips_alone: bool = False,
) -> None:
    """Trains a DDP model without a loss scaler, as in bf16; in step 3, rank 1 has a bad batch."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=2 if skips_alone else 20)
    why, fix = why or ctx.params["why"], (fix or ctx.params["fix"]) if fixed else ""
    half = torch.bfloat16 if fix == "bfloat16" else getattr(torch, dtype)
    model = DistributedDataParallel(build_model(fix, half, own_mean=own_mean).to(ctx.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.reached()
    losses: List[float] = []  # of the steps that changed weights
    for step in range(STEPS):
        is_bad = step == BAD_STEP and ctx.rank == 1
        loss = model(*batch(ctx.device, why=why if is_bad else "", fix=fix))
        if skips_alone and fix != "skip-together" and not torch.isfinite(loss):
            continue
        try:
            loss.backward()
        except RuntimeError as error:
            raise Symptom(f"rank {ctx.rank} waits in the backward of step {step}: {error}") from error
        if clip or fix == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if fix == "skip-together":
            has_stepped = step_if_finite(model, optimizer)
        else:
            optimizer.step()
            has_stepped = True
        losses += [loss.item()] if has_stepped else []
        optimizer.zero_grad()
    if skips_alone:
        ctx.meet("trained", timeout_s=15)  # the rank with fewer calls stays alive, as in training
    judge(ctx, model, losses)


def judge(ctx: Context, model: Any, losses: List[float]) -> None:
    """Raises `Symptom` if a step used a NaN loss, or if weights are NaN or infinite."""
    import torch

    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    broken = int((~weights.isfinite()).sum())
    ctx.note(losses_used=[round(loss, 4) for loss in losses], nan_weights=broken)
    report_nan(losses, broken, len(weights))
    assert losses[-1] < losses[0], losses


def step_if_finite(model: Any, optimizer: Any) -> bool:
    """Clips the gradients and steps if their norm is finite; returns whether it stepped."""
    import torch

    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    return bool(torch.isfinite(norm))


def restore(ctx: Context, *, with_moments: bool) -> None:
    """Restores the weights from a checkpoint after a NaN step, with or without Adam's moments."""
    import copy

    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses: List[float] = []
    ctx.reached()
    for step in range(STEPS):
        if step == BAD_STEP:
            saved, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        if step == BAD_STEP + 1:
            model.load_state_dict(saved)
            if with_moments:
                optimizer.load_state_dict(moments)
        loss = model(torch.ones(2, 4) * (float("nan") if step == BAD_STEP else 1.0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [loss.item()] if step != BAD_STEP else []
    report_nan(losses, int(model.weight.isnan().sum()), model.weight.numel())


def step_with_adam(ctx: Context, *, half_weights: bool, fused: bool = False) -> None:
    """Trains an embedding whose batch uses one row; in the other rows the gradient is 0, so Adam divides by epsilon."""
    import torch

    weights = torch.nn.Embedding(4, 4).to(torch.float16 if half_weights else torch.float32)
    optimizer = torch.optim.AdamW(weights.parameters(), lr=1e-3, fused=fused)
    losses: List[float] = []
    ctx.reached()
    for step in range(4):
        loss = weights(torch.tensor([step])).to(torch.float32).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    report_nan(losses, int(weights.weight.isnan().sum()), weights.weight.numel())


def report_nan(losses: List[float], broken: int, weights: int) -> None:
    """Raises `Symptom` if a loss is NaN or if `broken`, the number of NaN weights, is not 0."""
    count = sum(loss != loss for loss in losses)
    if count or broken:
        raise Symptom(f"the loss is nan in {count} of {len(losses)} steps, then {broken} of {weights} weights are nan")


def log_with_trainer(ctx: Context, *, filtered: bool) -> None:
    """Runs the Hugging Face Trainer on a model whose loss is always NaN, and reads what it logs."""
    import torch

    without_launcher()
    hf: Any = importlib.import_module("transformers")

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any, labels: Any) -> Dict[str, Any]:
            return {"loss": (self.layer(x) - labels).mean() * float("nan")}

    options = {"logging_nan_inf_filter": filtered, "logging_steps": 1, "max_steps": 3, "report_to": []}
    arguments = hf.TrainingArguments(output_dir=ctx.path("out"), use_cpu=True, save_strategy="no", **options)
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


def attend(ctx: Context, *, by_hand: bool) -> None:
    """Computes attention with a row that is masked completely, by hand or with torch's function."""
    import torch
    from torch.nn import functional as F  # noqa: N812

    torch.manual_seed(0)
    x = torch.randn(1, 1, 4, 8, requires_grad=True)
    visible = torch.ones(4, 4, dtype=torch.bool)
    visible[0] = False
    ctx.reached()
    if by_hand:
        out = (x @ x.mT).masked_fill(~visible, float("-inf")).softmax(-1) @ x
    else:
        out = F.scaled_dot_product_attention(x, x, x, attn_mask=visible)
    out.sum().backward()
    assert x.grad is not None
    raise_if_nan(x.grad)


def count_labels(ctx: Context, *, select: str) -> None:
    """Divides the sum of the losses by a count of 0; `select` says how the losses without a label are left out."""
    import torch

    torch.manual_seed(0)
    logits = torch.randn(4, 3, requires_grad=True)
    counted = torch.zeros(4, dtype=torch.bool)
    losses = -logits.log_softmax(-1)[:, 0]
    ctx.reached()
    chosen = {
        "multiply": lambda: losses * counted,
        "index": lambda: losses[counted],
        "fill": lambda: losses.masked_fill(~counted, 0.0),
        "where": lambda: torch.where(counted, losses, torch.zeros_like(losses)),
    }
    for name in select.split():
        logits.grad = None
        loss = chosen[name]().sum() / counted.sum()
        loss.backward(retain_graph=True)
        assert loss.isnan() and logits.grad is not None
        raise_if_nan(logits.grad)


def raise_if_nan(gradient: Any) -> None:
    if gradient.isnan().any():
        raise Symptom(f"{int(gradient.isnan().sum())} of {gradient.numel()} numbers of the gradient are nan")


BITS = {  # struct letter, and the bits of inf without a sign; larger values are NaN
    "float64": ("Q", 0x7FF0000000000000),
    "float32": ("I", 0x7F800000),
    "float16": ("H", 0x7C00),
    "bfloat16": ("H", 0x7F80),
}
INTEGERS = ("i", "u", "bool")  # types that begin like this cannot hold NaN
SAMPLE = 1024


def check(params: Mapping[str, Any]) -> Finding:
    """Does a saved checkpoint hold NaN or inf? Reads the first numbers of every tensor."""
    path = params["checkpoint"]
    if path is None:
        return unknown(
            "no checkpoint was named", advice="run --set checkpoint=model.safetensors, or name a file of torch.save"
        )
    try:
        return check_file(path)
    except Unreadable as error:
        return unknown(str(error))
    except (OSError, KeyError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        return unknown("kb cannot read %s to its end: %s" % (path, error))


def check_file(path: Path) -> Finding:
    """Reads the first SAMPLE numbers of each tensor, for half a second. Raises the errors of damaged files."""
    stored = read_checkpoint(path).tensors
    tensors = [tensor for tensor in stored if tensor.dtype in BITS]
    unread = {tensor.dtype for tensor in stored if tensor.dtype not in BITS and not tensor.dtype.startswith(INTEGERS)}
    end = time.monotonic() + 0.5
    bad: List[str] = []
    infinite: List[str] = []
    read = 0
    is_partial = False
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
            without_sign = (1 << 8 * width - 1) - 1
            has_nan = any(value & without_sign > exponent for value in values)
            if broken:
                # a mask or the range of an observer may hold inf on purpose, but a weight does not
                (bad if has_nan or tensor.name.rpartition(".")[2] in ("weight", "bias") else infinite).append(
                    f"{tensor.name}: {broken} of the first {len(values)} numbers"
                )
            read += 1
            is_partial = is_partial or count * width < tensor.stop - tensor.start
    message = f"the first {SAMPLE} numbers of {read} of {len(tensors)} tensors in {path}"
    if bad:
        advice = "return to a checkpoint in which this check finds none"
        return exposed(f"{len(bad)} tensors with nan or inf among {message}", *bad[:8], advice=advice)
    if infinite:
        return unknown("tensors that are no weights hold inf but no nan; a mask may do so on purpose", *infinite[:8])
    if unread:
        return unknown(f"no nan or inf in {message}", f"kb cannot read these types: {', '.join(sorted(unread))}")
    if read < len(tensors) or not tensors:
        return unknown(f"no nan or inf in {message}", "kb could not read the rest in half a second")
    if is_partial:
        return unknown(
            f"no nan or inf in {message}",
            "with clipping, a nan fills whole tensors; without clipping it may be in single rows that kb did not read",
        )
    return clear(f"no nan or inf in all numbers of {read} tensors in {path}")


class Bytes:
    """Reads bytes of a storage in a safetensors file or a torch.save archive."""

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


SPREADS = "a NaN in one rank's batch makes the gradients of all ranks NaN (others: --set why=masked-row or no-label)"

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
        because="the same batch with a fix: bfloat16, or that of --set fix=at-source or skip-together (clip fails)",
        fidelity="cpu",
    ),
    expected_s=(0.3, 0.3),
)

NAN_GRADIENT = r"\d+ of \d+ numbers of the gradient are nan"
BROKEN = r"the loss is nan in [1-9]\d* of \d+ steps, then %s of %s weights are nan"


def variant(
    name: str,
    job: Callable[..., None],
    control: Mapping[str, Any],
    treatment: Mapping[str, Any],
    because: str,
    fix: str,
    expect: Expect,
    world_size: int = 2,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(partial(job, **control), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **treatment), expect=completed(), because=fix, fidelity="cpu"),
        world_size=world_size,
        expected_s=(0.3, 0.3),
    )


def spread(name: str, why: str, because: str, fix: str, broken: int = 16, **both: Any) -> Experiment:
    """Returns a variant with a bad batch; the treatment arm repairs its source, and both arms have `both`."""
    control, treatment = {"fixed": False, "why": why, **both}, {"fixed": True, "why": why, "fix": "at-source", **both}
    return variant(name, train, control, treatment, because, fix, symptom(BROKEN % (broken, 16)))


HALF_ADAM = "the weights are float16, where Adam's epsilon of 1e-8 is 0, so a gradient of 0 gives 0 / 0"

variants = (
    spread(
        "masked-row",
        "masked-row",
        "an attention row is masked completely with -inf, which bfloat16 does not change",
        "the row is filled with the lowest finite number",
        dtype="bfloat16",
    ),
    spread(
        "no-label",
        "no-label",
        "rank 1 has no label: its mean is nan and its gradient 0, which bfloat16 does not change",
        "the sum is divided by the labels of all ranks",
        broken=0,
        dtype="bfloat16",
    ),
    spread(
        "own-mean",
        "no-label",
        "rank 1 has no label, and its loss divides by its own count of 0",
        "the sum is divided by the labels of all ranks",
        own_mean=True,
    ),
    spread(
        "clip",
        "overflow",
        "clipping multiplies all gradients by a factor that is nan",
        "the gradients are clipped, but the values stay below 65504",
        clip=True,
    ),
    variant(
        "skip-together",
        train,
        {"fixed": False, "skips_alone": True},
        {"fixed": True, "skips_alone": True, "fix": "skip-together"},
        "only the rank with the nan loss skips the step",
        "all ranks check the norm of the reduced gradients and skip together",
        symptom(r"rank 0 waits in the backward of step \d+: .*" + GLOO_TIMEOUT),
    ),
    variant(
        "restore",
        restore,
        {"with_moments": False},
        {"with_moments": True},
        "the checkpoint restores the weights but not Adam's moments",
        "the checkpoint restores both",
        symptom(BROKEN % (4, 4)),
        world_size=1,
    ),
    variant(
        "adam-fp16",
        step_with_adam,
        {"half_weights": True},
        {"half_weights": False},
        HALF_ADAM,
        "the weights are float32",
        symptom(BROKEN % (r"\d+", 16)),
        world_size=1,
    ),
    replace(
        variant(
            "sdpa-row",
            attend,
            {"by_hand": True},
            {"by_hand": False},
            "the code calls softmax on a row that is -inf everywhere",
            "torch's scaled_dot_product_attention gives no NaN for that row",
            symptom(NAN_GRADIENT),
            world_size=1,
        ),
        needs=Needs(packages={"torch": ">=2.5"}),  # up to 2.4.1 the function returns NaN too
    ),
    variant(
        "selected",
        count_labels,
        {"select": "multiply"},
        {"select": "index fill where"},
        "the losses are multiplied by a mask, so the gradient is infinity times 0",
        "the losses are selected by index, masked_fill or where, so no NaN reaches the gradient",
        symptom(NAN_GRADIENT),
        world_size=1,
    ),
    replace(
        variant(
            "adam-fused",
            step_with_adam,
            {"half_weights": True},
            {"half_weights": True, "fused": True},
            HALF_ADAM,
            "the fused Adam computes in float32",
            symptom(BROKEN % (r"\d+", 16)),
            world_size=1,
        ),
        needs=Needs(packages={"torch": ">=2.4"}),  # older releases have it for GPUs only
    ),
)

probe = Probe(
    check=check,
    params={
        "why": Param("str", "where the NaN comes from: %s" % ", ".join(WHYS), "overflow"),
        "fix": Param("str", "what the treatment arm does: %s" % ", ".join(FIXES), "bfloat16"),
        "checkpoint": Param("path", "a .safetensors file or a file of torch.save, for the check"),
    },
    experiments=(gloo.on_gpus(), gloo),
    variants=(
        *variants,
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
                because="the filter is off, so the log says nan",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=4.40", "accelerate": ""}, memory_mib=2048),
            deadline_s=90,
            expected_s=(6, 6),
        ),
    ),
)
