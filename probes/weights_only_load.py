"""A training checkpoint contains the run's `argparse.Namespace`, which torch.load refuses since 2.6."""

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
    """A hostile object: its pickle calls a function when it is loaded. This one creates a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def train_one_step() -> Any:
    """A model after one step, and its optimizer."""
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def resume(ctx: Context, *, allowed: bool) -> None:
    """Saves weights, optimizer state and arguments as a training script does, and loads them as if it resumed."""
    import pickle

    import torch

    model, optimizer = train_one_step()
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
    assert not Path(ctx.path("ran")).exists(), (
        "the hostile file called a function although the allow-list does not contain it"
    )
    torch.load(ctx.path("stranger.pt"), weights_only=False)
    ctx.note(ran_with_weights_only_false=Path(ctx.path("ran")).exists())
    assert Path(ctx.path("ran")).exists()


def save(ctx: Context, *, plain: bool) -> None:
    """Saves the arguments as an object or as a dict. weights_only=True refuses the object before 2.6 too."""
    import torch

    model, optimizer = train_one_step()
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
    """Saves a single tensor, with the pickle protocol of `options` or with torch's default."""
    import torch

    torch.save({"weight": torch.ones(4)}, ctx.path("checkpoint.pt"), **options)
    ctx.reached()
    assert torch.load(ctx.path("checkpoint.pt"), weights_only=True)["weight"].tolist() == [1.0] * 4


def load_trusted(ctx: Context) -> None:
    """Loads a file that this process wrote, with or without the environment variable."""
    import torch

    args = argparse.Namespace(lr=1e-4)
    torch.save({"args": args}, ctx.path("checkpoint.pt"))
    ctx.reached()
    assert torch.load(ctx.path("checkpoint.pt"))["args"] == args


def load_random_state(ctx: Context, *, with_dtype_class: bool) -> None:
    """Loads numpy's random state. The allow-list has all names that torch lists, with or without the dtype's class."""
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
    """Saves a defaultdict and a deque, whose classes are allowed, as they are or as a dict and a list."""
    import torch

    counts, recent = defaultdict(int, tokens=7), deque([2.5, 2.25])
    state = {"counts": dict(counts), "recent": list(recent)} if plain else {"counts": counts, "recent": recent}
    torch.save(state, ctx.path("checkpoint.pt"))
    ctx.reached()
    with torch.serialization.safe_globals([defaultdict, deque, int]):
        loaded = torch.load(ctx.path("checkpoint.pt"), weights_only=True)
    assert loaded["counts"] == {"tokens": 7} and list(loaded["recent"]) == [2.5, 2.25]


class Annealing:
    """Like the schedulers of torch before 2.4, whose state contains a function of a class."""

    @staticmethod
    def cosine(start: float) -> float:
        return start


def save_old_schedule(ctx: Context, *, without_function: bool) -> None:
    """Loads the file of an older torch once with weights_only=False, and saves it again."""
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
    """Does a checkpoint name classes that torch.load refuses by default? The check runs no code of the file."""
    if params["checkpoint"] is None:
        return unknown(
            "`checkpoint` is not set; %s" % _installed_torch(), advice="--set checkpoint=/path/to/checkpoint.pt"
        )
    try:
        checkpoint = read_checkpoint(params["checkpoint"])
    except Unreadable as error:
        return unknown(str(error))
    names = {name for name in checkpoint.names if not ALLOWED.fullmatch(name)}
    refused = sorted(name for name in names if not re.match(r"torch\.(?!nn\.modules\.|optim\.)", name))
    doubtful = sorted(names.difference(refused))
    protocol = _protocol(params["checkpoint"]) if checkpoint.format == "torch.save" else 2
    written = []
    if protocol not in (2, 3):
        option = "pickle_protocol=%d" % protocol if protocol else "pickle_protocol=0 or 1"
        written = ["torch.save wrote the file with %s; torch.load reads only 2 and 3" % option]
    if refused:
        advice = "import the classes that you trust, and pass them to torch.serialization.safe_globals([...])"
        if any(CALLS.fullmatch(name) for name in refused):
            advice = "do not allow getattr, eval or system modules: if your own job wrote the file, load it once with"
            advice += " weights_only=False, remove the function and save plain data; if not, treat it as an attack"
        elif protocol not in (2, 3):
            advice = SAVE_AGAIN
        elif CONTAINERS.intersection(refused):
            advice += "; for defaultdict (torch 2.10 and newer) and deque this does not help: save a dict and a list"
        return exposed(
            *written,
            *["torch.load refuses by default: " + name for name in refused + doubtful],
            _installed_torch(),
            advice=advice,
        )
    if written:
        return exposed(*written, advice=SAVE_AGAIN)
    if doubtful:
        advice = ""
        if any(name.startswith("torch.distributed.tensor.") for name in doubtful):
            advice = "import torch.distributed.tensor before torch.load"
        return unknown(
            *["only some releases of torch allow: " + name for name in doubtful], _installed_torch(), advice=advice
        )
    return clear("%s contains only tensors and plain data" % params["checkpoint"])


