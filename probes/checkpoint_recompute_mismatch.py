"""A checkpointed layer runs twice; what differs between the two runs stops the backward, or spoils the gradient."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, Callable, Dict

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom


def layer_of(kind: str, fixed: bool) -> Any:
    """A layer with one weight; `kind` is what may differ between the forward and the recomputation."""
    import torch
    from torch import nn

    class Layer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4) * 0.5)
            self.past: Any = None
            self.scale: Any = None
            self.draw = random.Random(1)  # a generator that torch does not know

        def forward(self, x: Any, factor: float = 1.0) -> Any:
            hidden = x @ self.weight
            if kind == "cache" and not fixed:  # keys of the call before are kept, as by use_cache=True
                hidden = hidden if self.past is None else torch.cat([self.past, hidden])
                self.past = hidden.detach()
            if kind == "lazy":  # what is computed once, at the first call
                scale = torch.exp(self.weight.sum())
                if not fixed:
                    scale = self.scale = scale if self.scale is None else self.scale.detach()
                return hidden * scale
            if kind in ("dropout", "mask"):
                return nn.functional.dropout(torch.tanh(hidden), 0.5, self.training)
            if kind == "random" and not fixed:
                factor = self.draw.uniform(1.0, 2.0)
            if kind == "random":
                return torch.tanh(hidden * factor)
            if kind == "router":
                chosen = self.route() if not fixed else factor
                return torch.tanh(hidden[: int(chosen)]).sum(0, keepdim=True) + x
            return torch.softmax(x @ hidden.T, -1) @ hidden

        def route(self) -> int:
            """How many tokens an expert gets: another number at the second call, as where scores are nearly equal."""
            self.past = 2 if self.past is None else 3
            return int(self.past)

    return Layer()


def gradient(kind: str) -> Any:
    """What the weight's gradient is without checkpoints."""
    import torch

    torch.manual_seed(0)
    layer, x = layer_of(kind, fixed=kind != "random"), torch.randn(3, 4, requires_grad=True)
    layer(x).square().sum().backward()
    return layer.weight.grad


def train(ctx: Context, *, kind: str, fixed: bool, reentrant: bool = False, check: str = "default") -> None:
    """Forward and backward of one checkpointed layer; the gradient has to be the one without checkpoints."""
    import torch
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layer, x = layer_of(kind, fixed), torch.randn(3, 4, requires_grad=True)
    options: Dict[str, Any] = {} if reentrant else {"determinism_check": check}
    if kind == "mask":
        options["preserve_rng_state"] = fixed
    ctx.reached()
    arguments = [x]
    if fixed and kind == "router":
        arguments.append(layer.route())
    elif fixed and kind == "random":
        arguments.append(layer.draw.uniform(1.0, 2.0))
    hidden = checkpoint(layer, *arguments, use_reentrant=reentrant, **options)
    if not fixed and kind == "dropout":
        layer.eval()
    elif not fixed and kind == "frozen":
        layer.weight.requires_grad_(False)
    try:
        hidden.square().sum().backward()
    except RuntimeError as error:
        if check != "none":
            raise
        raise Symptom(f"no CheckpointError, but: {error}") from error
    if kind in ("dropout", "router"):
        assert layer.weight.grad is not None
        return
    off = (layer.weight.grad - gradient(kind)).abs().max().item()
    if off > 1e-4:
        raise Symptom(f"no error, and the gradient is off by {off:.4f} from the one without checkpoints")


def unpack(ctx: Context, *, once: bool) -> None:
    """An own autograd function reads its saved tensors."""
    import torch
    from torch.utils.checkpoint import checkpoint

    class Square(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, x: Any) -> Any:
            context.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(context: Any, upstream: Any) -> Any:
            if once:
                (x,) = context.saved_tensors
            else:
                assert len(context.saved_tensors) == 1
                x = context.saved_tensors[0]
            return 2 * x * upstream

    x = torch.tensor([3.0], requires_grad=True)
    ctx.reached()
    checkpoint(Square.apply, x, use_reentrant=False).sum().backward()
    assert x.grad is not None and x.grad.item() == 6.0


