"""What a model wrapped by DDP and torch.compile has saved is loaded into the bare model, which has shorter names."""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, Mapping

from kb.checkpoint import Unreadable, read_checkpoint
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Param,
    Probe,
    Unavailable,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}


def plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def rename(state: Mapping[str, Any], model: Any) -> Dict[str, Any]:
    """`state` under the names that `model` has; a name without a partner stays, so that a strict load reports it."""
    own = {plain(name): name for name in model.state_dict()}
    renamed = {own.get(plain(name), name): tensor for name, tensor in state.items()}
    assert len(renamed) == len(state), "two names became one"
    return renamed


def resume(ctx: Context, *, matching_names: bool) -> None:
    """Rank 0 saves the compiled DDP model; every rank of the next job loads the file into a bare model."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    def build() -> Any:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    ctx.init_process_group(timeout_s=10)
    bare = build()
    try:
        # Nothing is compiled before the first call; the names are the same with every backend, inductor loads slowly.
        model: Any = torch.compile(DistributedDataParallel(bare), backend="eager")
    except RuntimeError as error:
        raise Unavailable("torch.compile does not work here: %s" % error) from error
    if ctx.rank == 0:
        torch.save(model.state_dict(), ctx.path("model.pt"))
    ctx.reached()
    state = torch.load(ctx.path("model.pt"))
    trained, fresh = bare.state_dict(), build()
    ctx.note(first_name=next(iter(state)), **silent_load(fresh, state, trained))
    fresh.load_state_dict(rename(state, fresh) if matching_names else state)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in fresh.state_dict().items())
    model.load_state_dict(rename(trained, model))  # the other way round: plain names into the wrapped model
    fresh.load_state_dict(bare.state_dict())  # and what the inner module saves needs no renaming


def silent_load(fresh: Any, state: Mapping[str, Any], trained: Mapping[str, Any]) -> Dict[str, str]:
    """What strict=False does with the file: how many weights arrive, how many names it lists as missing."""
    answer = fresh.load_state_dict(state, strict=False)
    arrived = sum(bool((tensor == trained[name]).all()) for name, tensor in fresh.state_dict().items())
    counts = (arrived, len(trained), len(answer.missing_keys), len(answer.unexpected_keys))
    return {"strict_false": "%d of %d tensors loaded, %d missing, %d unexpected, no error" % counts}


def check(params: Mapping[str, Any]) -> Finding:
    """Do the names in a checkpoint contain a wrapper's prefix? Runs nothing in the file."""
    path = params["checkpoint"]
    if path is None:
        return unknown("no checkpoint was named", advice="--set checkpoint=/path/to/model.pt or .safetensors")
    try:
        names = [tensor.name for tensor in read_checkpoint(path).tensors]
    except Unreadable as error:
        return unknown(str(error))
    wrapped = [name for name in names if plain(name) != name]
    if wrapped:
        message = "%d names of %s carry a wrapper: %s" % (len(wrapped), path.name, ", ".join(wrapped[:3]))
        return exposed(message, advice="load it under the names that your model has, never with strict=False")
    if not names:
        return unknown("no tensors were found in %s" % path)
    return clear("none of %d names of %s carries a wrapper, for instance %s" % (len(names), path.name, names[0]))


probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "a file of torch.save or safetensors; nothing in it is run")},
    experiments=(
        Experiment(
            name="ddp-compile",
            control=Arm(
                partial(resume, matching_names=False),
                expect=raised(r'Unexpected key\(s\) in state_dict: "(_orig_mod\.)?module\.'),
                because="the file has the names of torch.compile(DDP(model)), the model that loads it is bare",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(resume, matching_names=True),
                expect=completed(),
                because="the same file is loaded, strictly, under the names that the model has",
                fidelity="cpu",
            ),
            deadline_s=40,
            expected_s=(1.7, 2.0),
        ),
    ),
)
