"""Each rank clips by the norm of the gradients that it holds: the norms differ, and none is the norm of the model."""

from __future__ import annotations

import ast
import math
import os
import re
import time
from functools import partial
from typing import Any, Callable, Iterator, List, Mapping, Set, Tuple

from kb.cpu_arms import import_deepspeed
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

MAX_NORM = 1.0


def build(ctx: Context) -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(ctx.device)


def batch(ctx: Context, rank: int) -> Any:
    import torch

    return 3 * torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)).to(ctx.device)


def in_one_process(ctx: Context, *ranks: int) -> Any:
    """Returns the model with the mean gradient of the batches of these ranks."""
    model = build(ctx)
    (sum(model(batch(ctx, rank)).square().sum() for rank in ranks) / len(ranks)).backward()
    return model


def gradients_of(model: Any) -> List[Any]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def norm_of(gradients: List[Any]) -> float:
    return math.sqrt(sum(float(gradient.float().square().sum()) for gradient in gradients))


def true_norm(ctx: Context, *ranks: int) -> float:
    return norm_of(gradients_of(in_one_process(ctx, *ranks)))


def norm_over_ranks(ctx: Context, split: List[Any], replicated: List[Any]) -> float:
    """The norm of the whole model: each rank holds a part of the `split` gradients and all `replicated` ones."""
    import torch
    import torch.distributed as dist

    squares = torch.tensor([norm_of(split) ** 2], device=ctx.device)
    dist.all_reduce(squares)
    return math.sqrt(squares.item() + norm_of(replicated) ** 2)


def compare_norms(norm: Any) -> str:
    """The test of the entry: did the clipping return the same norm on all ranks?"""
    import torch.distributed as dist

    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    norms: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(norms, float(norm))
    if max(norms) > 1.001 * min(norms):
        return "gradient norm differs between ranks: %.4g to %.4g" % (min(norms), max(norms))
    return ""


def judge(ctx: Context, norm: Any, true: float, split: List[Any], *replicated: Any) -> None:
    """Raises `Symptom` if the clipping returned a wrong norm; asserts that the clipped gradients have `MAX_NORM`."""
    difference = compare_norms(norm)
    left = norm_over_ranks(ctx, split, list(replicated))
    expected = "%.4g in one process, and clipped to %g it is %.4g" % (true, MAX_NORM, left)
    if difference:
        raise Symptom("%s; %s" % (difference, expected))
    if abs(float(norm) - true) > 0.001 * true:
        raise Symptom("gradient norm %.4g on all ranks; %s" % (float(norm), expected))
    assert abs(left - MAX_NORM) < 0.001, left


# --- FSDP --------------------------------------------------------------------------------------------------------


def wrap(ctx: Context, model: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=ctx.device, **options)


def backward(ctx: Context, model: Any) -> Any:
    model(batch(ctx, ctx.rank)).square().sum().backward()
    return model


def clip(model: Any, way: str, max_norm: float = MAX_NORM) -> Any:
    import torch

    if way == "method":
        norm = model.clip_grad_norm_(max_norm)
    else:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm


def fsdp1(ctx: Context, *, way: str, strategy: str = "FULL_SHARD", original: bool = False) -> None:
    import torch
    from torch.distributed.fsdp import ShardingStrategy

    dist = ctx.init_process_group(timeout_s=20)
    plain = in_one_process(ctx, 0, 1)
    true = norm_of(gradients_of(plain))
    options = {"use_orig_params": original, "sharding_strategy": getattr(ShardingStrategy, strategy)}
    model = backward(ctx, wrap(ctx, build(ctx), **options))
    ctx.reached()
    if way == "value":
        for each in (model, plain):
            torch.nn.utils.clip_grad_value_(each.parameters(), 0.5)
        left = norm_over_ranks(ctx, gradients_of(model), [])
        assert abs(left - norm_of(gradients_of(plain))) < 0.001, left
        return
    norm = clip(model, way, float("inf") if way == "mean" else MAX_NORM)
    if way == "mean":  # the call above clipped nothing
        dist.all_reduce(norm)
        norm /= dist.get_world_size()
        for gradient in gradients_of(model):
            gradient.mul_(MAX_NORM / norm)
    if strategy == "NO_SHARD":
        judge(ctx, norm, true, [], *gradients_of(model))
    else:
        judge(ctx, norm, true, gradients_of(model))


