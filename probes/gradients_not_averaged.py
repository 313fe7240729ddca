"""No all-reduce averages the gradients: rank 0 has input 1, rank 1 has input 2, so the mean gradient should be 1.5."""

import itertools
import os
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, List, Optional, Tuple

from kb.cpu_arms import import_deepspeed
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, symptom


def compare_ranks(model: Any, group: Any = None) -> List[str]:
    """The function that the entry prints: one line each for weights and gradients that differ between the ranks."""
    import torch
    import torch.distributed as dist

    word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def add(t: Any) -> Optional[int]:
        if t is None:
            return None
        parts = t.detach().reshape(-1).view(word[t.element_size()]).split(1 << 24)
        return sum(int(part.sum(dtype=torch.int64)) for part in parts)

    plain = [(n, p) for n, p in model.named_parameters() if p.requires_grad and not hasattr(p, "to_local")]
    mine = {n: (add(p), add(p.grad)) for n, p in plain}
    every: List[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    lines = []
    for place, what in enumerate(("weights", "gradients")):
        apart = [n for n in mine if len({other[n][place] for other in every if n in other}) > 1]
        if apart:
            text = "%s differ between ranks: %d of %d parameters, first %s"
            lines.append(text % (what, len(apart), len(mine), apart[0]))
    return lines


def judge(model: Any, gradient: float = 1.5) -> None:
    """Raises `Symptom` if weights or gradients differ between ranks, and checks that each gradient is the mean."""
    if lines := compare_ranks(model):
        raise Symptom("; ".join(lines))
    gradients = [p.grad for p in model.parameters() if not hasattr(p, "to_local")]
    assert gradients and all(abs(value.item() - gradient) < 1e-6 for value in gradients), gradients


def start(ctx: Context) -> Tuple[Any, Any]:
    """Joins the process group, and returns torch, which a probe imports inside the job, and torch.distributed."""
    import torch

    dist = ctx.init_process_group(timeout_s=15)
    return torch, dist


def weight(ctx: Context) -> Any:
    """A layer with one weight, which is 1 on every rank."""
    import torch

    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    return layer.to(ctx.device)


def batch_of(ctx: Context) -> Any:
    """The input of this rank: 1 on rank 0, 2 on rank 1."""
    import torch

    return torch.full((1, 1), ctx.rank + 1.0, device=ctx.device)


def forward(ctx: Context, *, way: str, sharded: bool = False) -> None:
    """Computes the loss through the wrapper, or with the module inside it; `folklore` adds what people try.

    `sharded` uses ZeroRedundancyOptimizer, which gives every rank the same weights whatever the gradients were.
    """
    from torch.nn.parallel import DistributedDataParallel

    torch, dist = start(ctx)
    model, batch = DistributedDataParallel(weight(ctx), find_unused_parameters=way == "folklore"), batch_of(ctx)
    ctx.reached()
    if way == "wrapper":
        loss = model(batch).sum()
    else:
        loss = model.module(batch).sum()
    if way == "folklore":
        dist.all_reduce(loss.data)
        loss.data /= dist.get_world_size()
        dist.barrier()
    loss.backward()
    if sharded:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1).step()
        after: List[Any] = [None, None]
        dist.all_gather_object(after, model.module.weight.item())
        assert after[0] == after[1] and (way == "module" or abs(after[0] - 0.85) < 1e-6), after
    judge(model)


def change(ctx: Context, *, what: str, when: str) -> None:
    """The model changes before DDP wraps it, or after that, and then DDP may wrap it again."""
    from torch.nn.parallel import DistributedDataParallel

    torch, _ = start(ctx)
    net = torch.nn.Sequential(weight(ctx), weight(ctx))
    if what == "enlarged":
        net[0].requires_grad_(False)

    def alter() -> None:
        if what == "enlarged":
            net.append(weight(ctx))
            net[0].requires_grad_(True)
        elif what == "converted":
            net.double().float()
        elif ctx.rank == 0:
            for value in net.parameters():  # as if only rank 0 loaded a checkpoint
                value.data += 1

    if when == "before":
        alter()
    model = DistributedDataParallel(net)
    if when != "before":
        alter()
    if when == "wrapped again":
        model = DistributedDataParallel(model.module)
    ctx.reached()
    model(batch_of(ctx)).sum().backward()
    judge(model, 3.0 if what == "loaded" else 1.5)


def loss_with_weights(ctx: Context, *, wrapped: bool) -> None:
    """The loss has a parameter, as that of ArcFace does."""
    from torch.nn.parallel import DistributedDataParallel

    torch, _ = start(ctx)
    model, criterion = DistributedDataParallel(weight(ctx)), weight(ctx)
    if wrapped:
        criterion = DistributedDataParallel(criterion)
    ctx.reached()
    criterion(model(batch_of(ctx))).sum().backward()
    judge(torch.nn.ModuleList([model, criterion]))


