"""The dynamic linker does not find a CUDA library that another one needs, or finds an older one first."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Tuple

from kb.packages import version as installed
from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown

LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"  # the linker reads LD_LIBRARY_PATH once, when a process starts


def lay_out(ctx: Context) -> Tuple[Path, Path, Path]:
    """Builds cusparse, which looks for nvjitlink in a folder next to its own, and an older nvjitlink elsewhere."""
    wheel, system = Path(ctx.path("lib/nvidia/nvjitlink/lib")), Path(ctx.path("cuda-12.1/lib64"))
    Path(ctx.path("versions")).write_text("libnvJitLink.so.12 { global: *; };")
    compile_library(ctx, "int __nvJitLinkComplete_12_1(void) { return 1; }", system / "libnvJitLink.so.12")
    compile_library(ctx, "int __nvJitLinkComplete_12_4(void) { return 4; }", wheel / "libnvJitLink.so.12")
    cusparse = Path(ctx.path("lib/nvidia/cusparse/lib/libcusparse.so.12"))
    needs = "extern int __nvJitLinkComplete_12_4(void); int f(void) { return __nvJitLinkComplete_12_4(); }"
    options = [
        str(wheel / "libnvJitLink.so.12"),
        "-Wl,--enable-new-dtags,-z,now",
        "-Wl,-rpath,$ORIGIN/../../nvjitlink/lib",
    ]
    compile_library(ctx, needs, cusparse, *options)
    return wheel, system, cusparse


def load_in_new_process(library: Path, path: str = "") -> None:
    """Loads the library in a new process with this LD_LIBRARY_PATH."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    if path:
        environment["LD_LIBRARY_PATH"] = path
    command = [sys.executable, "-c", LOAD, str(library)]
    ran = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        raise OSError(ran.stderr.strip().splitlines()[-1].replace("OSError: ", "", 1))


def load(ctx: Context, *, finds_own: bool, why: str = "") -> None:
    """Loads cusparse while nvjitlink is in its place (`finds_own`), or is missing, shadowed or replaced by a link."""
    why = why or ctx.params["why"]
    wheel, system, cusparse = lay_out(ctx)
    path = str(system) if why == "shadowed" and not finds_own else ""
    if not finds_own and why != "shadowed":
        shutil.rmtree(wheel.parent)
    if not finds_own and why == "linked":  # a link from the missing name to the older release
        wheel.mkdir(parents=True)
        (wheel / "libnvJitLink.so.12").symlink_to(system / "libnvJitLink.so.12")
    ctx.reached()
    load_in_new_process(cusparse, path)


def put_in_front(ctx: Context, *, own_first: bool) -> None:
    """Loads cusparse with an LD_LIBRARY_PATH that something else needs, so that it cannot be unset."""
    wheel, system, cusparse = lay_out(ctx)
    ctx.reached()
    load_in_new_process(cusparse, f"{wheel}:{system}" if own_first else str(system))


def join_folders(ctx: Context, *, linked: bool) -> None:
    """Loads cusparse from lib64 while nvjitlink is in lib, with or without a link in lib64."""
    _, _, cusparse = lay_out(ctx)
    moved = Path(ctx.path("lib64/nvidia/cusparse"))
    moved.parent.mkdir(parents=True)
    shutil.move(str(cusparse.parent.parent), str(moved))
    ctx.reached()
    if linked:
        (moved.parent / "nvjitlink").symlink_to(Path(ctx.path("lib/nvidia/nvjitlink")))
    load_in_new_process(moved / "lib" / cusparse.name)


