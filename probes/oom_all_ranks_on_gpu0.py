"""Every rank loads the checkpoint of rank 0, and torch.load puts each tensor on the GPU in the file, which is GPU 0."""

from __future__ import annotations

import ast
import os
import subprocess
import time
from collections import Counter
from functools import partial
from typing import Any, Dict, Iterator, List, Mapping, Set, Tuple

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Param,
    Probe,
    Symptom,
    completed,
    exposed,
    symptom,
    unknown,
)

WAYS = ("as-saved", "cpu", "own-gpu")  # where torch.load puts the tensors
WIDTH = 2048  # 16 MiB of float32 weights


def resume(ctx: Context, *, way: str) -> None:
    """Rank 0 saves from its GPU, and every rank resumes; then each rank measures how much it has put on GPU 0."""
    import torch

    assert way in WAYS, way
    dist = ctx.init_process_group(timeout_s=60)
    on_gpu = ctx.device.type == "cuda"
    placed: Counter[str] = Counter()
    if not on_gpu:
        torch.serialization.register_package(1, lambda _: "cuda:0", partial(put, placed))
    path = ctx.path("checkpoint.pt")
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False, device=ctx.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, WIDTH, device=ctx.device)).sum().backward()
    optimizer.step()  # creates the momentum
    if ctx.rank == 0:
        torch.nn.init.constant_(model.weight, 2)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier()
    before = torch.cuda.memory_allocated(0) if on_gpu else 0
    ctx.reached()
    if way == "cpu":
        state = torch.load(path, map_location="cpu")
    elif way == "own-gpu":
        state = torch.load(path, map_location=f"cuda:{os.environ['LOCAL_RANK']}")
    else:
        state = torch.load(path)
    if on_gpu:
        placed["cuda:0"] += max(0, torch.cuda.memory_allocated(0) - before)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    del state
    assert model.weight[-1, -1].item() == 2
    ctx.note(mib_by_device={device: size >> 20 for device, size in sorted(placed.items()) if size})
    if ctx.rank != 0 and placed["cuda:0"]:
        raise Symptom("rank %d put %d MiB on GPU 0, not on its own" % (ctx.rank, placed["cuda:0"] >> 20))


def put(placed: Counter[str], storage: Any, location: str) -> Any:
    """Stands in for the GPUs: accepts every `cuda` location, counts its bytes, and leaves the storage on the host."""
    if not location.startswith("cuda"):
        return None
    placed[location] += storage.nbytes()
    return storage


# --- the check: which processes hold memory on more than one GPU, and which calls of the code would cause that? --


def check(params: Mapping[str, Any]) -> Finding:
    crowded, message = crowded_gpus()
    if crowded:
        advice = "pass map_location to torch.load, and call torch.cuda.set_device(LOCAL_RANK) before any use of CUDA"
        return exposed(*crowded, advice=advice)
    code = params["code"]
    if code is None:
        advice = "--set code=train.py, or run this while the job runs"
        return unknown("no code was named", message, advice=advice)
    end, read, result, is_complete = time.monotonic() + 0.5, 0, [], True
    for file in sorted(code.rglob("*.py")) if os.path.isdir(code) else [code]:
        if time.monotonic() > end:
            is_complete = False
            break
        try:
            result += ["%s:%d: %s" % (file, line, what) for line, what in loads(ast.parse(file.read_text("utf-8")))]
            read += 1
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    if result:
        advice = 'pass map_location="cpu", or map_location=f"cuda:{os.environ["LOCAL_RANK"]}"'
        return exposed(*result[:10], advice=advice)
    if not read:
        return unknown("kb could read no Python file in %s" % code)
    if not is_complete:
        return unknown("in the first %d Python files each load names a device; kb did not read the rest" % read)
    note = "kb did not check what libraries load, nor that set_device comes before any use of CUDA"
    return unknown("in %d Python files each torch.load names a device" % read, note)


