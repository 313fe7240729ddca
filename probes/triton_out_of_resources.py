"""A Triton kernel needs more shared memory per block than the GPU has, which does not depend on its device memory."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Dict, Mapping, Tuple

from kb.host import compute_capabilities
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    completed,
    raised,
    symptom,
    unknown,
)

# Bytes per block: "Maximum amount of shared memory per thread block" in the CUDA C++ Programming Guide.
LIMITS: Dict[Tuple[int, int], int] = {
    (6, 0): 49152,
    (6, 1): 49152,
    (7, 0): 98304,
    (7, 5): 65536,
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 7): 166912,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (10, 3): 232448,
    (12, 0): 101376,
    (12, 1): 101376,
}
RTX, HOPPER = (8, 6), (9, 0)
TUNED = 232448  # kernels that are tuned on a data centre card may use all of this

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def matmul(left, right, out, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for step in range(steps):
        a = tl.load(left + tl.multiple_of(rows[:, None] * 4096 + (step * K + inner)[None, :], (1, 16)))
        b = tl.load(right + tl.multiple_of((step * K + inner)[:, None] * 4096 + columns[None, :], (1, 16)))
        total += tl.dot(a, b)
    tl.store(out + rows[:, None] * N + columns[None, :], total)
"""
LARGE = {"M": 128, "N": 128, "K": 64}
SMALL = {"M": 64, "N": 64, "K": 32}


def load_kernel() -> Any:
    """Imports the kernel from a file, because Triton reads its source."""
    path = Path(tempfile.mkdtemp()) / "kernel.py"
    path.write_text(KERNEL, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel"] = module
    spec.loader.exec_module(module)
    return module.matmul


def compile_for(
    ctx: Context, *, card: Tuple[int, int], block: Dict[str, int], num_stages: int, num_warps: int, data: str = "fp16"
) -> None:
    """How much shared memory does the kernel need on this card, as Triton compiles it? A launch checks the same."""
    triton: Any = importlib.import_module("triton")
    compiler: Any = importlib.import_module("triton.compiler")
    backends: Any = importlib.import_module("triton.backends.compiler")
    matmul = load_kernel()
    pointers = {"left": "*" + data, "right": "*" + data, "out": "*fp32", "steps": "i32"}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(3)}
    ctx.reached()
    source = compiler.ASTSource(matmul, {**pointers, **dict.fromkeys(block, "constexpr")}, block, aligned)
    target = backends.GPUTarget("cuda", 10 * card[0] + card[1], 32)
    kernel = triton.compile(source, target=target, options={"num_stages": num_stages, "num_warps": num_warps})
    required, limit = kernel.metadata.shared, LIMITS[card]
    ctx.note(required=required, limit=limit)
    assert required > 0
    if required > limit:
        raise Symptom(f"Triton's compiler: shared memory, required {required}, the card has {limit} for a block")


def launch(ctx: Context, *, fits: bool) -> None:
    """The same kernel on the GPU, with two stages, which fit, or with more stages until they do not fit."""
    import torch

    matmul = load_kernel()
    left = torch.ones(128, 4096, device=ctx.device, dtype=torch.float16)
    right = torch.ones(4096, 4096, device=ctx.device, dtype=torch.float16)
    out = torch.empty(128, 128, device=ctx.device)
    ctx.reached()
    for num_stages in (2,) if fits else (4, 8, 12):
        matmul[(1,)](left, right, out, 4, num_stages=num_stages, num_warps=8, **LARGE)
    assert out[0, 0].item() == 256, out[0, 0]


def check(params: Mapping[str, Any]) -> Finding:
    """How much shared memory per block do the GPUs of this node have? kb cannot know which kernels will run."""
    cards = compute_capabilities(params["capability"])
    if not cards:
        advice = "run this check on the GPU node, or with --set capability=8.9"
        return unknown("nvidia-smi does not report the compute capability of the GPUs", advice=advice)
    missing = [card for card in cards if card not in LIMITS]
    if missing:
        return unknown(f"this check does not know compute capability {missing[0][0]}.{missing[0][1]}")
    evidence = [f"compute capability {card[0]}.{card[1]}: {LIMITS[card]} bytes per block" for card in cards]
    if min(LIMITS[card] for card in cards) >= TUNED:
        return unknown(*evidence, "no card has more, so a kernel that needs more fails on every card")
    return unknown(*evidence, "a kernel that is tuned for H100 may need more")


COMPILER = "a launch on a card of compute capability 8.6; here Triton compiles for that card without launching"
TRITON = Needs(packages={"triton": ">=3.3"}, memory_mib=2048)
TOO_MUCH = symptom(r"Triton's compiler: shared memory, required \d+, the card has 101376 for a block")
BASE = {"card": RTX, "block": LARGE, "num_stages": 5, "num_warps": 8}


def compiled(name: str, bad: Dict[str, Any], good: Dict[str, Any], *, because: str, fixed: str) -> Experiment:
    arm = partial(Arm, fidelity="stand-in", stands_for=COMPILER)
    return Experiment(
        name=name,
        control=arm(partial(compile_for, **{**BASE, **bad}), expect=TOO_MUCH, because=because),
        treatment=arm(partial(compile_for, **{**BASE, **good}), expect=completed(), because=fixed),
        needs=TRITON,
        world_size=1,
        expected_s=(3.0, 2.0),
        deadline_s=60,
    )


FIVE = "five stages of a 128 x 128 x 64 tile in half precision need more shared memory than the card has"
TWELVE = "twelve stages need more shared memory than any card has"

probe = Probe(
    check=check,
    params={"capability": Param("str", "compute capability of the GPUs (default: from nvidia-smi)", "")},
    experiments=(
        Experiment(
            name="gpu",
            control=Arm(
                partial(launch, fits=False),
                expect=raised(r"out of resource: shared memory,? ?Required: \d+,? ?Hardware limit: \d+"),
                because=TWELVE,
                fidelity="hardware",
            ),
            treatment=Arm(
                partial(launch, fits=True),
                expect=completed(),
                because="two stages of the same tile fit into the shared memory",
                fidelity="hardware",
            ),
            world_size=1,
            backend="nccl",
            needs=Needs(packages={"torch": ">=2.7", "triton": ">=3.3"}, gpus=1, gpu_memory_mib=1024),
            deadline_s=90,
            expected_s=(20.0, 15.0),
        ),
        compiled("stages", {}, {"num_stages": 3}, because=FIVE, fixed="three stages of the same tile fit"),
    ),
    variants=(
        compiled("tile", {}, {"block": SMALL}, because=FIVE, fixed="five stages of a 64 x 64 x 32 tile fit"),
        compiled(
            "dtype",
            {"num_stages": 3, "data": "fp32"},
            {"num_stages": 3},
            because="three stages of the tile in float32 need more shared memory than the card has",
            fixed="three stages of the same tile in float16 fit",
        ),
        compiled(
            "card",
            {},
            {"card": HOPPER},
            because=FIVE,
            fixed="the same kernel fits on a card of compute capability 9.0",
        ),
        compiled(
            "warps",
            {"num_warps": 4},
            {"num_stages": 3},
            because="fewer warps do not help: five stages still need more shared memory than the card has",
            fixed="three stages of the same tile fit",
        ),
    ),
)
