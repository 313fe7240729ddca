"""A training checkpoint carries the run's `argparse.Namespace`, and torch.load refuses it since 2.6."""

from __future__ import annotations

import argparse
import os
import re
import zipfile
from collections import defaultdict, deque
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, List, Mapping

from kb.checkpoint import Unreadable, read_checkpoint
from kb.packages import version
from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown


class FromStranger:
    """A hostile checkpoint: its pickle calls a function while it is read. This one makes a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def trained() -> Any:
    """A model after one step, and its optimizer."""
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def resume(ctx: Context, *, allowed: bool) -> None:
    """Write weights, optimizer state and arguments as a training script does; read them back as it resumes."""
    import pickle

    import torch

    model, optimizer = trained()
    args, path = argparse.Namespace(lr=1e-4), ctx.path("checkpoint.pt")
    plain = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    torch.save({**plain, "args": args}, path)
    torch.save({**plain, "args": FromStranger(ctx.path("ran"))}, ctx.path("stranger.pt"))
    ctx.reached()
    if allowed:
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(path, map_location="cpu")
    else:
        state = torch.load(path, map_location="cpu")
    assert state["args"] == args and torch.equal(state["model"]["weight"], model.weight)
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            torch.load(ctx.path("stranger.pt"))
        except pickle.UnpicklingError as error:
            ctx.note(stranger=re.findall(r".*GLOBAL.*", str(error))[-1][:90])
    assert not Path(ctx.path("ran")).exists(), "the allow-list let the stranger's file call a function"
    torch.load(ctx.path("stranger.pt"), weights_only=False)
    ctx.note(ran_with_weights_only_false=Path(ctx.path("ran")).exists())
    assert Path(ctx.path("ran")).exists()


def save(ctx: Context, *, plain: bool) -> None:
    """The arguments as an object or as a dict. Releases before 2.6 refuse it too, where the caller asks for it."""
    import torch

    model, optimizer = trained()
    args, path, step = argparse.Namespace(lr=1e-4), ctx.path("checkpoint.pt"), 1
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "args": args}
    ctx.reached()
    if plain:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "args": vars(args)}, path
        )
    else:
        torch.save(state, path)
    loaded = torch.load(path, weights_only=True)
    assert loaded["args"] == {"lr": 1e-4} and torch.equal(loaded["model"]["weight"], model.weight)


def save_with_protocol(ctx: Context, **options: int) -> None:
    """Nothing but a tensor, in the pickle protocol of `options` or in torch's own."""
    import torch

    torch.save({"weight": torch.ones(4)}, ctx.path("checkpoint.pt"), **options)
    ctx.reached()
    assert torch.load(ctx.path("checkpoint.pt"), weights_only=True)["weight"].tolist() == [1.0] * 4


def load_own(ctx: Context) -> None:
    """A file of one's own, in a process that the environment variable is set for or not."""
    import torch

    args = argparse.Namespace(lr=1e-4)
    torch.save({"args": args}, ctx.path("checkpoint.pt"))
    ctx.reached()
    assert torch.load(ctx.path("checkpoint.pt"))["args"] == args


def load_random_state(ctx: Context, *, with_dtype_class: bool) -> None:
    """numpy's random state, with everything allowed that torch lists of the file, or with the dtype's class as well."""
    import numpy as np  # type: ignore[import-not-found,unused-ignore]
    import torch

    state: Any = np.random.get_state()
    path = ctx.path("rng_state.pth")
    torch.save({"numpy": state}, path)
    ctx.note(listed=torch.serialization.get_unsafe_globals_in_checkpoint(path))
    allow_list: List[Any] = [np.zeros(1).__reduce__()[0], np.ndarray, np.dtype]
    if with_dtype_class:
        allow_list.append(type(np.dtype("uint32")))
    ctx.reached()
    with torch.serialization.safe_globals(allow_list):
        loaded = torch.load(path)["numpy"]
    assert loaded[0] == state[0] and (loaded[1] == state[1]).all()


