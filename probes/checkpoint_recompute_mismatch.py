"""A checkpointed layer runs twice; if the second run differs, the backward fails or the gradient is wrong."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, Callable, Dict

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom


def layer_of(kind: str, fixed: bool) -> Any:
    """Returns a layer with one 4x4 weight; `kind` names what differs between its two runs, unless `fixed`."""
    import torch
    from torch import nn

    class Layer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4) * 0.5)
            self.past: Any = None
            self.scale: Any = None
            self.draw = random.Random(1)  # torch does not restore this generator

        def forward(self, x: Any, factor: float = 1.0) -> Any:
            hidden = x @ self.weight
            if kind == "cache" and not fixed:  # the layer keeps the keys, as with use_cache=True
                hidden = hidden if self.past is None else torch.cat([self.past, hidden])
                self.past = hidden.detach()
            if kind == "lazy":  # the layer computes the scale once, at the first call
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
            """Returns how many tokens an expert gets; the second call differs, as with nearly equal scores."""
            self.past = 2 if self.past is None else 3
            return int(self.past)

    return Layer()


def gradient(kind: str) -> Any:
    """Returns the gradient of the weight without checkpointing."""
    import torch

    torch.manual_seed(0)
    layer, x = layer_of(kind, fixed=kind != "random"), torch.randn(3, 4, requires_grad=True)
    layer(x).square().sum().backward()
    return layer.weight.grad


def train(ctx: Context, *, kind: str, fixed: bool, reentrant: bool = False, check: str = "default") -> None:
    """Runs forward and backward of one checkpointed layer and compares its gradient with that of a plain layer."""
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
    except RuntimeError as failure:
        if check != "none":
            raise
        raise Symptom(f"no CheckpointError, but: {failure}") from failure
    if kind in ("dropout", "router"):
        assert layer.weight.grad is not None
        return
    error = (layer.weight.grad - gradient(kind)).abs().max().item()
    if error > 1e-4:
        raise Symptom(f"no error, and the gradient is off by {error:.4f} from the one without checkpoints")


def unpack(ctx: Context, *, once: bool) -> None:
    """A custom autograd function reads its saved tensors once or twice in the backward."""
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
    """Two selective checkpoints share a weight under autocast, which caches its cast in the forward, unless `fixed`."""
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
    """sdpa_kernel selects the attention kernel around the forward of the model, or inside the layer."""
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
    stands_for = (
        "a nondeterministic kernel before the router; the layer changes the number of tokens itself"
        if name == "router"
        else ""
    )
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
NOT_KEPT = "the layer keeps no keys"
probe = Probe(
    experiments=(pair("cache", OTHER_SHAPE, KEPT, NOT_KEPT, kind="cache"),),
    variants=(
        pair("reentrant", WRONG, KEPT + "; the checkpoint is reentrant", NOT_KEPT, kind="cache", reentrant=True),
        pair("no-check", INVALID, KEPT + "; the determinism check is off", NOT_KEPT, kind="cache", check="none"),
        pair(
            "lazy",
            OTHER_NUMBER,
            "the layer computes a value in the first run only",
            "both runs compute the value",
            kind="lazy",
        ),
        pair(
            "mode", OTHER_NUMBER, "eval() runs between forward and backward", "the mode does not change", kind="dropout"
        ),
        pair(
            "frozen",
            OTHER_NUMBER,
            "the weight is frozen between forward and backward",
            "the weight stays trainable",
            kind="frozen",
        ),
        pair(
            "router",
            OTHER_SHAPE,
            "the second run routes the tokens again",
            "the tokens are routed outside the checkpoint",
            kind="router",
        ),
        pair(
            "random",
            WRONG,
            "the layer draws from Python's random",
            "the number is drawn outside the checkpoint",
            kind="random",
        ),
        pair(
            "preserve",
            WRONG,
            "dropout runs without the restored random state",
            "the checkpoint restores it",
            kind="mask",
        ),
        pair(
            "autocast",
            MISSING,
            "autocast caches the cast of a shared weight",
            "autocast caches no casts",
            job=share_weight,
        ),
        pair("backend", OTHER, "sdpa_kernel surrounds the forward only", "sdpa_kernel is inside the layer", job=attend),
        pair("unpack", TWICE, "the backward reads ctx.saved_tensors twice", "the backward reads it once", job=unpack),
    ),
)
