"""Evaluates five samples on two ranks and compares each metric with that of one process, whose accuracy is 0.6."""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Tuple

from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, completed, symptom

SCORES, LABELS = (2.0, -1.0, 1.0, 0.5, -3.0), (1, 1, 1, 0, 0)  # samples 0, 2 and 4, those of rank 0, are right


def make(ctx: Context, samples: int = 5) -> Tuple[Any, Any, Any, Any]:
    """Returns torch, torch.distributed, a model, and a dataset of indices and labels."""
    import torch

    dist = ctx.init_process_group(timeout_s=15)
    os.environ.update(ACCELERATE_USE_CPU="true", LOCAL_WORLD_SIZE="2", GROUP_RANK="0", TORCHELASTIC_RUN_ID="kb")
    model = torch.nn.Embedding.from_pretrained(torch.tensor([[0.0, score] for score in SCORES[:samples]]), freeze=False)
    dataset = torch.utils.data.TensorDataset(torch.arange(samples), torch.tensor(LABELS[:samples]))
    return torch, dist, model, dataset


def f1(tp: float, fp: float, fn: float) -> float:
    """The F1 score from true positives, false positives and false negatives."""
    return 2 * tp / (2 * tp + fp + fn)


def auc(rows: List[Any]) -> float:
    """The AUC of (score, label) rows."""
    pairs = [(high, low) for high, right in rows if right for low, wrong in rows if not wrong]
    return len([high for high, low in pairs if high > low]) / len(pairs)


def confusion(predicted: Any, y: Any) -> List[int]:
    """Counts true positives, false positives and false negatives."""
    return [int(((predicted == p) & (y == t)).sum()) for p, t in ((1, 1), (1, 0), (0, 1))]


def judge(name: str, value: float, count: float, model: Any, dataset: Any) -> None:
    """Raises Symptom if `value` or `count` differs from one process that sees each sample once."""
    import torch

    x, y = dataset[:]
    logits = model(x).detach()
    loss = torch.nn.functional.cross_entropy(logits, y).item()
    expected = {"accuracy": (logits.argmax(-1) == y).float().mean().item(), "loss": loss, "perplexity": math.exp(loss)}
    expected["F1"] = f1(*confusion(logits.argmax(-1), y))
    expected["AUC"] = auc(list(zip(logits[:, 1].tolist(), y.tolist())))
    if abs(value - expected[name]) > 1e-4 or count != len(y):
        raise Symptom("%s %.4f of %d samples, %.4f of all %d" % (name, value, count, expected[name], len(y)))


def evaluate(ctx: Context, *, parts: str = "padded", real: bool = False, reduce: str = "sums", batch: int = 2) -> None:
    """Computes the accuracy in a custom evaluation loop.

    `parts` says how the samples are split, `real` masks the padding, `reduce` says how the ranks are combined.
    """
    torch, dist, model, dataset = make(ctx)
    from torch.utils.data import DataLoader, DistributedSampler

    rank, world_size, device = dist.get_rank(), dist.get_world_size(), ctx.device
    if parts == "whole":
        loader = DataLoader(dataset, batch_size=batch, sampler=range(rank, len(dataset), world_size))
    else:
        order = DistributedSampler(dataset, shuffle=False, drop_last=parts == "dropped")
        loader = DataLoader(dataset, batch_size=batch, sampler=order)
    ctx.reached()
    total, seen = torch.zeros(2, dtype=torch.float64, device=device), 0
    if real:
        sampler = loader.sampler
        assert isinstance(sampler, DistributedSampler) and not sampler.drop_last and not loader.drop_last
        for x, y in loader:
            place = sampler.rank + sampler.num_replicas * torch.arange(seen, seen + len(y), device=device)
            keep = place < len(dataset)  # the rest is the padding of DistributedSampler
            total[0] += (model(x).argmax(-1) == y)[keep].sum()
            total[1] += keep.sum()
            seen += len(y)
    else:
        for x, y in loader:
            total += torch.stack([(model(x).argmax(-1) == y).sum(), torch.tensor(len(y))])
    if reduce == "sums":
        dist.all_reduce(total)
        accuracy = (total[0] / total[1]).item()
    elif reduce != "none":
        mean = total[0] / total[1]
        dist.all_reduce(mean)
        accuracy = (mean / world_size if reduce == "means" else mean).item()
        dist.all_reduce(total)
    else:  # rank 0 logs its own share
        accuracy = (total[0] / total[1]).item()
    if reduce != "none" or rank == 0:
        judge("accuracy", accuracy, total[1].item(), model, dataset)


