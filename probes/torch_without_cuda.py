"""A script asks a torch that was built without CUDA for a GPU, and installing torch again does not replace it."""

from __future__ import annotations

import glob
import importlib.util
import re
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, List, Mapping, Tuple

from kb.cpu_arms import pip_in
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Probe,
    Symptom,
    Unavailable,
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

HIDDEN = "a CPU build; here the job hides the function by which torch sees that it has CUDA"


def use_gpu(ctx: Context, *, hide: bool = False, device_by_build: bool) -> None:
    """The first lines of a training script, which moves its model to a GPU, or to a GPU only if there is one."""
    import torch

    if hide and hasattr(torch._C, "_cuda_getDeviceCount"):
        del torch._C._cuda_getDeviceCount
    if hasattr(torch._C, "_cuda_getDeviceCount"):
        raise Unavailable("torch %s is built for CUDA %s" % (torch.__version__, torch.version.cuda))
    ctx.reached()
    if device_by_build:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        device = torch.device("cuda")
    weights = torch.nn.Linear(4, 4).to(device).weight
    assert weights.device.type == "cpu", weights.device


def start_rank(ctx: Context, *, device_by_build: bool) -> None:
    """The first line of a rank, which calls set_device, or calls it only if there is a GPU."""
    import torch

    if hasattr(torch._C, "_cuda_getDeviceCount"):
        raise Unavailable("torch %s is built for CUDA %s" % (torch.__version__, torch.version.cuda))
    ctx.reached()
    if torch.cuda.is_available() or not device_by_build:
        torch.cuda.set_device(ctx.rank)


def install_again(
    ctx: Context, *, requirement: str = "kbtorch==2.13.0", options: Tuple[str, ...] = (), index: str = "cuda"
) -> None:
    """pip installs a package that has three builds of one version, as torch has; the CPU build is installed already."""
    import venv

    installed = wheel(Path(ctx.path("cpu")), "2.13.0+cpu")
    wheel(Path(ctx.path("cuda")), "2.13.0+cu130")
    wheel(Path(ctx.path("pypi")), "2.13.0")
    venv.create(ctx.path("env"), symlinks=True)
    [packages] = Path(ctx.path("env")).glob("lib/python*/site-packages")
    with zipfile.ZipFile(installed) as archive:
        archive.extractall(packages)  # installs it like pip, a hundred times faster
    ctx.reached()
    install = [*pip_in(ctx.path("env/bin/python")), "install", "--no-index", "--no-deps"]
    printed = run([*install, *options, "--find-links", ctx.path(index), requirement])
    [info] = packages.glob("kbtorch-*.dist-info")
    version = info.name[len("kbtorch-") : -len(".dist-info")]
    if version != "2.13.0+cu130":
        raise Symptom("%s is installed as before: %s" % (version, printed.strip().splitlines()[-1]))


def wheel(folder: Path, version: str) -> str:
    folder.mkdir()
    info = "kbtorch-%s.dist-info" % version
    path = folder / ("kbtorch-%s-py3-none-any.whl" % version)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("kbtorch.py", "")
        archive.writestr(info + "/METADATA", "Metadata-Version: 2.1\nName: kbtorch\nVersion: %s\n" % version)
        archive.writestr(
            info + "/WHEEL", "Wheel-Version: 1.0\nGenerator: kb\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(
            info + "/RECORD", "kbtorch.py,,\n%s/METADATA,,\n%s/WHEEL,,\n%s/RECORD,,\n" % (info, info, info)
        )
    return str(path)


def run(command: List[str]) -> str:
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


# --- the check -----------------------------------------------------------------------------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """Reads torch/version.py of this environment without importing torch, and looks for the device files of GPUs."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError) as error:
        return unknown("kb cannot find torch: %s" % error)
    if spec is None or not spec.origin:
        return unknown("torch is not installed for %s" % sys.executable)
    try:
        text = Path(spec.origin).with_name("version.py").read_text(errors="replace")
    except OSError as error:
        return unknown("kb cannot read torch/version.py: %s" % error)
    values = dict(re.findall(r"^(__version__|cuda|hip|xpu)\b[^=\n]*= *['\"]?([^'\"\n]*)['\"]?$", text, re.MULTILINE))
    # on WSL, /dev/dxg may be a GPU of any vendor, and libcuda shows that it is NVIDIA's
    on_wsl = glob.glob("/dev/dxg") if glob.glob("/usr/lib/wsl/lib/libcuda.so*") else []
    return judge(values, glob.glob("/dev/nvidia[0-9]*") + on_wsl + glob.glob("/dev/nvhost-gpu"))


