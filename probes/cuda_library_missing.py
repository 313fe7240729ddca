"""A CUDA library that another one needs is not where the dynamic linker looks, or an older one is found first."""

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

LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"  # LD_LIBRARY_PATH is read once, when a process starts


def lay_out(ctx: Context) -> Tuple[Path, Path, Path]:
    """As in site-packages/nvidia: cusparse needs nvjitlink and looks beside itself for it; and a system's older one."""
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


def start(library: Path, path: str = "") -> None:
    """Load it in a new process, under this LD_LIBRARY_PATH."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    if path:
        environment["LD_LIBRARY_PATH"] = path
    command = [sys.executable, "-c", LOAD, str(library)]
    ran = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        raise OSError(ran.stderr.strip().splitlines()[-1].replace("OSError: ", "", 1))


def load(ctx: Context, *, finds_own: bool, why: str = "") -> None:
    """The library that is needed is there, and nothing before it; or not."""
    why = why or ctx.params["why"]
    wheel, system, cusparse = lay_out(ctx)
    path = str(system) if why == "shadowed" and not finds_own else ""
    if not finds_own and why != "shadowed":
        shutil.rmtree(wheel.parent)
    if not finds_own and why == "linked":  # to the older one, under the name that is wanted
        wheel.mkdir(parents=True)
        (wheel / "libnvJitLink.so.12").symlink_to(system / "libnvJitLink.so.12")
    ctx.reached()
    start(cusparse, path)


def put_in_front(ctx: Context, *, own_first: bool) -> None:
    """LD_LIBRARY_PATH has to stay, for something else."""
    wheel, system, cusparse = lay_out(ctx)
    ctx.reached()
    start(cusparse, f"{wheel}:{system}" if own_first else str(system))


def join_folders(ctx: Context, *, linked: bool) -> None:
    """One package lies in lib, the one that needs it in lib64."""
    _, _, cusparse = lay_out(ctx)
    moved = Path(ctx.path("lib64/nvidia/cusparse"))
    moved.parent.mkdir(parents=True)
    shutil.move(str(cusparse.parent.parent), str(moved))
    ctx.reached()
    if linked:
        (moved.parent / "nvjitlink").symlink_to(Path(ctx.path("lib/nvidia/nvjitlink")))
    start(moved / "lib" / cusparse.name)


def compile_library(ctx: Context, code: str, target: Path, *options: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source = Path(ctx.path("source.c"))
    source.write_text(code)
    named = ["-Wl,-soname," + target.name, "-Wl,--version-script=" + ctx.path("versions")]
    subprocess.run(["cc", "-shared", "-fPIC", str(source), *options, *named, "-o", str(target)], check=True)


def preload(ctx: Context, *, finds_own: bool) -> None:
    """torch's own search for its CUDA libraries, in a site-packages that has no cublas, or any file of that name."""
    import torch

    folder = Path(ctx.path("site-packages/nvidia/cublas/lib"))
    folder.mkdir(parents=True)
    if finds_own:
        shutil.copy(Path(torch.__file__).parent / "lib" / "libshm.so", folder / "libcublas.so.12")
    sys.path[:] = [ctx.path("site-packages")]
    search = getattr(torch, "_preload_cuda_lib", None) or torch._preload_cuda_deps  # the latter until 2.9
    ctx.reached()
    search("cublas", "libcublas.so.*[0-9]")


def check(params: Mapping[str, Any]) -> Finding:
    """Are the CUDA packages that torch asks for installed, and does LD_LIBRARY_PATH put others before them?"""
    if params["library"]:
        return linked(params["library"])
    pinned = required()
    if not pinned:
        return unknown(
            "torch is not installed here, or brings no CUDA libraries as packages (CPU, conda or system build)",
            advice="--set library=path/to/a.so",
        )
    lacking = [
        f"{name} {version} is not installed, and torch needs it"
        for name, version in pinned.items()
        if not installed(name)
    ]
    others = [
        f"{name} is {installed(name)}, torch was built for {version}"
        for name, version in pinned.items()
        if version and installed(name) and not is_of(installed(name), version)
    ]
    if lacking:
        return exposed(
            *lacking[:8],
            *others[:4],
            advice="install what this torch requires, at the versions that it pins; torch itself stays",
        )
    gone = [f"{name} is installed, and its file {file} is not there" for name in pinned for file in absent(name)[:1]]
    if gone:
        return exposed(*gone[:8], *others[:4], advice="install these packages again: pip install --force-reinstall")
    first = shadowing()
    if first and not loads_its_own():
        return exposed(*first[:8], *others[:4], advice="start the job without LD_LIBRARY_PATH")
    apart = elsewhere(pinned)
    if apart:
        return unknown(
            *apart[:4],
            *others[:4],
            "torch before 2.11 fails like this where the linker finds another libcudart; that shows when it runs",
            advice="make the environment anew with python -m venv",
        )
    if first or others:
        return unknown(
            *first[:8],
            *others[:4],
            "this torch loads some or all of its own libraries first; whether that is enough shows only when it runs",
        )
    foreign = parts_of_system()
    if foreign:
        return unknown(*foreign[:4], "cuDNN opens its parts by name; which it takes shows when it runs")
    return clear(f"all {len(pinned)} CUDA packages of torch and their files are there, and LD_LIBRARY_PATH has none")