def no_mean(ctx: Context, *, metric: str, pooled: bool) -> None:
    """Computes a metric that is not a mean over samples; without `pooled`, averages it over the ranks."""
    torch, dist, model, dataset = make(ctx)
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader

    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = dataset[rank::world_size]
    logits, count = model(x).detach(), torch.tensor(float(len(y)))
    ctx.reached()
    if metric == "AUC":
        mine: Dict[int, Any] = {}
        for index, y in DataLoader(dataset, batch_size=2, sampler=range(rank, len(dataset), world_size)):
            score = model(index)[:, 1].detach()
            mine.update({i: pair for i, *pair in zip(index.tolist(), score.tolist(), y.tolist())})
        every: List[Any] = [mine]
        if pooled:
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, mine)
        merged = {i: pair for part in every for i, pair in part.items()}
        value = auc(list(merged.values()))
    elif metric == "F1":
        counts = torch.tensor(confusion(logits.argmax(-1), y))  # true positives, false positives, false negatives
        if pooled:
            dist.all_reduce(counts)
        value = f1(*counts.tolist())
    else:
        sums = torch.stack([cross_entropy(logits, y, reduction="sum"), count])
        if pooled:
            dist.all_reduce(sums)
        value = math.exp(sums[0] / sums[1])
    mean = torch.tensor(value) * count
    dist.all_reduce(mean)
    dist.all_reduce(count)
    judge(metric, value if pooled else (mean / count).item(), count.item(), model, dataset)


def gather(ctx: Context, *, by_index: bool) -> None:
    """Gathers four samples, two of them twice, from three ranks; keeps the first four rows, or one row per index."""
    torch, dist, model, dataset = make(ctx, samples=4)
    from torch.utils.data import DataLoader, DistributedSampler

    loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, shuffle=False))
    ctx.reached()
    ((index, y),) = loader
    rows = torch.stack([index, model(index).argmax(-1), y], dim=1)
    gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, rows)
    rows = torch.cat(gathered)
    rows = torch.stack(list({int(row[0]): row for row in rows}.values())) if by_index else rows[: len(dataset)]
    judge("accuracy", (rows[:, 1] == rows[:, 2]).float().mean().item(), len(rows[:, 0].unique()), model, dataset)


def accelerated(ctx: Context, *, way: str) -> None:
    """Evaluates with accelerate, which fills the last batch of every rank with the first samples of the dataset."""
    torch, _, model, dataset = make(ctx)
    from accelerate import Accelerator  # type: ignore[import-not-found]
    from torch.nn.functional import cross_entropy

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[Any]:
            return iter(dataset)

    options = {}
    if "stream" in way:
        from accelerate.utils import DataLoaderConfiguration  # type: ignore[import-not-found]

        options["dataloader_config"] = DataLoaderConfiguration(dispatch_batches=way == "stream")
    accelerator = Accelerator(cpu=True, **options)
    loader = torch.utils.data.DataLoader(Stream() if "stream" in way else dataset, batch_size=2)
    loader = accelerator.prepare(loader)
    right, losses = [], []
    ctx.reached()
    for x, y in loader:
        logits = model(x).detach()
        hits = (logits.argmax(-1) == y).float()
        if way in ("gather", "late"):
            right.append(accelerator.gather(hits) if way == "gather" else hits)
        else:
            right.append(accelerator.gather_for_metrics(hits))
        loss = cross_entropy(logits, y, reduction="none")
        losses.append(accelerator.gather_for_metrics(loss.mean().repeat(len(y)) if way == "mean" else loss))
    hits, loss = torch.cat(right), torch.cat(losses)
    if way == "late":
        hits = accelerator.gather_for_metrics(hits)
    judge("accuracy", hits.mean().item(), len(hits), model, dataset)
    judge("loss", loss.mean().item(), len(loss), model, dataset)


def trainer(ctx: Context, *, read: str = "eval_loss", scaled: bool = False, samples: int = 5) -> None:
    """Reads eval_loss of transformers.Trainer, or the loss that compute_metrics computes from all logits."""
    torch, _, table, dataset = make(ctx, samples)
    from torch.nn.functional import cross_entropy
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        accepts_loss_kwargs = scaled

        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, x: Any, labels: Any, **_: Any) -> Any:
            return {"loss": cross_entropy(self.table(x), labels), "logits": self.table(x)}

    def compute_metrics(result: Any) -> Any:
        logits, labels = torch.from_numpy(result.predictions), torch.from_numpy(result.label_ids)
        return {"nll": cross_entropy(logits, labels).item()}

    options: Any = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "remove_unused_columns": False}
    args = TrainingArguments(ctx.path("out"), per_device_eval_batch_size=2, **options)
    rows = [{"x": x, "labels": y} for x, y in dataset]
    run = Trainer(Net(), args, eval_dataset=rows, compute_metrics=compute_metrics)
    ctx.reached()
    judge("loss", run.evaluate()[read], samples, table, dataset)