def accumulate(ctx: Context, *, way: str) -> None:
    """Three batches, two per step, so that the last step has one batch, whose backward must not be in no_sync."""
    from torch.nn.parallel import DistributedDataParallel

    start(ctx)
    model = DistributedDataParallel(weight(ctx))
    loader, accumulation = [batch_of(ctx)] * 3, 2
    expected = [1.5, 1.5]

    def step() -> None:
        judge(model, expected.pop(0))
        model.zero_grad()

    ctx.reached()
    if way == "outside":
        with model.no_sync():
            loss = model(loader[0]).sum()
        loss.backward()
        judge(model)
    if way == "leftover":
        for i, batch in enumerate(loader):
            with model.no_sync() if (i + 1) % accumulation else nullcontext():
                (model(batch).sum() / accumulation).backward()
            if (i + 1) % accumulation == 0:
                step()
        step()
    batches = iter(loader)
    while window := list(itertools.islice(batches, accumulation)):
        for number, batch in enumerate(window, 1):
            with nullcontext() if number == len(window) else model.no_sync():
                (model(batch).sum() / len(window)).backward()
        step()
    assert not expected


def outside(ctx: Context, *, averaged: bool, sharded: bool = False) -> None:
    """Gradients that autograd.grad returns, or, if `sharded`, those of a parameter in FSDP2's ignored_params."""
    from torch.nn.parallel import DistributedDataParallel

    torch, dist = start(ctx)
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = torch.nn.Sequential(weight(ctx), weight(ctx))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params={model[1].weight})
    else:
        model = DistributedDataParallel(weight(ctx))
    ctx.reached()
    loss = model(batch_of(ctx)).sum()
    if sharded:
        loss.backward()
    else:
        (model.module.weight.grad,) = torch.autograd.grad(loss, list(model.parameters()))
    parameters = [p for p in model.parameters() if averaged and p.requires_grad and not hasattr(p, "to_local")]
    for parameter in parameters:
        assert parameter.grad is not None and not hasattr(parameter, "to_local")
        parameter.grad = parameter.grad.contiguous() / dist.get_world_size()
        dist.all_reduce(parameter.grad)
    judge(model)


def inner_gradient(ctx: Context, *, static: bool) -> None:
    """A gradient penalty: autograd.grad with respect to the input, then backward for the weights."""
    from torch.nn.parallel import DistributedDataParallel

    torch, _ = start(ctx)
    model = DistributedDataParallel(weight(ctx), static_graph=static)
    ctx.reached()
    for _ in range(3):
        batch = batch_of(ctx).requires_grad_()
        loss = model(batch).sum()
        (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
        (loss + slope.square().sum()).backward()
        judge(model, 3.5)
        model.zero_grad()


def mesh_of_one(ctx: Context, *, mesh: bool) -> None:
    """FSDP1 on two ranks: HYBRID_SHARD with a mesh whose shard dimension is 1, or NO_SHARD without a mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    torch, _ = start(ctx)
    options: Any = {"device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy.NO_SHARD}
    if mesh:
        shape = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        options.update(device_mesh=shape, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    model = FullyShardedDataParallel(weight(ctx), **options)
    ctx.reached()
    model(batch_of(ctx)).sum().backward()
    judge(model)


def update(ctx: Context, *, own: str, shared: bool) -> None:
    """`rate`: the scheduler uses this rank's metric. `state`: only rank 0 loads the optimizer's state.

    With `shared`, the scheduler uses the mean metric, and every rank loads the state.
    """
    from torch.nn.parallel import DistributedDataParallel

    torch, dist = start(ctx)
    model = DistributedDataParallel(weight(ctx))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    ctx.reached()
    for metric in (torch.ones(1), torch.tensor([0.5 + ctx.rank])) if own == "rate" else ():
        if shared:
            dist.all_reduce(metric)
            metric /= dist.get_world_size()
        scheduler.step(metric.item())
    if own == "state" and (shared or ctx.rank == 0):
        saved = {0: {"momentum_buffer": torch.ones(1, 1)}}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": saved})
    model(batch_of(ctx)).sum().backward()
    optimizer.step()
    judge(model)


def prepare(ctx: Context, *, kept: bool) -> None:
    """The script uses the model that accelerate's prepare returns, or throws it away."""
    from accelerate import Accelerator  # type: ignore[import-not-found]

    start(ctx)
    accelerator, model = Accelerator(cpu=True), weight(ctx)
    ctx.reached()
    if kept:
        model = accelerator.prepare(model)
    else:
        accelerator.prepare(model)
    accelerator.backward(model(batch_of(ctx)).sum())
    judge(model)


def lightning(ctx: Context, *, way: str) -> None:
    """Manual optimization with one of two backwards, or a backbone that trains from epoch 1 on.

    The backbone is unfrozen by BackboneFinetuning (`thawed`), or its learning rate is 0 in epoch 0 (`rate`).
    """
    import lightning.pytorch as pl  # type: ignore[import-not-found]
    from lightning.pytorch.callbacks import BackboneFinetuning  # type: ignore[import-not-found]

    torch, _ = start(ctx)
    os.environ.update(LOCAL_WORLD_SIZE="2", GROUP_RANK="0", TORCHELASTIC_RUN_ID="kb")
    manual, thawed, rate = "backward" in way, way == "thawed", 1e-9

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = torch.nn.Sequential(weight(ctx)), weight(ctx)
            self.automatic_optimization = not manual

        def training_step(self, *_: Any) -> Any:
            loss = self.head(self.backbone(batch_of(ctx))).sum()
            if manual:
                loss.backward() if way == "loss.backward" else self.manual_backward(loss)
                judge(self)
                self.optimizers().step()
            return loss

        def on_train_epoch_start(self) -> None:
            if way == "rate":
                self.optimizers().param_groups[1]["lr"] = rate if self.current_epoch else 0.0

        def on_before_optimizer_step(self, *_: Any) -> None:
            if self.current_epoch:
                judge(self)

        def configure_optimizers(self) -> Any:
            parts = [self.head] if thawed else [self.head, self.backbone]
            return torch.optim.SGD([{"params": part.parameters()} for part in parts], lr=rate)

    options: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    callbacks = [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=rate)] if thawed else []
    options.update(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1 if manual else 2, callbacks=callbacks)
    trainer = pl.Trainer(limit_train_batches=1, enable_model_summary=False, **options)
    ctx.reached()
    trainer.fit(Module(), torch.utils.data.DataLoader([0, 0]))


