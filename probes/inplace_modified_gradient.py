"""An in-place operation or an optimizer step writes into a tensor that a later backward still needs."""

import copy
import importlib
from functools import partial
from typing import Any, Callable, Dict, Optional, Tuple

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, Unavailable, completed, raised, symptom


def build(ctx: Context) -> Tuple[Any, Any, Any, Any]:
    """Returns generator, discriminator, the discriminator's optimizer and noise, with the same numbers in each arm."""
    import torch

    torch.manual_seed(0)
    generator, discriminator = torch.nn.Linear(3, 4).to(ctx.device), torch.nn.Linear(4, 1).to(ctx.device)
    optimizer_d = torch.optim.SGD(discriminator.parameters(), lr=0.5)
    return generator, discriminator, optimizer_d, torch.randn(2, 3, device=ctx.device)


def alternate(ctx: Context, *, forward_after_step: bool) -> None:
    """Runs one iteration of a GAN; the generator's forward through the discriminator comes before or after its step."""
    generator, discriminator, optimizer_d, noise = build(ctx)
    fake = generator(noise)
    if not forward_after_step:
        g_loss = -discriminator(fake).mean()
    ctx.reached()
    d_loss = discriminator(fake.detach()).mean()
    optimizer_d.zero_grad()
    d_loss.backward()
    optimizer_d.step()
    if forward_after_step:
        g_loss = -discriminator(fake).mean()
    g_loss.backward()
    assert (generator.bias.grad + discriminator.weight[0]).abs().max().item() < 1e-6, generator.bias.grad


def backward_both(ctx: Context, *, only_generator: bool = True, reentrant: Optional[bool] = None) -> None:
    """Runs both backward passes before the steps, which is the usual advice on the web."""
    from torch.utils.checkpoint import checkpoint

    generator, discriminator, _, noise = build(ctx)
    if reentrant is None:
        fake = generator(noise)
    else:
        fake = checkpoint(generator, noise.requires_grad_(), use_reentrant=reentrant)
    d_loss = discriminator(fake.detach()).square().mean()
    g_loss = -discriminator(fake).mean()
    ctx.reached()
    d_loss.backward()
    before = discriminator.weight.grad.clone()
    if only_generator:
        g_loss.backward(inputs=list(generator.parameters()))
    else:
        g_loss.backward()
    trained = sum(p.grad is not None for p in generator.parameters())
    if trained < 2:
        raise Symptom("%d of 2 parameters of the generator have a gradient, and no error" % trained)
    added = (discriminator.weight.grad - before).abs().max().item()
    if added:
        raise Symptom("%.3f of the discriminator's gradient is the generator's" % added)


def unroll(ctx: Context, *, detached: bool) -> None:
    """Carries a hidden state over from step to step, detached or with retain_graph=True."""
    import torch

    cell = torch.nn.RNNCell(3, 4).to(ctx.device)
    optimizer = torch.optim.AdamW(cell.parameters())
    hidden = torch.zeros(2, 4, device=ctx.device)
    ctx.reached()
    for _ in range(3):
        if detached:
            hidden = hidden.detach()
        hidden = cell(torch.randn(2, 3, device=ctx.device), hidden)
        optimizer.zero_grad()
        hidden.sum().backward(retain_graph=not detached)
        optimizer.step()
    assert cell.weight_hh.grad is not None


def activate(ctx: Context, *, in_place: bool, hooked: bool = False) -> None:
    """Overwrites an activation; with a full backward hook, it is a view that torch refuses to modify at once."""
    import torch
    from torch import nn

    layers = [nn.Linear(4, 4), nn.Sigmoid(), nn.ReLU(inplace=True)]
    model = nn.Sequential(*(layers[::2] if hooked else layers)).to(ctx.device)
    if hooked:
        model[0].register_full_backward_hook(lambda *_: None)
    batch = torch.randn(2, 4, device=ctx.device)
    if not in_place:
        reference = copy.deepcopy(model).eval()
        for module in model.modules():
            if getattr(module, "inplace", False):
                module.inplace = False
        with torch.no_grad():
            torch.testing.assert_close(copy.deepcopy(model).eval()(batch), reference(batch))
    ctx.reached()
    model(batch).sum().backward()
    assert model[0].weight.grad is not None


def save_selectively(ctx: Context, *, in_place: bool) -> None:
    """Overwrites a tensor that a selective checkpoint has saved."""
    import torch
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    weight = torch.ones(4, 4, requires_grad=True, device=ctx.device)

    def layer(x: Any) -> Any:
        product = x @ weight
        product = product.add_(1.0) if in_place else product + 1.0
        return product.sin()

    context_fn = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    ctx.reached()
    checkpoint(layer, torch.ones(2, 4, device=ctx.device), use_reentrant=False, context_fn=context_fn).sum().backward()
    assert weight.grad is not None


