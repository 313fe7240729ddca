"""Weights that are cut for one tensor and pipeline parallel layout, and loaded by another."""

from __future__ import annotations

import json
import pickletools
import re
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

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
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

Make = Callable[[dict[str, Any]], list[dict[str, Any]]]  # the files of all ranks, made of the weights for TP=1
HEADS, GROUPS, SIZE, WIDTH, INNER = 4, 2, 4, 16, 32
VOCAB, MULTIPLE, LENGTH = 58, 12, 8  # 58 tokens are padded to 60 rows for TP=1, and to 72 for TP=2


def padded(tp: int, multiple: int = MULTIPLE) -> int:
    """Megatron's rule for the rows of the vocabulary."""
    return -(-VOCAB // (multiple * tp)) * multiple * tp


def build(tp: int, rows: int) -> Any:
    """One rank's slice of a model under Megatron's names; `rows` is the padded vocabulary of all ranks."""
    import torch
    from torch.nn import Embedding, Linear, ModuleDict, ModuleList

    class GPTModel(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            words, positions = Embedding(rows // tp, WIDTH), Embedding(LENGTH, WIDTH)
            qkv = Linear(WIDTH, (HEADS + 2 * GROUPS) * SIZE // tp, bias=False)
            proj = Linear(HEADS * SIZE // tp, WIDTH, bias=False)
            fc1, fc2 = Linear(WIDTH, 2 * INNER // tp, bias=False), Linear(INNER // tp, WIDTH, bias=False)
            attention, mlp = {"linear_qkv": qkv, "linear_proj": proj}, {"linear_fc1": fc1, "linear_fc2": fc2}
            layer = ModuleDict({"self_attention": ModuleDict(attention), "mlp": ModuleDict(mlp)})
            self.embedding = ModuleDict({"word_embeddings": words, "position_embeddings": positions})
            self.decoder = ModuleDict({"layers": ModuleList([layer])})
            self.output_layer = Linear(WIDTH, rows // tp, bias=False)

    return GPTModel()


def compute(slices: list[Any], tokens: Any, rank: int = 0, total: Callable[[Any], Any] = lambda x: x) -> list[Any]:
    """Logits of each slice, of which the first is that of `rank`; `total` adds up over the ranks that are elsewhere."""
    import torch
    from torch.nn import functional

    def embed(model: Any, rank: int) -> Any:
        table = model.embedding["word_embeddings"]
        local = tokens - rank * table.num_embeddings
        inside = (local >= 0) & (local < table.num_embeddings)
        return table(local.clamp(0, table.num_embeddings - 1)) * inside[..., None]

    def attend(attention: Any) -> Any:
        mixed = attention["linear_qkv"](x).unflatten(-1, (-1, HEADS // GROUPS + 2, SIZE))  # group by group
        parts = mixed.split([HEADS // GROUPS, 1, 1], dim=-2)
        wide = [part.expand(-1, -1, -1, HEADS // GROUPS, -1).flatten(2, 3).transpose(1, 2) for part in parts]
        heads = functional.scaled_dot_product_attention(*wide, is_causal=True)
        return attention["linear_proj"](heads.transpose(1, 2).flatten(2))

    def feed(mlp: Any) -> Any:
        gate, up = mlp["linear_fc1"](x).chunk(2, dim=-1)
        return mlp["linear_fc2"](functional.silu(gate) * up)

    layers = [model.decoder["layers"][0] for model in slices]
    x = total(torch.stack([embed(model, rank + i) for i, model in enumerate(slices)]).sum(0))
    x = x + slices[0].embedding["position_embeddings"].weight
    x = x + total(torch.stack([attend(layer["self_attention"]) for layer in layers]).sum(0))
    x = x + total(torch.stack([feed(layer["mlp"]) for layer in layers]).sum(0))
    return [model.output_layer(x) for model in slices]


def batch() -> Any:
    """Tokens; the model learns to say the token before."""
    import torch

    return torch.randint(VOCAB, (16, LENGTH), generator=torch.Generator().manual_seed(1))


def loss_of(logits: list[Any]) -> Any:
    import torch

    every = torch.cat(logits, dim=-1)[:, 1:, :VOCAB]
    return torch.nn.functional.cross_entropy(every.flatten(0, 1), batch()[:, :-1].flatten())


def train() -> dict[str, Any]:
    """The weights of a model of one slice that knows the batch."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = build(1, padded(1))
    weights = list(model.parameters())
    for step in range(25):
        gradients = torch.autograd.grad(loss_of(compute([model], batch())), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients):
                weight -= 0.06 * 0.93**step * gradient.sign()
    assert loss_of(compute([model], batch())) < 0.1
    return {name: weight.detach() for name, weight in model.state_dict().items()}


def cut(full: dict[str, Any], tp: int, *, halves: bool = True) -> list[dict[str, Any]]:
    """The slices of all ranks, as the entry cuts them; without `halves` gate and up are cut as one matrix."""
    import torch

    def cut_one(name: str, weight: Any, rank: int) -> Any:
        if name.endswith(("linear_fc1.weight", "linear_fc1.bias")) and halves:  # gate over up: cut each, then join
            return torch.cat([half.chunk(tp)[rank] for half in weight.chunk(2)])
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):  # row parallel
            return weight.chunk(tp, dim=1)[rank].clone()
        if re.search(r"(linear_(qkv|fc1)\.(weight|bias)|(word_embeddings|output_layer)\.weight)$", name):
            return weight.chunk(tp)[rank].clone()
        assert re.search(r"(norm[._](weight|bias)|(proj|fc2)\.bias|embeddings\.weight|_extra_state)$", name), name
        return weight  # the same on every rank

    return [{name: cut_one(name, weight, rank) for name, weight in full.items()} for rank in range(tp)]


def pad_vocabulary(full: dict[str, Any], rows: int) -> dict[str, Any]:
    """Another number of padded rows: the dummy rows are left out and made again."""
    from torch.nn.functional import pad

    vocabulary = ("embedding.word_embeddings.weight", "output_layer.weight")
    return {**full, **{name: pad(full[name][:VOCAB], (0, 0, 0, rows - VOCAB)) for name in vocabulary}}


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    full = dict(parts[0])
    for name in full:
        pieces = [part[name] for part in parts]
        if "linear_fc1" in name:
            full[name] = torch.cat([torch.cat(half) for half in zip(*(piece.chunk(2) for piece in pieces))])
        elif "position" not in name:
            full[name] = torch.cat(pieces, dim=1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0)
    return full


def file_of(ctx: Context, rank: int) -> Path:
    return Path(ctx.path("iter_0000100/mp_rank_%02d/model_optim_rng.pt" % rank))


def save(ctx: Context, parts: list[dict[str, Any]]) -> None:
    import torch

    for rank, part in enumerate(parts):
        file_of(ctx, rank).parent.mkdir(parents=True, exist_ok=True)
        torch.save(part, file_of(ctx, rank))


def run_parallel(ctx: Context, *, made: Make) -> None:
    """Two ranks, TP=2, and the checkpoint of TP=1."""
    import torch

    dist = ctx.init_process_group(timeout_s=30)
    if ctx.rank == 0:
        save(ctx, made(train()))
    model = build(2, padded(2))
    dist.barrier()
    ctx.reached()
    model.load_state_dict(torch.load(file_of(ctx, ctx.rank)))

    def total(x: Any) -> Any:
        dist.all_reduce(x)
        return x

    with torch.no_grad():
        (mine,) = compute([model], batch(), ctx.rank, total)
        every = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(every, mine)
    assert loss_of(every) < 0.1
    ctx.meet("done")  # with torch 2.5.1 destroy_process_group may wait for ever for a rank that has left


def sliced(full: dict[str, Any], *, pads: bool = True, halves: bool = True) -> list[dict[str, Any]]:
    return cut(pad_vocabulary(full, padded(2)) if pads else full, 2, halves=halves)


def fuse(full: dict[str, Any], *, by_group: bool) -> list[dict[str, Any]]:
    """Three matrices, as in Hugging Face's files, become one linear_qkv."""
    import torch

    full, name = dict(full), "decoder.layers.0.self_attention.linear_qkv.weight"
    parts = full[name].unflatten(0, (GROUPS, -1, SIZE)).split([HEADS // GROUPS, 1, 1], dim=1)
    q, k, v = (part.flatten(0, 2) for part in parts)  # q_proj, k_proj, v_proj
    if by_group:
        per_group = [weight.unflatten(0, (GROUPS, -1)) for weight in (q, k, v)]
        full[name] = torch.cat(per_group, dim=1).flatten(0, 1)
    else:
        full[name] = torch.cat([q, k, v])
    return [full]


def load(ctx: Context, *, made: Make, tp: int = 2, multiple: int = MULTIPLE, merges: bool = False, **how: bool) -> None:
    """A job of `tp` slices loads the files that were `made` of the weights for TP=1; the loss is as before, or not."""
    import torch

    save(ctx, made(train()))
    slices = [build(tp, padded(tp, multiple)) for _ in range(tp)]
    ctx.reached()
    for rank, model in enumerate(slices):
        state = merge([torch.load(file_of(ctx, i)) for i in range(2)]) if merges else torch.load(file_of(ctx, rank))
        own = model.state_dict()
        state = {name: w for name, w in state.items() if w.shape == own[name].shape or not how.get("drops")}
        model.load_state_dict(state, strict=how.get("strict", True))
    with torch.no_grad():
        loss = loss_of(compute(slices, batch())).item()
    if loss > 0.1:
        raise Symptom("every slice is loaded, and the loss is %.1f; it was 0.0, and ln(%d) is 4.1" % (loss, VOCAB))


def join_stages(ctx: Context, *, renumbers: bool) -> None:
    """Two pipeline stages of one layer each; each stage counts its layers from 0."""
    import torch

    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(2)])})
    stages = [{"layers.0.weight": torch.full((2, 2), float(stage))} for stage in range(2)]
    ctx.reached()
    numbers = [stage if renumbers else 0 for stage in range(2)]
    joined = {"layers.%d.weight" % number: stages[i]["layers.0.weight"] for i, number in enumerate(numbers)}
    if len(joined) < len(model.state_dict()):
        raise Symptom("two stages have %d layers, and together %d" % (len(model.state_dict()), len(joined)))
    model.load_state_dict(joined)
    assert torch.equal(model["layers"][1].weight, stages[1]["layers.0.weight"])


def reshard(ctx: Context, *, with_place: bool) -> None:
    """Two ranks save slices, and the whole is loaded: from files of slices, or from one that knows the whole shape."""
    import torch

    dist = ctx.init_process_group(timeout_s=30)
    name, weight = "linear_proj.weight", torch.arange(16.0).view(4, 4)
    model = torch.nn.ModuleDict({"linear_proj": torch.nn.Linear(4, 4, bias=False)})
    state, parts = model.state_dict(), [part.clone() for part in weight.chunk(2, dim=1)]
    ctx.reached()
    if with_place:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.tensor import DTensor, Shard, init_device_mesh

        mesh, mine, path = init_device_mesh("cpu", (2,)), parts[ctx.rank], ctx.path("iter_0000100")
        dcp.save({name: DTensor.from_local(mine, mesh, [Shard(1)])}, checkpoint_id=path)
        dcp.load(state, checkpoint_id=path)
    else:
        if ctx.rank == 0:
            save(ctx, [{name: part} for part in parts])
        dist.barrier()
        state = torch.load(file_of(ctx, ctx.rank))
    model.load_state_dict(state)
    assert torch.equal(model["linear_proj"].weight, weight)
    ctx.meet("done")  # with torch 2.5.1 destroy_process_group may wait for ever for a rank that has left


TP, PP = LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
PADDED, DIVISOR, SHARDING = "padded_vocab_size", "make_vocab_size_divisible_by", "distrib_optim_sharding_type"
WANTED = {*LAYOUT, PADDED, DIVISOR, SHARDING, "num_experts", "use_distributed_optimizer"}
CPU: Any = {"fidelity": "cpu"}
OPCODES, BYTES = 100_000, 4 << 20


def stored_arguments(file: Path) -> dict[str, Any]:
    """What the pickle pushes behind the names of arguments. It is read as a list of steps, and none is run."""
    found, memo = dict[str, Any](), dict[Any, Any]()
    last: Any = None
    with suppress(Exception), zipfile.ZipFile(file) as archive:  # an odd file can raise any; what was found counts
        (name,) = [name for name in archive.namelist() if re.fullmatch(r"(?:[^/]+/)?data\.pkl", name)]
        with archive.open(name) as pickle:
            data = pickle.read(BYTES)
        for step, value, _ in islice(pickletools.genops(data), OPCODES):
            if step.name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
                memo[len(memo) if value is None else value] = last
                continue
            pushed = memo.get(value) if step.name in ("BINGET", "LONG_BINGET", "GET") else value
            pushed = {"NEWTRUE": True, "NEWFALSE": False}.get(step.name, pushed)
            if isinstance(last, str) and last in WANTED:
                found[last] = pushed if found.get(last, pushed) == pushed else "several values"
            last = pushed
    return found


def named_layout(folder: Path) -> dict[str, int]:
    """What the names mp_rank_TT, mp_rank_TT_PPP and mp_rank_TT_PPP_EEE tell; two numbers may be TP and EP."""
    folders = [path for path in folder.iterdir() if path.name.startswith("mp_rank_") and path.is_dir()]
    ranks = [tuple(int(part) for part in path.name.split("_")[2:]) for path in folders]
    if not ranks:
        return {}
    axes = [sorted(set(axis)) for axis in zip(*ranks)]
    full = {len(rank) for rank in ranks} == {len(axes)} and len(ranks) == prod(axis[-1] + 1 for axis in axes)
    if not full or not all((path / "model_optim_rng.pt").is_file() for path in folders):
        raise ValueError("the folders mp_rank_XX are not those of one complete checkpoint")
    return {TP: len(axes[0]), PP: 1} if len(axes) == 1 else {TP: len(axes[0])}


def check(params: Mapping[str, Any]) -> Finding:
    if params["checkpoint"] is None:
        return unknown("no checkpoint was given", advice="name the folder with --set checkpoint=/path/iter_0001000")
    folder, backend = Path(params["checkpoint"]), ""
    try:
        if (folder / "metadata.json").is_file():
            with (folder / "metadata.json").open() as file:
                backend = str(json.loads(file.read(BYTES))["sharded_backend"])
        named = {} if backend else named_layout(folder)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return unknown("%s is not read as a Megatron checkpoint: %s" % (folder, str(error)[:200]))
    if not named and backend != "torch_dist":
        return unknown("no mp_rank_XX and no torch_dist metadata.json in %s; name a folder iter_XXXXXXX" % folder)
    given = {name: params[size] for name, size in zip(LAYOUT, ("tp", "pp")) if params[size] > 0}
    rest = params["vocab"], params["divisor"]
    return check_whole(folder, given) if backend else check_files(folder, named, given, *rest)


def compare(stored: Mapping[str, Any], given: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """What differs, and what is missing for a comparison."""
    different, missing = [], ["expert parallelism is not compared"] if stored.get("num_experts", 0) is not None else []
    for name in LAYOUT:
        line = "%s: %s in the checkpoint, %s given" % (name, stored.get(name, "not read"), given.get(name, "none"))
        if name not in given or type(stored.get(name)) is not int:
            missing.append(line)
        elif stored[name] != given[name]:
            different.append(line)
    return different, missing


def check_whole(folder: Path, given: Mapping[str, int]) -> Finding:
    """torch_dist: the weights fit every layout, the state of the distributed optimizer perhaps not."""
    stored = stored_arguments(folder / "common.pt")
    different, missing = compare(stored, given)
    sharding = stored.get(SHARDING, "none" if stored.get("use_distributed_optimizer") is False else "not read")
    lines = ["%s is torch_dist; its weights load under another layout" % folder, *different, *missing]
    lines.append("sharding type of its distributed optimizer: %s" % sharding)
    if different and sharding in ("dp_reshardable", "dp_zero_gather_scatter"):
        advice = "save once with --dist-ckpt-optim-fully-reshardable in the old layout, or start with --no-load-optim"
        return exposed(*lines, advice=advice)
    if missing or sharding not in ("none", "fully_reshardable", "dp_reshardable"):
        return unknown(*lines, "it is not known to load; Megatron core 0.16 and newer refuse older types")
    return clear(*lines, "the optimizer state loads, too")


def check_files(folder: Path, named: Mapping[str, int], given: Mapping[str, int], vocab: int, divisor: int) -> Finding:
    """A file for each rank: everything must be the same."""
    stored = stored_arguments(next(folder.glob("mp_rank_00*")) / "model_optim_rng.pt")
    other = ["%s=%s" % (name, stored[name]) for name in named if stored.get(name, named[name]) != named[name]]
    if other:
        return unknown("%s: by the names not %s, as the files say" % (folder, ", ".join(other)))
    stored = {**stored, **named}
    different, missing = compare(stored, given)
    if stored.get(PP) != 1:
        missing.append("virtual stages and the layers of each stage are not compared")
    if divisor <= 0 and type(stored.get(DIVISOR)) is int:
        divisor = int(stored[DIVISOR])
    if vocab > 0 and divisor > 0 and type(stored.get(PADDED)) is int:
        multiple = divisor * given.get(TP, named[TP])
        rows = -(-vocab // multiple) * multiple
        if rows != stored[PADDED]:
            different.append("%s: %d in the checkpoint, %d for %d tokens" % (PADDED, stored[PADDED], rows, vocab))
    else:
        missing.append("%s: not compared, give vocab, the number of tokens of the tokenizer" % PADDED)
    if different:
        return exposed(str(folder), *different, advice="start with the sizes of the checkpoint, or convert it")
    if missing:
        return unknown(str(folder), *missing)
    return clear("%s: sizes and padded vocabulary are the same" % folder)


def pair(name: str, job: Any, expect: Expect, before: Any, after: Any, real: Any = CPU, **more: Any) -> Experiment:
    """`before` and `after`, the arms, are keywords of the job, and a text."""
    control = Arm(partial(job, **before[0]), expect=expect, because=before[1], **CPU)
    treatment = Arm(partial(job, **after[0]), expect=completed(), because=after[1], **real)
    shared = {"world_size": 1, "expected_s": (0.5, 0.5), **more}
    return Experiment(name=name, control=control, treatment=treatment, **shared)


def mismatch(rows: int, own: int) -> Expect:
    shape = r"[^()]{1,80}torch\.Size\(\[%d, 16\]\)"
    return raised(r"size mismatch for embedding\.word_embeddings\.weight:" + shape % rows + shape % own)


WHOLE = {"made": lambda full: [full, full]}, "two slices are given the file of TP=1, whose vocabulary has 60 rows"
CUT = {"made": sliced}, "the file is padded to 72 rows and cut into two"
UNPADDED = partial(sliced, pads=False)
WRONG = symptom(r"every slice is loaded, and the loss is (\d\d|[2-9])\.\d; it was 0\.0")
FIRST = {"merges": False}, "the whole model is given the first of two files"
MERGED = {"merges": True}, "the two are merged along the axes that they were cut along"
TWO, ONE = ({"tp": 2}, WHOLE[1]), ({"tp": 1}, "the job has TP=1, as the file")
ROWS_OF_ONE = {"made": UNPADDED}, "the 60 rows of TP=1 are cut into two"
SAME = {"multiple": 12}, "the divisor is 12 for TP=2, too"
HALF = {"multiple": 6}, "the divisor is halved as TP is doubled, so the vocabulary has 60 rows again"
MIDDLE = {"made": partial(sliced, halves=False)}, "one rank has all of gate, the other all of up"
JOINED = {"made": partial(fuse, by_group=False)}, "all queries, all keys, all values, one after the other"
GROUPED = {"made": partial(fuse, by_group=True)}, "the queries of a group, its key, its value"
FROM_0 = {"renumbers": False}, "the files of two stages are put together, and both have a layer 0"
RENUMBERED = {"renumbers": True}, "the layers of the second stage are counted on"
ALONE = {"with_place": False}, "each rank's slice is in a file of its own"
PLACED = {"with_place": True}, "the slices are saved with the place that they have in the whole tensor"
SLICE = raised(r"size mismatch for linear_proj\.weight: copying a param with shape torch\.Size\(\[4, 2\]\)")
DCP = {
    "fidelity": "stand-in",
    "stands_for": "torch.distributed.checkpoint for Megatron's torch_dist, which is built on it",
}
TORCH: Any = {"world_size": 2, "needs": Needs(packages={"torch": ">=2.5"}), "expected_s": (1.0, 2.5)}

probe = Probe(
    check=check,
    params={
        "checkpoint": Param("path", "the folder iter_XXXXXXX of a Megatron checkpoint; nothing in it is run"),
        "tp": Param("int", "tensor parallel size of the job; 0 if not given", 0),
        "pp": Param("int", "pipeline parallel size of the job; 0 if not given", 0),
        "vocab": Param("int", "number of tokens of the tokenizer; 0 if not given", 0),
        "divisor": Param("int", "--make-vocab-size-divisible-by; 0 for that of the checkpoint", 0),
    },
    experiments=(pair("tp", run_parallel, mismatch(60, 36), WHOLE, CUT, world_size=2, expected_s=(1.5, 1.5)),),
    variants=(
        pair("layout", partial(load, made=WHOLE[0]["made"]), mismatch(60, 36), TWO, ONE),
        pair("merge", partial(load, made=UNPADDED, tp=1), mismatch(30, 60), FIRST, MERGED),
        pair("strict-false", partial(load, strict=False), mismatch(60, 36), WHOLE, CUT),
        pair("dropped", partial(load, strict=False, drops=True), WRONG, WHOLE, CUT),
        pair("padding", load, mismatch(30, 36), ROWS_OF_ONE, CUT),
        pair("divisor", partial(load, made=UNPADDED), mismatch(30, 36), SAME, HALF),
        pair("swiglu", load, WRONG, MIDDLE, CUT),
        pair("qkv", partial(load, tp=1), WRONG, JOINED, GROUPED),
        pair("stages", join_stages, symptom(r"two stages have 2 layers, and together 1"), FROM_0, RENUMBERED),
        pair("whole-shapes", reshard, SLICE, ALONE, PLACED, DCP, **TORCH),
    ),
)
