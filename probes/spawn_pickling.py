"""A worker starts a fresh interpreter instead of being forked, and pickle cannot transfer its function.

`why` chooses the obstacle. The job is a script of its own, because the main guard and a notebook cell are matters of
the script; the mechanism is Python's, so no torch is needed, and the variant shows it in a DataLoader.
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
    """A data set over an open file, as over an LMDB environment: each worker opens its own."""

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

def rank(batch):  # as mp.spawn starts one: it starts a worker of its own, by what is the default there
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
# why: what is handed over and how main is called, broken and mended
WHYS = {
    "lambda": ((LAMBDA, GUARDED), (PARTIAL, GUARDED)),
    "local-function": (("local_collate", GUARDED), ("collate_of_script", GUARDED)),
    "lock": (("helpers.Counting()", GUARDED), ("helpers.CountingWithoutItsLock()", GUARDED)),
    "no-main-guard": ((PARTIAL, "main()"), (PARTIAL, GUARDED)),
    "notebook": (("collate_of_script", "main()"), (PARTIAL, "main()")),
    "inside-guard": (("inside", INSIDE), ("collate_of_script", INSIDE)),
}


def write_helpers(ctx: Context) -> None:
    """The module that a worker imports: the functions above, and what goes wrong with them."""
    text = "\n\n".join([IMPORTS, inspect.getsource(collate), inspect.getsource(Records), HELPERS])
    (ctx.dir / "helpers.py").write_text(text)


def start_worker(ctx: Context, *, portable: bool, why: str = "", fork: bool = False, nested: str = "") -> None:
    """One script, which starts one worker. With `nested` this worker starts another one."""
    why = why or ctx.params["why"]
    assert why in WHYS, "why is one of %s" % ", ".join(WHYS)
    function, call = WHYS[why][portable]
    method = "fork" if fork else ctx.params["method"]
    if nested:
        function, call = "rank", GUARDED
    values = {"folder": str(ctx.dir), "method": method, "function": function, "call": call}
    text = SCRIPT.format(nested=None if nested == "default" else nested, **values)
    (ctx.dir / "train.py").write_text(text)
    write_helpers(ctx)
    ctx.reached()
    source = ["-c", text] if why == "notebook" else ["train.py"]  # a cell is no file that a worker could import
    ended = subprocess.run([sys.executable, *source], stderr=subprocess.PIPE, text=True, timeout=30)
    if ended.returncode:
        raise RuntimeError(ended.stderr[-3000:])


def hand_over(ctx: Context, *, leaves_file: bool) -> None:
    """A data set with an open file goes to a worker."""
    write_helpers(ctx)
    sys.path.insert(0, str(ctx.dir))  # a spawned worker imports it from there
    helpers: Any = importlib.import_module("helpers")
    (ctx.dir / "records.txt").write_text("a\nb\n")
    records = (helpers.Records if leaves_file else helpers.CarelessRecords)(ctx.path("records.txt"))
    workers = multiprocessing.get_context(ctx.params["method"])
    queue: Any = workers.Queue()
    worker = workers.Process(target=helpers.read, args=(records, queue))
    ctx.reached()
    worker.start()
    assert queue.get(timeout=20) == ["b\n", "a\n"]
    worker.join(10)


def load(ctx: Context, *, portable: bool, method: str = "") -> None:
    """The same in torch; the worker of the treatment has to import torch afresh."""
    from torch.utils.data import DataLoader

    write_helpers(ctx)
    sys.path.insert(0, str(ctx.dir))  # a spawned worker imports it from there
    collate = importlib.import_module("helpers").collate
    data: Any = [[1], [2, 3]]
    multiprocessing.set_start_method(method or ctx.params["method"], force=True)
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


def set_global(ctx: Context, *, handed_over: bool) -> None:
    """The program sets a global of the module that the worker imports; `handed_over`: the function gets the value."""
    (ctx.dir / "padding.py").write_text(PADDING)
    sys.path.insert(0, str(ctx.dir))  # a spawned worker imports it from there
    padding: Any = importlib.import_module("padding")
    padding.PAD = 7
    ctx.reached()
    with multiprocessing.get_context(ctx.params["method"]).Pool(1) as workers:
        result = workers.apply(functools.partial(padding.padded, pad=7) if handed_over else padding.padded, ([1],))
    if result != [1, 7]:
        raise Symptom("the worker pads with %d, the program has set 7" % result[1])


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
        why = "forked workers get these without pickle; Python 3.14, or a library that spawns, does not fork"
        return unknown(message, *result[:10], why)
    return unknown(
        message, "no lambda or local function is seen handed to workers there; attributes of objects cannot be seen"
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
        if stays_in_process(call):
            continue
        named = [(word.arg or "", word.value) for word in call.keywords]
        first = [("spawn", call.args[0])] if call.args and ast.unparse(call.func).endswith("mp.spawn") else []
        for name, value in [*first, *[item for item in named if HANDED.fullmatch(item[0])]]:
            if isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in inner):
                yield call.lineno, f"{name} is {'a lambda' if isinstance(value, ast.Lambda) else 'local: ' + value.id}"


def stays_in_process(call: ast.Call) -> bool:
    """A thread, or a DataLoader without workers, which is one without `num_workers`."""
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
STUCK = "what the worker is to run lives where only its parent can see it"
CARRIED = "the same function at the top level of a module that the worker imports"

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
    """A loader that asks for no start method: DeepSpeed's import has chosen one."""
    import deepspeed  # type: ignore[import-not-found]  # noqa: F401
    from torch.utils.data import DataLoader

    if fork:
        multiprocessing.set_start_method("fork", force=True)
    ctx.reached()
    assert list(DataLoader([3, 4], num_workers=1, collate_fn=lambda batch: batch)) == [[3], [4]]


