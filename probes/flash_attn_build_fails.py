"""pip builds a package whose build imports torch in an environment without torch, or with too many compilers."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, List, Mapping

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)

PROJECT = '[build-system]\nrequires = [%s]\nbuild-backend = "backend"\nbackend-path = ["."]\n'
BACKEND = """
import kernel_wheel

def get_requires_for_build_wheel(config_settings=None):
    import %s
    return []

def build_wheel(folder, config_settings=None, metadata_directory=None):
    import %s as framework
    return kernel_wheel.write(folder, "kernels", "BUILT_FOR = %%r" %% framework.__version__, "1.0")
"""


def write(folder: str, name: str, source: str, version: str) -> str:
    """Writes a wheel of one module and returns its file name; the build of the package uses this function too."""
    file = "%s-%s-py3-none-any.whl" % (name, version)
    info = "%s-%s.dist-info/" % (name, version)
    with zipfile.ZipFile(os.path.join(folder, file), "w") as wheel:
        wheel.writestr(name + ".py", source + "\n")
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: %s\nVersion: %s\n" % (name, version))
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: kb\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")
    return file


def prepare(ctx: Context, framework: str, requires: str) -> None:
    """Writes the sources of a package, `kernels`, whose build imports a framework, as flash-attn's setup.py does."""
    import inspect

    sources = Path(ctx.path("sources"))
    sources.mkdir()
    (sources / "pyproject.toml").write_text(PROJECT % requires)
    (sources / "backend.py").write_text(BACKEND % (framework, framework))
    (sources / "kernel_wheel.py").write_text("import os, zipfile\n\n" + inspect.getsource(write))


