"""torch.compile under DDP or FSDP: DDPOptimizer fails, or fullgraph=True meets the wrapper's own code."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

WIDTH = 512  # a block has two weights of 1 MiB, so that a bucket of 1 MiB ends in the middle of a block


def network(*, scaled: bool = False, recompute: bool = False) -> Any:
    """Three blocks, the same on all ranks. `scaled`: each block multiplies by a number of its own, as DropPath does."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, drop: float) -> None:
            super().__init__()
            self.first, self.second, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), drop

        def body(self, x: Any) -> Any:
            return torch.relu(self.second(torch.relu(self.first(x))))

        def keep(self, x: Any) -> Any:
            return x * (1.0 - self.drop) if self.drop else x

        def forward(self, x: Any) -> Any:
            if recompute:
                return x + checkpoint(self.body, x, use_reentrant=False)
            if scaled:
                return x + self.keep(self.second(x + self.keep(self.first(x))))
            return x + self.body(x)

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(0.1 * number) for number in range(3)])

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
                if scaled:
                    torch._dynamo.graph_break()  # each block is a graph, and the number becomes an input of it
            return x

    torch.manual_seed(0)
    return Net()


def batch(rank: int) -> Any:
    import torch

    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def judge(plain: Any, model: Any) -> None:
    """The gradients must be the mean of those that the plain model has for each rank's batch."""
    import torch

    (sum(plain(batch(rank)).square().mean() for rank in range(2)) / 2).backward()
    wanted, got = list(plain.parameters()), list(model.parameters())
    assert len(wanted) == len(got) == 12, (len(wanted), len(got))
    for expected, parameter in zip(wanted, got):
        grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        torch.testing.assert_close(grad, expected.grad, rtol=1e-3, atol=1e-5)


def ddp(ctx: Context, *, optimize: bool, form: str = "", where: str = "wrapper", mb: float = 1) -> None:
    """`form`: the model's. `where`: which module is compiled, the wrapper or the one inside."""
    import torch
    import torch._dynamo
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=30)
    options = {"backend": "aot_eager"}  # needs no C++ compiler
    given = {form: True} if form else {}
    plain, model = network(**given), network(**given)
    if not optimize:
        torch._dynamo.config.optimize_ddp = False  # before the first forward
    if where == "inside":
        model.compile(**options)
    if where == "blocks":
        for block in model.blocks:
            block.compile(**options)
    model = DistributedDataParallel(model, bucket_cap_mb=mb)
    step = torch.compile(model, **options) if where == "wrapper" else model
    ctx.reached()
    for _ in range(2):
        model.zero_grad()
        step(batch(ctx.rank)).square().mean().backward()
    torch._dynamo.reset()
    judge(plain, model.module)


def fullgraph(ctx: Context, *, where: str, wrapper: str) -> None:
    """One graph is demanded, of the wrapper or of each block in it."""
    import torch

    ctx.init_process_group(timeout_s=30)
    options, plain, model = {"backend": "aot_eager", "fullgraph": True}, network(), network()
    if where == "blocks":
        for block in model.blocks:
            block.compile(**options)
    model = wrapped(model, wrapper)
    step = torch.compile(model, **options) if where == "wrapper" else model
    ctx.reached()
    step(batch(ctx.rank)).square().mean().backward()
    judge(plain, model)


