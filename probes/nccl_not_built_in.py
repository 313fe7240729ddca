"""A torch that was built without NCCL is asked for the backend nccl."""

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

IN_VAIN = {"USE_NCCL": "1", "USE_SYSTEM_NCCL": "1", "NCCL_ROOT": "/usr", "LD_LIBRARY_PATH": "/usr/lib/x86_64-linux-gnu"}


def without_nccl(ctx: Context) -> Any:
    """torch.distributed of a build without NCCL."""
    import torch.distributed as dist

    if dist.is_nccl_available():
        raise Unavailable("this torch is built with NCCL")
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
    """The first lines of a rank; one asks for nccl, the other whether this build has it."""
    import torch

    dist = without_nccl(ctx)
    backend = "nccl"
    if asks_build:
        backend = "nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"
    join(ctx, dist, backend)
    count_ranks(ctx, dist)


def train_with_gpu(ctx: Context, *, asks_build: bool) -> None:
    """A build with CUDA and without NCCL, as all are for Windows: there is a GPU, so nccl is chosen."""
    import torch

    dist = without_nccl(ctx)
    with patch.object(torch.cuda, "is_available", lambda: True):
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if asks_build:
            backend = "nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"
    join(ctx, dist, backend)
    count_ranks(ctx, dist)


def add_group(ctx: Context, *, backend: str) -> None:
    """The default group is gloo's, a second one asks for nccl."""
    dist = without_nccl(ctx)
    join(ctx, dist, "gloo")
    count_ranks(ctx, dist, dist.new_group([0, 1], backend=backend))


def both(ctx: Context, *, backend: str) -> None:
    """A backend for each device."""
    dist = without_nccl(ctx)
    join(ctx, dist, backend)
    count_ranks(ctx, dist)


def start_lightning(ctx: Context, *, backend: str) -> None:
    """Lightning takes the backend from its strategy."""
    from lightning.fabric import Fabric  # type: ignore[import-not-found]
    from lightning.fabric.strategies import DDPStrategy  # type: ignore[import-not-found]

    dist = without_nccl(ctx)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", LOCAL_RANK="0", NODE_RANK="0")
    strategy = DDPStrategy(process_group_backend=backend)
    Fabric(accelerator="cpu", devices=1, strategy=strategy).launch()
    assert dist.get_backend() == "gloo"


def start_deepspeed(ctx: Context, *, backend: str) -> None:
    """DeepSpeed takes it as an argument of init_distributed."""
    from kb.cpu_arms import import_deepspeed

    deepspeed = import_deepspeed()
    dist = without_nccl(ctx)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    deepspeed.init_distributed(dist_backend=backend)
    assert dist.get_backend() == "gloo"


# --- the check: was this torch built with NCCL? Read without importing it -----------------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    try:
        found = importlib.util.find_spec("torch")
    except (ImportError, ValueError) as error:
        return unknown("torch cannot be looked up: %s" % error)
    if found is None or not found.origin:
        return unknown("torch is not installed for this interpreter")
    folder = Path(found.origin).parent
    try:
        text = (folder / "version.py").read_text(errors="replace")
    except OSError as error:
        return unknown("torch/version.py cannot be read: %s" % error)
    line = r"^(__version__|cuda|hip|xpu)\b[^=\n]*= *['\"]?([^'\"\n]*)['\"]?$"
    return judge(dict(re.findall(line, text, re.MULTILINE)))


def judge(values: Mapping[str, str]) -> Finding:
    system = platform.system()
    what = "torch %s for %s, CUDA %s" % (values.get("__version__"), system, values.get("cuda"))
    asked = 'ask it: python -c "import torch.distributed as d; print(d.is_nccl_available())"'
    if system == "Darwin":
        return exposed(what, "no build for macOS has NCCL", advice="the backend gloo")
    if "cuda" not in values:
        return unknown(what, "torch/version.py does not say for what it was built", advice=asked)
    if values["cuda"] == "None" and values.get("hip", "None") == "None":
        advice = "a CUDA build, or the backend gloo"
        if values.get("xpu", "None") != "None":
            advice = "the backend xccl, for Intel GPUs, or gloo"
        return exposed(what, "without CUDA or ROCm there is no NCCL in it", advice=advice)
    if system == "Windows":
        return unknown(what, "PyTorch's wheels for Windows have no NCCL; a build of your own may", advice=asked)
    return unknown(what, "PyTorch's wheels for Linux have NCCL; those of others may not", advice=asked)


MESSAGE = raised(r"Distributed package doesn't have NCCL built in")
HAS_NONE = "this build has no NCCL"


def pair(
    name: str, job: Callable[..., None], keyword: Dict[str, Any], because: str, fix: str, **changes: Any
) -> Experiment:
    """`keyword` is what differs, for control and treatment."""
    (word, (fails, works)), *_ = keyword.items()
    settings: Dict[str, Any] = {"fidelity": "cpu", "stands_for": "", "env": IN_VAIN}
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
GPU = "a build with CUDA: torch.cuda.is_available() is made to say True"

probe = Probe(
    check=check,
    experiments=(pair("backend", train, ASKS, f"{HAS_NONE}, and the script asks for it", "it asks whether it has"),),
    variants=(
        pair(
            "cuda-without-nccl",
            train_with_gpu,
            ASKS,
            "a GPU is there, so the script asks for nccl; " + HAS_NONE,
            "it asks the build for NCCL, not for a GPU",
            fidelity="stand-in",
            stands_for=GPU,
        ),
        pair(
            "second-group", add_group, BACKENDS, HAS_NONE + ": a second group asks for it", "the second is gloo's too"
        ),
        pair("each-device", both, BY_DEVICE, HAS_NONE + ", also for one device of two", "no backend for cuda"),
        pair("lightning", start_lightning, BACKENDS, HAS_NONE, "the strategy names gloo", world_size=1),
        pair("deepspeed", start_deepspeed, BACKENDS, HAS_NONE, "init_distributed names gloo", world_size=1),
    ),
)
