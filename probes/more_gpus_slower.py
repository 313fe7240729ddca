"""Two ranks train with DDP over a link that needs 0.2 s for their gradients, and are slower than one rank alone.

The link is as slow for these gradients as PCIe is for those of a large model. A sleep for each sample stands in for the
computation of a GPU.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple

from kb.namespaces import join_nodes, own_network, run_two_nodes
from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, Unavailable, completed, symptom

NIC = "kb0"  # the interface of each node
WIDTH, LAYERS, MBIT, SAMPLE_S, MANY = 724, 2, 160, 0.05, 12


def compare_speed(
    model: Any, backward: Callable[[Any, Any], None], batch: Any, samples: int, steps: int
) -> List[float]:
    """The test of the entry: samples/s of one rank, of all ranks without all-reduce, and of all ranks with it.

    `backward(module, batch)` does forward, loss and backward, without `step()`.
    """
    import torch
    import torch.distributed as dist

    world, rates = dist.get_world_size(), []
    for ranks, module in ((1, model.module), (world, model.module), (world, model)):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps if dist.get_rank() < ranks else 0):
            backward(module, batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        rates.append(ranks * steps * samples / (time.perf_counter() - started))
    model.zero_grad()
    return rates


def describe(world: int, rates: Sequence[float]) -> str:
    line = "%d ranks do %.2f times the samples/s of one: alone %.2f, all without all-reduce %.2f, with it %.2f"
    return line % (world, rates[2] / rates[0], *rates)


def build_model(adapter: bool) -> Any:
    """Layers that spend a third of a sample's time in the forward and two thirds in the backward, as on a GPU."""
    import torch

    class Pause(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            time.sleep(len(x) * SAMPLE_S / LAYERS / 3)
            return x.clone()

        @staticmethod
        def backward(_: Any, *gradients: Any) -> Any:
            time.sleep(len(gradients[0]) * SAMPLE_S / LAYERS * 2 / 3)
            return gradients[0]

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(not adapter)
            self.low = torch.nn.Linear(WIDTH, 2, bias=False) if adapter else None
            self.high = torch.nn.Linear(2, WIDTH, bias=False) if adapter else None

        def forward(self, x: Any) -> Any:
            out = self.base(x)
            if self.low is not None and self.high is not None:
                out = out + self.high(self.low(x))
            return Pause.apply(out)

    torch.manual_seed(0)
    return torch.nn.Sequential(*[Layer() for _ in range(LAYERS)])


def link_hook(sent: List[int], *, modelled: bool, hook: str) -> Any:
    """A communication hook that appends the bytes of each all-reduce to `sent`; if modelled, it is slow like a link."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def link(group: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        size = buffer.numel() * (2 if hook else buffer.element_size())
        sent.append(size)
        if modelled:
            time.sleep(size * 8 / 1e6 / (MBIT // 2 if hook else MBIT))
        return (default_hooks.bf16_compress_hook if hook else default_hooks.allreduce_hook)(group, bucket)

    link.__annotations__.clear()  # torch rejects annotations that differ from its own
    return link


def backward_of(model: Any, accumulation: int, synchronise: str) -> Callable[[Any, Any], None]:
    """Forward, loss and backward of a window of micro-batches; each of them synchronises, or only the last one."""

    def backward(module: Any, window: Any) -> None:
        def forward(batch: Any) -> Any:
            return module(batch).mean()

        if synchronise == "each":
            for batch in window:
                (forward(batch) / accumulation).backward()
            return
        for number, batch in enumerate(window):
            with nullcontext() if number == accumulation - 1 else model.no_sync():
                loss = forward(batch) / accumulation
                loss.backward()

    return backward


def join_network(node: Context) -> None:
    own_network()
    join_nodes(node, NIC)
    os.environ["GLOO_SOCKET_IFNAME"] = NIC
    limit_rate()


def train(
    node: Context,
    *,
    modelled: bool,
    batch_size: int = 1,
    accumulation: int = 1,
    synchronise: str = "each",
    adapter: bool = False,
    hook: str = "",
    ddp: Optional[Mapping[str, Any]] = None,
) -> None:
    """Raises `Symptom` if two ranks are slower than one."""
    if not modelled:
        join_network(node)
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    node.init_process_group(timeout_s=30)
    model = DistributedDataParallel(build_model(adapter), **(ddp or {}))
    sent: List[int] = []
    model.register_comm_hook(None, link_hook(sent, modelled=modelled, hook=hook))
    samples = batch_size * accumulation
    inputs = torch.full((samples, WIDTH), float(node.rank + 1), requires_grad=True)
    window = list(inputs.split(batch_size))
    backward = backward_of(model, accumulation, synchronise)
    for _ in range(2):  # DDP builds its buckets in the first step
        model(window[0]).mean().backward()
    model.zero_grad()
    node.reached()
    check_average(model, backward, window)
    sent.clear()
    steps = 6 if adapter else 3 if samples == 1 else 1
    rounds, rates = measure(lambda: compare_speed(model, backward, window, samples, steps))
    size = sum(p.numel() for p in model.parameters() if p.requires_grad) * (2 if hook else 4)
    per_window = size * (accumulation if synchronise == "each" else 1)
    assert sum(sent) == per_window * steps * rounds, (sent, per_window, steps, rounds)
    line = describe(2, rates)
    node.note(rates=line, bytes_per_sample=per_window // samples)
    if rates[2] < rates[0]:
        raise Symptom("%s; %.2f MB of gradients are all-reduced per sample" % (line, per_window / samples / 1e6))
    assert rates[2] > 1.2 * rates[0], line


def measure(once: Callable[[], List[float]]) -> Tuple[int, List[float]]:
    """Measures at least twice, until it is clear which is faster. Other load on the machine only lowers a rate."""
    rounds, best = 0, [0.0] * 3
    while rounds < 2 or (rounds < 10 and 0.8 < best[2] / best[0] < 1.25):
        best = list(map(max, best, once()))
        rounds += 1
    return rounds, best


def check_average(model: Any, backward: Callable[[Any, Any], None], window: Any) -> None:
    """Asserts that DDP gives all ranks the mean of their gradients, in every arm."""
    import torch
    import torch.distributed as dist

    backward(model.module, window)
    totals = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    for gradient in totals:
        dist.all_reduce(gradient)
    model.zero_grad()
    backward(model, window)
    means = [p.grad for p in model.parameters() if p.requires_grad]
    for mean, total in zip(means, totals):
        assert torch.allclose(mean, total / 2, rtol=0.02, atol=1e-6), (mean, total / 2)
    model.zero_grad()


def limit_rate() -> None:
    """Limits the rate of this node's interface."""
    options = ["dev", NIC, "root", "tbf", "rate", "%dmbit" % MBIT, "burst", "64kb", "latency", "400ms"]
    ran = subprocess.run(["tc", "qdisc", "add", *options], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Unavailable("tc cannot limit the rate of a link on this machine: %s" % ran.stderr.strip())


def train_over_link(ctx: Context, **options: Any) -> None:
    run_two_nodes(ctx, partial(train, modelled=False, **options))


SLOWER = symptom(r"2 ranks do 0\.\d+ times the samples/s of one: alone \S+, all without all-reduce \S+, with it ")
LINK = "two cards without P2P; two networks of this host have a link of limited rate, and a sleep replaces computation"
PAUSE = "a link between two cards; a pause lasts as long as it needs for a bucket, and a sleep replaces computation"


def experiment(name: str, because: str, fix: str, change: Mapping[str, Any], **common: Any) -> Experiment:
    modelled = common.pop("modelled", True)
    job: Any = partial(train, modelled=True) if modelled else train_over_link
    fidelity, stands_for = ("model", PAUSE) if modelled else ("stand-in", LINK)
    return Experiment(
        name=name,
        control=Arm(partial(job, **common), SLOWER, because, fidelity, stands_for),
        treatment=Arm(partial(job, **{**common, **change}), completed(), fix, fidelity, stands_for),
        world_size=2 if modelled else 1,
        needs=Needs(packages={"torch": ">=2.1"}, programs=() if modelled else ("tc",)),
        deadline_s=90,
        expected_s=(6.0, 4.0),
    )


SMALL = "each step all-reduces all gradients for only one sample per rank"
LARGE = "each all-reduce of all gradients serves %d samples per rank" % MANY
MORE = {"batch_size": MANY}

probe = Probe(
    experiments=(
        experiment("batch", SMALL, LARGE, MORE, modelled=False),
        experiment("batch-model", SMALL, LARGE, MORE),
    ),
    variants=(
        experiment(
            "accumulation",
            "each of %d accumulated micro-batches all-reduces all gradients" % MANY,
            "with no_sync, only the last micro-batch all-reduces",
            {"synchronise": "last"},
            accumulation=MANY,
        ),
        experiment(
            "adapter",
            SMALL,
            "only an adapter is trained, which has less than 1/100 of the gradients",
            {"adapter": True},
        ),
        experiment(
            "buckets",
            "larger buckets, gradients as views of buckets and a static graph all-reduce just as many bytes",
            LARGE,
            MORE,
            ddp={"bucket_cap_mb": 200, "gradient_as_bucket_view": True, "static_graph": True},
        ),
        experiment(
            "bf16-hook",
            "the bf16 hook halves the bytes, over a link of half the rate, still for one sample per rank",
            LARGE,
            MORE,
            hook="bf16",
        ),
    ),
)
