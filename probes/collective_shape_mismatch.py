"""Each rank pads its batch to its own longest sequence, so the ranks gather logits of different sizes."""

from __future__ import annotations

import importlib.metadata
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Probe,
    Symptom,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

SEQUENCE = (223, 300)  # length of the longest sequence in the batch of rank 0 and of rank 1


def log_logits(ctx: Context, *, average_first: bool) -> None:
    """Logs accelerator.gather(logits).mean() as TRL 0.14.0 to 0.16.1 do, or gathers the mean of each rank."""
    import torch

    dist = ctx.init_process_group(timeout_s=120)
    vocabulary = 4096 if ctx.backend == "nccl" else 8
    logits = torch.full((2, SEQUENCE[ctx.rank], vocabulary), ctx.rank + 1.0, device=ctx.device)
    metric = logits.mean().reshape(1) if average_first else logits
    # like accelerate, each rank allocates the result from its own shape
    pieces = [torch.zeros_like(metric) for _ in range(ctx.world_size)]
    ctx.reached()
    work = dist.all_gather(pieces, metric, async_op=True)
    end = time.monotonic() + 20
    while not work.is_completed():
        if time.monotonic() > end:
            raise Symptom(f"the gather never completed on rank {ctx.rank}, which passed {list(metric.shape)}")
        time.sleep(0.01)
    work.wait()
    wrong = [int((piece != rank + 1).sum()) for rank, piece in enumerate(pieces)]
    if any(wrong):
        size = metric.numel()
        raise Symptom(f"the gather returned wrong values on rank {ctx.rank}: {wrong} of {size} from ranks 0 and 1")
    assert torch.cat(pieces).mean().item() == 1.5


def gather_lengths(ctx: Context, *, pads: bool) -> None:
    """Gathers tensors whose length depends on the rank; like accelerate, it allocates room for the rank's own shape."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    x = torch.full((2, SEQUENCE[ctx.rank], 2), ctx.rank, device=ctx.device)
    ctx.reached()
    if pads:
        length = torch.tensor([x.shape[1]], device=x.device)
        lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
        dist.all_gather(lengths, length)
        missing = (0, 0) * (x.dim() - 2) + (0, int(max(lengths)) - x.shape[1])
        padded = torch.nn.functional.pad(x, missing).contiguous()
        pieces = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(pieces, padded)
        pieces = [piece[:, : int(length)] for piece, length in zip(pieces, lengths)]
    else:
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, x)
    ctx.meet("gathered", timeout_s=15)  # the rank that aborts must fail first
    assert [piece.shape for piece in pieces] == [(2, length, 2) for length in SEQUENCE], pieces
    assert all((piece == rank).all() for rank, piece in enumerate(pieces)), pieces


def reduce_lengths(ctx: Context, *, counts: bool) -> None:
    """Averages losses over all ranks, by reducing tensors of unequal length, or a sum and a count."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    values = torch.full((SEQUENCE[ctx.rank],), float(ctx.rank), device=ctx.device)
    ctx.reached()
    if counts:
        count = torch.tensor(float(values.numel()), device=values.device)
        both = torch.stack([values.sum(dtype=torch.float32), count])
        dist.all_reduce(both)
        mean = both[0] / both[1]
    else:
        dist.all_reduce(values)
        mean = values.mean() / 2
    ctx.meet("gathered", timeout_s=15)  # the rank that aborts must fail first
    assert abs(mean.item() - 300 / 523) < 1e-6, mean


def mixed_precision(ctx: Context, *, casts: bool) -> None:
    """Gathers a value that is float32 on one rank and float64 on the other."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    value = torch.full((64,), 1.0, dtype=torch.float64 if ctx.rank else torch.float32)
    if casts:
        value = value.float()
    pieces = [torch.zeros_like(value) for _ in range(2)]
    ctx.reached()
    dist.all_gather(pieces, value)
    ctx.meet("gathered", timeout_s=15)  # the rank that aborts must fail first
    assert all(piece.eq(1).all() for piece in pieces), pieces


class Release(NamedTuple):
    """A range of TRL releases that gather unequal shapes; `code` is the call in `file` that does so."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    file: str
    code: str
    trainer: str
    fixed: str


# Read in the TRL repository, in each release; `fixed` is the first release without the call.
KNOWN = (
    Release(
        (0, 14, 0), (0, 16, 1), "orpo_trainer.py", "gather_for_metrics(policy_rejected_logits)", "ORPOTrainer", "0.17.0"
    ),
    Release(
        (0, 14, 0), (0, 16, 1), "cpo_trainer.py", "gather_for_metrics(policy_rejected_logits)", "CPOTrainer", "0.17.0"
    ),
    Release((0, 15, 0), (0, 15, 0), "sft_trainer.py", "gather_for_metrics(shift_logits)", "SFTTrainer", "0.15.1"),
    Release(
        (0, 21, 0),
        (0, 22, 2),
        "grpo_trainer.py",
        "accelerator.gather(non_pad_entropies)",
        "GRPOTrainer with top_entropy_quantile below 1",
        "0.23.0",
    ),
)


def numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version; `packaging` may be missing here. A pre-release counts as its release."""
    match = re.match(r"\d+(\.\d+)*", version)
    release = [int(part) for part in match.group().split(".")] if match else []
    return tuple(release + [0] * (3 - len(release)))


def check(_: Mapping[str, Any]) -> Finding:
    """Does the installed TRL have the known bug? Its source decides, because a patched copy keeps its version."""
    try:
        trl = importlib.metadata.distribution("trl")
        installed = str(trl.version)  # "None" if the metadata has no version
    except ValueError as error:
        return unknown("kb cannot read the metadata of trl: %s" % error)
    except importlib.metadata.PackageNotFoundError:
        return unknown("trl is not installed in this interpreter; kb knows TRL's trainers, but does not read your code")
    version = numbers(installed)
    suspects: list[Release] = []
    judged_by = set()
    for release in KNOWN:
        source = Path(str(trl.locate_file(f"trl/trainer/{release.file}")))
        try:
            affected = release.code in source.read_text(errors="replace")
            judged_by.add("its source")
        except OSError:  # the file moved to trl.experimental, or the install is editable
            affected = release.first <= version <= release.last
            judged_by.add("its version")
        if affected:
            suspects.append(release)
    basis = f"trl {installed}, judged by {' and '.join(sorted(judged_by))}"
    if not suspects:
        return unknown(
            basis,
            "its trainers have none of the known gathers of unequal tensors; kb does not read your code",
            advice="run one step with TORCH_DISTRIBUTED_DEBUG=DETAIL, which names the call",
        )
    fixed = max(suspects, key=lambda suspect: suspect.last).fixed  # newer ones move ORPO and CPO to trl.experimental
    lines = [f"{suspect.trainer}: {suspect.code} in trl/trainer/{suspect.file}" for suspect in suspects]
    if any(suspect.file == "orpo_trainer.py" for suspect in suspects) and _axolotl_overrides():
        lines.append("axolotl 0.8.0 or newer is installed and overrides ORPOTrainer's method, so its ORPO is safe")
    return exposed(basis, *lines, advice=f"run pip install --no-deps trl=={fixed}, then pip check")


def _axolotl_overrides() -> bool:
    """Is an axolotl installed that replaces the gather of ORPOTrainer?"""
    try:
        return numbers(str(importlib.metadata.version("axolotl"))) >= (0, 8, 0)
    except (ValueError, importlib.metadata.PackageNotFoundError):
        return False


UNEQUAL = "the ranks gather logits of their own lengths, 223 and 300"
EQUAL = "each rank averages its logits, and the ranks gather one number each"
SIZES = raised(r"op\.preamble\.length <= op\.nbytes")

gloo = Experiment(
    name="gloo",
    control=Arm(partial(log_logits, average_first=False), expect=SIZES, because=UNEQUAL, fidelity="cpu"),
    treatment=Arm(partial(log_logits, average_first=True), expect=completed(), because=EQUAL, fidelity="cpu"),
    expected_s=(0.3, 0.2),
)


def variant(
    name: str, job: Any, keyword: str, because: str, fix: str, expect: Expect = SIZES, **env: str
) -> Experiment:
    """An experiment whose job gets `keyword=False` in the control arm and `keyword=True` in the treatment."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: False}), expect=expect, because=because, fidelity="cpu", env=env),
        treatment=Arm(partial(job, **{keyword: True}), expect=completed(), because=fix, fidelity="cpu", env=env),
        expected_s=(0.3, 0.2),
    )


probe = Probe(
    check=check,
    experiments=(
        gloo.on_gpus(
            expect=symptom(r"the gather (never completed|returned wrong values)"), expected_s=(35, 12), deadline_s=90
        ),
        gloo,
    ),
    variants=(
        variant(
            "pad",
            gather_lengths,
            "pads",
            "the ranks gather tensors of 223 and 300 columns",
            "the ranks gather the lengths, pad to the longest, gather, and cut the padding off",
        ),
        variant(
            "sum-and-count",
            reduce_lengths,
            "counts",
            "the ranks reduce the losses of 223 and 300 tokens",
            "the ranks reduce the sum and the count of their losses",
        ),
        variant(
            "dtype",
            mixed_precision,
            "casts",
            "one rank gathers float32, the other float64",
            "each rank casts to float32 before the gather",
        ),
        variant(
            "debug-detail",
            log_logits,
            "average_first",
            f"{UNEQUAL}; torch compares each collective over the ranks",
            EQUAL,
            raised(r"Detected mismatch between collectives on ranks.*TensorShape=\[2, (223|300), 8\]"),
            TORCH_DISTRIBUTED_DEBUG="DETAIL",
        ),
    ),
)