def wrapped(model: Any, wrapper: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    if wrapper == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def many(ctx: Context, *, limit: int) -> None:
    """Twelve blocks with DropPath, each compiled by itself: the probability makes a version of the code for each."""
    import torch
    import torch._dynamo
    from torch.nn.parallel import DistributedDataParallel

    class Block(torch.nn.Linear):  # type: ignore[misc]
        def __init__(self, drop: float) -> None:
            super().__init__(8, 8)
            self.keep = 1.0 - drop

        def forward(self, x: Any) -> Any:
            return x + super().forward(x) * x.new_empty((len(x), 1)).bernoulli_(self.keep) / self.keep

    ctx.init_process_group(timeout_s=30)
    ran: List[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        def run(*arguments: Any) -> Any:
            ran.append(graph)
            return graph.forward(*arguments)

        return run

    torch._dynamo.config.optimize_ddp = False  # before the first forward
    torch._dynamo.config.cache_size_limit = limit  # the older name of recompile_limit
    blocks = torch.nn.Sequential(*(Block(0.02 * number) for number in range(12)))
    for block in blocks:
        block.compile(backend=backend)
    model = DistributedDataParallel(blocks)
    ctx.reached()
    model(torch.ones(4, 8)).square().mean().backward()
    torch._dynamo.reset()
    if len(ran) < 12:
        raise Symptom("only %d of 12 blocks ran compiled" % len(ran))


def overlap(ctx: Context, *, where: str) -> None:
    """optimize_ddp=False: does an all-reduce start before the last part of the backward?"""
    import torch
    import torch._dynamo
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=30)
    events: List[str] = []

    def backward(graph: Any, _: Any) -> Any:
        def run(*arguments: Any) -> Any:
            events.append("backward")
            return graph(*arguments)

        return make_boxed_func(run)

    def hook(state: Any, bucket: Any) -> Any:
        events.append("bucket")
        return allreduce_hook(state, bucket)

    hook.__annotations__.clear()  # DDP wants GradBucket or nothing

    forward = lambda graph, _: make_boxed_func(graph.forward)  # noqa: E731
    options = {"backend": aot_autograd(fw_compiler=forward, bw_compiler=backward)}
    plain, model = network(), network()
    torch._dynamo.config.optimize_ddp = False  # before the first forward
    if where == "blocks":
        for block in model.blocks:
            block.compile(**options)
    model = DistributedDataParallel(model, bucket_cap_mb=1)
    model.register_comm_hook(None, hook)
    step = torch.compile(model, **options) if where == "wrapper" else model
    ctx.reached()
    for _ in range(3):  # DDP orders its buckets anew in the second
        events.clear()
        model.zero_grad()
        step(batch(ctx.rank)).square().mean().backward()
    torch._dynamo.reset()
    judge(plain, model.module)
    buckets, last = events.count("bucket"), len(events) - events[::-1].index("backward")
    if events[last:].count("bucket") == buckets:
        raise Symptom("all %d all-reduces start after the whole backward" % buckets)


def pair(name: str, job: Callable[..., None], expect: Expect, because: str, fix: str, **named: Any) -> Experiment:
    torch = named.pop("torch", ">=2.2")
    [(way, (broken, fixed))] = list(named.items())
    return Experiment(
        name=name,
        control=Arm(partial(job, **{way: broken}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{way: fixed}), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": torch}),
        deadline_s=180.0,
        expected_s=(4.0, 5.0),
    )


META = raised(r"AttributeError: 'float' object has no attribute 'meta'")
HIGHER = raised(r"NotImplementedError: DDPOptimizer backend: Found a higher order op in the graph")
FIRST = raised(r"AssertionError: First bucket should be smaller/equal to other buckets")
LOGGER = raised(r"Dynamo does not know how to trace method `set_runtime_stats_and_log` of class `Logger`")
SKIPPED = raised(  # the second is the text of torch 2.14 and newer
    r"torch\._dynamo\.exc\.Unsupported: "
    r"(Attempted to call function marked as skipped|Call to `torch\._dynamo\.disable\(\)`)"
)
LATE = symptom(r"all \d+ all-reduces start after the whole backward")
OFF, ON = "optimize_ddp is False", "DDPOptimizer splits the graphs at DDP's buckets"
NUMBER = partial(ddp, form="scaled")
probe = Probe(
    experiments=(pair("number", NUMBER, META, ON, OFF, optimize=(True, False), torch=">=2.13"),),
    variants=(
        pair("inside", partial(NUMBER, where="inside"), META, ON, OFF, optimize=(True, False), torch=">=2.13"),
        pair("blocks", partial(NUMBER, where="blocks"), META, ON, OFF, optimize=(True, False), torch=">=2.13"),
        pair(
            "bucket",
            partial(ddp, optimize=True),
            FIRST,
            "bucket_cap_mb is below DDPOptimizer's first bucket of 1 MiB",
            "bucket_cap_mb is 1",
            mb=(0.5, 1),
        ),
        pair("higher-order", partial(ddp, form="recompute"), HIGHER, ON, OFF, optimize=(True, False), torch="<2.6"),
        pair(
            "many-blocks",
            many,
            symptom(r"only \d+ of 12 blocks ran compiled"),
            "twelve blocks differ in their probability, and eight versions are allowed",
            "sixteen versions are allowed",
            limit=(8, 16),
            torch=">=2.9",
        ),
        pair(
            "overlap",
            overlap,
            LATE,
            "the whole wrapper is compiled without DDPOptimizer, so that its backward is one graph",
            "each block is compiled, so that its backward is a graph of its own",
            where=("wrapper", "blocks"),
        ),
        pair(
            "fullgraph",
            partial(fullgraph, wrapper="ddp"),
            LOGGER,
            "the DDP wrapper is compiled with fullgraph=True",
            "each block is compiled with fullgraph=True before DDP wraps the model",
            where=("wrapper", "blocks"),
            torch=">=2.13",
        ),
        pair(
            "fullgraph-fsdp2",
            partial(fullgraph, wrapper="fsdp2"),
            SKIPPED,
            "the sharded model is compiled with fullgraph=True",
            "each block is compiled with fullgraph=True before fully_shard",
            where=("wrapper", "blocks"),
            torch=">=2.13",
        ),
    ),
)
