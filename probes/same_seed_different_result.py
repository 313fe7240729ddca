"""Two runs of one job with one seed, and the first thing in which they differ, bit by bit."""

import hashlib
import os
import random
import subprocess
import sys
import warnings
from functools import partial
from typing import Any, Callable, Iterable, Iterator, List

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

SEED, STEPS = 42, 4


def fingerprint(rank: int, step: int, **items: Any) -> Iterator[str]:
    import torch

    for name, tensors in items.items():
        digest = hashlib.sha256()
        for t in tensors:
            t = getattr(t, "ds_tensor", t)
            t = (t.to_local() if hasattr(t, "to_local") else t).detach().cpu().contiguous()
            digest.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
        yield "fingerprint rank %d step %d %s %s" % (rank, step, name, digest.hexdigest()[:8])


def compare(one: List[str], other: List[str]) -> None:
    """Raise the first lines that differ, over all ranks."""
    import torch.distributed as dist

    every: List[Any] = [[one, other]]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, [one, other])
    for number in range(len(one)):
        for both in every:
            if both[0][number] != both[1][number]:
                raise Symptom("%s | %s" % (both[0][number], both[1][number]))


def seed_all(seed: int) -> None:
    """What set_seed of accelerate and of transformers does."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def network() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))


def make_dataset(noise: str) -> Any:
    """`noise` is the generator that augments the samples."""
    import numpy
    import torch

    class Noisy(torch.utils.data.Dataset):  # type: ignore[misc]
        rng = numpy.random.default_rng()

        def __getitem__(self, index: int) -> Any:
            rng: Any = {"own": self.rng, "global": numpy.random}.get(noise, numpy.random.default_rng(SEED))
            if noise == "torch":
                rng = numpy.random.default_rng(int(torch.randint(2**62, ())))
            return torch.full((8,), index + rng.random())

    return Noisy()


def learn(model: Any, batches: Iterable[Any], rank: int, first: int = 1) -> List[str]:
    import torch

    lines: List[str] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches, first):
        before = {"weights": model.parameters(), "batch": [batch], "generators": [torch.get_rng_state()]}
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        lines += fingerprint(rank, step, **before, loss=[loss], gradients=[p.grad for p in model.parameters()])
        optimizer.step()
    return lines


def train(ctx: Context, *, seed: str = "first", noise: str = "global", **options: Any) -> None:
    """DDP with dropout, twice. `seed`: what is seeded, and when."""
    import torch

    ctx.init_process_group(timeout_s=20)
    torch.cuda.set_device(ctx.device) if ctx.device.type == "cuda" else None
    ctx.reached()
    runs = []
    for _ in range(2):
        seed_all(int.from_bytes(os.urandom(4), "little"))  # as a new process is
        if seed == "first" or (seed == "rank 0" and ctx.rank == 0):
            seed_all(SEED)
        elif seed == "torch":
            torch.manual_seed(SEED)
        model = torch.nn.parallel.DistributedDataParallel(network().to(ctx.device))
        if seed == "late":
            seed_all(SEED)
        data = torch.utils.data.DataLoader(make_dataset(noise), 4, sampler=range(4 * STEPS), **options)
        runs.append(learn(model, (batch.float().to(ctx.device) for batch in data), ctx.rank))
    compare(*runs)


def regroup(ctx: Context, *, ranks: str) -> None:
    """The same 24 samples, first on two ranks and then on three, or twice on three; torch is told to be exact."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    two, three = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    torch.use_deterministic_algorithms(True)
    ctx.reached()
    grads: List[Any] = []
    for group in (two if ranks == "2, then 3" else three, three):
        torch.manual_seed(SEED)
        if ctx.rank < dist.get_world_size(group):
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 512), process_group=group)
            model(torch.randn(24, 8)[ctx.rank :: dist.get_world_size(group)]).square().mean().backward()
        grads.append(model.module.weight.grad if ctx.rank < 2 else torch.ones(1))
    assert torch.allclose(grads[0], grads[1], rtol=1e-3, atol=1e-6), "more than rounding"
    compare(*(list(fingerprint(ctx.rank, 1, gradients=[g])) for g in grads))


def resume(ctx: Context, *, saved: str) -> None:
    """Steps 3 and 4, at once or in a new process, which seeds as at each start; with the model, not the optimizer."""
    import torch

    ctx.init_process_group(timeout_s=20)
    rank, path = ctx.rank, ctx.path("generators-%d.pt" % ctx.rank)
    ctx.reached()
    batches = torch.ones(STEPS, 4, 8)
    seed_all(SEED)
    model = torch.nn.parallel.DistributedDataParallel(network())
    learn(model, batches[:2], rank)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save(torch.get_rng_state(), path)
    lines = learn(model, batches[2:], rank, first=3)
    seed_all(SEED)
    model.load_state_dict(weights)
    if saved == "generators":
        torch.set_rng_state(torch.load(path))
    compare(lines, learn(model, batches[2:], rank, first=3))


def label(ctx: Context, *, order: str) -> None:
    """Real processes, which number labels and set PYTHONHASHSEED themselves, when Python is running already."""
    code = "import os; os.environ['PYTHONHASHSEED'] = '42'; names = 'cat dog hen fish'.split() * 2; print(%s)" % order
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    ctx.reached()
    printed = [subprocess.check_output([sys.executable, "-c", code], env=environment) for _ in range(8)]
    found = sorted({"fingerprint rank 0 step 1 batch %s" % hashlib.sha256(text).hexdigest()[:8] for text in printed})
    compare(found[:1], found[-1:])