def share_weight(ctx: Context, *, fixed: bool) -> None:
    """Two selective checkpoints under autocast use one weight; its cast is cached in the forward, or not."""
    import torch
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    torch.manual_seed(0)
    layer, hidden = torch.nn.Linear(4, 4, bias=False), torch.randn(3, 4, requires_grad=True)
    saved = [torch.ops.aten.mm.default, torch.ops.aten._to_copy.default]
    ctx.reached()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=not fixed):
        for _ in range(2):
            context_fn = partial(create_selective_checkpoint_contexts, saved)
            hidden = checkpoint(layer, hidden, use_reentrant=False, context_fn=context_fn)
    hidden.float().square().sum().backward()
    assert layer.weight.grad.abs().sum() > 0


def attend(ctx: Context, *, inside: bool) -> None:
    """The attention kernel is chosen by a context, around the forward or inside of the layer."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.checkpoint import checkpoint

    def layer(x: Any) -> Any:
        if not inside:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)
        with sdpa_kernel(SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return out * 1.0

    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    ctx.reached()
    with sdpa_kernel(SDPBackend.MATH):
        loss = checkpoint(layer, x, use_reentrant=False).sum()
        (expected,) = torch.autograd.grad(layer(x).sum(), x)
    loss.backward()
    assert torch.allclose(x.grad, expected, atol=1e-5)


OTHER_SHAPE = raised(
    r"Recomputed values for the following tensors have different metadata than during the forward pass"
)
OTHER_NUMBER = raised(r"A different number of tensors was saved during the original forward and recomputation")
OTHER = raised(
    r"torch\.utils\.checkpoint: (A different number of tensors was saved|Recomputed values for the following)"
)
TWICE = raised(r"Unpack is being triggered for a tensor that was already unpacked once")
MISSING = raised(r"aten\._to_copy\.default encountered during backward,? but not found in storage")
INVALID = symptom(r"no CheckpointError, but: Function \w+ returned an invalid gradient at index \d+ - got")
WRONG = symptom(r"no error, and the gradient is off by \d+\.\d{4} from the one without checkpoints")


def pair(
    name: str, expect: Expect, because: str, fix: str, job: Callable[..., None] = train, **both: Any
) -> Experiment:
    keyword = "once" if job is unpack else "inside" if job is attend else "fixed"
    values: Dict[str, Any] = both
    stands_for = "a kernel in front of the router that is not deterministic" if name == "router" else ""
    arm = partial(Arm, fidelity="stand-in" if stands_for else "cpu", stands_for=stands_for)
    return Experiment(
        name=name,
        control=arm(partial(job, **{keyword: False}, **values), expect=expect, because=because),
        treatment=arm(partial(job, **{keyword: True}, **values), expect=completed(), because=fix),
        needs=Needs(packages={"torch": ">=2.5" if job in (share_weight, attend) else ">=2.1"}),
        world_size=1,
        expected_s=(0.3, 0.3),
    )


KEPT = "the layer keeps its keys, and the second run appends to them"
probe = Probe(
    experiments=(pair("cache", OTHER_SHAPE, KEPT, "it keeps none", kind="cache"),),
    variants=(
        pair("reentrant", WRONG, KEPT + "; reentrant", "it keeps none", kind="cache", reentrant=True),
        pair("no-check", INVALID, KEPT + "; no check", "it keeps none", kind="cache", check="none"),
        pair("lazy", OTHER_NUMBER, "the first run fills a cache", "both runs compute it", kind="lazy"),
        pair("mode", OTHER_NUMBER, "eval() between forward and backward", "the mode stays", kind="dropout"),
        pair("frozen", OTHER_NUMBER, "a weight is frozen before the backward", "it stays as it was", kind="frozen"),
        pair("router", OTHER_SHAPE, "tokens are routed anew", "routed outside of the checkpoint", kind="router"),
        pair("random", WRONG, "a draw that torch does not restore", "drawn outside of the checkpoint", kind="random"),
        pair("preserve", WRONG, "dropout, and no random state is restored", "it is restored", kind="mask"),
        pair("autocast", MISSING, "autocast has cached a cast", "it caches none", job=share_weight),
        pair("backend", OTHER, "the context is around the forward", "it is in the layer", job=attend),
        pair("unpack", TWICE, "ctx.saved_tensors is read twice", "it is read once", job=unpack),
    ),
)
