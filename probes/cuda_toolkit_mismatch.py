"""A CUDA extension is built with an nvcc of another major release than torch was built with."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional, Tuple

from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown


def create_toolkit(ctx: Context, release: str) -> str:
    """Creates a folder for CUDA_HOME, with an nvcc that answers --version."""
    nvcc = Path(ctx.path(f"cuda-{release}/bin/nvcc"))
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.0'\n")
    nvcc.chmod(0o755)
    return ctx.path(f"cuda-{release}")


def check_toolkit(ctx: Context, built_with: str, checker: str) -> Optional[str]:
    """Runs the check that `checker` makes before a build, on the toolkit that torch's own search finds."""
    from unittest.mock import patch

    import torch
    from torch.utils import cpp_extension

    home: Optional[str] = cpp_extension._find_cuda_home()
    with patch.object(torch.version, "cuda", built_with), patch.object(cpp_extension, "CUDA_HOME", home):
        if checker == "deepspeed":
            builder = importlib.import_module("deepspeed.ops.op_builder.builder")
            ctx.reached()
            assert builder.assert_no_cuda_mismatch("fused_adam")
        elif checker == "folders":
            ctx.reached()
            assert cpp_extension._join_cuda_home("include") == f"{home}/include"  # CUDAExtension begins with this call
        else:
            compiler = torch.torch_version.TorchVersion("9.4.0")
            ctx.reached()
            cpp_extension._check_cuda_version("g++", compiler)  # BuildExtension makes this call before it compiles
    ctx.note(toolkit=home, torch_built_with=built_with)
    return home


def releases(ctx: Context) -> Tuple[str, str]:
    """Returns the CUDA release that torch was built with, and one of another major release."""
    import torch

    built_with = torch.version.cuda or "12.8"
    return built_with, ctx.params["toolkit"] or ("12.8" if built_with.startswith("11.") else "11.8")


def build(ctx: Context, *, cuda_home_of_same_major: bool, checker: str = "torch", linked: bool = False) -> None:
    """Creates two toolkits, sets CUDA_HOME to one of them, or to a link to it, and runs the check before a build."""
    built_with, other = releases(ctx)
    homes = {release: create_toolkit(ctx, release) for release in {built_with, other}}
    home = homes[built_with if cuda_home_of_same_major else other]
    if linked:
        os.symlink(home, ctx.path("cuda"))
        home = ctx.path("cuda")
    os.environ["CUDA_HOME"] = home
    assert check_toolkit(ctx, built_with, checker) == home


def find_toolkit(ctx: Context, *, cuda_home: bool) -> None:
    """Looks for a toolkit without an nvcc on PATH or in /usr/local/cuda, with or without CUDA_HOME."""
    from unittest.mock import patch

    built_with, _ = releases(ctx)
    home = create_toolkit(ctx, built_with)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        os.environ.pop(name, None)
    if cuda_home:
        os.environ["CUDA_HOME"] = home
    exists = os.path.exists
    os.environ["PATH"] = ctx.path("bin")
    with patch("os.path.exists", lambda path: path != "/usr/local/cuda" and exists(path)):
        check_toolkit(ctx, built_with, "folders")


def check(_: Mapping[str, Any]) -> Finding:
    """Is the nvcc that torch would find of the CUDA release that torch was built with?"""
    built_with = cuda_of_torch()
    if built_with is None:
        return unknown("torch is not installed in this interpreter, or kb cannot read its version file")
    if not built_with:
        return unknown("this torch was built without CUDA, so it builds no CUDA extensions")
    home, source = cuda_home()
    if not home:
        return unknown(
            f"torch was built with CUDA {built_with}; kb found no toolkit (CUDA_HOME, nvcc on PATH, /usr/local/cuda)",
            advice="to compile extensions, use an image with `devel` in its name or install conda's cuda-toolkit",
        )
    release = release_of(home)
    has_nvcc = os.access(home / "bin" / "nvcc", os.X_OK)
    nvcc = f"nvcc is {release}" if release else "nvcc names no release" if has_nvcc else "there is no nvcc"
    evidence = [f"torch was built with CUDA {built_with}", f"{source} leads to {home}, where {nvcc}"]
    if not release and not has_nvcc and source.startswith("CUDA"):
        return exposed(*evidence, advice=f"unset {source}, or set it to a toolkit {built_with} that has bin/nvcc")
    if not release:
        return unknown(*evidence, advice="this is enough to train; install a toolkit with nvcc to build extensions")
    return judge_release(built_with, home, release, evidence)


