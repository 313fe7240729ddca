"""Reentrant checkpointing after a frozen embedding leaves the adapters out of the graph, so they get no gradient."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, List, Mapping, Optional

from kb.packages import version
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
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)


def train_step(
    ctx: Context,
    *,
    reentrant: bool = True,
    hook: bool = False,
    head_trains: bool = False,
    embeds: bool = False,
    by_keyword: bool = False,
    loss_requires_grad: bool = False,
    in_place: bool = False,
    copied: bool = False,
) -> None:
    """Runs one forward and backward pass, in which four adapter matrices should get a gradient."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    embedding = nn.Embedding(16, 8).requires_grad_(by_keyword)
    layers = adapted_layers()
    head = nn.Linear(8, 16).requires_grad_(head_trains)
    if copied:
        embedding.register_forward_hook(lambda module, args, output: output.requires_grad_(True).clone())  # noqa: ARG005
    elif hook:  # enable_input_require_grads() does this
        embedding.register_forward_hook(lambda module, args, output: output.requires_grad_(True))  # noqa: ARG005
    ctx.reached()
    if embeds:
        hidden = embedding.weight[[1, 2, 3]]
    else:
        hidden = embedding(torch.tensor([1, 2, 3]))
    if in_place:  # a multimodal model writes its image features in this way
        try:
            hidden[torch.tensor([False, True, False])] = torch.ones(1, 8)
        except RuntimeError as error:
            raise Symptom(f"forward: {error}") from error
    for layer in layers:
        if by_keyword:
            hidden = checkpoint(partial(layer, x=hidden), use_reentrant=reentrant)
        elif reentrant:
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        else:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
    loss = nn.functional.cross_entropy(head(hidden), torch.tensor([2, 3, 4]))
    if loss_requires_grad:
        loss.requires_grad_(True)
    loss.backward()
    trained = sum(weight.grad is not None for weight in layers.parameters() if weight.requires_grad)
    if trained != 4:
        raise Symptom(f"no error, and {trained} of 4 adapter matrices got a gradient")


def adapted_layers() -> Any:
    """Two frozen layers with LoRA adapters."""
    from torch import nn

    class Layer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 8).requires_grad_(False)
            self.lora_a, self.lora_b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x: Any) -> Any:
            return x + self.base(x) + self.lora_b(self.lora_a(x))

    return nn.ModuleList(Layer() for _ in range(2))


