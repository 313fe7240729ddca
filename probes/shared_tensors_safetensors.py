"""Tied weights are saved in a format without shared storages: under both names, or under one and tied after loading."""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from kb.checkpoint import Unreadable, read_checkpoint
from kb.cpu_arms import without_launcher
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

ROWS, WIDTH = 512, 32


def build() -> Any:
    """An embedding and a head that share one weight."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(ROWS, WIDTH), "lm_head": nn.Linear(WIDTH, ROWS, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    return model


def reload(ctx: Context, *, single_name: bool) -> None:
    """Saves each name with separate bytes, as every format without storages does, and loads with assign=True."""
    import torch

    model = build()
    copies: Dict[str, Any] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(copies, ctx.path("two names.pt"))
    del copies["lm_head.weight"]
    torch.save(copies, ctx.path("one name.pt"))
    sizes = [os.path.getsize(ctx.path(name + ".pt")) for name in ("two names", "one name")]
    ctx.reached()
    fresh = build()
    if single_name:
        missing = fresh.load_state_dict(torch.load(ctx.path("one name.pt")), strict=False, assign=True).missing_keys
        assert missing == ["lm_head.weight"], missing
        fresh["lm_head"].weight = fresh["embed"].weight  # tie again, as the code of the model does
    else:
        fresh.load_state_dict(torch.load(ctx.path("two names.pt")), assign=True)
    assert torch.equal(fresh["lm_head"].weight, model["lm_head"].weight)
    parameters = len(list(fresh.parameters()))
    fresh["lm_head"](fresh["embed"](torch.tensor([1, 2]))).sum().backward()
    torch.optim.SGD(fresh.parameters(), lr=0.1).step()
    apart = (fresh["lm_head"].weight - fresh["embed"].weight).abs().max().item()
    message = "after one step they differ by %.3f; the file has %d bytes with two names, %d with one" % (apart, *sizes)
    if apart:
        raise Symptom("tied weights are two parameters after loading: %s" % message)
    assert parameters == 1, parameters


def save_safetensors(ctx: Context, *, single_name: bool) -> None:
    from safetensors.torch import (  # type: ignore[import-not-found]
        load_file,
        load_model,
        save_file,
        save_model,
    )

    model, path = build(), ctx.path("model.safetensors")
    weight = model["embed"].weight
    ctx.reached()
    if single_name:
        save_model(model, path)
        model = build()
        load_model(model, path)
    else:
        save_file(model.state_dict(), path)
        model = build()
        model.load_state_dict(load_file(path))
    assert model["lm_head"].weight.equal(weight)
    assert model["lm_head"].weight is model["embed"].weight


def load_safetensors(ctx: Context, *, knows_tie: bool) -> None:
    """The file of a tied model is right, but load_state_dict compares names and does not know that."""
    from safetensors.torch import load_file, load_model, save_model

    model, path = build(), ctx.path("model.safetensors")
    save_model(model, path)
    ctx.reached()
    if knows_tie:
        load_model(model, path)
    else:
        model.load_state_dict(load_file(path))


def save_wrapper(ctx: Context, *, apart: bool) -> None:
    """A module contains a model with tied weights and a head, like a reward or value model."""
    import torch
    from safetensors.torch import load_file, load_model, save_file, save_model

    model = torch.nn.ModuleDict({"pretrained_model": build(), "v_head": torch.nn.Linear(WIDTH, 1)})
    ctx.reached()
    if apart:
        save_model(model["pretrained_model"], "model.safetensors")
        save_file(model["v_head"].state_dict(), "v_head.safetensors")
        fresh = build()
        load_model(fresh, "model.safetensors")
        assert fresh["lm_head"].weight.equal(model["pretrained_model"]["embed"].weight)
        assert load_file("v_head.safetensors")["weight"].equal(model["v_head"].weight)
    else:
        save_file(model.state_dict(), "model.safetensors")


def save_transformers(ctx: Context, *, declares: bool) -> None:
    """Two layers of a transformers model share a weight; with `declares`, the class says so."""
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]

    class Shared(LlamaForCausalLM):  # type: ignore[misc]
        if declares:
            _tied_weights_keys = {
                "lm_head.weight": "model.embed_tokens.weight",
                "model.layers.1.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
            }

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    model = Shared(LlamaConfig(num_hidden_layers=2, tie_word_embeddings=True, **sizes))
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    ctx.reached()
    model.save_pretrained(ctx.path("out"))
    layers = Shared.from_pretrained(ctx.path("out")).model.layers
    assert layers[1].mlp.up_proj.weight is layers[0].mlp.up_proj.weight
    assert layers[1].mlp.up_proj.weight.equal(model.model.layers[0].mlp.up_proj.weight)


def save_for_transformers(ctx: Context, *, save_pretrained: bool) -> None:
    """from_pretrained reads a tied Llama; save_model would write only the name that sorts first."""
    from safetensors.torch import save_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    config = LlamaConfig(num_hidden_layers=1, tie_word_embeddings=True, **sizes)
    model, folder = LlamaForCausalLM(config), ctx.path("out")
    ctx.reached()
    if save_pretrained:
        model.save_pretrained(folder)
    else:
        config.save_pretrained(folder)
        save_model(model, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    loaded = LlamaForCausalLM.from_pretrained(folder).model.embed_tokens.weight
    if loaded.is_meta:
        raise Symptom("from_pretrained raised no error and left %d numbers on the meta device" % loaded.numel())
    assert loaded.equal(model.model.embed_tokens.weight)


def save_accelerate(ctx: Context, *, as_file: bool) -> None:
    """Two parameters are halves of one buffer, as ZeRO, FSDP and fused layers leave them. They do not overlap."""
    import torch
    from torch import nn

    accelerate: Any = importlib.import_module("accelerate")
    library: Any = importlib.import_module("safetensors.torch")
    buffer = torch.arange(16.0).reshape(4, 4)
    model = nn.ParameterDict({"q_proj": nn.Parameter(buffer[:2]), "k_proj": nn.Parameter(buffer[2:])})
    without_launcher()
    accelerator = accelerate.Accelerator(cpu=True)
    path = ctx.path("model.safetensors")
    save_file: Any = library.save_file
    ctx.reached()
    if as_file:
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            save_file(state, path, metadata={"format": "pt"})
    else:
        accelerator.save_model(model, str(ctx.dir))
    written = library.load_file(path)
    lost = sorted(set(model.state_dict()) - set(written))
    if lost:
        raise Symptom("Removed shared tensor {%s} while saving, no error: its values are in no file" % repr(lost)[1:-1])
    assert all(torch.equal(written[name], tensor) for name, tensor in model.state_dict().items())


def check(params: Mapping[str, Any]) -> Finding:
    """Do tensors of a torch.save file with different names share a storage?"""
    path: Optional[Path] = params["checkpoint"]
    if path is None:
        return unknown("no checkpoint was named", advice="--set checkpoint=/path/to/pytorch_model.bin")
    try:
        read = read_checkpoint(path)
    except Unreadable as error:
        return unknown(str(error))
    if read.format == "safetensors":
        return unknown(
            "a safetensors file cannot contain shared tensors", "kb did not compare the values of its tensors"
        )
    by_storage: Dict[str, List[Tuple[int, int, str]]] = {}
    for tensor in read.tensors:
        if tensor.stop > tensor.start:
            by_storage.setdefault(tensor.storage, []).append((tensor.start, tensor.stop, tensor.name))
    result: List[str] = []
    views = 0
    for inside in by_storage.values():
        inside.sort()
        views += any(inside[index][1] <= begin for index, (begin, _, _) in enumerate(inside[1:]))
        for index, (begin, end, other) in enumerate(inside[1:]):
            start, stop, name = inside[index]
            if begin < stop:
                same = "the same tensor" if (start, stop) == (begin, end) else "overlapping tensors"
                result.append("%s and %s are %s" % (name, other, same))
    if result:
        advice = "save one of each pair and tie them after loading: safetensors.torch.save_model, load_model"
        adjacent = ["%d storages also contain tensors side by side: clone those" % views] if views else []
        return exposed("safetensors.torch.save_file would refuse these:", *result[:6], *adjacent, advice=advice)
    if views:
        return exposed(
            "%d storages contain multiple tensors that do not overlap: save_file writes them all" % views,
            "accelerate's save_model compares only storages, and would drop all but one tensor of each",
            advice="clone them: {name: tensor.clone() for name, tensor in state.items()}",
        )
    if not read.tensors:
        return unknown("kb found no tensor in %s" % path)
    return clear("each of the %d tensors has its own storage" % len(read.tensors))


REFUSED = r"Some tensors share memory, this will lead to duplicate memory on disk"
STANDS_FOR = "safetensors, which refuses to write the file of the control arm"

SAFETENSORS = {"torch": ">=2.1", "safetensors": ">=0.4"}


def variant(
    name: str,
    job: Callable[..., None],
    change: str,
    expect: Expect,
    because: str,
    fix: str,
    packages: Mapping[str, str],
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(partial(job, **{change: False}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{change: True}), expect=completed(), because=fix, fidelity="cpu"),
        world_size=1,
        needs=Needs(packages={**SAFETENSORS, **packages}),
        deadline_s=60 if packages else 20,
        expected_s=(5, 5) if packages else (0.2, 0.2),
    )


tied = variant(
    "safetensors",
    save_safetensors,
    "single_name",
    raised(REFUSED),
    "save_file refuses a state dict with two names for one weight",
    "save_model writes one name, and load_model loads the weight of both",
    {},
)
loaded = variant(
    "load",
    load_safetensors,
    "knows_tie",
    raised(r'Missing key\(s\) in state_dict: "lm_head\.weight"\.'),
    "load_state_dict compares names, and the file contains only one of the two",
    "load_model accepts that the file lacks a tied name",
    {},
)
wrapped = variant(
    "wrapper",
    save_wrapper,
    "apart",
    raised(REFUSED),
    "save_file refuses the state dict of the model with its head, which has both names",
    "save_model writes the inner model, and save_file writes the head to a second file",
    {},
)
declared = variant(
    "transformers",
    save_transformers,
    "declares",
    raised(r"The weights trying to be saved contained shared tensors"),
    "two layers share a weight, which the class does not declare, so save_pretrained refuses it",
    "the class declares the shared weight in _tied_weights_keys",
    {"transformers": ">=5"},
)
read_back = variant(
    "from-pretrained",
    save_for_transformers,
    "save_pretrained",
    symptom(r"from_pretrained raised no error and left \d+ numbers on the meta device"),
    "save_model writes lm_head.weight, and from_pretrained looks for embed_tokens.weight",
    "save_pretrained writes the name that from_pretrained looks for",
    {"transformers": ">=4.51,<5"},
)
views = variant(
    "accelerate",
    save_accelerate,
    "as_file",
    symptom(r"Removed shared tensor \{'[qk]_proj'\} while saving"),
    "two parameters are views of one storage, and accelerate's save_model drops one of them",
    "save_file writes both parameters",
    {"accelerate": ">=0.25"},
)

probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "a file of torch.save: .pt, .pth, .bin; the check runs nothing in it")},
    experiments=(
        Experiment(
            name="torch",
            control=Arm(
                partial(reload, single_name=False),
                expect=symptom(r"tied weights are two parameters after loading"),
                because="the file has both names, so the tied weights load as two parameters",
                fidelity="stand-in",
                stands_for=STANDS_FOR,
            ),
            treatment=Arm(
                partial(reload, single_name=True),
                expect=completed(),
                because="the file has one name, and the code ties the weights again after loading",
                fidelity="stand-in",
                stands_for=STANDS_FOR,
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1"}, memory_mib=512),
            expected_s=(0.1, 0.1),
        ),
    ),
    variants=(tied, loaded, wrapped, declared, read_back, views),
)