def judge_release(built_with: str, home: Path, release: str, evidence: List[str]) -> Finding:
    """Do the release and the headers of this toolkit fit a torch that was built with CUDA `built_with`?"""
    if release.split(".")[0] != built_with.split(".")[0]:
        advice = f"install a toolkit {built_with} alongside and set CUDA_HOME, or a torch built for {release}"
        return exposed(*evidence, "the major releases differ, so torch refuses a setup.py build", advice=advice)
    missing = [name for name in HEADERS if not any(os.path.exists(home / place / name) for place in FOLDERS)]
    if "cuda_runtime.h" in missing:
        message = f"{home} has no cuda_runtime.h: its nvcc is a link or wrapper, and the headers are elsewhere"
        return exposed(*evidence, message, advice="set CUDA_HOME to the folder that has bin, include and lib64")
    if release != built_with:
        message = "the minor releases differ: torch warns and builds, apex refuses, DeepSpeed has a list"
        return unknown(
            *evidence, message, advice=f"to be sure, use a toolkit {built_with}, which suits every extension"
        )
    if missing:
        return unknown(*evidence, f"{home} lacks headers that torch's own headers include: {', '.join(missing)}")
    return clear(*evidence)


HEADERS = ("cuda_runtime.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h")
FOLDERS = ("include", "targets/x86_64-linux/include", "targets/sbsa-linux/include")


def cuda_of_torch() -> Optional[str]:
    """Reads `torch.version.cuda` without importing torch: "" for a build without CUDA, None if unknown."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"^cuda\b.*= (?:None|['\"]([\d.]+)['\"])", text, re.MULTILINE)
    return match and (match.group(1) or "")


def cuda_home() -> Tuple[Optional[Path], str]:
    """Returns the toolkit that torch would find, and what led there."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            return Path(os.environ[name]), name
    nvcc = shutil.which("nvcc")
    if nvcc:
        return Path(nvcc).parent.parent, "nvcc on PATH"
    default = Path("/usr/local/cuda")
    return (default, "the default") if os.path.exists(default) else (None, "")


def release_of(home: Path) -> str:
    command = [str(home / "bin" / "nvcc"), "--version"]
    try:
        message = subprocess.run(command, capture_output=True, timeout=3, check=False).stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"release (\d+\.\d+)", message)
    return match.group(1) if match else ""


TORCH = Needs(packages={"torch": ">=2.1", "setuptools": ""})
MISMATCH = r"The detected CUDA version \(.{1,8}\) mismatches the version that was used to compile"
SCRIPT = "an installed CUDA toolkit; a script prints nvcc's version line"


def experiment(
    name: str,
    control: Callable[[Context], None],
    treatment: Callable[[Context], None],
    because: str = "CUDA_HOME names a toolkit of another major release than torch was built with",
    fix: str = "CUDA_HOME names a toolkit of the release that torch was built with",
    expect: str = MISMATCH,
    needs: Needs = TORCH,
    stands_for: str = SCRIPT,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(control, raised(expect), because, "stand-in", stands_for),
        treatment=Arm(treatment, completed(), fix, "stand-in", stands_for),
        world_size=1,
        needs=needs,
        deadline_s=60,
        expected_s=(0.4, 0.4),
    )


def by_home(name: str, **settings: Any) -> Tuple[str, Callable[[Context], None], Callable[[Context], None]]:
    other, same = (partial(build, cuda_home_of_same_major=same, **settings) for same in (False, True))
    return name, other, same


probe = Probe(
    check=check,
    params={
        "toolkit": Param(
            "str", "release that nvcc reports in the control arm; set your own to see whether torch accepts it"
        )
    },
    experiments=(experiment(*by_home("torch")),),
    variants=(
        experiment(
            "no-toolkit",
            partial(find_toolkit, cuda_home=False),
            partial(find_toolkit, cuda_home=True),
            because="PATH has no nvcc, /usr/local/cuda does not exist, and CUDA_HOME is not set",
            fix="CUDA_HOME names a toolkit",
            expect="CUDA_HOME environment variable is not set",
        ),
        experiment(
            *by_home("link", linked=True),
            because="CUDA_HOME is a link to a toolkit of another major release, which its name does not show",
            fix="CUDA_HOME is a link to a toolkit of the release that torch was built with",
        ),
        experiment(
            *by_home("deepspeed", checker="deepspeed"),
            expect=r"Installed CUDA version \S+ does not match the version torch was compiled with",
            needs=Needs(packages={"torch": ">=2.1", "setuptools": "", "deepspeed": ">=0.9"}),
        ),
    ),
)
