"""A worker starts a fresh interpreter instead of being forked, and pickle cannot transfer its function.

`why` chooses the obstacle. The job runs a separate script, because the main guard and a notebook cell belong to a
script. The mechanism is Python's, so the job needs no torch; the variant `dataloader` shows it in torch.
"""

import ast
import functools
import importlib
import inspect
import multiprocessing
import os
import re
import subprocess
import sys
import time
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Mapping, Tuple

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
    exposed,
    raised,
    symptom,
    unknown,
)


def collate(batch: List[List[int]], pad: int) -> List[List[int]]:
    longest = max(map(len, batch))
    return [tokens + [pad] * (longest - len(tokens)) for tokens in batch]


class Records:
    """A dataset that reads an open file, or an LMDB environment: each worker opens the file for itself."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file: Any = open(path)
        self.pid = os.getpid()

    def __getstate__(self) -> Dict[str, Any]:
        return {**self.__dict__, "file": None}

    def __getitem__(self, i: int) -> str:
        if self.file is None or self.pid != os.getpid():
            self.file, self.pid = open(self.path), os.getpid()
        self.file.seek(0)
        return str(self.file.readlines()[i])


IMPORTS = """
import os
import threading
from typing import Any, Dict, List
"""
HELPERS = """
class CarelessRecords(Records):
    def __getstate__(self):
        return self.__dict__

class Counting:
    def __init__(self):
        self.lock = threading.Lock()
    def __call__(self, batch):
        return collate(batch, 0)

class CountingWithoutItsLock(Counting):
    def __getstate__(self):
        return {}

def work(function, queue):
    queue.put(function([[1], [2, 3]]))

def read(records, queue):
    queue.put([records[1], records[0]])
"""
SCRIPT = """
import functools, multiprocessing, sys
sys.path.insert(0, {folder!r})
import helpers

def collate_of_script(batch):
    return helpers.collate(batch, 0)

def rank(batch):  # a rank of mp.spawn: it starts a worker, with the start method `nested` or by default
    local = lambda batch: helpers.collate(batch, 0)
    workers = multiprocessing.get_context({nested!r})
    queue = workers.SimpleQueue()
    worker = workers.Process(target=helpers.work, args=(local, queue))
    worker.start()
    return queue.get()

def main():
    def local_collate(batch):
        return helpers.collate(batch, 0)
    workers = multiprocessing.get_context({method!r})
    queue = workers.SimpleQueue()
    worker = workers.Process(target=helpers.work, args=({function}, queue))
    worker.start()
    worker.join(20)
    if worker.exitcode or queue.get() != [[1, 0], [2, 3]]:
        sys.exit("the worker ended with %s" % worker.exitcode)

{call}
"""
GUARDED = "if __name__ == '__main__': main()"
INSIDE = """
if __name__ == '__main__':
    def inside(batch):
        return helpers.collate(batch, 0)
    main()
"""
LAMBDA = "lambda batch: helpers.collate(batch, 0)"
PARTIAL = "functools.partial(helpers.collate, pad=0)"
# why: the function that the worker gets and the call of main, in the control and in the treatment
WHYS = {
    "lambda": ((LAMBDA, GUARDED), (PARTIAL, GUARDED)),
    "local-function": (("local_collate", GUARDED), ("collate_of_script", GUARDED)),
    "lock": (("helpers.Counting()", GUARDED), ("helpers.CountingWithoutItsLock()", GUARDED)),
    "no-main-guard": ((PARTIAL, "main()"), (PARTIAL, GUARDED)),
    "notebook": (("collate_of_script", "main()"), (PARTIAL, "main()")),
    "inside-guard": (("inside", INSIDE), ("collate_of_script", INSIDE)),
}


def write_helpers(ctx: Context) -> None:
    """Writes the module that a worker imports: the functions above, and broken forms of them."""
    text = "\n\n".join([IMPORTS, inspect.getsource(collate), inspect.getsource(Records), HELPERS])
    (ctx.dir / "helpers.py").write_text(text)


def start_worker(ctx: Context, *, portable: bool, why: str = "", fork: bool = False, nested: str = "") -> None:
    """Runs a script that starts one worker. With `nested`, this worker starts another worker."""
    why = why or ctx.params["why"]
    assert why in WHYS, "why must be one of %s" % ", ".join(WHYS)
    function, call = WHYS[why][portable]
    method = "fork" if fork else ctx.params["method"]
    if nested:
        function, call = "rank", GUARDED
    values = {"folder": str(ctx.dir), "method": method, "function": function, "call": call}
    text = SCRIPT.format(nested=None if nested == "default" else nested, **values)
    (ctx.dir / "train.py").write_text(text)
    write_helpers(ctx)
    ctx.reached()
    source = ["-c", text] if why == "notebook" else ["train.py"]  # a worker cannot import a cell, which is not a file
    ended = subprocess.run([sys.executable, *source], stderr=subprocess.PIPE, text=True, timeout=30)
    if ended.returncode:
        raise RuntimeError(ended.stderr[-3000:])


def import_from(ctx: Context, name: str) -> Any:
    """Imports a module that the job has written; a spawned worker finds it too, because it gets this path."""
    sys.path.insert(0, str(ctx.dir))
    return importlib.import_module(name)


def send_dataset(ctx: Context, *, leaves_file: bool) -> None:
    """Sends a dataset with an open file to a worker."""
    write_helpers(ctx)
    helpers = import_from(ctx, "helpers")
    (ctx.dir / "records.txt").write_text("a\nb\n")
    records = (helpers.Records if leaves_file else helpers.CarelessRecords)(ctx.path("records.txt"))
    workers = multiprocessing.get_context(ctx.params["method"])
    queue: Any = workers.Queue()
    worker = workers.Process(target=helpers.read, args=(records, queue))
    ctx.reached()
    worker.start()
    assert queue.get(timeout=20) == ["b\n", "a\n"]
    worker.join(10)


def load(ctx: Context, *, portable: bool) -> None:
    """A DataLoader with one worker, which imports torch again."""
    from torch.utils.data import DataLoader

    write_helpers(ctx)
    collate = import_from(ctx, "helpers").collate
    data: Any = [[1], [2, 3]]
    multiprocessing.set_start_method(ctx.params["method"], force=True)
    ctx.reached()
    if portable:
        loader = DataLoader(data, batch_size=2, num_workers=1, collate_fn=functools.partial(collate, pad=0))
    else:
        loader = DataLoader(data, batch_size=2, num_workers=1, collate_fn=lambda batch: collate(batch, pad=0))
    assert list(loader) == [[[1, 0], [2, 3]]]


PADDING = """
PAD = 0

