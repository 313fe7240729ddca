"""Every rank loads rank 0's checkpoint: torch.load puts each tensor on the GPU that the file names, which is GPU 0."""

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

WAYS = ("as-saved", "cpu", "own-gpu")
WIDTH = 2048  # 16 MiB of float32 weights


def resume(ctx: Context, *, way: str) -> None:
    """Rank 0 saves from its GPU, every rank resumes; then each measures what it has put on GPU 0."""
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
    optimizer.step()  # makes the momentum
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
    """A stand-in for the GPUs: accepts every `cuda` location, counts what goes there and leaves it on the host."""
    if not location.startswith("cuda"):
        return None
    placed[location] += storage.nbytes()
    return storage


# --- the check: who holds memory on several GPUs now, and which calls of your code would bring it about ---------


def check(params: Mapping[str, Any]) -> Finding:
    crowded, message = strangers()
    if crowded:
        return exposed(*crowded, advice="map_location in torch.load; torch.cuda.set_device(LOCAL_RANK) before all else")
    code = params["code"]
    if code is None:
        return unknown("no code was given to read", message, advice="--set code=train.py; or run this beside the job")
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
        return exposed(*result[:10], advice='map_location="cpu", or f"cuda:{os.environ["LOCAL_RANK"]}"')
    if not read:
        return unknown("no Python file of %s could be read" % code)
    if not is_complete:
        return unknown("the first %d Python files name a device at each load; there are more" % read)
    note = "that set_device comes before any use of CUDA, and what libraries load, is not looked at"
    return unknown("%d Python files, and each torch.load in them names a device" % read, note)


def strangers() -> Tuple[List[str], str]:
    """GPUs on which several processes hold 100 MiB or more, each besides another GPU of its own, and the evidence."""
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=0.8, check=True).stdout
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return [], "nvidia-smi does not tell which process is on which GPU: %s" % type(error).__name__
    rows = [[part.strip() for part in line.split(",")] for line in output.splitlines() if line.count(",") == 2]
    rows = [row for row in rows if row[2].isdigit() and int(row[2]) >= 100]
    gpus: Dict[str, Set[str]] = {}
    for pid, gpu, _ in rows:
        gpus.setdefault(pid, set()).add(gpu)
    shared: Dict[str, Set[Tuple[str, ...]]] = {}  # one set twice: two jobs that each use all of these GPUs
    for pid, gpu, _ in rows:
        if len(gpus[pid]) > 1:
            shared.setdefault(gpu, set()).add(tuple(sorted(gpus[pid])))
    crowded = [
        "%s: %s" % (gpu, ", ".join("process %s holds %s MiB" % (pid, used) for pid, item, used in rows if item == gpu))
        for gpu, sets in shared.items()
        if len(sets) > 1
    ]
    return crowded, "nvidia-smi names %d processes, and no two of them on a GPU besides their own" % len(gpus)


DEVICE_AT = {"torch.load": ("map_location", 1), "load_file": ("device", 1), "safe_open": ("device", 2)}


def loads(tree: ast.AST) -> Iterator[Tuple[int, str]]:
    """Calls that take the device from the file, or use index 0."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, words = ast.unparse(node.func), {word.arg: word.value for word in node.keywords}
        key = name if name == "torch.load" else name.split(".")[-1]
        if key in DEVICE_AT and None not in words:  # ** may hold it
            word, position = DEVICE_AT[key]
            words[word] = words.get(word) or (node.args[position] if len(node.args) > position else ast.Constant(None))
            if key == "torch.load" and constant(words[word]) == "None":
                yield node.lineno, "torch.load without map_location"
        for word in ("map_location", "device", "device_map"):
            value = words.get(word)
            if word == "device_map" and isinstance(value, ast.Dict) and len(value.values) == 1:
                value = value.values[0]  # {"": 0}
            plain = "'cuda'" if word == "device" else "'cuda:0'"  # elsewhere "cuda" is the rank's own
            if constant(value) in ("'cuda:0'", "0", plain) and (word == "device_map" or key in DEVICE_AT):
                yield node.lineno, "%s(%s=%s) is GPU 0 on every rank" % (name, word, ast.unparse(words[word]))


def constant(node: Any) -> str:
    return repr(node.value) if isinstance(node, ast.Constant) else ""


HELD = "torch.load without map_location: the tensors go where the file says, to GPU 0"
GPUS = "the GPUs; torch.load's registry of devices gets one that counts what is put where"


def experiment(name: str, way: str, because: str) -> Experiment:
    control, treatment = partial(resume, way="as-saved"), partial(resume, way=way)
    fails = symptom(r"rank 1 put \d+ MiB on GPU 0, not on its own")
    return Experiment(
        name=name,
        control=Arm(control, fails, because=HELD, fidelity="stand-in", stands_for=GPUS),
        treatment=Arm(treatment, completed(), because=because, fidelity="stand-in", stands_for=GPUS),
        deadline_s=60,
        expected_s=(0.5, 0.5),
    )


counted = experiment(
    "registry", "cpu", "map_location is the host, and load_state_dict copies to where the parameters are"
)

probe = Probe(
    check=check,
    params={"code": Param("path", "your training script, or a folder of Python files, to look for such loads")},
    experiments=(counted.on_gpus(expected_s=(10, 10)), counted),
    variants=(experiment("own-gpu", "own-gpu", "map_location is this rank's own GPU"),),
)