def crowded_gpus() -> Tuple[List[str], str]:
    """GPUs on which two or more processes hold 100 MiB although each also uses another GPU, and a message."""
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=0.8, check=True).stdout
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return [], "nvidia-smi does not say which process uses which GPU: %s" % type(error).__name__
    rows = [[part.strip() for part in line.split(",")] for line in output.splitlines() if line.count(",") == 2]
    rows = [row for row in rows if row[2].isdigit() and int(row[2]) >= 100]
    gpus: Dict[str, Set[str]] = {}
    for pid, gpu, _ in rows:
        gpus.setdefault(pid, set()).add(gpu)
    shared: Dict[str, Set[Tuple[str, ...]]] = {}  # processes with equal sets count once: jobs that use all these GPUs
    for pid, gpu, _ in rows:
        if len(gpus[pid]) > 1:
            shared.setdefault(gpu, set()).add(tuple(sorted(gpus[pid])))
    crowded = [
        "%s: %s" % (gpu, ", ".join("process %s holds %s MiB" % (pid, used) for pid, item, used in rows if item == gpu))
        for gpu, sets in shared.items()
        if len(sets) > 1
    ]
    return crowded, "nvidia-smi lists %d processes, and no two of them share a second GPU" % len(gpus)


DEVICE_AT = {"torch.load": ("map_location", 1), "load_file": ("device", 1), "safe_open": ("device", 2)}


def loads(tree: ast.AST) -> Iterator[Tuple[int, str]]:
    """Calls that take the device from the file, or use GPU 0."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, words = ast.unparse(node.func), {word.arg: word.value for word in node.keywords}
        key = name if name == "torch.load" else name.split(".")[-1]
        if key in DEVICE_AT and None not in words:  # ** may contain it
            word, position = DEVICE_AT[key]
            words[word] = words.get(word) or (node.args[position] if len(node.args) > position else ast.Constant(None))
            if key == "torch.load" and constant(words[word]) == "None":
                yield node.lineno, "torch.load without map_location"
        for word in ("map_location", "device", "device_map"):
            value = words.get(word)
            if word == "device_map" and isinstance(value, ast.Dict) and len(value.values) == 1:
                value = value.values[0]  # {"": 0}
            plain = "'cuda'" if word == "device" else "'cuda:0'"  # in the other arguments "cuda" is the rank's GPU
            if constant(value) in ("'cuda:0'", "0", plain) and (word == "device_map" or key in DEVICE_AT):
                yield node.lineno, "%s(%s=%s) is GPU 0 on every rank" % (name, word, ast.unparse(words[word]))


def constant(node: Any) -> str:
    return repr(node.value) if isinstance(node, ast.Constant) else ""


AS_SAVED = "torch.load without map_location puts the tensors on the device in the file, which is GPU 0"
GPUS = "the GPUs; the probe registers a device with torch.load that counts the bytes for each GPU"


def experiment(name: str, way: str, because: str) -> Experiment:
    control, treatment = partial(resume, way="as-saved"), partial(resume, way=way)
    fails = symptom(r"rank 1 put \d+ MiB on GPU 0, not on its own")
    return Experiment(
        name=name,
        control=Arm(control, fails, because=AS_SAVED, fidelity="stand-in", stands_for=GPUS),
        treatment=Arm(treatment, completed(), because=because, fidelity="stand-in", stands_for=GPUS),
        deadline_s=60,
        expected_s=(0.5, 0.5),
    )


counted = experiment(
    "registry", "cpu", 'map_location="cpu" loads to the host, and load_state_dict copies to the rank\'s own GPU'
)

probe = Probe(
    check=check,
    params={"code": Param("path", "your training script, or a folder of Python files, for the check")},
    experiments=(counted.on_gpus(expected_s=(10, 10)), counted),
    variants=(experiment("own-gpu", "own-gpu", "map_location names the GPU of this rank"),),
)
