"""A worker starts a fresh interpreter instead of being forked, and pickle cannot transfer its function.

`why` chooses the obstacle. The job is a script of its own, because the main guard and a notebook cell are matters of
the script; the mechanism is Python's, so no torch is needed, and the variant shows it in a DataLoader.
"""

import ast
import multiprocessing
import re
import subprocess
import sys
import time
from functools import partial
from typing import Any, Iterator, List, Mapping, Tuple

from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown

HELPERS = """
import threading

def collate(batch):
    return sum(batch)

class Counting:
    def __init__(self):
        self.lock = threading.Lock()
    def __call__(self, batch):
        return sum(batch)

class CountingWithoutItsLock(Counting):
    def __getstate__(self):
        return {}

def work(function, queue):
    queue.put(function([1, 2, 3]))
"""
SCRIPT = """
import multiprocessing, sys
sys.path.insert(0, {folder!r})
import helpers

def collate_of_script(batch):
    return sum(batch)

def main():
    def local_collate(batch):
        return sum(batch)
    workers = multiprocessing.get_context({method!r})
    queue = workers.SimpleQueue()
    worker = workers.Process(target=helpers.work, args=({function}, queue))
    worker.start()
    worker.join(10)
    if worker.exitcode or queue.get() != 6:
        sys.exit("the worker ended with %s" % worker.exitcode)

{call}
"""
GUARDED = "if __name__ == '__main__': main()"
# why: what is handed over and how main is called, broken and mended
WHYS = {
    "lambda": (("lambda batch: sum(batch)", GUARDED), ("helpers.collate", GUARDED)),
    "local-function": (("local_collate", GUARDED), ("collate_of_script", GUARDED)),
    "lock": (("helpers.Counting()", GUARDED), ("helpers.CountingWithoutItsLock()", GUARDED)),
    "no-main-guard": (("helpers.collate", "main()"), ("helpers.collate", GUARDED)),
    "notebook": (("collate_of_script", "main()"), ("helpers.collate", "main()")),
}


def start_worker(ctx: Context, *, portable: bool) -> None:
    why = ctx.params["why"]
    assert why in WHYS, "why is one of %s" % ", ".join(WHYS)
    function, call = WHYS[why][portable]
    values = {"folder": str(ctx.dir), "method": ctx.params["method"], "function": function, "call": call}
    text = SCRIPT.format(**values)
    (ctx.dir / "train.py").write_text(text)
    (ctx.dir / "helpers.py").write_text(HELPERS)
    ctx.reached()
    source = ["-c", text] if why == "notebook" else ["train.py"]  # a cell is no file that a worker could import
    ended = subprocess.run([sys.executable, *source], stderr=subprocess.PIPE, text=True, timeout=20)
    if ended.returncode:
        raise RuntimeError(ended.stderr[-3000:])


def load(ctx: Context, *, portable: bool) -> None:
    """The same in torch; the worker of the treatment has to import torch afresh."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    collate = None if portable else lambda batch: batch
    data = TensorDataset(torch.arange(4.0))
    ctx.reached()
    loader = DataLoader(data, 2, num_workers=1, multiprocessing_context=ctx.params["method"], collate_fn=collate)
    assert sum(batch.sum().item() for (batch,) in loader) == 6


HANDED = re.compile(r"(\w*collate\w*|worker_init\w*|target|initializer|\w*transform\w*)")


def check(params: Mapping[str, Any]) -> Finding:
    """Are lambdas or local functions handed to workers that this Python, or the user's code, does not fork?"""
    code = params["code"]
    default = multiprocessing.get_all_start_methods()[0]
    message = f"Python {sys.version.split()[0]} starts processes with {default} by default"
    if code is None or not code.exists():
        return unknown("no code was given to read" if code is None else f"there is no {code}", message)
    files = sorted(code.rglob("*.py")) if code.is_dir() else [code]
    end = time.monotonic() + 0.5
    result: List[str] = []
    afresh = {default} - {"fork"}
    read = 0
    for file in files:
        if time.monotonic() > end:
            break
        try:
            text = file.read_text(errors="replace")
            result += [f"{file}:{line}: {what}" for line, what in unportable(ast.parse(text))]
            afresh |= set(re.findall(r"[\"'](spawn|forkserver)[\"']|\bmp\.(spawn)\(", text)) and {"spawn or forkserver"}
            read += 1
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
    message += f"; {read} of {len(files)} files were read" + (f", which name {', '.join(afresh)}" if afresh else "")
    if result and afresh:
        return exposed(message, *result[:10], advice="move them to the top level of a module, or use functools.partial")
    if result:
        return clear(message, *result[:10], "forked workers get these without pickle; Python 3.14 no longer forks")
    return unknown(
        message, "no lambda or local function is handed to workers there; attributes of objects cannot be seen"
    )


def unportable(tree: ast.AST) -> Iterator[Tuple[int, str]]:
    """Lambdas and local functions that are passed to a worker."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inner = {
        node.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node is not function
    }
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        named = [(word.arg or "", word.value) for word in call.keywords]
        first = [("spawn", call.args[0])] if call.args and ast.unparse(call.func).endswith("mp.spawn") else []
        for name, value in [*first, *[item for item in named if HANDED.fullmatch(item[0])]]:
            if isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in inner):
                yield call.lineno, f"{name} is {'a lambda' if isinstance(value, ast.Lambda) else 'local: ' + value.id}"


LOCAL = r"Can't (pickle|get) local object"
MESSAGES = (
    LOCAL + r"|(cannot|can't) pickle '?_thread\.lock|An attempt has been made to start a new process before the"
    r"|Can't get attribute 'collate_of_script' on <module '__main__'"
)
STUCK = "what the worker is to run lives where only its parent can see it"
CARRIED = "the same function at the top level of a module that the worker imports"

probe = Probe(
    check=check,
    params={
        "why": Param("str", "what is in the way: %s" % ", ".join(WHYS), "lambda"),
        "method": Param("str", "start method: spawn or forkserver", "spawn"),
        "code": Param("path", "your training script, or a folder of Python files, to look for such functions"),
    },
    experiments=(
        Experiment(
            name="python",
            control=Arm(partial(start_worker, portable=False), expect=raised(MESSAGES), because=STUCK, fidelity="cpu"),
            treatment=Arm(partial(start_worker, portable=True), expect=completed(), because=CARRIED, fidelity="cpu"),
            world_size=1,
            needs=Needs(packages={}, memory_mib=256),
            expected_s=(0.3, 0.4),
        ),
    ),
    variants=(
        Experiment(
            name="dataloader",
            control=Arm(
                partial(load, portable=False),
                expect=raised(LOCAL),
                because="collate_fn is a lambda and the worker is spawned",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(load, portable=True),
                expect=completed(),
                because="the default collate function, which the spawned worker imports",
                fidelity="cpu",
            ),
            world_size=1,
            deadline_s=60,
            expected_s=(0.3, 5),
        ),
    ),
)
