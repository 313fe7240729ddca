"""pip builds a package whose build imports torch, in an environment of its own, or with too many compilers at once."""

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
    """A wheel of one module; the build of the package writes its own with this function too."""
    file = "%s-%s-py3-none-any.whl" % (name, version)
    info = "%s-%s.dist-info/" % (name, version)
    with zipfile.ZipFile(os.path.join(folder, file), "w") as wheel:
        wheel.writestr(name + ".py", source + "\n")
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: %s\nVersion: %s\n" % (name, version))
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: kb\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")
    return file


def prepare(ctx: Context, framework: str, requires: str) -> None:
    """The sources of a package, `kernels`, whose build imports a framework as the setup.py of flash-attn does."""
    import inspect

    sources = Path(ctx.path("sources"))
    sources.mkdir()
    (sources / "pyproject.toml").write_text(PROJECT % requires)
    (sources / "backend.py").write_text(BACKEND % (framework, framework))
    (sources / "kernel_wheel.py").write_text("import os, zipfile\n\n" + inspect.getsource(write))


def pip_wheel(ctx: Context, options: List[str]) -> str:
    """pip builds the wheel, without the network; the version that it was built for, or pip's last error."""
    pip = [sys.executable, "-m", "pip", "--isolated", "wheel", "--no-index", "--no-deps", "--no-cache-dir"]
    command = [*pip, *options, "-w", ctx.path("wheels"), ctx.path("sources")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    output = ran.stdout + ran.stderr
    if ran.returncode:
        step = re.search(r"Getting requirements to build wheel did not run.*", output)
        errors = re.findall(r"^\s*(\w+Error: .*)", output, re.MULTILINE)
        raise Symptom("%s %s" % (step.group() if step else output[-400:], errors[-1] if errors else ""))
    with zipfile.ZipFile(ctx.path("wheels/kernels-1.0-py3-none-any.whl")) as wheel:
        return wheel.read("kernels.py").decode().split("'")[1]


def build(ctx: Context, *, options: List[str]) -> None:
    """torch is installed in this interpreter, and pip runs in it."""
    import torch

    prepare(ctx, "torch", "")
    ctx.reached()
    assert pip_wheel(ctx, options) == torch.__version__


def declare(ctx: Context, *, options: List[str]) -> None:
    """The package declares its framework for the build; 1.0 is installed, and 2.0 is the newest that pip finds."""
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
    """torch's own build with ninja, of three sources; the compiler is a script that counts its copies."""
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
    """What a build of flash-attn in this interpreter would meet; imports nothing and asks nobody on the network."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return exposed("torch is not installed in %s" % sys.executable, advice="install it first, in its own command")
    try:
        text = Path(spec.origin).with_name("version.py").read_text(errors="replace")
    except OSError as error:
        return unknown("the version of torch cannot be read: %s" % error)
    version = re.search(r"__version__ = '(\d+)\.(\d+)", text)
    cuda = re.search(r"^cuda\b[^=]*= '(\d+)", text, re.MULTILINE)
    if not version or re.search(r"^hip\b[^=]*= '", text, re.MULTILINE):
        return unknown("this torch is built for ROCm, or names no version: not looked at")
    python, torch = "%d%d" % sys.version_info[:2], "%s.%s" % version.groups()
    evidence = ["torch %s, cp%s" % (torch, python)]
    if not cuda:
        return exposed(*evidence, "this torch is built without CUDA", advice="install one with CUDA first")
    try:
        extension, package = importlib.util.find_spec("flash_attn_2_cuda"), importlib.util.find_spec("flash_attn")
    except (ImportError, ValueError) as error:
        return unknown(*evidence, "whether flash-attn is installed cannot be seen: %s" % error)
    if extension and (extension.origin or "").endswith((".so", ".pyd")):
        return clear(*evidence, "flash_attn_2_cuda is installed; that it loads is not known: extension-abi-mismatch")
    if package and package.origin:  # flash-attn-4 has a folder flash_attn without __init__.py
        advice = "uninstall flash-attn; install it again, without FLASH_ATTENTION_SKIP_CUDA_BUILD"
        return exposed(*evidence, "%s is there, and flash_attn_2_cuda is not" % package.origin, advice=advice)
    if not importlib.util.find_spec("setuptools"):
        advice = "pip install setuptools wheel packaging psutil ninja"
        return exposed(*evidence, "setuptools is missing, which --no-build-isolation needs here", advice=advice)
    if re.search(r"__version__ = '[^']*(\da0|\.dev\d|\bnv\d)", text):
        told = "this torch is not a release of PyTorch's own: a wheel is chosen by its number, and then may not load"
        return unknown(*evidence, told, *memory(), advice="compile with FLASH_ATTENTION_FORCE_BUILD=TRUE and MAX_JOBS")
    abi = "TRUE" if tuple(map(int, version.groups())) >= (2, 7) else "TRUE-or-FALSE"
    machine = platform.machine()
    # 2.8.3 has wheels for torch 2.4 to 2.8 and CUDA 12; a later release asks for cu13 where torch has it.
    made = (2, 4) <= tuple(map(int, version.groups())) <= (2, 8) and cuda[1] == "12" and machine == "x86_64"
    added = ADDED.get((torch, cuda[1])) if python == "312" else None
    release = params["release"] or ("2.8.3" if made else added or "2.8.3.post2")
    values = (release, cuda[1], torch, abi, python, python, machine)
    name = "flash_attn-%s+cu%storch%scxx11abi%s-cp%s-cp%s-linux_%s.whl" % values
    told = "the wheel for this torch is %s; whether the release has it was not asked" % name
    return unknown(*evidence, told, *memory(), advice="without that file nvcc compiles: mind MAX_JOBS")


# wheels that the project added later, for Python 3.12 on x86_64 and aarch64: the torch and CUDA, and the release
ADDED = {("2.8", "12"): "2.8.1", ("2.9", "12"): "2.8.3", ("2.10", "12"): "2.8.1", ("2.9", "13"): "2.8.1"}


def memory() -> List[str]:
    """The compilers that the setup of 2.5.6 to 2.8.3 starts, at 5 GB a thread, and what this process may use."""
    limits = []
    try:
        free = int(re.findall(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[0]) / 2**20
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            root = Path("/sys/fs/cgroup") / controllers
            for folder in (root / place.lstrip("/"), *(root / place.lstrip("/")).parents):
                file = folder / ("memory.limit_in_bytes" if controllers == "memory" else "memory.max")
                limits += [int(file.read_text())] if file.is_file() and file.read_text().strip().isdigit() else []
    except (OSError, ValueError, IndexError):
        return ["how much memory a build may use cannot be read"]
    given, threads = os.environ.get("MAX_JOBS", ""), os.environ.get("NVCC_THREADS", "")
    given, threads = (value if re.fullmatch(r"[1-9]\d{0,5}", value) else "" for value in (given, threads))
    jobs = int(given) if given else max(1, min((os.cpu_count() or 1) // 2, int(free / 9)))
    gigabytes = jobs * int(threads or 4) * 5
    may_use = min([free] + [limit / 2**30 for limit in limits])
    return ["a build would run %d compilers, up to %d GB; it may use %.0f GiB" % (jobs, gigabytes, may_use)]


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


PACKAGE = "flash-attn and setuptools: a package of three files whose build imports what it is built for"
SHARED = ["--no-build-isolation"]

probe = Probe(
    check=check,
    params={"release": Param("str", "the release of flash-attn whose wheel is named, by default one for this torch")},
    experiments=(
        pair(
            "isolation",
            partial(build, options=[]),
            partial(build, options=SHARED),
            r"Getting requirements to build wheel did not run successfully.*No module named 'torch'",
            "torch is installed, and pip builds in an environment that does not have it",
            "--no-build-isolation: pip builds in the environment of the interpreter",
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
            "the framework is declared as a requirement of the build, and pip fetches its newest release for it",
            "--no-build-isolation: it is built for the release that is installed",
            PACKAGE,
            Needs(packages={"pip": ">=22.1"}),
        ),
        pair(
            "jobs",
            partial(count_jobs, max_jobs=""),
            partial(count_jobs, max_jobs="1"),
            r"MAX_JOBS=: [2-9]\d* compilers at once",
            "MAX_JOBS is not set, and ninja starts more compilers than there are cores",
            "MAX_JOBS=1: one compiler at a time",
            "nvcc, and the gigabytes that each copy of it takes: a script that waits",
            Needs(packages={"torch": ">=2.1", "setuptools": ""}, programs=("ninja",)),
        ),
    ),
)