def linked(library: Path) -> Finding:
    try:
        ran = subprocess.run(["ldd", str(library)], capture_output=True, text=True, timeout=3, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return unknown(f"ldd cannot be run: {error}")
    if "=>" not in ran.stdout:
        return unknown(f"ldd says nothing of {library}: {(ran.stderr or ran.stdout).strip()[:200]}")
    lacking = [line.strip() for line in ran.stdout.splitlines() if "not found" in line]
    own = of_packages()
    before = [line for line in lacking if line.startswith(("libc10", "libtorch")) or line.split(" ")[0] in own]
    if len(before) < len(lacking):
        return exposed(*[line for line in lacking if line not in before][:8], advice="install what brings this file")
    if lacking:
        return unknown(*lacking[:8], "torch and its packages have these, and may load them before this file is loaded")
    return clear(f"ldd finds everything that {library} names; what it loads later by itself is not seen")


def required() -> Dict[str, str]:
    """The nvidia packages that the installed torch requires on this platform, with the pinned version.

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
    """Libraries that an installed package lists and that are not on the disk."""
    try:
        files = [file for file in importlib.metadata.files(package) or () if ".so" in file.name]
    except importlib.metadata.PackageNotFoundError:
        return []
    return [str(file) for file in files if not Path(str(file.locate())).exists()]


def elsewhere(packages: Iterable[str]) -> List[str]:
    """Packages that do not lie beside torch, so that its RPATH does not lead to them: `lib` and `lib64`."""
    beside = folder_of("torch")
    folders = {name: folder_of(name) for name in packages}
    return [
        f"{name} lies in {folder}, torch in {beside}" for name, folder in folders.items() if folder and folder != beside
    ]


def folder_of(package: str) -> str:
    try:
        return os.path.realpath(str(importlib.metadata.distribution(package).locate_file("")))
    except importlib.metadata.PackageNotFoundError:
        return ""


def shadowing() -> List[str]:
    """Libraries of the nvidia packages that some folder of LD_LIBRARY_PATH has as well, with other content."""
    own = of_packages()
    result = []
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        for name, file in own.items() if folder else ():
            other = Path(folder, name)
            if other.exists() and not other.samefile(file) and other.stat().st_size != file.stat().st_size:
                result.append(f"{other} is found before {file}")
    return result


def of_packages() -> Dict[str, Path]:
    return {file.name: file for place in sys.path for file in Path(place or ".").glob("nvidia/*/lib/*.so.*")}


def parts_of_system() -> List[str]:
    """Parts of cuDNN that the linker would find in the system, and that the installed package does not have."""
    own = {name for name in of_packages() if name.startswith("libcudnn")}
    releases = {name.rsplit(".so.", 1)[1] for name in own}
    if not own:
        return []
    try:
        ran = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, check=True, timeout=2)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"ldconfig does not say which cuDNN the system has: {error}"]
    found = re.findall(r"(libcudnn\w*\.so\.([.\d]+)) .*=> (\S+)", ran.stdout.decode(errors="replace"))
    return [
        f"{path} is in the system, and the cuDNN of the packages has no {name}"
        for name, release, path in found
        if release in releases and name not in own
    ]


def loads_its_own() -> bool:
    """Newer torch opens its CUDA libraries by path before the linker can find others."""
    spec = importlib.util.find_spec("torch")
    return bool(spec and spec.origin and "/proc/self/maps" in Path(spec.origin).read_text())


HOW = "two small C libraries under the names and in the folders of the CUDA wheels"

MISSING = r"libnvJitLink\.so\.12: cannot open shared object file"
UNDEFINED = r"undefined symbol: __nvJitLink"
OWN = "the library of the same release is there and nothing comes before it"


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
        "why": Param("str", "missing: the library is not there; shadowed: LD_LIBRARY_PATH has an older one", "missing"),
        "library": Param("path", "a library to ask about with ldd, for instance the one that the message names"),
    },
    experiments=(
        with_linker(
            "linker",
            partial(load, finds_own=False),
            partial(load, finds_own=True),
            f"{MISSING}|{UNDEFINED}",
            "the library is not there, or with why=shadowed an older one is found first",
        ),
        Experiment(
            name="preload",
            control=Arm(
                partial(preload, finds_own=False),
                expect=raised(r"libcublas\.so\.\*\[0-9\] not found in the system path"),
                because="site-packages/nvidia has no cublas",
                fidelity="stand-in",
                stands_for="an installation of torch for CUDA without one of its packages; the search is torch's own",
            ),
            treatment=Arm(
                partial(preload, finds_own=True),
                expect=completed(),
                because="there is a library of that name, which can be loaded",
                fidelity="stand-in",
                stands_for="the package nvidia-cublas: a copy of torch's libshm.so under its name",
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
            "LD_LIBRARY_PATH has an older one, which is found before that of the wheel",
            "LD_LIBRARY_PATH is not set",
        ),
        with_linker(
            "own-first",
            partial(put_in_front, own_first=False),
            partial(put_in_front, own_first=True),
            UNDEFINED,
            "LD_LIBRARY_PATH has an older one, which is found before that of the wheel",
            "the folder of the wheel comes first in LD_LIBRARY_PATH",
        ),
        with_linker(
            "lib64",
            partial(join_folders, linked=False),
            partial(join_folders, linked=True),
            MISSING,
            "the package that is needed lies in lib, the one that needs it in lib64",
            "a link in lib64 leads to the package in lib",
        ),
        with_linker(
            "linked",
            partial(load, finds_own=False, why="linked"),
            partial(load, finds_own=True, why="linked"),
            UNDEFINED,
            "a link with the name that is missing leads to an older release",
        ),
    ),
)