def write(ctx: Context, *, how: str) -> None:
    """Doubles the output of sigmoid, so the gradient at 0 is 0.5; before that, `how` may write into that output."""
    import torch

    x = torch.zeros(1, requires_grad=True, device=ctx.device)
    y = x.sigmoid()
    ctx.reached()
    if how == "data":
        y.data.mul_(3)
        y = y * 2
    elif how == "no_grad":
        with torch.no_grad():
            y.mul_(3)
    else:
        y = y * 2
    y.sum().backward()
    assert x.grad is not None
    if abs(x.grad.item() - 0.5) > 1e-6:
        raise Symptom("gradient %.2f instead of 0.50" % x.grad.item())


def merge(ctx: Context, *, cloned: bool) -> None:
    """Writes image features into embeddings that the hook of enable_input_require_grads made a leaf."""
    import torch

    table = torch.nn.Embedding(5, 3).to(ctx.device).requires_grad_(False)
    table.register_forward_hook(lambda *call: call[-1].requires_grad_(True))  # module, arguments, output
    inputs_embeds = table(torch.tensor([[1, 2]], device=ctx.device))
    mask = torch.tensor([[True, False]], device=ctx.device)
    image_features = torch.ones(1, 3, device=ctx.device)
    ctx.reached()
    if cloned:
        inputs_embeds = inputs_embeds.clone()
    inputs_embeds[mask] = image_features
    assert inputs_embeds.sum(-1)[0, 0].item() == 3


def initialise(ctx: Context, *, under_no_grad: bool) -> None:
    """Sets a parameter by hand."""
    import torch

    layer = torch.nn.Linear(3, 3).to(ctx.device)
    ctx.reached()
    if under_no_grad:
        with torch.no_grad():
            layer.weight.fill_(1.0)
    else:
        layer.weight.fill_(1.0)
    assert layer.weight.sum().item() == 9


