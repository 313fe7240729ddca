"""torch.distributed.all_gather records no graph, so the rows of a rank get no gradient from the loss of other ranks."""

from __future__ import annotations

from functools import partial
from typing import Any, List, Tuple

from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, completed, symptom

ROWS, WIDTH = 3, 4  # pairs per rank, numbers per row


def gather_by_function(images: Any, *, summed: bool = True) -> Any:
    """The entry's function, whose backward sums a row's gradients over all ranks; without `summed` it does not."""
    import torch
    import torch.distributed as dist

    class AllGather(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(_, tensor):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205 - the entry prints it so
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, tensor.contiguous())
            return torch.cat(parts)

        @staticmethod
        def backward(_, gradient):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205 - the entry prints it so
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(gradient)
            return gradient.chunk(dist.get_world_size())[dist.get_rank()]

    class OwnChunk(AllGather):
        @staticmethod
        def backward(_, gradient):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
            return gradient.chunk(dist.get_world_size())[dist.get_rank()]

    return (AllGather if summed else OwnChunk).apply(images)


def gather_by_torch(images: Any, texts: Any, scale: Any) -> Any:
    """The gathered rows, and the loss of this rank's rows as the entry prints it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.nn import all_gather
    from torch.nn.functional import cross_entropy

    all_images, all_texts = torch.cat(all_gather(images)), torch.cat(all_gather(texts))
    pairs = dist.get_rank() * len(images) + torch.arange(len(images), device=images.device)
    logits = scale * images @ all_texts.T, scale * texts @ all_images.T
    loss = (cross_entropy(logits[0], pairs) + cross_entropy(logits[1], pairs)) / 2
    return (all_images, all_texts), loss


def gather_plainly(tensor: Any, way: str) -> Any:
    """torch.distributed.all_gather, alone or with a remedy that people try."""
    import torch
    import torch.distributed as dist

    tensor = tensor.contiguous()  # NCCL rejects other tensors
    parts: List[Any] = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    if way == "own part":
        parts[dist.get_rank()] = tensor
    gathered = torch.cat(parts)
    return gathered.requires_grad_() if way == "requires_grad" else gathered


def gather(images: Any, texts: Any, way: str) -> Any:
    if way.startswith("own function"):
        gather_one = partial(gather_by_function, summed=way == "own function")
    else:
        gather_one = partial(gather_plainly, way=way)
    return gather_one(images), gather_one(texts)


def contrast(rows: Any, of_all: Any, first: int, scale: Any) -> Any:
    """CLIP's contrastive loss of images and texts, in which row i belongs to row `first` + i of all rows."""
    import torch
    from torch.nn.functional import cross_entropy

    (images, texts), (all_images, all_texts) = rows, of_all
    pairs = torch.arange(first, first + len(images), device=images.device)
    logits = scale * images @ all_texts.T, scale * texts @ all_images.T
    return (cross_entropy(logits[0], pairs) + cross_entropy(logits[1], pairs)) / 2


def batch(ctx: Context) -> Any:
    """The images and texts of both ranks."""
    import torch

    numbers = torch.arange(2 * ROWS * WIDTH * 2, dtype=torch.float32, device=ctx.device)
    return torch.sin(numbers * 1.7).reshape(2, 2 * ROWS, WIDTH)