def compile_library(ctx: Context, code: str, target: Path, *options: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source = Path(ctx.path("source.c"))
    source.write_text(code)
    named = ["-Wl,-soname," + target.name, "-Wl,--version-script=" + ctx.path("versions")]
    subprocess.run(["cc", "-shared", "-fPIC", str(source), *options, *named, "-o", str(target)], check=True)


def preload(ctx: Context, *, finds_own: bool) -> None:
    """Runs torch's own search for cuBLAS in a site-packages folder that lacks it, or has a library of that name."""
    import torch

    folder = Path(ctx.path("site-packages/nvidia/cublas/lib"))
    folder.mkdir(parents=True)
    if finds_own:
        shutil.copy(Path(torch.__file__).parent / "lib" / "libshm.so", folder / "libcublas.so.12")
    sys.path[:] = [ctx.path("site-packages")]
    search = getattr(torch, "_preload_cuda_lib", None) or torch._preload_cuda_deps  # the latter before torch 2.10
    ctx.reached()
    search("cublas", "libcublas.so.*[0-9]")


def check(params: Mapping[str, Any]) -> Finding:
    """Are the CUDA packages that torch requires installed, and does LD_LIBRARY_PATH put others before them?"""
    if params["library"]:
        return check_library(params["library"])
    pinned = required()
    if not pinned:
        return unknown(
            "torch is not installed here, or does not get its CUDA libraries from packages (CPU, conda, system build)",
            advice="--set library=path/to/library.so",
        )
    lacking = [
        f"torch needs {name} {version}, which is not installed"
        for name, version in pinned.items()
        if not installed(name)
    ]
    others = [
        f"{name} is {installed(name)}, but torch was built for {version}"
        for name, version in pinned.items()
        if version and installed(name) and not is_of(installed(name), version)
    ]
    if lacking:
        return exposed(
            *lacking[:8],
            *others[:4],
            advice="install the packages that this torch requires, at the versions that it pins; leave torch as it is",
        )
    gone = [f"{name} is installed, but its file {file} is missing" for name in pinned for file in absent(name)[:1]]
    if gone:
        return exposed(*gone[:8], *others[:4], advice="reinstall these packages: pip install --force-reinstall")
    return check_order(pinned, others)


def check_order(pinned: Mapping[str, str], others: List[str]) -> Finding:
    """Does the linker find other libraries before those of the packages, which are all there?"""
    first = shadowing()
    if first and not loads_its_own():
        return exposed(*first[:8], *others[:4], advice="start the job without LD_LIBRARY_PATH")
    apart = elsewhere(pinned)
    if apart:
        return unknown(
            *apart[:4],
            *others[:4],
            "torch before 2.11 fails if the linker finds another libcudart, which shows only when torch is imported",
            advice="create the environment again with python -m venv",
        )
    if first or others:
        return unknown(
            *first[:8],
            *others[:4],
            "this torch loads some or all of its own libraries first; kb cannot tell whether that is enough",
        )
    foreign = parts_of_system()
    if foreign:
        return unknown(*foreign[:4], "cuDNN opens its parts by name; kb cannot tell which ones it will take")
    return clear(
        f"all {len(pinned)} CUDA packages of torch have their files, and LD_LIBRARY_PATH puts no other before them"
    )


def check_library(library: Path) -> Finding:
    """Does the linker find everything that this library needs?"""
    try:
        ran = subprocess.run(["ldd", str(library)], capture_output=True, text=True, timeout=3, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return unknown(f"kb cannot run ldd: {error}")
    if "=>" not in ran.stdout:
        return unknown(f"ldd lists no libraries for {library}: {(ran.stderr or ran.stdout).strip()[:200]}")
    lacking = [line.strip() for line in ran.stdout.splitlines() if "not found" in line]
    packaged = packaged_libraries()
    of_torch = [line for line in lacking if line.startswith(("libc10", "libtorch")) or line.split(" ")[0] in packaged]
    if len(of_torch) < len(lacking):
        return exposed(
            *[line for line in lacking if line not in of_torch][:8],
            advice="install the package that contains this file",
        )
    if lacking:
        return unknown(*lacking[:8], "torch and its packages contain these, and may load them before this file")
    return clear(
        f"ldd finds every library that {library} names; kb does not see libraries that it loads later by itself"
    )


def required() -> Dict[str, str]:
    """Returns the nvidia packages that the installed torch requires on this platform, with their pinned versions.

    torch for CUDA 13 names most of them as extras of cuda-toolkit, which pins `==13.2.86.*`.
    """
    lines = requirements("torch")
    for line in lines:
        match = re.match(r"cuda-toolkit\[([\w,-]+)\]", line)
        wanted = set(match.group(1).split(",")) if match else set()
        lines = lines + [
            other.split(";")[0]
            for other in requirements("cuda-toolkit")
            if wanted & {*re.findall(r"'([\w-]+)'", other)}
        ]
    machine = os.uname().machine
    system = f'platform_system == "{platform.system()}"'
    here = [
        line
        for line in lines
        if "extra ==" not in line
        and ("platform_machine" not in line or machine in line)
        and ("platform_system" not in line or system in line.replace("'", '"'))
    ]
    result = (re.match(r"(nvidia-[\w.-]+)\s*(?:\(?==([^);\s]+))?", line) for line in here)
    return {match.group(1): match.group(2) or "" for match in result if match}


def requirements(package: str) -> List[str]:
    try:
        return importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def is_of(version: str, pin: str) -> bool:
    return f"{version}.".startswith(pin[:-1]) if pin.endswith(".*") else version == pin


def absent(package: str) -> List[str]:
    """Returns the libraries that an installed package lists but that are not on the disk."""
    try:
        files = [file for file in importlib.metadata.files(package) or () if ".so" in file.name]
    except importlib.metadata.PackageNotFoundError:
        return []
    return [str(file) for file in files if not Path(str(file.locate())).exists()]


def elsewhere(packages: Iterable[str]) -> List[str]:
    """Describes packages in another folder than torch (`lib` and `lib64`), to which its RPATH does not lead."""
    beside = folder_of("torch")
    folders = {name: folder_of(name) for name in packages}
    return [
        f"{name} is in {folder}, but torch is in {beside}"
        for name, folder in folders.items()
        if folder and folder != beside
    ]


def folder_of(package: str) -> str:
    try:
        return os.path.realpath(str(importlib.metadata.distribution(package).locate_file("")))
    except importlib.metadata.PackageNotFoundError:
        return ""


def shadowing() -> List[str]:
    """Describes libraries of the nvidia packages that LD_LIBRARY_PATH also contains, with other content."""
    own = packaged_libraries()
    result = []
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        for name, file in own.items() if folder else ():
            other = Path(folder, name)
            if other.exists() and not other.samefile(file) and other.stat().st_size != file.stat().st_size:
                result.append(f"the linker finds {other} before {file}")
    return result


def packaged_libraries() -> Dict[str, Path]:
    return {file.name: file for place in sys.path for file in Path(place or ".").glob("nvidia/*/lib/*.so.*")}


def parts_of_system() -> List[str]:
    """Describes parts of cuDNN that the linker finds in the system and that the installed package lacks."""
    own = {name for name in packaged_libraries() if name.startswith("libcudnn")}
    releases = {name.rsplit(".so.", 1)[1] for name in own}
    if not own:
        return []
    try:
        ran = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, check=True, timeout=2)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"kb cannot tell which cuDNN the system has, because ldconfig failed: {error}"]
    found = re.findall(r"(libcudnn\w*\.so\.([.\d]+)) .*=> (\S+)", ran.stdout.decode(errors="replace"))
    return [
        f"the system has {path}, but the installed cuDNN package has no {name}"
        for name, release, path in found
        if release in releases and name not in own
    ]


