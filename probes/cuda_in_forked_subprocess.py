"""A DataLoader worker moves its samples to the GPU, but its parent called CUDA before it forked the worker."""

import ast
import importlib
import multiprocessing
import os
import re
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Iterator, List, Mapping, Set, Tuple

from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, completed, exposed, raised, unknown

IMAGES = """
import torch

class Images:
    def __init__(self, worker_moves):
        self.worker_moves = worker_moves
    def __len__(self):
        return 4
    def __getitem__(self, index):
        image = torch.full((8,), float(index))
        if not self.worker_moves:
            return image
        try:
            return image.to("cuda").cpu()
        except (RuntimeError, AssertionError) as error:
            if "forked subprocess" in str(error) or torch.cuda.is_available():
                raise
            return image  # torch did not refuse; it failed only because this machine has no GPU
"""


def run(
    ctx: Context, *, worker_moves: bool = True, workers: int = 1, spawn: bool = False, library_forks: bool = False
) -> None:
    """Calls CUDA in the parent, then iterates over a DataLoader. `library_forks`: the loader itself requests fork."""
    import torch
    from torch.utils.data import DataLoader

    (ctx.dir / "images.py").write_text(IMAGES)
    sys.path.insert(0, str(ctx.dir))  # a spawned worker imports the dataset from this folder
    dataset = importlib.import_module("images").Images(worker_moves)
    device = ctx.device
    multiprocessing.set_start_method("spawn" if library_forks else "fork", force=True)
    if ctx.device.type == "cuda":
        torch.zeros(1, device=ctx.device)
    else:
        touch_cuda_without_a_gpu()
    ctx.reached()
    sums: List[float] = []

    def train(images: Any) -> None:
        sums.append(images.sum().item())

    if not workers:
        loader = DataLoader(dataset, batch_size=2, num_workers=0)
    elif spawn:
        loader = DataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context="spawn")
    elif library_forks:
        loader = DataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context="fork")
    else:
        loader = DataLoader(dataset, batch_size=2, num_workers=1, pin_memory=True)
    for images in loader:
        images = images.to(device, non_blocking=True)
        train(images)
    assert sum(sums) == 8 * (0 + 1 + 2 + 3), sums


def touch_cuda_without_a_gpu() -> None:
    """Sets the flag that a CUDA call sets in later forks; torch's own code then raises the error in the child.

    A torch built with CUDA sets the flag even without a GPU; for a CPU build, the probe replaces the function that
    reads it.
    """
    import torch

    torch.cuda.is_available()
    assert not torch.cuda.is_initialized(), "is_available initialized CUDA"
    if not hasattr(torch._C, "_cuda_isInBadFork"):
        parent = os.getpid()
        torch.cuda._is_in_bad_fork = lambda: os.getpid() != parent


WORKER_SIDE = re.compile(r"__getitem__|__getitems__|__iter__|\w*collate\w*|worker_init\w*")
HARMLESS = (
    r"is_|manual_seed|empty_cache|device_count|memory_allocated"  # torch queues or skips these calls in such a child
)
TO_GPU = re.compile(rf"\.cuda\(|(\.to\(|device=)[^)]*[\"']cuda|\.pin_memory\(|torch\.cuda\.(?!{HARMLESS})")


def check(params: Mapping[str, Any]) -> Finding:
    """Do the Dataset and collate functions in the user's code use the GPU, and does the DataLoader fork its workers?"""
    code = params["code"]
    default = multiprocessing.get_all_start_methods()[0]
    if code is None or not code.exists():
        why = "no code was given" if code is None else f"{code} does not exist"
        message = f"this Python starts processes with {default} by default"
        return unknown(why, message, advice="run --set code=train.py, or name a folder")
    calls, methods, workers, count = read_code(code)
    summary = f"files that kb read: {count}; start methods named in them: {', '.join(sorted(methods)) or 'none'}"
    if calls and workers and ("fork" in methods or (default == "fork" and not methods)):
        advice = "return CPU tensors from these functions, and move the batch to the GPU in the training loop"
        return exposed(summary, *calls[:10], "num_workers is above 0, and the workers are forked", advice=advice)
    if calls and not workers:
        why = "the code sets no num_workers above 0: without workers nothing forks, so this error cannot occur"
        return unknown(summary, *calls[:10], why)
    if calls and not methods:
        why = f"this Python starts workers with {default} by default, but a library may still fork them"
        return unknown(summary, *calls[:10], why)
    limits = "kb sees neither a device in a variable nor the calls of libraries"
    return unknown(summary, *calls[:10], limits)


