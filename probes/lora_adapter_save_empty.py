"""A save selects the adapter's tensors by name. The names of a wrapped model do not match, so the file is empty."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence, Tuple

from kb.checkpoint import Checkpoint, Unreadable, read_checkpoint
from kb.cpu_arms import without_launcher
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    Unavailable,
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)

WIDTH = 8
PROMPT = range(WIDTH)


def build() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Embedding(WIDTH, WIDTH), "q_proj": nn.Linear(WIDTH, WIDTH)})


def with_lora() -> Any:
    """The base model with low-rank matrices A and B next to q_proj. B starts at zero, as PEFT initialises it."""
    import torch
    from torch import nn

    class Lora(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.base = build()
            self.lora_A = nn.Linear(WIDTH, 2, bias=False)
            self.lora_B = nn.Linear(2, WIDTH, bias=False)
            nn.init.zeros_(self.lora_B.weight)
            self.base.requires_grad_(False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.base["embed"](tokens)
            total: torch.Tensor = self.base["q_proj"](hidden) + self.lora_B(self.lora_A(hidden))
            return total

    return Lora()


def train(model: Any, device: Any) -> Any:
    import torch

    tokens = torch.tensor(PROMPT, device=device)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.5)
    for _ in range(2):
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model(tokens).detach()


def save_and_load(ctx: Context, *, bare_names: bool) -> None:
    """Wraps the model in DDP, as a Trainer does, and saves the tensors that the bare model calls lora_*."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=10)
    bare = with_lora().to(ctx.device)
    wrapped = DistributedDataParallel(bare)
    answer = train(wrapped, ctx.device)
    ctx.reached()
    state = bare.state_dict() if bare_names else wrapped.state_dict()
    adapter = {name: state[name] for name in state if name.startswith(("lora_A.", "lora_B."))}
    path = ctx.path("adapter-%d.pt" % ctx.rank)
    torch.save(adapter, path)
    load_and_judge(torch.load(path), os.path.getsize(path), answer)


def save_compiled(ctx: Context, *, in_place: bool) -> None:
    """`torch.compile` wraps the model in another module, but the method `compile` does not. Runs no compiled model."""
    import torch

    bare = model = with_lora()
    answer = train(bare, "cpu")
    ctx.reached()
    if in_place:
        bare.compile(backend="eager")
    else:
        try:
            model = torch.compile(bare, backend="eager")
        except RuntimeError as error:
            raise Unavailable("torch.compile does not work on this machine: %s" % error) from error
    state = model.state_dict()
    adapter = {name: state[name] for name in state if name.startswith(("lora_A.", "lora_B."))}
    torch.save(adapter, ctx.path("adapter.pt"))
    load_and_judge(adapter, os.path.getsize(ctx.path("adapter.pt")), answer)


def load_and_judge(adapter: Mapping[str, Any], size: int, answer: Any) -> None:
    """Loads the adapter into a new model without an error for missing tensors, as PEFT does."""
    import torch

    fresh, tokens = with_lora().to(answer.device), torch.tensor(PROMPT, device=answer.device)
    before = fresh(tokens).detach()
    missing = fresh.load_state_dict(adapter, strict=False).missing_keys
    after = fresh(tokens).detach()
    judge(len(adapter), size, 2 - sum("lora_" in name for name in missing), bool(torch.equal(after, before)))
    assert torch.allclose(after, answer)


def judge(tensors: int, size: int, arrived: int, is_base: bool) -> None:
    if arrived < 2:
        text = "and the answers are those of the base model" if is_base else "and the answers have changed"
        raise Symptom(
            "the adapter file holds %d tensors in %d bytes, %d of 2 arrive when it is loaded, %s"
            % (tensors, size, arrived, text)
        )


def rename_and_load(ctx: Context, *, wrappers: Sequence[str]) -> None:
    """An adapter file whose tensor names contain five nested wrappers. Removes the names in `wrappers` and loads it."""
    import torch
    from torch import nn

    bare = with_lora()
    answer = train(bare, "cpu")
    model = bare
    for wrapper in WRAPPERS:
        model = nn.ModuleDict({wrapper: model})
    ctx.reached()
    adapter = {
        ".".join(part for part in name.split(".") if part not in wrappers): value
        for name, value in model.state_dict().items()
        if "lora_" in name
    }
    torch.save(adapter, ctx.path("adapter.pt"))
    load_and_judge(torch.load(ctx.path("adapter.pt")), os.path.getsize(ctx.path("adapter.pt")), answer)


