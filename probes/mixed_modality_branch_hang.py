"""A rank whose batch has no image skips the vision tower, and the others gather and reduce the tower without it."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any, List, Mapping, Tuple

from kb.cpu_arms import import_deepspeed
from kb.probe import (
    GLOO_TIMEOUT,
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)


def sharded(ctx: Context, *, dummy_image: bool) -> None:
    """FSDP2, with tower and text layers wrapped separately."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    model, batch = model_and_batch(ctx, dummy_image)
    expected = model(*batch).detach()  # the same weights on every rank, not sharded yet
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    for layer in (*model.vision, *model.text):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ctx.reached()
    step(ctx, model, batch, expected, torch.Tensor.backward)


def zero3(ctx: Context, *, dummy_image: bool) -> None:
    """DeepSpeed itself, on CPU and gloo, without its compiled operators."""
    import torch

    deepspeed = import_deepspeed()
    ctx.init_process_group(timeout_s=2)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model, batch = model_and_batch(ctx, dummy_image)
    expected = model(*batch).detach()
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # shard small weights too
            "zero_allow_untested_optimizer": True,
        },
    )[0]
    ctx.reached()
    step(ctx, engine, batch, expected, engine.backward)


def model_and_batch(ctx: Context, dummy_image: bool) -> Tuple[Any, Tuple[Any, Any]]:
    """Rank 0 has an image in its batch, rank 1 has text only."""
    import torch
    from torch import nn

    tower = ctx.params["tower"]
    assert tower in ("trained", "frozen"), "tower is trained or frozen"

    class VisionLanguage(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.vision = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.text = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

        def forward(self, text: torch.Tensor, image: Any) -> torch.Tensor:
            if image is not None:
                text = text + self.vision(image)
            elif dummy_image:
                text = text + 0.0 * self.vision(torch.zeros_like(text)).mean()
            return self.text(text)

    torch.manual_seed(0)
    model = VisionLanguage().to(ctx.device)
    model.vision.requires_grad_(tower == "trained")
    text, image = torch.randn(2, 2, 8).to(ctx.device)
    return model, (text, image if ctx.rank == 0 else None)


def step(ctx: Context, model: Any, batch: Tuple[Any, Any], expected: Any, backward: Any) -> None:
    wrong = ""
    try:
        output = model(*batch)
        error = (output.detach() - expected).abs().max().item()
        ctx.note(largest_error_of_the_output=round(error, 5))
        if error > 1e-4:
            wrong = f" Before that, without an error: the output is off by {error:.3f}."
        backward(output.sum())
    except RuntimeError as failure:  # gloo; with nccl the watchdog ends the process
        raise RuntimeError(f"{failure}.{wrong}") from failure
    ctx.meet("trained", timeout_s=15)  # the rank with fewer calls is alive and busy elsewhere, as in training
    assert not wrong, wrong


# --- the check: does the user's data mix samples with and without an image? -------------------------------------

MEDIA = {"image", "images", "video", "videos", "audio", "audios", "pixel_values", "image_url", "image_path"}
LARGEST = 64 << 20  # bytes of a JSON document that is read as a whole


def check(params: Mapping[str, Any]) -> Finding:
    """Count the samples of a JSON or JSONL file with and without an image, video or audio."""
    data = params["data"]
    if data is None or not data.is_file():
        why = "no data was named to look into" if data is None else f"there is no file {data}"
        return unknown(why, advice="--set data=train.json, a JSON list or JSON lines")
    counts = [0, 0]
    end = time.monotonic() + 0.5
    whole = True
    try:
        with data.open(encoding="utf-8") as lines:
            if lines.read(1) == "[":
                if data.stat().st_size > LARGEST:
                    return unknown(f"{data} is one JSON document of more than {LARGEST >> 20} MiB")
                lines.seek(0)
                for sample in json.load(lines):
                    counts[has_media(sample)] += 1
            else:
                lines.seek(0)
                for line in lines:
                    if time.monotonic() > end:
                        whole = False
                        break
                    counts[has_media(json.loads(line))] += bool(line.strip())
    except (OSError, ValueError, RecursionError) as error:
        return unknown(f"{data} cannot be read as JSON: {str(error)[:200]}")
    text, media = counts
    seen = f"{media} samples with and {text} without an image, video or audio"
    if text and media:
        return exposed(
            seen, advice="give text-only samples a dummy image, or batch so that all ranks have one kind in a step"
        )
    if not whole or not text + media:
        return unknown(seen if text + media else f"no sample in {data}", "" if whole else "the rest was not read")
    return clear(f"{seen}, in the whole of {data}")


def has_media(sample: Any) -> bool:
    """A non-empty key that names media, at any depth: `images: [..]`, `{"type": "image", ..}`."""
    waiting: List[Any] = [sample]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            if any(item.get(key) for key in MEDIA) or item.get("type") in MEDIA:
                return True
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return False


LOST = rf"{GLOO_TIMEOUT}|Connection (closed|reset) by peer"
GLOO = raised(  # the rank whose output is wrong times out, or loses the other one that did
    rf"({LOST}).*Before that, without an error: the output is off",
    after=LOST,
)
SKIPS = "rank 1 has no image and skips the tower, so its gathers of text layers meet rank 0's of the tower"
ENTERS = "rank 1 sends a dummy image through the tower and adds the result times zero"

gloo = Experiment(
    name="gloo",
    control=Arm(partial(sharded, dummy_image=False), expect=GLOO, because=SKIPS, fidelity="cpu"),
    treatment=Arm(partial(sharded, dummy_image=True), expect=completed(), because=ENTERS, fidelity="cpu"),
    needs=Needs(packages={"torch": ">=2.6"}),  # fully_shard under its public name
    expected_s=(2.4, 0.4),
)
deepspeed_on_cpu = Experiment(
    name="deepspeed",
    control=Arm(partial(zero3, dummy_image=False), expect=GLOO, because=SKIPS, fidelity="cpu"),
    treatment=Arm(partial(zero3, dummy_image=True), expect=completed(), because=ENTERS, fidelity="cpu"),
    needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.14"}),
    deadline_s=90,
    expected_s=(6, 4),
)

probe = Probe(
    params={
        "tower": Param("str", "the vision tower is trained or frozen", "trained"),
        "data": Param("path", "your training data, a JSON list or JSON lines, for the check"),
    },
    check=check,
    experiments=(gloo.on_gpus(expect=raised(r"Watchdog caught collective operation timeout: WorkNCCL\(")), gloo),
    variants=(deepspeed_on_cpu,),
)
