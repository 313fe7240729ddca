"""A loss over a large vocabulary creates the logits of all tokens at once, or of one slice of tokens at a time."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any, Dict, Mapping

from kb.cpu_arms import GPU_OOM, HOST_OOM, LIMITED_ADDRESS_SPACE, limit_address_space
from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, unknown
from kb.training_config import UnreadableConfig, micro_batch_tokens, read_config

GIB = 1 << 30
HIDDEN, VOCAB, SLICES = 16, 16384, 8  # bfloat16 is slow on a CPU, so the hidden states are narrow
CPU_TOKENS, GPU_TOKENS = 1024, 8192  # 64 and 512 MiB of float32 logits
GPU_MIB = 1024
PEAK = 12  # bytes per logit, measured below in the backward: log-softmax 4, two float32 gradients 4 + 4
METHODS = ("whole", "layers", "slices", "checkpoint", "batches")


def step(ctx: Context, *, method: str, room_mib: int = 140) -> None:
    """Runs the head, the loss and the backward of one micro batch; the arms differ in the method.

    On a CPU, the process may add only `room_mib` to its address space. The loss and the gradient of the head must equal
    those of the usual method.
    """
    import torch

    on_gpu = ctx.device.type == "cuda"
    tokens = GPU_TOKENS if on_gpu else CPU_TOKENS
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, device=ctx.device).to(torch.bfloat16).requires_grad_()
    head = torch.randn(VOCAB, HIDDEN, device=ctx.device).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(VOCAB, (tokens,), device=ctx.device)
    few = tokens // SLICES
    if not on_gpu:
        # M_MMAP_THRESHOLD: a large tensor gets its own mapping, so that fragments of glibc's heap do not count
        ctypes.CDLL(None).mallopt(-3, 1 << 20)
    before, old_peak = memory(on_gpu), memory(on_gpu, peak=True)
    expected = backward(hidden[:few], head, labels[:few], "whole")
    if memory(on_gpu, peak=True) > old_peak:
        ctx.note(peak_over_fp32_logits=round((memory(on_gpu, peak=True) - before) / (few * VOCAB * 4), 2))
    gradient, head.grad = head.grad, None
    if not on_gpu:
        limit_address_space(room_mib << 20)
    ctx.reached()
    backward(hidden, head, labels, method)
    head.grad = None
    loss = backward(hidden[:few], head, labels[:few], method)
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(head.grad, gradient, rtol=5e-2, atol=1e-3)


def backward(hidden: Any, head: Any, labels: Any, method: str) -> Any:
    """Computes the gradient of the mean loss by this method, and returns the loss."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch.utils.checkpoint import checkpoint

    assert method in METHODS, method
    few = len(labels) // SLICES

    def head_and_loss(hidden: Any, labels: Any) -> Any:
        return ForCausalLMLoss(hidden @ head.T, labels)

    if method == "batches":
        mean = 0.0
        for start in range(0, len(labels), few):
            share = head_and_loss(hidden[start : start + few], labels[start : start + few]) / len(labels)
            share.backward()
            mean += share.item()
        return torch.tensor(mean, device=hidden.device)
    if method == "checkpoint":
        total: Any = 0.0
        for start in range(0, len(labels), few):
            part = hidden[start : start + few], labels[start : start + few]
            total = total + checkpoint(head_and_loss, *part, use_reentrant=False)
        loss = total / (labels != -100).sum()
    elif method == "slices":
        starts = range(0, len(labels), few)
        total = sum(head_and_loss(hidden[start : start + few], labels[start : start + few]) for start in starts)
        loss = total / len(labels)
    else:
        if method == "layers":
            hidden = checkpoint(F.gelu, checkpoint(F.gelu, hidden, use_reentrant=False), use_reentrant=False)
        loss = head_and_loss(hidden, labels) / len(labels)
    loss.backward()
    return loss.detach().float()


def ForCausalLMLoss(logits: Any, labels: Any) -> Any:  # noqa: N802
    """Has the name and the steps of the loss in transformers, because a signature reads the frames of the traceback."""
    import torch

    upcast = logits.float()
    return torch.nn.functional.cross_entropy(upcast, labels, reduction="sum")


def memory(on_gpu: bool, peak: bool = False) -> int:
    """Bytes in use, or their peak so far: of torch's allocator on a GPU, otherwise of the address space."""
    if on_gpu:
        import torch

        return int(torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated())
    with open("/proc/self/status") as file:
        table = dict(line.split(":", 1) for line in file)
    return int(table["VmPeak" if peak else "VmSize"].split()[0]) << 10


