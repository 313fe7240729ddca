"""A trainer copies the policy as its frozen reference, as TRL's create_reference_model does, and runs out of memory."""

from __future__ import annotations

import subprocess
from functools import partial
from typing import Any, List, Mapping, Optional, Tuple

from kb.cpu_arms import GPU_OOM, HOST_OOM, LIMITED_ADDRESS_SPACE, limit_address_space
from kb.packages import release, version
from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, unknown

GIB = 1 << 30
WIDTH = 4096  # a float32 layer takes 64 MiB, so it has its own mapping and does not fragment glibc's heap
CPU_LAYERS, CPU_ROOM = 4, 150 << 20  # bytes beyond the policy, far less than a copy of it and far more than an adapter
GPU_LAYERS, GPU_MIB = 10, 1024  # a policy of 640 MiB fits into 1024 once, but not twice


def start(ctx: Context, *, way: str, dtype: str = "float32") -> None:
    """Sets up policy and reference as a preference trainer does, and compares them after a step of the policy."""
    import torch
    from torch import nn

    on_gpu = ctx.device.type == "cuda"
    weights = getattr(torch, dtype)
    policy = nn.Sequential()
    for _ in range(GPU_LAYERS if on_gpu else CPU_LAYERS):
        policy.append(nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False, device=ctx.device, dtype=weights))
    for parameter in policy.parameters():
        nn.init.constant_(parameter, 1 / WIDTH)
    x = torch.ones(1, WIDTH, device=ctx.device, dtype=weights)
    with torch.no_grad():
        at_start = policy(x)
    if not on_gpu:
        limit_address_space(CPU_ROOM)
    ctx.reached()
    reference = make_reference(policy, way)
    with torch.no_grad():
        outputs = {"x": policy(x)} if way == "precomputed" else {}  # one pass over the data, before the first step
        moved = _after_a_step(policy, x, way == "adapter")
        of_reference = outputs["x"] if outputs else reference(x)
        assert torch.equal(of_reference, at_start), "the reference differs from the model at the start of training"
        assert not torch.equal(moved, at_start), "the policy has not changed"
    ctx.note(weights_mib=sum(p.numel() * p.element_size() for p in policy.parameters()) >> 20)


def make_reference(policy: Any, way: str) -> Any:
    if way == "copy":
        return create_reference_model(policy)
    return policy if way == "adapter" else None


def _after_a_step(policy: Any, x: Any, adapter: bool) -> Any:
    """Output of the policy after a change of what it trains: a rank-1 adapter, or the weights."""
    if adapter:
        into, out_of = x.new_ones(WIDTH, 1), x.new_ones(1, WIDTH)
        return policy(x) + x @ into @ out_of
    for parameter in policy.parameters():
        parameter.mul_(2)
    return policy(x)


def create_reference_model(model: Any) -> Any:
    """Copies the model as trl does (trl/experimental/utils.py), without the part that shares layers."""
    from copy import deepcopy

    ref_model = deepcopy(model)
    return ref_model.requires_grad_(False).eval()


WEIGHT_BYTES = {
    "fp32": 4.0,
    "float32": 4.0,
    "bf16": 2.0,
    "bfloat16": 2.0,
    "fp16": 2.0,
    "float16": 2.0,
    "int8": 1.0,
    "nf4": 0.5,
}
WITH_REFERENCE = ("dpo", "kto", "bco", "ppo", "grpo", "rloo", "online_dpo", "nash_md", "xpo")
PRECOMPUTES = ("dpo", "kto", "bco")
WITHOUT = ("orpo", "cpo", "simpo", "sft", "reward")
OPTIMIZERS = {"adamw": 2.0, "adamw_8bit": None, "paged": 0.0, "sgd": 0.0}  # moments, in multiples of the weights
YES, NO = ("yes", "true", "1", "lora", "qlora"), ("no", "false", "0", "none")
# Bytes per parameter: fp32 weights, and moments of 4 bytes instead of 2.
FP32_EXTRA = {"adamw": 8.0, "adamw_8bit": 4.0, "paged": 0.0, "sgd": 4.0}
COMFORTABLE = 0.8  # of the GPU; the rest is for activations, whose size kb does not know


