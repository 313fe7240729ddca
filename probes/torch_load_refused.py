"""transformers from 4.52 on refuses every file of torch.save where torch is older than 2.6."""

from __future__ import annotations

import contextlib
import os
import re
from functools import partial
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Iterator, List, Mapping
from unittest.mock import patch

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

SAFE_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


class FromStranger:
    """A hostile checkpoint: its pickle calls a function while it is read. This one makes a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


@contextlib.contextmanager
def installed(release: str) -> Iterator[None]:
    """transformers sees this release of torch, or, where it is empty, the one that is installed."""
    from transformers.utils import import_utils  # type: ignore[import-not-found,unused-ignore]

    version = metadata.version

    def reported(name: str) -> str:
        return release if name == "torch" else version(name)

    if not release:
        yield
        return
    name = "transformers.utils.import_utils.get_torch_version"
    with patch("importlib.metadata.version", reported), patch(name, lambda: release):
        import_utils.is_torch_greater_or_equal.cache_clear()
        yield
    import_utils.is_torch_greater_or_equal.cache_clear()


def config() -> Any:
    from transformers import BertConfig  # type: ignore[import-not-found,unused-ignore]

    return BertConfig(hidden_size=4, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)


def write_model(folder: str) -> Any:
    """A model as a hub has it that knows no safetensors, and the weights in it."""
    import torch
    from transformers import BertModel

    model = BertModel(config())
    config().save_pretrained(folder)
    torch.save(model.state_dict(), os.path.join(folder, "pytorch_model.bin"))
    return model.state_dict()


def convert(folder: str) -> None:
    """The weights as safetensors, beside the file that they come from."""
    import torch
    from safetensors.torch import save_file  # type: ignore[import-not-found,unused-ignore]

    os.chdir(folder)
    state = torch.load("pytorch_model.bin", map_location="cpu", weights_only=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in state.items()}
    save_file(tensors, "model.safetensors", metadata={"format": "pt"})


def load(ctx: Context, *, release: str, converted: bool = False) -> None:
    """from_pretrained of a folder whose weights are a file of torch.save, or safetensors as well."""
    import torch
    from transformers import BertModel

    folder = ctx.path("model")
    weights = write_model(folder)
    if converted:
        convert(folder)
    ctx.reached()
    with installed(release):
        loaded = BertModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def load_stranger(ctx: Context, **options: bool) -> None:
    """A hostile file under the name of a model, loaded with or without weights_only=False."""
    import torch
    from transformers import BertModel

    folder, made = ctx.path("model"), Path(ctx.path("made"))
    weights = write_model(folder)
    torch.save({**weights, "extra": FromStranger(str(made))}, os.path.join(folder, "pytorch_model.bin"))
    ctx.reached()
    message = ""
    try:
        with installed("2.5.1"):
            BertModel.from_pretrained(folder, **options)
    except Exception as error:  # with weights_only=False it is about what the file has besides tensors
        message = str(error)
    if made.exists():
        raise Symptom("the pickle of a file that was to be refused made the folder %s" % made.name)
    assert "serious vulnerability" in message


def resume(ctx: Context, *, from_weights: bool) -> None:
    """The Trainer goes on from its checkpoint, or starts anew with the weights in it."""
    import torch
    from transformers import BertForSequenceClassification, Trainer, TrainingArguments

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # no launcher
    rows = [{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "labels": 0}]
    settings: Any = {"per_device_train_batch_size": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(ctx.path("out"), max_steps=1, save_steps=1, **settings)
    Trainer(BertForSequenceClassification(config()), arguments, train_dataset=rows).train()
    checkpoint = ctx.path("out/checkpoint-1")
    assert os.path.exists(os.path.join(checkpoint, "model.safetensors"))
    ctx.reached()
    with installed("2.5.1"):
        if from_weights:
            model = BertForSequenceClassification.from_pretrained(checkpoint)
            result = Trainer(model, arguments, train_dataset=rows).train()
        else:
            model = BertForSequenceClassification(config())
            result = Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=checkpoint)
    assert result.global_step == 1 and torch.isfinite(torch.tensor(result.training_loss))


def judge(ctx: Context, *, safetensors: bool) -> None:
    """The rule of the check below, on a folder with one kind of file or with both, for torch 2.5.1."""
    ctx.reached()
    names = refused(["model.safetensors", "pytorch_model.bin"][0 if safetensors else 1 :], (4, 52))
    if names:
        raise Symptom("transformers 4.52 with torch 2.5.1 refuses %s" % ", ".join(names))


def refused(names: List[str], transformers: Any) -> List[str]:
    """The files of a model's or a checkpoint's folder that this transformers reads with torch.load."""
    pattern = r"(rank\d+-of-\d+-)?(optimizer|scheduler|scaler|spk_dict)\.pt|adapter\.[\w-]+\.bin"
    if transformers >= (5,):
        pattern += r"|rng_state\w*\.pth"
    if not any(name in SAFE_WEIGHTS for name in names):
        pattern += r"|pytorch_model(-\d+-of-\d+)?\.bin"
    return [name for name in names if re.fullmatch(pattern, name) and name[:-3] + "safetensors" not in names]


def check(params: Mapping[str, Any]) -> Finding:
    """Does the transformers of this interpreter refuse files of torch.save, and which of this folder?"""
    try:
        releases = metadata.version("torch"), metadata.version("transformers")
    except metadata.PackageNotFoundError as error:
        return unknown("%s is not installed in this interpreter" % error.name)
    pair = "torch %s, transformers %s" % releases
    torch, transformers = map(numbers, releases)
    if not torch or not transformers:
        return unknown(pair + ": these are not the numbers of a release")
    if torch >= (2, 6) and not re.match(r"2\.6(\.0)?(a|b|rc|\.dev)", releases[0]):
        return clear(pair + ": torch is 2.6 or newer")
    if transformers < (4, 52):
        return clear(pair + ": this transformers does not ask for torch 2.6; files of strangers are no safer for that")
    advice = "torch 2.6 or newer with its companions, or safetensors: `kb show torch-load-refused`"
    if transformers >= (5, 20):
        return exposed(pair + ": this transformers does not use a torch below 2.6 at all", advice=advice)
    folder = params["folder"]
    if folder is None:
        return exposed(pair + ": every .bin of weights and every resume of the Trainer is refused", advice=advice)
    try:
        names = sorted(os.listdir(folder))
    except (OSError, ValueError) as error:
        return unknown("%s cannot be read as a folder: %s" % (folder, error))
    if refused(names, transformers):
        found = ", ".join(refused(names, transformers))
        return exposed("%s: refused in %s: %s" % (pair, folder, found), advice=advice)
    if any(name.startswith("checkpoint-") for name in names):
        return unknown("%s: there are checkpoints in %s; name one of them" % (pair, folder))
    if not any(name in SAFE_WEIGHTS for name in names):
        return unknown("%s: no weights of transformers were found in %s" % (pair, folder))
    return clear("%s: the weights in %s are safetensors" % (pair, folder))


def numbers(version: Any) -> Any:
    """The first two numbers of a release, none where it has another form."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return tuple(map(int, found.groups())) if found else ()