def lightning(ctx: Context, *, log: str = "object", own: bool = True, samples: int = 5) -> None:
    """Runs Trainer.validate and logs a value, a synchronised value or a metric object; `own` uses a custom sampler."""
    import lightning.pytorch as pl  # type: ignore[import-not-found]
    import torchmetrics  # type: ignore[import-not-found]

    torch, dist, table, dataset = make(ctx, samples)
    parts = range(dist.get_rank(), samples, dist.get_world_size()) if own else None
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, sampler=parts)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table, self.accuracy = table, torchmetrics.MeanMetric()
            self.f1 = torchmetrics.classification.BinaryF1Score()

        def validation_step(self, batch: Any, _: int) -> None:
            x, y = batch
            found = self.table(x).argmax(-1)
            if log == "object":
                self.accuracy.update((found == y).float())
                self.log("accuracy", self.accuracy)
            elif "F1" in log:
                value = self.f1(found, y)
                self.log("F1", self.f1 if log == "F1 object" else value, on_epoch=True, sync_dist=log == "F1")
            else:
                self.log("accuracy", (found == y).float().mean(), sync_dist=log == "sync")

    options: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    options.update(accelerator="cpu", devices=2, strategy="ddp", enable_model_summary=False)
    run = pl.Trainer(use_distributed_sampler=not own, **options)
    ctx.reached()
    (values,) = run.validate(Module(), loader, verbose=False)
    name = "F1" if "F1" in log else "accuracy"
    if log != "value" or ctx.rank == 0:
        judge(name, values[name], samples, table, dataset)


