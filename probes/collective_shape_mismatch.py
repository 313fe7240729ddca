"""Every rank pads its batch to its own longest sequence, then the logits are gathered: sizes differ over ranks."""

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
    Experiment,
    Finding,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

SEQUENCE = (223, 300)  # longest sequence of the batch, rank by rank


def log_logits(ctx: Context, *, average_first: bool) -> None:
    """The metric that TRL 0.14.0 to 0.16.1 logs: accelerator.gather(logits).mean(). The fix gathers the means."""
    import torch

    dist = ctx.init_process_group(timeout_s=120)
    vocabulary = 4096 if ctx.backend == "nccl" else 8
    logits = torch.full((2, SEQUENCE[ctx.rank], vocabulary), ctx.rank + 1.0, device=ctx.device)
    metric = logits.mean().reshape(1) if average_first else logits
    pieces = [torch.zeros_like(metric) for _ in range(ctx.world_size)]  # as accelerate does: room for my own shape
    ctx.reached()
    work = dist.all_gather(pieces, metric, async_op=True)
    end = time.monotonic() + 20
    while not work.is_completed():
        if time.monotonic() > end:
            raise Symptom(f"the gather never completed on rank {ctx.rank}, which gave {list(metric.shape)}")
        time.sleep(0.01)
    work.wait()
    wrong = [int((piece != rank + 1).sum()) for rank, piece in enumerate(pieces)]
    if any(wrong):
        size = metric.numel()
        raise Symptom(f"the gather returned wrong values on rank {ctx.rank}: {wrong} of {size} from ranks 0 and 1")
    assert torch.cat(pieces).mean().item() == 1.5


class Release(NamedTuple):
    """A range of TRL releases that gathers unequal shapes: `code` is the line in `file` that does it."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    file: str
    code: str
    trainer: str


# Read tag by tag in the TRL repository; the fix is in the release after `last`.
KNOWN = (
    Release((0, 14, 0), (0, 16, 1), "orpo_trainer.py", "gather_for_metrics(policy_rejected_logits)", "ORPOTrainer"),
    Release((0, 14, 0), (0, 16, 1), "cpo_trainer.py", "gather_for_metrics(policy_rejected_logits)", "CPOTrainer"),
    Release((0, 15, 0), (0, 15, 0), "sft_trainer.py", "gather_for_metrics(shift_logits)", "SFTTrainer"),
    Release(
        (0, 21, 0),
        (0, 22, 2),
        "grpo_trainer.py",
        "accelerator.gather(non_pad_entropies)",
        "GRPOTrainer with top_entropy_quantile below 1",
    ),
)


def numbers(version: str) -> tuple[int, ...]:
    """The release number of a version; `packaging` may be missing here. A pre-release counts as its release."""
    match = re.match(r"\d+(\.\d+)*", version)
    release = [int(part) for part in match.group().split(".")] if match else []
    return tuple(release + [0] * (3 - len(release)))


def check(_: Mapping[str, Any]) -> Finding:
    """Does the installed TRL have the known bug? Its source decides, since a patched copy keeps its version."""
    try:
        trl = importlib.metadata.distribution("trl")
    except importlib.metadata.PackageNotFoundError:
        return unknown("trl is not installed in this interpreter; this check knows TRL's trainers, not your own code")
    version = numbers(trl.version)
    suspects: list[Release] = []
    judged_by = set()
    for release in KNOWN:
        source = Path(str(trl.locate_file(f"trl/trainer/{release.file}")))
        try:
            affected = release.code in source.read_text(errors="replace")
            judged_by.add("its source")
        except OSError:  # moved (trl.experimental) or an editable install: the number has to do
            affected = release.first <= version <= release.last
            judged_by.add("its version")
        if affected:
            suspects.append(release)
    how = f"trl {trl.version}, judged by {' and '.join(sorted(judged_by))}"
    if not suspects:
        return clear(how, "none of the known gathers of unequal tensors is in its trainers; your own code was not read")
    fixed = ".".join(map(str, max(suspect.last for suspect in suspects)))
    lines = [f"{suspect.trainer}: {suspect.code} in trl/trainer/{suspect.file}" for suspect in suspects]
    if any(suspect.file == "orpo_trainer.py" for suspect in suspects) and _axolotl_overrides():
        lines.append("axolotl 0.8.0 or newer is installed and overrides ORPOTrainer's method: only its ORPO is safe")
    return exposed(how, *lines, advice=f"pip install 'trl>{fixed}'")


def _axolotl_overrides() -> bool:
    try:
        return numbers(importlib.metadata.version("axolotl")) >= (0, 8, 0)
    except importlib.metadata.PackageNotFoundError:
        return False


UNEQUAL = "gathers logits whose length is the rank's own, 223 and 300"
EQUAL = "averages on the rank and gathers one number from each"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(log_logits, average_first=False),
        expect=raised(r"op\.preamble\.length <= op\.nbytes"),
        because=UNEQUAL,
        fidelity="cpu",
    ),
    treatment=Arm(partial(log_logits, average_first=True), expect=completed(), because=EQUAL, fidelity="cpu"),
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
)
