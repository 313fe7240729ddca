"""A rank gathers an expert only if one of its tokens chose it, so ranks with different tokens gather different experts.

The first collectives that meet have the same size and complete: a rank assembles an expert from pieces of another one,
and its output is wrong without an error. The hang comes afterwards, when one rank has a call left.
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
    """FSDP with a unit for each expert, which gathers that expert alone, as ZeRO-3 does."""
    import torch

    ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    model, x = model_and_tokens(ctx, every_expert, same_number)
    expected = model(x).detach()  # every rank still has the whole weights
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
    """FSDP2 with one unit for all experts of the block; it reduces an expert without a gradient, or leaves it out."""
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


def token_exchange() -> Any:
    """An all-to-all of tokens whose backward is an all-to-all of their gradients."""
    import torch
    import torch.distributed as dist

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

    return Exchange.apply


def expert_parallel(ctx: Context, *, connected: bool) -> None:
    """Each rank has one expert, and rank 0's expert gets all tokens. With `connected`, rank 1 calls its expert too."""
    import torch

    ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    exchange = token_exchange()
    torch.manual_seed(0)
    before, expert = torch.nn.Linear(8, 8).to(ctx.device), torch.nn.Linear(8, 8).to(ctx.device)
    tokens = torch.ones(2, 8, device=ctx.device)
    received = [2, 2] if ctx.rank == 0 else [0, 0]
    ctx.reached()
    hidden = before(tokens)
    expert_input = exchange(hidden, [2, 0], received)
    if len(expert_input) or connected:
        expert_output = expert(expert_input)  # without tokens: an empty batch
    else:
        expert_output = torch.empty(0, 8, device=ctx.device)
    output = hidden + exchange(expert_output, received, [2, 0])
    output.sum().backward()
    ctx.meet("trained", timeout_s=15)
    assert before.weight.grad is not None


def zero3(ctx: Context, *, leaf: bool) -> None:
    """DeepSpeed on CPU and gloo, without its compiled operators."""
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
    """Rank 0's tokens choose expert 0. Rank 1's choose expert 0 and expert 1, or with `same_number` both expert 1."""
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

    chosen = (ctx.rank if same_number else 0, ctx.rank)  # the router's choice for each token
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Moe(), nn.Linear(8, 8)).to(ctx.device)
    return model, torch.randn(2, 8).to(ctx.device)


def step(ctx: Context, model: Any, x: Any, expected: Any, backward: Any) -> None:
    """Runs one forward and backward; raises `Symptom` if the output is wrong and nothing else fails."""
    wrong = ""
    try:
        output = model(x)
        error = (output.detach() - expected).abs().max().item()
        ctx.note(largest_error_of_the_output=round(error, 5))
        if error > 1e-4:
            wrong = f" Before that, without an error: the output is off by {error:.3f}."
        backward(output.sum())
    except RuntimeError as failure:  # from gloo; with nccl the watchdog ends the process
        raise RuntimeError(f"{failure}.{wrong}") from failure
    ctx.meet("trained", timeout_s=15)  # the rank with fewer calls is alive and busy elsewhere, as in training
    if wrong:
        raise Symptom(f"the step is done, without an error: the output is off by {error:.3f}")


# --- the check: does ZeRO-3 train a model with experts that no leaf module gathers together? ---------------------

LEAVES_BY_DEFAULT = ("mixtral", "qwen2_moe", "qwen3_moe")  # DeepSpeed 0.18 and later, the classes of transformers
PACKED = re.compile("gpt_oss|granitemoe|jetmoe|llama4|qwen3_vl_moe")  # one module has all experts in transformers 4 too
ALL_EXPERTS = {
    "mixtral": (4, 52),
    "qwen2_moe": (4, 52),
    "qwen3_moe": (4, 53),
}  # 4.40 up to this release run all experts


