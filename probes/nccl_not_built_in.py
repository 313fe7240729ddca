"""A job requests the backend nccl from a torch that was built without NCCL."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Mapping
from unittest.mock import patch

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Probe,
    Unavailable,
    completed,
    exposed,
    raised,
    unknown,
)

USELESS_SETTINGS = {
    "USE_NCCL": "1",
    "USE_SYSTEM_NCCL": "1",
    "NCCL_ROOT": "/usr",
    "LD_LIBRARY_PATH": "/usr/lib/x86_64-linux-gnu",
}


def without_nccl(ctx: Context) -> Any:
    """torch.distributed, if this torch was built without NCCL; otherwise raises `Unavailable`."""
    import torch.distributed as dist

    if dist.is_nccl_available():
        raise Unavailable("this torch was built with NCCL")
    ctx.reached()
    return dist


def join(ctx: Context, dist: Any, backend: str) -> None:
    dist.init_process_group(
        backend, store=dist.FileStore(ctx.path("store"), ctx.world_size), rank=ctx.rank, world_size=ctx.world_size
    )


def count_ranks(ctx: Context, dist: Any, group: Any = None) -> None:
    import torch

    ranks = torch.ones(1)
    dist.all_reduce(ranks, group=group)
    assert ranks.item() == ctx.world_size, ranks
    ctx.meet("counted")


def train(ctx: Context, *, asks_build: bool) -> None:
    """Joins with nccl, or asks first whether this build has NCCL."""
    import torch

    dist = without_nccl(ctx)
    backend = "nccl"
    if asks_build:
        backend = "nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"
    join(ctx, dist, backend)
    count_ranks(ctx, dist)


def train_with_gpu(ctx: Context, *, asks_build: bool) -> None:
    """A build with CUDA but without NCCL, like every wheel for Windows; the job selects nccl because there is a GPU."""
    import torch

    dist = without_nccl(ctx)
    with patch.object(torch.cuda, "is_available", lambda: True):
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if asks_build:
            backend = "nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"
    join(ctx, dist, backend)
    count_ranks(ctx, dist)


def add_group(ctx: Context, *, backend: str) -> None:
    """The default group uses gloo, and a second group uses `backend`."""
    dist = without_nccl(ctx)
    join(ctx, dist, "gloo")
    count_ranks(ctx, dist, dist.new_group([0, 1], backend=backend))


def join_per_device(ctx: Context, *, backend: str) -> None:
    """`backend` names a backend for each device type."""
    dist = without_nccl(ctx)
    join(ctx, dist, backend)
    count_ranks(ctx, dist)


def start_lightning(ctx: Context, *, backend: str) -> None:
    """Lightning reads the backend from its strategy."""
    from lightning.fabric import Fabric  # type: ignore[import-not-found]
    from lightning.fabric.strategies import DDPStrategy  # type: ignore[import-not-found]

    dist = without_nccl(ctx)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", LOCAL_RANK="0", NODE_RANK="0")
    strategy = DDPStrategy(process_group_backend=backend)
    Fabric(accelerator="cpu", devices=1, strategy=strategy).launch()
    assert dist.get_backend() == "gloo"


def start_deepspeed(ctx: Context, *, backend: str) -> None:
    """DeepSpeed reads the backend from an argument of init_distributed."""
    from kb.cpu_arms import import_deepspeed

    deepspeed = import_deepspeed()
    dist = without_nccl(ctx)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    deepspeed.init_distributed(dist_backend=backend)
    assert dist.get_backend() == "gloo"


# --- the check: was this torch built with NCCL? It does not import torch -----------------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """Was this torch built with NCCL? Reads torch/version.py."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError) as error:
        return unknown("kb cannot find out where torch is installed: %s" % error)
    if spec is None or not spec.origin:
        return unknown("torch is not installed for this interpreter")
    folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text(errors="replace")
    except OSError as error:
        return unknown("kb cannot read torch/version.py: %s" % error)
    line = r"^(__version__|cuda|hip|xpu)\b[^=\n]*= *['\"]?([^'\"\n]*)['\"]?$"
    return judge(dict(re.findall(line, text, re.MULTILINE)))


