"""Training uses a tensor that was created under inference_mode, which autograd may neither save nor change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kb.cpu_arms import import_deepspeed, without_launcher
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Unavailable, completed, raised


def evaluation_mode(name: str) -> Any:
    import torch

    return torch.no_grad() if name == "no_grad" else torch.inference_mode()


def build(outside: bool = False) -> Any:
    """Two layers, and between them a table that the first forward creates, as rotary embeddings do."""
    import torch

    class Table(torch.nn.Module):  # type: ignore[misc]
        cos: Any

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cos", None, persistent=False)

        def forward(self, x: Any) -> Any:
            if self.cos is None:
                if outside:
                    with torch.inference_mode(False):
                        self.cos = torch.arange(4.0).cos()
                else:
                    self.cos = torch.arange(4.0).cos()
            return x * self.cos

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), Table(), torch.nn.Linear(4, 1))


def step(model: Any) -> None:
    """One training step, in which every parameter gets a gradient."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()


def evaluate_first(ctx: Context, *, way: str) -> None:
    """Evaluates a model before the first training step, so the evaluation runs the first forward."""
    import torch

    model = build(outside=way == "made outside")
    model.eval()
    with evaluation_mode(way):
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
    """Adds up a loss in an evaluation, and divides the sum outside of it."""
    import torch

    with evaluation_mode(way):
        total, n = torch.ones(4).sum(), 4
    ctx.reached()
    if way == "out of place":
        total = total / n
    else:
        total /= n
    assert total.item() == 1.0


def use_features(ctx: Context, *, context: str) -> None:
    """Trains a head on the features of a frozen encoder, or of a rollout."""
    import torch

    encoder = torch.nn.Linear(4, 4)
    with evaluation_mode(context):
        features = encoder(torch.ones(2, 4))
    ctx.reached()
    head = torch.nn.Linear(4, 1)
    head(features).sum().backward()
    assert head.weight.grad is not None


def make_inside(ctx: Context, *, way: str) -> None:
    """Builds a model, or moves it to another dtype, under inference_mode or outside of it."""
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
    """Evaluates a sharded model before training, so the evaluation allocates the buffers for gathered weights."""
    import torch
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    if way == "fsdp2" and not hasattr(fsdp, "fully_shard"):
        raise Unavailable("torch %s has no fully_shard" % torch.__version__)
    ctx.init_process_group(timeout_s=10)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    if way == "fsdp1":
        model = fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        for part in (model[0], model[2], model):
            fsdp.fully_shard(part, mesh=init_device_mesh("cpu", (ctx.world_size,)))
    with evaluation_mode(context):
        model(torch.ones(2, 4))
    ctx.reached()
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        with torch.inference_mode():  # a later evaluation is harmless
            model(torch.ones(2, 4))


def partition(ctx: Context, *, context: str) -> None:
    """Evaluates between two steps with ZeRO-3, which gathers and prefetches weights in the evaluation."""
    import torch

    deepspeed = import_deepspeed()
    ctx.init_process_group(timeout_s=20)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}  # otherwise ZeRO-3 does not shard these small weights
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    for number in range(2):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        engine.eval()
        with evaluation_mode(context):
            engine(torch.ones(2, 4))
        engine.train()
        if number == 0:
            ctx.reached()


def fit(ctx: Context, *, inference_mode: bool) -> None:
    """Calls trainer.validate() before trainer.fit(). The validation inside of fit() uses no_grad in any case."""
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

    without_launcher()
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
    """One option is the keyword in which the arms differ: its values in the control and in the treatment arm."""
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
INSIDE = "the first evaluation creates the table, under inference_mode"
CACHE = (INSIDE, "the first evaluation creates the table, under no_grad")
CLONE = "clone() outside of inference_mode makes the table a normal tensor"
DETACH = ("detach().data leaves the table an inference tensor", CLONE)
CLONE_INSIDE = ("clone() under inference_mode leaves the table an inference tensor", CLONE)
MADE_OUTSIDE = (INSIDE, "the first evaluation creates the table under inference_mode(False)")
SUM = ("the loop divides a sum from inference_mode in place", "the loop divides a sum from no_grad in place")
OUT_OF_PLACE = ("total /= n changes an inference tensor", "total = total / n creates a new tensor")
FEATURES = ("the encoder computes its features under inference_mode", "the encoder computes its features under no_grad")
BUILT = ("the model is built under inference_mode", "the model is built outside of inference_mode")
MOVED = ("the model changes its dtype under inference_mode", "the model does not change its dtype")
FIRST = (
    "the first forward runs under inference_mode",
    "the first forward runs under no_grad; later evaluations use inference_mode",
)
BETWEEN = (
    "an evaluation between two steps runs under inference_mode",
    "the evaluation between two steps runs under no_grad",
)
VALIDATED = (
    "trainer.validate() runs under inference_mode before trainer.fit()",
    "Trainer(inference_mode=False) makes trainer.validate() use no_grad",
)
two_ranks: Any = partial(pair, world_size=2)

probe = Probe(
    experiments=(pair("cache", evaluate_first, SAVED, CACHE, way=MODES),),
    variants=(
        pair("clone", evaluate_first, SAVED, DETACH, way=("detach", "clone")),
        pair("made-outside", evaluate_first, SAVED, MADE_OUTSIDE, way=("inside", "made outside")),
        pair("clone-inside", evaluate_first, SAVED, CLONE_INSIDE, way=("clone inside", "clone")),
        pair("sum", average, CHANGED, SUM, way=MODES),
        pair("out-of-place", average, CHANGED, OUT_OF_PLACE, way=("in place", "out of place")),
        pair("features", use_features, SAVED, FEATURES, context=MODES),
        pair("built", make_inside, SAVED, BUILT, way=("inside", "outside")),
        pair("moved", make_inside, SAVED, MOVED, way=("moved", "outside")),
        two_ranks("fsdp1", partial(shard, way="fsdp1"), NO_GRAD_FN, FIRST, needs={"torch": ">=2.7"}, context=MODES),
        two_ranks("fsdp2", partial(shard, way="fsdp2"), CHANGED, FIRST, needs={"torch": ">=2.7"}, context=MODES),
        two_ranks("zero3", partition, SAVED, BETWEEN, needs={"deepspeed": ">=0.16.2"}, context=MODES),
        pair("lightning", fit, SAVED, VALIDATED, needs={"lightning": ">=2.0"}, inference_mode=(True, False)),
    ),
)
