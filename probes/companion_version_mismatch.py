"""One of transformers, accelerate, peft, trl and huggingface_hub was replaced, and another calls it in the old way."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, List, Mapping, Sequence, Tuple

from kb.cpu_arms import pip_in
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

OLD = "class Accelerator:\n    def __init__(self, dispatch_batches=None): self.batches = dispatch_batches\n"
NEW = "class Accelerator:\n    def __init__(self, dataloader_config=None): self.batches = dataloader_config\n"
CALL = "from accelerate import Accelerator\ndef train(): return Accelerator(%s=4).batches\n"
RELEASES = (  # name, release, module, what it requires: without an upper bound, as the real ones do
    ("accelerate", "0.34.2", OLD, ""),
    ("accelerate", "1.0.0", NEW, ""),
    ("transformers", "4.39.3", CALL % "dispatch_batches", "accelerate>=0.21.0"),
    ("transformers", "4.40.2", CALL % "dataloader_config", "accelerate>=0.21.0"),
)


def publish(ctx: Context) -> str:
    """A folder with wheels, as an index of packages."""
    folder = Path(ctx.path("wheels"))
    folder.mkdir()
    for name, release, module, requires in RELEASES:
        info = f"{name}-{release}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n"
        metadata += f"Requires-Dist: {requires}\n" if requires else ""
        with zipfile.ZipFile(folder / f"{name}-{release}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", module)
            wheel.writestr(f"{info}/METADATA", metadata)
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    return str(folder)


class Environment:
    """A virtual environment, which pip fills from the folder of wheels."""

    def __init__(self, ctx: Context) -> None:
        import venv

        self.wheels = publish(ctx)
        venv.create(ctx.path("env"), with_pip=False, symlinks=True)
        self.python = ctx.path("env/bin/python")

    def pip(self, *arguments: str) -> str:
        command = [*pip_in(self.python), *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    def install(self, *arguments: str) -> None:
        self.pip("install", "--no-index", "--find-links", self.wheels, *arguments)

    def train(self, **environment: str) -> None:
        """The script, which did not change; what ends it is the last line that Python prints."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [self.python, "-c", "import transformers; assert transformers.train() == 4"]
        ran = subprocess.run(
            command, env={**variables, **environment}, capture_output=True, text=True, timeout=60, check=False
        )
        if ran.returncode:
            raise Symptom("%s; pip check: %s" % (ran.stderr.strip().splitlines()[-1], self.pip("check")))


def install_again(ctx: Context, *, constrained: bool) -> None:
    """The same line in a Dockerfile, some months later: the newest accelerate comes with the pinned transformers."""
    environment = Environment(ctx)
    constraints = Path(ctx.path("constraints.txt"))
    constraints.write_text("accelerate==0.34.2\n" if constrained else "")
    ctx.reached()
    environment.install("transformers==4.39.3", "-c", str(constraints))
    environment.train()


def upgrade(ctx: Context, *, together: bool) -> None:
    """An environment that worked, in which one package is upgraded, or both."""
    environment = Environment(ctx)
    environment.install("transformers==4.39.3", "accelerate==0.34.2")
    environment.train()
    ctx.reached()
    names = ["transformers", "accelerate"] if together else ["accelerate"]
    environment.install("--upgrade", *names)
    environment.train()


def shadow(ctx: Context, *, other_copy_hidden: bool) -> None:
    """The environment fits and accelerate is installed anew, but a folder on PYTHONPATH has another one."""
    environment = Environment(ctx)
    environment.install("transformers==4.39.3", "accelerate==0.34.2")
    environment.install("--target", ctx.path("other"), "accelerate==1.0.0")
    ctx.reached()
    environment.install("--force-reinstall", "accelerate==0.34.2")
    environment.train(**({} if other_copy_hidden else {"PYTHONPATH": ctx.path("other")}))


def unwrap(ctx: Context, *, companion_fits: bool) -> None:
    """The real Trainer, and the signature that Accelerator.unwrap_model had up to accelerate 1.2."""
    from unittest.mock import patch

    import torch

    accelerator_class = importlib.import_module("accelerate").Accelerator
    transformers = importlib.import_module("transformers")

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)  # one process, without torchrun

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.proj = torch.nn.Linear(2, 1)

        def forward(self, hidden: Any, labels: Any = None) -> Any:
            return {"loss": (self.proj(hidden).squeeze(-1) - labels).pow(2).mean()}

    arguments = transformers.TrainingArguments(
        ctx.path("out"), max_steps=1, report_to=[], use_cpu=True, save_strategy="no"
    )
    rows = [{"hidden": [1.0, 2.0], "labels": 1.0}] * 8
    trainer = transformers.Trainer(model=Model(), args=arguments, train_dataset=rows)
    now = accelerator_class.unwrap_model

    def unwrap_model(self: Any, model: Any, keep_fp32_wrapper: bool = True) -> Any:
        return now(self, model, keep_fp32_wrapper)

    ctx.reached()
    with patch.object(accelerator_class, "unwrap_model", now if companion_fits else unwrap_model):
        trainer.train()
    assert trainer.state.global_step == 1


