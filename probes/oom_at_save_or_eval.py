"""Training fits; the evaluation that keeps every batch's logits until its end does not."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from typing import Any, Mapping, Optional, Tuple

from kb.cpu_arms import limit_address_space
from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown
from kb.training_config import UnreadableConfig, read_config

GIB = 1 << 30
WHYS = ("logits", "graph", "optimizer")
HIDDEN, VOCAB, BATCHES = 64, 4000, 24
CPU_ROWS, GPU_ROWS = 16 * 64, 64 * 64  # 16 and 64 MiB of float32 logits per batch
CPU_EXTRA, GPU_EXTRA = 16 << 20, 60 << 20  # weights of `optimizer`, in float32 numbers
CPU_ROOM, GPU_MIB = 160 << 20, 1024


def train_then_evaluate(ctx: Context, *, fixed: bool) -> None:
    """One training step under the limit, which fits; then what comes after it, with or without the fix."""
    import torch
    from torch import nn

    why, on_gpu = ctx.params["why"], ctx.device.type == "cuda"
    assert why in WHYS, "why is one of %s" % (WHYS,)
    rows = GPU_ROWS if on_gpu else CPU_ROWS
    head = nn.Linear(HIDDEN, VOCAB, device=ctx.device)
    weights = list(head.parameters())
    if why == "optimizer":
        weights.append(nn.Parameter(torch.zeros(GPU_EXTRA if on_gpu else CPU_EXTRA, device=ctx.device)))
    optimizer: Any = torch.optim.AdamW if why == "optimizer" and not fixed else torch.optim.SGD
    optimizer = optimizer(weights, lr=1e-3)
    x, y = torch.randn(rows, HIDDEN, device=ctx.device), torch.zeros(rows, dtype=torch.long, device=ctx.device)
    if not on_gpu:
        limit_address_space(CPU_ROOM)
    (nn.functional.cross_entropy(head(x), y) + sum(extra.sum() for extra in weights[2:])).backward()
    if why == "optimizer":
        ctx.reached()
    optimizer.step()  # AdamW makes its moments here, not when it is built
    optimizer.zero_grad()
    if why != "optimizer":
        ctx.reached()
        evaluation_loop(
            head, x, y, with_gradient=why == "graph" and not fixed, keep_logits=why == "logits" and not fixed
        )


def evaluation_loop(head: Any, x: Any, y: Any, *, with_gradient: bool, keep_logits: bool) -> None:
    """As the Trainer's: what it collects stays on the device until the last batch."""
    import torch

    losses, all_preds = [], []
    with torch.set_grad_enabled(with_gradient):
        for _ in range(BATCHES):
            logits = head(x)
            losses.append(torch.nn.functional.cross_entropy(logits, y))
            all_preds.append(logits if keep_logits else logits.argmax(-1))
            del logits
    assert torch.cat(all_preds).shape[0] == BATCHES * x.shape[0] and len(losses) == BATCHES


def trainer_evaluate(ctx: Context, *, fixed: bool) -> None:
    """The same in transformers.Trainer: compute_metrics is given, preprocess_logits_for_metrics or not."""
    import torch
    from torch import nn
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, HIDDEN), nn.Linear(HIDDEN, VOCAB)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Mapping[str, torch.Tensor]:
            logits = self.head(self.embed(input_ids))
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # one process, no rendezvous
    row = {"input_ids": [1] * 64, "labels": [2] * 64}
    trainer = Trainer(
        Model(),
        TrainingArguments(ctx.path("out"), per_device_eval_batch_size=16, use_cpu=True, report_to=[]),
        eval_dataset=[row] * (16 * BATCHES),
        compute_metrics=lambda result: {"predictions": len(result.predictions)},
        preprocess_logits_for_metrics=(lambda logits, _: logits.argmax(-1)) if fixed else None,
    )
    limit_address_space(CPU_ROOM)
    ctx.reached()
    assert trainer.evaluate()["eval_predictions"] == 16 * BATCHES