SAVE_AGAIN = "if your own job wrote the file, load it once with weights_only=False and save it without pickle_protocol"
CONTAINERS = {"collections.defaultdict", "collections.deque"}
CALLS = re.compile(
    r"(builtins|__builtin__)\.(getattr|eval|exec|compile|open|__import__)|(os|posix|nt|sys|subprocess|shutil)\..*"
)


def _protocol(path: Path) -> int:
    """The pickle protocol of a file of torch.save; 0 if the pickle names none, as in protocols 0 and 1."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.rpartition("/")[2] == "data.pkl":
                with archive.open(name) as file:
                    head = file.read(2)
                return head[1] if head[:1] == b"\x80" else 0
    return 0


def _installed_torch() -> str:
    torch = version("torch")
    return (
        "torch %s is installed; the default changed in 2.6" % torch
        if torch
        else "torch is not installed in this interpreter"
    )


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
    """`env` is the environment of the treatment arm."""
    return Experiment(
        name=name,
        control=Arm(broken, expect=raised(pattern), because=because, fidelity="cpu"),
        treatment=Arm(fixed, expect=completed(), because=fix, fidelity="cpu", env=env),
        world_size=1,
        needs=Needs(packages=packages),
        expected_s=(0.2, 0.2),
    )


REFUSED = r"Unsupported global: GLOBAL argparse\.Namespace was not an allowed global by default"
NAMESPACE = "the checkpoint contains an argparse.Namespace, and no allow-list names that class"

probe = Probe(
    check=check,
    params={
        "checkpoint": Param("path", "a file of torch.save: .pt, .pth, .ckpt, .bin; the check runs no code of the file")
    },
    experiments=(
        variant(
            "resume",
            partial(resume, allowed=False),
            partial(resume, allowed=True),
            REFUSED,
            NAMESPACE,
            "the allow-list names this class; torch.load still refuses a file that calls os.mkdir",
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
            "the arguments are saved as a dict, so torch.load needs no allow-list",
            {"torch": ">=2.1"},
        ),
        variant(
            "protocol",
            partial(save_with_protocol, pickle_protocol=4),
            save_with_protocol,
            r"Unsupported operand 149",
            "the file contains only a tensor, but was saved with pickle_protocol=4",
            "torch.save chooses the pickle protocol itself",
            {"torch": ">=2.1"},
        ),
        variant(
            "container",
            partial(save_containers, plain=False),
            partial(save_containers, plain=True),
            r"Can only (SETITEM for dict|extend lists)",
            "both classes are allowed, but torch refuses to fill a deque, and since 2.10 a defaultdict",
            "the containers are saved as a dict and a list",
            {"torch": ">=2.5"},
        ),
        variant(
            "one-cycle",
            partial(save_old_schedule, without_function=False),
            partial(save_old_schedule, without_function=True),
            r"getattr",
            "the file is saved again with the function of a class in the scheduler's state",
            "the function is removed from the state before the file is saved again",
            {"torch": ">=2.1"},
        ),
        variant(
            "environment",
            load_trusted,
            load_trusted,
            REFUSED,
            NAMESPACE,
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 turns off weights_only",
            {"torch": ">=2.6"},
            {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
        ),
        variant(
            "numpy",
            partial(load_random_state, with_dtype_class=False),
            partial(load_random_state, with_dtype_class=True),
            r"but got <class 'numpy\.dtypes\.UInt32DType'>",
            "the names that torch lists are allowed, but the class of the dtype is not among them",
            "the class of the dtype is allowed as well",
            {"torch": ">=2.6", "numpy": ">=1.25"},
        ),
    ),
)