def step_silently(ctx: Context, *, forward_after_step: bool, way: str) -> None:
    """Steps between a forward and its backward in ways that raise no error.

    The gradient is then right neither for the old weight nor for the new one.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    layer: Any = torch.nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(2.0)
    options: Dict[str, Any] = {}
    if way.startswith("fsdp"):
        layer = shard(ctx, layer, way)
    elif way == "fused":
        options["fused"] = True
    if way == "bitsandbytes":
        library: Any = importlib.import_module("bitsandbytes")
        optimizer: Any = library.optim.SGD(layer.parameters(), lr=1.0, momentum=0.9)  # momentum does not affect step 1
    else:
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, **options)
    x = torch.ones(1, 1, requires_grad=True)
    forward: Callable[..., Any] = partial(checkpoint, layer, use_reentrant=False) if way == "checkpoint" else layer
    loss = forward(x).square().sum()
    layer(torch.ones(1, 1)).sum().backward()
    ctx.reached()
    optimizer.step()  # the weight changes from 2 to 1
    if forward_after_step:
        loss = forward(x).square().sum()
    loss.backward()
    assert x.grad is not None
    weight = 1.0 if forward_after_step else 2.0
    if abs(x.grad.item() - 2 * weight * weight) > 1e-6:  # the derivative of (weight * x) ** 2 at 1
        raise Symptom("gradient %.1f instead of %.1f, and no error" % (x.grad.item(), 2 * weight * weight))


def restrict(ctx: Context, *, restricted: bool) -> None:
    """Restricts a backward to parameters() of FSDP1, which does not contain the flat parameter that is in the graph."""
    import torch

    layer = shard(ctx, torch.nn.Linear(2, 2), "fsdp1", use_orig_params=True)
    ctx.reached()
    layer(torch.ones(1, 2)).sum().backward(inputs=list(layer.parameters()) if restricted else None)
    trained = sum(p.grad is not None for p in layer.parameters())  # a rank has a shard of one parameter or of both
    if not trained:
        raise Symptom("%d of 2 parameters have a gradient, and no error" % trained)


def shard(ctx: Context, layer: Any, way: str, use_orig_params: bool = False) -> Any:
    """Shards a layer on the CPU with `fsdp1` or `fsdp2`; raises `Unavailable` if this torch cannot."""
    import torch
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    if way == "fsdp2" and not hasattr(fsdp, "fully_shard"):
        raise Unavailable("torch %s has no fully_shard" % torch.__version__)
    if way == "fsdp2" and not hasattr(torch.cpu.Stream, "record_event"):  # torch 2.6
        raise Unavailable("FSDP2 of torch %s fails on the CPU" % torch.__version__)
    ctx.init_process_group(timeout_s=10)
    if way == "fsdp1":
        cpu = torch.device("cpu")
        return fsdp.FullyShardedDataParallel(layer, device_id=cpu, use_orig_params=use_orig_params)
    return fsdp.fully_shard(layer, mesh=init_device_mesh("cpu", (ctx.world_size,)))


MODIFIED = r"has been modified by an inplace operation: \[[\w.]+ \[[\d, ]+\]\]"
TRANSPOSED = MODIFIED + r", which is output 0 of (AsStrided|T)(Backward0)?, is at version \d+; expected version \d+"
# The first release in which each works on the CPU; over gloo, FSDP2's gradients are wrong in 2.7 and 2.8.
SINCE = {"fused": ">=2.4", "selective": ">=2.5", "fsdp2": ">=2.9"}
LIBRARIES = {"bitsandbytes": {"bitsandbytes": ">=0.50"}}
SILENT = symptom(r"gradient 4\.0 instead of 8\.0, and no error")
VIEW = r"Output 0 of \w+ is a view and (is being|its base or another view of its base has been) modified inplace"


def pair(
    name: str, broken: Callable[..., None], fixed: Callable[..., None], expect: Expect, because: str, fix: str
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(broken, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(fixed, expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": SINCE.get(name, ">=2.2"), **LIBRARIES.get(name, {})}),
        world_size=2 if name.startswith("fsdp") else 1,
        expected_s=(0.4, 0.4),
    )


def early_step(name: str, why: str, expect: Expect = SILENT) -> Experiment:
    """An experiment in which the optimizer steps too early; `why` says why torch does not notice."""
    return pair(
        name,
        partial(step_silently, forward_after_step=False, way=name),
        partial(step_silently, forward_after_step=True, way=name),
        expect,
        "the optimizer steps between a forward and its backward; " + why,
        "the forward runs after the step",
    )


gan = pair(
    "gan",
    partial(alternate, forward_after_step=False),
    partial(alternate, forward_after_step=True),
    raised(TRANSPOSED),
    "the discriminator's optimizer steps between the forward of the generator's loss and its backward",
    "the generator's loss is computed after the discriminator's step",
)
WRITES = {"data": symptom(r"gradient -1\.50 instead of 0\.50"), "no_grad": raised(MODIFIED)}

probe = Probe(
    experiments=(gan.on_gpus(1, name="gpu", expected_s=(10, 10)), gan),
    variants=(
        pair(
            "mixed-gradients",
            partial(backward_both, only_generator=False),
            partial(backward_both, only_generator=True),
            symptom(r"0\.\d+ of the discriminator's gradient is the generator's"),
            "both backward passes run before the steps, and each adds to the gradients of both networks",
            "the backward of the generator's loss is restricted to the generator's parameters",
        ),
        pair(
            "reentrant-inputs",
            partial(backward_both, reentrant=True),
            partial(backward_both, reentrant=False),
            symptom(r"0 of 2 parameters of the generator have a gradient, and no error"),
            "the generator is in a reentrant checkpoint, and the backward is restricted with inputs=",
            "the checkpoint is non-reentrant",
        ),
        pair(
            "hidden-state",
            partial(unroll, detached=False),
            partial(unroll, detached=True),
            raised(TRANSPOSED),
            "the hidden state belongs to the graph of the previous step, which retain_graph=True kept",
            "the loop detaches the hidden state at the start of each step",
        ),
        pair(
            "activation",
            partial(activate, in_place=True),
            partial(activate, in_place=False),
            raised(MODIFIED + r", which is output 0 of Sigmoid"),
            "ReLU(inplace=True) overwrites the tensor that sigmoid saved",
            "the activation is out of place",
        ),
        pair(
            "view",
            partial(activate, in_place=True, hooked=True),
            partial(activate, in_place=False, hooked=True),
            raised(VIEW),
            "ReLU(inplace=True) writes into the output of a layer with a full backward hook, which is a view",
            "the activation is out of place",
        ),
        *(
            pair(
                name.replace("_", "-"),
                partial(write, how=name),
                partial(write, how="out of place"),
                expect,
                f"the code writes through {name} into the tensor that sigmoid saved",
                "the code creates a new tensor",
            )
            for name, expect in WRITES.items()
        ),
        pair(
            "leaf",
            partial(merge, cloned=False),
            partial(merge, cloned=True),
            raised(r"a (view of a )?leaf Variable that requires grad is being used in an in-place operation"),
            "the code writes features into embeddings that are a leaf and require grad",
            "the code writes the features into a copy",
        ),
        pair(
            "parameter",
            partial(initialise, under_no_grad=False),
            partial(initialise, under_no_grad=True),
            raised(r"a leaf Variable that requires grad is being used in an in-place operation"),
            "the code sets a parameter while autograd is on",
            "the code sets the parameter under no_grad",
        ),
        pair(
            "selective",
            partial(save_selectively, in_place=True),
            partial(save_selectively, in_place=False),
            raised(r"Tensor cached during selective activation checkpoint has been mutated"),
            "the code overwrites a tensor that a selective checkpoint saved",
            "the code creates a new tensor",
        ),
        early_step("fused", "a fused optimizer does not change the version of the weight"),
        early_step("bitsandbytes", "its optimizers do not change the version of the weight"),
        early_step("checkpoint", "the checkpoint runs the forward again, with the new weight"),
        early_step("fsdp2", "FSDP2 gathers the new weight for the backward"),
        early_step("fsdp1", "FSDP1's weights are views of one flat parameter", raised(VIEW)),
        pair(
            "fsdp1-inputs",
            partial(restrict, restricted=True),
            partial(restrict, restricted=False),
            symptom(r"0 of 2 parameters have a gradient, and no error"),
            "the backward is restricted to parameters() of FSDP1, which are not in the graph",
            "the backward is not restricted",
        ),
    ),
)