def check(params: Mapping[str, Any]) -> Finding:
    """The logits that an evaluation keeps, against the memory of a GPU and of the host."""
    samples, length, vocab = params["samples"], params["length"], params["vocab"]
    config, message = {}, "no training configuration was given"
    if params["config"] is not None:
        try:
            config, message = read_config(params["config"]).values, ""
        except UnreadableConfig as error:
            return unknown(str(error))
    if config.get("prediction_loss_only") is True:
        return clear("prediction_loss_only is true: no logits are kept")
    if config.get("batch_eval_metrics") is True:
        return clear("batch_eval_metrics is true: evaluate() keeps the logits of one batch; predict() keeps all")
    if None in (samples, length, vocab):
        return unknown(
            *[message or "the configuration does not say how many logits an evaluation keeps"],
            advice="--set samples=2000 --set length=2048 --set vocab=151936; only needed with compute_metrics",
        )
    if min(samples, length, vocab) < 1 or params["logit_bytes"] not in (2, 4):
        return unknown("samples, length and vocab are numbers above zero, logit_bytes is 2 or 4")
    memory, source = gpu_memory(params["gpu_memory"])
    if memory is None:
        return unknown(source, advice="--set gpu_memory=79 (GiB of one GPU)")
    need = samples * length * vocab * params["logit_bytes"] / GIB
    evidence = "%d samples x %d tokens x %d words: %.1f GiB of logits, on every GPU (%.1f GiB, %s)" % (
        *(samples, length, vocab, need, memory),
        source,
    )
    if config.get("eval_accumulation_steps"):
        return unknown(evidence, "eval_accumulation_steps is set: they go to host memory instead, of every rank")
    if need > memory:
        advice = "preprocess_logits_for_metrics that takes the argmax; see `kb show oom-at-save-or-eval`"
        return exposed(evidence, advice=advice)
    if 2 * need > 0.1 * memory:  # torch.cat holds the old and the new tensor
        return unknown(evidence, "twice that at each concatenation; what the model leaves free is not known here")
    return clear(evidence, "twice that at each concatenation, still below a tenth of the card")


def gpu_memory(given: Optional[float]) -> Tuple[Optional[float], str]:
    """GiB of the smallest GPU and the source; None with the reason."""
    if given is not None:
        return (given, "as given") if 0 < given < 1e6 else (None, "gpu_memory is a number above zero")
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=0.8, check=True).stdout
        return min(map(int, output.split())) / 1024, "nvidia-smi"
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return None, "the memory of the GPU was not given and nvidia-smi does not tell it: %s" % type(error).__name__


RETAINED = "a training step fits, then the evaluation keeps more with every batch (--set why=graph or optimizer)"
SMALL = "the same evaluation keeps only what the metric needs"
CARD = "the memory of a GPU; here the address space of the process is limited (RLIMIT_AS)"
HOST = raised(r"DefaultCPUAllocator: can't allocate memory")

rlimit = Experiment(
    name="rlimit",
    control=Arm(
        partial(train_then_evaluate, fixed=False), HOST, because=RETAINED, fidelity="stand-in", stands_for=CARD
    ),
    treatment=Arm(
        partial(train_then_evaluate, fixed=True), completed(), because=SMALL, fidelity="stand-in", stands_for=CARD
    ),
    world_size=1,
    expected_s=(0.4, 0.6),
)

probe = Probe(
    check=check,
    params={
        "why": Param("str", "what comes after the step: %s" % ", ".join(WHYS), "logits"),
        "config": Param("path", "your training arguments (JSON or YAML)"),
        "samples": Param("int", "samples of the evaluation set, over all ranks"),
        "length": Param("int", "tokens per sample"),
        "vocab": Param("int", "size of the vocabulary, or classes per token"),
        "logit_bytes": Param("int", "4 under mixed precision (accelerate makes outputs fp32), 2 for a bf16 model", 4),
        "gpu_memory": Param("float", "GiB of one GPU; asked of nvidia-smi when not given"),
    },
    experiments=(
        rlimit.on_gpus(1, name="gpu", expect=raised(r"out of memory\. Tried to allocate"), gpu_memory_mib=GPU_MIB),
        rlimit,
    ),
    variants=(
        Experiment(
            name="transformers",
            control=Arm(
                partial(trainer_evaluate, fixed=False),
                HOST,
                because="compute_metrics is given, so the Trainer concatenates the logits of all batches",
                fidelity="stand-in",
                stands_for=CARD,
            ),
            treatment=Arm(
                partial(trainer_evaluate, fixed=True),
                completed(),
                because="preprocess_logits_for_metrics reduces each batch to its predictions first",
                fidelity="stand-in",
                stands_for=CARD,
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=4.46", "accelerate": ""}),
            deadline_s=90,
            expected_s=(8.0, 8.0),
        ),
    ),
)