def check(params: Mapping[str, Any]) -> Finding:
    """Reads the DeepSpeed or accelerate configuration, the model's config.json and the installed releases."""
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
    evidence = f"ZeRO stage {stage}; {kind} with {experts or 'no'} experts{', with custom code' if own_code else ''}"
    if stage != 3:
        return unknown(evidence, "only stage 3 gathers weights; the check does not cover gradients of unused experts")
    if not experts and (own_code or kind == "None" or re.search(r"moe|mixtral|expert", json.dumps(model).lower())):
        return unknown(evidence, "kb knows no field of this model's configuration that says how many experts it has")
    if not experts:
        return clear(evidence)
    if leaves:
        advice = "make sure that these are classes of this model"
        return unknown(evidence, f"the configuration names leaf modules: {leaves}", advice=advice)
    transformers, deepspeed = release("transformers"), release("deepspeed")
    installed = f"transformers {transformers or 'not installed'}, DeepSpeed {deepspeed or 'not installed'}"
    if not own_code and kind in LEAVES_BY_DEFAULT and deepspeed >= (0, 18):
        return clear(evidence, installed, "DeepSpeed makes the expert blocks of this model leaf modules by default")
    if not own_code and not transformers:
        advice = "run this check with --python, for the interpreter of the job"
        return unknown(evidence, installed, "the answer depends on the release of transformers", advice=advice)
    if not own_code and kind in ALL_EXPERTS and (4, 40) <= transformers < ALL_EXPERTS[kind]:
        return unknown(
            evidence, installed, "this transformers runs every expert of the model; a copy of its code may not"
        )
    if not own_code and (transformers >= (5, 0) or PACKED.match(kind)):
        advice = "print the names of its modules: without `experts.0` among them, the model is not affected"
        return unknown(
            evidence, installed, "transformers may keep all experts of this model in one module", advice=advice
        )
    return exposed(
        evidence,
        installed,
        "the configuration names no leaf module",
        advice="make the MoE block a leaf module, unless the code already does",
    )


def zero_stage(config: Any) -> Tuple[Any, Any]:
    """The ZeRO stage and the leaf modules that the configuration names."""
    values: Dict[str, Any] = config.values
    if config.kind == "arguments":
        inside = values.get("deepspeed")
        if not isinstance(inside, dict):
            raise ValueError("the file contains no DeepSpeed configuration: name the file that it points to")
        values = inside
    inner = values.get("deepspeed_config" if config.kind == "accelerate" else "zero_optimization") or {}
    if not isinstance(inner, dict):
        raise ValueError("the ZeRO configuration is not a mapping")
    if config.kind == "accelerate":
        return inner.get("zero_stage", 0), inner.get("deepspeed_moe_layer_cls_names")
    return inner.get("stage", 0), inner.get("leaf_module")


def model_config(path: Path) -> Dict[str, Any]:
    document = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"{path} contains no model configuration")
    return document


LOST = rf"{GLOO_TIMEOUT}|Connection (closed|reset) by peer"
GLOO = raised(  # the rank with the wrong output times out, or loses the connection to the rank that timed out
    rf"({LOST}).*Before that, without an error: the output is off",
    after=LOST,
)
SOME = "only rank 1 gathers expert 1, so its calls pair with different calls of rank 0, and the last ones with none"
ALL = "every rank calls every expert, even on an empty batch, so all ranks gather the same experts in order"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(sharded, every_expert=False),
        expect=GLOO,
        because=SOME,
        fidelity="stand-in",
        stands_for="DeepSpeed ZeRO-3; for FSDP2 with a unit for each expert this is the real mechanism",
    ),
    treatment=Arm(
        partial(sharded, every_expert=True),
        expect=completed(),
        because=ALL,
        fidelity="stand-in",
        stands_for="DeepSpeed ZeRO-3; the fix changes the code of the model, as it would with DeepSpeed",
    ),
    expected_s=(2.4, 0.4),
)
silent = Experiment(
    name="silent",
    control=Arm(
        partial(sharded, every_expert=False, same_number=True),
        expect=symptom(r"the step is done, without an error: the output is off by \d"),
        because="the ranks use different experts but equally many, so every call pairs with one of the same size",
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
        because="the block is one unit, and rank 0 leaves the expert that it does not use out of its reduction",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(whole_block, unused_too=True),
        expect=completed(),
        because="with set_reduce_scatter_unused_params(True), FSDP2 reduces zeros for an expert without a gradient",
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
        because="rank 1 received no token and returns a fresh tensor, so its backward makes no all-to-all",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(expert_parallel, connected=True),
        expect=completed(),
        because="rank 1 calls its expert on an empty batch, so its backward makes the same calls as rank 0's",
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
        because="the MoE block is a leaf module, so every rank gathers and reduces all its experts together",
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
        "model": Param("path", "the folder of the model, or its config.json, for the check"),
    },
    check=check,
    experiments=(
        gloo.on_gpus(expect=raised(rf"Watchdog caught collective operation timeout: WorkNCCL\(|{NCCL2_TIMEOUT}")),
        gloo,
    ),
    variants=(silent, one_unit, parallel, deepspeed_on_cpu),
)