def trainer(ctx: Context, *, argument: bool) -> None:
    """A Trainer whose compute_loss calls its argument `model`, or self.model."""
    torch, _ = start(ctx)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    class Net(torch.nn.Linear):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, labels: Any = None) -> Any:  # noqa: ARG002 -- the Trainer looks for this name
            return super().forward(x).sum()

    class Mine(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
            return model(**inputs) if argument else self.model(**inputs)

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            loss = super().training_step(*arguments, **options)
            judge(self.model)
            return loss

    options = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False}
    options.update(use_cpu=True, max_steps=1, per_device_train_batch_size=1, optim="sgd")
    data, net = [{"x": torch.tensor([float(value)])} for value in (1, 2)], Net(1, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    ctx.reached()
    Mine(model=net, args=TrainingArguments(output_dir=ctx.path("out"), **options), train_dataset=data).train()


def train_with_deepspeed(ctx: Context, *, engine_backward: bool) -> None:
    """DeepSpeed, stage 0: the script calls the engine's backward, or that of the tensor."""
    deepspeed = import_deepspeed()
    torch, _ = start(ctx)
    net = weight(ctx)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config, dist_init_required=False)[0]
    ctx.reached()
    loss = engine.module(batch_of(ctx)).sum()  # with engine(...), 0.18.3 and newer reject loss.backward()
    if engine_backward:
        engine.backward(loss)
    else:
        loss.backward()
    engine.step()
    if lines := compare_ranks(net):
        raise Symptom(lines[0])


def apart(what: str, count: str) -> Expect:
    return symptom(r"(?<!; )%s differ between ranks: %s parameters, first [^\s;]+$" % (what, count))


ONE, OF_TWO, TWO = apart("gradients", "1 of 1"), apart("gradients", "1 of 2"), apart("gradients", "2 of 2")
WEIGHT, HUGGING_FACE = apart("weights", "1 of 1"), {"transformers": ">=4.52", "accelerate": ">=0.26"}
AROUND, THROUGH = "the loss calls the module inside DDP, so DDP reduces nothing", "the loss calls DDP"
FOLKLORE = "the loss calls the module inside DDP, despite find_unused_parameters, an averaged loss and a barrier"
EQUAL = "the loss calls the module inside DDP, and ZeroRedundancyOptimizer hides it by sending equal weights"
BY_HAND = "the script divides these gradients by the world size and all-reduces them"
EPOCH_END = "the last, shorter step of the epoch runs entirely in no_sync"
OUTSIDE_NO_SYNC = "the forward and backward of each step's last micro-batch are outside no_sync"
IGNORED, WAYS, THAWS = partial(outside, sharded=True), ("loss.backward", "manual_backward"), ("thawed", "rate")


