"""Gradients that no all-reduce has averaged: rank 0 has input 1, rank 1 has input 2, so the mean gradient is 1.5."""

import os
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, List

from kb.cpu_arms import import_deepspeed
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, symptom


def compare_ranks(model: Any, group: Any = None) -> List[str]:
    """The test of the entry: what differs between the ranks of a group."""
    import torch
    import torch.distributed as dist

    word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def add(t: Any) -> Any:
        return None if t is None else t.detach().view(word[t.element_size()]).sum(dtype=torch.int64).item()

    plain = [(n, p) for n, p in model.named_parameters() if p.requires_grad and not hasattr(p, "to_local")]
    mine = {n: (add(p), add(p.grad)) for n, p in plain}
    every: List[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    lines = []
    for place, what in enumerate(("weights", "gradients")):
        apart = [n for n in mine if len({other[n][place] for other in every if n in other}) > 1]
        if apart:
            lines.append(
                "%s differ between ranks: %d of %d parameters, first %s" % (what, len(apart), len(mine), apart[0])
            )
    return lines


def average(parameters: Any) -> None:
    """Fix 5."""
    import torch
    import torch.distributed as dist

    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def judge(model: Any, gradient: float = 1.5) -> None:
    lines = compare_ranks(model)
    if lines:
        raise Symptom("; ".join(lines))
    gradients = [p.grad for p in model.parameters() if not hasattr(p, "to_local")]
    assert gradients and all(abs(value.item() - gradient) < 1e-6 for value in gradients), gradients


def weight(ctx: Context) -> Any:
    """A layer that multiplies by one number, 1 on every rank."""
    import torch

    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    return layer.to(ctx.device)


def batch_of(ctx: Context) -> Any:
    import torch

    return torch.full((1, 1), ctx.rank + 1.0, device=ctx.device)


def forward(ctx: Context, *, way: str) -> None:
    """One backward through the wrapper, or around it; `folklore` is around it with all that is tried against it."""
    from torch.nn.parallel import DistributedDataParallel

    dist = ctx.init_process_group(timeout_s=10)
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
    judge(model)


def change(ctx: Context, *, what: str, when: str) -> None:
    """The model changes before it is wrapped, after it, or after it and is wrapped again."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=10)
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
            for value in net.parameters():  # as a checkpoint that one rank loads
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
    """A loss with a parameter of its own, as ArcFace has."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=10)
    model, criterion = DistributedDataParallel(weight(ctx)), weight(ctx)
    if wrapped:
        criterion = DistributedDataParallel(criterion)
    ctx.reached()
    criterion(model(batch_of(ctx))).sum().backward()
    judge(torch.nn.ModuleList([model, criterion]))


def accumulate(ctx: Context, *, way: str) -> None:
    """Three batches, two to a step: the last step has one batch. It must not fall under no_sync."""
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=10)
    model = DistributedDataParallel(weight(ctx))
    loader, accumulation = [batch_of(ctx)] * 3, 2
    expected = [1.5, 0.75]

    def step() -> None:
        judge(model, expected.pop(0))
        model.zero_grad()

    ctx.reached()
    if way == "backward outside":
        with model.no_sync():
            loss = model(loader[0]).sum()
        loss.backward()
        judge(model)
    if way == "leftover":
        for i, batch in enumerate(loader):
            last = (i + 1) % accumulation == 0
            with nullcontext() if last else model.no_sync():
                (model(batch).sum() / accumulation).backward()
            if last:
                step()
        step()
    for i, batch in enumerate(loader):
        last = (i + 1) % accumulation == 0 or i + 1 == len(loader)
        with nullcontext() if last else model.no_sync():
            (model(batch).sum() / accumulation).backward()
        if last:
            step()
    assert not expected