REFUSED = raised(r"Due to a serious vulnerability issue in `torch\.load`, even with `weights_only=True`")
OLD = "2.5.1"
BELOW = "transformers sees torch 2.5.1, and the weights are a .bin"
SAFE = "the folder has the same weights as safetensors"
NEEDS = {"torch": ">=2.6", "transformers": ">=4.52", "safetensors": ""}


def pair(
    name: str,
    broken: Callable[..., None],
    fixed: Callable[..., None],
    because: str,
    fix: str,
    expect: Expect = REFUSED,
    packages: Mapping[str, str] = MappingProxyType(NEEDS),
    fidelity: str = "stand-in",
) -> Experiment:
    real = "an installed torch of the release that transformers is made to see" if fidelity != "cpu" else ""
    return Experiment(
        name=name,
        control=Arm(broken, expect=expect, because=because, fidelity=fidelity, stands_for=real),
        treatment=Arm(fixed, expect=completed(), because=fix, fidelity=fidelity, stands_for=real),
        world_size=1,
        needs=Needs(packages=packages, memory_mib=256 if fidelity == "model" else 1024),
        deadline_s=90.0,
        expected_s=(0.2, 0.2) if fidelity == "model" else (4.0, 4.0),
    )


loaded_with = partial(partial, load, release=OLD)
old_torch = pair(
    "old-torch",
    partial(load, release="", converted=False),
    partial(load, release="", converted=True),
    "torch is older than 2.6, and the weights are a .bin",
    SAFE,
    packages={**NEEDS, "torch": ">=2.1,<2.6"},
    fidelity="cpu",
)
rule = pair(
    "rule",
    partial(judge, safetensors=False),
    partial(judge, safetensors=True),
    "the only weights of the folder are a .bin",
    "there are safetensors beside it",
    expect=symptom(r"transformers 4\.52 with torch 2\.5\.1 refuses pytorch_model\.bin"),
    packages={},
    fidelity="model",
)
release = pair(
    "release",
    partial(load, release="2.6.0a0+ecf3bae40a"),
    partial(load, release="2.6.0"),
    "transformers sees a build of torch 2.6 from before its release",
    "transformers sees torch 2.6.0, and reads the same .bin",
)
resumed = pair(
    "resume",
    partial(resume, from_weights=False),
    partial(resume, from_weights=True),
    "the model of the checkpoint is safetensors, its optimizer and scheduler are files of torch.save",
    "a new run starts with the weights of the checkpoint",
    packages={**NEEDS, "accelerate": ""},
)
stranger = pair(
    "stranger",
    partial(load_stranger, weights_only=False),
    load_stranger,
    "from_pretrained(weights_only=False) asks for no release, and runs what the file says",
    "without it the file is refused, and nothing in it is run",
    expect=symptom(r"the pickle of a file that was to be refused made the folder made"),
)
probe = Probe(
    check=check,
    params={"folder": Param("path", "a folder with a model or a checkpoint of the Trainer")},
    experiments=(
        old_torch,
        pair("reported", loaded_with(converted=False), loaded_with(converted=True), BELOW, SAFE),
        rule,
    ),
    variants=(release, resumed, stranger),
)