def refuse(ctx: Context, *, mode: str) -> None:
    """An operation in the backward that cannot be exact, here on the CPU."""
    import torch

    ctx.reached()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(mode != "off in forward", warn_only=mode == "warn")
        y = torch.ones(4, requires_grad=True) * 2
        y.register_hook(lambda grad: torch.zeros_like(grad).put_(torch.arange(4), grad))
        torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
        y.sum().backward()
    assert any("put_ does not have a deterministic implementation" in str(w.message) for w in caught)


def add(ctx: Context, *, exact: bool) -> None:
    """The backward of index_select on a GPU: a million gradients are added to eight rows, in any order."""
    import torch

    table = torch.zeros(8, 1, device=ctx.device, requires_grad=True)
    index, gradient = torch.randint(8, (1 << 20,)).to(ctx.device), torch.randn(1 << 20, 1).to(ctx.device)
    torch.use_deterministic_algorithms(exact)
    ctx.reached()
    grads = [torch.autograd.grad(table.index_select(0, index), table, gradient) for _ in range(20)]
    lines = sorted({*fingerprint(0, 1, gradients=found)}.pop() for found in grads)
    compare(lines[:1], lines[-1:])


def fit(ctx: Context, *, seed: str) -> None:
    """What the Trainer of transformers begins with, whose constructor sets the seed."""
    ctx.init_process_group(timeout_s=60)
    from transformers import Trainer, TrainingArguments, set_seed  # type: ignore[import-not-found]

    ctx.reached()
    runs = []
    for _ in range(2):
        seed_all(int.from_bytes(os.urandom(4), "little"))  # as a new process is
        args = TrainingArguments(ctx.path("out"), full_determinism=True, report_to="none", use_cpu=True)
        if seed == "first":
            set_seed(args.seed)
        runs.append([*fingerprint(0, 1, weights=Trainer(network(), args).model.parameters())])
    compare(*runs)


def differ(item: str, rank: int = 0, step: int = 1) -> Expect:
    line = r"fingerprint rank %d step %d %s " % (rank, step, item)
    return symptom(r"%s(\w{8}) \| %s(?!\1)\w{8}" % (line, line))


def pair(name: str, job: Callable[..., None], expect: Expect, because: str, fix: str, **named: Any) -> Experiment:
    """`named`: the keyword in which the arms differ with its two values, the number `of` ranks, and what they need."""
    world_size, packages, gpus = named.pop("of", 2), named.pop("packages", {}), named.pop("gpus", 0)
    [(key, (broken, fixed))] = named.items()
    fidelity, seconds = "hardware" if gpus else "cpu", 9.0 if packages else 2.0
    return Experiment(
        name=name,
        control=Arm(partial(job, **{key: broken}), expect=expect, because=because, fidelity=fidelity),
        treatment=Arm(partial(job, **{key: fixed}), expect=completed(), because=fix, fidelity=fidelity),
        needs=Needs(gpus=gpus, packages={"torch": ">=2.1", "numpy": "", **packages}),
        world_size=world_size,
        backend="nccl" if gpus else "gloo",
        deadline_s=seconds * 10 + 10,
        expected_s=(seconds, seconds),
    )


FIRST, LATE = "random, numpy and torch are seeded on every rank, before the model", "the model is there before the seed"
FIXED, OWN = partial(train, noise="none"), partial(train, num_workers=2, multiprocessing_context="fork")
SETS, RANKS = ("list(set(names))", "sorted(set(names))"), ("2, then 3", "3, then 3")
LIBRARIES = {"transformers": ">=4.46", "accelerate": ">=1.1"}
STRICT, WARN = raised(r"put_ does not have a deterministic implementation"), "torch only warns"
gloo = pair("late", train, differ("weights"), LATE, FIRST, seed=("late", "first"))
probe = Probe(
    experiments=(gloo.on_gpus(), gloo),
    variants=(
        pair("torch-only", train, differ("batch"), "only torch is seeded", FIRST, seed=("torch", "first")),
        pair("rank-zero", FIXED, differ("generators", 1), "only rank 0 seeds", FIRST, seed=("rank 0", "first")),
        pair("own", OWN, differ("batch"), "the dataset's generator", "one from torch's", noise=("own", "torch")),
        pair("set", label, differ("batch"), "the order of a set", "a sorted list", order=SETS, of=1),
        pair("ranks", regroup, differ("gradients"), "2 and 3 ranks", "3 ranks twice", ranks=RANKS, of=3),
        pair("resume", resume, differ("generators", 0, 3), "seeded again", "loaded", saved=("model", "generators")),
        pair("strict", refuse, STRICT, "torch refuses", WARN, mode=("strict", "warn"), of=1),
        pair("toggle", refuse, STRICT, "off in the forward only", WARN, mode=("off in forward", "warn"), of=1),
        pair("kernel", add, differ("gradients"), "atomics", "sorted", exact=(False, True), of=1, gpus=1),
        pair("trainer", fit, differ("weights"), LATE, FIRST, seed=("late", "first"), of=1, packages=LIBRARIES),
    ),
)
