"""A file saved from a model that DDP and torch.compile wrap is loaded into the bare model, which has shorter names."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from types import MappingProxyType
from typing import Any, Callable, Mapping

from kb.checkpoint import Unreadable, read_checkpoint
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    Unavailable,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}


def plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def load(model: Any, state: Mapping[str, Any]) -> None:
    """Loads strictly, under the names that `model` has. torch reports a name that the model does not have."""
    own = {plain(name): name for name in model.state_dict()}
    renamed = {own.get(plain(name), name): tensor for name, tensor in state.items()}
    assert len(renamed) == len(state)
    model.load_state_dict(renamed)


def load_as_it_is(model: Any, state: Mapping[str, Any]) -> None:
    model.load_state_dict(state)


def load_what_fits(model: Any, state: Mapping[str, Any]) -> None:
    """Loads with strict=False, which people try and which raises no error."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    answer = model.load_state_dict(state, strict=False)
    loaded = sum(not bool((tensor == before[name]).all()) for name, tensor in model.state_dict().items())
    counts = (loaded, len(before), len(answer.missing_keys), len(answer.unexpected_keys))
    if loaded < len(before):
        raise Symptom("%d of %d tensors loaded, %d missing, %d unexpected, no error" % counts)


def load_without_module(model: Any, state: Mapping[str, Any]) -> None:
    """Removes the prefix with torch's own function, which people try and which only works for DDP."""
    from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

    cut = dict(state)
    consume_prefix_in_state_dict_if_present(cut, "module.")
    model.load_state_dict(cut)


def load_replaced(model: Any, state: Mapping[str, Any]) -> None:
    """Removes the prefix with replace(), which people try and which also changes the middle of names."""
    cut = {name.replace("module.", ""): tensor for name, tensor in state.items()}
    lost = sorted(set(cut) - set(model.state_dict()))
    if lost:
        raise Symptom("%d of %d names fit, not %s" % (len(cut) - len(lost), len(cut), ", ".join(lost)))


def build() -> Any:
    from torch import nn

    return nn.Sequential(OrderedDict(encoder=nn.Linear(4, 4), submodule=nn.Linear(4, 4)))


def wrap(ctx: Context, bare: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=10)
    return DistributedDataParallel(bare)


def compile_model(torch: Any, model: Any) -> Any:
    """Wraps the model with a backend that loads quickly. Every backend gives the same names."""
    try:
        return torch.compile(model, backend="eager")
    except RuntimeError as error:
        raise Unavailable("torch.compile does not work on this machine: %s" % error) from error


def resume(ctx: Context, *, loads: Callable[[Any, Mapping[str, Any]], None], compiles: bool = True) -> None:
    """Rank 0 saves the DDP model, compiled or not; every rank then loads the file into a bare model."""
    import torch

    bare = build()
    model = compile_model(torch, wrap(ctx, bare)) if compiles else wrap(ctx, bare)
    if ctx.rank == 0:
        torch.save(model.state_dict(), ctx.path("model.pt"))
    ctx.reached()
    state = torch.load(ctx.path("model.pt"))
    trained, fresh = bare.state_dict(), build()
    ctx.note(first_name=next(iter(state)))
    loads(fresh, state)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in fresh.state_dict().items())
    load(model, trained)  # the reverse: plain names into the wrapped model


def save(ctx: Context, *, saves_bare: bool) -> None:
    """Saves the wrapped model, or the bare model inside it, and loads the unchanged file into a bare model."""
    import torch

    path = ctx.path("model-%d.pt" % ctx.rank)
    bare = build()
    model = wrap(ctx, bare)
    ctx.reached()
    if saves_bare:
        torch.save(bare.state_dict(), path)
    else:
        torch.save(model.state_dict(), path)
    load_as_it_is(build(), torch.load(path))


def save_compiled(ctx: Context, *, in_place: bool) -> None:
    """torch.compile wraps the model in a module; the method `compile` does not."""
    import torch

    bare = model = build()
    ctx.reached()
    if in_place:
        bare.compile(backend="eager")
    else:
        model = compile_model(torch, bare)
    load_as_it_is(build(), model.state_dict())


