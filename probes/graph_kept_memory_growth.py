"""A tensor that outlives its training step keeps its autograd graph, and with it the activations of that step."""

from __future__ import annotations

import resource
import weakref
from functools import partial
from typing import Any, Callable, List

from kb.cpu_arms import without_launcher
from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, completed, symptom

STEPS = 20
MODELS, WIDTH = 12, 1024
FEW = 2  # at the end, the last step and the one that is being freed may still hold activations


class Saved:
    """A tensor that autograd has saved for a backward."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


def count_steps(ctx: Context, *, step: Callable[[Any, Any, List[Any]], None]) -> None:
    """Runs steps of one shape; raises `Symptom` if autograd holds the saved tensors of more than `FEW` of them."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(ctx.device)
    batch = torch.randn(32, 64, device=ctx.device)
    saved: List[weakref.WeakSet[Saved]] = []
    kept: List[Any] = []

    def pack(tensor: Any) -> Saved:
        box = Saved(tensor.detach())  # without detach, a saved output would refer to its own node
        saved[-1].add(box)
        return box

    ctx.reached()
    with saved_tensors_hooks(pack, lambda box: box.tensor):
        for _ in range(STEPS):
            saved.append(weakref.WeakSet())
            step(model, batch, kept)
    held = sum(map(bool, saved))
    ctx.note(steps=STEPS, held=held, graph_nodes=graph_nodes())
    if held > FEW:
        raise Symptom(f"the activations of {held} of {STEPS} steps are still held")


def graph_nodes() -> int:
    """Counts the nodes of autograd's graph that live tensors refer to."""
    import gc

    import torch

    gc.collect()
    stack = [
        each.grad_fn for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.grad_fn is not None
    ]
    seen = set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(parent for parent, _ in node.next_functions if parent is not None)
    return len(seen)


def add_up(model: Any, batch: Any, kept: List[Any], *, how: str) -> None:
    """Adds the loss of an evaluation to a running total."""
    import gc

    import torch

    if how == "eval":
        model.eval()
    if how == "no_grad":
        with torch.no_grad():
            loss = model(batch).square().mean()
    else:
        loss = model(batch).square().mean()
    total = kept.pop() if kept else 0.0
    if how == "item":
        total += loss.item()
    else:
        total = total + loss
    kept.append(total)
    if how == "collect":
        gc.collect()


def add_up_trained(model: Any, batch: Any, kept: List[Any], *, logged_alone: bool) -> None:
    """Adds up the loss of a training loop, or a term that is only logged and has no backward."""
    model.zero_grad(set_to_none=True)
    loss = model(batch).square().mean()
    logged = model(batch).abs().mean() if logged_alone else loss
    loss.backward()
    kept[:] = [kept[0] + logged if kept else logged]


def collect(model: Any, batch: Any, kept: List[Any], *, detached: bool) -> None:
    """Collects the outputs for a metric at the end of the epoch."""
    output = model(batch)
    if detached:
        kept.append(output.detach())
    else:
        kept.append(output)


def circle(model: Any, batch: Any, kept: List[Any], *, collected: bool) -> None:
    """Makes a result that refers to itself, as a bound callback does, while Python's garbage collector is off."""
    import gc

    gc.disable()
    result = {"output": model(batch)}
    result["self"] = result
    if collected:
        gc.collect()


def log(model: Any, batch: Any, kept: List[Any], *, as_number: bool) -> None:
    """Logs a term with Trainer.log of transformers."""
    import tempfile

    without_launcher()
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    if not kept:
        arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[], disable_tqdm=True)
        kept.append(Trainer(model=model, args=arguments))
    loss = model(batch).square().mean()
    kept[0].log({"aux": loss.item() if as_number else loss})


def average(model: Any, batch: Any, kept: List[Any], *, no_grad: bool) -> None:
    """Updates a moving average with a loss that is computed for it alone."""
    import torch

    loss = model(batch).square().mean()
    loss.backward()
    average = kept.pop() if kept else torch.zeros((), device=batch.device)
    if no_grad:
        with torch.no_grad():
            average = 0.9 * average + 0.1 * model(batch).square().mean()
    else:
        average = 0.9 * average + 0.1 * model(batch).square().mean()
    kept.append(average)