def outside(ctx: Context, *, averaged: bool, sharded: bool = False) -> None:
    """Gradients that autograd.grad returns, or of parameters that FSDP2 was told to leave alone."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=10)
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = torch.nn.Sequential(weight(ctx), weight(ctx))
        mesh = init_device_mesh("cpu", (ctx.world_size,))
        fully_shard(model, mesh=mesh, ignored_params={model[1].weight})
    else:
        model = DistributedDataParallel(weight(ctx))
    ctx.reached()
    loss = model(batch_of(ctx)).sum()
    if sharded:
        loss.backward()
    else:
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
            parameter.grad = gradient
    if averaged:
        average(p for p in model.parameters() if p.requires_grad and not hasattr(p, "to_local"))
    judge(model)


def mesh_of_one(ctx: Context, *, strategy: str) -> None:
    """FSDP1 with a mesh of two replicas of one shard, or with two replicas and no mesh."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    ctx.init_process_group(timeout_s=10)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if "HYBRID" in strategy else None
    model = FullyShardedDataParallel(
        weight(ctx), device_mesh=mesh, sharding_strategy=ShardingStrategy[strategy], device_id=torch.device("cpu")
    )
    ctx.reached()
    model(batch_of(ctx)).sum().backward()
    judge(model)


def blind(ctx: Context, *, way: str) -> None:
    """An optimizer that shares its work gives every rank the same weights, whatever the gradients were."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    dist = ctx.init_process_group(timeout_s=10)
    model = DistributedDataParallel(weight(ctx))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    ctx.reached()
    (model.module if way == "module" else model)(batch_of(ctx)).sum().backward()
    optimizer.step()
    after: List[Any] = [None] * ctx.world_size
    dist.all_gather_object(after, model.module.weight.item())
    lines = compare_ranks(model)
    if lines:
        raise Symptom("%s; after the step the weights are %.2f and %.2f" % ("; ".join(lines), after[0], after[1]))
    assert all(abs(value - 0.85) < 1e-6 for value in after)


def schedule(ctx: Context, *, reduced: bool) -> None:
    """Each rank's own validation loss decides whether the rate falls."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    dist = ctx.init_process_group(timeout_s=10)
    model = DistributedDataParallel(weight(ctx))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    ctx.reached()
    for metric in (torch.ones(1), torch.tensor([0.5 + ctx.rank])):
        if reduced:
            dist.all_reduce(metric)
            metric /= dist.get_world_size()
        scheduler.step(metric.item())
    model(batch_of(ctx)).sum().backward()
    optimizer.step()
    judge(model)


def prepare(ctx: Context, *, kept: bool) -> None:
    """What accelerate's prepare returns is kept, or thrown away."""
    from accelerate import Accelerator  # type: ignore[import-not-found]

    ctx.init_process_group(timeout_s=10)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # asked for, not used: the group exists
    accelerator = Accelerator(cpu=True)
    model = weight(ctx)
    ctx.reached()
    if kept:
        model = accelerator.prepare(model)
    else:
        accelerator.prepare(model)
    accelerator.backward(model(batch_of(ctx)).sum())
    judge(model)


def fit(ctx: Context, module: Any, **options: Any) -> None:
    import lightning.pytorch as pl  # type: ignore[import-not-found]
    import torch

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", LOCAL_RANK=str(ctx.rank), RANK=str(ctx.rank))
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0", TORCHELASTIC_RUN_ID="kb")
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", limit_train_batches=1, **quiet, **options)
    ctx.reached()
    trainer.fit(module, torch.utils.data.DataLoader([0, 0]))


def lightning(ctx: Context, *, manual_backward: bool) -> None:
    """Manual optimization of Lightning: its own backward, or that of the tensor."""
    import lightning.pytorch as pl
    import torch

    ctx.init_process_group(timeout_s=20)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = weight(ctx)
            self.automatic_optimization = False

        def training_step(self, *_: Any) -> None:
            self.optimizers().zero_grad()
            loss = self.layer(batch_of(ctx)).sum()
            if manual_backward:
                self.manual_backward(loss)
            else:
                loss.backward()
            judge(self)
            self.optimizers().step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    fit(ctx, Module(), max_steps=1)