def import_transformers(ctx: Context, *, companion_fits: bool) -> None:
    """The check that transformers makes when it is imported."""
    from unittest.mock import patch

    versions = importlib.import_module("transformers.utils.versions")
    table = importlib.import_module("transformers.dependency_versions_table")
    read = importlib.metadata.version

    def version(name: str) -> str:
        return "0.17.1" if name == "huggingface-hub" else read(name)

    ctx.reached()
    with patch.object(importlib.metadata, "version", read if companion_fits else version):
        versions.require_version_core(table.deps["huggingface-hub"])


# A package and its releases, its companion and the releases that do not fit: from the first, below the second.
PAIRS: Sequence[Tuple[str, str, str, str, str, str, str]] = (
    ("transformers", "4.32", "4.40", "accelerate", "1.0.0", "", "argument 'dispatch_batches'"),
    ("transformers", "4.38.0", "4.45.0", "accelerate", "", "0.26.0", "argument 'use_seedable_sampler'"),
    ("transformers", "4.52", "", "accelerate", "", "1.3.0", "argument 'keep_torch_compile'"),
    ("peft", "0.14.0", "", "transformers", "", "4.43.0", "import of EncoderDecoderCache"),
    ("peft", "0.16.0", "0.18.0", "transformers", "5.0.0", "", "import of HybridCache"),
    ("peft", "0.16.0", "0.18.0", "transformers", "", "4.44.0", "import of HybridCache"),
    ("peft", "0.18.0", "0.18.1", "transformers", "", "4.52.0", "No module named transformers.modeling_layers"),
    ("peft", "0.19.0", "0.20.0", "transformers", "5.6.0", "", "an adapter of a MoE model: 'distributed_operation'"),
    ("peft", "0.15.0", "", "accelerate", "", "0.32.0", "import of clear_device_cache"),
    ("peft", "0.5.0", "", "accelerate", "", "0.21.0", "import of is_npu_available"),
    ("trl", "", "0.8.0", "transformers", "4.39.0", "", "import of top_k_top_p_filtering"),
    ("trl", "", "0.12.0", "transformers", "4.46.0", "", "compute_loss, get_batch_samples of DPOTrainer and its like"),
    ("trl", "", "0.13.0", "transformers", "4.47.0", "", "log of DPOTrainer and its like"),
    ("trl", "", "0.12.0", "transformers", "5.0.0", "", "argument 'tokenizer' of Trainer"),
    ("trl", "", "0.29.0", "transformers", "5.3.0", "", "No module named vllm_ascend or weave"),
    ("trl", "0.29.0", "1.14.0", "torch", "", "2.6.0", "import of FSDPModule"),
    ("transformers", "4.43.0", "4.45.0", "accelerate", "", "0.29.0", "import of is_mlu_available"),
    ("transformers", "4.56.0", "4.57.0", "accelerate", "", "1.10.1", "the name ParallelismConfig"),
    ("transformers", "4.30", "5.0.0", "huggingface-hub", "1.0", "", "huggingface-hub<1.0 is required"),
    ("transformers", "5.0.0", "", "huggingface-hub", "", "1.2.1", "import of is_offline_mode"),
    ("accelerate", "0.32.0", "", "huggingface-hub", "", "0.21.0", "import of split_torch_state_dict_into_shards"),
)


FINAL = r"\d+(\.\d+)*(\.post\d+)?(\+[\w.]+)?$"


def within(release: str, low: str, high: str) -> bool:
    def numbers(text: str) -> List[int]:
        parts = [int(part) for part in re.findall(r"\d+", re.split(r"\+|\.post", text)[0])]
        return parts + [0] * (4 - len(parts))

    return numbers(release) >= numbers(low) and (not high or numbers(release) < numbers(high))