def plain(name: str, why: str, because: str, fix: str) -> Experiment:
    control, treatment = partial(start_worker, portable=False, why=why), partial(start_worker, portable=True, why=why)
    return pair(name, control, treatment, because, fix)


probe = Probe(
    check=check,
    params={
        "why": Param("str", "what is in the way: %s" % ", ".join(WHYS), "lambda"),
        "method": Param("str", "start method: spawn or forkserver", "spawn"),
        "code": Param("path", "your training script, or a folder of Python files, to look for such functions"),
    },
    experiments=(
        pair("python", partial(start_worker, portable=False), partial(start_worker, portable=True), STUCK, CARRIED),
    ),
    variants=(
        plain("local-function", "local-function", "the function is defined inside another", CARRIED),
        plain("lock", "lock", "the object holds a lock", "it leaves the lock behind"),
        plain("no-main-guard", "no-main-guard", "the worker runs the script again", "the script has a main guard"),
        plain("notebook", "notebook", "the function is in a cell", CARRIED),
        plain(
            "inside-guard",
            "inside-guard",
            "the function is defined inside the main guard",
            "a function of the same script, defined outside it",
        ),
        pair(
            "open-file",
            partial(hand_over, leaves_file=False),
            partial(hand_over, leaves_file=True),
            "the data set holds an open file",
            "the file is left behind, and opened anew in the worker",
        ),
        Experiment(
            name="global",
            control=Arm(
                partial(set_global, handed_over=False),
                expect=symptom("the worker pads with 0, the program has set 7"),
                because="the worker imports the module anew, whose global has its first value there",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(set_global, handed_over=True),
                expect=completed(),
                because="functools.partial hands the value over",
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
            "a lambda goes to a spawned worker",
            "the worker is forked",
        ),
        pair(
            "rank-of-spawn",
            partial(start_worker, portable=True, nested="default"),
            partial(start_worker, portable=True, nested="fork"),
            "a rank that was spawned starts a worker by its default, which is spawn",
            "its worker is forked",
        ),
        pair(
            "dataloader",
            partial(load, portable=False),
            partial(load, portable=True),
            "collate_fn is a lambda and the worker is spawned",
            "collate_fn is a function of a module with functools.partial",
            needs=Needs(),
        ),
        pair(
            "deepspeed",
            partial(load_after_deepspeed, fork=False),
            partial(load_after_deepspeed, fork=True),
            "DeepSpeed 0.17.1 sets spawn when it is imported, and collate_fn is a lambda",
            "the start method is set back after the import",
            needs=Needs(packages={"torch": ">=2.1", "deepspeed": "==0.17.1"}),
        ),
    ),
)
