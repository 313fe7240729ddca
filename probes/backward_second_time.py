"""A backward pass reaches a part of the graph whose saved tensors an earlier backward pass has freed."""

from functools import partial
from typing import Any, Callable

from kb.probe import Arm, Context, Expect, Experiment, Probe, Symptom, Unavailable, completed, raised, symptom


def unroll(ctx: Context, *, detached: bool) -> None:
    """Trains a recurrent cell whose hidden state is carried over from step to step."""
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
    """Keeps a running loss for the progress bar; the right gradient of each step is 1."""
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
    """Computes two losses from one forward, and calls backward on each or on their sum."""
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
    """Calls backward on the discriminator's loss, which reaches the generator, and then on the generator's loss."""
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
    """Computes mixing weights from a parameter, before the loop or in each step."""
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
    """Updates a running mean that the loss uses, such as a center or a codebook."""
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
    """Checkpoints layers that read a tensor with a graph from a closure, as a decoder reads the encoder's output."""
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
    """Calls backward on two outputs of one compiled function, which share no tensor."""
    import torch

    def losses(a: Any, b: Any) -> Any:
        return a.sin().sum(), b.sin().sum()

    first, second = (torch.ones(3, requires_grad=True, device=ctx.device) for _ in range(2))
    for loss in losses(first, second):  # in eager mode, both calls of backward succeed
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
    """Computes two losses from one forward under DDP, and compares the gradient with the mean over the ranks."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    dist = ctx.init_process_group(timeout_s=20)
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2).to(ctx.device)
    torch.manual_seed(ctx.rank)  # each rank has different data
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
            "the hidden state still belongs to the graph of the previous step",
            "the loop detaches the hidden state at the start of each step",
        ),
    ),
    variants=(
        pair(
            "running-loss",
            partial(add_up, detached=False),
            partial(add_up, detached=True),
            "each step calls backward on the sum of all losses so far",
            "each step calls backward on its own loss, and adds it up detached",
        ),
        pair(
            "two-losses",
            partial(share, together=False),
            partial(share, together=True),
            "the step calls backward on each of two losses of one forward",
            "the step calls backward once, on the sum of both losses",
        ),
        pair(
            "gan",
            partial(oppose, detached=False),
            partial(oppose, detached=True),
            "the backward of the discriminator's loss also goes through the generator",
            "the discriminator gets a detached image",
        ),
        pair(
            "gan-summed",
            partial(oppose, detached=False, summed=True),
            partial(oppose, detached=True),
            "the step calls backward on the sum of two opposed losses, which cancel out in the generator",
            "the discriminator gets a detached image",
            symptom(r"no error, and the gradient of the generator has the norm 0"),
        ),
        pair(
            "above-the-loop",
            partial(reuse, inside=False),
            partial(reuse, inside=True),
            "a tensor that depends on a parameter is computed once, before the loop",
            "the loop computes that tensor in each step",
        ),
        pair(
            "running-mean",
            partial(keep_mean, under_no_grad=False),
            partial(keep_mean, under_no_grad=True),
            "the running mean holds the graph of the previous step",
            "the loop updates the running mean under no_grad",
        ),
        pair(
            "retained-sum",
            partial(add_up, detached=False, retained=True),
            partial(add_up, detached=True, retained=True),
            "each step calls backward on the sum of all losses, and retain_graph=True keeps their graphs",
            "each step calls backward on its own loss",
            symptom(r"gradient 2\.0 instead of 1\.0, and no error"),
        ),
        pair(
            "reentrant",
            partial(recompute, use_reentrant=True),
            partial(recompute, use_reentrant=False),
            "each recomputed layer runs its own backward, which goes through the encoder too",
            "the recomputed layers are part of the one backward",
        ),
        pair(
            "reentrant-retained",
            partial(recompute, use_reentrant=True, retained=True),
            partial(recompute, use_reentrant=False, retained=True),
            "retain_graph=True has no effect on the backward of a recomputed layer",
            "the recomputed layers are part of the one backward",
        ),
        pair(
            "compiled",
            partial(compiled, together=False),
            partial(compiled, together=True),
            "the compiled function is one node of the graph, and the first backward frees its saved tensors",
            "the step calls backward once, on the sum",
            deadline_s=90.0,
            expected_s=(5.0, 5.0),
        ),
        pair(
            "ddp-retained",
            share_among_ranks,
            partial(share_among_ranks, together=True),
            "DDP averages only in the first backward after a forward, so the second adds each rank's own gradient",
            "the step calls backward once, on the sum",
            OFF,
            world_size=2,
            expected_s=(1.0, 1.0),
        ),
    ),
)
