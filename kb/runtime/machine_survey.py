"""Prints what is installed in the interpreter that runs it, as one JSON document on standard output.

Started by path in the reader's training interpreter (standard library, Python 3.9). It imports none of the packages it
lists, so a broken package costs only its own value, which is then null; `reasons` says why. With `--import-torch` it
also imports torch and reads what only the loaded libraries know. It never initialises CUDA, counts no devices and calls
no driver.
"""

from __future__ import annotations

import ast
import faulthandler
import importlib
import importlib.util
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from typing import Any

from kb.runtime.survey_fields import Reader, Unknown, describe

ALONE_S = 120  # then it ends itself, since the process that should end it may be gone
LONGEST_FILE = 20_000  # characters of torch/version.py that are read
CUDA_SUFFIXES = ("", "-cu11", "-cu12", "-cu13")
CUDA_LIBRARIES = ("nccl", "cudnn", "cuda-runtime", "cuda-nvrtc", "cublas", "cufft", "cusolver", "nvjitlink", "nvshmem")
PACKAGES = (
    "torch", "torchvision", "torchaudio", "torchao", "torchdata", "torchtitan", "torchmetrics",
    "triton", "pytorch-triton", "transformers", "accelerate", "deepspeed", "peft", "trl", "datasets", "tokenizers",
    "safetensors", "huggingface-hub", "flash-attn", "flash-attn-3", "flashinfer-python", "bitsandbytes", "xformers",
    "apex", "transformer-engine", "unsloth", "lightning", "pytorch-lightning", "megatron-core", "nemo-toolkit",
    "colossalai", "fairscale", "verl", "axolotl", "ms-swift", "ray", "vllm", "sglang", "nvidia-ml-py", "pynvml",
    "nvidia-resiliency-ext", "mpi4py", "horovod", "webdataset", "wandb", "mlflow", "tensorboard", "numpy", "scipy",
    "pandas", "pyarrow", "protobuf", "setuptools", "packaging", "pip",
)  # fmt: skip


def start(arguments: list[str]) -> None:
    """`machine_survey [--import-torch]`: print the document.

    Anything that an import prints goes to standard error, and its exit handlers do not run.
    """
    faulthandler.register(signal.SIGTERM, chain=True)  # the stack of an import that hangs
    signal.alarm(ALONE_S)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with answer:
        json.dump(document("--import-torch" in arguments), answer)
    os._exit(0)


def document(import_torch: bool) -> dict[str, Any]:
    """The document: `torch` comes from its files, `torch_import` from the imported module."""
    reader = Reader()
    torch = reader.value("torch", lambda: torch_files(reader))
    return {
        "version": sys.version.split()[0],
        "implementation": sys.implementation.name,
        "executable": sys.executable,
        "prefix": sys.prefix,
        "packages": packages(reader, torch),
        "torch": torch,
        "torch_import": reader.value("torch_import", lambda: torch_import(reader, import_torch)),
        "reasons": reader.reasons,
    }


def packages(reader: Reader, torch: Mapping[str, Any] | None) -> dict[str, Any]:
    """The versions of the known packages that are installed; None if a package's metadata is broken."""
    names = [*PACKAGES, *(f"nvidia-{name}{suffix}" for name in CUDA_LIBRARIES for suffix in CUDA_SUFFIXES)]
    versions: dict[str, Any] = {}
    for name in names:
        try:
            versions[name] = _version(name)
        except metadata.PackageNotFoundError:
            continue
        except Exception as error:
            versions[name] = None
            reader.reasons[f"packages.{name}"] = f"its metadata is broken: {describe(error)}"
    if torch and torch["version"]:
        versions.setdefault("torch", torch["version"])  # a checkout on PYTHONPATH has no metadata
    return versions


def _version(name: str) -> str:
    version: str | None = metadata.distribution(name).metadata["Version"]
    if not version:
        raise ValueError("no version")
    return version


def torch_files(reader: Reader) -> dict[str, Any]:
    """Where torch is and how it was built, from torch/version.py as text."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise Unknown("torch is not installed")
    location = next(iter(spec.submodule_search_locations))
    assignments = {"version": "__version__", "cuda": "cuda", "hip": "hip", "git_version": "git_version"}
    text = reader.value("torch", lambda: _read_beginning(os.path.join(location, "version.py"))) or ""
    sources = {name: partial(_assigned, text, line) for name, line in assignments.items()}
    return {"location": location, **reader.values("torch", sources)}


def _read_beginning(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(LONGEST_FILE)


def _assigned(text: str, name: str) -> str:
    """The string assigned to a name on its own line. The file may be anything, so it is not executed."""
    line = re.search(rf"^{name}\s*(?::[^=\n]+)?=\s*(.+)$", text, re.MULTILINE)
    if not line:
        raise Unknown("torch/version.py does not say")
    value = ast.literal_eval(line.group(1).strip())
    if value is None:
        raise Unknown("this build of torch has none")
    return str(value)


def torch_import(reader: Reader, is_requested: bool) -> dict[str, Any]:
    """Whether torch can be imported, and the versions and features that its libraries report."""
    if not is_requested:
        raise Unknown("torch was not imported (--import-torch)")
    begun = time.monotonic()
    try:
        torch: Any = importlib.import_module("torch")
        distributed: Any = importlib.import_module("torch.distributed")
        error = None
    except BaseException as raised:
        error = describe(raised)
    outcome = {"ok": error is None, "error": error, "duration_s": round(time.monotonic() - begun, 3)}
    return outcome if error else {**outcome, **reader.values("torch_import", _loaded(torch, distributed))}


def _loaded(torch: Any, distributed: Any) -> dict[str, Callable[[], Any]]:
    """What only the loaded libraries know."""
    of_cuda: dict[str, Callable[[], Any]] = {
        "nccl": lambda: ".".join(str(part) for part in torch.cuda.nccl.version()),
        # In some versions, the public functions for these two count devices first, and so call the driver.
        "cudnn": lambda: int(torch._C._cudnn.getVersionInt()),
        "architectures": lambda: torch._C._cuda_getArchFlags().split(),
    }
    if not (torch.version.cuda or torch.version.hip):
        of_cuda = dict.fromkeys(of_cuda, _no_cuda)
    return {
        **of_cuda,
        "nccl_available": lambda: bool(distributed.is_nccl_available()),
        "gloo_available": lambda: hasattr(distributed, "ProcessGroupGloo"),
        "cuda_initialized": lambda: bool(torch.cuda.is_initialized()),
    }


def _no_cuda() -> None:
    raise Unknown("this build of torch has no CUDA")