def finetune(ctx: Context, *, frozen: bool) -> None:
    """Lightning: a backbone that its callback thaws in the second epoch, or whose rate was 0 until then."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import BackboneFinetuning  # type: ignore[import-not-found]

    ctx.init_process_group(timeout_s=20)
    rate = 1e-9

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = torch.nn.Sequential(weight(ctx)), weight(ctx)

        def training_step(self, *_: Any) -> Any:
            return self.head(self.backbone(batch_of(ctx))).sum()

        def on_train_epoch_start(self) -> None:
            if not frozen:
                self.optimizers().param_groups[0]["lr"] = rate if self.current_epoch >= 1 else 0.0

        def on_before_optimizer_step(self, *_: Any) -> None:
            if self.current_epoch == 1:
                judge(self)

        def configure_optimizers(self) -> Any:
            if frozen:
                return torch.optim.SGD(self.head.parameters(), lr=rate)
            groups = [{"params": self.backbone.parameters(), "lr": 0.0}, {"params": self.head.parameters()}]
            return torch.optim.SGD(groups, lr=rate)

    callbacks = [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=rate)] if frozen else []
    fit(ctx, Module(), max_epochs=2, callbacks=callbacks)


def trainer(ctx: Context, *, argument: bool) -> None:
    """compute_loss of a Trainer with the model that it is given, or with self.model."""
    import torch
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    ctx.init_process_group(timeout_s=20)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", LOCAL_RANK=str(ctx.rank), RANK=str(ctx.rank))
    os.environ.update(WORLD_SIZE="2", ACCELERATE_USE_CPU="true")

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = weight(ctx)

        def forward(self, x: Any, labels: Any = None) -> Any:  # noqa: ARG002 -- the Trainer looks for this name
            return self.layer(x).sum()

    class Mine(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
            if argument:
                return model(**inputs)
            return self.model(**inputs)

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            loss = super().training_step(*arguments, **options)
            judge(self.model)
            return loss

    options = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False}
    arguments = TrainingArguments(
        output_dir=ctx.path("out"), use_cpu=True, max_steps=1, per_device_train_batch_size=1, optim="sgd", **options
    )
    data = [{"x": torch.tensor([float(value)])} for value in (1, 2)]
    ctx.reached()
    Mine(model=Net(), args=arguments, train_dataset=data).train()


def engine(ctx: Context, *, own: bool) -> None:
    """DeepSpeed, stage 0: the engine's backward, or that of the tensor."""
    deepspeed = import_deepspeed()
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    os.environ.update(LOCAL_RANK=str(ctx.rank), RANK=str(ctx.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "1")
    net = weight(ctx)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config, dist_init_required=False)[0]
    ctx.reached()
    loss = engine.module(batch_of(ctx)).sum()  # with engine(...) 0.19.8 refuses loss.backward()
    if own:
        engine.backward(loss)
    else:
        loss.backward()
    engine.step()
    after: List[Any] = [None] * ctx.world_size
    dist.all_gather_object(after, net.weight.item())
    if after[0] != after[1]:
        raise Symptom(compare_ranks(net)[0])


def apart(what: str, count: str) -> Expect:
    return symptom(r"(?<!; )%s differ between ranks: %s parameters, first [^\s;]+$" % (what, count))


ONE, OF_TWO = apart("gradients", "1 of 1"), apart("gradients", "1 of 2")


