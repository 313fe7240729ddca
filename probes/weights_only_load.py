"""A training checkpoint carries the run's `argparse.Namespace`, and torch.load refuses it since 2.6."""

from __future__ import annotations

import argparse
import os
import pickletools
import re
import time
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, List, Mapping, Set

from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown


class FromStranger:
    """What a hostile checkpoint does: the pickle calls a function while it is read. This one makes a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def resume(ctx: Context, *, allow_list: List[Any]) -> None:
    """Write weights, optimizer state and arguments as a training script does; read them back as it resumes."""
    import pickle

    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    plain = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    args = argparse.Namespace(lr=1e-4)
    torch.save({**plain, "args": args}, ctx.path("checkpoint.pt"))
    torch.save({**plain, "args": vars(args)}, ctx.path("plain.pt"))
    torch.save({**plain, "args": FromStranger(ctx.path("ran"))}, ctx.path("stranger.pt"))
    ctx.reached()
    with torch.serialization.safe_globals(allow_list):
        loaded = torch.load(ctx.path("checkpoint.pt"))
        assert loaded["args"] == args and torch.equal(loaded["model"]["weight"], model.weight)
        try:
            torch.load(ctx.path("stranger.pt"))
        except pickle.UnpicklingError as error:
            ctx.note(stranger=re.findall(r".*GLOBAL.*", str(error))[-1][:90])
        assert not Path(ctx.path("ran")).exists(), "the allow-list let the stranger's file call a function"
    assert torch.load(ctx.path("plain.pt"))["args"] == vars(args)  # nothing to allow: a dict instead of the class
    torch.load(ctx.path("stranger.pt"), weights_only=False)
    ctx.note(ran_with_weights_only_false=Path(ctx.path("ran")).exists())
    assert Path(ctx.path("ran")).exists()


REBUILT = "tensor|tensor_v2|tensor_v3|parameter|parameter_with_state|qtensor|sparse_tensor|nested_tensor"
ALLOWED = re.compile(
    r"collections\.(OrderedDict|Counter)|_codecs\.encode|builtins\.(bytearray|set|complex)|torch\.\w+"
    r"|torch\.nn\.parameter\.Parameter|torch\.serialization\._get_layout|torch\.storage\.(Unt|T)ypedStorage"
    r"|torch\._tensor\.Tensor|torch\._utils\._rebuild_(%s)" % REBUILT
)
LARGEST = 32 << 20  # bytes of pickle that are read
SECONDS = 2


def check(params: Mapping[str, Any]) -> Finding:
    """Does a checkpoint name classes that torch.load refuses by default? Nothing in it is run."""
    path = params["checkpoint"]
    if path is None:
        return unknown("no checkpoint was named; %s" % _torch(), advice="--set checkpoint=/path/to/checkpoint.pt")
    try:
        if not path.is_file():
            return unknown("%s is not a file" % path)
        with path.open("rb") as file:
            head = file.read(64)
        if not head.startswith(b"PK\x03\x04"):
            advice = "a git-lfs pointer or a web page was downloaded instead" if head[:1] in (b"v", b"<") else ""
            return unknown("%s is no archive of torch.save; it begins with %r" % (path, head[:40]), advice=advice)
        with zipfile.ZipFile(path) as archive:
            (name,) = [one for one in archive.namelist() if one.split("/")[-1] == "data.pkl"]
            with archive.open(name) as file:
                pickled = file.read(LARGEST + 1)
        names = _names(pickled)
    except (OSError, ValueError, zipfile.BadZipFile, TimeoutError) as error:
        return unknown("%s cannot be judged: %s" % (path, error))
    surely = sorted(name for name in names if not re.match(r"torch\.(?!nn\.modules\.|optim\.)", name))
    perhaps = sorted(names.difference(surely))
    if surely:
        advice = "import what you trust of it and pass it to torch.serialization.safe_globals([...])"
        return exposed(*["not allowed by default: " + name for name in surely + perhaps], _torch(), advice=advice)
    if perhaps:
        return unknown(*["allowed in some releases of torch: " + name for name in perhaps], _torch())
    return clear("%s holds tensors and plain data only" % path)


def _names(pickled: bytes) -> Set[str]:
    """Every class and function the pickle names that torch does not allow by default."""
    found, end = set(), time.monotonic() + SECONDS
    if len(pickled) > LARGEST:
        raise ValueError("its data.pkl is larger than %d MiB" % (LARGEST >> 20))
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "PROTO" and argument != 2:
            raise ValueError("pickle protocol %s: only 2, which torch.save writes, is read here" % argument)
        if operation.name == "GLOBAL":
            module, name = str(argument).split(" ", 1)
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
            found.add("%s.%s" % (module, name))
        if time.monotonic() > end:
            raise TimeoutError("reading its structure takes more than %d s" % SECONDS)
    return {name for name in found if not ALLOWED.fullmatch(name)}


def _torch() -> str:
    try:
        return "torch %s is installed; the default changed in 2.6" % metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "torch is not installed here"


probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "a file of torch.save: .pt, .pth, .ckpt, .bin; nothing in it is run")},
    experiments=(
        Experiment(
            name="resume",
            control=Arm(
                partial(resume, allow_list=[]),
                expect=raised(r"Unsupported global: GLOBAL argparse\.Namespace was not an allowed global by default"),
                because="the checkpoint carries an argparse.Namespace, and the class is on no allow-list",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(resume, allow_list=[argparse.Namespace]),
                expect=completed(),
                because="the same file is read with that one class allowed; a file that calls os.mkdir stays refused",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.6"}),
            expected_s=(0.1, 0.1),
        ),
    ),
)
