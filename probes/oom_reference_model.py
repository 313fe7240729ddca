"""A trainer copies the policy as its frozen reference and the copy does not fit, as create_reference_model of TRL."""

from __future__ import annotations

import subprocess
from functools import partial
from typing import Any, List, Mapping, Optional, Tuple

from kb.cpu_arms import GPU_OOM, HOST_OOM, LIMITED_ADDRESS_SPACE, limit_address_space
from kb.packages import release, version
from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, unknown

GIB = 1 << 30
WIDTH = 4096  # a float32 layer takes 64 MiB: its own mapping, so that the fragments of glibc's heap play no part
CPU_LAYERS, CPU_ROOM = 4, 150 << 20  # bytes beyond the policy: far below a copy of it, far above an adapter
GPU_LAYERS, GPU_MIB = 10, 1024  # 640 MiB under a cap of 1024: one policy fits, two do not


def start(ctx: Context, *, way: str, dtype: str = "float32") -> None:
    """Set up policy and reference as a preference trainer does, then compare them after a step of the policy."""
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
        assert torch.equal(of_reference, at_start), "the reference is not the model that training began with"
        assert not torch.equal(moved, at_start), "the policy did not move"
    ctx.note(weights_mib=sum(p.numel() * p.element_size() for p in policy.parameters()) >> 20)


def make_reference(policy: Any, way: str) -> Any:
    if way == "copy":
        return create_reference_model(policy)
    return policy if way == "adapter" else None


def _after_a_step(policy: Any, x: Any, adapter: bool) -> Any:
    """Output of the policy after its trainable part has moved: a rank-1 adapter, or the weights themselves."""
    if adapter:
        into, out_of = x.new_ones(WIDTH, 1), x.new_ones(1, WIDTH)
        return policy(x) + x @ into @ out_of
    for parameter in policy.parameters():
        parameter.mul_(2)
    return policy(x)


def create_reference_model(model: Any) -> Any:
    """The copy as trl makes it (trl/experimental/utils.py), without the part that shares layers."""
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
FP32_BESIDE = {"adamw": 8.0, "adamw_8bit": 4.0, "paged": 0.0, "sgd": 4.0}  # bytes: fp32 weights, moments of 4 not 2
COMFORT = 0.8  # of the card: what is left then is for activations, of which nothing is known here


def check(params: Mapping[str, Any]) -> Finding:
    """Does a second copy of the weights fit beside the policy? Adds up what is certain; activations come on top."""
    trainer, billions = params["trainer"].lower().replace("-", "_"), params["params"]
    if trainer in WITHOUT:
        return clear("%s makes no reference model: an out-of-memory there is not this one" % trainer)
    if trainer not in WITH_REFERENCE:
        return unknown("whether %s keeps a reference model is not known here" % trainer)
    if billions is None:
        return unknown("the number of parameters was not given", advice="--set params=8 --set dtype=bf16 (billions)")
    wrong = _wrong_word(params)
    if wrong or not 0 < billions < 1e6 or params["shards"] < 1 or params["zero"] not in (1, 2, 3):
        return unknown(wrong or "params and shards are numbers above zero, zero is 1, 2 or 3")
    memory, source = _gpu_memory(params["gpu_memory"])
    if memory is None:
        return unknown(source, advice="--set gpu_memory=44.4 (GiB of one GPU: data-parallel ranks do not add up)")
    return _judge(params, trainer, memory, source)


def _wrong_word(params: Mapping[str, Any]) -> str:
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
    has_copy, why = (False, "the base weights with the adapter off are the reference") if has_adapter else (True, "")
    if not has_adapter and params["precompute"].lower() in YES and trainer in PRECOMPUTES:
        has_copy, why = _copy_despite_precompute(trainer)
    parts = [("policy", weights), ("reference", weights if has_copy else 0.0)]
    parts += [] if has_adapter else [("gradients", gradients), ("optimizer", moments)]
    need = sum(size for _, size in parts)
    message = "%s = %.1f GiB per GPU, which has %.1f GiB (%s)" % (
        " + ".join("%s %.1f" % part for part in parts),
        need,
        memory,
        source,
    )
    notes = [message, *([why] if why else [])]
    without = need - weights if has_copy else need
    if trainer in ("grpo", "rloo") and has_copy:
        notes.append("%s makes the copy only when beta is not 0" % trainer)
        if need > memory >= without:
            return unknown(*notes, "without it %.1f GiB would do, and beta is not known here" % without, advice=ADVICE)
    if need > memory and without > memory:
        return exposed(*notes, "it does not fit without the reference either: shard the weights first", advice=ADVICE)
    if need > memory:
        when = "at the first step" if 2 * weights <= memory else "while the reference is made"
        return exposed(*notes, "without the reference %.1f GiB would do; it ends %s" % (without, when), advice=ADVICE)
    if trainer == "ppo":
        return unknown(*notes, "ppo also holds a value model and a reward model, whose size is not known here")
    if not has_copy and need + weights > COMFORT * memory:
        return unknown(*notes, "a ref_model that you pass stays on the GPU: whether you do is not known here")
    need_in_fp32 = need
    if has_copy and _loads_fp32(trainer):
        need_in_fp32 += params["params"] * 4e9 / GIB * weights / whole - weights
    if need_in_fp32 > need and need_in_fp32 > COMFORT * memory:
        return unknown(*notes, "with the reference in fp32, as trl 0.29 to 1.15 may load it, %.1f GiB" % need_in_fp32)
    keeps_fp32 = need_in_fp32 + params["params"] * FP32_BESIDE[params["optimizer"].lower()] * 1e9 / GIB * split
    if not has_adapter and WEIGHT_BYTES[params["dtype"].lower()] < 4 and keeps_fp32 > COMFORT * memory:
        return unknown(*notes, "an optimizer that keeps fp32 weights, as DeepSpeed's, needs %.1f GiB" % keeps_fp32)
    if need > COMFORT * memory:
        return unknown(*notes, "%.1f GiB are left for activations, which are not known here" % (memory - need))
    return clear(*notes)