def pair(name: str, job: Callable[..., None], expect: Expect, because: str, fix: str, **named: Any) -> Experiment:
    """`named` holds the keyword that differs, with its values in both arms, and packages with their versions."""
    needs = {key: value for key, value in named.items() if isinstance(value, str)}
    [(way, (broken, fixed))] = [item for item in named.items() if item[0] not in needs]
    deadline_s, seconds = (60.0, 3.0) if {*needs} - {"torch"} else (20.0, 0.4)
    return Experiment(
        name=name,
        control=Arm(partial(job, **{way: broken}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{way: fixed}), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.1", **needs}),
        deadline_s=deadline_s,
        expected_s=(seconds, seconds),
    )


def changed(what: str, expect: Expect, because: str, fix: str, fixed: str = "before") -> Experiment:
    return pair(what, partial(change, what=what), expect, because, fix, when=("after", fixed))


probe = Probe(
    experiments=(pair("module", forward, ONE, AROUND, THROUGH, way=("module", "wrapper")),),
    variants=(
        pair("folklore", forward, ONE, FOLKLORE, THROUGH, way=("folklore", "wrapper")),
        pair("sharded-optimizer", partial(forward, sharded=True), ONE, EQUAL, THROUGH, way=("module", "wrapper")),
        changed(
            "enlarged",
            apart("gradients", "2 of 3"),
            "one layer is added and another unfrozen after DDP wrapped the model",
            "the layer is added and the other unfrozen before DDP wraps the model",
        ),
        changed(
            "converted",
            TWO,
            "the model is converted to float64 and back after DDP wrapped it",
            "DDP wraps the model again after the conversion",
            "wrapped again",
        ),
        changed(
            "loaded",
            apart("weights", "2 of 2"),
            "only rank 0 loads weights, after DDP wrapped the model",
            "rank 0 loads weights before DDP wraps the model and broadcasts them",
        ),
        pair(
            "loss-weights",
            loss_with_weights,
            OF_TWO,
            "DDP wraps the model but not the loss, which has a weight as well",
            "DDP wraps the model and the loss",
            wrapped=(False, True),
        ),
        pair(
            "backward-outside",
            accumulate,
            ONE,
            "the forward is in no_sync and the backward outside, so DDP reduces nothing",
            OUTSIDE_NO_SYNC,
            way=("outside", "right"),
        ),
        pair("leftover", accumulate, ONE, EPOCH_END, OUTSIDE_NO_SYNC, way=("leftover", "right")),
        pair(
            "autograd-grad",
            outside,
            ONE,
            "torch.autograd.grad returns the gradients, and DDP does not reduce them",
            BY_HAND,
            averaged=(False, True),
        ),
        pair(
            "static-graph",
            inner_gradient,
            ONE,
            "an inner torch.autograd.grad makes DDP with static_graph=True skip the reduction",
            "the same gradient penalty is trained without static_graph",
            static=(True, False),
        ),
        pair(
            "fsdp2-ignored",
            IGNORED,
            ONE,
            "FSDP2 does not reduce the gradient of a parameter in ignored_params",
            BY_HAND,
            averaged=(False, True),
            torch=">=2.9",
        ),
        pair(
            "fsdp1-mesh",
            mesh_of_one,
            ONE,
            "FSDP1 has a mesh whose shard dimension is 1, and does not reduce between the replicas",
            "FSDP1 uses NO_SHARD without a mesh",
            mesh=(True, False),
            torch=">=2.4",
        ),
        pair(
            "own-rate",
            partial(update, own="rate"),
            WEIGHT,
            "each rank's scheduler sets the learning rate by that rank's metric",
            "each rank's scheduler uses the mean metric of all ranks",
            shared=(False, True),
        ),
        pair(
            "own-state",
            partial(update, own="state"),
            WEIGHT,
            "only rank 0 loads the optimizer's state",
            "every rank loads the optimizer's state",
            shared=(False, True),
        ),
        pair(
            "prepare",
            prepare,
            ONE,
            "the script throws away the model that accelerate's prepare returns",
            "the script uses the model that accelerate's prepare returns",
            kept=(False, True),
            accelerate="",
        ),
        pair(
            "trainer",
            trainer,
            ONE,
            "compute_loss calls self.model, which is not wrapped in DDP",
            "compute_loss calls its argument `model`",
            argument=(False, True),
            **HUGGING_FACE,
        ),
        pair(
            "lightning",
            lightning,
            TWO,
            "manual optimization calls loss.backward()",
            "manual optimization calls self.manual_backward(loss)",
            way=WAYS,
            lightning=">=2.2",
        ),
        pair(
            "lightning-finetuning",
            lightning,
            OF_TWO,
            "BackboneFinetuning unfreezes the backbone after DDP wrapped the model",
            "the backbone is never frozen, but its learning rate is 0 in the first epoch",
            way=THAWS,
            lightning=">=2.2",
        ),
        pair(
            "deepspeed",
            train_with_deepspeed,
            WEIGHT,
            "the script calls loss.backward() instead of the engine's backward",
            "the script calls engine.backward(loss)",
            engine_backward=(False, True),
            deepspeed=">=0.19",
        ),
    ),
)
