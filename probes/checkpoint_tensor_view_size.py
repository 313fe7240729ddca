"""A tensor-parallel converter saves a slice of a weight, and torch.save writes the whole weight behind it."""

from __future__ import annotations

import os
from functools import partial
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping

from kb.checkpoint import Checkpoint, Tensor, Unreadable, read_checkpoint
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
    symptom,
    unknown,
)

SHARDS = 8
WASTE = 0.02  # share of unused bytes above which a file counts as exposed


def split(ctx: Context, *, own_storage: bool) -> None:
    """Saves one of eight shards of a weight, and compares the size of the file with the size of the tensor."""
    import torch

    weight = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024).bfloat16()
    shard = weight.chunk(SHARDS)[3]
    state, path = {"layers.0.weight": shard}, ctx.path("shard.pt")
    needed = shard.numel() * shard.element_size()
    ctx.reached()
    if own_storage:
        assert all(tensor.numel() for tensor in state.values()), "empty tensors: zero3-empty-weights"
        torch.save({name: tensor.clone() for name, tensor in state.items()}, path)
    else:
        torch.save(state, path)
    loaded = torch.load(path)["layers.0.weight"]
    assert torch.equal(loaded, shard)
    not_copied = {"contiguous": shard.contiguous(), "to": shard.to(torch.bfloat16), "detach": shard.detach()}
    sizes = {}
    for name, tensor in not_copied.items():
        torch.save({"layers.0.weight": tensor}, ctx.path(name))
        sizes[name] = os.path.getsize(ctx.path(name))
    compare_size(ctx, path, needed, ", ".join("%s() gives %d" % pair for pair in sizes.items()))
    assert loaded.untyped_storage().nbytes() == needed


def compare_size(ctx: Context, path: str, needed: int, more: str = "") -> None:
    """Raises `Symptom` if the file is much larger than its tensors, which need `needed` bytes."""
    size = os.path.getsize(path)
    ctx.note(tensor_bytes=needed, file_bytes=size)
    if size > 1.5 * needed:
        numbers = (os.path.basename(path), size, size / needed, "; " * bool(more) + more)
        raise Symptom("%s has %d bytes, %.1f times its tensor%s" % numbers)


def save_again(ctx: Context, *, clones: bool) -> None:
    """Loads a file that is too large and saves it again, with or without cloning its tensors."""
    import torch

    path = ctx.path("shard.pt")
    weight = torch.arange(1 << 20, dtype=torch.float32).chunk(SHARDS)[3]
    torch.save({"weight": weight}, path)
    ctx.reached()
    if clones:
        state = torch.load(path, map_location="cpu", weights_only=True)
        torch.save({name: tensor.clone() for name, tensor in state.items()}, path + ".new")
        again = torch.load(path + ".new", map_location="cpu", weights_only=True)
        assert list(again) == list(state) and all(again[name].equal(state[name]) for name in state)
        os.replace(path + ".new", path)
    else:
        torch.save(torch.load(path), path)
    compare_size(ctx, path, weight.numel() * 4)
    assert torch.load(path)["weight"].equal(weight)


def fine_tune(ctx: Context, *, own_parameters: bool) -> None:
    """Loads a converted file into a model; saves the tensors of the file, or those of the model, which are smaller."""
    import torch

    state = {"weight": torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024).chunk(SHARDS)[3]}
    torch.save(state, ctx.path("converted.pt"))
    model = torch.nn.Linear(1024, 128, bias=False)
    ctx.reached()
    model.load_state_dict(torch.load(ctx.path("converted.pt")))
    torch.save(model.state_dict() if own_parameters else torch.load(ctx.path("converted.pt")), ctx.path("tuned.pt"))
    compare_size(ctx, ctx.path("tuned.pt"), state["weight"].numel() * 4)
    assert torch.load(ctx.path("tuned.pt"))["weight"].equal(state["weight"])


def save_tied(ctx: Context, *, clones: bool) -> None:
    """Saves one tensor under two names; torch.save writes it once, or twice if each is cloned."""
    import torch

    weight = torch.arange(1 << 17, dtype=torch.float32)
    state, path = {"embed.weight": weight, "lm_head.weight": weight}, ctx.path("tied.pt")
    ctx.reached()
    torch.save({name: tensor.clone() for name, tensor in state.items()} if clones else state, path)
    compare_size(ctx, path, weight.numel() * 4)


def save_format(ctx: Context, *, safetensors: bool) -> None:
    """Saves a slice with torch.save, or as safetensors, a format without storages."""
    import torch
    from safetensors.torch import load_file, save_file  # type: ignore[import-not-found]

    path, weight = ctx.path("shard"), torch.arange(1 << 20, dtype=torch.float32).chunk(SHARDS)[3]
    ctx.reached()
    if safetensors:
        save_file({"weight": weight}, path)
        assert load_file(path)["weight"].equal(weight)
    else:
        torch.save({"weight": weight}, path)
    compare_size(ctx, path, weight.numel() * 4)