def loads_its_own() -> bool:
    """Newer torch opens its CUDA libraries by path before the linker can find others."""
    spec = importlib.util.find_spec("torch")
    return bool(spec and spec.origin and "/proc/self/maps" in Path(spec.origin).read_text())


HOW = "the CUDA wheels; two small C libraries have their names and folders"

MISSING = r"libnvJitLink\.so\.12: cannot open shared object file"
UNDEFINED = r"undefined symbol: __nvJitLink"
OWN = "the linker finds the library of the right release first"


def with_linker(
    name: str,
    control: Callable[[Context], None],
    treatment: Callable[[Context], None],
    pattern: str,
    because: str,
    fix: str = OWN,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(control, raised(pattern), because, "stand-in", HOW),
        treatment=Arm(treatment, completed(), fix, "stand-in", HOW),
        world_size=1,
        needs=Needs(packages={}, programs=("cc",)),
        deadline_s=60,
        expected_s=(1.0, 1.0),
    )


probe = Probe(
    check=check,
    params={
        "why": Param(
            "str", "missing: the library does not exist; shadowed: LD_LIBRARY_PATH contains an older one", "missing"
        ),
        "library": Param("path", "a library to inspect with ldd, for instance the one that the error message names"),
    },
    experiments=(
        with_linker(
            "linker",
            partial(load, finds_own=False),
            partial(load, finds_own=True),
            f"{MISSING}|{UNDEFINED}",
            "the library is missing, or with why=shadowed the linker finds an older one first",
        ),
        Experiment(
            name="preload",
            control=Arm(
                partial(preload, finds_own=False),
                expect=raised(r"libcublas\.so\.\*\[0-9\] not found in the system path"),
                because="site-packages/nvidia has no cublas",
                fidelity="stand-in",
                stands_for="a CUDA build of torch without one of its packages; the search is torch's own code",
            ),
            treatment=Arm(
                partial(preload, finds_own=True),
                expect=completed(),
                because="site-packages/nvidia has a library with the name of cublas that loads",
                fidelity="stand-in",
                stands_for="the package nvidia-cublas; a copy of torch's libshm.so has its name",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1"}),
            deadline_s=30,
            expected_s=(0.2, 0.2),
        ),
    ),
    variants=(
        with_linker(
            "shadowed",
            partial(load, finds_own=False, why="shadowed"),
            partial(load, finds_own=True, why="shadowed"),
            UNDEFINED,
            "LD_LIBRARY_PATH contains an older library, which the linker finds before the one in the wheel",
            "LD_LIBRARY_PATH is not set",
        ),
        with_linker(
            "own-first",
            partial(put_in_front, own_first=False),
            partial(put_in_front, own_first=True),
            UNDEFINED,
            "LD_LIBRARY_PATH contains an older library, which the linker finds before the one in the wheel",
            "the folder of the wheel comes first in LD_LIBRARY_PATH",
        ),
        with_linker(
            "lib64",
            partial(join_folders, linked=False),
            partial(join_folders, linked=True),
            MISSING,
            "cusparse is in lib64, and nvjitlink, which it needs, is in lib",
            "a link in lib64 leads to nvjitlink in lib",
        ),
        with_linker(
            "linked",
            partial(load, finds_own=False, why="linked"),
            partial(load, finds_own=True, why="linked"),
            UNDEFINED,
            "a link with the missing name leads to an older release, which lacks a symbol",
        ),
    ),
)
