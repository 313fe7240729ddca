"""DDP does not forward attributes of its model, and does not average gradients of a loss that bypasses its forward."""

from functools import partial
from typing import Any, Callable

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom


def build(ctx: Context) -> Any:
    """Returns a model with a config, a setting and a loss method; its weight is 1 on every rank."""
    import torch

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.ones_(self.layer.weight)
            self.config = {"hidden_size": 1}
            self.caching = True

        def forward(self, x: Any) -> Any:
            return self.layer(x)

        def loss(self, x: Any) -> Any:
            return self.layer(x).sum()

    return Net().to(ctx.device)


def read(ctx: Context, *, unwrapped: bool, wrapped: bool) -> None:
    """Reads an attribute of the model, which DDP wraps only if `wrapped`; `unwrapped` reads it from the inner model."""
    from torch.nn.parallel import DistributedDataParallel

    model = build(ctx)
    if wrapped:
        ctx.init_process_group(timeout_s=10)
        model = DistributedDataParallel(model)
    ctx.reached()
    if unwrapped:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
    else:
        inner = model if wrapped else model.module
    assert inner.config == {"hidden_size": 1}


def read_prepared(ctx: Context, *, unwrapped: bool) -> None:
    """Reads the attribute after accelerate's prepare_model."""
    from accelerate import Accelerator  # type: ignore[import-not-found]

    ctx.init_process_group(timeout_s=10)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(build(ctx))
    ctx.reached()
    if unwrapped:
        inner = accelerator.unwrap_model(model)
    else:
        inner = model
    assert inner.config == {"hidden_size": 1}


def change(ctx: Context, *, unwrapped: bool) -> None:
    """Writes a setting to the wrapper, or with `unwrapped` to the inner model."""
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=10)
    net = build(ctx)
    model = DistributedDataParallel(net)
    ctx.reached()
    inner = model.module if unwrapped else model
    inner.caching = False
    if net.caching:
        raise Symptom("caching = False was set on the wrapper, the model still has %s" % net.caching)


def train(ctx: Context, *, way: str) -> None:
    """Runs one backward with input 1 on rank 0 and 2 on rank 1, so the averaged gradient is 1.5."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    class Forwarding(DistributedDataParallel):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    class LossModule(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net

        def forward(self, *batch: Any) -> Any:
            return self.net.loss(*batch)

    ctx.init_process_group(timeout_s=10)
    net = build(ctx)
    batch = [torch.full((1, 1), ctx.rank + 1.0, device=ctx.device)]
    ctx.reached()
    if way == "module":
        DistributedDataParallel(net).module.loss(*batch).backward()
    elif way == "forwarding":
        Forwarding(net).loss(*batch).backward()
    elif way == "beside":
        model = DistributedDataParallel(net)
        ((model(*batch).sum() + model.module.loss(*batch)) / 2).backward()
    elif way == "two calls":
        model = DistributedDataParallel(LossModule(net))
        ((model(*batch) + model(*batch)) / 2).backward()
    else:
        model = DistributedDataParallel(LossModule(net))
        loss = model(*batch)
        loss.backward()
    compare(ctx, net.layer.weight.grad.item())


def train_after_forward(ctx: Context, *, bypassed: bool) -> None:
    """Runs a forward of DDP without a backward, then two steps; with `bypassed` their loss bypasses DDP."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=10)
    net = build(ctx)
    model = DistributedDataParallel(net)
    batch = torch.full((1, 1), ctx.rank + 1.0, device=ctx.device)
    model(batch)
    ctx.reached()
    for step in range(2):
        net.layer.weight.grad = None
        loss = model.module.loss(batch) if bypassed else model(batch).sum()
        loss.backward()
        if step == 0:
            assert abs(net.layer.weight.grad.item() - 1.5) < 1e-6, "the first step was not averaged"
    compare(ctx, net.layer.weight.grad.item())