def read_code(code: Path) -> Tuple[List[str], Set[str], bool, int]:
    """Reads Python files for half a second: GPU calls, start methods, whether workers are used, and the file count."""
    end = time.monotonic() + 0.5
    calls: List[str] = []
    methods: Set[str] = set()
    count, workers = 0, False
    for file in code.rglob("*.py") if code.is_dir() else [code]:
        if time.monotonic() > end:
            break
        try:
            text = file.read_text(errors="replace") if file.is_file() else ""
            calls += [f"{file}:{line}: {call}" for line, call in gpu_calls(ast.parse(text))]
            methods |= set(re.findall(r"[\"'](fork|spawn|forkserver)[\"']", text))
            workers = workers or bool(re.search(r"num_workers[\"']?\s*[=:]\s*[1-9]", text))
            count += 1
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return calls, methods, workers, count


def gpu_calls(tree: ast.AST) -> Iterator[Tuple[int, str]]:
    """Yields the line and text of each call that names a GPU, in functions that workers run."""
    loops: Set[ast.AST] = set()  # methods of a loader, prefetcher or replay buffer run in the parent
    for owner in ast.walk(tree):
        names = [owner.name, *map(ast.unparse, owner.bases)] if isinstance(owner, ast.ClassDef) else []
        if isinstance(owner, ast.ClassDef) and not re.search(r"data_?set", " ".join(names), re.IGNORECASE):
            loops |= {item for item in owner.body if getattr(item, "name", "") in ("__iter__", "__getitem__")}
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or function in loops:
            continue
        if WORKER_SIDE.fullmatch(function.name):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and TO_GPU.search(ast.unparse(node)):
                    yield node.lineno, f"{function.name} calls {ast.unparse(node)[:80]}"


MESSAGE = r"Cannot re-initialize CUDA in forked subprocess"
IN_WORKER = "a forked worker moves each sample to the GPU, but its parent has called CUDA"
IN_LOOP = "the worker returns CPU tensors, and the training loop moves the batch to the GPU"
NO_GPU = "a CUDA call of the parent; the probe only sets the flag that such a call sets in a fork"

gloo = Experiment(
    name="no-gpu",
    control=Arm(
        partial(run, worker_moves=True), raised(MESSAGE), because=IN_WORKER, fidelity="stand-in", stands_for=NO_GPU
    ),
    treatment=Arm(
        partial(run, worker_moves=False), completed(), because=IN_LOOP, fidelity="stand-in", stands_for=NO_GPU
    ),
    world_size=1,
    needs=Needs(packages={"torch": ">=2.1"}),
    expected_s=(0.2, 0.2),
)


def variant(name: str, control: Mapping[str, Any], treatment: Mapping[str, Any], because: str, fix: str) -> Experiment:
    """Returns a variant in which the worker moves its samples to the GPU in both arms."""
    return replace(
        gloo,
        name=name,
        control=replace(gloo.control, job=partial(run, **control), because=because),
        treatment=replace(gloo.treatment, job=partial(run, **treatment), because=fix),
        deadline_s=150.0,  # a spawned worker imports torch
        expected_s=(0.3, 3.0),
    )


variants = (
    variant(
        "spawn",
        {"library_forks": True},
        {"library_forks": True, "spawn": True},
        "the start method of the process is spawn, but the loader has its own context, which forks",
        "the loader has a spawn context",
    ),
    variant("no-workers", {}, {"workers": 0}, IN_WORKER, "the loader has no workers"),
)

probe = Probe(
    check=check,
    params={"code": Param("path", "your training script, or a folder of Python files, for the check")},
    experiments=(gloo.on_gpus(1, name="gpu", expected_s=(10, 10)), gloo),
    variants=variants,
)
