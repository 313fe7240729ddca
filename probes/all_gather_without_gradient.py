"""The collectives of torch.distributed keep no graph: of what was gathered, the other ranks' part gets no gradient."""

from __future__ import annotations

from functools import partial
from typing import Any, List, Tuple

from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, completed, symptom

ROWS, WIDTH = 3, 4  # pairs of a rank, numbers of a row


def gather_by_function(images: Any) -> Any:
    """The function of the entry: the gradient of a row is the sum of what all ranks have for it."""
    import torch
    import torch.distributed as dist

    class AllGather(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(_, tensor):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205 - as the entry prints it
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, tensor.contiguous())
            return torch.cat(parts)

        @staticmethod
        def backward(_, gradient):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205 - as the entry prints it
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(gradient)
            return gradient.chunk(dist.get_world_size())[dist.get_rank()]

    return AllGather.apply(images)


def gather_by_torch(images: Any, texts: Any) -> Any:
    import torch
    from torch.distributed.nn import all_gather

    all_images, all_texts = torch.cat(all_gather(images)), torch.cat(all_gather(texts))
    return all_images, all_texts


def gather_plainly(tensor: Any, way: str) -> Any:
    import torch
    import torch.distributed as dist

    parts: List[Any] = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    if way == "own part":
        parts[dist.get_rank()] = tensor
    gathered = torch.cat(parts)
    return gathered.requires_grad_(True) if way == "requires_grad" else gathered


def gather(images: Any, texts: Any, way: str) -> Any:
    if way == "torch.distributed.nn":
        return gather_by_torch(images, texts)
    one = gather_by_function if way == "own function" else partial(gather_plainly, way=way)
    return one(images), one(texts)


def contrast(rows: Any, of_all: Any, first: int) -> Any:
    """The loss of CLIP, of images and texts: the pair of row i is row `first` + i of all."""
    import torch
    from torch.nn.functional import cross_entropy

    (images, texts), (all_images, all_texts) = rows, of_all
    pairs = torch.arange(first, first + len(images), device=images.device)
    return (cross_entropy(images @ all_texts.T, pairs) + cross_entropy(texts @ all_images.T, pairs)) / 2


def batch(ctx: Context) -> Any:
    import torch

    numbers = torch.arange(2 * ROWS * WIDTH * 2, dtype=torch.float32, device=ctx.device)
    return torch.sin(numbers * 1.7).reshape(2, 2 * ROWS, WIDTH)


def tower(ctx: Context) -> Any:
    """Two encoders in one module: the first half of the outputs is for images, the other for texts."""
    import torch

    layer = torch.nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.cos(torch.arange(2.0 * WIDTH * WIDTH)).reshape(2 * WIDTH, WIDTH))
    return layer.to(ctx.device)


def encode(model: Any, images: Any, texts: Any) -> Tuple[Any, Any]:
    import torch

    both = model(torch.cat([images, texts]))
    return both[: len(images), :WIDTH], both[len(images) :, WIDTH:]


def train(ctx: Context, *, way: str, loss: str = "of the rank's rows", factor: int = 1) -> None:
    """The gradient of one step on two ranks, beside that of one process with all rows."""
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=15)
    all_rows = batch(ctx)
    alone = tower(ctx)
    everything = encode(alone, *all_rows)
    contrast(everything, everything, 0).backward()
    model = DistributedDataParallel(tower(ctx))
    own = encode(model, *all_rows[:, ctx.rank * ROWS : (ctx.rank + 1) * ROWS])
    ctx.reached()
    gathered = gather(*own, way)
    if loss == "of all rows":
        value = contrast(gathered, gathered, 0)
    else:
        value = contrast(own, gathered, ctx.rank * ROWS)
    (value * factor).backward()
    compare(model.module.weight.grad, alone.weight.grad)
    ctx.meet("compared")


def compare(found: Any, expected: Any) -> None:
    import torch

    cosine = torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0).item()
    ratio = (found.norm() / expected.norm()).item()
    if abs(ratio - 1) > 0.01 or cosine < 0.999:
        raise Symptom("gradient of the batch of all ranks: %.2f times the norm, cosine %.2f" % (ratio, cosine))


DIFFERS = symptom(r"gradient of the batch of all ranks: \d\.\d\d times the norm, cosine 0\.\d\d$")
LOST = "all_gather: the rank's rows are compared with rows of the other ranks, which get no gradient from it"
SHARE = "the rank's own part is put back, and the loss is that of all rows: each rank has its share, DDP averages"
HALF = symptom(r"gradient of the batch of all ranks: 0\.50 times the norm, cosine 1\.00$")
ROWS_OF_ALL = "of all rows"


def pair(name: str, control: Any, treatment: Any, because: str, fix: str, expect: Any = DIFFERS) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(control, expect, because, "cpu"),
        treatment=Arm(treatment, completed(), fix, "cpu"),
        needs=Needs(packages={"torch": ">=2.0"}),
        deadline_s=60,
        expected_s=(1.0, 1.0),
    )


gloo = pair(
    "gloo",
    partial(train, way="plain"),
    partial(train, way="torch.distributed.nn"),
    LOST,
    "torch.distributed.nn.all_gather, whose backward sends each rank the sum of the gradients of its rows",
)

probe = Probe(
    experiments=(gloo.on_gpus(expect=DIFFERS), gloo),
    variants=(
        pair(
            "own-function",
            partial(train, way="plain"),
            partial(train, way="own function"),
            LOST,
            "a function of one's own, with all_reduce in its backward",
        ),
        pair(
            "all-rows",
            partial(train, way="own part", loss=ROWS_OF_ALL),
            partial(train, way="torch.distributed.nn", loss=ROWS_OF_ALL),
            SHARE,
            "torch.distributed.nn.all_gather: the backward adds the shares of the ranks, DDP averages the sum",
            HALF,
        ),
        pair(
            "own-part",
            partial(train, way="own part", loss=ROWS_OF_ALL),
            partial(train, way="own part", loss=ROWS_OF_ALL, factor=2),
            SHARE,
            "the loss times the number of ranks",
            HALF,
        ),
        pair(
            "own-part-of-local-loss",
            partial(train, way="own part"),
            partial(train, way="own part", loss=ROWS_OF_ALL, factor=2),
            "the rank's own part is put back, but the loss is that of the rank's rows",
            "the loss of all rows, times the number of ranks",
        ),
        pair(
            "requires-grad",
            partial(train, way="requires_grad"),
            partial(train, way="torch.distributed.nn"),
            "requires_grad_() on what was gathered: it gets a gradient, and the model does not",
            "torch.distributed.nn.all_gather",
        ),
    ),
)
