"""transformers 4.52 and newer refuse every file of torch.save if torch is older than 2.6."""

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

SAFE_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


class HostileObject:
    """An object whose pickle runs code when somebody loads it; this one creates a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


@contextlib.contextmanager
def installed(release: str) -> Iterator[None]:
    """Makes transformers see this release of torch, or the installed one if `release` is empty."""
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
    """Writes a model with a pytorch_model.bin, as older hub repositories have it, and returns its weights."""
    import torch
    from transformers import BertModel

    model = BertModel(config())
    config().save_pretrained(folder)
    torch.save(model.state_dict(), os.path.join(folder, "pytorch_model.bin"))
    return model.state_dict()


def convert(folder: str) -> None:
    """Converts pytorch_model.bin of a folder to safetensors, next to it."""
    import torch
    from safetensors.torch import save_file  # type: ignore[import-not-found,unused-ignore]

    os.chdir(folder)
    state = torch.load("pytorch_model.bin", map_location="cpu", weights_only=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in state.items()}
    save_file(tensors, "model.safetensors", metadata={"format": "pt"})


def load(ctx: Context, *, release: str, converted: bool = False) -> None:
    """Loads a model whose weights are a file of torch.save; with `converted`, they are there as safetensors too."""
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


def load_hostile(ctx: Context, **options: bool) -> None:
    """Loads a model whose file contains code; `options` may be weights_only=False."""
    import torch
    from transformers import BertModel

    folder, made = ctx.path("model"), Path(ctx.path("made"))
    weights = write_model(folder)
    torch.save({**weights, "extra": HostileObject(str(made))}, os.path.join(folder, "pytorch_model.bin"))
    ctx.reached()
    message = ""
    try:
        with installed("2.5.1"):
            BertModel.from_pretrained(folder, **options)
    except Exception as error:  # with weights_only=False, transformers complains about the key that is no tensor
        message = str(error)
    if made.exists():
        raise Symptom("the pickle of a file that was to be refused made the folder %s" % made.name)
    assert "serious vulnerability" in message


def resume(ctx: Context, *, from_weights: bool) -> None:
    """Resumes a Trainer from its checkpoint, or starts a new run from the weights in it."""
    import torch
    from transformers import BertForSequenceClassification, Trainer, TrainingArguments

    without_launcher()
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
    """Applies the rule of the check to a folder that has a .bin, and safetensors too or not."""
    ctx.reached()
    names = refused(["model.safetensors", "pytorch_model.bin"][0 if safetensors else 1 :], (4, 52))
    if names:
        raise Symptom("transformers 4.52 with torch 2.5.1 refuses %s" % ", ".join(names))


def refused(names: List[str], transformers: Any) -> List[str]:
    """The files of a model or a checkpoint that this release of transformers reads with torch.load."""
    pattern = r"(rank\d+-of-\d+-)?(optimizer|scheduler|scaler|spk_dict)\.pt|adapter\.[\w-]+\.bin"
    if transformers >= (5,):
        pattern += r"|rng_state\w*\.pth"
    if not any(name in SAFE_WEIGHTS for name in names):
        pattern += r"|pytorch_model(-\d+-of-\d+)?\.bin"
    return [name for name in names if re.fullmatch(pattern, name) and name[:-3] + "safetensors" not in names]


def check(params: Mapping[str, Any]) -> Finding:
    """Does the transformers of this interpreter refuse files of torch.save, and which files of this folder?"""
    try:
        releases = metadata.version("torch"), metadata.version("transformers")
    except metadata.PackageNotFoundError as error:
        return unknown("%s is not installed in this interpreter" % error.name)
    pair = "torch %s, transformers %s" % releases
    torch, transformers = map(numbers, releases)
    if not torch or not transformers:
        return unknown(pair + ": kb cannot read these version numbers")
    if torch >= (2, 6) and not re.match(r"2\.6(\.0)?(a|b|rc|\.dev)", releases[0]):
        return clear(pair + ": torch is 2.6 or newer")
    if transformers < (4, 52):
        return clear(pair + ": this transformers does not require torch 2.6, but files from strangers are not safe")
    advice = "use torch 2.6 or newer with its companions, or safetensors: `kb show torch-load-refused`"
    if transformers >= (5, 20):
        return exposed(pair + ": this transformers does not use a torch below 2.6 at all", advice=advice)
    folder = params["folder"]
    if folder is None:
        why = ": transformers refuses weights in .bin files, and refuses to resume a Trainer"
        return exposed(pair + why, advice=advice)
    try:
        names = sorted(os.listdir(folder))
    except (OSError, ValueError) as error:
        return unknown("kb cannot read the folder %s: %s" % (folder, error))
    if refused(names, transformers):
        found = ", ".join(refused(names, transformers))
        return exposed("%s: transformers refuses these files in %s: %s" % (pair, folder, found), advice=advice)
    if any(name.startswith("checkpoint-") for name in names):
        return unknown("%s: %s contains checkpoints; name one of them" % (pair, folder))
    if not any(name in SAFE_WEIGHTS for name in names):
        return unknown("%s: %s contains no weights of transformers" % (pair, folder))
    return clear("%s: the weights in %s are safetensors" % (pair, folder))


def numbers(version: Any) -> Any:
    """The first two numbers of a version, or () if it has another form."""
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
    stands_for = "an old torch; the probe makes transformers see its version number" if fidelity != "cpu" else ""
    return Experiment(
        name=name,
        control=Arm(broken, expect=expect, because=because, fidelity=fidelity, stands_for=stands_for),
        treatment=Arm(fixed, expect=completed(), because=fix, fidelity=fidelity, stands_for=stands_for),
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
    "the folder has safetensors too",
    expect=symptom(r"transformers 4\.52 with torch 2\.5\.1 refuses pytorch_model\.bin"),
    packages={},
    fidelity="model",
)
release = pair(
    "release",
    partial(load, release="2.6.0a0+ecf3bae40a"),
    partial(load, release="2.6.0"),
    "transformers sees a pre-release of torch 2.6",
    "transformers sees torch 2.6.0, and loads the same .bin",
)
resumed = pair(
    "resume",
    partial(resume, from_weights=False),
    partial(resume, from_weights=True),
    "the model in the checkpoint is safetensors, but its optimizer and scheduler are files of torch.save",
    "a new run starts from the weights of the checkpoint",
    packages={**NEEDS, "accelerate": ""},
)
stranger = pair(
    "stranger",
    partial(load_hostile, weights_only=False),
    load_hostile,
    "from_pretrained(weights_only=False) skips the check of the release, and runs the code in the file",
    "without weights_only=False, transformers refuses the file and runs nothing in it",
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