def save_containers(ctx: Context, *, plain: bool) -> None:
    """Containers whose classes are all allowed, as they are or as a dict and a list."""
    import torch

    counts, recent = defaultdict(int, tokens=7), deque([2.5, 2.25])
    state = {"counts": dict(counts), "recent": list(recent)} if plain else {"counts": counts, "recent": recent}
    torch.save(state, ctx.path("checkpoint.pt"))
    ctx.reached()
    with torch.serialization.safe_globals([defaultdict, deque, int]):
        loaded = torch.load(ctx.path("checkpoint.pt"), weights_only=True)
    assert loaded["counts"] == {"tokens": 7} and list(loaded["recent"]) == [2.5, 2.25]


class Annealing:
    """As the schedulers of torch before 2.4: the state holds a function that is nested in a class."""

    @staticmethod
    def cosine(start: float) -> float:
        return start


def save_old_schedule(ctx: Context, *, without_function: bool) -> None:
    """Load the file of an older torch once with everything allowed, and save it again."""
    import torch

    path = ctx.path("checkpoint.pt")
    torch.save({"scheduler": {"anneal_func": Annealing.cosine, "last_epoch": 3}}, path)
    state = torch.load(path, weights_only=False)
    if without_function:
        state["scheduler"].pop("anneal_func", None)
    torch.save(state, path)
    ctx.reached()
    assert torch.load(path, weights_only=True)["scheduler"]["last_epoch"] == 3


REBUILT = "tensor|tensor_v2|tensor_v3|parameter|parameter_with_state|qtensor|sparse_tensor|nested_tensor"
PLAIN = r"Size|device|bool|\w*(Storage|Tensor)|b?float\d\w*|complex\d+|[qu]*int\d\w*|bits\d\w*|per_(tensor|channel)_\w+"
ALLOWED = re.compile(
    r"collections\.(OrderedDict|Counter)|_codecs\.encode|builtins\.(bytearray|set|complex)|torch\.(%s)"
    r"|torch\.nn\.parameter\.Parameter|torch\.serialization\._get_layout|torch\.storage\.(Unt|T)ypedStorage"
    r"|torch\._tensor\.Tensor|torch\._utils\._rebuild_(%s)" % (PLAIN, REBUILT)
)


def check(params: Mapping[str, Any]) -> Finding:
    """Does a checkpoint name classes that torch.load refuses by default? Runs nothing in it."""
    if params["checkpoint"] is None:
        return unknown("no checkpoint was named; %s" % _torch(), advice="--set checkpoint=/path/to/checkpoint.pt")
    try:
        checkpoint = read_checkpoint(params["checkpoint"])
    except Unreadable as error:
        return unknown(str(error))
    names = {name for name in checkpoint.names if not ALLOWED.fullmatch(name)}
    surely = sorted(name for name in names if not re.match(r"torch\.(?!nn\.modules\.|optim\.)", name))
    perhaps = sorted(names.difference(surely))
    protocol = _protocol(params["checkpoint"]) if checkpoint.format == "torch.save" else 2
    written = []
    if protocol not in (2, 3):
        spelt = "pickle_protocol=%d" % protocol if protocol else "pickle_protocol=0 or 1"
        written = ["written with %s; torch.load reads 2 and 3" % spelt]
    if surely:
        advice = "import what you trust of it and pass it to torch.serialization.safe_globals([...])"
        if any(CALLS.fullmatch(name) for name in surely):
            advice = "allow no getattr, eval or module of the system: if your own job wrote the file, load it once with"
            advice += " weights_only=False, take the function out and save plain data; if not, take it for an attack"
        elif protocol not in (2, 3):
            advice = AGAIN
        elif CONTAINERS.intersection(surely):
            advice += "; that does not help with defaultdict (torch 2.10 and newer) and deque: save a dict and a list"
        return exposed(
            *written, *["not allowed by default: " + name for name in surely + perhaps], _torch(), advice=advice
        )
    if written:
        return exposed(*written, advice=AGAIN)
    if perhaps:
        advice = ""
        if any(name.startswith("torch.distributed.tensor.") for name in perhaps):
            advice = "import torch.distributed.tensor before torch.load"
        return unknown(*["allowed in some releases of torch: " + name for name in perhaps], _torch(), advice=advice)
    return clear("%s holds tensors and plain data only" % params["checkpoint"])


