"""FSDP flattens a unit into one tensor, and float32 LoRA adapters and a bfloat16 base are in the same unit."""

from collections import OrderedDict
from functools import partial
from typing import Any, Callable

from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, Unavailable, completed, raised, symptom


def wrap_and_train(ctx: Context, *, own_units: bool) -> None:
    """Wraps a LoRA model in FSDP, with use_orig_params and MixedPrecision, which people try first but do not help."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    dist = ctx.init_process_group(timeout_s=10)
    base, hidden = torch.bfloat16, torch.randn(4, 8)
    shard = partial(
        FullyShardedDataParallel,
        device_id=ctx.device,
        use_orig_params=True,
        mixed_precision=MixedPrecision(param_dtype=base, reduce_dtype=base),
    )
    frozen = nn.Linear(8, 8, dtype=base).requires_grad_(False)
    adapters = [
        nn.Linear(8, 2, dtype=torch.float32),
        nn.Linear(2, 8, dtype=torch.float32),
    ]  # the dtype in which PEFT creates them
    ctx.reached()
    if own_units:
        adapters = [shard(adapter) for adapter in adapters]
    model = nn.Sequential(OrderedDict(zip(("base", "lora_A", "lora_B"), (frozen, *adapters))))
    wrapped = shard(model)
    output = wrapped(hidden)
    output.float().sum().backward()
    assert output.dtype == base, output.dtype
    gradients = torch.tensor(sum(weight.grad is not None for weight in wrapped.parameters()))
    dist.all_reduce(gradients)  # one rank's shard may contain only frozen weights
    assert gradients.item() >= 4, gradients


def wrap_quantized(ctx: Context, *, one_storage_dtype: bool) -> None:
    """Wraps packed 4-bit weights, stored as uint8 or as bfloat16. FSDP moves their bytes without reading them."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel

    ctx.init_process_group(timeout_s=10)
    model = nn.Linear(8, 8, dtype=torch.bfloat16).requires_grad_(False)
    packed = torch.arange(64, dtype=torch.uint8)
    model.packed = nn.Parameter(packed.view(torch.bfloat16) if one_storage_dtype else packed, requires_grad=False)
    ctx.reached()
    wrapped = FullyShardedDataParallel(model, device_id=ctx.device, use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(wrapped):
        assert torch.equal(wrapped.module.packed.view(torch.uint8), packed), "FSDP has changed the bytes"


def upcast(ctx: Context, *, own_units: bool) -> None:
    """Upcasts trainable units to float32 after the wrapping, as accelerate does; one may contain packed weights."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    ctx.init_process_group(timeout_s=10)
    packed = torch.arange(-(1 << 15), 1 << 15).to(
        torch.int16
    )  # every 16-bit pattern; 254 of them are a NaN in bfloat16
    packed_in_forward = []

    class Layer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(packed.clone().view(torch.bfloat16), requires_grad=False)
            self.adapter = nn.Linear(8, 2, dtype=torch.bfloat16)

        def forward(self, hidden: Any) -> Any:
            packed_in_forward.append(self.weight.detach().view(torch.int16).cpu())
            return self.adapter(hidden)

    shard = partial(
        FullyShardedDataParallel,
        device_id=ctx.device,
        use_orig_params=True,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    )
    layer = Layer()
    if own_units:
        layer.adapter = shard(layer.adapter)
    wrapped = shard(layer)
    ctx.reached()
    for unit in FullyShardedDataParallel.fsdp_modules(wrapped):
        flat = unit._flat_param
        if flat.requires_grad:
            flat.data = flat.data.to(torch.float32)
            unit._handle._orig_param_dtype = torch.float32
    wrapped(torch.randn(4, 8))
    changed = int((packed_in_forward[0] != packed).sum())
    if changed:
        raise Symptom("%d of 65536 packed values have changed" % changed)


def shard_fsdp2(ctx: Context, *, own_units: bool) -> None:
    """FSDP2 requires one dtype for the trainable parameters of a unit, even with a MixedPrecisionPolicy."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError as error:
        raise Unavailable(f"torch {torch.__version__} has no fully_shard") from error
    if not hasattr(torch.cpu.Stream, "record_event"):  # torch 2.6
        raise Unavailable(f"FSDP2 of torch {torch.__version__} fails on the CPU")
    ctx.init_process_group(timeout_s=10)
    policy = {
        "mesh": init_device_mesh(ctx.device.type, (ctx.world_size,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16),
    }
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8, dtype=torch.float32)).to(ctx.device)
    ctx.reached()
    if own_units:
        fully_shard(model[1], **policy)
    fully_shard(model, **policy)
    output = model(torch.randn(4, 8, device=ctx.device))
    output.float().sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def call(ctx: Context, *, under_autocast: bool) -> None:
    """Calls a bfloat16 layer with a float32 input, as an evaluation outside autocast does."""
    import torch

    device = ctx.device
    model = torch.nn.Linear(8, 8, dtype=torch.bfloat16).to(device)
    batch = torch.randn(4, 8, device=device)
    ctx.reached()
    if under_autocast:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            output = model(batch)
    else:
        output = model(batch)
    assert output.dtype == torch.bfloat16, output.dtype


