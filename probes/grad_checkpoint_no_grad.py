"""Adapters behind a frozen embedding are checkpointed reentrantly: the backward pass finds nothing to differentiate."""

from __future__ import annotations

import json
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from kb.probe import Arm, Context, Experiment, Finding, Param, Probe, clear, completed, exposed, raised, unknown


def train_step(ctx: Context, *, reentrant: bool) -> None:
    """Two forms of one mistake: silent when something after the last checkpoint trains, an error when nothing does."""
    ctx.reached()
    silent = adapters_with_gradient(reentrant=reentrant, head_trains=True)
    hooked = adapters_with_gradient(reentrant=True, head_trains=False, embedding_hook=True)
    ctx.note(with_a_trainable_head="%d of 4 adapter weights got a gradient" % silent)
    ctx.note(reentrant_with_embedding_hook="%d of 4 adapter weights got a gradient" % hooked)
    assert silent == (0 if reentrant else 4), "%d of 4 adapters trained beside a trainable head" % silent
    assert hooked == 4, "%d of 4 adapters trained with a hook on the embedding" % hooked
    trained = adapters_with_gradient(reentrant=reentrant, head_trains=False)
    assert trained == 4, "%d of 4 adapters trained" % trained


def adapters_with_gradient(*, reentrant: bool, head_trains: bool, embedding_hook: bool = False) -> int:
    """One forward and backward pass of a two-layer model with LoRA adapters, four trainable matrices in all."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    def layer() -> Any:
        parts = {"base": nn.Linear(8, 8), "lora_a": nn.Linear(8, 2, bias=False), "lora_b": nn.Linear(2, 8, bias=False)}
        parts["base"].requires_grad_(False)
        return nn.ModuleDict(parts)

    def forward(parts: Any, x: Any) -> Any:
        return x + parts["base"](x) + parts["lora_b"](parts["lora_a"](x))

    embedding = nn.Embedding(16, 8).requires_grad_(False)
    layers = nn.ModuleList(layer() for _ in range(2))
    head = nn.Linear(8, 16).requires_grad_(head_trains)
    if embedding_hook:  # what enable_input_require_grads() does
        embedding.register_forward_hook(lambda *call: call[-1].requires_grad_(True))
    hidden = embedding(torch.tensor([1, 2, 3]))
    for parts in layers:
        hidden = checkpoint(partial(forward, parts), hidden, use_reentrant=reentrant)
    nn.functional.cross_entropy(head(hidden), torch.tensor([2, 3, 4])).backward()
    return sum(weight.grad is not None for weight in layers.parameters() if weight.requires_grad)


def check(params: Mapping[str, Any]) -> Finding:
    """Was this adapter trained at all? Without one: is the installed default the reentrant one?"""
    if params["adapter"] is not None:
        return inspect_adapter(params["adapter"])
    transformers, peft = version("transformers"), version("peft")
    look = "an adapter that was trained without an error can be looked at: --set adapter=FOLDER (or a .safetensors)"
    if transformers is None or peft is None:
        missing = " and ".join(
            name for name, message in (("transformers", transformers), ("peft", peft)) if not message
        )
        return unknown("%s not installed; how your own code calls checkpoint() is not visible" % missing, advice=look)
    message = "transformers %s, peft %s: gradient_checkpointing_enable() " % (transformers, peft)
    if int(transformers.split(".")[0]) < 5:
        return exposed(message + "is reentrant unless told otherwise", advice="use_reentrant=False; " + look)
    return unknown(message + "is non-reentrant by default; use_reentrant=True in a job is not visible", advice=look)


def version(package: str) -> Optional[str]:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def inspect_adapter(path: Path) -> Finding:
    """LoRA's B matrices start at zero and leave it with the first gradient."""
    file = path / "adapter_model.safetensors" if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            head = 8 + int.from_bytes(stream.read(8), "little")
            header: Dict[str, Any] = json.loads(stream.read(min(head - 8, 64 << 20)))
            zero: List[str] = []
            names = [name for name in header if ".lora_B." in name or name.endswith(".lora_B")]
            for name in names:
                begin, end = header[name]["data_offsets"]
                stream.seek(head + begin)
                data = stream.read(min(end - begin, 64 << 10))
                if not data:
                    return unknown("%s is empty in %s: it was saved partitioned, another incident" % (name, file))
                if not data.strip(b"\0"):
                    zero.append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return unknown("%s cannot be read as safetensors: %s" % (file, error))
    if not names:
        return unknown("%s holds no lora_B tensor" % file)
    counted = "%d of %d lora_B tensors are all zero" % (len(zero), len(names))
    if zero:
        advice = "these weights never got a gradient (or the adapter was saved before the first step): train again"
        return exposed("%s in %s, the first is %s" % (counted, file, zero[0]), advice=advice)
    config = file.with_name("adapter_config.json")
    try:
        start = json.loads(config.read_text()).get("init_lora_weights", True)
    except (OSError, ValueError, AttributeError) as error:
        return unknown("%s, but how they started is unknown: %s" % (counted, error))
    if start not in (True, "gaussian"):
        return unknown("%s, but init_lora_weights=%r need not start from zero" % (counted, start))
    return clear("%s in %s" % (counted, file))


probe = Probe(
    check=check,
    params={"adapter": Param("path", "a saved LoRA adapter, folder or .safetensors: were its weights ever updated?")},
    experiments=(
        Experiment(
            name="autograd",
            control=Arm(
                partial(train_step, reentrant=True),
                expect=raised(r"element 0 of tensors does not require grad and does not have a grad_fn"),
                because="reentrant checkpoints whose input, a frozen embedding's output, needs no gradient",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(train_step, reentrant=False),
                expect=completed(),
                because="non-reentrant checkpoints record the graph through the adapters",
                fidelity="cpu",
            ),
            world_size=1,
            expected_s=(0.1, 0.1),
        ),
    ),
)
