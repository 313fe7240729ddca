"""A tensor that is created under inference_mode, and found again by training, which may neither save nor change it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from kb.cpu_arms import import_deepspeed
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Unavailable, completed, raised


def mode(name: str) -> Any:
    import torch

    return torch.no_grad() if name == "no_grad" else torch.inference_mode()


def build(own: bool = False) -> Any:
    """Two layers, and between them a table that the first forward makes, as rotary embeddings do."""
    import torch

    class Table(torch.nn.Module):  # type: ignore[misc]
        cos: Any

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cos", None, persistent=False)

        def forward(self, x: Any) -> Any:
            if self.cos is None:
                if own:
                    with torch.inference_mode(False):
                        self.cos = torch.arange(4.0).cos()
                else:
                    self.cos = torch.arange(4.0).cos()
            return x * self.cos

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), Table(), torch.nn.Linear(4, 1))


def step(model: Any) -> None:
    """One step of training, in which every parameter gets a gradient."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()


def evaluate_first(ctx: Context, *, way: str) -> None:
    """The first forward is that of an evaluation."""
    import torch

    model = build(own=way == "made outside")
    model.eval()
    with mode(way):
        model(torch.ones(2, 4))
    model.train()
    ctx.reached()
    if way == "made outside":
        with torch.inference_mode(), torch.inference_mode(False):
            assert torch.is_grad_enabled()
    if way == "detach":
        model[1].cos = model[1].cos.detach().data
    if way == "clone":
        model[1].cos = model[1].cos.clone()
    if way == "clone inside":
        with torch.inference_mode():
            model[1].cos = model[1].cos.clone()
    step(model)


def average(ctx: Context, *, way: str) -> None:
    """The loss of an evaluation is added up inside, and divided outside."""
    import torch

    with mode(way):
        total, n = torch.ones(4).sum(), 4
    ctx.reached()
    if way == "out of place":
        total = total / n
    else:
        total /= n
    assert total.item() == 1.0


def use_features(ctx: Context, *, context: str) -> None:
    """Features of a frozen encoder, or log-probabilities of a rollout, are the input of what is trained."""
    import torch

    encoder = torch.nn.Linear(4, 4)
    with mode(context):
        features = encoder(torch.ones(2, 4))
    ctx.reached()
    head = torch.nn.Linear(4, 1)
    head(features).sum().backward()
    assert head.weight.grad is not None


def make_inside(ctx: Context, *, way: str) -> None:
    """A model is built, or moved to another dtype, under inference_mode."""
    import torch

    model = build().double().float()
    with torch.inference_mode():
        if way == "moved":
            model.double().float()
        elif way != "outside":
            model = build()
    ctx.reached()
    step(model)


def shard(ctx: Context, *, way: str, context: str) -> None:
    """The first forward of a sharded model is an evaluation, which allocates what the weights are gathered into."""
    import torch
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    if way == "fsdp2" and not hasattr(fsdp, "fully_shard"):
        raise Unavailable("no fully_shard in torch %s" % torch.__version__)
    ctx.init_process_group(timeout_s=10)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    if way == "fsdp1":
        model = fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        for part in (model[0], model[2], model):
            fsdp.fully_shard(part, mesh=init_device_mesh("cpu", (ctx.world_size,)))
    with mode(context):
        model(torch.ones(2, 4))
    ctx.reached()
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        with torch.inference_mode():  # a later evaluation does no harm
            model(torch.ones(2, 4))


def partition(ctx: Context, *, context: str) -> None:
    """ZeRO-3 gathers and prefetches weights in an evaluation between two steps."""
    import torch

    deepspeed = import_deepspeed()
    ctx.init_process_group(timeout_s=20)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}  # these weights are small, and are to be sharded
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    for number in range(2):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        engine.eval()
        with mode(context):
            engine(torch.ones(2, 4))
        engine.train()
        if number == 0:
            ctx.reached()