def cast(ctx: Context, *, to_weight: bool) -> None:
    """Calls a custom module with an input whose dtype differs from that of its weight."""
    import torch

    class Head(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.proj = torch.nn.Linear(8, 2, dtype=torch.bfloat16)

        def forward(self, hidden: Any) -> Any:
            if not to_weight:
                return self.proj(hidden)
            if self.proj.weight.is_floating_point():
                hidden = hidden.to(self.proj.weight.dtype)
            return self.proj(hidden)

    head = Head().to(ctx.device)
    ctx.reached()
    assert head(torch.randn(4, 8, device=ctx.device)).dtype == torch.bfloat16


def feed_packed(ctx: Context, *, guarded: bool) -> None:
    """Casts the input before a layer that stores bytes and casts its input itself, as the layers of bitsandbytes do."""
    import torch

    class Packed(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)

        def forward(self, hidden: Any) -> Any:
            return hidden.to(torch.bfloat16)

    proj = Packed().to(ctx.device)
    hidden = torch.tensor([0.25, 0.5, 1.75], device=ctx.device)
    ctx.reached()
    if not guarded or proj.weight.is_floating_point():
        arrived = proj(hidden.to(proj.weight.dtype))
    else:
        arrived = proj(hidden)
    if arrived.tolist() != hidden.tolist():
        raise Symptom("%s arrives as %s" % (hidden.tolist(), arrived.tolist()))


def write(ctx: Context, *, converted: bool) -> None:
    """Writes image features into the embeddings under autocast, which does not convert in-place writes."""
    import torch

    hidden = torch.zeros(4, 8, dtype=torch.bfloat16, device=ctx.device)
    image_features = torch.ones(2, 8, device=ctx.device)
    mask = torch.tensor([True, False, True, False], device=ctx.device)
    ctx.reached()
    with torch.autocast(ctx.device.type, dtype=torch.bfloat16):
        if converted:
            hidden[mask] = image_features.to(hidden.dtype)
        else:
            hidden[mask] = image_features
    assert hidden.sum().item() == 16


FLATTEN = r"Must flatten tensors with uniform dtype but got torch\.\w+ and torch\.\w+"
LAYER = r"(mat1 and mat2 must have the same dtype|expected m\w*1 and m\w*2 to have the same dtype)"
PACKED = "a 4-bit or 8-bit layer of bitsandbytes"
PREPARED = "4-bit weights of bitsandbytes stored as bfloat16, and the casting loop of accelerate's prepare"
TOGETHER = "float32 adapters and a bfloat16 base are in one FSDP unit"


def pair(
    name: str,
    job: Callable[..., None],
    keyword: str,
    pattern: str,
    because: str,
    fix: str,
    ranks: int = 2,
    stands_for: str = "",
) -> Experiment:
    """`keyword` is False in the control arm and True in the treatment arm."""
    fidelity = "stand-in" if stands_for else "cpu"
    control, treatment = partial(job, **{keyword: False}), partial(job, **{keyword: True})
    return Experiment(
        name=name,
        control=Arm(control, expect=raised(pattern), because=because, fidelity=fidelity, stands_for=stands_for),
        treatment=Arm(treatment, expect=completed(), because=fix, fidelity=fidelity, stands_for=stands_for),
        needs=Needs(packages={"torch": ">=2.2"}),
        world_size=ranks,
        expected_s=(0.3, 0.5),
    )


probe = Probe(
    experiments=(
        pair(
            "gloo",
            wrap_and_train,
            "own_units",
            FLATTEN,
            f"{TOGETHER}, despite use_orig_params and MixedPrecision",
            "each adapter is an FSDP unit of its own",
        ),
    ),
    variants=(
        pair(
            "quantized",
            wrap_quantized,
            "one_storage_dtype",
            r"Cannot flatten integer dtype tensors|" + FLATTEN,
            "the packed weights are stored as uint8, next to bfloat16 weights",
            "the same bytes are stored as bfloat16",
            stands_for="the 4-bit weights of bitsandbytes with bnb_4bit_quant_storage",
        ),
        Experiment(
            name="upcast",
            control=Arm(
                partial(upcast, own_units=False),
                symptom(r"25\d of 65536 packed values have changed"),
                because="packed weights and the adapter are in one unit, which is cast to float32 and back",
                fidelity="stand-in",
                stands_for=PREPARED,
            ),
            treatment=Arm(
                partial(upcast, own_units=True),
                completed(),
                because="the adapter is a unit of its own, and only that unit is cast",
                fidelity="stand-in",
                stands_for=PREPARED,
            ),
            needs=Needs(packages={"torch": ">=2.2"}),
            world_size=2,
            expected_s=(0.5, 0.5),
        ),
        pair(
            "fsdp2",
            shard_fsdp2,
            "own_units",
            r"FSDP expects uniform original parameter dtype but got",
            "one unit of fully_shard has trainable weights of two dtypes, despite MixedPrecisionPolicy",
            "the float32 part is a unit of its own",
        ),
        pair(
            "autocast",
            call,
            "under_autocast",
            LAYER,
            "calls a bfloat16 layer with a float32 input, outside autocast",
            "calls the layer under autocast",
            ranks=1,
        ),
        pair(
            "cast",
            cast,
            "to_weight",
            LAYER,
            "passes a float32 input to a bfloat16 layer",
            "casts the input to the weight's dtype",
            ranks=1,
        ),
        Experiment(
            name="packed",
            control=Arm(
                partial(feed_packed, guarded=False),
                symptom(r"\[0\.25, 0\.5, 1\.75\] arrives as \[0\.0, 0\.0, 1\.0\]"),
                because="casts the input to the dtype of a packed weight, which is uint8",
                fidelity="stand-in",
                stands_for=PACKED,
            ),
            treatment=Arm(
                partial(feed_packed, guarded=True),
                completed(),
                because="casts the input only if the weight is a floating-point tensor",
                fidelity="stand-in",
                stands_for=PACKED,
            ),
            needs=Needs(packages={"torch": ">=2.2"}),
            world_size=1,
            expected_s=(0.3, 0.3),
        ),
        pair(
            "in-place",
            write,
            "converted",
            r"Index put requires the source and destination dtypes match",
            "writes float32 features into a bfloat16 tensor, which autocast does not convert",
            "converts the features to the dtype of the tensor before writing them",
            ranks=1,
        ),
    ),
)