def padded(tokens, pad=None):
    return tokens + [PAD if pad is None else pad]
"""


def set_global(ctx: Context, *, passes_value: bool) -> None:
    """The program sets a global of the module that the worker imports, or passes the value to the function."""
    (ctx.dir / "padding.py").write_text(PADDING)
    padding = import_from(ctx, "padding")
    padding.PAD = 7
    ctx.reached()
    with multiprocessing.get_context(ctx.params["method"]).Pool(1) as workers:
        result = workers.apply(functools.partial(padding.padded, pad=7) if passes_value else padding.padded, ([1],))
    if result != [1, 7]:
        raise Symptom("the worker pads with %d, but the program has set 7" % result[1])


PASSED = re.compile(r"(\w*collate\w*|worker_init\w*|target|initializer|\w*transform\w*)")


def check(params: Mapping[str, Any]) -> Finding:
    """Does the code pass lambdas or local functions to workers that this Python, or the code, does not fork?"""
    code = params["code"]
    default = multiprocessing.get_all_start_methods()[0]
    message = f"Python {sys.version.split()[0]} starts processes with {default} by default"
    if code is None or not code.exists():
        return unknown("no code was named" if code is None else f"{code} does not exist", message)
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
    message += f"; kb read {read} of {len(files)} files" + (f", which name {', '.join(afresh)}" if afresh else "")
    if result and afresh:
        return exposed(message, *result[:10], advice="move them to the top level of a module, or use functools.partial")
    if result:
        why = "forked workers get these without pickle, but Python 3.14 and some libraries do not fork"
        return unknown(message, *result[:10], why)
    return unknown(
        message, "kb sees no lambda or local function passed to workers; it cannot see attributes of objects"
    )


def unportable(tree: ast.AST) -> Iterator[Tuple[int, str]]:
    """Lambdas and local functions that the code passes to a worker."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inner = {
        node.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node is not function
    }
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        if stays_in_process(call):
            continue
        named = [(word.arg or "", word.value) for word in call.keywords]
        first = [("spawn", call.args[0])] if call.args and ast.unparse(call.func).endswith("mp.spawn") else []
        for name, value in [*first, *[item for item in named if PASSED.fullmatch(item[0])]]:
            if isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in inner):
                yield call.lineno, f"{name} is {'a lambda' if isinstance(value, ast.Lambda) else 'local: ' + value.id}"


def stays_in_process(call: ast.Call) -> bool:
    """Whether the call makes a thread, or a DataLoader without workers: `num_workers` is 0 or missing."""
    name = ast.unparse(call.func).split(".")[-1]
    numbers = [word.value for word in call.keywords if word.arg in ("num_workers", None)]  # None: **options
    no_workers = all(isinstance(number, ast.Constant) and number.value == 0 for number in numbers)
    return "Thread" in name or name == "Timer" or (name == "DataLoader" and no_workers and len(call.args) < 6)


