"""Tied weights go into a format without shared storage: under both names, or once and tied again when loaded."""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from kb.checkpoint import Unreadable, read_checkpoint
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

ROWS, WIDTH = 512, 32


def build() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(ROWS, WIDTH), "lm_head": nn.Linear(WIDTH, ROWS, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    return model


def reload(ctx: Context, *, single_name: bool) -> None:
    """Each name is written with its own bytes, as every format without storages does; then loaded with assign=True."""
    import torch

    model = build()
    own: Dict[str, Any] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(own, ctx.path("two names.pt"))
    del own["lm_head.weight"]
    torch.save(own, ctx.path("one name.pt"))
    sizes = [os.path.getsize(ctx.path(name + ".pt")) for name in ("two names", "one name")]
    ctx.reached()
    fresh = build()
    if single_name:
        missing = fresh.load_state_dict(torch.load(ctx.path("one name.pt")), strict=False, assign=True).missing_keys
        assert missing == ["lm_head.weight"], missing
        fresh["lm_head"].weight = fresh["embed"].weight  # tied again, as the model's own code ties it
    else:
        fresh.load_state_dict(torch.load(ctx.path("two names.pt")), assign=True)
    assert torch.equal(fresh["lm_head"].weight, model["lm_head"].weight)
    parameters = len(list(fresh.parameters()))
    fresh["lm_head"](fresh["embed"](torch.tensor([1, 2]))).sum().backward()
    torch.optim.SGD(fresh.parameters(), lr=0.1).step()
    apart = (fresh["lm_head"].weight - fresh["embed"].weight).abs().max().item()
    message = "after one step they are %.3f apart; %d bytes with two names, %d with one" % (apart, *sizes)
    if apart:
        raise Symptom("tied weights are two parameters after loading: %s" % message)
    assert parameters == 1, parameters


def save_safetensors(ctx: Context, *, single_name: bool) -> None:
    import torch

    library: Any = importlib.import_module("safetensors.torch")
    model, fresh, path = build(), build(), ctx.path("model.safetensors")
    ctx.reached()
    if single_name:
        library.save_model(model, path)
        library.load_model(fresh, path)
    else:
        library.save_file(model.state_dict(), path)
        fresh.load_state_dict(library.load_file(path))
    assert torch.equal(fresh["lm_head"].weight, model["embed"].weight)
    assert fresh["lm_head"].weight is fresh["embed"].weight


def save_accelerate(ctx: Context, *, own_storage: bool) -> None:
    """Two parameters that are halves of one buffer, as ZeRO, FSDP and fused layers leave them. They share nothing."""
    import torch
    from torch import nn

    accelerate: Any = importlib.import_module("accelerate")
    library: Any = importlib.import_module("safetensors.torch")
    buffer = torch.arange(16.0).reshape(4, 4)
    model = nn.ParameterDict({"q_proj": nn.Parameter(buffer[:2]), "k_proj": nn.Parameter(buffer[2:])})
    if own_storage:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # else it waits for a launcher
        os.environ.pop(name, None)
    accelerator = accelerate.Accelerator(cpu=True)
    ctx.reached()
    accelerator.save_model(model, ctx.path("folder"))
    written = library.load_file(ctx.path("folder/model.safetensors"))
    lost = sorted(set(model.state_dict()) - set(written))
    if lost:
        raise Symptom("Removed shared tensor {%s} while saving, no error: its values are in no file" % repr(lost)[1:-1])
    assert all(torch.equal(written[name], tensor) for name, tensor in model.state_dict().items())


def check(params: Mapping[str, Any]) -> Finding:
    """Do tensors of a torch.save file cover the same bytes of a storage, under different names?"""
    path: Optional[Path] = params["checkpoint"]
    if path is None:
        return unknown("no checkpoint was named", advice="--set checkpoint=/path/to/pytorch_model.bin")
    try:
        read = read_checkpoint(path)
    except Unreadable as error:
        return unknown(str(error))
    if read.format == "safetensors":
        return unknown("a safetensors file: shared tensors cannot be in it", "whether two are equal was not compared")
    by_storage: Dict[str, List[Tuple[int, int, str]]] = {}
    for tensor in read.tensors:
        if tensor.stop > tensor.start:
            by_storage.setdefault(tensor.storage, []).append((tensor.start, tensor.stop, tensor.name))
    result: List[str] = []
    views = 0
    for inside in by_storage.values():
        inside.sort()
        views += len(inside) > 1
        for index, (begin, end, other) in enumerate(inside[1:]):
            start, stop, name = inside[index]
            if begin < stop:
                same = "the same tensor" if (start, stop) == (begin, end) else "overlapping tensors"
                result.append("%s and %s are %s" % (name, other, same))
    if result:
        advice = "save one of each pair and tie them after loading: safetensors.torch.save_model, load_model"
        return exposed("safetensors.torch.save_file would refuse these:", *result[:6], advice=advice)
    if views:
        return exposed(
            "%d storages hold several tensors side by side, none overlap: save_file writes them all" % views,
            "code that looks at storages only, accelerate's save_model for one, drops all but one of each",
            advice="clone them: {name: tensor.clone() for name, tensor in state.items()}",
        )
    return clear("%d tensors, each in a storage of its own" % len(read.tensors))


TIED = "the two names of tied weights are written and loaded as two tensors"
ONCE = "one name is written, and the weights are tied again after loading"
REFUSED = r"Some tensors share memory, this will lead to duplicate memory on disk"
STANDS_FOR = "safetensors, which refuses to write what the control arm writes"

probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "a file of torch.save: .pt, .pth, .bin; nothing in it is run")},
    experiments=(
        Experiment(
            name="torch",
            control=Arm(
                partial(reload, single_name=False),
                expect=symptom(r"tied weights are two parameters after loading"),
                because=TIED,
                fidelity="stand-in",
                stands_for=STANDS_FOR,
            ),
            treatment=Arm(
                partial(reload, single_name=True),
                expect=completed(),
                because=ONCE,
                fidelity="stand-in",
                stands_for=STANDS_FOR,
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1"}, memory_mib=512),
            expected_s=(0.1, 0.1),
        ),
    ),
    variants=(
        Experiment(
            name="safetensors",
            control=Arm(
                partial(save_safetensors, single_name=False), expect=raised(REFUSED), because=TIED, fidelity="cpu"
            ),
            treatment=Arm(
                partial(save_safetensors, single_name=True), expect=completed(), because=ONCE, fidelity="cpu"
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1", "safetensors": ">=0.3"}, memory_mib=512),
            expected_s=(0.2, 0.2),
        ),
        Experiment(
            name="accelerate",
            control=Arm(
                partial(save_accelerate, own_storage=False),
                expect=symptom(r"Removed shared tensor \{'[qk]_proj'\} while saving"),
                because="two parameters lie side by side in one storage and are taken for one",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(save_accelerate, own_storage=True),
                expect=completed(),
                because="each parameter has a storage of its own",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1", "safetensors": ">=0.3", "accelerate": ">=0.25"}),
            deadline_s=60,
            expected_s=(5, 5),
        ),
    ),
)
