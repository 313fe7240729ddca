"""Shards that FSDP saved meet a model of another layout: not wrapped, of another type, or in flat pieces."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, Dict

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom


def net(seed: int) -> Any:
    """Rows that two ranks cannot share equally, and an odd number of parameters."""
    import torch

    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(96, 129), torch.nn.Linear(129, 131))


def wrap(model: Any, version: int = 1, *, aligned: bool = True, mesh: bool = False) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if version == 1:
        ranks = init_device_mesh("cpu", (torch.distributed.get_world_size(),)) if mesh else None
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=aligned, device_mesh=ranks
        )
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def whole(model: Any) -> Dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: value.detach().clone() for name, value in full.items()}


def judge(found: Dict[str, Any], expected: Dict[str, Any]) -> None:
    import torch

    assert set(found) == set(expected), sorted(found)
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    if wrong:
        raise Symptom("loaded without an error, %d of %d weights are wrong" % (len(wrong), len(expected)))


def sharded(model: Any, kind: str = "SHARDED_STATE_DICT") -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    return FullyShardedDataParallel.state_dict_type(model, StateDictType[kind])


def saved(ctx: Context, version: int = 1, *, alone: bool = False) -> Any:
    """A folder of torch.distributed.checkpoint, with the optimizer or without, after a step; its path and its model."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    path, model = ctx.path("step-100"), wrap(net(0), version)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 96)).square().mean().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, **({} if alone else {"optimizer": optimizer_state})}, checkpoint_id=path)
    return path, model


def resume(ctx: Context, *, way: str, read: int = 1) -> None:
    """A folder of shards: through FSDP's context on a bare model, into the flat pieces, or after wrapping."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    ctx.init_process_group(timeout_s=60)
    path, trained = saved(ctx)
    ctx.reached()
    model = net(1) if way == "bare" else wrap(net(1), read)
    if way == "bare":
        with sharded(model):
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=path)
            model.load_state_dict(state["model"])
    elif way == "flat":
        named = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in model.named_parameters()}
        dcp.load({"model": named}, checkpoint_id=path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    judge(whole(model), whole(trained))
    moments = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert moments and any(getattr(value, "_local_tensor", value).abs().sum() > 0 for value in moments)


def rank_files(
    ctx: Context,
    *,
    way: str,
    kind: str = "SHARDED_STATE_DICT",
    version: int = 1,
    aligned: bool = True,
    mesh: bool = False,
) -> None:
    """Each rank saved its own file with torch.save, and loads it: bare, wrapped, or wrapped and with the right type."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    dist, again = ctx.init_process_group(timeout_s=60), partial(wrap, version=version, aligned=aligned, mesh=mesh)
    model = again(net(0))
    expected, path, output = whole(model), ctx.path("model_rank_%d.pt" % ctx.rank), ctx.path("model.pt")
    with sharded(model, kind) if version == 1 else nullcontext():
        torch.save(model.state_dict(), path)
    ctx.reached()
    if way == "no group":  # as in a script that is not started as a distributed job
        dist.destroy_process_group()
    state = torch.load(path, weights_only=False)
    if way in ("bare", "lenient"):
        bare = net(1)
        bare.load_state_dict(state, strict=way == "bare")
        judge(bare.state_dict(), expected)
        return
    model = wrap(net(1)) if way == "no mesh" else again(net(1))
    if way in ("no type", "twice") or version == 2:
        with sharded(model, kind) if way == "twice" else nullcontext():
            model.load_state_dict(state)
    else:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType[kind]):
            result = model.load_state_dict(state, strict=False)
        assert not result.missing_keys, result
    options = StateDictOptions(full_state_dict=True, cpu_offload=torch.cuda.is_available())
    full = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(full, output)
    dist.barrier()
    judge(torch.load(output), expected)