def fsdp1_parts(ctx: Context, *, root: bool) -> None:
    """Wraps two layers, and with `root` the model as well. Without it, each layer clips by its own norm."""
    ctx.init_process_group(timeout_s=20)
    true = true_norm(ctx, 0, 1)
    model = build(ctx)
    for index in (0, 2):
        model[index] = wrap(ctx, model[index])
    model = backward(ctx, wrap(ctx, model) if root else model)
    ctx.reached()
    norm = clip(model, "method") if root else max(clip(model[index], "method") for index in (0, 2))
    judge(ctx, norm, true, gradients_of(model))


def step_if_finite(ctx: Context, *, way: str) -> None:
    """One gradient in the shard of rank 1 is infinite; a rank skips the step if its norm is not finite."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    model = backward(ctx, wrap(ctx, build(ctx)))
    before = [p.detach().clone() for p in model.parameters()]
    if ctx.rank == 1:
        gradients_of(model)[0][0] = float("inf")
    ctx.reached()
    norm = clip(model, way)
    if torch.isfinite(norm):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    stepped: List[Any] = [None, None]
    dist.all_gather_object(stepped, any(not torch.equal(old, new) for old, new in zip(before, model.parameters())))
    if stepped[0] != stepped[1]:
        raise Symptom("rank %d made the step and rank %d skipped it" % (stepped.index(True), stepped.index(False)))
    assert not any(stepped)


def fsdp2(ctx: Context, *, full_norm: bool) -> None:
    """FSDP2 clips correctly; the number that the code prints is the norm of the shard, or of the model."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist = ctx.init_process_group(timeout_s=20)
    true = true_norm(ctx, 0, 1)
    model = build(ctx)
    fully_shard(model, mesh=init_device_mesh(ctx.device.type, (2,)))
    backward(ctx, model)
    norm = clip(model, "utils")
    judge(ctx, norm.full_tensor(), true, [gradient.to_local() for gradient in gradients_of(model)])
    ctx.reached()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"), norm_type=float("inf"))
    if full_norm:
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    numbers: List[Any] = [None, None]
    dist.all_gather_object(numbers, norm.item())
    if numbers[0] != numbers[1]:
        raise Symptom("norm.item() is %.4g on rank 0 and %.4g on rank 1" % tuple(numbers))


# --- custom splits: by layers, or by the columns of a layer ------------------------------------------------------


def global_clip() -> Any:
    """Imports torch and returns the function of the entry."""
    import torch
    import torch.distributed as dist

    def clip_by_global_norm(split, replicated, max_norm, device, group):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        def squares(parameters):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            start = torch.zeros((), device=device)
            return sum([p.grad.float().square().sum() for p in parameters if p.grad is not None], start)

        split, replicated = list(split), list(replicated)
        total = squares(split)  # type: ignore[no-untyped-call]
        dist.all_reduce(total, group=group)
        norm = (total + squares(replicated)).sqrt()  # type: ignore[no-untyped-call]
        for p in [*split, *replicated]:
            if p.grad is not None:
                p.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1))
        return norm

    return clip_by_global_norm