MESSAGES = (
    r"Can't (pickle|get) local object|Can't pickle <function <lambda> at|cannot pickle '(_io\.)?TextIOWrapper'"
    r"|(cannot|can't) pickle '?_thread\.lock|An attempt has been made to start a new process before the"
    r"|Can't get attribute '(collate_of_script' on <module '__main__'|inside' on <module '__mp_main__')"
    r"|module '(__main__' has no attribute 'collate_of_script'|__mp_main__' has no attribute 'inside')"
)
STUCK = "pickle cannot send the worker its function (--set why=...), which only the parent process can see"
IMPORTED = "the function is at the top level of a module, which the worker imports"

PLAIN = Needs(packages={}, memory_mib=256)


def pair(
    name: str,
    control: Callable[..., None],
    treatment: Callable[..., None],
    because: str,
    fix: str,
    needs: Needs = PLAIN,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(control, expect=raised(MESSAGES), because=because, fidelity="cpu"),
        treatment=Arm(treatment, expect=completed(), because=fix, fidelity="cpu"),
        world_size=1,
        needs=needs,
        deadline_s=150 if "torch" in needs.packages else 60,  # a spawned worker imports torch
        expected_s=(0.3, 0.5),
    )


def load_after_deepspeed(ctx: Context, *, fork: bool) -> None:
    """The loader names no start method, and importing DeepSpeed has set one."""
    import deepspeed  # type: ignore[import-not-found]  # noqa: F401
    from torch.utils.data import DataLoader

    if fork:
        multiprocessing.set_start_method("fork", force=True)
    ctx.reached()
    assert list(DataLoader([3, 4], num_workers=1, collate_fn=lambda batch: batch)) == [[3], [4]]


def obstacle(why: str, because: str, fix: str) -> Experiment:
    control, treatment = partial(start_worker, portable=False, why=why), partial(start_worker, portable=True, why=why)
    return pair(why, control, treatment, because, fix)


probe = Probe(
    check=check,
    params={
        "why": Param("str", "why pickle fails: %s" % ", ".join(WHYS), "lambda"),
        "method": Param("str", "start method of the worker: spawn or forkserver", "spawn"),
        "code": Param("path", "your training script, or a folder of Python files, for the check"),
    },
    experiments=(
        pair("python", partial(start_worker, portable=False), partial(start_worker, portable=True), STUCK, IMPORTED),
    ),
    variants=(
        obstacle(
            "local-function", "the function is defined inside another function, so pickle cannot name it", IMPORTED
        ),
        obstacle(
            "lock",
            "the object holds a lock, which pickle refuses",
            "__getstate__ of the object leaves the lock out",
        ),
        obstacle(
            "no-main-guard",
            "the script has no main guard, so the worker runs it again and tries to start a worker",
            "the script has a main guard",
        ),
        obstacle("notebook", "the function is in a notebook cell, which the worker cannot import", IMPORTED),
        obstacle(
            "inside-guard",
            "the function is defined inside the main guard, which the worker does not run",
            "the function is defined in the same script, outside the main guard",
        ),
        pair(
            "open-file",
            partial(send_dataset, leaves_file=False),
            partial(send_dataset, leaves_file=True),
            "the dataset holds an open file, which pickle refuses",
            "__getstate__ of the dataset leaves the file out, and the worker opens it again",
        ),
        Experiment(
            name="global",
            control=Arm(
                partial(set_global, passes_value=False),
                expect=symptom("the worker pads with 0, but the program has set 7"),
                because="the worker imports the module again, so the global has its initial value there",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(set_global, passes_value=True),
                expect=completed(),
                because="functools.partial passes the value to the worker",
                fidelity="cpu",
            ),
            world_size=1,
            needs=PLAIN,
            deadline_s=60,
            expected_s=(0.3, 0.3),
        ),
        pair(
            "fork",
            partial(start_worker, portable=False, why="lambda"),
            partial(start_worker, portable=False, why="lambda", fork=True),
            "the worker is spawned, so pickle must transfer a lambda",
            "the worker is forked, so it gets the lambda without pickle",
        ),
        pair(
            "rank-of-spawn",
            partial(start_worker, portable=True, nested="default"),
            partial(start_worker, portable=True, nested="fork"),
            "in a spawned rank the default start method is spawn, and the rank passes its worker a lambda",
            "the rank forks its worker",
        ),
        pair(
            "dataloader",
            partial(load, portable=False),
            partial(load, portable=True),
            "collate_fn is a lambda, and the worker is spawned",
            "collate_fn is functools.partial of a function that the worker imports",
            needs=Needs(),
        ),
        pair(
            "deepspeed",
            partial(load_after_deepspeed, fork=False),
            partial(load_after_deepspeed, fork=True),
            "DeepSpeed 0.17.1 sets spawn when it is imported, and collate_fn is a lambda",
            "the script sets the start method back to fork after the import",
            needs=Needs(packages={"torch": ">=2.1", "deepspeed": "==0.17.1"}),
        ),
    ),
)
