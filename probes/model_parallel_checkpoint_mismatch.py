"""A job loads weights that were split for another tensor and pipeline parallel layout."""

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

Make = Callable[[dict[str, Any]], list[dict[str, Any]]]  # makes the state dicts of all ranks from the weights for TP=1
HEADS, GROUPS, SIZE, WIDTH, INNER = 4, 2, 4, 16, 32
VOCAB, MULTIPLE, LENGTH = 58, 12, 8  # 58 tokens are padded to 60 rows for TP=1, and to 72 for TP=2


def padded(tp: int, multiple: int = MULTIPLE) -> int:
    """The rows of the vocabulary after padding, by Megatron's rule."""
    return -(-VOCAB // (multiple * tp)) * multiple * tp


def build(tp: int, rows: int) -> Any:
    """Returns one rank's slice of a model with Megatron's names; `rows` is the padded vocabulary of all ranks."""
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
    """Returns the logits of each slice; the first slice is that of `rank`, and `total` sums over other processes."""
    import torch
    from torch.nn import functional

    def embed(model: Any, rank: int) -> Any:
        table = model.embedding["word_embeddings"]
        local = tokens - rank * table.num_embeddings
        inside = (local >= 0) & (local < table.num_embeddings)
        return table(local.clamp(0, table.num_embeddings - 1)) * inside[..., None]

    def attend(attention: Any) -> Any:
        mixed = attention["linear_qkv"](x).unflatten(-1, (-1, HEADS // GROUPS + 2, SIZE))  # ordered group by group
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
    """Returns tokens; the model learns to predict the previous token."""
    import torch

    return torch.randint(VOCAB, (16, LENGTH), generator=torch.Generator().manual_seed(1))


def loss_of(logits: list[Any]) -> Any:
    """Returns the loss of the logits of all slices."""
    import torch

    whole = torch.cat(logits, dim=-1)[:, 1:, :VOCAB]
    return torch.nn.functional.cross_entropy(whole.flatten(0, 1), batch()[:, :-1].flatten())


def train() -> dict[str, Any]:
    """Trains a model of one slice on the batch and returns its weights."""
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
    """Splits the weights for all ranks as the entry does; without `halves`, gate and up are split as one matrix."""
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
    """Changes the number of rows: drops the padding and pads again."""
    from torch.nn.functional import pad

    vocabulary = ("embedding.word_embeddings.weight", "output_layer.weight")
    return {**full, **{name: pad(full[name][:VOCAB], (0, 0, 0, rows - VOCAB)) for name in vocabulary}}


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the slices of all ranks, the inverse of `cut`."""
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
    """Saves one file for each rank."""
    import torch

    for rank, part in enumerate(parts):
        file_of(ctx, rank).parent.mkdir(parents=True, exist_ok=True)
        torch.save(part, file_of(ctx, rank))


def run_parallel(ctx: Context, *, made: Make) -> None:
    """Loads a checkpoint, which `made` derives from TP=1, on two ranks with TP=2."""
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
        (logits,) = compute([model], batch(), ctx.rank, total)
        gathered = [torch.empty_like(logits) for _ in range(2)]
        dist.all_gather(gathered, logits)
    assert loss_of(gathered) < 0.1
    ctx.meet("done")  # in torch 2.5.1, destroy_process_group may hang if a rank has left


def sliced(full: dict[str, Any], *, pads: bool = True, halves: bool = True) -> list[dict[str, Any]]:
    """Splits the weights for TP=2, after padding if `pads`."""
    return cut(pad_vocabulary(full, padded(2)) if pads else full, 2, halves=halves)


def fuse(full: dict[str, Any], *, by_group: bool) -> list[dict[str, Any]]:
    """Joins the three matrices of Hugging Face's files into linear_qkv, group by group or one after the other."""
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
    """Loads the files that `made` derives from TP=1 into `tp` slices; raises Symptom if the loss is no longer small."""
    import torch

    save(ctx, made(train()))
    slices = [build(tp, padded(tp, multiple)) for _ in range(tp)]
    ctx.reached()
    for rank, model in enumerate(slices):
        state = merge([torch.load(file_of(ctx, i)) for i in range(2)]) if merges else torch.load(file_of(ctx, rank))
        expected = model.state_dict()
        state = {name: w for name, w in state.items() if w.shape == expected[name].shape or not how.get("drops")}
        model.load_state_dict(state, strict=how.get("strict", True))
    with torch.no_grad():
        loss = loss_of(compute(slices, batch())).item()
    if loss > 0.1:
        raise Symptom("every slice is loaded, and the loss is %.1f; it was 0.0, and ln(%d) is 4.1" % (loss, VOCAB))


def join_stages(ctx: Context, *, renumbers: bool) -> None:
    """Joins two pipeline stages of one layer each, which both count their layers from 0."""
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
    """Two ranks save slices and load the whole tensor, from separate files or from a distributed checkpoint."""
    import torch

    dist = ctx.init_process_group(timeout_s=30)
    name, weight = "linear_proj.weight", torch.arange(16.0).view(4, 4)
    model = torch.nn.ModuleDict({"linear_proj": torch.nn.Linear(4, 4, bias=False)})
    state, parts = model.state_dict(), [part.clone() for part in weight.chunk(2, dim=1)]
    ctx.reached()
    if with_place:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.tensor import DTensor, Shard, init_device_mesh

        mesh, path = init_device_mesh("cpu", (2,)), ctx.path("iter_0000100")
        dcp.save({name: DTensor.from_local(parts[ctx.rank], mesh, [Shard(1)])}, checkpoint_id=path)
        dcp.load(state, checkpoint_id=path)
    else:
        if ctx.rank == 0:
            save(ctx, [{name: part} for part in parts])
        dist.barrier()
        state = torch.load(file_of(ctx, ctx.rank))
    model.load_state_dict(state)
    assert torch.equal(model["linear_proj"].weight, weight)
    ctx.meet("done")  # in torch 2.5.1, destroy_process_group may hang if a rank has left


TP, PP = LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
PADDED, DIVISOR, SHARDING = "padded_vocab_size", "make_vocab_size_divisible_by", "distrib_optim_sharding_type"
ARGUMENTS = {*LAYOUT, PADDED, DIVISOR, SHARDING, "num_experts", "use_distributed_optimizer"}
CPU: Any = {"fidelity": "cpu"}
OPCODES, BYTES = 100_000, 4 << 20
USUAL_DIVISOR = 128  # Megatron's default of --make-vocab-size-divisible-by


def stored_arguments(file: Path) -> dict[str, Any]:
    """Reads the values that the pickle pushes after the names of ARGUMENTS; it executes no step of the pickle."""
    values, memo = dict[str, Any](), dict[Any, Any]()
    last: Any = None
    with suppress(Exception), zipfile.ZipFile(file) as archive:  # an odd file can raise any error; earlier values stay
        (name,) = [name for name in archive.namelist() if re.fullmatch(r"(?:[^/]+/)?data\.pkl", name)]
        with archive.open(name) as pickle:
            data = pickle.read(BYTES)
        for step, value, _ in islice(pickletools.genops(data), OPCODES):
            if step.name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
                memo[len(memo) if value is None else value] = last
                continue
            pushed = memo.get(value) if step.name in ("BINGET", "LONG_BINGET", "GET") else value
            pushed = {"NEWTRUE": True, "NEWFALSE": False}.get(step.name, pushed)
            if isinstance(last, str) and last in ARGUMENTS:
                values[last] = pushed if values.get(last, pushed) == pushed else "several values"
            last = pushed
    return values


def named_layout(folder: Path) -> dict[str, int]:
    """Reads the sizes from folders mp_rank_TT, mp_rank_TT_PPP and mp_rank_TT_PPP_EEE; two numbers may be TP and EP.

    Raises ValueError if the folders are not those of one complete checkpoint.
    """
    folders = [path for path in folder.iterdir() if path.name.startswith("mp_rank_") and path.is_dir()]
    ranks = [tuple(int(part) for part in path.name.split("_")[2:]) for path in folders]
    if not ranks:
        return {}
    axes = [sorted(set(axis)) for axis in zip(*ranks)]
    is_complete = {len(rank) for rank in ranks} == {len(axes)} and len(ranks) == prod(axis[-1] + 1 for axis in axes)
    if not is_complete or not all((path / "model_optim_rng.pt").is_file() for path in folders):
        raise ValueError("the folders mp_rank_XX are not those of one complete checkpoint")
    return {TP: len(axes[0]), PP: 1} if len(axes) == 1 else {TP: len(axes[0])}


def check(params: Mapping[str, Any]) -> Finding:
    """Does the checkpoint have the tensor and pipeline parallel sizes and the padded vocabulary of the job?"""
    if params["checkpoint"] is None:
        return unknown("no checkpoint was given", advice="run --set checkpoint=/path/iter_0001000")
    folder, backend = Path(params["checkpoint"]), ""
    try:
        if (folder / "metadata.json").is_file():
            with (folder / "metadata.json").open() as file:
                backend = str(json.loads(file.read(BYTES))["sharded_backend"])
        named = {} if backend else named_layout(folder)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return unknown("kb cannot read %s as a Megatron checkpoint: %s" % (folder, str(error)[:200]))
    if not named and backend != "torch_dist":
        why = "%s has no mp_rank_XX and no metadata.json of torch_dist" % folder
        return unknown(why, advice="name a folder iter_XXXXXXX")
    given = {name: params[size] for name, size in zip(LAYOUT, ("tp", "pp")) if params[size] > 0}
    if backend:
        return check_whole(folder, given)
    return check_files(folder, named, given, params["vocab"], params["divisor"])


def compare(stored: Mapping[str, Any], given: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Returns the sizes that differ, and what kb cannot compare."""
    different, missing = [], []
    if stored.get("num_experts", 0) is not None:
        missing.append("kb does not compare expert parallelism")
    for name in LAYOUT:
        line = "%s: the checkpoint has %s, the job %s" % (name, stored.get(name, "not read"), given.get(name, "none"))
        if name not in given or type(stored.get(name)) is not int:
            missing.append(line)
        elif stored[name] != given[name]:
            different.append(line)
    return different, missing


def check_whole(folder: Path, given: Mapping[str, int]) -> Finding:
    """Checks torch_dist, whose weights fit every layout, but whose optimizer state may not."""
    stored = stored_arguments(folder / "common.pt")
    different, missing = compare(stored, given)
    sharding = stored.get(SHARDING, "none" if stored.get("use_distributed_optimizer") is False else "not read")
    lines = ["%s is torch_dist, so its weights load in another layout" % folder, *different, *missing]
    lines.append("the sharding type of its distributed optimizer: %s" % sharding)
    if different and sharding in ("dp_reshardable", "dp_zero_gather_scatter"):
        advice = "save once in the old layout as Fix 2 does, or start with --no-load-optim"
        return exposed(*lines, advice=advice)
    if missing or sharding not in ("none", "fully_reshardable", "dp_reshardable"):
        return unknown(*lines, "the optimizer state may not load; Megatron core 0.16 and newer refuse older types")
    return clear(*lines, "the optimizer state loads as well")


def check_files(folder: Path, named: Mapping[str, int], given: Mapping[str, int], vocab: int, divisor: int) -> Finding:
    """Checks the torch format, with a file for each rank, where all sizes must be the same."""
    stored = stored_arguments(next(folder.glob("mp_rank_00*")) / "model_optim_rng.pt")
    other = ["%s=%s" % (name, stored[name]) for name in named if stored.get(name, named[name]) != named[name]]
    if other:
        return unknown("the folder names of %s contradict its files, which say %s" % (folder, ", ".join(other)))
    stored = {**stored, **named}
    different, missing = compare(stored, given)
    if stored.get(PP) != 1:
        missing.append("kb does not compare virtual stages and the layers of each stage")
    if divisor <= 0 and type(stored.get(DIVISOR)) is int:
        divisor = int(stored[DIVISOR])
        if divisor != USUAL_DIVISOR:
            missing.append("%s: the checkpoint has %d, the job none: run --set divisor=N" % (DIVISOR, divisor))
    if vocab > 0 and divisor > 0 and type(stored.get(PADDED)) is int:
        multiple = divisor * given.get(TP, named[TP])
        rows = -(-vocab // multiple) * multiple
        if rows != stored[PADDED]:
            different.append(
                "%s: the checkpoint has %d rows, %d are needed for %d tokens" % (PADDED, stored[PADDED], rows, vocab)
            )
    else:
        missing.append("%s is not compared: run --set vocab=N, the number of tokens of the tokenizer" % PADDED)
    if different:
        return exposed(str(folder), *different, advice="start with the sizes of the checkpoint, or convert it")
    if missing:
        return unknown(str(folder), *missing)
    return clear("%s has the sizes and the padded vocabulary of the job" % folder)


def pair(name: str, job: Any, expect: Expect, before: Any, after: Any, real: Any = CPU, **more: Any) -> Experiment:
    """Returns an experiment; `before` and `after` are the keywords of the job and the reason of each arm."""
    control = Arm(partial(job, **before[0]), expect=expect, because=before[1], **CPU)
    treatment = Arm(partial(job, **after[0]), expect=completed(), because=after[1], **real)
    shared = {"world_size": 1, "expected_s": (0.5, 0.5), **more}
    return Experiment(name=name, control=control, treatment=treatment, **shared)


def mismatch(rows: int, expected: int) -> Expect:
    """Expects torch's size mismatch between the rows in the checkpoint and those in the model."""
    shape = r"[^()]{1,80}torch\.Size\(\[%d, 16\]\)"
    return raised(r"size mismatch for embedding\.word_embeddings\.weight:" + shape % rows + shape % expected)


WHOLE = {"made": lambda full: [full, full]}, "each of two slices loads the file of TP=1, whose vocabulary has 60 rows"
CUT = {"made": sliced}, "the weights are padded to 72 rows and split in two"
UNPADDED = partial(sliced, pads=False)
WRONG = symptom(r"every slice is loaded, and the loss is (\d\d|[2-9])\.\d; it was 0\.0")
FIRST = {"merges": False}, "the whole model loads the first of two files"
MERGED = {"merges": True}, "the two files are merged along the axes of the split"
TWO, ONE = ({"tp": 2}, WHOLE[1]), ({"tp": 1}, "the job has TP=1, like the file")
ROWS_OF_ONE = {"made": UNPADDED}, "the 60 rows of TP=1 are split in two without new padding"
SAME = {"multiple": 12}, "the divisor stays 12 for TP=2"
HALF = {"multiple": 6}, "the divisor is 6 for TP=2, so the vocabulary has 60 rows again"
MIDDLE = {"made": partial(sliced, halves=False)}, "one rank gets all of gate, the other all of up"
JOINED = {"made": partial(fuse, by_group=False)}, "linear_qkv has all queries, then all keys, then all values"
GROUPED = {"made": partial(fuse, by_group=True)}, "linear_qkv has the queries, key and value of each group together"
FROM_0 = {"renumbers": False}, "the files of two stages are joined, and both have a layer 0"
RENUMBERED = {"renumbers": True}, "the layers of the second stage get the next numbers"
ALONE = {"with_place": False}, "each rank's slice is in its own file"
PLACED = {"with_place": True}, "each slice is saved with its place in the whole tensor"
SLICE = raised(r"size mismatch for linear_proj\.weight: copying a param with shape torch\.Size\(\[4, 2\]\)")
DCP = {
    "fidelity": "stand-in",
    "stands_for": "Megatron's torch_dist; the probe uses torch.distributed.checkpoint, on which it is built",
}
TORCH: Any = {"world_size": 2, "needs": Needs(packages={"torch": ">=2.5"}), "expected_s": (1.0, 2.5)}

probe = Probe(
    check=check,
    params={
        "checkpoint": Param("path", "the folder iter_XXXXXXX of a Megatron checkpoint; kb executes nothing in it"),
        "tp": Param("int", "tensor parallel size of the job; 0 if not given", 0),
        "pp": Param("int", "pipeline parallel size of the job; 0 if not given", 0),
        "vocab": Param("int", "number of tokens of the tokenizer; 0 if not given", 0),
        "divisor": Param("int", "--make-vocab-size-divisible-by of the job; 0 for that of the checkpoint", 0),
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