def pieces(ctx: Context, *, way: str) -> None:
    """use_orig_params: each rank's named_parameters, a flat piece of each weight, saved and joined by somebody."""
    import torch

    dist = ctx.init_process_group(timeout_s=60)
    model = wrap(net(0))
    expected = whole(model)
    state = {name.replace("_fsdp_wrapped_module.", ""): value.detach() for name, value in model.named_parameters()}
    with sharded(model, "LOCAL_STATE_DICT"):
        flat = model.state_dict()["_flat_param"].local_tensor()
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, flat)
    ctx.reached()
    if way == "file":
        net(1).load_state_dict(state)
    if way == "joined":
        sizes = [value.numel() for value in expected.values()]
        joined = torch.cat(parts)[: sum(sizes)].split(sizes)  # what lies behind the last weight is cut off
        judge(dict(zip(expected, (part.view(v.shape) for part, v in zip(joined, expected.values())))), expected)
    judge(whole(model), expected)


def whole_file(ctx: Context, *, way: str) -> None:
    """A whole model into a wrapped one: as a sharded state, into the inner module, or sent out by rank 0."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    dist = ctx.init_process_group(timeout_s=60)
    expected, path = net(0).state_dict(), ctx.path("model_%d.pt" % ctx.rank)
    torch.save(expected, path)
    model = wrap(net(1))
    ctx.reached()
    if way == "sharded":
        with sharded(model):
            model.load_state_dict(torch.load(path))
    elif way == "inner":
        model.module.load_state_dict(torch.load(path))
    else:
        state = torch.load(path, map_location="cpu") if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        judge(whole(model), expected)


def tied(ctx: Context, *, way: str) -> None:
    """The head is the embedding, and the file of the model has the weight once."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    dist = ctx.init_process_group(timeout_s=60)
    base, head = torch.nn.Sequential(), torch.nn.Linear(8, 129, bias=False)
    base.add_module("embed_tokens", torch.nn.Embedding(129, 8))
    model = torch.nn.Sequential(OrderedDict(model=base, lm_head=head))
    head.weight = base.embed_tokens.weight
    fully_shard(model)
    expected = torch.arange(129.0 * 8).view(129, 8)
    ctx.reached()
    state = {"model.embed_tokens.weight": expected} if dist.get_rank() == 0 else {}
    if way == "added" and dist.get_rank() == 0:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert head.weight is base.embed_tokens.weight
    judge(whole(model), {"model.embed_tokens.weight": expected, "lm_head.weight": expected})