def rename_file(ctx: Context, *, renames: bool) -> None:
    """A safetensors file whose tensor names contain two wrappers, renamed by the code that the entry prints."""
    from torch import nn

    bare = with_lora()
    answer = train(bare, "cpu")
    model = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"module": bare})})
    from safetensors.torch import load_file, save_file  # type: ignore[import-not-found]

    raw = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    save_file({name.replace(".weight", ".default.weight"): raw[name] for name in raw}, "adapter_model.safetensors")
    ctx.reached()
    path = "adapter_model.safetensors"
    if renames:
        os.makedirs("renamed", exist_ok=True)
        state = load_file("adapter_model.safetensors")
        wrappers = {
            "_orig_mod",
            "module",
            "_fsdp_wrapped_module",
            "_forward_module",
            "_checkpoint_wrapped_module",
            "default",
        }
        state = {".".join(p for p in k.split(".") if p not in wrappers): v for k, v in state.items()}
        save_file(state, "renamed/adapter_model.safetensors", metadata={"format": "pt"})
        path = "renamed/adapter_model.safetensors"
    load_and_judge(load_file(path), os.path.getsize(path), answer)


def libraries() -> Tuple[Any, Any]:
    without_launcher()
    return importlib.import_module("peft"), importlib.import_module("accelerate").Accelerator(cpu=True)


def build_net() -> Any:
    import torch

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = build()

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.parts["q_proj"](self.parts["embed"](tokens))

    return Net()


