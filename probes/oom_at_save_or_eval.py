"""Training fits into memory; the evaluation, which keeps every batch's logits until its end, does not."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from functools import partial
from typing import Any, Callable, List, Mapping, Optional, Tuple

from kb.cpu_arms import GPU_OOM, HOST_OOM, LIMITED_ADDRESS_SPACE, limit_address_space, without_launcher
from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, completed, exposed, unknown
from kb.training_config import UnreadableConfig, read_config

GIB = 1 << 30
NOT_JUDGED = "kb does not judge the first optimizer step, gradients in the evaluation and copies at the save"
HIDDEN, VOCAB, BATCHES = 64, 4000, 18
CPU_ROWS, GPU_ROWS = 16 * 64, 64 * 64  # 16 and 64 MiB of float32 logits per batch
CPU_EXTRA = 4 << 20  # numbers in each of the four weights of `first_step`, 16 MiB each
CPU_ROOM, GPU_MIB = 160 << 20, 1024
STEP_ROOM = 224 << 20  # in MiB: gradients take 64, all moments 128, the temporaries of foreach 64
FIRST_STEP_ROOM = 184 << 20  # in MiB: gradients take 64, all moments 128, one rank's moments and a temporary 80


def train_then_evaluate(ctx: Context, *, keep: str, with_gradient: bool = False, times: float = 1) -> None:
    """One training step under the limit, which fits, then an evaluation with a batch `times` as large."""
    import torch
    from torch import nn

    on_gpu = ctx.device.type == "cuda"
    rows = GPU_ROWS if on_gpu else CPU_ROWS
    head = nn.Linear(HIDDEN, VOCAB, device=ctx.device)
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-3)
    x, y = torch.randn(rows, HIDDEN, device=ctx.device), torch.zeros(rows, dtype=torch.long, device=ctx.device)
    if not on_gpu:
        limit_address_space(CPU_ROOM)
    nn.functional.cross_entropy(head(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    ctx.reached()
    head.eval()  # changes dropout and running statistics, but does not switch off gradients
    if times < 1:
        x, y = x[: int(rows * times)], y[: int(rows * times)]
    elif times > 1:
        x, y = x.repeat(int(times), 1), y.repeat(int(times))
    evaluation_loop(head, x, y, int(BATCHES / times), keep, with_gradient)


def evaluation_loop(head: Any, x: Any, y: Any, batches: int, keep: str, with_gradient: bool) -> None:
    """Like the Trainer's loop, it keeps all predictions on the device until the last batch."""
    import torch

    losses, all_preds = [], []
    with torch.set_grad_enabled(with_gradient):
        for _ in range(batches):
            logits = head(x)
            loss = torch.nn.functional.cross_entropy(logits, y)
            losses.append(loss if with_gradient else loss.item())
            predicted = preprocess_logits_for_metrics(logits, y)  # type: ignore[no-untyped-call]
            all_preds.append(logits if keep == "logits" else predicted)
            del logits
    assert torch.cat(all_preds).shape[0] == batches * x.shape[0] and len(losses) == batches


def preprocess_logits_for_metrics(logits, labels):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    if isinstance(logits, tuple):
        logits = logits[0]
    return logits.argmax(-1)


def first_step(ctx: Context, *, sharded: bool) -> None:
    """Forward and backward fit. In the first step, AdamW creates all moments on every rank, or each rank its part."""
    import torch
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ctx.init_process_group(timeout_s=60)
    model, lr = nn.ParameterList([nn.Parameter(torch.zeros(CPU_EXTRA)) for _ in range(4)]), 1e-3
    if sharded:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=lr)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    limit_address_space(FIRST_STEP_ROOM)
    sum(weight.sum() for weight in model).backward()
    ctx.reached()
    optimizer.step()
    assert all(weight[-1].item() < 0 for weight in model), "the step did not change every weight"


