"""An expert is gathered only where a token chose it, so ranks with other tokens gather other experts.

The first collectives that meet have one size and complete: an expert is put together from pieces of another one, and
the output is wrong without an error. The hang comes afterwards, when one rank has a call left.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from kb.cpu_arms import import_deepspeed
from kb.packages import release
from kb.probe import (
    GLOO_TIMEOUT,
    NCCL2_TIMEOUT,
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


def sharded(ctx: Context, *, every_expert: bool, same_number: bool = False) -> None:
    """FSDP with a unit for each expert, which gathers it by itself, as ZeRO-3 does."""
    import torch

    ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    model, x = model_and_tokens(ctx, every_expert, same_number)
    expected = model(x).detach()  # the same weights on every rank, not sharded yet
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7):  # FSDP2 on the CPU fails there
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrap = partial(FullyShardedDataParallel, use_orig_params=True, device_id=ctx.device)
        for at, expert in enumerate(model[1].experts):
            model[1].experts[at] = wrap(expert)
        model = wrap(model)
    else:
        fully_shard(ctx, [*model[1].experts, model])
    ctx.reached()
    step(ctx, model, x, expected, torch.Tensor.backward)


def whole_block(ctx: Context, *, unused_too: bool) -> None:
    """FSDP2 with one unit for all experts of the block; an expert without a gradient is reduced too, or left out."""
    import torch

    ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    model, x = model_and_tokens(ctx, every_expert=False)
    expected = model(x).detach()
    fully_shard(ctx, [model[1], model])
    if unused_too:
        model.set_reduce_scatter_unused_params(True)
    ctx.reached()
    step(ctx, model, x, expected, torch.Tensor.backward)


def fully_shard(ctx: Context, modules: Sequence[Any]) -> None:
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    for module in modules:
        fsdp.fully_shard(module, mesh=mesh)


def expert_parallel(ctx: Context, *, connected: bool) -> None:
    """Each rank has one expert; the tokens of both go to rank 0's. Is what rank 1 returns connected to its input?"""
    import torch

    dist = ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)

    class Exchange(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, rows: torch.Tensor, sent: List[int], received: List[int]) -> torch.Tensor:
            context.sizes = sent, received
            result = rows.new_empty(sum(received), rows.shape[1])
            dist.all_to_all_single(result, rows.contiguous(), received, sent)
            return result

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> Any:
            sent, received = context.sizes
            result = gradient.new_empty(sum(sent), gradient.shape[1])
            dist.all_to_all_single(result, gradient.contiguous(), sent, received)
            return result, None, None

    torch.manual_seed(0)
    before, expert = torch.nn.Linear(8, 8).to(ctx.device), torch.nn.Linear(8, 8).to(ctx.device)
    tokens = torch.ones(2, 8, device=ctx.device)
    arriving = [2, 2] if ctx.rank == 0 else [0, 0]
    ctx.reached()
    hidden = before(tokens)
    expert_input = Exchange.apply(hidden, [2, 0], arriving)
    if len(expert_input) or connected:
        expert_output = expert(expert_input)  # without tokens: an empty batch
    else:
        expert_output = torch.empty(0, 8, device=ctx.device)
    output = hidden + Exchange.apply(expert_output, arriving, [2, 0])
    output.sum().backward()
    ctx.meet("trained", timeout_s=15)
    assert before.weight.grad is not None


def zero3(ctx: Context, *, leaf: bool) -> None:
    """DeepSpeed itself, on CPU and gloo, without its compiled operators."""
    import torch

    deepspeed = import_deepspeed()
    ctx.init_process_group(timeout_s=2)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model, x = model_and_tokens(ctx, every_expert=False)
    expected = model(x).detach()
    block = model[1]
    if leaf:
        set_z3_leaf_modules = deepspeed.utils.set_z3_leaf_modules
        set_z3_leaf_modules(model, [type(block)])
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # shard small weights too
            "zero_allow_untested_optimizer": True,
        },
    )[0]
    ctx.reached()
    step(ctx, engine, x, expected, engine.backward)