def pair(
    name: str,
    broken: Callable[..., None],
    fixed: Callable[..., None],
    expect: Expect,
    because: str,
    fix: str,
    **needs: str,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(broken, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(fixed, expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.1", **needs}),
        deadline_s=60.0 if needs else 20.0,
        expected_s=(3.0, 3.0) if needs else (0.4, 0.4),
    )


WRAPPER = partial(forward, way="wrapper")

probe = Probe(
    experiments=(
        pair(
            "module",
            partial(forward, way="module"),
            WRAPPER,
            ONE,
            "the forward goes through ddp.module",
            "it goes through DDP",
        ),
    ),
    variants=(
        pair(
            "folklore",
            partial(forward, way="folklore"),
            WRAPPER,
            ONE,
            "around DDP, with find_unused_parameters=True, the loss averaged over the ranks, and a barrier",
            "the forward goes through DDP",
        ),
        pair(
            "enlarged",
            partial(change, what="enlarged", when="after"),
            partial(change, what="enlarged", when="before"),
            apart("gradients", "2 of 3"),
            "a layer is added and another thawed after the wrapping",
            "before it",
        ),
        pair(
            "converted",
            partial(change, what="converted", when="after"),
            partial(change, what="converted", when="wrapped again"),
            apart("gradients", "2 of 2"),
            "the model goes to float64 and back after the wrapping",
            "it is wrapped again",
        ),
        pair(
            "loss-weights",
            partial(loss_with_weights, wrapped=False),
            partial(loss_with_weights, wrapped=True),
            OF_TWO,
            "the loss has a weight, and DDP wraps the model only",
            "DDP wraps the loss as well",
        ),
        pair(
            "backward-outside",
            partial(accumulate, way="backward outside"),
            partial(accumulate, way="right"),
            ONE,
            "the forward is under no_sync, the backward is not",
            "the last micro-batch has its forward outside of no_sync",
        ),
        pair(
            "leftover",
            partial(accumulate, way="leftover"),
            partial(accumulate, way="right"),
            ONE,
            "the epoch ends within an accumulation, under no_sync, and a step is taken",
            "the last batch of the epoch is outside of no_sync",
        ),
        pair(
            "autograd-grad",
            partial(outside, averaged=False),
            partial(outside, averaged=True),
            ONE,
            "torch.autograd.grad returns the gradients, DDP never sees them",
            "an all-reduce of each gradient",
        ),
        pair(
            "loaded",
            partial(change, what="loaded", when="after"),
            partial(change, what="loaded", when="before"),
            apart("weights", "2 of 2"),
            "rank 0 alone loads weights after the wrapping",
            "before it: DDP then sends them to all ranks",
        ),
        pair(
            "own-rate",
            partial(schedule, reduced=False),
            partial(schedule, reduced=True),
            apart("weights", "1 of 1"),
            "each rank's own metric moves its learning rate",
            "the mean of the metric does",
        ),
        pair(
            "sharded-optimizer",
            partial(blind, way="module"),
            partial(blind, way="wrapper"),
            symptom(r"(?<!; )gradients differ [^;]+; after the step the weights are (0\.\d+) and \1$"),
            "gradients are not averaged, and the optimizer sends its weights to all ranks",
            "they are averaged",
        ),
        pair(
            "fsdp2-ignored",
            partial(outside, averaged=False, sharded=True),
            partial(outside, averaged=True, sharded=True),
            ONE,
            "FSDP2 leaves a parameter alone",
            "an all-reduce of its gradient",
            torch=">=2.9",
        ),
        pair(
            "fsdp1-mesh",
            partial(mesh_of_one, strategy="HYBRID_SHARD"),
            partial(mesh_of_one, strategy="NO_SHARD"),
            ONE,
            "FSDP1 with a mesh of two replicas and one shard",
            "NO_SHARD without a mesh",
            torch=">=2.4",
        ),
        pair(
            "prepare",
            partial(prepare, kept=False),
            partial(prepare, kept=True),
            ONE,
            "what prepare returned is thrown away",
            "it is called",
            accelerate="",
        ),
        pair(
            "trainer",
            partial(trainer, argument=False),
            partial(trainer, argument=True),
            ONE,
            "compute_loss calls self.model",
            "it calls the model that it is given",
            transformers=">=4.52",
            accelerate=">=0.26",
        ),
        pair(
            "lightning",
            partial(lightning, manual_backward=False),
            partial(lightning, manual_backward=True),
            ONE,
            "manual optimization, and loss.backward()",
            "self.manual_backward(loss)",
            lightning=">=2.2",
        ),
        pair(
            "lightning-finetuning",
            partial(finetune, frozen=True),
            partial(finetune, frozen=False),
            OF_TWO,
            "BackboneFinetuning thaws the backbone after DDP has wrapped the model",
            "the backbone is not frozen, its learning rate is 0",
            lightning=">=2.2",
        ),
        pair(
            "deepspeed",
            partial(engine, own=False),
            partial(engine, own=True),
            apart("weights", "1 of 1"),
            "loss.backward() at stage 0",
            "engine.backward(loss)",
            deepspeed=">=0.19",
        ),
    ),
)
