"""bitsandbytes looks for a compiled library that its package does not contain or that it cannot open."""

from __future__ import annotations

import glob
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple
from unittest.mock import patch

from kb.probe import Arm, Context, Experiment, Finding, Needs, Probe, clear, completed, exposed, raised, unknown


def set_override(override: Optional[str]) -> None:
    os.environ.pop("BNB_CUDA_VERSION", None)
    if override is not None:
        os.environ["BNB_CUDA_VERSION"] = override


class OpenedLibrary:
    """Stands for an opened CUDA library; each of its functions returns the name of its file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getattr__(self, name: str) -> Callable[..., str]:
        return lambda *_: self.path.name


def start_library(ctx: Context, *, override: Optional[str] = None, torch_cuda: str = "12.4") -> None:
    """Imports bitsandbytes with a torch that claims CUDA and a GPU, then calls a GPU function."""
    import ctypes

    import torch

    cextension = importlib.import_module("bitsandbytes.cextension")
    cuda_specs = importlib.import_module("bitsandbytes.cuda_specs")

    open_file = ctypes.cdll.LoadLibrary

    def open_without_gpu(path: str) -> Any:
        if "_cuda" in Path(path).name and Path(path).exists():
            return OpenedLibrary(Path(path))
        return open_file(str(path))

    toolkit = Path(ctx.path("cuda/lib64"))
    toolkit.mkdir(parents=True)
    (toolkit / "libcudart.so").touch()
    os.environ.update(CUDA_HOME=str(toolkit.parent), LD_LIBRARY_PATH=str(toolkit))  # people try these, without effect
    set_override(override)
    gpu: Dict[str, Any] = {"is_available": lambda: True, "device_count": lambda: 1}
    gpu["get_device_capability"] = lambda _: (9, 0)
    loads = patch.object(ctypes.cdll, "LoadLibrary", open_without_gpu)
    with patch.object(torch.version, "cuda", torch_cuda), loads, patch.multiple(torch.cuda, **gpu):
        ctx.reached()
        importlib.reload(cuda_specs)
        importlib.reload(cextension)
    name = cextension.lib.cquantize_blockwise_fp16_nf4()
    assert re.match(r"libbitsandbytes_cuda%s\d+\.so$" % torch_cuda.split(".")[0], name), name


def quantize(ctx: Context, *, override: Optional[str]) -> None:
    """Quantizes a tensor to four bits and back on a GPU."""
    import torch

    set_override(override)
    ctx.reached()
    functional = importlib.import_module("bitsandbytes.functional")

    values = torch.linspace(-1, 1, 4096, device="cuda", dtype=torch.float16)
    packed, state = functional.quantize_4bit(values, quant_type="nf4")
    assert (functional.dequantize_4bit(packed, state) - values).abs().max() < 0.25


def open_named_library(ctx: Context, *, override: Optional[str]) -> None:
    """Loads a library like a bitsandbytes that was built for CUDA 12.4 only and falls back to the CPU library."""
    import ctypes
    import shutil

    import torch

    set_override(override)
    package = Path(ctx.path("bitsandbytes"))
    package.mkdir()
    built = package / "libbitsandbytes_cuda124.so"
    shutil.copy(Path(torch.__file__).parent / "lib" / "libshm.so", built)
    wanted = package / ("libbitsandbytes_cuda%s.so" % os.environ.get("BNB_CUDA_VERSION", "124"))
    if not wanted.exists():
        wanted = package / "libbitsandbytes_cpu.so"
    ctx.reached()
    library = ctypes.cdll.LoadLibrary(str(wanted))
    assert library._name == str(built), library._name


# --- the check -----------------------------------------------------------------------------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """Compares the libraries in the installed package with the CUDA of the installed torch and with the override."""
    if sys.platform != "linux":
        return unknown("kb knows the names of the libraries for Linux only")
    folders = []
    for name in ("torch", "bitsandbytes"):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError) as error:
            return unknown("kb cannot find %s: %s" % (name, error))
        if spec is None or not spec.origin:
            return unknown("%s is not installed in this interpreter" % name)
        folders.append(Path(spec.origin).parent)
    try:
        text = (folders[0] / "version.py").read_text(errors="replace")
        installed = importlib.metadata.distribution("bitsandbytes")
        release = re.match(r"(\d+)\.(\d+)\.(\d+)", installed.metadata["Version"] or "")
        if Path(str(installed.locate_file("bitsandbytes"))).resolve() != folders[1].resolve():
            return unknown("%s shadows the installed copy, or is installed from source" % folders[1])
        files = [path.name for path in folders[1].iterdir()]
    except (OSError, ImportError, KeyError, ValueError) as error:
        return unknown("kb cannot read the installed packages: %s" % error)
    cuda = re.search(r"^cuda\b[^=\n]*= *['\"](\d+)\.(\d+)", text, re.MULTILINE)
    if cuda is None:
        advice = "on a machine with an NVIDIA GPU: `kb show torch-without-cuda`"
        return unknown("torch/version.py names no CUDA", advice=advice)
    if release is None:
        return unknown("the installed bitsandbytes has no release number")
    numbers = tuple(int(number) for number in release.groups())
    lacking = lacking_to_open(folders[0].parent, numbers, cuda.group(1))
    return judge(numbers, (int(cuda.group(1)), int(cuda.group(2))), os.environ.get("BNB_CUDA_VERSION"), files, lacking)


def lacking_to_open(site: Path, release: Tuple[int, ...], cuda_major: str) -> List[str]:
    """What this machine lacks to open a CUDA library of bitsandbytes, as far as kb can see."""
    lacking = []
    for needed in ("cudart", "cublas", "cusparse")[: 2 if release >= (0, 50) else 3]:
        library = "lib%s.so.%s" % (needed, cuda_major)
        if not any(path for place in ("torch/lib", "nvidia/*/lib") for path in site.glob("%s/%s*" % (place, library))):
            lacking.append("kb finds no %s in the packages of torch and NVIDIA" % library)
    if not glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg"):
        lacking.append("this machine has no device file of an NVIDIA GPU")
    if re.match(r"\s*(-1|none|nodevfiles)?\s*(,|$)", os.environ.get("CUDA_VISIBLE_DEVICES", "0"), re.IGNORECASE):
        lacking.append("CUDA_VISIBLE_DEVICES hides the GPUs")
    try:
        glibc = re.search(r"(\d+)\.(\d+)$", os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (OSError, ValueError):
        glibc = None
    if glibc is None or (release[:2] == (0, 45) and (int(glibc.group(1)), int(glibc.group(2))) < (2, 34)):
        lacking.append("all libraries need glibc, and those of 0.45 for CUDA 12.6 and newer need glibc 2.34")
    return lacking


def judge(
    release: Tuple[int, ...], cuda: Tuple[int, int], override: Optional[str], files: List[str], lacking: List[str]
) -> Finding:
    matches = [re.fullmatch(r"libbitsandbytes_cuda(\d\d)(\d+)\.so", name) for name in files]
    versions = sorted((int(match.group(1)), int(match.group(2))) for match in matches if match)
    has = "bitsandbytes %s has libraries for CUDA " % ".".join(map(str, release))
    has += ", ".join("%d.%d" % version for version in versions) or "none"
    wants = "torch is built for CUDA %d.%d" % cuda
    if release < (0, 40, 1):
        return unknown(wants, has, "this release uses the CUDA version of a libcudart that it finds, not torch's")
    if override is not None and (override or release >= (0, 50)):
        setting = "BNB_CUDA_VERSION=%s" % override
        if release >= (0, 50) and not override.isdigit():
            return exposed(setting, "this release accepts digits only", advice="unset BNB_CUDA_VERSION")
        if not {"libbitsandbytes_cuda%s%s.so" % (override, kind) for kind in ("", "_nocublaslt")} & set(files):
            return exposed(setting, has, advice="unset BNB_CUDA_VERSION")
        if override != "%d%d" % cuda or release < (0, 45):
            untried = "the package has that library, but kb did not try whether it works with the GPU and the runtime"
            return unknown(setting, wants, untried)
    if release < (0, 45) and (cuda in versions) != ("libbitsandbytes_cuda%d%d_nocublaslt.so" % cuda in files):
        return unknown(wants, has, "GPUs below compute capability 7.5 need another file, ..._nocublaslt.so")
    same_major = [version for version in versions if version[0] == cuda[0]]
    if cuda not in versions and not (release >= (0, 50) and same_major):
        return exposed(wants, has, advice="install a release of bitsandbytes that has a library for this CUDA")
    if lacking:
        return unknown(wants, has, *lacking, advice="run `python -m bitsandbytes` on the machine that trains")
    return clear(wants, has, "kb did not try to open the library; `python -m bitsandbytes` does")


# --- the experiments -----------------------------------------------------------------------------------------------

ABSENT = r"CUDA binary (not )?found at \S+libbitsandbytes_cuda\d+\.so|libbitsandbytes_cpu\.so: undefined symbol: cq"
NO_GPU = "a torch for CUDA with a GPU; here torch claims both, and an object takes the place of the opened library"
FROM_SOURCE = "bitsandbytes 0.43.1 to 0.45.5 built from source for CUDA 12.4; here a library of torch has that name"


def experiment(
    name: str, job: Callable[..., None], arms: Tuple[Any, Any], pattern: str, stands_for: str = "", **more: Any
) -> Experiment:
    fidelity = "stand-in" if stands_for else "hardware"
    because, fix = REASONS.get(name, REASONS["override"])
    return Experiment(
        name=name,
        control=Arm(partial(job, **arms[0]), raised(pattern), because, fidelity, stands_for),
        treatment=Arm(partial(job, **arms[1]), completed(), fix, fidelity, stands_for),
        world_size=1,
        deadline_s=60,
        expected_s=(2.0, 2.0),
        **more,
    )


BY_TORCH = "BNB_CUDA_VERSION is not set, so bitsandbytes uses the library for torch's CUDA"
REASONS = {
    "override": ("BNB_CUDA_VERSION names a library that the package does not contain", BY_TORCH),
    "release": (
        "this release of bitsandbytes has no library for the CUDA of this torch",
        "this release of bitsandbytes has a library for the CUDA of this torch",
    ),
    "empty": ("BNB_CUDA_VERSION is set to an empty string, which this release rejects", BY_TORCH),
}
UNSET = ({"override": "127"}, {"override": None})
EMPTY = ({"override": ""}, {"override": None})
CUDA = ({"torch_cuda": "10.2"}, {"torch_cuda": "12.4"})
SOURCE = r"libbitsandbytes_cpu\.so: cannot open shared object file"
DIGITS = r"BNB_CUDA_VERSION='': value must be digits only"
LIBRARY = Needs(packages={"torch": ">=2.2", "bitsandbytes": ">=0.43.1"})
NEWER = Needs(packages={"torch": ">=2.4", "bitsandbytes": ">=0.50"})
ON_GPU = Needs(gpus=1, packages=LIBRARY.packages)

probe = Probe(
    check=check,
    experiments=(
        experiment("gpu", quantize, UNSET, ABSENT + "|has no attribute 'cquantize", backend="nccl", needs=ON_GPU),
        experiment("loader", open_named_library, UNSET, SOURCE, FROM_SOURCE),
    ),
    variants=(
        experiment("override", start_library, UNSET, ABSENT, NO_GPU, needs=LIBRARY),
        experiment("release", start_library, CUDA, ABSENT, NO_GPU, needs=LIBRARY),
        experiment("empty", start_library, EMPTY, DIGITS, NO_GPU, needs=NEWER),
    ),
)