def pipeline(ctx: Context, *, way: str) -> None:
    """Rank 0 has the first layers, rank 1 has the last layer."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    true = true_norm(ctx, 0)
    stage = build(ctx)[:2] if ctx.rank == 0 else build(ctx)[2:]
    if ctx.rank == 0:
        hidden = stage(batch(ctx, 0))
        dist.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    else:
        hidden = torch.empty(4, 8, device=ctx.device)
        dist.recv(hidden, 0)
        stage(hidden.requires_grad_()).square().sum().backward()
        assert hidden.grad is not None
        dist.send(hidden.grad, 0)
    ctx.reached()
    if way == "all":
        norm = global_clip()(stage.parameters(), [], MAX_NORM, ctx.device, None)
    else:
        norm = clip(stage, "utils")
    judge(ctx, norm, true, gradients_of(stage))


def tensor_parallel(ctx: Context, *, way: str) -> None:
    """Each rank has half of the hidden units with their weights; both ranks have the bias of the last layer."""
    import torch

    ctx.init_process_group(timeout_s=20)
    model = in_one_process(ctx, 0)  # each rank computes the whole gradient and takes its part
    true = norm_of(gradients_of(model))
    mine = slice(4 * ctx.rank, 4 * ctx.rank + 4)
    split, replicated = [], [model[2].bias]
    for weight, index in ((model[0].weight, (mine,)), (model[0].bias, (mine,)), (model[2].weight, (slice(None), mine))):
        part = torch.nn.Parameter(weight.detach()[index].clone())
        part.grad = weight.grad[index].clone()
        split.append(part)
    ctx.reached()
    counted = {"right": (split, replicated), "all": ([*split, *replicated], [])}
    if way in counted:
        norm = global_clip()(*counted[way], MAX_NORM, ctx.device, None)
    else:
        norm = torch.nn.utils.clip_grad_norm_([*split, *replicated], MAX_NORM)
    judge(ctx, norm, true, [p.grad for p in split], *[p.grad for p in replicated])


# --- libraries ---------------------------------------------------------------------------------------------------


def accelerate_fsdp1(ctx: Context, *, all_parameters: bool) -> None:
    """FSDP1 and a frozen layer. accelerate enables FSDP only on accelerators, so the job sets its state by hand."""
    import torch

    ctx.init_process_group(timeout_s=30)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin  # type: ignore[import-not-found]
    from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-not-found]
    from accelerate.utils import DistributedType  # type: ignore[import-not-found]

    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True)
    state = {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}
    PartialState._shared_state.update(state)
    AcceleratorState._shared_state.update(state, fsdp_plugin=plugin)
    true = norm_of(gradients_of(in_one_process(ctx, 0, 1)[0]))
    model = build(ctx)
    model[2].requires_grad_(False)
    model = accelerator.prepare(model)
    accelerator.backward(model(batch(ctx, ctx.rank)).square().sum())
    ctx.reached()
    max_norm = MAX_NORM
    if all_parameters:
        if accelerator.sync_gradients:  # not in the midst of an accumulation
            norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
    else:
        norm = accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], max_norm)
    judge(ctx, norm, true, gradients_of(model))


def deepspeed_zero2(ctx: Context, *, configured: bool) -> None:
    """Clips with torch's function between backward and step, or with the key of the configuration."""
    deepspeed = import_deepspeed()
    import torch

    ctx.init_process_group(timeout_s=30)
    true = true_norm(ctx, 0, 1)
    model = build(ctx)
    before = [p.detach().clone() for p in model.parameters()]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": MAX_NORM if configured else 0.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
    engine.backward(engine(batch(ctx, ctx.rank)).square().sum())
    ctx.reached()
    norm = 0.0 if configured else clip(engine, "utils")
    engine.step()
    used = norm_of([(old - new.detach()) / 0.5 for old, new in zip(before, model.parameters())])
    assert abs(float(engine.get_global_grad_norm()) - true) < 0.001 * true
    if not configured:
        raise Symptom(
            "torch's norm is %.4g; %.4g in one process, and the step used gradients of norm %.4g" % (norm, true, used)
        )
    assert abs(used - MAX_NORM) < 0.001, used


def lightning(ctx: Context, *, with_hook: bool) -> None:
    """The Trainer with FSDPStrategy clips by itself, or the hook of the module calls FSDP's method."""
    import lightning.pytorch as pl  # type: ignore[import-not-found]
    import torch
    from lightning.pytorch.strategies import FSDPStrategy  # type: ignore[import-not-found]

    ctx.init_process_group(timeout_s=30)
    os.environ.update(LOCAL_WORLD_SIZE="2", GROUP_RANK="0", TORCHELASTIC_RUN_ID="kb")
    true = true_norm(ctx, 0, 1)
    gradients: List[Any] = []

    class OnCpu(FSDPStrategy):  # type: ignore[misc]
        """Lightning refuses FSDPStrategy itself without a GPU, and FSDPStrategy wraps the module for a GPU."""

        def _setup_model(self, model: Any) -> Any:
            return wrap(ctx, model)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = build(ctx)

        def training_step(self, *_: Any) -> Any:
            return self.net(batch(ctx, ctx.rank)).square().sum()

        def on_train_batch_end(self, *_: Any) -> None:
            gradients.extend(gradients_of(self.trainer.model))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.trainer.model.parameters(), lr=0.1)

    class Clipping(Module):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG002
            self.trainer.model.clip_grad_norm_(gradient_clip_val)

    options: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    options.update(accelerator="cpu", devices=2, strategy=OnCpu(), max_epochs=1, enable_model_summary=False)
    trainer = pl.Trainer(limit_train_batches=1, gradient_clip_val=MAX_NORM, **options)
    ctx.reached()
    trainer.fit(Clipping() if with_hook else Module(), torch.utils.data.DataLoader([0, 0]))
    judge(ctx, true, true, gradients)  # the hook returns no norm


# --- the check: does the code call torch's function with the parameters of an FSDP1 model? -----------------------