def save_parameters(ctx: Context, *, own_state_dict: bool) -> None:
    """Activation checkpointing wraps a layer; its prefix is in named_parameters but not in the state dict."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = build()
    model.encoder = checkpoint_wrapper(model.encoder)
    ctx.reached()
    load_as_it_is(build(), model.state_dict() if own_state_dict else dict(model.named_parameters()))


def load_averaged(ctx: Context, *, drops_counter: bool) -> None:
    """AveragedModel wraps the model and adds a buffer, n_averaged."""
    from torch.optim.swa_utils import AveragedModel

    state = dict(AveragedModel(build()).state_dict())
    ctx.reached()
    if drops_counter:
        state.pop("n_averaged")
    load(build(), state)


def shard(ctx: Context) -> Any:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    ctx.init_process_group(timeout_s=10)
    torch.manual_seed(0)  # so that both ranks start with the same weights
    return FullyShardedDataParallel(build(), use_orig_params=True, device_id=torch.device("cpu"))


def load_into_shards(ctx: Context, *, plain_names: bool) -> None:
    """FSDP1 adds its prefix to every name that it loads, even to one that already has it."""
    import torch

    model = shard(ctx)
    full = {name: torch.full_like(tensor, 2.0) for name, tensor in build().state_dict().items()}
    ctx.reached()
    model.load_state_dict(full if plain_names else {"_fsdp_wrapped_module." + name: full[name] for name in full})
    assert all(torch.equal(tensor, full[name]) for name, tensor in model.state_dict().items())


def save_shards(ctx: Context, *, own_state_dict: bool) -> None:
    """Rank 0 loads the weights of an FSDP1 model into a bare one. cpu_offload=True would crash with SIGSEGV on CPU."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = shard(ctx)
    ctx.reached()
    if own_state_dict:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    else:
        state = dict(model.named_parameters())
    if ctx.rank == 0:
        load_as_it_is(build(), state)


def check(params: Mapping[str, Any]) -> Finding:
    """Do the names in a checkpoint contain a wrapper's prefix? Does not run code in the file."""
    path = params["checkpoint"]
    if path is None:
        return unknown("no checkpoint was named", advice="--set checkpoint=/path/to/model.pt or .safetensors")
    try:
        names = [tensor.name for tensor in read_checkpoint(path).tensors]
    except Unreadable as error:
        return unknown(str(error))
    wrapped = [name for name in names if plain(name) != name]
    if wrapped:
        message = "%d names in %s contain a wrapper's prefix: %s" % (len(wrapped), path.name, ", ".join(wrapped[:3]))
        if all(
            WRAPPERS.intersection(name.split(".")) == {"module"} and not name.startswith("module.") for name in wrapped
        ):
            return unknown(message, "`module` in the middle of a name may be a layer of the model itself")
        return exposed(message, advice="load it strictly, under the names that your model has: see the entry, Fix 1")
    if not names:
        return unknown("kb found no tensors in %s" % path)
    message = "none of the %d names in %s contains a wrapper's prefix, for instance %s"
    return unknown(
        message % (len(names), path.name, names[0]),
        "the file does not show whether the model that loads it is wrapped, or adds a prefix of its own",
    )


PREFIXED = raised(r'Unexpected key\(s\) in state_dict: "(_orig_mod\.)?module\.')
FILE = "the file has the names of torch.compile(DDP(model)), but a bare model loads it"
RENAMED = "the same file is loaded strictly, under the names that the model has"