def check(params: Mapping[str, Any]) -> Finding:
    """Does a checkpoint contain storages that its tensors use only in part? Runs no code in it."""
    if params["checkpoint"] is None:
        return unknown("no checkpoint was named", advice="--set checkpoint=/path/to/model.pt")
    try:
        checkpoint = read_checkpoint(params["checkpoint"])
    except Unreadable as error:
        return unknown(str(error))
    if checkpoint.format != "torch.save":
        return unknown(
            "%s is not a file of torch.save; safetensors stores tensors without the storages behind them"
            % params["checkpoint"]
        )
    return compare(checkpoint) if checkpoint.tensors else unknown("kb found no tensor in %s" % params["checkpoint"])


def compare(checkpoint: Checkpoint) -> Finding:
    """Compares the size of every storage with what its tensors use. Storages of unknown objects count as used."""
    by_storage: Dict[str, List[Tensor]] = {}
    for tensor in checkpoint.tensors:
        by_storage.setdefault(tensor.storage, []).append(tensor)
    unused = [
        (checkpoint.storages[key] - used_bytes(inside), checkpoint.storages[key], inside)
        for key, inside in by_storage.items()
    ]
    unused.sort(key=lambda item: -item[0])
    total, waste = sum(checkpoint.storages.values()), sum(max(0, item[0]) for item in unused)
    counts = (total - waste, total, len(checkpoint.tensors), len(checkpoint.storages))
    message = "tensors use %d of %d bytes (tensors: %d, storages: %d)" % counts
    if waste <= WASTE * total:
        return clear(message)
    evidence = [message + ": %d bytes (%d %%) are wasted" % (waste, 100 * waste // total)]
    evidence += [describe(*item) for item in unused[:5] if item[0] > WASTE * waste]
    return exposed(
        *evidence,
        advice="clone the tensors before you save them: {name: tensor.clone() for name, tensor in state.items()}",
    )


def used_bytes(tensors: List[Tensor]) -> int:
    """The bytes that tensors use; an upper bound if views with gaps overlap."""
    gapped = {tensor[4:]: tensor.used for tensor in tensors if tensor.used < tensor.stop - tensor.start}
    used, end = sum(gapped.values()), 0
    for start, stop in sorted(tensor[4:6] for tensor in tensors if tensor[4:] not in gapped):
        used += max(0, stop - max(start, end))
        end = max(end, stop)
    return used


def describe(waste: int, size: int, inside: List[Tensor]) -> str:
    tensor = inside[0]
    more = " and %d more" % (len(inside) - 1) if len(inside) > 1 else ""
    times = "%.1f times its size" % (size / (size - waste)) if size > waste else "that it does not use"
    return "%s %s%s: view of a storage %s (%d bytes, %d used)" % (
        tensor.name or "the tensor",
        list(tensor.shape)[:8],
        more,
        times,
        size,
        size - waste,
    )


def variant(
    name: str,
    job: Callable[..., None],
    change: Mapping[str, bool],
    because: str,
    fix: str,
    times: str = r"8\.\d",
    packages: Mapping[str, str] = MappingProxyType({}),
) -> Experiment:
    """`change` is the argument of the treatment arm; the control arm has the opposite value."""
    broken = {key: not value for key, value in change.items()}
    expect = symptom(r"bytes, %s times its tensor" % times)
    return Experiment(
        name=name,
        control=Arm(partial(job, **broken), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **change), expect=completed(), because=fix, fidelity="cpu"),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.1", **packages}, memory_mib=512),
        expected_s=(0.1, 0.1),
    )


repaired = variant(
    "repair",
    save_again,
    {"clones": True},
    "the job loads and saves a file that is too large, and torch.load restored its whole storages",
    "the job clones each tensor of the file before it saves them",
)
tuned = variant(
    "fine-tune",
    fine_tune,
    {"own_parameters": True},
    "the job saves the tensors that torch.load returned, with their whole storages",
    "the job saves the state dict of the model, whose parameters have their own storages",
)
tied = variant(
    "tied",
    save_tied,
    {"clones": False},
    "the job clones a tensor that has two names, so torch.save writes it twice",
    "the job does not clone the tensor, so torch.save writes it once",
    r"2\.0",
)
other_format = variant(
    "safetensors",
    save_format,
    {"safetensors": True},
    "torch.save writes the whole storage of the slice",
    "safetensors writes only the slice",
    packages={"safetensors": ">=0.4"},
)

probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "a file of torch.save (.pt, .pth, .bin); the check runs no code in it")},
    experiments=(
        Experiment(
            name="shard",
            control=Arm(
                partial(split, own_storage=False),
                expect=symptom(r"bytes, [78]\.\d times its tensor; (\w+\(\) gives 2\d{6}(, |$)){3}"),
                because="the job saves one of eight row slices of a weight, a view of the whole storage",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(split, own_storage=True),
                expect=completed(),
                because="the job clones the slice before it saves it",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(memory_mib=512),
            expected_s=(0.1, 0.1),
        ),
    ),
    variants=(repaired, tuned, tied, other_format),
)
