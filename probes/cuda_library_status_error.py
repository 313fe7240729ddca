"""A library takes memory beside torch's pool, and reports the want of it as a status.

Without a GPU torch's FFT takes the part of cuBLAS: MKL allocates by itself, not through torch's allocator, and what it
does not get becomes a status, which torch prints. The pool beside it is a list of blocks under one limit of the kernel.
"""

from __future__ import annotations

import mmap
import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any, List, Mapping, Tuple

from kb.cpu_arms import limit_address_space
from kb.packages import version
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    Unavailable,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

MIB = 1 << 20
LENGTH = 1_000_003  # a prime: MKL needs tens of MiB of its own for a transform of this length
ROOM_MIB = 256  # what the process may take, the pool and the library together
SPARE_MIB = 192  # what a capped pool leaves


def call_library(ctx: Context, *, pool: str) -> None:
    """The pool grows, half of it is free again but cached; then a library needs memory for the first time.

    `pool` is `greedy` (takes all there is), `capped` (leaves room) or `emptied` (returns its cache before the call).
    """
    import torch

    if not torch.backends.mkl.is_available():
        raise Unavailable("this torch has no MKL, whose FFT is the library here")
    torch.set_num_threads(1)
    signal = torch.ones(LENGTH)
    torch.fft.fft(signal[:1009])  # the library itself is loaded: only its memory is missing later
    spectrum = torch.empty(LENGTH, dtype=torch.complex64)
    limit_address_space(ROOM_MIB * MIB)
    blocks: List[mmap.mmap] = []
    left = ROOM_MIB - (SPARE_MIB if pool == "capped" else 24)
    while left > 0:
        blocks.append(mmap.mmap(-1, 4 * MIB))
        left -= 4
    weights, cached = blocks[:2], blocks[2:]  # activations of a longer batch: freed by the model, kept by the pool
    ctx.note(in_use_mib=4 * len(weights), cached_mib=4 * len(cached), room_mib=ROOM_MIB)
    ctx.reached()
    if pool == "emptied":
        for block in cached:
            block.close()
    torch.fft.fft(signal, out=spectrum)
    assert abs(spectrum[0].item() - LENGTH) < 1 and spectrum[1].abs().item() < 1
    assert len(weights[0]) == 4 * MIB