def states(ctx: Context, *, declared: bool) -> None:
    """Computes a custom torchmetrics metric whose counter is declared with add_state, unless `declared` is False."""
    torch, dist, model, dataset = make(ctx)
    import torchmetrics

    class Accuracy(torchmetrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            if declared:
                self.add_state("total", default=torch.zeros(2), dist_reduce_fx="sum")
            else:
                self.total = torch.zeros(2)

        def update(self, found: Any, y: Any) -> None:
            self.total += torch.tensor([(found == y).sum(), len(y)])

        def compute(self) -> Any:
            return self.total

    metric, parts = Accuracy(), range(dist.get_rank(), len(dataset), dist.get_world_size())
    ctx.reached()
    for x, y in torch.utils.data.DataLoader(dataset, batch_size=2, sampler=parts):
        metric.update(model(x).argmax(-1), y)
    total = metric.compute()
    judge("accuracy", (total[0] / total[1]).item(), total[1].item(), model, dataset)


def pair(name: str, job: Callable[..., None], found: str, because: str, fix: str, **named: Any) -> Experiment:
    """Returns an experiment; `found` is the value in the control arm.

    `named` holds packages and keywords of the job; a keyword with a tuple has different values in the two arms.
    """
    packages = {key: value for key, value in named.items() if key in ("accelerate", "transformers", *LIGHTNING)}
    rest = {key: value for key, value in named.items() if key not in packages}
    broken, fixed = ({k: v[i] if isinstance(v, tuple) else v for k, v in rest.items()} for i in (0, 1))
    expect = symptom(r"%s samples, [01]\.\d{4} of all [45]$" % found.replace(".", r"\."))
    return Experiment(
        name=name,
        control=Arm(partial(job, **broken), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **fixed), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.1", **packages}),
        world_size=3 if job is gather else 2,
        deadline_s=90.0 if packages else 20.0,
        expected_s=(6.0, 6.0) if packages else (0.4, 0.4),
    )


LIGHTNING = {"lightning": ">=2.2", "torchmetrics": ">=1.0"}
HUGGING_FACE = {"accelerate": ">=0.30"}
TRAINER = {"transformers": ">=4.48.3", **HUGGING_FACE}
SCALED = {"transformers": ">=4.57", **HUGGING_FACE}  # older releases pass no count in the evaluation
FLOORED = {**LIGHTNING, "lightning": ">=2.2,<=2.6.6"}  # pull request 21839 fixes this
REAL, POOLED, STREAM = {"real": (False, True)}, (False, True), ("sharded stream", "stream")
TWO, HALF = "loss 1.3638 of 4", "F1 0.5000 of 4"
SIX, EIGHT, LOSS = "accuracy 0.6667 of 6", "accuracy 0.6250 of 8", "loss 0.5631 of 5"
TWICE, MASKED = "the code counts the padding of the sampler", "the code masks the padding by its position"
WHOLE = "the sampler neither pads nor drops samples"
OWN, SUMS = "only the share of rank 0 is logged", "the ranks add up sums and counts"
EVEN = "sync_dist averages over the ranks, which have two samples each"
ADDED = "the ranks add up their means and do not divide"
MEAN = "the code averages the metric over the ranks, weighted by samples"
GATHER = "each step calls gather_for_metrics with one value per sample"
VALUE, OBJECT = "the module logs values per batch with sync_dist", "the module logs the metric object"
ALL = "one batch holds all samples"
PADDED, LATE = "gather keeps the padding", "gather_for_metrics is called once, after the loop"
OF_MEANS = "each step gathers the mean of each rank"
EACH_READS = "each rank reads the stream, which has no length"
ONE_READS = "rank 0 reads the stream and distributes it"
LOSSES, SAMPLES = "eval_loss averages the means of the ranks", "compute_metrics gets each sample once"
TIMES_2 = "the Trainer assumes that the model divides by the global count"
ONCE = "accepts_loss_kwargs=False says that the model does not"
STATE = ("accuracy [01].0000 of [32]", "the counters are plain attributes", "add_state declares the counters")

probe = Probe(
    experiments=(pair("padding", evaluate, SIX, TWICE, MASKED, **REAL),),
    variants=(
        pair("batch", evaluate, SIX, TWICE + ", and " + ALL, MASKED, batch=8, **REAL),
        pair(
            "drop-last",
            evaluate,
            "accuracy 0.5000 of 4",
            "drop_last leaves one sample out",
            WHOLE,
            parts=("dropped", "whole"),
        ),
        pair("share", evaluate, "accuracy 1.0000 of 3", OWN, SUMS, parts="whole", reduce=("none", "sums")),
        pair(
            "means",
            evaluate,
            "accuracy 0.5000 of 5",
            "the code averages the means of both ranks",
            SUMS,
            parts="whole",
            reduce=("means", "sums"),
        ),
        pair("summed", evaluate, "accuracy 1.0000 of 5", ADDED, SUMS, parts="whole", reduce=("sum of means", "sums")),
        pair("f1", no_mean, "F1 0.6000 of 5", MEAN, "the ranks add up the counts of F1", metric="F1", pooled=POOLED),
        pair("auc", no_mean, "AUC 0.6000 of 5", MEAN, "the ranks gather all scores", metric="AUC", pooled=POOLED),
        pair("perplexity", no_mean, "perplexity 1.9615 of 5", MEAN, SUMS, metric="perplexity", pooled=POOLED),
        pair(
            "cut",
            gather,
            "accuracy 0.5000 of 3",
            "the code keeps the first four rows",
            "the code keeps one row per index",
            by_index=POOLED,
        ),
        pair("accelerate", accelerated, EIGHT, PADDED, GATHER, way=("gather", "metrics"), **HUGGING_FACE),
        pair("accelerate-late", accelerated, EIGHT, LATE, GATHER, way=("late", "metrics"), **HUGGING_FACE),
        pair("accelerate-mean", accelerated, LOSS, OF_MEANS, GATHER, way=("mean", "metrics"), **HUGGING_FACE),
        pair("accelerate-stream", accelerated, EIGHT, EACH_READS, ONE_READS, way=STREAM, **HUGGING_FACE),
        pair("trainer", trainer, LOSS, LOSSES, SAMPLES, read=("eval_loss", "eval_nll"), **TRAINER),
        pair("trainer-scaled", trainer, TWO, TIMES_2, ONCE, scaled=(True, False), samples=4, **SCALED),
        pair("lightning", lightning, "accuracy 1.0000 of 4", OWN, EVEN, log=("value", "sync"), samples=4, **LIGHTNING),
        pair("lightning-count", lightning, "accuracy 0.7500 of 5", VALUE, OBJECT, log=("sync", "object"), **FLOORED),
        pair("lightning-padding", lightning, "accuracy 0.6667 of 5", TWICE, WHOLE, own=POOLED, **LIGHTNING),
        pair("lightning-f1", lightning, HALF, VALUE, OBJECT, log=("F1", "F1 object"), samples=4, **LIGHTNING),
        pair("torchmetrics", states, *STATE, declared=POOLED, torchmetrics=">=1.0"),
    ),
)
