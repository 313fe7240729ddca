"""Parallel degrees do not fit: their product does not divide the number of ranks, or one splits a head."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

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
from kb.training_config import UnreadableConfig, read_config

LARGEST_DEGREE = 4096
TEXT = ("text_config", "llm_config")
OTHER_COUNTS = (
    r"heads$|_groups$|intermediate_size|ffn_hidden_size"  # keys of config.json that count parts of other layers
)
TOWERS = ("vision_config", "audio_config", "thinker_config")
WIDTH, HEAD = 32, 64
# Keys of config.json, by what they count.
COUNTS = {
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "width": ("intermediate_size", "ffn_hidden_size", "n_inner"),
}


def build_mesh(ctx: Context, *, data_parallel: Optional[int] = None) -> None:
    """Builds a mesh of two ranks with tensor parallelism of two; computes the data-parallel degree if it is None."""
    from torch.distributed.device_mesh import init_device_mesh

    dist = ctx.init_process_group(timeout_s=10)
    device, tp = ctx.device, 2
    ctx.reached()
    if data_parallel is not None:
        mesh = init_device_mesh(device.type, (data_parallel, tp), mesh_dim_names=("dp", "tp"))
    else:
        assert dist.get_world_size() % tp == 0, (dist.get_world_size(), tp)
        shape = (dist.get_world_size() // tp, tp)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
    assert tuple(mesh.shape) == (1, 2)
    assert list(mesh.get_coordinate()) == [0, ctx.rank]


def read_samples(ctx: Context, *, by_replica: bool) -> None:
    """Each rank of a tensor-parallel group reads its own share of the data, or the share of its replica."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.data import DistributedSampler

    dist = ctx.init_process_group(timeout_s=10)
    shape, dataset = (dist.get_world_size() // 2, 2), range(8)
    mesh = init_device_mesh(ctx.device.type, shape, mesh_dim_names=("dp", "tp"))
    ctx.reached()
    if by_replica:
        sampler = DistributedSampler(dataset, shape[0], mesh["dp"].get_local_rank())
    else:
        sampler = DistributedSampler(dataset)
    read: List[List[int]] = [[], []]
    dist.all_gather_object(read, list(sampler))
    if read[0] != read[1]:
        raise Symptom("the ranks of one tensor-parallel group silently read samples %s and %s" % (read[0], read[1]))
    assert sorted(read[0]) == list(dataset)


def build_small_mesh(ctx: Context, *, degree: int) -> None:
    """Builds a mesh that may be smaller than the world. torch accepts it."""
    from torch.distributed.device_mesh import init_device_mesh

    ctx.init_process_group(timeout_s=10)
    ctx.reached()
    mesh = init_device_mesh(ctx.device.type, (degree,))
    if mesh.get_coordinate() is None:
        raise Symptom("rank %d of %d is in no mesh, and torch raised no error" % (ctx.rank, ctx.world_size))


def attend(ctx: Context, *, tp: int, heads: int = 4, kv_heads: int = 1) -> None:
    """Runs grouped-query attention, split by columns, with the reshape of transformers and torchtitan."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Attention(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(WIDTH, heads * HEAD, bias=False)
            self.k_proj = nn.Linear(WIDTH, kv_heads * HEAD, bias=False)
            self.v_proj = nn.Linear(WIDTH, kv_heads * HEAD, bias=False)
            self.o_proj = nn.Linear(heads * HEAD, WIDTH, bias=False)

        def forward(self, hidden: Any) -> Any:
            shape = (*hidden.shape[:2], -1, HEAD)
            k = self.k_proj(hidden).view(shape).transpose(1, 2)
            v = self.v_proj(hidden).view(shape).transpose(1, 2)
            q = self.q_proj(hidden).view(shape).transpose(1, 2)
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            out = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.o_proj(out.transpose(1, 2).flatten(2))

    ctx.init_process_group(timeout_s=10)
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    attention = Attention().to(ctx.device)
    hidden = torch.randn(2, 5, WIDTH, device=ctx.device)
    expected = attention(hidden).detach()
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    plan["o_proj"] = RowwiseParallel()
    parallelize_module(attention, mesh["tp"], plan)
    ctx.reached()
    assert torch.allclose(attention(hidden), expected, atol=1e-5)


def check(params: Mapping[str, Any]) -> Finding:
    """Does each degree divide what it splits, and does their product divide the number of ranks?"""
    degrees = {name: params[name] for name in ("tp", "pp", "cp", "ep") if params[name] is not None}
    if not degrees:
        return unknown(
            "no degree was given", advice="run --set tp=8 --set world_size=16 --set model_config=config.json"
        )
    if any(degree < 1 for degree in degrees.values()):
        return unknown("a degree is below 1: %s" % degrees)
    counts: Dict[str, int] = {}
    uncompared: List[str] = []
    if params["model_config"] is not None:
        try:
            counts, uncompared = read_counts(params["model_config"])
        except UnreadableConfig as error:
            return unknown(str(error))
    counts.update({name: params[name] for name in (*COUNTS, "world_size") if params.get(name) is not None})
    if any(count < 1 for count in counts.values()):
        return unknown("a count is below 1: %s" % counts)
    return judge_degrees(degrees, counts, uncompared)


def judge_degrees(degrees: Mapping[str, int], counts: Mapping[str, int], uncompared: List[str]) -> Finding:
    tp, pp, cp, ep = (degrees.get(name, 1) for name in ("tp", "pp", "cp", "ep"))
    uncompared = [name for name in uncompared if tp > 1 and not (name == "KV heads" and "kv_heads" in counts)]
    heads, ranks = counts.get("heads"), counts.get("world_size")
    kv_heads = counts.get("kv_heads", None if "KV heads" in uncompared else heads)
    required = [
        ("world_size by tp * pp * cp", ranks, tp * pp * cp),
        ("world_size by ep * pp", ranks, ep * pp),
        ("heads by tp", heads, tp),
    ]
    usual = [  # some frameworks copy, pad or split unevenly instead
        ("world_size by tp * ep * pp", ranks, tp * ep * pp),
        ("kv_heads by tp", kv_heads, tp),
        ("layers by pp", counts.get("layers"), pp),
        ("experts by ep", counts.get("experts"), ep),
        ("vocabulary by tp", counts.get("vocabulary"), tp),
        ("width by tp", counts.get("width"), tp),
    ]
    if broken := name_broken(required):
        return exposed(*broken, *name_broken(usual), advice=advise_degrees(heads, kv_heads))
    if broken := name_broken(usual):
        reason = "some frameworks copy KV heads, pad, or split layers and experts unevenly; others raise an error"
        return unknown(*broken, reason, advice="kb show parallel-sizes-do-not-divide --section fix")
    if missing := [name for name, count, by in required + usual if count is None and by > 1]:
        return unknown(
            "kb has no numbers for these rules: %s" % "; ".join(missing),
            advice="run --set model_config=config.json --set world_size=8",
        )
    if cp > 1:
        uncompared.append("the sequence length")
    if ep > 1:
        uncompared.append("replicas, of which ep takes ranks")
    if uncompared:
        return unknown("kb cannot compare these with the degrees: %s" % "; ".join(uncompared))
    return clear(*["%s divides evenly: %s by %d" % rule for rule in required + usual if rule[1] is not None])


def name_broken(rules: List[Tuple[str, Optional[int], int]]) -> List[str]:
    return [
        "%s does not divide evenly: %d by %d" % (name, count, by)
        for name, count, by in rules
        if count is not None and count % by
    ]


def advise_degrees(heads: Optional[int], kv_heads: Optional[int]) -> str:
    if not heads:
        return "choose degrees whose product divides the number of ranks"
    degrees = [tp for tp in range(1, min(heads, LARGEST_DEGREE) + 1) if heads % tp == 0]
    plain = [tp for tp in degrees if not (kv_heads or heads) % tp]
    copied = [tp for tp in degrees if tp not in plain and not tp % (kv_heads or heads)]
    return "choose a tp that splits no head: %s; if the framework copies KV heads, also %s" % (plain, copied)


def read_counts(path: Path) -> Tuple[Dict[str, int], List[str]]:
    """Returns counts by name, and what else the degrees split. Raises `UnreadableConfig`."""
    values = read_config(path).values
    text: Dict[str, Any] = next((values[key] for key in TEXT if isinstance(values.get(key), dict)), {})
    both = {**values, **text}
    found = {
        name: next((both[key] for key in keys if type(both.get(key)) is int), None) for name, keys in COUNTS.items()
    }
    others = {
        "KV heads": found["kv_heads"] is None
        and (both.get("multi_query") or any(key in both for key in (*COUNTS["kv_heads"], "block_configs"))),
        "heads of linear attention": any(key.startswith(("linear_num", "mamba", "ssm")) for key in both),
        "blocks of quantized weights": isinstance(both.get("quantization_config"), dict),
    }
    counted = {key for keys in COUNTS.values() for key in keys}
    others.update({key: True for key in both if key not in counted and re.search(OTHER_COUNTS, key)})
    others.update({"heads of %s" % key: True for key, part in both.items() if is_tower(key, part)})
    return {name: count for name, count in found.items() if count is not None}, [
        name for name in others if others[name]
    ]


def is_tower(key: str, part: Any) -> bool:
    return isinstance(part, dict) and key not in TEXT and (key in TOWERS or any("heads" in name for name in part))


def pair(
    name: str,
    arms: Tuple[Callable[[Context], None], Callable[[Context], None]],
    pattern: str,
    because: str,
    fix: str,
    packages: Mapping[str, str] = MappingProxyType({"torch": ">=2.2"}),
    measured: bool = False,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(arms[0], symptom(pattern) if measured else raised(pattern), because, "cpu"),
        treatment=Arm(arms[1], completed(), fix, "cpu"),
        needs=Needs(packages=packages),
        expected_s=(0.6, 0.6),
    )


gloo = pair(
    "gloo",
    (partial(build_mesh, data_parallel=2), partial(build_mesh, data_parallel=None)),
    r"Mesh should not be bigger than default world size( 2)?, but found 4 ranks",
    "asks for a mesh of two by two, which needs four ranks, on two ranks",
    "computes the data-parallel degree from the ranks, which makes a mesh of one by two",
)

probe = Probe(
    check=check,
    params={
        "model_config": Param("path", "config.json of the model, for its heads, KV heads, layers and experts"),
        "world_size": Param("int", "number of ranks of the job, or of one engine"),
        "tp": Param("int", "tensor parallel degree"),
        "pp": Param("int", "pipeline parallel degree"),
        "cp": Param("int", "context parallel degree, if context parallelism has ranks of its own"),
        "ep": Param("int", "expert parallel degree"),
        "heads": Param("int", "number of attention heads, instead of that in the file"),
        "kv_heads": Param("int", "number of key and value heads (query groups), instead of that in the file"),
        "layers": Param("int", "number of layers, instead of that in the file"),
        "experts": Param("int", "number of routed experts, instead of that in the file"),
    },
    experiments=(gloo.on_gpus(), gloo),
    variants=(
        pair(
            "kv-heads",
            (partial(attend, tp=2), partial(attend, tp=1)),
            r"shape '\[2, 5, -1, 64\]' is invalid for input of size 320",
            "tensor parallelism of two splits one KV head into halves",
            "the same ranks run without tensor parallelism",
            {"torch": ">=2.6"},
        ),
        pair(
            "heads",
            (partial(attend, tp=2, heads=6, kv_heads=3), partial(attend, tp=2, heads=6, kv_heads=2)),
            r"shape '\[2, 5, -1, 64\]' is invalid for input of size 960",
            "tensor parallelism of two does not divide three KV heads",
            "tensor parallelism of two divides two KV heads",
            {"torch": ">=2.2"},
        ),
        pair(
            "left-out",
            (partial(build_small_mesh, degree=1), partial(build_small_mesh, degree=2)),
            r"rank 1 of 2 is in no mesh, and torch raised no error",
            "the product of the degrees is smaller than the number of ranks",
            "the product of the degrees is the number of ranks",
            measured=True,
        ),
        pair(
            "samples",
            (partial(read_samples, by_replica=False), partial(read_samples, by_replica=True)),
            r"the ranks of one tensor-parallel group silently read samples \[[\d, ]+\] and \[[\d, ]+\]",
            "the sampler divides the samples by rank, so a tensor-parallel group reads different ones",
            "the sampler divides the samples by replica",
            measured=True,
        ),
    ),
)