SECOND_LOAD_SINCE = {"dpo": (0, 29), "kto": (1, 2), "grpo": (0, 0), "rloo": (0, 0)}  # of trl


def _loads_fp32(trainer: str) -> bool:
    """Before 1.16 trl's second load takes its dtype from model_init_kwargs, fp32 by default, not from the policy."""
    numbers = release("trl")[:2]
    return trainer in SECOND_LOAD_SINCE and (not numbers or SECOND_LOAD_SINCE[trainer] <= numbers < (1, 16))


def _copy_despite_precompute(trainer: str) -> Tuple[bool, str]:
    """trl 0.29.0 to 1.1.x load the reference of DPO even when its log-probabilities are precomputed."""
    numbers = release("trl")[:2]
    if not numbers:
        return False, "precompute drops the copy, except in DPO of trl 0.29 to 1.1 (trl is not installed here)"
    if trainer == "dpo" and (0, 29) <= numbers < (1, 2):
        return True, "trl %s keeps the copy in spite of precompute_ref_log_probs; 1.2.0 does not" % version("trl")
    return False, "precompute_ref_log_probs drops the copy (trl %s)" % version("trl")


def _gpu_memory(given: Optional[float]) -> Tuple[Optional[float], str]:
    """GiB of the smallest GPU, and the source; None with the reason."""
    if given is not None:
        return (given, "as given") if 0 < given < 1e6 else (None, "gpu_memory is a number above zero")
    query = ["nvidia-smi", "--query-gpu=memory.total,mig.mode.current", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=0.8, check=True).stdout
        if "Enabled" in output:
            return None, "a GPU is divided by MIG: give the memory of the instance"
        sizes: List[int] = [int(line.split(",")[0]) for line in output.split("\n") if line.strip()]
        return (min(sizes) / 1024, "nvidia-smi, smallest of %d" % len(sizes))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return None, "the memory of the GPU was not given and nvidia-smi does not tell it: %s" % type(error).__name__


ADVICE = "train an adapter, precompute the reference's log-probabilities, or shard both with ZeRO-3 or FSDP"
COPY = "the reference is a deepcopy beside the policy, and only the policy fits"
SHARED = "an adapter is trained, and the same weights with the adapter off are the reference"


def experiment(name: str, way: str, because: str, dtype: str = "float32") -> Experiment:
    """The control arm copies a float32 policy; the treatment arm has another way, or another dtype."""
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
        "params": Param("float", "parameters of the model, in billions"),
        "dtype": Param("str", "of the weights: bf16, fp16, fp32, int8 or nf4", "bf16"),
        "gpu_memory": Param("float", "GiB of one GPU; asked of nvidia-smi when not given"),
        "adapter": Param("str", "yes when a LoRA or QLoRA adapter is trained", "no"),
        "precompute": Param("str", "yes with precompute_ref_log_probs=True", "no"),
        "trainer": Param("str", "dpo, kto, ppo, grpo, orpo, ...", "dpo"),
        "shards": Param("int", "GPUs that ZeRO or FSDP splits over; 1 for DDP", 1),
        "zero": Param("int", "stage of ZeRO: 1 splits the optimizer, 2 the gradients too, 3 (and FSDP) all", 3),
        "optimizer": Param("str", "adamw, adamw_8bit, paged (state on the host) or sgd", "adamw"),
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
        experiment("precomputed", "precomputed", "the reference's outputs are made once, before training, and no copy"),
        experiment("bf16", "copy", "policy and copy are bfloat16, half of float32", dtype="bfloat16"),
    ),
)
