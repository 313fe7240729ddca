"""A backward reaches a part of the graph whose saved tensors an earlier backward has freed."""

from functools import partial
from typing import Any, Callable

from kb.probe import Arm, Context, Expect, Experiment, Probe, Symptom, Unavailable, completed, raised, symptom


def unroll(ctx: Context, *, detached: bool) -> None:
    """A hidden state goes from one step to the next."""
    import torch

    torch.manual_seed(0)
    cell = torch.nn.RNNCell(3, 4).to(ctx.device)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    hidden = torch.zeros(2, 4, device=ctx.device)
    ctx.reached()
    for step in range(3):
        ctx.note(step=step + 1)
        if detached:
            hidden = hidden.detach()
        hidden = cell(torch.randn(2, 3, device=ctx.device), hidden)
        optimizer.zero_grad()
        hidden.sum().backward()
        optimizer.step()
    assert cell.weight_hh.grad is not None


def add_up(ctx: Context, *, detached: bool, retained: bool = False) -> None:
    """A running loss for the progress bar; the gradient of each step is 1."""
    import torch

    weight = torch.ones(1, requires_grad=True, device=ctx.device)
    batch = torch.ones(1, device=ctx.device)
    total = torch.zeros(1, device=ctx.device)
    ctx.reached()
    for _ in range(2):
        weight.grad = None
        loss = (weight * batch).sum()
        if detached:
            loss.backward()
            total += loss.detach()
        else:
            total = total + loss
            total.backward(retain_graph=retained)
    assert weight.grad is not None and total.item() == 2
    if abs(weight.grad.item() - 1) > 1e-6:
        raise Symptom("gradient %.1f instead of 1.0, and no error" % weight.grad.item())


def share(ctx: Context, *, together: bool) -> None:
    """Two losses of one forward."""
    import torch

    torch.manual_seed(0)
    backbone, head, auxiliary = (torch.nn.Linear(3, 3).to(ctx.device) for _ in range(3))
    features = backbone(torch.randn(2, 3, device=ctx.device)).tanh()
    task_loss, auxiliary_loss = head(features).square().mean(), auxiliary(features).square().mean()
    ctx.reached()
    if together:
        (task_loss + auxiliary_loss).backward()
    else:
        task_loss.backward()
        auxiliary_loss.backward()
    assert all(layer.weight.grad is not None for layer in (backbone, head, auxiliary))


def oppose(ctx: Context, *, detached: bool, summed: bool = False) -> None:
    """The discriminator's loss goes through the generator, whose own loss comes next."""
    import torch

    torch.manual_seed(0)
    generator, discriminator = torch.nn.Linear(3, 4).to(ctx.device), torch.nn.Linear(4, 1).to(ctx.device)
    fake = generator(torch.randn(2, 3, device=ctx.device)).tanh()
    ctx.reached()
    if detached:
        discriminator(fake.detach()).mean().backward()
        (-discriminator(fake).mean()).backward()
    elif summed:
        (discriminator(fake).mean() - discriminator(fake).mean()).backward()
    else:
        discriminator(fake).mean().backward()
        (-discriminator(fake).mean()).backward()
    assert generator.weight.grad is not None
    norm = float(generator.weight.grad.norm())
    if norm < 1e-6:
        raise Symptom("no error, and the gradient of the generator has the norm %g" % norm)


def reuse(ctx: Context, *, inside: bool) -> None:
    """Mixing weights that come from a parameter are computed above the loop."""
    import torch

    alpha = torch.zeros(3, requires_grad=True, device=ctx.device)
    optimizer = torch.optim.SGD([alpha], lr=0.1)
    mixing = alpha.softmax(0)
    ctx.reached()
    for _ in range(2):
        if inside:
            mixing = alpha.softmax(0)
        optimizer.zero_grad()
        (mixing * torch.arange(3.0, device=ctx.device)).sum().backward()
        optimizer.step()
    assert alpha.grad is not None