TORCH = re.compile(r"(.*\.)?(utils|clip_grad)\.clip_grad_norm_?")
ADVICE = "call model.clip_grad_norm_(max_norm) of the outermost FSDP module, on every rank"


def check(params: Mapping[str, Any]) -> Finding:
    code = params["code"]
    if code is None:
        return unknown("no code was named", advice="--set code=train.py, or a folder of Python files")
    end, read = time.monotonic() + 0.5, 0
    sure: List[str] = []
    unsure: List[str] = []
    files = sorted(code.rglob("*.py")) if os.path.isdir(code) else [code]
    for file in files:
        if time.monotonic() > end:
            break
        try:
            tree = ast.parse(file.read_text("utf-8"))
            for line, is_sure, what in clippings(tree):
                (sure if is_sure else unsure).append("%s:%d: %s" % (file, line, what))
            read += 1
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    if sure:
        return exposed(*sure[:10], advice=ADVICE)
    if not read:
        return unknown("kb could read no Python file in %s" % code)
    if unsure:
        return unknown(*unsure[:10], "kb cannot tell whether FSDP1 shards these parameters", advice=ADVICE)
    return unknown("kb read %d of %d files and found no FSDP1 model clipped by torch's function" % (read, len(files)))


def clippings(tree: ast.AST) -> Iterator[Tuple[int, bool, str]]:
    """Lines that clip wrongly if FSDP1 shards the parameters, whether this file shows that it does, and what to say."""
    imported, wrappers, wrapped = names_of(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    has_method = False
    found: List[Tuple[int, str, str]] = []
    for call in calls:
        name = ast.unparse(call.func)
        what = ast.unparse(call.args[0]) if call.args else ""
        if name in imported or TORCH.fullmatch(name):
            found.append((call.lineno, name, what))
        elif name.endswith(".clip_grad_norm_"):
            has_method = True
            if call.args and "accelerator" in name.lower() and not what.endswith(".parameters()"):
                yield call.lineno, False, "the code passes accelerate %s, not all parameters" % what[:60]
    unsharded = "NO_SHARD" in ast.dump(tree) or has_method
    for line, name, what in found:
        owner = what[: -len(".parameters()")] if what.endswith(".parameters()") else ""
        if wrappers and owner in wrapped and not unsharded:
            yield line, True, "%s clips %s, which FSDP1 has wrapped" % (name, owner)
        elif wrappers:
            yield line, False, "%s(%s, ...) in a file that uses FSDP1" % (name, what[:60])


def names_of(tree: ast.AST) -> Tuple[Set[str], Set[str], Set[str]]:
    """The names of torch's function and of FSDP1 in this file, and the expressions that FSDP1 wraps."""
    imported: Set[str] = set()
    wrappers: Set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = {alias.name: alias.asname or alias.name for alias in node.names}
            imported |= {names[name] for name in ("clip_grad_norm_", "clip_grad_norm") if name in names}
            wrappers |= {names[name] for name in ("FullyShardedDataParallel",) if name in names}
        elif isinstance(node, ast.Attribute) and node.attr == "FullyShardedDataParallel":
            wrappers.add(ast.unparse(node))
    branches = [node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.Try))]
    perhaps = {node for branch in branches for node in ast.walk(branch)}
    wrapped = set()
    for node in ast.walk(tree):
        call = node.value if isinstance(node, ast.Assign) and node not in perhaps else None
        if isinstance(node, ast.Assign) and isinstance(call, ast.Call) and ast.unparse(call.func) in wrappers:
            strategies = [given.value for given in call.keywords if given.arg in ("sharding_strategy", None)]
            if all("ShardingStrategy." in ast.unparse(strategy) for strategy in strategies):
                wrapped |= {ast.unparse(target) for target in node.targets}
    return imported, wrappers, wrapped


DIFFERS = symptom(
    r"gradient norm differs between ranks: [\d.]+ to [\d.]+; [\d.]+ in one process, and clipped to 1 it is 1\.[1-9]"
)
WRONG = symptom(r"gradient norm [\d.]+ on all ranks; [\d.]+ in one process, and clipped to 1 it is (1\.[1-9]|0\.\d)")


