"""A DataLoader worker, forked from a process that has used CUDA, moves its samples to the GPU."""

import ast
import multiprocessing
import os
import re
import time
from functools import partial
from typing import Any, Iterator, List, Mapping, Tuple

from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown


def train(ctx: Context, *, worker_moves: bool) -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Images(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            image = torch.full((8,), float(index))
            return image.to("cuda") if worker_moves else image

    if ctx.device.type == "cuda":
        torch.zeros(1, device=ctx.device)
    else:
        touch_cuda_without_a_gpu()
    ctx.note(is_initialized_says_before_the_fork=torch.cuda.is_initialized())
    ctx.reached()
    total = 0.0
    for batch in DataLoader(Images(), batch_size=2, num_workers=1, multiprocessing_context="fork"):
        total += batch.to(ctx.device).sum().item()  # the loop moves, in both arms
    assert total == 8 * (0 + 1 + 2 + 3)


def touch_cuda_without_a_gpu() -> None:
    """Set the flag that a CUDA call of the parent sets in its forks; torch's own code refuses the fork.

    A torch built with CUDA sets it even without a GPU; for other builds this probe's fork handler does.
    """
    import torch

    torch.cuda.is_available()
    if not hasattr(torch._C, "_cuda_isInBadFork"):
        parent = os.getpid()
        torch.cuda._is_in_bad_fork = lambda: os.getpid() != parent


WORKER_SIDE = re.compile(r"__getitem__|__getitems__|__iter__|\w*collate\w*|worker_init\w*")
TO_GPU = re.compile(r"\.cuda\(|(\.to\(|device=)[^)]*[\"']cuda|\.pin_memory\(|torch\.cuda\.(?!is_)")


def check(params: Mapping[str, Any]) -> Finding:
    """Do Dataset and collate functions of the user's own code touch the GPU, and are workers forked here?"""
    code = params["code"]
    default = multiprocessing.get_all_start_methods()[0]
    if code is None or not code.exists():
        why = "no code was given to read" if code is None else f"there is no {code}"
        message = f"this Python starts processes with {default} by default"
        return unknown(why, message, advice="--set code=train.py, or a folder")
    files = sorted(code.rglob("*.py")) if code.is_dir() else [code]
    end = time.monotonic() + 0.5
    result: List[str] = []
    chosen = set()
    read = 0
    for file in files:
        if time.monotonic() > end:
            break
        try:
            text = file.read_text(errors="replace")
            result += [f"{file}:{line}: {what}" for line, what in gpu_calls(ast.parse(text))]
            chosen |= set(re.findall(r"[\"'](fork|spawn|forkserver)[\"']", text))
            read += 1
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
    seen = f"{read} of {len(files)} files were read; start methods named in them: {', '.join(sorted(chosen)) or 'none'}"
    if result and ("fork" in chosen or (default == "fork" and not chosen)):
        advice = "return CPU tensors there, and move the batch in the training loop"
        return exposed(seen, *result[:10], "with num_workers above 0 the workers are forked", advice=advice)
    if result and not chosen:
        return clear(seen, *result[:10], f"this Python does not fork workers by default but uses {default}")
    blind = "a device in a variable, and what libraries do, cannot be seen like this"
    return unknown(seen, *result[:10], blind)


def gpu_calls(tree: ast.AST) -> Iterator[Tuple[int, str]]:
    """Statements that name a GPU, in functions that workers run."""
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and WORKER_SIDE.fullmatch(function.name):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and TO_GPU.search(ast.unparse(node)):
                    yield node.lineno, f"{function.name} calls {ast.unparse(node)[:80]}"


MESSAGE = r"Cannot re-initialize CUDA in forked subprocess"
IN_WORKER = "a forked worker moves each sample to the GPU, in a process whose parent has called CUDA"
IN_LOOP = "the worker returns CPU tensors, and the training loop moves the batch"
NO_GPU = "the CUDA call of the parent: only the flag that it sets in a fork"

gloo = Experiment(
    name="no-gpu",
    control=Arm(
        partial(train, worker_moves=True), raised(MESSAGE), because=IN_WORKER, fidelity="stand-in", stands_for=NO_GPU
    ),
    treatment=Arm(
        partial(train, worker_moves=False), completed(), because=IN_LOOP, fidelity="stand-in", stands_for=NO_GPU
    ),
    world_size=1,
    needs=Needs(packages={"torch": ">=2.1"}),
    expected_s=(0.2, 0.2),
)

probe = Probe(
    check=check,
    params={"code": Param("path", "your training script, or a folder of Python files, to look for such calls")},
    experiments=(gloo.on_gpus(1, name="gpu", expected_s=(10, 10)), gloo),
)