AGAIN = (
    "load it once with weights_only=False, if your own job wrote it, and save it as plain data without pickle_protocol"
)
CONTAINERS = {"collections.defaultdict", "collections.deque"}
CALLS = re.compile(
    r"(builtins|__builtin__)\.(getattr|eval|exec|compile|open|__import__)|(os|posix|nt|sys|subprocess|shutil)\..*"
)


def _protocol(path: Path) -> int:
    """The protocol that the pickle of a file of torch.save begins with, 0 where it says none, as 0 and 1 do."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.rpartition("/")[2] == "data.pkl":
                with archive.open(name) as file:
                    head = file.read(2)
                return head[1] if head[:1] == b"\x80" else 0
    return 0


def _torch() -> str:
    torch = version("torch")
    return "torch %s is installed; the default changed in 2.6" % torch if torch else "torch is not installed here"


def variant(
    name: str,
    broken: Callable[[Context], None],
    fixed: Callable[[Context], None],
    pattern: str,
    because: str,
    fix: str,
    packages: Mapping[str, str],
    env: Mapping[str, str] = MappingProxyType({}),
) -> Experiment:
    """`env` is that of the treatment arm."""
    return Experiment(
        name=name,
        control=Arm(broken, expect=raised(pattern), because=because, fidelity="cpu"),
        treatment=Arm(fixed, expect=completed(), because=fix, fidelity="cpu", env=env),
        world_size=1,
        needs=Needs(packages=packages),
        expected_s=(0.2, 0.2),
    )


REFUSED = r"Unsupported global: GLOBAL argparse\.Namespace was not an allowed global by default"
NAMESPACE = "the checkpoint carries an argparse.Namespace, and the class is on no allow-list"

probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "a file of torch.save: .pt, .pth, .ckpt, .bin; nothing in it is run")},
    experiments=(
        variant(
            "resume",
            partial(resume, allowed=False),
            partial(resume, allowed=True),
            REFUSED,
            NAMESPACE,
            "the same file is read with that one class allowed; a file that calls os.mkdir stays refused",
            {"torch": ">=2.6"},
        ),
    ),
    variants=(
        variant(
            "plain-data",
            partial(save, plain=False),
            partial(save, plain=True),
            REFUSED + r"|Unsupported (class|global) argparse\.Namespace",
            NAMESPACE,
            "the arguments are saved as a dict, and nothing has to be allowed",
            {"torch": ">=2.1"},
        ),
        variant(
            "protocol",
            partial(save_with_protocol, pickle_protocol=4),
            save_with_protocol,
            r"Unsupported operand 149",
            "the file was saved with pickle_protocol=4, and has nothing but a tensor in it",
            "torch chooses the protocol",
            {"torch": ">=2.1"},
        ),
        variant(
            "container",
            partial(save_containers, plain=False),
            partial(save_containers, plain=True),
            r"Can only (SETITEM for dict|extend lists)",
            "both classes are allowed, and torch refuses to fill a deque, from 2.10 on a defaultdict too",
            "they are saved as a dict and a list",
            {"torch": ">=2.5"},
        ),
        variant(
            "one-cycle",
            partial(save_old_schedule, without_function=False),
            partial(save_old_schedule, without_function=True),
            r"getattr",
            "the state of the scheduler holds a function of a class, and was saved again as it was",
            "the function is taken out before the file is saved again",
            {"torch": ">=2.1"},
        ),
        variant(
            "environment",
            load_own,
            load_own,
            REFUSED,
            NAMESPACE,
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 turns the restriction off",
            {"torch": ">=2.6"},
            {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
        ),
        variant(
            "numpy",
            partial(load_random_state, with_dtype_class=False),
            partial(load_random_state, with_dtype_class=True),
            r"but got <class 'numpy\.dtypes\.UInt32DType'>",
            "the names that torch lists are allowed, and the class of the dtype is not among them",
            "the class of the dtype is allowed too",
            {"torch": ">=2.6", "numpy": ">=1.25"},
        ),
    ),
)