def check(params: Mapping[str, Any]) -> Finding:
    """Compares tokens of a micro batch x vocabulary with the allocation that failed, or with the memory of a GPU."""
    values: Dict[str, Any] = {}
    if params["config"] is not None:
        try:
            values = read_config(params["config"]).values
        except UnreadableConfig as error:
            return unknown(str(error))
    tokens = params["tokens"] or micro_batch_tokens(values)
    vocab, tried, card = params["vocab"], params["tried"], params["gpu_memory"]
    tried, card = (value if value and 0 < value < 1 << 20 else 0.0 for value in (tried, card))
    if not tokens or not vocab or tokens < 1 or vocab < 1 or not (tried or card):
        return unknown(
            "kb needs the tokens per micro batch, the vocabulary, and the failed allocation or the GPU's memory",
            advice="run --set tokens=8192 --set vocab=151936 --set tried=4.64 (GiB, from the error), or gpu_memory=79",
        )
    sizes = {dtype: tokens * vocab * width / GIB for dtype, width in (("bf16", 2), ("fp32", 4))}
    message = "%d tokens x %d words: logits of %.2f GiB in bf16" % (tokens, vocab, sizes["bf16"])
    message += ", %.2f in fp32, about %.2f GiB at the peak of the loss" % (sizes["fp32"], tokens * vocab * PEAK / GIB)
    for dtype, size in sizes.items():
        if tried and tried > 0.09 and abs(tried - size) < 0.02 * size + 0.01:
            return exposed(message, "the failed %.2f GiB are one %s tensor of logits" % (tried, dtype), advice=ADVICE)
    if tried:
        return unknown(message, "the failed %.2f GiB match neither; the batch may have had fewer tokens" % tried)
    if any(values.get(name) is True for name in LIGER):
        return unknown(message, "the Liger kernel is on, which creates no logits if it supports the model")
    if values.get("loss_type") == "chunked_nll":
        return unknown(message, "loss_type is chunked_nll, with which trl creates no logits of all tokens")
    share = tokens * vocab * PEAK / GIB / card
    evidence = "that is %.0f %% of a GPU of %.1f GiB" % (100 * share, card)
    if share > 0.25:
        return exposed(message, evidence, advice=ADVICE)
    if share < 0.05 and params["tokens"]:
        return clear(message, evidence)
    if share < 0.05:
        return unknown(message, evidence, "pairs of answers and the evaluation have more tokens than that")
    return unknown(message, evidence + ", in addition to everything else on the GPU")


LIGER = ("use_liger_kernel", "enable_liger_kernel", "use_liger_loss")
ADVICE = "compute the loss in slices (use_liger_kernel, a current trl, or your own loop), or use fewer tokens"
WHOLE = "the loss creates, upcasts and softmaxes the logits of all tokens at once"
SLICED = "the loss processes one slice of tokens at a time, and recomputes it in the backward"


def experiment(
    name: str,
    method: str,
    because: str,
    failing_method: str = "whole",
    control_because: str = WHOLE,
    room_mib: int = 140,
) -> Experiment:
    control = partial(step, method=failing_method, room_mib=room_mib)
    treatment = partial(step, method=method, room_mib=room_mib)
    return Experiment(
        name=name,
        control=Arm(control, HOST_OOM, control_because, fidelity="stand-in", stands_for=LIMITED_ADDRESS_SPACE),
        treatment=Arm(treatment, completed(), because=because, fidelity="stand-in", stands_for=LIMITED_ADDRESS_SPACE),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.1"}),
        deadline_s=60,
        expected_s=(0.5, 0.9),
    )


rlimit = experiment("rlimit", "checkpoint", SLICED)

probe = Probe(
    check=check,
    params={
        "config": Param("path", "your training configuration, for the tokens per micro batch"),
        "tokens": Param("int", "tokens of one micro batch: batch size x padded length"),
        "vocab": Param("int", "vocab_size of the model's config.json"),
        "tried": Param("float", "GiB that the error tried to allocate"),
        "gpu_memory": Param("float", "GiB of one GPU"),
    },
    experiments=(
        rlimit.on_gpus(1, name="gpu", expect=GPU_OOM, gpu_memory_mib=GPU_MIB),
        rlimit,
    ),
    variants=(
        experiment("fewer-tokens", "batches", "each micro batch has an eighth of the tokens and its own backward"),
        experiment("layer-checkpointing", "checkpoint", SLICED, "layers", WHOLE + "; only the layers are checkpointed"),
        experiment("kept-slices", "checkpoint", SLICED, "slices", "autograd keeps the slices", room_mib=60),
    ),
)