def create_handles(ctx: Context, *, early: bool) -> None:
    """What the libraries take beside the pool at the first product and convolution, forward and backward."""
    import torch

    if early:
        warm_up()
    torch.cuda.synchronize()
    ctx.reached()
    free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    warm_up()
    torch.cuda.synchronize()
    grown = torch.cuda.memory_reserved() - reserved
    taken = (free - torch.cuda.mem_get_info()[0] - grown) // MIB
    ctx.note(taken_beside_the_pool_mib=taken, pool_grown_mib=grown // MIB)
    if taken > ctx.params["budget_mib"]:
        raise Symptom(f"cuBLAS and cuDNN took {taken} MiB beside torch's pool at their first use")


def warm_up() -> None:
    import torch

    x = torch.ones(1, 8, 16, 16, device="cuda", requires_grad=True)
    weight = torch.ones(8, 8, 3, 3, device="cuda", requires_grad=True)
    y = torch.nn.functional.conv2d(x, weight).flatten(2)
    (y @ y.transpose(1, 2)).sum().backward()


# --- the check: what a log says before the status, and what is free and loaded here now ------------------------------

STATUS = re.compile(
    r"\bCU(BLAS|DNN|SOLVER|SPARSE)_STATUS_(?!SUCCESS)[A-Z_]+"
    r"|(GET|FIND) was unable to find an engine|Unable to find a valid cuDNN"
)
ASSERTION = re.compile(r"thread: \[[\d,]+\]:? [Aa]ssertion `.{1,200}failed|device-side assert|illegal memory access")
MEMORY = re.compile(r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUDA error: out of memory")


def check(params: Mapping[str, Any]) -> Finding:
    """Which cause the log, the free memory and LD_LIBRARY_PATH point to; a cause that is absent is never excluded."""
    evidence: List[str] = []
    if params["log"]:
        try:
            if not params["log"].is_file():
                return unknown(f"{params['log']} is no file")
            with params["log"].open("rb") as file:
                lines = file.read(8 * MIB).decode(errors="replace").splitlines()
        except (OSError, ValueError) as error:
            return unknown(f"{params['log']}: {error}")
        places = [number for number, line in enumerate(lines) if STATUS.search(line)]
        if not places:
            return unknown(f"no status of cuBLAS or cuDNN in the first 8 MiB of {params['log']}")
        for pattern, advice in ((ASSERTION, "an earlier kernel failed: mend that"), (MEMORY, "the GPU is full")):
            # the stderr of ranks is merged in any order, so a line after the status counts as well
            found = [number for number, line in enumerate(lines) if pattern.search(line)]
            if found:
                first = lines[found[0]].strip()[:160]
                return exposed(f"{params['log']}:{places[0] + 1}: status", f":{found[0] + 1}: {first}", advice=advice)
        evidence.append(
            f"{params['log']}:{places[0] + 1}: a status, and no assertion or out of memory in the first 8 MiB"
        )
    free, gpus = free_memory()
    evidence += [f"GPU {index}: {mib} MiB free now" for index, mib in free]
    shadows = shadowing_libraries()
    evidence += [f"LD_LIBRARY_PATH has {path}" for path in shadows]
    if any(mib < params["least_mib"] for _, mib in free):
        return exposed(*evidence, advice="see who has the memory: nvidia-smi, and gpu-held-by-other-process")
    own = own_libraries() if shadows else []
    if own:
        return exposed(*evidence, *own, advice="if memory is not the cause: unset LD_LIBRARY_PATH for the job")
    return unknown(*(evidence or [gpus]), advice="the state when it failed counts: --set log=FILE, all ranks")


def free_memory() -> Tuple[List[Tuple[str, int]], str]:
    command = ["nvidia-smi", "--query-gpu=index,memory.free,name", "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=0.8, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return [], "nvidia-smi is missing or does not answer"
    rows = [line.split(",") for line in ran.stdout.decode(errors="replace").splitlines() if ran.returncode == 0]
    rows = [[cell.strip() for cell in row] for row in rows if len(row) == 3]
    known = [(index, int(mib)) for index, mib, _ in rows if mib.isascii() and mib.isdecimal()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return known, "nvidia-smi does not say how much memory is free"
    indices = visible.replace(" ", "").split(",")
    if not all(index.isdigit() for index in indices):
        return [], f"CUDA_VISIBLE_DEVICES={visible} names no GPU by its index"
    if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({name for _, _, name in rows}) > 1:
        return [], "the GPUs differ, so that CUDA may number them otherwise than nvidia-smi"
    return [row for row in known if row[0] in indices], "nvidia-smi does not list the visible GPUs"


def shadowing_libraries() -> List[str]:
    paths: List[Path] = []
    for folder in [name for name in os.environ.get("LD_LIBRARY_PATH", "").split(":") if name][:20]:
        for name in ("libcublas.so*", "libcudnn.so*"):
            try:
                paths += Path(folder).glob(name)
            except (OSError, ValueError):
                continue  # a folder that cannot be read shows nothing
    return [str(path) for path in paths if not re.search("(site|dist)-packages", str(path))][:4]


def own_libraries() -> List[str]:
    """The cuBLAS and cuDNN that pip installed for torch; where there are none, torch was built for the system's."""
    names = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu11", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
    return [f"torch has its own: {name} {found}" for name in names if (found := version(name))]


STANDS_FOR = "cuBLAS beside torch's caching allocator on a GPU: MKL's FFT beside a pool, under one limit of the kernel"


def beside_a_pool(name: str, pool: str, because: str) -> Experiment:
    fails = raised(r"MKL FFT error: .{0,60}\b[Mm]emory")
    greedy = "the pool has all but a little of the memory, most of it in its cache, and the library allocates by itself"
    return Experiment(
        name=name,
        control=Arm(partial(call_library, pool="greedy"), fails, greedy, "stand-in", STANDS_FOR),
        treatment=Arm(partial(call_library, pool=pool), completed(), because, "stand-in", STANDS_FOR),
        world_size=1,
        expected_s=(1.0, 1.0),
    )


handles = Experiment(
    name="handles",
    control=Arm(
        partial(create_handles, early=False),
        symptom(r"cuBLAS and cuDNN took \d+ MiB beside torch's pool"),
        "handles and kernels are made at the first use",
        "hardware",
    ),
    treatment=Arm(partial(create_handles, early=True), completed(), "they were made before the pool grows", "hardware"),
    world_size=1,
    backend="nccl",
    needs=Needs(gpus=1, gpu_memory_mib=3072),
    deadline_s=60,
    expected_s=(10.0, 10.0),
)

probe = Probe(
    check=check,
    params={
        "log": Param("path", "the log of all ranks"),
        "least_mib": Param("int", "check: a GPU with less free memory than this is full", 600),
        "budget_mib": Param("int", "GPU experiment: more than this beside the pool is the symptom", 4),
    },
    experiments=(handles, beside_a_pool("capped", "capped", "the pool leaves room for the library")),
    variants=(beside_a_pool("emptied", "emptied", "the pool returns its cache before the library is called"),),
)
