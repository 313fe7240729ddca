"""One of transformers, accelerate, peft, trl and huggingface_hub was replaced; another still uses its old interface."""

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

from kb.cpu_arms import pip_in, without_launcher
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
RELEASES = (  # name, release, module, requirement: without an upper bound, like the real ones
    ("accelerate", "0.34.2", OLD, ""),
    ("accelerate", "1.0.0", NEW, ""),
    ("transformers", "4.39.3", CALL % "dispatch_batches", "accelerate>=0.21.0"),
    ("transformers", "4.40.2", CALL % "dataloader_config", "accelerate>=0.21.0"),
)


def publish(ctx: Context) -> str:
    """Writes a folder of wheels, which serves pip as an index."""
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
    """A virtual environment in which pip installs packages from the folder of wheels."""

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
        """Runs the training script, which never changes. The last line that Python prints says why it failed."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [self.python, "-c", "import transformers; assert transformers.train() == 4"]
        ran = subprocess.run(
            command, env={**variables, **environment}, capture_output=True, text=True, timeout=60, check=False
        )
        if ran.returncode:
            raise Symptom("%s; pip check: %s" % (ran.stderr.strip().splitlines()[-1], self.pip("check")))


def install_again(ctx: Context, *, constrained: bool) -> None:
    """Builds the same Dockerfile some months later. pip installs the newest accelerate with the pinned transformers."""
    environment = Environment(ctx)
    constraints = Path(ctx.path("constraints.txt"))
    constraints.write_text("accelerate==0.34.2\n" if constrained else "")
    ctx.reached()
    environment.install("transformers==4.39.3", "-c", str(constraints))
    environment.train()


def upgrade(ctx: Context, *, together: bool) -> None:
    """Upgrades accelerate, or (`together`) both packages, in an environment that works."""
    environment = Environment(ctx)
    environment.install("transformers==4.39.3", "accelerate==0.34.2")
    environment.train()
    ctx.reached()
    names = ["transformers", "accelerate"] if together else ["accelerate"]
    environment.install("--upgrade", *names)
    environment.train()


def shadow(ctx: Context, *, other_copy_hidden: bool) -> None:
    """Reinstalls the right accelerate while a folder on PYTHONPATH holds another release."""
    environment = Environment(ctx)
    environment.install("transformers==4.39.3", "accelerate==0.34.2")
    environment.install("--target", ctx.path("other"), "accelerate==1.0.0")
    ctx.reached()
    environment.install("--force-reinstall", "accelerate==0.34.2")
    environment.train(**({} if other_copy_hidden else {"PYTHONPATH": ctx.path("other")}))


def unwrap(ctx: Context, *, companion_fits: bool) -> None:
    """Runs the real Trainer with the signature that Accelerator.unwrap_model had up to accelerate 1.2."""
    from unittest.mock import patch

    import torch

    accelerator_class = importlib.import_module("accelerate").Accelerator
    transformers = importlib.import_module("transformers")

    without_launcher()

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
    installed = accelerator_class.unwrap_model

    def unwrap_model(self: Any, model: Any, keep_fp32_wrapper: bool = True) -> Any:
        return installed(self, model, keep_fp32_wrapper)

    ctx.reached()
    with patch.object(accelerator_class, "unwrap_model", installed if companion_fits else unwrap_model):
        trainer.train()
    assert trainer.state.global_step == 1


def import_transformers(ctx: Context, *, companion_fits: bool) -> None:
    """Runs the check of releases that transformers makes when it is imported."""
    from unittest.mock import patch

    versions = importlib.import_module("transformers.utils.versions")
    table = importlib.import_module("transformers.dependency_versions_table")
    read = importlib.metadata.version

    def version(name: str) -> str:
        return "0.17.1" if name == "huggingface-hub" else read(name)

    ctx.reached()
    with patch.object(importlib.metadata, "version", read if companion_fits else version):
        versions.require_version_core(table.deps["huggingface-hub"])


# A package, its releases, its companion, and the releases of that which do not fit (from the first, below the second),
# and the error.
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
    ("transformers", "5.0.0", "5.15.1", "huggingface-hub", "2.0", "", "huggingface-hub<2.0 is required"),
    ("transformers", "5.18.0", "", "huggingface-hub", "", "1.31.0", "huggingface-hub>=1.31.0 is required"),
    ("accelerate", "0.32.0", "", "huggingface-hub", "", "0.21.0", "import of split_torch_state_dict_into_shards"),
)


FINAL = r"\d+(\.\d+)*(\.post\d+)?(\+[\w.]+)?$"


def within(release: str, low: str, high: str) -> bool:
    def numbers(text: str) -> List[int]:
        parts = [int(part) for part in re.findall(r"\d+", re.split(r"\+|\.post", text)[0])]
        return parts + [0] * (4 - len(parts))

    return numbers(release) >= numbers(low) and (not high or numbers(release) < numbers(high))


def check(params: Mapping[str, Any]) -> Finding:
    """Are there, by their metadata, two installed packages that are known not to fit each other?"""
    names = sorted({name for pair in PAIRS for name in (pair[0], pair[3])})
    installed = (params["installed"] or "").replace("_", "-").replace(" ", "").lower()
    given = dict(part.split("==", 1) for part in installed.split(",") if "==" in part)
    found = {name: [given[name]] if name in given else [] if given else releases(name) for name in names}
    evidence = [f"{name} {', '.join(versions)}" for name, versions in found.items() if versions]
    odd = [text for versions in found.values() for text in versions if not re.match(FINAL, text, re.ASCII)]
    if len(evidence) < 2:
        return unknown(*evidence, "kb found fewer than two of these packages: " + ", ".join(names))
    twice = [name for name, versions in found.items() if len(set(versions) - set(odd)) > 1]
    if twice:
        advice = (
            "run python -c 'import NAME; print(NAME.__file__)' to see which copy Python uses; hide or remove the other"
        )
        return exposed(*evidence, f"two different releases are installed of: {', '.join(twice)}", advice=advice)
    bad = []
    for name, low, high, companion, first, last, text in PAIRS:
        both = found[name] + found[companion]
        if len(both) == 2 and not set(odd) & set(both) and within(both[0], low, high) and within(both[1], first, last):
            bad.append(f"{name} {both[0]} does not fit {companion} {both[1]}: {text}")
    if bad:
        return exposed(*bad, advice="change one of the two as the table in the entry says")
    if odd:
        return unknown(*evidence, "the table only covers final releases, not: " + ", ".join(odd))
    return unknown(*evidence, "no pair is in kb's table, but others may not fit; `pip check` only knows declared ones")


def releases(name: str) -> List[str]:
    """Returns the releases of a package on sys.path: more than one if there are several copies."""
    versions: List[str] = []
    for distribution in importlib.metadata.distributions(name=name):
        version = str(distribution.version)  # None if the metadata is damaged
        if version not in versions:
            versions.append(version)
    return versions


STUBS = "transformers and accelerate; two-line packages have their names, releases and requirements, and pip is real"
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
    params={
        "installed": Param(
            "str", "releases to judge, such as peft==0.17.0,transformers==5.0.0 (default: the installed ones)"
        )
    },
    experiments=(
        pair(
            "unpinned",
            install_again,
            "constrained",
            symptom(KEYWORD),
            "transformers is pinned and accelerate is not, so pip installs the newest accelerate",
            "a constraints file pins the accelerate that worked",
        ),
    ),
    variants=(
        pair(
            "upgrade",
            upgrade,
            "together",
            symptom(KEYWORD),
            "only accelerate is upgraded",
            "transformers and accelerate are upgraded in one command",
        ),
        pair(
            "other-copy",
            shadow,
            "other_copy_hidden",
            symptom(KEYWORD),
            "a folder on PYTHONPATH holds another accelerate, which Python imports first",
            "PYTHONPATH is not set, so Python imports the accelerate of the environment",
        ),
        pair(
            "trainer",
            unwrap,
            "companion_fits",
            raised(r"unwrap_model\(\) got an unexpected keyword argument 'keep_torch_compile'"),
            "accelerate's unwrap_model has the signature of 1.2, and the Trainer passes a newer argument",
            "accelerate's unwrap_model has the signature of the installed release",
            stands_for="accelerate 1.2.1; the installed release gets its signature of unwrap_model",
            packages={"torch": ">=2.2", "transformers": ">=4.52.1", "accelerate": ">=1.3"},
            seconds=(8.0, 8.0),
        ),
        pair(
            "hub",
            import_transformers,
            "companion_fits",
            raised(r"is required for a normal functioning of this module, but found huggingface-hub==0\.17\.1"),
            "importlib.metadata reports huggingface-hub 0.17.1, which transformers refuses",
            "importlib.metadata reports the installed huggingface-hub",
            stands_for="an old huggingface-hub; importlib.metadata reports its release",
            packages={"transformers": ">=4.30"},
            seconds=(2.0, 2.0),
        ),
    ),
)
