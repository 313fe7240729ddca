"""A slice of a weight is saved, and torch.save writes the whole weight behind it, as tensor-parallel converters do."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Dict, List, Mapping

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
WASTE = 0.02  # part of the bytes that may be unused before a file counts as exposed


def split(ctx: Context, *, own_storage: bool) -> None:
    """Write one of eight shards of a weight; weigh the file against the tensor in it."""
    import torch

    weight = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024).bfloat16()
    shard = weight.chunk(SHARDS)[3]
    needed = shard.numel() * shard.element_size()
    ctx.reached()
    size = _save(ctx, shard.clone() if own_storage else shard)
    ctx.note(tensor_bytes=needed, file_bytes=size)
    loaded = torch.load(ctx.path("shard.pt"))["layers.0.weight"]
    assert torch.equal(loaded, shard)
    if size > 2 * needed:
        no_cure = {"contiguous": shard.contiguous(), "to": shard.to(torch.bfloat16), "detach": shard.detach()}
        message = ", ".join("%s() gives %d" % (name, _save(ctx, same)) for name, same in no_cure.items())
        raise Symptom("shard.pt has %d bytes, %.1f times its tensor; %s" % (size, size / needed, message))
    assert loaded.untyped_storage().nbytes() == needed


def _save(ctx: Context, tensor: Any) -> int:
    import torch

    torch.save({"layers.0.weight": tensor}, ctx.path("shard.pt"))
    return os.path.getsize(ctx.path("shard.pt"))


def check(params: Mapping[str, Any]) -> Finding:
    """Does a checkpoint hold storages that its tensors use only in part? Read without torch; runs nothing in it."""
    if params["checkpoint"] is None:
        return unknown("no checkpoint was named", advice="--set checkpoint=/path/to/model.pt")
    try:
        checkpoint = read_checkpoint(params["checkpoint"])
    except Unreadable as error:
        return unknown(str(error))
    if checkpoint.format != "torch.save":
        return unknown("%s: safetensors holds tensors without the storages behind them" % params["checkpoint"])
    return weigh(checkpoint) if checkpoint.tensors else unknown("no tensor was found in %s" % params["checkpoint"])


def weigh(checkpoint: Checkpoint) -> Finding:
    """Compare the size of every storage with what its tensors use. Storages of unknown objects count as used."""
    by_storage: Dict[str, List[Tensor]] = {}
    for tensor in checkpoint.tensors:
        by_storage.setdefault(tensor.storage, []).append(tensor)
    unused = [
        (checkpoint.storages[key] - _used(inside), checkpoint.storages[key], inside)
        for key, inside in by_storage.items()
    ]
    unused.sort(key=lambda item: -item[0])
    total, waste = sum(checkpoint.storages.values()), sum(max(0, item[0]) for item in unused)
    counts = (total - waste, total, len(checkpoint.tensors), len(checkpoint.storages))
    message = "tensors use %d of %d bytes (tensors: %d, storages: %d)" % counts
    if waste <= WASTE * total:
        return clear(message)
    evidence = [message + ": %d bytes (%d %%) are wasted" % (waste, 100 * waste // total)]
    evidence += [_line(*item) for item in unused[:5] if item[0] > WASTE * waste]
    return exposed(*evidence, advice="clone before saving: {name: tensor.clone() for name, tensor in state.items()}")


def _used(tensors: List[Tensor]) -> int:
    """Bytes that some tensor uses; an upper bound where views with gaps overlap."""
    gapped = {tensor[4:]: tensor.used for tensor in tensors if tensor.used < tensor.stop - tensor.start}
    used, end = sum(gapped.values()), 0
    for start, stop in sorted(tensor[4:6] for tensor in tensors if tensor[4:] not in gapped):
        used += max(0, stop - max(start, end))
        end = max(end, stop)
    return used


def _line(waste: int, size: int, inside: List[Tensor]) -> str:
    tensor = inside[0]
    more = " and %d more" % (len(inside) - 1) if len(inside) > 1 else ""
    times = "%.1f times its size" % (size / (size - waste)) if size > waste else "it does not use at all"
    return "%s %s%s: view of a storage %s (%d bytes, %d used)" % (
        tensor.name or "the tensor",
        list(tensor.shape)[:8],
        more,
        times,
        size,
        size - waste,
    )


probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "a file of torch.save: .pt, .pth, .bin; nothing in it is run")},
    experiments=(
        Experiment(
            name="shard",
            control=Arm(
                partial(split, own_storage=False),
                expect=symptom(r"bytes, [78]\.\d times its tensor"),
                because="one of eight row slices of a weight is saved as the view it is",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(split, own_storage=True),
                expect=completed(),
                because="the slice is cloned before it is saved",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(memory_mib=512),
            expected_s=(0.1, 0.1),
        ),
    ),
)