def model_and_tokens(ctx: Context, every_expert: bool, same_number: bool = False) -> Tuple[Any, Any]:
    """Rank 0's two tokens choose expert 0, rank 1's one expert each, or with `same_number` both expert 1."""
    import torch
    from torch import nn

    class Moe(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = torch.tensor([row for row in range(2) if chosen[row] == number], dtype=torch.long).to(x.device)
                if len(rows) == 0 and not every_expert:
                    continue
                total = total.index_add(0, rows, expert(x[rows]))  # with no rows: an empty batch
            return total

    chosen = (ctx.rank if same_number else 0, ctx.rank)  # what a router would say
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Moe(), nn.Linear(8, 8)).to(ctx.device)
    return model, torch.randn(2, 8).to(ctx.device)


def step(ctx: Context, model: Any, x: Any, expected: Any, backward: Any) -> None:
    wrong = ""
    try:
        output = model(x)
        error = (output.detach() - expected).abs().max().item()
        ctx.note(largest_error_of_the_output=round(error, 5))
        if error > 1e-4:
            wrong = f" Before that, without an error: the output is off by {error:.3f}."
        backward(output.sum())
    except RuntimeError as failure:  # gloo; with nccl the watchdog ends the process
        raise RuntimeError(f"{failure}.{wrong}") from failure
    ctx.meet("trained", timeout_s=15)  # the rank with fewer calls is alive and busy elsewhere, as in training
    if wrong:
        raise Symptom(f"the step is done, without an error: the output is off by {error:.3f}")


# --- the check: ZeRO-3, a model with experts, and nothing that gathers them together? ----------------------------

LEAVES_BY_DEFAULT = ("mixtral", "qwen2_moe", "qwen3_moe")  # DeepSpeed 0.18 and later, the classes of transformers
PACKED = re.compile("gpt_oss|granitemoe|jetmoe|llama4|qwen3_vl_moe")  # one module has all experts, before 5 too
ALL_EXPERTS = {"mixtral": (4, 52), "qwen2_moe": (4, 52), "qwen3_moe": (4, 53)}  # from 4.40 to before it all experts run


def check(params: Mapping[str, Any]) -> Finding:
    """Read the DeepSpeed or accelerate configuration and the model's config.json; look up the installed releases."""
    if params["config"] is None or params["model"] is None:
        return unknown("no training configuration and model were named", advice="--set config=ds.json --set model=DIR")
    try:
        stage, leaves = zero_stage(read_config(params["config"]))
        model = model_config(params["model"])
    except (UnreadableConfig, OSError, ValueError) as error:
        return unknown(str(error))
    keys = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    inner = model.get("text_config")
    configs = [model, inner] if isinstance(inner, dict) else [model]
    experts = next((config[key] for config in configs for key in keys if key in config), 0)
    kind, own_code = str(model.get("model_type")), bool(model.get("auto_map"))
    evidence = f"ZeRO stage {stage}; {kind} with {experts or 'no'} experts{', code of its own' if own_code else ''}"
    if stage != 3:
        return unknown(evidence, "only stage 3 gathers weights; gradients of unused experts are another matter")
    if not experts and (own_code or kind == "None" or re.search(r"moe|mixtral|expert", json.dumps(model).lower())):
        return unknown(evidence, "the configuration does not say how many, under any name that is known here")
    if not experts:
        return clear(evidence)
    if leaves:
        return unknown(evidence, f"leaf modules are named: {leaves}", advice="they must be classes of this model")
    transformers, deepspeed = release("transformers"), release("deepspeed")
    installed = f"transformers {transformers or 'not installed'}, DeepSpeed {deepspeed or 'not installed'}"
    if not own_code and kind in LEAVES_BY_DEFAULT and deepspeed >= (0, 18):
        return clear(evidence, installed, "DeepSpeed makes the expert blocks of this model leaf modules by itself")
    if not own_code and not transformers:
        return unknown(evidence, installed, "transformers releases differ in it", advice="run this in the job's Python")
    if not own_code and kind in ALL_EXPERTS and (4, 40) <= transformers < ALL_EXPERTS[kind]:
        return unknown(evidence, installed, "this release runs every expert of it; copies in other code may not")
    if not own_code and (transformers >= (5, 0) or PACKED.match(kind)):
        return unknown(evidence, installed, "transformers may pack the experts of this model: look for `experts.0`")
    return exposed(
        evidence, installed, "no leaf module is named there", advice="make the MoE block one, if the code does not"
    )