def fit(ctx: Context, *, inference_mode: bool) -> None:
    """trainer.validate() comes before trainer.fit(), whose own validation is under no_grad in any case."""
    import lightning  # type: ignore[import-not-found]
    import torch

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = build()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch).mean()

        def validation_step(self, batch: Any, _: int) -> None:
            self.net(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # one process without a launcher
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options: dict[str, Any] = {"max_epochs": 2, "accelerator": "cpu", **quiet}
    loader = torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2)
    trainer = lightning.Trainer(inference_mode=inference_mode, **options)
    lightning.Trainer(inference_mode=True, **options).fit(Module(), loader, loader)
    module = Module()
    trainer.validate(module, loader, verbose=False)
    ctx.reached()
    trainer.fit(module, loader, loader)


SAVED = raised(r"Inference tensors cannot be saved for backward")
CHANGED = raised(r"Inplace update to inference tensor outside InferenceMode is not allowed")
NO_GRAD_FN = raised(r"The `grad_fn` is needed to access the `AccumulateGrad` and register the post-backward hook")


def pair(name: str, job: Callable[..., None], expect: Expect, because: tuple[str, str], **options: Any) -> Experiment:
    """One option is the keyword in which the arms differ: its value in the control arm, and in the treatment."""
    needs = {"torch": ">=2.1", **options.pop("needs", {})}
    size = options.pop("world_size", 1)
    [(key, values)] = options.items()
    control, treatment = (partial(job, **{key: value}) for value in values)
    return Experiment(
        name=name,
        control=Arm(control, expect, because[0], "cpu"),
        treatment=Arm(treatment, completed(), because[1], "cpu"),
        world_size=size,
        needs=Needs(packages=needs),
        deadline_s=120,
        expected_s=(1.0, 1.0) if len(needs) == 1 else (10.0, 10.0),
    )


MODES = ("inference_mode", "no_grad")
INSIDE = "an evaluation under inference_mode makes the table"
FIRST = ("the first forward is under inference_mode", "it is under no_grad, later evaluations are not")
MADE = "a model is built under inference_mode"
BETWEEN = ("an evaluation under inference_mode between two steps", "it is under no_grad")
VALIDATED = ("trainer.validate() before trainer.fit()", "Trainer(inference_mode=False)")
OWN = (INSIDE, "it is made under inference_mode(False)")
FEATURES = ("inputs made under inference_mode", "under no_grad")
MOVED = ("a model is moved under inference_mode", "not moved")
two_ranks: Any = partial(pair, world_size=2)

probe = Probe(
    experiments=(pair("cache", evaluate_first, SAVED, (INSIDE, "it is under no_grad"), way=MODES),),
    variants=(
        pair(
            "clone", evaluate_first, SAVED, ("detach().data of the table", "clone() outside"), way=("detach", "clone")
        ),
        pair("made-outside", evaluate_first, SAVED, OWN, way=("inside", "made outside")),
        pair("clone-inside", evaluate_first, SAVED, ("clone() inside", "outside"), way=("clone inside", "clone")),
        pair("sum", average, CHANGED, ("the sum is divided in place", "under no_grad"), way=MODES),
        pair("out-of-place", average, CHANGED, ("total /= n", "total = total / n"), way=("in place", "out of place")),
        pair("features", use_features, SAVED, FEATURES, context=MODES),
        pair("built", make_inside, SAVED, (MADE, "it is built outside"), way=("inside", "outside")),
        pair("moved", make_inside, SAVED, MOVED, way=("moved", "outside")),
        two_ranks("fsdp1", partial(shard, way="fsdp1"), NO_GRAD_FN, FIRST, needs={"torch": ">=2.7"}, context=MODES),
        two_ranks("fsdp2", partial(shard, way="fsdp2"), CHANGED, FIRST, needs={"torch": ">=2.7"}, context=MODES),
        two_ranks("zero3", partition, SAVED, BETWEEN, needs={"deepspeed": ">=0.16.2"}, context=MODES),
        pair("lightning", fit, SAVED, VALIDATED, needs={"lightning": ">=2.0"}, inference_mode=(True, False)),
    ),
)