def check(params: Mapping[str, Any]) -> Finding:
    """Does a second copy of the weights fit next to the policy? Does not count activations."""
    trainer, billions = params["trainer"].lower().replace("-", "_"), params["params"]
    if trainer in WITHOUT:
        return clear("%s makes no reference model, so its out-of-memory has another cause" % trainer)
    if trainer not in WITH_REFERENCE:
        return unknown("kb does not know whether %s has a reference model" % trainer)
    if billions is None:
        return unknown(
            "kb does not know the number of parameters",
            advice="run --set params=8 --set dtype=bf16, with params in billions",
        )
    invalid = _invalid_value(params)
    if invalid or not 0 < billions < 1e6 or params["shards"] < 1 or params["zero"] not in (1, 2, 3):
        return unknown(invalid or "params and shards must be above 0, and zero must be 1, 2 or 3")
    memory, source = _gpu_memory(params["gpu_memory"])
    if memory is None:
        return unknown(source, advice="run --set gpu_memory=44.4 (GiB of one GPU, also with data parallelism)")
    return _judge(params, trainer, memory, source)


def _invalid_value(params: Mapping[str, Any]) -> str:
    words = {"dtype": tuple(WEIGHT_BYTES), "optimizer": tuple(OPTIMIZERS), "adapter": YES + NO, "precompute": YES + NO}
    for name, known in words.items():
        if params[name].lower() not in known:
            return "%s=%s is not one of %s" % (name, params[name], ", ".join(known))
    return ""


def _judge(params: Mapping[str, Any], trainer: str, memory: float, source: str) -> Finding:
    whole = params["params"] * 1e9 * WEIGHT_BYTES[params["dtype"].lower()] / GIB
    weights, gradients, states = (whole / (params["shards"] if params["zero"] >= stage else 1) for stage in (3, 2, 1))
    per_weight = OPTIMIZERS[params["optimizer"].lower()]
    split = states / whole
    moments = params["params"] * 2e9 / GIB * split if per_weight is None else per_weight * states
    has_adapter = params["adapter"].lower() in YES
    has_copy, reason = (False, "with an adapter, the base weights are the reference") if has_adapter else (True, "")
    if not has_adapter and params["precompute"].lower() in YES and trainer in PRECOMPUTES:
        has_copy, reason = _copy_despite_precompute(trainer)
    parts = [("policy", weights), ("reference", weights if has_copy else 0.0)]
    parts += [] if has_adapter else [("gradients", gradients), ("optimizer", moments)]
    need = sum(size for _, size in parts)
    message = "%s = %.1f GiB per GPU, which has %.1f GiB (%s)" % (
        " + ".join("%s %.1f" % part for part in parts),
        need,
        memory,
        source,
    )
    notes = [message, *([reason] if reason else [])]
    without = need - weights if has_copy else need
    if trainer in ("grpo", "rloo") and has_copy:
        notes.append("%s makes the copy only if beta is not 0" % trainer)
        if need > memory >= without:
            return unknown(*notes, "kb does not know beta; without the copy %.1f GiB do" % without, advice=ADVICE)
    if need > memory and without > memory:
        return exposed(*notes, "it does not fit even without the reference: shard the weights first", advice=ADVICE)
    if need > memory:
        when = "at the first step" if 2 * weights <= memory else "while it makes the reference"
        return exposed(*notes, "it fails %s; without the reference %.1f GiB do" % (when, without), advice=ADVICE)
    if trainer == "ppo":
        return unknown(*notes, "ppo also has a value model and a reward model, whose sizes kb does not know")
    if not has_copy and need + weights > COMFORTABLE * memory:
        return unknown(*notes, "a ref_model that you pass stays on the GPU, and kb does not know whether you pass one")
    need_in_fp32 = need
    if has_copy and _loads_fp32(trainer):
        need_in_fp32 += params["params"] * 4e9 / GIB * weights / whole - weights
    if need_in_fp32 > need and need_in_fp32 > COMFORTABLE * memory:
        return unknown(
            *notes, "with an fp32 reference, as trl 0.29 to 1.15 may load it, it needs %.1f GiB" % need_in_fp32
        )
    keeps_fp32 = need_in_fp32 + params["params"] * FP32_EXTRA[params["optimizer"].lower()] * 1e9 / GIB * split
    if not has_adapter and WEIGHT_BYTES[params["dtype"].lower()] < 4 and keeps_fp32 > COMFORTABLE * memory:
        return unknown(*notes, "an optimizer with fp32 weights, such as DeepSpeed's, needs %.1f GiB" % keeps_fp32)
    if need > COMFORTABLE * memory:
        return unknown(*notes, "%.1f GiB are left for activations, whose size kb does not know" % (memory - need))
    return clear(*notes)


SECOND_LOAD_SINCE = {"dpo": (0, 29), "kto": (1, 2), "grpo": (0, 0), "rloo": (0, 0)}  # releases of trl