def penalise(ctx: Context, *, how: str) -> None:
    """Computes a gradient penalty of several new models; raises `Symptom` if the process has kept their memory.

    With `create_graph`, the gradient of a parameter has a graph that refers to the parameter.
    """
    import gc

    import torch

    batch = torch.randn(4, WIDTH, device=ctx.device)
    ctx.reached()
    before = 0.0
    for number in range(MODELS + 1):
        if number == 1:  # the first model has allocated what torch keeps in any case
            before = resident_mib()
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
        model.to(ctx.device)
        loss = model(batch).square().mean()
        if how == "grad":
            grads = torch.autograd.grad(loss, tuple(model.parameters()), create_graph=True)
            (loss + sum(grad.square().sum() for grad in grads)).backward()
        else:
            loss.backward(create_graph=True)
            torch.stack([weight.grad.square().sum() for weight in model.parameters() if weight.grad is not None]).sum()
        if how == "none":
            for weight in model.parameters():
                weight.grad = None
        del model, loss
        gc.collect()
    grown = resident_mib() - before
    ctx.note(models=MODELS, mib_each=WIDTH * WIDTH * 4 / 2**20, grown_mib=round(grown))
    if grown > MODELS * WIDTH * WIDTH * 4 / 2**20 / 2:
        raise Symptom(f"{MODELS} models later the process holds {grown:.0f} MiB more, after gc.collect()")


def resident_mib() -> float:
    """The resident memory of this process, in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


HELD = symptom(r"the activations of (\d+) of \1 steps are still held")
GROWN = symptom(r"models later the process holds \d{2,} MiB more, after gc\.collect")


def pair(name: str, bad: Any, good: Any, *, because: str, fixed: str, expect: Any = HELD, **rest: Any) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(bad, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(good, expect=completed(), because=fixed, fidelity="cpu"),
        **{"world_size": 1, "expected_s": (0.3, 0.3), **rest},
    )


def steps(step: Callable[..., None], **options: Any) -> Callable[[Context], None]:
    return partial(count_steps, step=partial(step, **options))


NO_GRAD = "under torch.no_grad(), a forward saves nothing"
ITEM = "item() returns a number, which has no graph"
KEPT = "the running loss keeps the graph of each batch"

running = pair("evaluation", steps(add_up, how="graph"), steps(add_up, how="no_grad"), because=KEPT, fixed=NO_GRAD)

probe = Probe(
    experiments=(running.on_gpus(1, name="gpu", expected_s=(10, 10)), running),
    variants=(
        pair("item", steps(add_up, how="graph"), steps(add_up, how="item"), because=KEPT, fixed=ITEM),
        pair(
            "eval-mode",
            steps(add_up, how="eval"),
            steps(add_up, how="no_grad"),
            because="model.eval() changes dropout and BatchNorm, but autograd still saves activations",
            fixed=NO_GRAD,
        ),
        pair(
            "collector",
            steps(add_up, how="collect"),
            steps(add_up, how="item"),
            because="the running loss keeps the graph, and gc.collect() frees nothing that is in use",
            fixed=ITEM,
        ),
        pair(
            "python-cycle",
            steps(circle, collected=False),
            steps(circle, collected=True),
            because="only a Python reference cycle holds the output, but the garbage collector is off",
            fixed="gc.collect() frees what only a cycle holds",
        ),
        pair(
            "trainer-log",
            steps(log, as_number=False),
            steps(log, as_number=True),
            because="Trainer.log stores the tensor with its graph in state.log_history",
            fixed=ITEM,
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=4.40", "accelerate": ">=0.30"}),
            expected_s=(5, 5),
        ),
        pair(
            "auxiliary",
            steps(add_up_trained, logged_alone=True),
            steps(add_up_trained, logged_alone=False),
            because="the loop adds up a term that it only logs, so no backward frees what its graph saved",
            fixed="the loop adds up the loss, and its backward has freed what the graph saved",
        ),
        pair(
            "outputs",
            steps(collect, detached=False),
            steps(collect, detached=True),
            because="the list keeps outputs with their graphs",
            fixed="the loop detaches the outputs",
        ),
        pair(
            "average",
            steps(average, no_grad=False),
            steps(average, no_grad=True),
            because="the average of this step holds the graphs of all previous steps",
            fixed="the loop updates the average under no_grad",
        ),
        pair(
            "create-graph",
            partial(penalise, how="backward"),
            partial(penalise, how="grad"),
            because="backward(create_graph=True) creates a cycle that Python's garbage collector does not see",
            fixed="torch.autograd.grad creates no cycle",
            expect=GROWN,
        ),
        pair(
            "grad-to-none",
            partial(penalise, how="backward"),
            partial(penalise, how="none"),
            because="backward(create_graph=True) creates a cycle through .grad",
            fixed="the code sets .grad to None before it deletes the model",
            expect=GROWN,
        ),
    ),
)