def train_peft(ctx: Context, *, reentrant: bool) -> None:
    """Wraps a model with PEFT and then switches checkpointing on, as the Trainer does."""
    import torch
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    config = LlamaConfig(num_attention_heads=2, num_key_value_heads=2, use_cache=False, **sizes)
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj"]))
    if reentrant:
        model.gradient_checkpointing_enable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    ctx.reached()
    tokens = torch.tensor([[1, 2, 3]])
    model(input_ids=tokens, labels=tokens).loss.backward()
    trained = sum(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
    if trained != 4:
        raise Symptom(f"no error, and {trained} of 4 adapter matrices got a gradient")


def train_ddp(ctx: Context, *, reentrant: bool = True, hook: bool = False, find_unused: bool = False) -> None:
    """Trains three steps with DDP and a trainable head after the checkpointed layers."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8).requires_grad_(False)
            self.layers, self.head = adapted_layers(), nn.Linear(8, 16)

        def forward(self, tokens: Any) -> Any:
            hidden = self.embedding(tokens)
            for layer in self.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
            return self.head(hidden)

    ctx.init_process_group(timeout_s=10)
    model = Model()
    if hook:
        model.embedding.register_forward_hook(lambda *call: call[-1].requires_grad_(True))
    wrapped = DistributedDataParallel(model, find_unused_parameters=find_unused)
    ctx.reached()
    for step in range(3):
        try:
            wrapped(torch.tensor([1, 2, 3])).sum().backward()
        except RuntimeError as error:
            raise Symptom(f"step {step}: {error}") from error
    trained = sum(weight.grad is not None for weight in model.layers.parameters() if weight.requires_grad)
    if trained != 4:
        raise Symptom(f"no error, and {trained} of 4 adapter matrices got a gradient")


def check(params: Mapping[str, Any]) -> Finding:
    """Was this adapter trained at all? Without an adapter: is checkpointing reentrant by default here?"""
    if params["adapter"] is not None:
        return inspect_adapter(params["adapter"])
    transformers, peft = version("transformers"), version("peft")
    look = "to check an adapter that was trained without an error, run --set adapter=FOLDER (or a .safetensors)"
    if not transformers or not peft:
        installed = {"transformers": transformers, "peft": peft}
        missing = " and ".join(name for name, release in installed.items() if not release)
        why = "this interpreter lacks %s; kb does not see how your own code calls checkpoint()" % missing
        return unknown(why, advice=look)
    message = "transformers %s, peft %s: gradient_checkpointing_enable() " % (transformers, peft)
    if re.match(r"[0-4]\.", transformers):
        return exposed(message + "is reentrant by default", advice="set use_reentrant=False; " + look)
    why = "is non-reentrant by default; kb does not see use_reentrant=True in a job"
    return unknown(message + why, advice=look)


def inspect_adapter(path: Path) -> Finding:
    """Looks for B matrices of LoRA that are all zero, because they start at zero and change with the first gradient."""
    file = path / "adapter_model.safetensors" if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            head = 8 + int.from_bytes(stream.read(8), "little")
            header: Dict[str, Any] = json.loads(stream.read(min(head - 8, 64 << 20)))
            zero: List[str] = []
            names = [name for name in header if ".lora_B." in name or name.endswith(".lora_B")]
            for name in names:
                begin, end = header[name]["data_offsets"]
                if begin == end:
                    why = "%s is empty in %s: it was saved partitioned, which is a different incident" % (name, file)
                    return unknown(why)
                stream.seek(head + begin)
                if is_zero(stream, end - begin):
                    zero.append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return unknown("kb cannot read %s as safetensors: %s" % (file, error))
    if not names:
        return unknown("%s has no lora_B tensor" % file)
    return judge_adapter(file, names, zero)


def is_zero(stream: BinaryIO, size: int) -> bool:
    """Whether the next `size` bytes are zero; raises OSError if the file is shorter."""
    while size > 0:
        data = stream.read(min(size, 4 << 20))
        if not data:
            raise OSError("the file ends within a tensor")
        if data.strip(b"\0"):
            return False
        size -= len(data)
    return True


def judge_adapter(file: Path, names: List[str], zero: List[str]) -> Finding:
    """The finding from the names of all lora_B tensors of a file, and of those that are all zero."""
    counted = "%d of %d lora_B tensors are all zero" % (len(zero), len(names))
    in_layers = [name for name in names if re.search(r"\.\d+\.", name)]  # without those of lm_head or a classifier
    if in_layers and not set(in_layers) - set(zero):
        return exposed(
            "every lora_B tensor of the layers is zero, %d of them, in %s" % (len(in_layers), file),
            advice="no step has changed them (no gradient, learning rate 0), or the save wrote initial values: "
            "count the gradients after one backward, or look at lora_B in the running job",
        )
    if zero:
        return unknown(
            "%s in %s; the first is %s" % (counted, file, zero[0]),
            "modules that the data did not use stay zero too: a vision tower with text only, idle experts",
            advice="check whether these layers are checkpointed, and count the gradients after one backward",
        )
    config = file.with_name("adapter_config.json")
    try:
        init = json.loads(config.read_text()).get("init_lora_weights", True)
    except (OSError, ValueError, AttributeError) as error:
        return unknown("%s, but kb cannot read their initial values: %s" % (counted, error))
    if init not in (True, "gaussian"):
        return unknown("%s, but init_lora_weights=%r need not start from zero" % (counted, init))
    return unknown(
        "%s in %s, so some training has changed them" % (counted, file),
        "if this run continued an earlier adapter, kb cannot see which run changed them",
        advice="compare the file with the adapter that the run started from",
    )


NO_GRAD = raised(r"element 0 of tensors does not require grad and does not have a grad_fn")
SILENT = symptom(r"no error, and 0 of 4 adapter matrices got a gradient")
NON_REENTRANT = "the checkpoints are non-reentrant"


def pair(
    name: str,
    job: Callable[..., None],
    change: Mapping[str, bool],
    because: str,
    fix: str,
    expect: Expect = NO_GRAD,
    ranks: int = 1,
    packages: Optional[Dict[str, str]] = None,
    **both: bool,
) -> Experiment:
    """An experiment whose treatment gets the keywords of `change`, and whose control gets their opposites."""
    broken = {key: not value for key, value in change.items()}
    return Experiment(
        name=name,
        control=Arm(partial(job, **broken, **both), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **change, **both), expect=completed(), because=fix, fidelity="cpu"),
        world_size=ranks,
        expected_s=(10, 10) if packages else (0.2, 0.2),
        deadline_s=90 if packages else 20,
        needs=Needs(packages={"torch": "", **packages}) if packages else Needs(),
    )


probe = Probe(
    check=check,
    params={"adapter": Param("path", "a saved LoRA adapter (folder or .safetensors), to check for updated weights")},
    experiments=(
        pair(
            "autograd",
            train_step,
            {"reentrant": False},
            "the checkpoints are reentrant, and their input comes from a frozen embedding and needs no gradient",
            NON_REENTRANT + ", so they record the graph through the adapters",
        ),
    ),
    variants=(
        pair(
            "silent",
            train_step,
            {"reentrant": False},
            "the checkpoints are reentrant, and the head after them trains, so no error is raised",
            NON_REENTRANT,
            SILENT,
            head_trains=True,
        ),
        pair(
            "hook",
            train_step,
            {"hook": True},
            "the embedding has no hook, so its output does not require grad",
            "a hook makes the embedding's output require grad",
        ),
        pair(
            "peft-order",
            train_peft,
            {"reentrant": False},
            "get_peft_model comes before gradient_checkpointing_enable(), so nothing adds the hook",
            NON_REENTRANT,
            packages={"transformers": ">=4.35,<5", "peft": ">=0.6"},
        ),
        pair(
            "inputs-embeds",
            train_step,
            {"reentrant": False},
            "the embedding has the hook, but the model gets inputs_embeds, so nothing calls it",
            NON_REENTRANT,
            embeds=True,
            hook=True,
        ),
        pair(
            "in-place",
            train_step,
            {"copied": True},
            "the hook makes the embedding's output require grad, and the model writes into it in place",
            "the hook returns a copy",
            symptom(r"forward: a (view of a )?leaf Variable that requires grad is being used in an in-place operation"),
            in_place=True,
            hook=True,
        ),
        pair(
            "keyword",
            train_step,
            {"reentrant": False},
            "the layer gets its hidden states by keyword, which a reentrant checkpoint does not look at",
            NON_REENTRANT,
            hook=True,
            by_keyword=True,
        ),
        pair(
            "loss-requires-grad",
            train_step,
            {"reentrant": False},
            "loss.requires_grad_(True) removes the error, but the adapters are still not in the graph",
            NON_REENTRANT,
            SILENT,
            loss_requires_grad=True,
        ),
        pair(
            "ddp",
            train_ddp,
            {"reentrant": False},
            "the head trains, but the adapters never get a gradient, and DDP notices that in the second step",
            NON_REENTRANT,
            symptom(r"step 1: Expected to have finished reduction in the prior iteration"),
            ranks=2,
        ),
        pair(
            "ddp-find-unused",
            train_ddp,
            {"reentrant": False},
            "with find_unused_parameters=True, DDP does not notice that the adapters get no gradient",
            NON_REENTRANT,
            SILENT,
            ranks=2,
            find_unused=True,
        ),
        pair(
            "hook-find-unused",
            train_ddp,
            {"find_unused": False},
            "the job combines the hook, reentrant checkpoints and find_unused_parameters=True",
            "find_unused_parameters is False",
            symptom(r"step 0: Expected to mark a variable ready only once"),
            ranks=2,
            hook=True,
        ),
    ),
)