def pip_wheel(ctx: Context, options: List[str]) -> str:
    """Builds the wheel with pip, without the network, and returns the version that it was built for.

    Raises Symptom with pip's last error if the build fails.
    """
    pip = [sys.executable, "-m", "pip", "--isolated", "wheel", "--no-index", "--no-deps", "--no-cache-dir"]
    command = [*pip, *options, "-w", ctx.path("wheels"), ctx.path("sources")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    output = process.stdout + process.stderr
    if process.returncode:
        step = re.search(r"Getting requirements to build wheel did not run.*", output)
        errors = re.findall(r"^\s*(\w+Error: .*)", output, re.MULTILINE)
        raise Symptom("%s %s" % (step.group() if step else output[-400:], errors[-1] if errors else ""))
    with zipfile.ZipFile(ctx.path("wheels/kernels-1.0-py3-none-any.whl")) as wheel:
        return wheel.read("kernels.py").decode().split("'")[1]


def build(ctx: Context, *, options: List[str]) -> None:
    """Builds the package with the pip of this interpreter, which has torch."""
    import torch

    prepare(ctx, "torch", "")
    ctx.reached()
    assert pip_wheel(ctx, options) == torch.__version__


def declare(ctx: Context, *, options: List[str]) -> None:
    """Builds a package that declares its framework as a build requirement; 1.0 is installed, and pip finds 2.0."""
    prepare(ctx, "framework", '"framework"')
    for version in ("1.0", "2.0"):
        Path(ctx.path(version)).mkdir()
        write(ctx.path(version), "framework", "__version__ = %r" % version, version)
    with zipfile.ZipFile(ctx.path("1.0/framework-1.0-py3-none-any.whl")) as wheel:
        wheel.extractall(ctx.path("installed"))
    os.environ["PYTHONPATH"] = ctx.path("installed") + os.pathsep + os.environ.get("PYTHONPATH", "")
    ctx.reached()
    built_for = pip_wheel(ctx, ["--find-links", ctx.path("2.0"), *options])
    if built_for != "1.0":
        raise Symptom("built for framework %s, and 1.0 is installed" % built_for)


COMPILER = """#!/bin/sh
out=
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
[ "$out" ] || exit 0
mkdir "FOLDER/running/$$"; sleep 0.4; ls "FOLDER/running" | wc -l >> "FOLDER/counts"; rmdir "FOLDER/running/$$"
: > "$out"
"""


def count_jobs(ctx: Context, *, max_jobs: str) -> None:
    """Lets torch build three sources with ninja; the compiler is a script that counts its running copies."""
    from unittest.mock import patch

    import torch
    from torch.utils import cpp_extension

    compiler, sources = Path(ctx.path("c++")), [ctx.path("kernel%d.cpp" % number) for number in range(3)]
    compiler.write_text(COMPILER.replace("FOLDER", str(ctx.dir)))
    compiler.chmod(0o755)
    for source in sources:
        Path(source).touch()
    os.makedirs(ctx.path("running"))
    os.makedirs(ctx.path("build"))
    os.environ.update(MAX_JOBS=max_jobs, CXX=str(compiler))
    ctx.reached()
    with patch.object(torch.ops, "load_library"):
        cpp_extension.load("kernels", sources, build_directory=ctx.path("build"), is_python_module=False)
    most = max(map(int, Path(ctx.path("counts")).read_text().split()))
    if most > 1:
        raise Symptom("MAX_JOBS=%s: %d compilers at once" % (max_jobs, most))


def check(params: Mapping[str, Any]) -> Finding:
    """What would a build of flash-attn in this interpreter meet? Imports nothing and does not use the network."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return exposed(
            "torch is not installed in %s" % sys.executable, advice="install torch first, with a separate command"
        )
    try:
        text = Path(spec.origin).with_name("version.py").read_text(errors="replace")
    except OSError as error:
        return unknown("kb cannot read the version of torch: %s" % error)
    version = re.search(r"__version__ = '(\d+)\.(\d+)", text)
    cuda = re.search(r"^cuda\b[^=]*= '(\d+)", text, re.MULTILINE)
    if not version or re.search(r"^hip\b[^=]*= '", text, re.MULTILINE):
        return unknown("this torch is built for ROCm or shows no version, so kb cannot name a wheel")
    python, torch = "%d%d" % sys.version_info[:2], "%s.%s" % version.groups()
    evidence = ["torch %s, cp%s" % (torch, python)]
    if not cuda:
        return exposed(*evidence, "this torch is built without CUDA", advice="install a torch with CUDA first")
    try:
        extension, package = importlib.util.find_spec("flash_attn_2_cuda"), importlib.util.find_spec("flash_attn")
    except (ImportError, ValueError) as error:
        return unknown(*evidence, "kb cannot see whether flash-attn is installed: %s" % error)
    if extension and (extension.origin or "").endswith((".so", ".pyd")):
        return clear(*evidence, "flash_attn_2_cuda is installed; if it does not load, see extension-abi-mismatch")
    if package and package.origin:  # flash-attn-4 has a folder flash_attn without __init__.py
        advice = "uninstall flash-attn and install it again, without FLASH_ATTENTION_SKIP_CUDA_BUILD"
        return exposed(*evidence, "%s exists, but flash_attn_2_cuda does not" % package.origin, advice=advice)
    if not importlib.util.find_spec("setuptools"):
        advice = "run pip install setuptools wheel packaging psutil ninja"
        return exposed(*evidence, "--no-build-isolation needs setuptools, which is missing here", advice=advice)
    if re.search(r"__version__ = '[^']*(\da0|\.dev\d|\bnv\d)", text):
        why = "this torch is no official release: setup.py selects a wheel by its number, and that may not load"
        advice = "compile with FLASH_ATTENTION_FORCE_BUILD=TRUE and MAX_JOBS"
        return unknown(*evidence, why, *build_memory(), advice=advice)
    name = wheel_name(version, cuda[1], python, params["release"])
    why = "the wheel for this torch is %s; kb did not ask whether the release has it" % name
    advice = "if that wheel does not exist, nvcc compiles: set MAX_JOBS"
    if tuple(map(int, version.groups())) >= (2, 14):
        advice = "if that wheel does not exist, change -std=c++17 in setup.py to c++20, which torch 2.14 requires"
    return unknown(*evidence, why, *build_memory(), advice=advice)


def wheel_name(version: "re.Match[str]", cuda: str, python: str, release: Any) -> str:
    """Names the wheel for torch `version` (groups: major, minor), the major number of CUDA, and CPython (312)."""
    torch = "%s.%s" % version.groups()
    abi = "TRUE" if tuple(map(int, version.groups())) >= (2, 7) else "TRUE-or-FALSE"
    machine = platform.machine()
    # 2.8.3 has wheels for torch 2.4 to 2.8 and CUDA 12; a later release requests cu13 for a torch with CUDA 13.
    is_released = (2, 4) <= tuple(map(int, version.groups())) <= (2, 8) and cuda == "12" and machine == "x86_64"
    later = ADDED.get((torch, cuda)) if python == "312" else None
    release = release or ("2.8.3" if is_released else later or "2.8.3.post2")
    values = (release, cuda, torch, abi, python, python, machine)
    return "flash_attn-%s+cu%storch%scxx11abi%s-cp%s-cp%s-linux_%s.whl" % values


# wheels that the project added later for Python 3.12 on x86_64 and aarch64: torch and CUDA, and the release
ADDED = {("2.8", "12"): "2.8.1", ("2.9", "12"): "2.8.3", ("2.10", "12"): "2.8.1", ("2.9", "13"): "2.8.1"}


def build_memory() -> List[str]:
    """How many compilers does the setup.py of 2.5.6 to 2.8.3 start, at 5 GB a thread, and how much memory is free?"""
    limits = []
    try:
        free = int(re.findall(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[0]) / 2**20
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            root = Path("/sys/fs/cgroup") / controllers
            for folder in (root / group.lstrip("/"), *(root / group.lstrip("/")).parents):
                file = folder / ("memory.limit_in_bytes" if controllers == "memory" else "memory.max")
                limits += [int(file.read_text())] if file.is_file() and file.read_text().strip().isdigit() else []
    except (OSError, ValueError, IndexError):
        return ["kb cannot read how much memory a build may use"]
    max_jobs, threads = os.environ.get("MAX_JOBS", ""), os.environ.get("NVCC_THREADS", "")
    max_jobs, threads = (value if re.fullmatch(r"[1-9]\d{0,5}", value) else "" for value in (max_jobs, threads))
    jobs = int(max_jobs) if max_jobs else max(1, min((os.cpu_count() or 1) // 2, int(free / 9)))
    gigabytes = jobs * int(threads or 4) * 5
    room = min([free] + [limit / 2**30 for limit in limits])
    return ["a build would run %d compilers, which take up to %d GB; it may use %.0f GiB" % (jobs, gigabytes, room)]


def pair(
    name: str,
    fails: Callable[[Context], None],
    works: Callable[[Context], None],
    pattern: str,
    because: str,
    fix: str,
    stands_for: str,
    needs: Needs,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(fails, symptom(pattern), because, "stand-in", stands_for),
        treatment=Arm(works, completed(), fix, "stand-in", stands_for),
        world_size=1,
        needs=needs,
        deadline_s=60,
        expected_s=(2.0, 3.0),
    )


PACKAGE = "flash-attn and setuptools; the probe builds a package of three files whose build imports its framework"
SHARED = ["--no-build-isolation"]

probe = Probe(
    check=check,
    params={
        "release": Param("str", "the release of flash-attn whose wheel the check names; default: one for this torch")
    },
    experiments=(
        pair(
            "isolation",
            partial(build, options=[]),
            partial(build, options=SHARED),
            r"Getting requirements to build wheel did not run successfully.*No module named 'torch'",
            "torch is installed, but pip builds in an environment without torch",
            "with --no-build-isolation, pip builds in the environment that has torch",
            PACKAGE,
            Needs(packages={"torch": ">=2.1", "pip": ">=22.1"}),
        ),
    ),
    variants=(
        pair(
            "declared",
            partial(declare, options=[]),
            partial(declare, options=SHARED),
            r"built for framework 2\.0, and 1\.0 is installed",
            "the package declares its framework as a build requirement, and pip fetches the newest release",
            "with --no-build-isolation, pip builds the package for the installed release",
            PACKAGE,
            Needs(packages={"pip": ">=22.1"}),
        ),
        pair(
            "jobs",
            partial(count_jobs, max_jobs=""),
            partial(count_jobs, max_jobs="1"),
            r"MAX_JOBS=: [2-9]\d* compilers at once",
            "MAX_JOBS is not set, so ninja starts more compilers than there are cores",
            "with MAX_JOBS=1, ninja runs one compiler at a time",
            "nvcc, of which each copy takes gigabytes; the probe runs a script that waits",
            Needs(packages={"torch": ">=2.1", "setuptools": ""}, programs=("ninja",)),
        ),
    ),
)