def pair(name: str, job: Callable[..., None], because: str, fix: str, **given: Any) -> Experiment:
    """`given` holds the keyword in which the arms differ, with its two values, and optionally `expect` and needs."""
    expect, needs = given.pop("expect", DIFFERS), {"torch": given.pop("torch", ">=2.2")}
    library, stands_for = given.pop("library", {}), given.pop("stands_for", "")
    kind = {"fidelity": "stand-in", "stands_for": stands_for} if stands_for else {"fidelity": "cpu"}
    [(way, (broken, fixed))] = given.items()
    return Experiment(
        name=name,
        control=Arm(partial(job, **{way: broken}), expect=expect, because=because, **kind),
        treatment=Arm(partial(job, **{way: fixed}), expect=completed(), because=fix, **kind),
        needs=Needs(packages={**needs, **library}),
        deadline_s=120.0 if library else 40.0,
        expected_s=(8.0, 8.0) if library else (1.5, 1.5),
    )


UTILS = "torch's clip_grad_norm_ computes the norm of this rank's shard only"
METHOD = "FSDP's clip_grad_norm_ method adds the squares of all shards"
GLOBAL = "clip_by_global_norm counts each parameter once"
UNCLIPPED = symptom(r"torch's norm is 0; \d+\.\d+ in one process, and the step used gradients of norm \d+\.\d+")
SKIPPED = symptom("rank 0 made the step and rank 1 skipped it")
ITEM = symptom(r"norm\.item\(\) is \d+\.\d+ on rank 0 and \d+\.\d+ on rank 1")
WAYS, SWITCH = ("utils", "method"), (False, True)
sharded = pair("fsdp1", fsdp1, UTILS, METHOD, way=WAYS)
probe = Probe(
    check=check,
    params={"code": Param("path", "your training script, or a folder")},
    experiments=(sharded.on_gpus(), sharded),
    variants=(
        pair("orig", partial(fsdp1, original=True), UTILS, METHOD, way=WAYS),
        pair(
            "strategy",
            partial(fsdp1, way="utils"),
            "with SHARD_GRAD_OP, torch's clip_grad_norm_ computes the norm of this rank's shard only",
            "with NO_SHARD every rank holds all gradients, so torch's clip_grad_norm_ is right",
            strategy=("SHARD_GRAD_OP", "NO_SHARD"),
        ),
        pair(
            "mean",
            fsdp1,
            "every rank clips by the mean of the ranks' norms, which is too small",
            METHOD,
            way=("mean", "method"),
            expect=WRONG,
        ),
        pair("value", fsdp1, UTILS, "clip_grad_value_ clips each number by itself", way=("utils", "value")),
        pair(
            "parts",
            fsdp1_parts,
            "only two layers are wrapped, so each layer clips by its own norm",
            "the model around the two layers is wrapped too, so its method sees all of them",
            root=SWITCH,
            expect=WRONG,
        ),
        pair("skip", step_if_finite, UTILS, METHOD, way=WAYS, expect=SKIPPED),
        pair(
            "fsdp2",
            fsdp2,
            "item() of the infinity norm returns the norm of this rank's shard",
            "the code calls full_tensor() before item()",
            full_norm=SWITCH,
            torch=">=2.9",  # with 2.7, 2.8 and gloo the gradients of FSDP2 are wrong
            expect=ITEM,
        ),
        pair("pipeline", pipeline, "each stage clips by the norm of its own layers", GLOBAL, way=("stage", "all")),
        pair(
            "tensor-parallel",
            tensor_parallel,
            "each rank clips by the norm of its part of the layers",
            GLOBAL,
            way=("local", "right"),
        ),
        pair(
            "counted-twice",
            tensor_parallel,
            "the bias that both ranks hold is counted twice",
            GLOBAL,
            way=("all", "right"),
            expect=WRONG,
        ),
        pair(
            "accelerate",
            accelerate_fsdp1,
            "the list lacks the frozen layer, so accelerate falls back to torch's clip_grad_norm_",
            "accelerate recognizes model.parameters() and calls FSDP's method",
            all_parameters=SWITCH,
            library={"accelerate": ">=1.15"},
        ),
        pair(
            "deepspeed",
            deepspeed_zero2,
            "after DeepSpeed's backward, torch's clip_grad_norm_ finds no gradients and clips nothing",
            "DeepSpeed clips, because its configuration has gradient_clipping",
            configured=SWITCH,
            library={"deepspeed": ">=0.19"},
            expect=UNCLIPPED,
        ),
        pair(
            "lightning",
            lightning,
            "the Trainer refuses to clip by norm under FSDPStrategy",
            "configure_gradient_clipping calls FSDP's method",
            with_hook=SWITCH,
            library={"lightning": ">=2.6"},
            stands_for="FSDPStrategy on GPUs; a subclass wraps the module for the CPU",
            expect=raised("`gradient_clip_algorithm='norm'` is currently not supported for `FSDPPrecision`"),
        ),
    ),
)