def zero_stage(config: Any) -> Tuple[Any, Any]:
    """The stage, and the leaf modules in the configuration."""
    values: Dict[str, Any] = config.values
    if config.kind == "arguments":
        inside = values.get("deepspeed")
        if not isinstance(inside, dict):
            raise ValueError("the arguments hold no DeepSpeed configuration: name the file that they point to")
        values = inside
    inner = values.get("deepspeed_config" if config.kind == "accelerate" else "zero_optimization") or {}
    if not isinstance(inner, dict):
        raise ValueError("the configuration of ZeRO is no mapping")
    if config.kind == "accelerate":
        return inner.get("zero_stage", 0), inner.get("deepspeed_moe_layer_cls_names")
    return inner.get("stage", 0), inner.get("leaf_module")


def model_config(path: Path) -> Dict[str, Any]:
    document = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds no model configuration")
    return document


LOST = rf"{GLOO_TIMEOUT}|Connection (closed|reset) by peer"
GLOO = raised(  # the rank whose output is wrong times out, or loses the other one that did
    rf"({LOST}).*Before that, without an error: the output is off",
    after=LOST,
)
SOME = "only rank 1 has a token for expert 1, so its calls meet other calls of rank 0, and its last ones none"
ALL = "each rank runs each expert, if need be on an empty batch, so all ranks gather the same experts in one order"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(sharded, every_expert=False),
        expect=GLOO,
        because=SOME,
        fidelity="stand-in",
        stands_for="DeepSpeed ZeRO-3; for FSDP2 with each expert wrapped by itself this is the real thing",
    ),
    treatment=Arm(
        partial(sharded, every_expert=True),
        expect=completed(),
        because=ALL,
        fidelity="stand-in",
        stands_for="DeepSpeed ZeRO-3; the model's own code is changed, as it would be there",
    ),
    expected_s=(2.4, 0.4),
)
silent = Experiment(
    name="silent",
    control=Arm(
        partial(sharded, every_expert=False, same_number=True),
        expect=symptom(r"the step is done, without an error: the output is off by \d"),
        because="each rank uses one expert, but another one, so every call meets a call of the same size",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(sharded, every_expert=True, same_number=True), expect=completed(), because=ALL, fidelity="cpu"
    ),
    expected_s=(0.4, 0.4),
)
one_unit = Experiment(
    name="whole-block",
    control=Arm(
        partial(whole_block, unused_too=False),
        expect=raised(rf"{LOST}|op\.preamble\.length <= op\.nbytes"),
        because="the block is one unit, and the expert that rank 0 does not use is left out of its reduction",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(whole_block, unused_too=True),
        expect=completed(),
        because="set_reduce_scatter_unused_params(True): zeros are reduced for the expert without a gradient",
        fidelity="cpu",
    ),
    needs=Needs(packages={"torch": ">=2.13"}),
    expected_s=(2.4, 0.4),
)
parallel = Experiment(
    name="expert-parallel",
    control=Arm(
        partial(expert_parallel, connected=False),
        expect=raised(LOST),
        because="rank 1 got no token and returns a fresh tensor, so it makes no all-to-all in its backward pass",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(expert_parallel, connected=True),
        expect=completed(),
        because="rank 1 calls its expert on no rows, whose output depends on it: its backward has the same calls",
        fidelity="cpu",
    ),
    expected_s=(2.4, 0.3),
)
COUNTED = {"LOCAL_SIZE": "2"}  # without it DeepSpeed 0.14 counts CPUs as devices with numactl, which few machines have
deepspeed_on_cpu = Experiment(
    name="deepspeed",
    control=Arm(partial(zero3, leaf=False), expect=GLOO, because=SOME, fidelity="cpu", env=COUNTED),
    treatment=Arm(
        partial(zero3, leaf=True),
        expect=completed(),
        because="the MoE block is a leaf module: ZeRO-3 gathers and reduces all its experts together on every rank",
        fidelity="cpu",
        env=COUNTED,
    ),
    needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.14"}),
    deadline_s=90,
    expected_s=(6, 4),
)

probe = Probe(
    params={
        "config": Param("path", "your DeepSpeed JSON or accelerate configuration, for the check"),
        "model": Param("path", "the model's folder, or its config.json, for the check"),
    },
    check=check,
    experiments=(
        gloo.on_gpus(expect=raised(rf"Watchdog caught collective operation timeout: WorkNCCL\(|{NCCL2_TIMEOUT}")),
        gloo,
    ),
    variants=(silent, one_unit, parallel, deepspeed_on_cpu),
)
