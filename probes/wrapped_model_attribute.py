"""DDP has the parameters of a model, not its attributes; what reaches around DDP in training is not averaged."""

from functools import partial
from typing import Any, Callable

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom


def build(ctx: Context) -> Any:
    """A model with an attribute, a setting and a method beside forward; the weight is 1 on every rank."""
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
    """The attribute of a model that is wrapped, or, with one process, is not."""
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
    """The same behind accelerate's prepare."""

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
    """A setting that the model reads in its forward."""
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
    """One backward with the input 1 on rank 0 and 2 on rank 1: the mean of the gradients is 1.5."""
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
    else:
        model = DistributedDataParallel(LossModule(net))
        loss = model(*batch)
        loss.backward()
    compare(ctx, net.layer.weight.grad.item())


def extend(ctx: Context, *, before: bool) -> None:
    """A model gets another layer, before it is wrapped or through the wrapper; the same inputs as above."""
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
    "an attribute of the model is asked of DDP",
    "it is asked of the module inside",
)

probe = Probe(
    experiments=(wrapper,),
    variants=(
        pair(
            "one-process",
            partial(read, unwrapped=False, wrapped=False),
            partial(read, unwrapped=True, wrapped=False),
            raised(r"'Net' object has no attribute 'module'"),
            "one process, and the model was not wrapped",
            "the module inside is asked for only where there is a wrapper",
        ),
        pair(
            "accelerate",
            partial(read_prepared, unwrapped=False),
            partial(read_prepared, unwrapped=True),
            MISSING,
            "an attribute of the model is asked of what prepare returned",
            "unwrap_model gives the model",
        ),
        pair(
            "setting",
            partial(change, unwrapped=False),
            partial(change, unwrapped=True),
            symptom(r"caching = False was set on the wrapper, the model still has True"),
            "a setting is written to DDP, which takes it silently",
            "it is written to the module inside",
        ),
        pair(
            "training-method",
            partial(train, way="module"),
            partial(train, way="wrapped loss"),
            APART,
            "the loss comes from a method of the module inside",
            "DDP wraps a module whose forward calls that method",
        ),
        pair(
            "forwarding",
            partial(train, way="forwarding"),
            partial(train, way="wrapped loss"),
            APART,
            "a subclass of DDP hands every unknown attribute to the module, also the method that gives the loss",
            "DDP wraps a module whose forward calls that method",
        ),
        pair(
            "beside",
            partial(train, way="module"),
            partial(train, way="beside"),
            APART,
            "the loss comes from a method of the module inside",
            "the same backward has a forward of DDP as well, which prepares the averaging",
        ),
        pair(
            "added-layer",
            partial(extend, before=False),
            partial(extend, before=True),
            APART,
            "the module inside gets a layer after the wrapping, of which DDP does not know",
            "it gets the layer before",
        ),
    ),
)