def merge(ctx: Context, *, way: str) -> None:
    """Shards become one file: those of ranks 9 and 10 by hand, or with the converter of torch or accelerate."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dist = ctx.init_process_group(timeout_s=60)
    path, trained = saved(ctx, 2, alone=way == "accelerate")
    expected, model = whole(trained), net(1)
    torch.save(trained.state_dict(), ctx.path("rank_%d.pt" % (9 + ctx.rank)))
    dist.barrier()
    ctx.reached()
    if ctx.rank:
        return
    if way in ("by name", "by number"):
        numbers = sorted((9, 10), key=str if way == "by name" else int)
        files = [torch.load(ctx.path("rank_%d.pt" % one), weights_only=False) for one in numbers]
        model.load_state_dict({name: torch.cat([file[name].to_local() for file in files]) for name in expected})
    elif way == "accelerate":
        from accelerate.utils import merge_fsdp_weights  # type: ignore[import-not-found]
        from safetensors.torch import load_file  # type: ignore[import-not-found]

        merge_fsdp_weights(path, ctx.path("merged"))
        model.load_state_dict(load_file(ctx.path("merged/model.safetensors")))
    else:
        file_name = ctx.path("step-100.pt")
        dcp_to_torch_save(path, file_name)
        state = torch.load(file_name, map_location="cpu")
        model.load_state_dict(state["model"])
    judge(model.state_dict(), expected)


def pair(name: str, job: Callable[..., None], arms: str, expect: Expect, because: str, **more: str) -> Experiment:
    """`arms`: the way of the control arm and of the treatment."""
    broken, fixed = arms.split(" -> ")
    return Experiment(
        name=name,
        control=Arm(partial(job, way=broken), expect, because, "cpu"),
        treatment=Arm(partial(job, way=fixed), completed(), fixed, "cpu"),
        needs=Needs(packages={"torch": ">=2.7", **more}),
        deadline_s=60,
    )


SHAPE = r"copying a param with shape torch\.Size\(\[%s\]\) from checkpoint, the shape in current model is torch\.Size"
WRONG, KEY = symptom(r"loaded without an error, \d of 4 weights are wrong$"), raised(r"KeyError: None")
FLAT = raised(r"Size mismatch between saved torch\.Size\(\[129, 96\]\) and current: torch\.Size\(\[\d+\]\)")
SHARDS = raised(r"While copying the parameter named[\s\S]*has no attribute 'local_shards'")
DTENSOR = raised(r"While copying the parameter named[\s\S]*got mixed torch\.Tensor and DTensor")
WHOLE = raised(r"Expected ShardedTensor, got <class 'torch\.Tensor'>")
TWICE = partial(rank_files, kind="LOCAL_STATE_DICT")
LOCAL, AS_FSDP2 = partial(TWICE, aligned=False), partial(resume, read=2)
WITHOUT_GROUP = raised(r"Need to initialize default process group using .* before loading ShardedTensor")
MESH = raised(r"Expected ShardedTensor, got <class 'torch\.distributed\.tensor\.DTensor'>")
ON_MESH = partial(rank_files, mesh=True)
NAMES = raised(r"key\(s\) in state_dict: \"_flat_param")
probe = Probe(
    experiments=(pair("bare", resume, "bare -> wrapped", KEY, "FSDP's context on a bare model"),),
    variants=(
        pair("flat", resume, "flat -> wrapped", FLAT, "named_parameters are flat"),
        pair("fsdp2", AS_FSDP2, "bare -> wrapped", KEY, "FSDP's context on a bare model"),
        pair("rank-files", rank_files, "bare -> typed", SHARDS, "a bare model"),
        pair("no-type", rank_files, "no type -> typed", SHARDS, "wrapped, with the default type"),
        pair("no-group", rank_files, "no group -> typed", WITHOUT_GROUP, "a script without a process group"),
        pair("mesh", ON_MESH, "no mesh -> typed", MESH, "wrapped without the device mesh", torch=">=2.13"),
        pair("local", LOCAL, "bare -> typed", NAMES, "a bare model"),
        pair("local-names", TWICE, "twice -> typed", NAMES, "use_orig_params, each weight is in the file twice"),
        pair("lenient", LOCAL, "lenient -> typed", WRONG, "strict=False"),
        pair("rank-files-fsdp2", partial(rank_files, version=2), "bare -> typed", DTENSOR, "a bare model"),
        pair("pieces", pieces, "file -> gathered", raised(SHAPE % r"\d{5}"), "flat pieces"),
        pair("joined", pieces, "joined -> gathered", WRONG, "flat pieces are joined"),
        pair(
            "sharded-type",
            whole_file,
            "sharded -> sent",
            WHOLE,
            "the type is sharded, the file is whole",
            torch=">=2.13",
        ),
        pair("inner", whole_file, "inner -> sent", raised(SHAPE % r"\d+, \d+"), "around the wrapper"),
        pair("tied", tied, "as read -> added", raised(r"Missing key.*lm_head\.weight"), "the head is not in the file"),
        pair("by-name", merge, "by name -> by number", WRONG, "rank 10 comes before 9"),
        pair("converter", merge, "by name -> converted", WRONG, "joined by hand"),
        pair("accelerate", merge, "by name -> accelerate", WRONG, "joined by hand", accelerate=">=1.0"),
    ),
)