def keep_mean(ctx: Context, *, under_no_grad: bool) -> None:
    """A running mean that the loss reads: a center, a codebook, a statistic that is no BatchNorm's."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2).to(ctx.device)
    center = torch.zeros(2, device=ctx.device)
    ctx.reached()
    for _ in range(2):
        output = layer(torch.randn(4, 3, device=ctx.device))
        if under_no_grad:
            with torch.no_grad():
                center = 0.9 * center + 0.1 * output.mean(0)
        else:
            center = 0.9 * center + 0.1 * output.mean(0)
        (output - center).square().mean().backward()
    assert layer.weight.grad is not None


def recompute(ctx: Context, *, use_reentrant: bool, retained: bool = False) -> None:
    """Checkpointed layers take a tensor that has a graph from around them, as a decoder takes what the encoder gave."""
    import torch
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    encoder = torch.nn.Linear(3, 3).to(ctx.device)
    layers = [torch.nn.Linear(3, 3).to(ctx.device) for _ in range(2)]
    encoded = encoder(torch.randn(2, 3, device=ctx.device)).tanh()
    start = torch.randn(2, 3, requires_grad=True, device=ctx.device)

    def decoder_layer(x: Any, layer: Any) -> Any:
        return (layer(x) * encoded).tanh()

    plain = decoder_layer(decoder_layer(start, layers[0]), layers[1]).sum()
    expected = torch.autograd.grad(plain, encoder.weight, retain_graph=True)[0]
    x = start
    ctx.reached()
    for layer in layers:
        x = checkpoint(decoder_layer, x, layer, use_reentrant=use_reentrant)
    x.sum().backward(retain_graph=retained)
    assert torch.allclose(encoder.weight.grad, expected)


def compiled(ctx: Context, *, together: bool) -> None:
    """Two outputs of one compiled function that have nothing in common but the function."""
    import torch

    def losses(a: Any, b: Any) -> Any:
        return a.sin().sum(), b.sin().sum()

    first, second = (torch.ones(3, requires_grad=True, device=ctx.device) for _ in range(2))
    for loss in losses(first, second):  # without the compiler two calls of backward pass
        loss.backward()
    expected, first.grad, second.grad = second.grad, None, None
    try:
        one, other = torch.compile(losses, backend="aot_eager")(first, second)
    except RuntimeError as error:
        raise Unavailable("torch.compile: %s" % error) from error
    ctx.reached()
    if together:
        (one + other).backward()
    else:
        one.backward()
        other.backward()
    assert second.grad is not None and torch.allclose(second.grad, expected)


def share_among_ranks(ctx: Context, *, together: bool = False) -> None:
    """Two losses of one forward under DDP: is the gradient the mean of the ranks?"""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    dist = ctx.init_process_group(timeout_s=20)
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2).to(ctx.device)
    torch.manual_seed(ctx.rank)  # other data on every rank
    batch = torch.randn(2, 3, device=ctx.device)
    output = layer(batch)
    (expected,) = torch.autograd.grad(output.square().mean() + output.mean(), layer.weight)
    dist.all_reduce(expected)
    expected /= ctx.world_size
    model = DistributedDataParallel(layer)
    output = model(batch)
    task_loss, auxiliary_loss = output.square().mean(), output.mean()
    ctx.reached()
    if together:
        (task_loss + auxiliary_loss).backward()
    else:
        task_loss.backward(retain_graph=True)
        auxiliary_loss.backward()
    gradient = layer.weight.grad
    assert gradient is not None
    if not torch.allclose(gradient, expected, atol=1e-5):
        raise Symptom("the gradient is off by %.2f from the mean of the ranks" % (gradient - expected).abs().max())


AGAIN = raised(r"Trying to backward through the graph a second time")
OFF = symptom(r"the gradient is off by \d+\.\d\d from the mean of the ranks")


def pair(
    name: str,
    broken: Callable[..., None],
    fixed: Callable[..., None],
    because: str,
    fix: str,
    expect: Expect = AGAIN,
    **options: Any,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(broken, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(fixed, expect=completed(), because=fix, fidelity="cpu"),
        **{"world_size": 1, "expected_s": (0.3, 0.3), **options},
    )


probe = Probe(
    experiments=(
        pair(
            "hidden-state",
            partial(unroll, detached=False),
            partial(unroll, detached=True),
            "the hidden state still belongs to the graph of the step before",
            "it is detached at the border of the step",
        ),
    ),
    variants=(
        pair(
            "running-loss",
            partial(add_up, detached=False),
            partial(add_up, detached=True),
            "the sum of the losses goes backward in each step",
            "the loss of the step goes backward, the sum holds no graph",
        ),
        pair(
            "two-losses",
            partial(share, together=False),
            partial(share, together=True),
            "two losses of one forward go backward one after the other",
            "their sum goes backward once",
        ),
        pair(
            "gan",
            partial(oppose, detached=False),
            partial(oppose, detached=True),
            "the discriminator's loss goes backward through the generator",
            "the discriminator gets a detached image",
        ),
        pair(
            "gan-summed",
            partial(oppose, detached=False, summed=True),
            partial(oppose, detached=True),
            "the sum of two opposed losses goes backward, and they cancel out in the generator",
            "the discriminator gets a detached image",
            symptom(r"no error, and the gradient of the generator has the norm 0"),
        ),
        pair(
            "above-the-loop",
            partial(reuse, inside=False),
            partial(reuse, inside=True),
            "a tensor that depends on a parameter is computed once",
            "it is computed in each step",
        ),
        pair(
            "running-mean",
            partial(keep_mean, under_no_grad=False),
            partial(keep_mean, under_no_grad=True),
            "a running mean holds the graph of the step before",
            "it is updated under no_grad",
        ),
        pair(
            "retained-sum",
            partial(add_up, detached=False, retained=True),
            partial(add_up, detached=True, retained=True),
            "the sum of the losses goes backward in each step, and retain_graph=True keeps the graphs",
            "the loss of the step goes backward",
            symptom(r"gradient 2\.0 instead of 1\.0, and no error"),
        ),
        pair(
            "reentrant",
            partial(recompute, use_reentrant=True),
            partial(recompute, use_reentrant=False),
            "each recomputed layer goes backward on its own, through the encoder as well",
            "recomputed layers belong to the one backward",
        ),
        pair(
            "reentrant-retained",
            partial(recompute, use_reentrant=True, retained=True),
            partial(recompute, use_reentrant=False, retained=True),
            "retain_graph=True does not reach the backward of a recomputed layer",
            "recomputed layers belong to the one backward",
        ),
        pair(
            "compiled",
            partial(compiled, together=False),
            partial(compiled, together=True),
            "all that is compiled together is one node, and its first backward frees it",
            "the sum goes backward once",
            deadline_s=90.0,
            expected_s=(5.0, 5.0),
        ),
        pair(
            "ddp-retained",
            share_among_ranks,
            partial(share_among_ranks, together=True),
            "DDP averages in the first backward of a forward only, and the second adds what each rank has alone",
            "the sum goes backward once",
            OFF,
            world_size=2,
            expected_s=(1.0, 1.0),
        ),
    ),
)