def _loads_fp32(trainer: str) -> bool:
    """Whether trl loads the reference in fp32: before 1.16 its dtype is that of model_init_kwargs, fp32 by default."""
    numbers = release("trl")[:2]
    return trainer in SECOND_LOAD_SINCE and (not numbers or SECOND_LOAD_SINCE[trainer] <= numbers < (1, 16))


def _copy_despite_precompute(trainer: str) -> Tuple[bool, str]:
    """Whether a reference is loaded although its log-probabilities are precomputed, as DPO of trl 0.29 to 1.1 does."""
    numbers = release("trl")[:2]
    if not numbers:
        return False, "precompute needs no copy, except in DPO of trl 0.29 to 1.1 (kb found no trl)"
    if trainer == "dpo" and (0, 29) <= numbers < (1, 2):
        return True, "trl %s makes the copy despite precompute_ref_log_probs; 1.2.0 does not" % version("trl")
    return False, "with precompute_ref_log_probs trl %s makes no copy" % version("trl")


def _gpu_memory(given: Optional[float]) -> Tuple[Optional[float], str]:
    """Returns the GiB of the smallest GPU and their source, or None and the reason."""
    if given is not None:
        return (given, "gpu_memory") if 0 < given < 1e6 else (None, "gpu_memory must be above 0")
    query = ["nvidia-smi", "--query-gpu=memory.total,mig.mode.current", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=0.8, check=True).stdout
        if "Enabled" in output:
            return None, "MIG divides a GPU, and kb does not know the memory of the job's instance"
        sizes: List[int] = [int(line.split(",")[0]) for line in output.split("\n") if line.strip()]
        return (min(sizes) / 1024, "nvidia-smi, smallest of %d" % len(sizes))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return None, "nvidia-smi does not report the memory of the GPU: %s" % type(error).__name__


ADVICE = "train an adapter, precompute the reference's log-probabilities, or shard both with ZeRO-3 or FSDP"
COPY = "the reference is a deepcopy of the policy, and the memory is enough for only one of them"
SHARED = "the policy trains an adapter, and its base weights are also the reference"


def experiment(name: str, way: str, because: str, dtype: str = "float32") -> Experiment:
    """The control arm copies a float32 policy; the treatment arm makes its reference in another way or dtype."""
    control, treatment = partial(start, way="copy"), partial(start, way=way, dtype=dtype)
    return Experiment(
        name=name,
        control=Arm(control, HOST_OOM, because=COPY, fidelity="stand-in", stands_for=LIMITED_ADDRESS_SPACE),
        treatment=Arm(treatment, completed(), because=because, fidelity="stand-in", stands_for=LIMITED_ADDRESS_SPACE),
        world_size=1,
        needs=Needs(memory_mib=1024),
        deadline_s=60,
        expected_s=(0.4, 0.3),
    )


rlimit = experiment("rlimit", "adapter", SHARED)

probe = Probe(
    check=check,
    params={
        "params": Param("float", "number of parameters of the model, in billions"),
        "dtype": Param("str", "dtype of the weights: bf16, fp16, fp32, int8 or nf4", "bf16"),
        "gpu_memory": Param("float", "GiB of one GPU (default: what nvidia-smi reports)"),
        "adapter": Param("str", "yes if the job trains a LoRA or QLoRA adapter", "no"),
        "precompute": Param("str", "yes if precompute_ref_log_probs=True", "no"),
        "trainer": Param("str", "which trainer: dpo, kto, ppo, grpo, orpo, ...", "dpo"),
        "shards": Param("int", "number of GPUs over which ZeRO or FSDP shards; 1 for DDP", 1),
        "zero": Param(
            "int", "stage of ZeRO: 1 shards the optimizer, 2 also the gradients, 3 (and FSDP) also the weights", 3
        ),
        "optimizer": Param("str", "which optimizer: adamw, adamw_8bit, paged (state on the host) or sgd", "adamw"),
    },
    experiments=(
        rlimit.on_gpus(
            1,
            name="gpu",
            expect=GPU_OOM,
            gpu_memory_mib=GPU_MIB,
            expected_s=(8, 8),
        ),
        rlimit,
    ),
    variants=(
        experiment(
            "precomputed",
            "precomputed",
            "the policy computes the reference's outputs once, before training, so there is no copy",
        ),
        experiment(
            "bf16", "copy", "policy and copy are bfloat16, which takes half the memory of float32", dtype="bfloat16"
        ),
    ),
)