def judge(values: Mapping[str, str], devices: List[str]) -> Finding:
    build = "torch %s, CUDA %s" % (values.get("__version__"), values.get("cuda"))
    if "cuda" not in values:
        return unknown(build, "torch/version.py does not say for which CUDA torch was built")
    if re.match(r"\d+\.\d+", values["cuda"]):
        return clear(build, "torch was built for CUDA; kb did not check whether it finds a GPU")
    if values["cuda"] != "None":
        return unknown(build, "torch/version.py does not name a release of CUDA")
    other = [name for name in ("hip", "xpu") if values.get(name, "None") != "None"]
    if other:
        return unknown(build, "torch was built for another accelerator: " + ", ".join(other))
    if devices:
        version = values.get("__version__", "").split("+")[0]
        advice = "install the CUDA build of the same version: torch==%s+cu..." % version
        if "/dev/nvhost-gpu" in devices:
            advice = "install NVIDIA's build of torch for the JetPack of this Jetson"
        return exposed(build, "this machine has GPU devices: " + ", ".join(sorted(devices)[:4]), advice=advice)
    advice = "install a CUDA build if you want to use this environment on a machine with GPUs"
    return unknown(build, "this machine has no NVIDIA device file", advice=advice)


def on_build(name: str, fidelity: str, hide: bool, stands_for: str = "") -> Experiment:
    job = partial(use_gpu, hide=hide)
    no_help = {"CUDA_HOME": "/usr/local/cuda", "FORCE_CUDA": "1"}  # people try these variables, which have no effect
    return Experiment(
        name=name,
        control=Arm(
            partial(job, device_by_build=False),
            raised(r"Torch not compiled with CUDA enabled"),
            "the script moves its model to a GPU, but this torch was built without CUDA",
            fidelity,
            stands_for,
            no_help,
        ),
        treatment=Arm(
            partial(job, device_by_build=True),
            completed(),
            "the script uses a GPU only if torch.cuda.is_available()",
            fidelity,
            stands_for,
            no_help,
        ),
        world_size=1,
        expected_s=(1.0, 1.0),
    )


def reinstall(
    name: str, because: str, fix: str, fails: Mapping[str, Any] = MappingProxyType({}), **works: Any
) -> Experiment:
    packages = "torch; here pip installs an empty package with wheels of the same versions"
    return Experiment(
        name=name,
        control=Arm(
            partial(install_again, **fails),
            symptom(r"2\.13\.0\+cpu is installed as before: Requirement already satisfied"),
            because,
            "stand-in",
            packages,
        ),
        treatment=Arm(partial(install_again, **works), completed(), fix, "stand-in", packages),
        world_size=1,
        needs=Needs(packages={}),
        deadline_s=60,
        expected_s=(3.0, 3.0),
    )


SATISFIED = "the installed 2.13.0+cpu satisfies ==2.13.0, so pip installs nothing"
NEWER = "with -U pip installs 2.13.0+cu130, because it sorts as newer than 2.13.0+cpu"

probe = Probe(
    check=check,
    experiments=(
        on_build("cpu-build", "cpu", hide=False),
        on_build("hidden-cuda", "stand-in", hide=True, stands_for=HIDDEN),
    ),
    variants=(
        Experiment(
            name="set-device",
            control=Arm(
                partial(start_rank, device_by_build=False),
                raised(r"module 'torch._C' has no attribute '_cuda_setDevice'"),
                "the rank calls set_device, but this torch was built without CUDA",
                "cpu",
            ),
            treatment=Arm(
                partial(start_rank, device_by_build=True),
                completed(),
                "the rank calls set_device only if torch.cuda.is_available()",
                "cpu",
            ),
            world_size=1,
            expected_s=(1.0, 1.0),
        ),
        reinstall(
            "install-again",
            SATISFIED,
            "the requested version 2.13.0+cu130 includes the build, so pip replaces the CPU build",
            requirement="kbtorch==2.13.0+cu130",
        ),
        reinstall("upgrade", SATISFIED, NEWER, options=("-U",)),
        reinstall(
            "upgrade-from-pypi",
            "with -U pip installs nothing, because 2.13.0 from PyPI sorts as older than 2.13.0+cpu",
            NEWER,
            {"options": ("-U",), "index": "pypi"},
            options=("-U",),
        ),
    ),
)