def save_and_load_peft(ctx: Context, *, bare_names: bool) -> None:
    """Saves the model that torch.compile returned with PEFT and accelerate. The compiled model never runs."""
    import torch

    peft, accelerator = libraries()
    inner = peft.get_peft_model(build_net(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    answer, model, folder = train(inner, "cpu"), torch.compile(inner, backend="eager"), ctx.path("adapter")
    ctx.reached()
    if bare_names:
        bare = accelerator.unwrap_model(model)
        bare = getattr(bare, "_orig_mod", bare)
        if accelerator.is_main_process:
            bare.save_pretrained(folder)
    else:
        inner.save_pretrained(folder, state_dict=model.state_dict())
    load_with_peft(ctx, peft, answer)
    inner.merge_and_unload()
    inner.save_pretrained(ctx.path("after the merge"))
    merged = next(Path(ctx.path("after the merge")).glob("adapter_model.*"))
    ctx.note(bytes_after_the_merge=merged.stat().st_size)
    assert not read_checkpoint(merged).tensors, "the file still contains an adapter after the merge"


def save_wrapped_layer(ctx: Context, *, by_hand: bool) -> None:
    """PEFT 0.21 looks for the name of a layer's activation-checkpointing wrapper, which the state dict lacks."""
    peft, accelerator = libraries()
    wrappers: Any = importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model = peft.get_peft_model(build_net(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    wrappers.apply_activation_checkpointing(model, check_fn=lambda module: hasattr(module, "lora_A"))
    answer, bare, folder = train(model, "cpu"), model, ctx.path("adapter")
    from safetensors.torch import save_file

    ctx.reached()
    assert all("lora_" in n for n, p in bare.named_parameters() if p.requires_grad), "this saves LoRA alone"
    state = accelerator.get_state_dict(model)
    if by_hand:
        if accelerator.is_main_process:
            state = {k: v.contiguous() for k, v in state.items() if "lora_" in k}
            state = {
                ".".join(p for p in k.split(".") if p not in {"default", "_orig_mod"}): v for k, v in state.items()
            }
            bare.peft_config["default"].save_pretrained(folder)
            save_file(state, os.path.join(folder, "adapter_model.safetensors"), metadata={"format": "pt"})
    else:
        bare.save_pretrained(folder, state_dict=state)
    load_with_peft(ctx, peft, answer)


def load_with_peft(ctx: Context, peft: Any, answer: Any) -> None:
    import torch

    file = next(Path(ctx.path("adapter")).glob("adapter_model.*"))
    tokens = torch.tensor(PROMPT)
    with warnings.catch_warnings(record=True) as output:
        warnings.simplefilter("always")
        loaded = peft.PeftModel.from_pretrained(build_net(), ctx.path("adapter"))
    ctx.note(warnings_while_loading=[str(item.message)[:80] for item in output], bytes=file.stat().st_size)
    arrived = sum("lora_" in name and bool(item.abs().sum()) for name, item in loaded.state_dict().items())
    is_base = bool(torch.equal(loaded(tokens), build_net()(tokens)))
    arrived = 0 if is_base else arrived  # A is never zero, so equal answers mean that B was not loaded
    judge(len(read_checkpoint(file).tensors), file.stat().st_size, arrived, is_base)
    assert torch.allclose(loaded(tokens), answer)


WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_forward_module", "_checkpoint_wrapped_module")
KINDS = ("lora_", "hada_", "lokr_", "oft_", "vera_lambda", "ia3_", "prompt_embeddings", "lora_magnitude_vector")


def check(params: Mapping[str, Any]) -> Finding:
    """Does this file contain adapter weights, with names as PEFT writes them, and has training changed B?"""
    path: Optional[Path] = params["checkpoint"]
    if path is None:
        return unknown("no adapter was named", advice="run --set checkpoint=/path/to/adapter_model.safetensors")
    try:
        read: Checkpoint = read_checkpoint(path)
    except Unreadable as error:
        return unknown(str(error))
    return judge_file(path, read)


def judge_file(path: Path, read: Checkpoint) -> Finding:
    names = [tensor.name for tensor in read.tensors]
    adapter = [name for name in names if any(kind in name for kind in KINDS)]
    message = "the file has %d tensors, %d of them adapter tensors" % (len(names), len(adapter))
    if not adapter:
        if not names:
            return exposed(
                message, advice="resume training from a checkpoint that contains the adapter; the save lost it"
            )
        return unknown(message + ": it is a whole model, or an adapter of a kind that kb does not know")
    inside = set(WRAPPERS) - {"module"}  # a layer may be called "module"
    wrapped = [name for name in adapter if name.startswith("module.") or inside & set(name.split("."))]
    if wrapped:
        return exposed(
            message,
            "%d names contain a wrapper, so PEFT will not find them: %s" % (len(wrapped), wrapped[0]),
            advice="rename the tensors as the entry's Fix shows, and load the file again",
        )
    empty = [tensor.name for tensor in read.tensors if tensor.name in adapter and 0 in tensor.shape]
    if empty:
        return exposed(
            message,
            "%d adapter tensors have no elements, for instance %s" % (len(empty), empty[0]),
            advice="kb show zero3-empty-weights",
        )
    zero = _zero_b(path, read) if read.format == "safetensors" else None
    if zero:
        return exposed(
            message,
            zero,
            advice="check whether it was saved before the first step, and whether the adapter was trainable",
        )
    if len(names) > 2 * len(adapter):
        return exposed(message, "most tensors are not of the adapter: the base model was saved with it")
    strange = [n for n in adapter if not n.startswith("base_model.model.") or "default" in n.split(".")]
    if strange:
        return unknown(message, "PEFT does not write names like %s, and some loaders do not accept them" % strange[0])
    if zero is None:
        return unknown(
            message,
            "their names are right; kb can tell only from lora_B in safetensors whether the adapter was trained",
        )
    start = _start_of_b(path.parent / "adapter_config.json")
    if start:
        return unknown(
            message, "their names are right; with init_lora_weights %s, lora_B does not start at zero" % start
        )
    return clear(message, "lora_B is not zero; the model that loads the file must have modules with these names")


def _zero_b(path: Path, read: Checkpoint) -> Optional[str]:
    """A finding if all B matrices begin with zeros, "" if one does not, None if there are none."""
    matrices = [tensor for tensor in read.tensors if "lora_B" in tensor.name]
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        for item in matrices:
            file.seek(begin + item.start)
            if any(file.read(min(item.stop - item.start, 1 << 16))):
                return ""
    return "every lora_B is zero, as before training, for instance %s" % matrices[0].name if matrices else None


def _start_of_b(config: Path) -> str:
    """How the configuration next to the adapter initialises lora_B; "" if with zeros, or if it does not say."""
    try:
        way = json.loads(config.read_text(encoding="utf-8")).get("init_lora_weights", True)
    except (OSError, ValueError, AttributeError):
        return ""
    return "" if way in (True, "gaussian", "eva") else str(way)[:40]


EMPTY = r"adapter file holds \d+ tensors in \d+ bytes, 0 of 2 arrive when it is loaded"
WRAPPED = "saves the state dict of the wrapped model, in which no name matches the adapter"
BARE = "saves the state dict of the model inside the wrapper"
STANDS_FOR = "PEFT, which selects the adapter's tensors by the parameter names of its own model"
KEPT = "removes only two of five wrappers from the tensor names, so no name matches the adapter"
RENAMED = "removes all wrappers from the tensor names"
LIBRARIES = (
    "the wrappers of torch.compile, DDP, FSDP, Lightning and checkpointing, and PEFT, which loads with strict=False"
)


def pair(name: str, fails: Any, works: Any, because: str, fix: str, stands_for: str = "", **more: Any) -> Experiment:
    fidelity = "stand-in" if stands_for else "cpu"
    return Experiment(
        name=name,
        control=Arm(fails, symptom(EMPTY), because, fidelity, stands_for),
        treatment=Arm(works, completed(), fix, fidelity, stands_for),
        **more,
    )


SMALL = Needs(packages={"torch": ">=2.1"}, memory_mib=512)
PEFT = {"torch": ">=2.1", "peft": ">=0.7", "accelerate": ""}

probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "adapter_model.safetensors or .bin; kb runs no code from the file")},
    experiments=(
        pair(
            "gloo",
            partial(save_and_load, bare_names=False),
            partial(save_and_load, bare_names=True),
            WRAPPED,
            BARE,
            STANDS_FOR,
            needs=SMALL,
            expected_s=(0.3, 0.3),
        ),
    ),
    variants=(
        pair(
            "rename",
            partial(rename_and_load, wrappers=WRAPPERS[:2]),
            partial(rename_and_load, wrappers=WRAPPERS),
            KEPT,
            RENAMED,
            LIBRARIES,
            world_size=1,
            needs=SMALL,
            expected_s=(0.3, 0.3),
        ),
        pair(
            "rename-file",
            partial(rename_file, renames=False),
            partial(rename_file, renames=True),
            "the tensor names contain two wrappers and the adapter's name, so no name matches the adapter",
            RENAMED,
            LIBRARIES,
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1", "safetensors": ">=0.4"}, memory_mib=512),
            expected_s=(0.3, 0.3),
        ),
        pair(
            "compile-in-place",
            partial(save_compiled, in_place=False),
            partial(save_compiled, in_place=True),
            "saves the state dict of the module that torch.compile returned",
            "compiles the model with its own method, which adds nothing to the names",
            STANDS_FOR,
            world_size=1,
            needs=Needs(packages={"torch": ">=2.2"}),
            deadline_s=40,
            expected_s=(1.5, 1.5),
        ),
        pair(
            "peft",
            partial(save_and_load_peft, bare_names=False),
            partial(save_and_load_peft, bare_names=True),
            WRAPPED,
            BARE,
            world_size=1,
            needs=Needs(packages=PEFT),
            deadline_s=60,
            expected_s=(5, 5),
        ),
        pair(
            "peft-wrapped-layer",
            partial(save_wrapped_layer, by_hand=False),
            partial(save_wrapped_layer, by_hand=True),
            "PEFT 0.21 selects by module path, and activation checkpointing has wrapped the layer",
            "selects the names with lora_ from the same state dict by hand",
            world_size=1,
            needs=Needs(packages={**PEFT, "peft": ">=0.21", "safetensors": ">=0.4"}),
            deadline_s=60,
            expected_s=(5, 5),
        ),
    ),
)
