"""A rank whose batch has no image skips the vision tower, which the other ranks gather and reduce without it."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any, List, Mapping, Sequence, Tuple

from kb.cpu_arms import import_deepspeed
from kb.probe import (
    GLOO_TIMEOUT,
    NCCL2_TIMEOUT,
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    completed,
    exposed,
    raised,
    unknown,
)


def sharded(ctx: Context, *, dummy: str = "", tower_units: bool = True, tower: str = "") -> None:
    """FSDP with a unit for each text layer; tower layers are units too, or without `tower_units` part of the root."""
    import torch

    ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    model, text, image = model_and_batch(ctx, dummy, tower)
    expected = [model(text, image).detach(), model(text, None).detach()]  # every rank still has the whole weights
    model = shard(ctx, model, [model.visual, model.text] if tower_units else [model.text])
    ctx.reached()
    without = ctx.rank == 1
    step(ctx, model, (text, None if without else image), expected[without], torch.Tensor.backward)
    ctx.meet("trained", timeout_s=15)  # the rank with fewer calls is alive and busy elsewhere, as in training


def shard(ctx: Context, model: Any, stacks: Sequence[Any]) -> Any:
    """Makes each layer of the stacks a unit of FSDP2, or of FSDP1 before torch 2.7, whose FSDP2 needs CUDA."""
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7):
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrap = partial(FullyShardedDataParallel, use_orig_params=True, device_id=ctx.device)
        for stack in stacks:
            for at, layer in enumerate(stack):
                stack[at] = wrap(layer)
        return wrap(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    for stack in stacks:
        for layer in stack:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def zero(ctx: Context, *, dummy: str = "", stage: int = 3, tower: str = "") -> None:
    """DeepSpeed on CPU and gloo, without its compiled operators."""
    import torch

    deepspeed = import_deepspeed()
    ctx.init_process_group(timeout_s=2)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model, text, image = model_and_batch(ctx, dummy, tower)
    batch = (text, image if ctx.rank == 0 else None)
    expected = model(*batch).detach()
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},  # shard small weights too
            "zero_allow_untested_optimizer": True,
        },
    )[0]
    ctx.reached()
    step(ctx, engine, batch, expected, engine.backward)
    ctx.meet("trained", timeout_s=15)


def model_and_batch(ctx: Context, dummy: str, tower: str) -> Tuple[Any, Any, Any]:
    """A model whose forward calls the tower if there is an image; `dummy` says what it does without one."""
    import torch
    from torch import nn

    tower = tower or ctx.params["tower"]
    assert tower in ("trained", "frozen"), "tower must be trained or frozen"
    text, image = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(0)).to(ctx.device)
    dummy_pixels = torch.zeros_like(image)
    if dummy in ("once", "padded"):
        image = torch.stack([image, image])  # the forward calls the tower for each of the two images

    class VisionLanguage(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.visual = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.text = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

        def forward(self, inputs_embeds: torch.Tensor, pixel_values: Any) -> torch.Tensor:
            if pixel_values is not None:
                for pixels in pixel_values if pixel_values.dim() == 3 else [pixel_values]:
                    inputs_embeds = inputs_embeds + self.visual(pixels)
            elif dummy in ("added", "once", "padded"):
                for _ in range(2 if dummy == "padded" else 1):
                    features = self.visual(dummy_pixels)
                    inputs_embeds = inputs_embeds + 0.0 * features.mean()
            elif dummy == "dropped":
                self.visual(dummy_pixels)
            return self.text(inputs_embeds)

    torch.manual_seed(0)
    model = VisionLanguage().to(ctx.device)
    model.visual.requires_grad_(tower == "trained")
    return model, text, image


def step(ctx: Context, model: Any, batch: Tuple[Any, Any], expected: Any, backward: Any) -> None:
    """Runs one forward and backward; the error of a collective also says if the output was wrong before."""
    wrong = ""
    try:
        output = model(*batch)
        error = (output.detach() - expected).abs().max().item()
        ctx.note(largest_error_of_the_output=round(error, 5))
        if error > 1e-4:
            wrong = f" Before that, without an error: the output is off by {error:.3f}."
        backward(output.sum())
    except RuntimeError as failure:  # from gloo; with nccl the watchdog ends the process
        raise RuntimeError(f"{failure}.{wrong}") from failure
    assert not wrong, wrong


# --- the check: does the data mix samples with and without an image? ---------------------------------------------

MEDIA = {"image", "images", "video", "videos", "audio", "audios", "pixel_values", "image_url", "image_path"}
LARGEST = 64 << 20  # bytes of a JSON document that the check reads as a whole


def check(params: Mapping[str, Any]) -> Finding:
    """Counts the samples of a JSON or JSONL file with and without an image, video or audio."""
    data = params["data"]
    if data is None or not data.is_file():
        why = "no data was named" if data is None else f"there is no file {data}"
        return unknown(why, advice="--set data=train.json, a JSON list or JSON lines")
    counts = [0, 0]
    end = time.monotonic() + 0.5
    complete = True
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
                        complete = False
                        break
                    if line.strip():
                        counts[has_media(json.loads(line))] += 1
    except (OSError, ValueError, RecursionError) as error:
        return unknown(f"kb cannot read {data} as JSON: {str(error)[:200]}")
    text, media = counts
    samples = f"{media} samples with and {text} without an image, video or audio"
    if text and media:
        return exposed(
            samples + "; this hangs a job whose tower is sharded (ZeRO-3, FSDP) or trained with ZeRO-1 or 2",
            advice="give text-only samples a dummy image, or leave a frozen tower whole on every GPU",
        )
    if not complete or not text + media:
        rest = () if complete else ("kb did not have time to read the rest",)
        return unknown(samples if text + media else f"no sample in {data}", *rest)
    return unknown(samples, "kb cannot see media under other keys, or samples that lose them in the collator")


def has_media(sample: Any) -> bool:
    """Whether a sample names media at any depth: `images: [..]`, `{"type": "image", ..}`."""
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
GLOO = raised(  # the rank with the wrong output times out, or loses the connection to the rank that timed out
    rf"({LOST}).*Before that, without an error: the output is off",
    after=LOST,
)
TIMEOUT = raised(LOST)
SKIPS = "rank 1 has no image and skips the tower, so its gathers of text layers pair with rank 0's of the tower"
ENTERS = "rank 1 sends a dummy image through the tower and adds the result times zero"

gloo = Experiment(
    name="gloo",
    control=Arm(partial(sharded, dummy=""), expect=GLOO, because=SKIPS, fidelity="cpu"),
    treatment=Arm(partial(sharded, dummy="added"), expect=completed(), because=ENTERS, fidelity="cpu"),
    expected_s=(2.4, 0.4),
)
dropped = Experiment(
    name="dropped",
    control=Arm(
        partial(sharded, dummy="dropped", tower="trained"),
        expect=TIMEOUT,
        because="rank 1 drops the result of the tower for the dummy image, so it reduces no gradients of the tower",
        fidelity="cpu",
    ),
    treatment=Arm(partial(sharded, dummy="added", tower="trained"), expect=completed(), because=ENTERS, fidelity="cpu"),
    expected_s=(2.4, 0.4),
)
loop = Experiment(
    name="loop",
    control=Arm(
        partial(sharded, dummy="once"),
        expect=GLOO,
        because="rank 0 calls the tower for each of its two images, rank 1 only once with a dummy image",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(sharded, dummy="padded"),
        expect=completed(),
        because="rank 1 calls the tower with a dummy image as often as rank 0 with its images",
        fidelity="cpu",
    ),
    expected_s=(2.4, 0.4),
)
frozen = Experiment(
    name="frozen",
    control=Arm(
        partial(sharded, tower_units=True, tower="frozen"),
        expect=TIMEOUT,
        because="the frozen tower is sharded in separate units, which rank 1 does not gather",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(sharded, tower_units=False, tower="frozen"),
        expect=completed(),
        because="the frozen tower is part of the root unit, which every rank gathers",
        fidelity="cpu",
    ),
    expected_s=(2.4, 0.4),
)
root_unit = Experiment(
    name="root-unit",
    control=Arm(
        partial(sharded, tower_units=False, tower="trained"),
        expect=TIMEOUT,
        because="the trained tower is part of the root unit, and rank 1 has no gradients of the tower to reduce",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(sharded, tower_units=False, tower="trained", dummy="added"),
        expect=completed(),
        because=ENTERS,
        fidelity="cpu",
    ),
    expected_s=(2.4, 0.4),
)
COUNTED = {"LOCAL_SIZE": "2"}  # without it DeepSpeed 0.14 counts CPUs as devices with numactl, which few machines have
deepspeed_on_cpu = Experiment(
    name="deepspeed",
    control=Arm(partial(zero, dummy=""), expect=GLOO, because=SKIPS, fidelity="cpu", env=COUNTED),
    treatment=Arm(partial(zero, dummy="added"), expect=completed(), because=ENTERS, fidelity="cpu", env=COUNTED),
    needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.14"}),
    deadline_s=90,
    expected_s=(6, 4),
)
SIZES = raised(r"op\.preamble\.length <= op\.nbytes", after=rf"{LOST}|op\.preamble\.length <= op\.nbytes")
zero2 = Experiment(
    name="zero2",
    control=Arm(
        partial(zero, stage=2, tower="trained"),
        expect=SIZES,
        because="rank 1 has no gradients of the trained tower, so it reduces a smaller bucket than rank 0",
        fidelity="cpu",
        env=COUNTED,
    ),
    treatment=Arm(
        partial(zero, stage=2, tower="frozen"),
        expect=completed(),
        because="the tower is frozen, so both ranks have gradients of the same parameters",
        fidelity="cpu",
        env=COUNTED,
    ),
    needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.14"}),
    deadline_s=90,
    expected_s=(6, 4),
)

probe = Probe(
    params={
        "tower": Param("str", "whether the vision tower is trained or frozen", "trained"),
        "data": Param("path", "your training data, a JSON list or JSON lines, for the check"),
    },
    check=check,
    experiments=(
        gloo.on_gpus(expect=raised(rf"Watchdog caught collective operation timeout: WorkNCCL\(|{NCCL2_TIMEOUT}")),
        gloo,
    ),
    variants=(dropped, loop, frozen, root_unit, deepspeed_on_cpu, zero2),
)