def judge(values: Mapping[str, str]) -> Finding:
    system = platform.system()
    build = "torch %s for %s, CUDA %s" % (values.get("__version__"), system, values.get("cuda"))
    advice = 'ask torch: python -c "import torch.distributed as d; print(d.is_nccl_available())"'
    if system == "Darwin":
        return exposed(build, "no build for macOS has NCCL", advice="use the backend gloo")
    if "cuda" not in values:
        return unknown(build, "torch/version.py does not say whether it was built for CUDA", advice=advice)
    if values["cuda"] == "None" and values.get("hip", "None") == "None":
        advice = "install a CUDA build of torch, or use the backend gloo"
        if values.get("xpu", "None") != "None":
            advice = "use the backend xccl for Intel GPUs, or gloo"
        return exposed(build, "a build without CUDA or ROCm contains no NCCL", advice=advice)
    if system == "Windows":
        return unknown(build, "the PyTorch wheels for Windows have no NCCL, but a custom build may", advice=advice)
    return unknown(build, "the PyTorch wheels for Linux have NCCL, but other builds may not", advice=advice)


MESSAGE = raised(r"Distributed package doesn't have NCCL built in")
NO_NCCL = "this torch was built without NCCL"


def pair(
    name: str, job: Callable[..., None], keyword: Dict[str, Any], because: str, fix: str, **changes: Any
) -> Experiment:
    """`keyword` is the argument that differs, with its values in the control and in the treatment arm."""
    (word, (fails, works)), *_ = keyword.items()
    settings: Dict[str, Any] = {"fidelity": "cpu", "stands_for": "", "env": USELESS_SETTINGS}
    settings.update({key: changes.pop(key) for key in list(changes) if key in settings})
    packages = {"torch": ">=2.1", **({name: ""} if name in ("lightning", "deepspeed") else {})}
    return Experiment(
        name=name,
        control=Arm(partial(job, **{word: fails}), MESSAGE, because=because, **settings),
        treatment=Arm(partial(job, **{word: works}), completed(), because=fix, **settings),
        **{"needs": Needs(packages=packages), "deadline_s": 60, **changes},
    )


ASKS: Dict[str, Any] = {"asks_build": (False, True)}
BACKENDS: Dict[str, Any] = {"backend": ("nccl", "gloo")}
BY_DEVICE: Dict[str, Any] = {"backend": ("cpu:gloo,cuda:nccl", "cpu:gloo")}
GPU = "a build with CUDA; a patch makes torch.cuda.is_available() return True"

probe = Probe(
    check=check,
    experiments=(
        pair(
            "backend",
            train,
            ASKS,
            f"{NO_NCCL}, but the script requests nccl",
            "the script requests nccl only if the build has NCCL",
        ),
    ),
    variants=(
        pair(
            "cuda-without-nccl",
            train_with_gpu,
            ASKS,
            "the script requests nccl because there is a GPU, but " + NO_NCCL,
            "the script asks whether the build has NCCL, not whether there is a GPU",
            fidelity="stand-in",
            stands_for=GPU,
        ),
        pair(
            "second-group",
            add_group,
            BACKENDS,
            NO_NCCL + ", but a second group requests nccl",
            "the second group uses gloo too",
        ),
        pair(
            "each-device",
            join_per_device,
            BY_DEVICE,
            NO_NCCL + ", but the backend for cuda is nccl",
            "the job names a backend only for the CPU",
        ),
        pair(
            "lightning",
            start_lightning,
            BACKENDS,
            NO_NCCL + ", but the strategy requests nccl",
            "the strategy requests gloo",
            world_size=1,
        ),
        pair(
            "deepspeed",
            start_deepspeed,
            BACKENDS,
            NO_NCCL + ", but init_distributed requests nccl",
            "init_distributed requests gloo",
            world_size=1,
        ),
    ),
)