def variant(
    name: str,
    broken: Callable[[Context], None],
    fixed: Callable[[Context], None],
    expect: Expect,
    because: str,
    fix: str,
    packages: Mapping[str, str] = MappingProxyType({"torch": ">=2.1"}),
    world_size: int = 1,
) -> Experiment:
    """One rank is enough unless the model is sharded, because names do not depend on the number of ranks."""
    return Experiment(
        name=name,
        control=Arm(broken, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(fixed, expect=completed(), because=fix, fidelity="cpu"),
        world_size=world_size,
        needs=Needs(packages=packages),
        deadline_s=40,
        expected_s=(1.5, 1.5),
    )


not_strict = variant(
    "strict-false",
    partial(resume, loads=load_what_fits, compiles=False),
    partial(resume, loads=load, compiles=False),
    symptom(r"0 of 4 tensors loaded, 4 missing, 4 unexpected, no error"),
    "the file has the names of DDP(model), and a bare model loads it with strict=False",
    RENAMED,
)
consumed = variant(
    "consume-prefix",
    partial(resume, loads=load_without_module),
    partial(resume, loads=load),
    PREFIXED,
    "torch's function only cuts names that begin with module., but these begin with _orig_mod.module.",
    RENAMED,
)
replaced = variant(
    "replace",
    partial(resume, loads=load_replaced, compiles=False),
    partial(resume, loads=load, compiles=False),
    symptom(r"2 of 4 names fit, not subbias, subweight"),
    "replace() removes module. from the names of DDP(model), but also from the layer name submodule.",
    RENAMED,
)
bare_saved = variant(
    "save-bare",
    partial(save, saves_bare=False),
    partial(save, saves_bare=True),
    PREFIXED,
    "rank 0 saves the wrapped model, whose names have a prefix",
    "rank 0 saves the bare model inside, whose names have no prefix",
)
in_place = variant(
    "compile-in-place",
    partial(save_compiled, in_place=False),
    partial(save_compiled, in_place=True),
    raised(r'Unexpected key\(s\) in state_dict: "_orig_mod\.'),
    "the result of torch.compile(model) is saved, whose names begin with _orig_mod.",
    "model.compile() is used instead, which adds no prefix",
    {"torch": ">=2.2"},
)
parameters = variant(
    "named-parameters",
    partial(save_parameters, own_state_dict=False),
    partial(save_parameters, own_state_dict=True),
    raised(r'Unexpected key\(s\) in state_dict: "encoder\._checkpoint_wrapped_module\.'),
    "a dict of named_parameters() is saved, whose names contain the wrapper's prefix",
    "the state dict is saved, whose names do not contain the wrapper's prefix",
)
averaged = variant(
    "averaged",
    partial(load_averaged, drops_counter=False),
    partial(load_averaged, drops_counter=True),
    raised(r'Unexpected key\(s\) in state_dict: "n_averaged"'),
    "the file of an AveragedModel also has n_averaged, which the bare model lacks",
    "n_averaged is removed before the file is loaded",
)
into_shards = variant(
    "fsdp-load",
    partial(load_into_shards, plain_names=False),
    partial(load_into_shards, plain_names=True),
    raised(r"Error\(s\) in loading state_dict for FullyShardedDataParallel"),
    "names with FSDP1's prefix are loaded into an FSDP1 model, which adds the prefix again",
    "every rank loads plain names and full tensors into the FSDP1 model",
    world_size=2,
)
from_shards = variant(
    "fsdp-save",
    partial(save_shards, own_state_dict=False),
    partial(save_shards, own_state_dict=True),
    raised(r'Unexpected key\(s\) in state_dict: "_fsdp_wrapped_module\.'),
    "rank 0 saves a dict of named_parameters() of an FSDP1 model, whose names contain a prefix",
    "every rank calls get_model_state_dict, which returns plain names",
    {"torch": ">=2.2"},
    world_size=2,
)
probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "a file of torch.save or safetensors; kb does not run code in it")},
    experiments=(
        Experiment(
            name="ddp-compile",
            control=Arm(partial(resume, loads=load_as_it_is), expect=PREFIXED, because=FILE, fidelity="cpu"),
            treatment=Arm(partial(resume, loads=load), expect=completed(), because=RENAMED, fidelity="cpu"),
            deadline_s=40,
            expected_s=(1.7, 2.0),
        ),
    ),
    variants=(
        not_strict,
        consumed,
        replaced,
        bare_saved,
        in_place,
        parameters,
        averaged,
        into_shards,
        from_shards,
    ),
)