def tower(ctx: Context, learned: bool) -> Any:
    """A temperature and two encoders in one module: half of the layer's outputs is for images, the other for texts."""
    import torch

    class Tower(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(WIDTH, 2 * WIDTH, bias=False)
            with torch.no_grad():
                self.layer.weight.copy_(torch.cos(torch.arange(2.0 * WIDTH * WIDTH)).reshape(2 * WIDTH, WIDTH))
            self.scale = torch.nn.Parameter(torch.full((1,), 1.25), requires_grad=learned)

        def forward(self, images: Any, texts: Any) -> Tuple[Any, Any, Any]:
            both = self.layer(torch.cat([images, texts]))
            return both[: len(images), :WIDTH], both[len(images) :, WIDTH:], self.scale * 1

    return Tower().to(ctx.device)


def train(
    ctx: Context,
    *,
    way: str,
    loss: str = "of the rank's rows",
    multiplied: bool = False,
    learned: bool = True,
    sharded: bool = False,
) -> None:
    """Compares the gradient of one step on two ranks with that of one process that has all rows."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=15)
    all_rows = batch(ctx)
    alone, model = tower(ctx, learned), tower(ctx, learned)
    images, texts, scale = alone(*all_rows)
    contrast((images, texts), (images, texts), 0, scale).backward()
    if sharded:
        model = FullyShardedDataParallel(model, device_id=ctx.device, use_orig_params=True)
    else:
        model = DistributedDataParallel(model)
    images, texts, scale = model(*all_rows[:, ctx.rank * ROWS : (ctx.rank + 1) * ROWS])
    ctx.reached()
    if way == "torch.distributed.nn":
        gathered, value = gather_by_torch(images, texts, scale)
    else:
        gathered = gather(images, texts, way)
    if loss == "of all rows":
        value = contrast(gathered, gathered, 0, scale)
    elif way != "torch.distributed.nn":
        value = contrast((images, texts), gathered, ctx.rank * ROWS, scale)
    if multiplied:
        value = value * ctx.world_size
    value.backward()
    if way == "requires_grad":
        assert all(tensor.grad is not None for tensor in gathered)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for found, expected in zip(model.parameters(), alone.parameters()):
            if expected.requires_grad:
                compare(found.grad, expected.grad)
    ctx.meet("compared")


def compare(found: Any, expected: Any) -> None:
    """Raises `Symptom` if the gradient has another norm or direction than expected."""
    import torch

    if found is None:
        found = torch.zeros_like(expected)
    cosine = torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0).item()
    ratio = (found.norm() / expected.norm()).item()
    if abs(ratio - 1) > 0.01 or cosine < 0.999:
        raise Symptom("gradient of the batch of all ranks: %.2f times the norm, cosine %.2f" % (ratio, cosine))


DIFFERS = symptom(r"gradient of the batch of all ranks: \d\.\d\d times the norm, cosine 0\.\d\d$")
LOST = "all_gather records no graph, so this rank's loss gives the rows of the other ranks no gradient"
SHARE = "this rank's rows are put back, but DDP averages the ranks' shares of the gradient, which should be added"
HALF = symptom(r"gradient of the batch of all ranks: 0\.50 times the norm, cosine 1\.00$")
TWICE = symptom(r"gradient of the batch of all ranks: 2\.00 times the norm, cosine 1\.00$")
NOTHING = symptom(r"gradient of the batch of all ranks: 0\.00 times the norm, cosine 0\.00$")
ROWS_OF_ALL = "of all rows"
BY_TORCH = "torch.distributed.nn.all_gather records a graph, and its backward sums a row's gradients over all ranks"


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
    BY_TORCH,
)

probe = Probe(
    experiments=(gloo.on_gpus(expect=DIFFERS), gloo),
    variants=(
        pair(
            "own-function",
            partial(train, way="plain"),
            partial(train, way="own function"),
            LOST,
            "a custom autograd function all-reduces the gradient in its backward",
        ),
        pair(
            "own-chunk",
            partial(train, way="own function without all_reduce", loss=ROWS_OF_ALL),
            partial(train, way="own function", loss=ROWS_OF_ALL),
            "the backward returns this rank's chunk of a gradient that is not summed over the ranks",
            "the backward all-reduces the gradient before it returns this rank's chunk",
            HALF,
        ),
        pair(
            "all-rows",
            partial(train, way="own part", loss=ROWS_OF_ALL),
            partial(train, way="torch.distributed.nn", loss=ROWS_OF_ALL),
            SHARE,
            BY_TORCH,
            HALF,
        ),
        pair(
            "sharded",
            partial(train, way="own part", loss=ROWS_OF_ALL, sharded=True),
            partial(train, way="torch.distributed.nn", loss=ROWS_OF_ALL, sharded=True),
            "this rank's rows are put back, but FSDP averages the ranks' shares of the gradient, which should be added",
            BY_TORCH,
            HALF,
        ),
        pair(
            "loss-times-ranks",
            partial(train, way="own part", loss=ROWS_OF_ALL, multiplied=True),
            partial(train, way="torch.distributed.nn", loss=ROWS_OF_ALL),
            "multiplying the loss by the number of ranks corrects the encoders, but not the temperature",
            BY_TORCH,
            TWICE,
        ),
        pair(
            "own-part-of-local-loss",
            partial(train, way="own part"),
            partial(train, way="torch.distributed.nn"),
            "this rank's rows are put back, but its loss still gives the rows of the other ranks no gradient",
            BY_TORCH,
        ),
        pair(
            "requires-grad",
            partial(train, way="requires_grad", loss=ROWS_OF_ALL, learned=False),
            partial(train, way="torch.distributed.nn", loss=ROWS_OF_ALL, learned=False),
            "requires_grad_() on the gathered tensor gives it the gradient, and the model gets none",
            BY_TORCH,
            NOTHING,
        ),
    ),
)