def check(params: Mapping[str, Any]) -> Finding:
    """The releases that are installed, by their metadata, against the pairs that are known not to fit."""
    names = sorted({name for pair in PAIRS for name in (pair[0], pair[3])})
    installed = (params["installed"] or "").replace("_", "-").replace(" ", "").lower()
    given = dict(part.split("==", 1) for part in installed.split(",") if "==" in part)
    found = {name: [given[name]] if name in given else [] if given else releases(name) for name in names}
    evidence = [f"{name} {', '.join(versions)}" for name, versions in found.items() if versions]
    odd = [text for versions in found.values() for text in versions if not re.match(FINAL, text, re.ASCII)]
    if len(evidence) < 2:
        return unknown(*evidence, "fewer than two of these packages are installed: " + ", ".join(names))
    twice = [name for name, versions in found.items() if len(set(versions) - set(odd)) > 1]
    if twice:
        advice = "python -c 'import NAME; print(NAME.__file__)' shows which copy wins; hide or remove the other"
        return exposed(*evidence, f"installed twice, in different releases: {', '.join(twice)}", advice=advice)
    bad = []
    for name, low, high, companion, first, last, text in PAIRS:
        both = found[name] + found[companion]
        if len(both) == 2 and not set(odd) & set(both) and within(both[0], low, high) and within(both[1], first, last):
            bad.append(f"{name} {both[0]} does not fit {companion} {both[1]}: {text}")
    if bad:
        return exposed(*bad, advice="change one of the two, as the table of the entry says")
    if odd:
        return unknown(*evidence, "not a final release, which the table cannot judge: " + ", ".join(odd))
    return unknown(*evidence, "no pair of the table; others may not fit, and `pip check` knows declared ones only")


def releases(name: str) -> List[str]:
    """The releases of a package on sys.path; more than one if there are several copies."""
    versions: List[str] = []
    for distribution in importlib.metadata.distributions(name=name):
        version = str(distribution.version)  # None where the metadata is damaged
        if version not in versions:
            versions.append(version)
    return versions


STUBS = "transformers and accelerate: packages of two lines with their names, releases and requirements; pip is real"
KEYWORD = r"__init__\(\) got an unexpected keyword argument 'dispatch_batches'; pip check: No broken requirements"


def pair(
    name: str,
    job: Callable[..., None],
    keyword: str,
    expect: Expect,
    because: str,
    fix: str,
    stands_for: str = STUBS,
    packages: Mapping[str, str] = {"pip": ">=22.3"},
    seconds: Tuple[float, float] = (3.0, 3.0),
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: False}), expect, because, "stand-in", stands_for),
        treatment=Arm(partial(job, **{keyword: True}), completed(), fix, "stand-in", stands_for),
        world_size=1,
        needs=Needs(packages=packages),
        deadline_s=120,
        expected_s=seconds,
    )


probe = Probe(
    check=check,
    params={"installed": Param("str", "releases to judge, as peft==0.17.0,transformers==5.0.0 (default: installed)")},
    experiments=(
        pair(
            "unpinned",
            install_again,
            "constrained",
            symptom(KEYWORD),
            "transformers is pinned and accelerate is not, so the newest comes",
            "a file of constraints names the accelerate that worked",
        ),
    ),
    variants=(
        pair(
            "upgrade",
            upgrade,
            "together",
            symptom(KEYWORD),
            "accelerate alone is upgraded",
            "transformers and accelerate are upgraded in one command",
        ),
        pair(
            "other-copy",
            shadow,
            "other_copy_hidden",
            symptom(KEYWORD),
            "a folder on PYTHONPATH has another accelerate than the environment",
            "PYTHONPATH is not set",
        ),
        pair(
            "trainer",
            unwrap,
            "companion_fits",
            raised(r"unwrap_model\(\) got an unexpected keyword argument 'keep_torch_compile'"),
            "unwrap_model of accelerate has the signature of 1.2",
            "it has that of the installed release",
            stands_for="accelerate 1.2.1: its signature of unwrap_model on the installed release",
            packages={"torch": ">=2.2", "transformers": ">=4.52.1", "accelerate": ">=1.3"},
            seconds=(8.0, 8.0),
        ),
        pair(
            "hub",
            import_transformers,
            "companion_fits",
            raised(r"is required for a normal functioning of this module, but found huggingface-hub==0\.17\.1"),
            "the metadata of huggingface-hub says 0.17.1",
            "it says what is installed",
            stands_for="an old huggingface-hub: another answer of importlib.metadata",
            packages={"transformers": ">=4.30"},
            seconds=(2.0, 2.0),
        ),
    ),
)