def temporaries(ctx: Context, *, fused: bool) -> None:
    """There is room for the gradients and the moments. The foreach implementation of AdamW needs more than that."""
    import torch
    from torch import nn

    weights = [nn.Parameter(torch.zeros(CPU_EXTRA)) for _ in range(4)]
    kind = {"fused": True} if fused else {"foreach": True}  # foreach is the default on a GPU
    optimizer = torch.optim.AdamW(weights, lr=1e-3, **kind)
    limit_address_space(STEP_ROOM)
    sum(weight.sum() for weight in weights).backward()
    ctx.reached()
    optimizer.step()
    assert all(weight[-1].item() < 0 for weight in weights), "the step did not change every weight"


def trainer_evaluate(ctx: Context, *, fixed: bool) -> None:
    """transformers.Trainer evaluates with compute_metrics, and with or without preprocess_logits_for_metrics."""
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

    without_launcher()
    row = {"input_ids": [1] * 64, "labels": [2] * 64}
    trainer = Trainer(
        Model(),
        TrainingArguments(ctx.path("out"), per_device_eval_batch_size=16, use_cpu=True, report_to=[]),
        eval_dataset=[row] * (16 * BATCHES),
        compute_metrics=lambda result: {"predictions": len(result.predictions)},
        preprocess_logits_for_metrics=preprocess_logits_for_metrics if fixed else None,
    )
    limit_address_space(CPU_ROOM)
    ctx.reached()
    assert trainer.evaluate()["eval_predictions"] == 16 * BATCHES


def check(params: Mapping[str, Any]) -> Finding:
    """Compares the logits that an evaluation keeps with the memory of a GPU."""
    samples, length, vocab = params["samples"], params["length"], params["vocab"]
    config, no_size = {}, "no training configuration was given"
    if params["config"] is not None:
        try:
            config = read_config(params["config"]).values
        except UnreadableConfig as error:
            return unknown(str(error))
        no_size = "the configuration does not say how many logits an evaluation keeps"
    rest = [NOT_JUDGED, *_batches(config)]
    if config.get("prediction_loss_only") is True:
        return unknown("prediction_loss_only is true, so the evaluation keeps no logits", *rest)
    if config.get("batch_eval_metrics") is True:
        one_batch = "batch_eval_metrics is true, so evaluate() keeps the logits of one batch, but predict() keeps all"
        return unknown(one_batch, *rest)
    if None in (samples, length, vocab):
        advice = "--set samples=2000 --set length=2048 --set vocab=151936; only needed with compute_metrics"
        return unknown(no_size, advice=advice)
    if min(samples, length, vocab) < 1 or params["logit_bytes"] not in (2, 4):
        return unknown("samples, length and vocab must be above zero, and logit_bytes must be 2 or 4")
    memory, source = gpu_memory(params["gpu_memory"])
    if memory is None:
        return unknown(source, advice="--set gpu_memory=79 (GiB of one GPU)")
    need = samples * length * vocab * params["logit_bytes"] / GIB
    evidence = "%d samples x %d tokens x %d words are %.1f GiB of logits on every GPU (%.1f GiB, %s)" % (
        *(samples, length, vocab, need, memory),
        source,
    )
    if config.get("eval_accumulation_steps"):
        return unknown(evidence, "eval_accumulation_steps is set, so every rank moves them to host memory instead")
    if need > memory:
        advice = "pass a preprocess_logits_for_metrics that takes the argmax; see `kb show oom-at-save-or-eval`"
        condition = "this holds if compute_metrics is set and preprocess_logits_for_metrics is not"
        return exposed(evidence, condition, advice=advice)
    twice = "each concatenation needs twice that"  # torch.cat holds the old and the new tensor
    if 2 * need > 0.1 * memory:
        return unknown(evidence, twice + ", and kb does not know how much memory the model leaves free")
    return unknown(evidence, twice + ", which is still below a tenth of the GPU's memory", *rest)


def _batches(config: Mapping[str, Any]) -> List[str]:
    """A line if the evaluation's batch is larger than the training's; the Trainer's default is 8 for both."""
    training, evaluation = config.get("per_device_train_batch_size"), config.get("per_device_eval_batch_size", 8)
    if isinstance(training, int) and isinstance(evaluation, int) and evaluation > training:
        return ["the evaluation has batches of %d samples, the training of %d" % (evaluation, training)]
    return []