def unfreeze(ctx: Context, *, before: bool) -> None:
    """Unfreezes a layer before or after DDP wraps the model, then runs a backward with the inputs of `train`."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=10)
    net = build(ctx)
    frozen = net.layer
    other = torch.nn.Linear(1, 1, bias=False, device=ctx.device)
    torch.nn.init.ones_(other.weight)
    net.layer = torch.nn.Sequential(frozen, other)
    frozen.requires_grad_(before)
    model = DistributedDataParallel(net)
    ctx.reached()
    frozen.requires_grad_(True)
    model(torch.full((1, 1), ctx.rank + 1.0, device=ctx.device)).sum().backward()
    compare(ctx, frozen.weight.grad.item())


def extend(ctx: Context, *, before: bool) -> None:
    """Adds a layer to the model before or after DDP wraps it, then runs a backward with the inputs of `train`."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    def add(inner: Any) -> Any:
        added = torch.nn.Linear(1, 1, bias=False, device=ctx.device)
        torch.nn.init.ones_(added.weight)
        inner.layer = torch.nn.Sequential(inner.layer, added)
        return added

    ctx.init_process_group(timeout_s=10)
    net = build(ctx)
    added = add(net) if before else None
    model = DistributedDataParallel(net)
    ctx.reached()
    added = added or add(model.module)
    model(torch.full((1, 1), ctx.rank + 1.0, device=ctx.device)).sum().backward()
    compare(ctx, added.weight.grad.item())


def compare(ctx: Context, gradient: float) -> None:
    """Raises Symptom if the gradient is not the mean of both ranks."""
    if abs(gradient - 1.5) > 1e-6:
        raise Symptom("gradient %.1f on rank %d, the mean of the ranks is 1.5" % (gradient, ctx.rank))


MISSING = raised(r"'DistributedDataParallel' object has no attribute 'config'")
APART = symptom(r"gradient [12]\.0 on rank [01], the mean of the ranks is 1\.5")


def pair(
    name: str, broken: Callable[..., None], fixed: Callable[..., None], expect: Expect, because: str, fix: str
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(broken, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(fixed, expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.1", **({"accelerate": ""} if name == "accelerate" else {})}),
        world_size=1 if name == "one-process" else 2,
        expected_s=(0.4, 0.4),
    )


wrapper = pair(
    "wrapper",
    partial(read, unwrapped=False, wrapped=True),
    partial(read, unwrapped=True, wrapped=True),
    MISSING,
    "the script reads an attribute of the model from DDP",
    "the script reads it from the inner model",
)

probe = Probe(
    experiments=(wrapper,),
    variants=(
        pair(
            "one-process",
            partial(read, unwrapped=False, wrapped=False),
            partial(read, unwrapped=True, wrapped=False),
            raised(r"'Net' object has no attribute 'module'"),
            "the script runs as one process, without DDP, and uses .module",
            "the script uses .module only if there is a wrapper",
        ),
        pair(
            "accelerate",
            partial(read_prepared, unwrapped=False),
            partial(read_prepared, unwrapped=True),
            MISSING,
            "the script reads an attribute of the model from the wrapper that accelerate returned",
            "the script reads it from unwrap_model(model)",
        ),
        pair(
            "setting",
            partial(change, unwrapped=False),
            partial(change, unwrapped=True),
            symptom(r"caching = False was set on the wrapper, the model still has True"),
            "the script writes a setting to DDP, which accepts it without an error",
            "the script writes it to the inner model",
        ),
        pair(
            "training-method",
            partial(train, way="module"),
            partial(train, way="wrapped loss"),
            APART,
            "the loss comes from a method of the inner model",
            "DDP wraps a module whose forward calls that method",
        ),
        pair(
            "forwarding",
            partial(train, way="forwarding"),
            partial(train, way="wrapped loss"),
            APART,
            "a subclass of DDP forwards unknown attributes to the model, including the method that computes the loss",
            "DDP wraps a module whose forward calls that method",
        ),
        pair(
            "beside",
            partial(train, way="module"),
            partial(train, way="beside"),
            APART,
            "the loss comes from a method of the inner model",
            "the loss also includes a forward of DDP, which prepares the averaging",
        ),
        pair(
            "forward-before",
            partial(train_after_forward, bypassed=True),
            partial(train_after_forward, bypassed=False),
            APART,
            "a forward of DDP without a backward prepares the averaging of only the first step that bypasses DDP",
            "the loss of every step comes from the forward of DDP",
        ),
        pair(
            "two-calls",
            partial(train, way="module"),
            partial(train, way="two calls"),
            APART,
            "the loss comes from a method of the inner model",
            "two calls of the wrapper compute the losses of one backward",
        ),
        pair(
            "unfrozen",
            partial(unfreeze, before=False),
            partial(unfreeze, before=True),
            APART,
            "a layer was frozen when DDP wrapped the model, so DDP does not average it after it is unfrozen",
            "the layer is unfrozen before DDP wraps the model",
        ),
        pair(
            "added-layer",
            partial(extend, before=False),
            partial(extend, before=True),
            APART,
            "the inner model gets a layer after DDP wrapped it, and DDP does not know that layer",
            "the model gets the layer before DDP wraps it",
        ),
    ),
)