def gpu_memory(given: Optional[float]) -> Tuple[Optional[float], str]:
    """GiB of the largest GPU, because the job may use any of them, and the source; or None and the reason."""
    if given is not None:
        return (given, "as given") if 0 < given < 1e6 else (None, "gpu_memory must be above zero")
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=0.8, check=True).stdout
        return max(map(int, output.split())) / 1024, "nvidia-smi"
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return None, "gpu_memory was not given, and nvidia-smi does not report it: %s" % type(error).__name__


RETAINED = "a training step fits, but the evaluation keeps the logits of every batch"


def experiment(
    name: str,
    broken: Callable[[Context], None],
    because: str,
    fixed: Callable[[Context], None],
    fix: str,
    world_size: int = 1,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(broken, HOST_OOM, because=because, fidelity="stand-in", stands_for=LIMITED_ADDRESS_SPACE),
        treatment=Arm(fixed, completed(), because=fix, fidelity="stand-in", stands_for=LIMITED_ADDRESS_SPACE),
        world_size=world_size,
        deadline_s=60,
        expected_s=(0.4, 0.6),
    )


keep_logits = partial(train_then_evaluate, keep="logits")
reduced = partial(train_then_evaluate, keep="argmax")
SMALL = "the same evaluation keeps only the predicted tokens of every batch"
rlimit = experiment("rlimit", keep_logits, RETAINED, reduced, SMALL)

probe = Probe(
    check=check,
    params={
        "config": Param("path", "your training arguments (JSON or YAML)"),
        "samples": Param("int", "number of samples in the evaluation set, over all ranks"),
        "length": Param("int", "tokens per sample"),
        "vocab": Param("int", "size of the vocabulary, or number of classes per token"),
        "logit_bytes": Param("int", "4 with mixed precision (accelerate makes outputs fp32), 2 for a bf16 model", 4),
        "gpu_memory": Param("float", "GiB of one GPU (default: from nvidia-smi)"),
    },
    experiments=(
        rlimit.on_gpus(1, name="gpu", expect=GPU_OOM, gpu_memory_mib=GPU_MIB),
        rlimit,
    ),
    variants=(
        experiment(
            "graph",
            partial(train_then_evaluate, keep="argmax", with_gradient=True),
            "the evaluation calls model.eval() without no_grad, and its list of losses keeps each batch's graph",
            reduced,
            "the evaluation runs in no_grad and keeps the losses as numbers",
        ),
        experiment(
            "eval-batch",
            partial(train_then_evaluate, keep="argmax", times=8),
            "the evaluation's batch is eight times as large as the training's",
            reduced,
            "the evaluation's batch is as large as the training's",
        ),
        experiment(
            "small-batches",
            partial(train_then_evaluate, keep="logits", times=0.5),
            RETAINED + ", although the batches are half as large",
            partial(train_then_evaluate, keep="argmax", times=0.5),
            SMALL,
        ),
        experiment(
            "first-step",
            partial(first_step, sharded=False),
            "in the first step, AdamW creates the moments of all weights on each of two ranks",
            partial(first_step, sharded=True),
            "with ZeroRedundancyOptimizer, each rank creates the moments of its part of the weights only",
            world_size=2,
        ),
        replace(
            experiment(
                "temporaries",
                partial(temporaries, fused=False),
                "the foreach implementation of AdamW holds a temporary for every weight",
                partial(temporaries, fused=True),
                "the fused implementation needs no temporaries",
            ),
            needs=Needs(packages={"torch": ">=2.4"}),
        ),
        Experiment(
            name="transformers",
            control=Arm(
                partial(trainer_evaluate, fixed=False),
                HOST_OOM,
                because="compute_metrics is set, so the Trainer concatenates the logits of all batches",
                fidelity="stand-in",
                stands_for=LIMITED_ADDRESS_SPACE,
            ),
            treatment=Arm(
                partial(trainer_evaluate, fixed=True),
                completed(),
                because="preprocess_logits_for_metrics reduces each batch to its predictions first",
                fidelity="stand-in",
                stands_for=LIMITED_ADDRESS_SPACE,
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=4.46", "accelerate": ""}),
            deadline_s=90,
            expected_s=(8.0, 8.0),
        ),
    ),
)
