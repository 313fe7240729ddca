"""A framework that was built against a newer libnccl.so.2 meets an older one of the same name.

Three small libraries stand for libtorch_cuda.so and two releases of NCCL; the dynamic linker that decides between them
is the real one. `how` chooses the way in which the older one gets in.
"""

import mmap
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from glob import glob
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List, Mapping, Set

from kb.nccl import NCCL_PACKAGES
from kb.packages import version as installed_version
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)

HOWS = ("earlier", "preload", "path", "overwritten")
OLD = "int ncclGetVersion(int *v) { *v = 22105; return 0; }"
NEW = OLD.replace("22105", "22703") + " int ncclCommWindowRegister(void) { return 0; }"
FRAMEWORK = """
int ncclGetVersion(int *v); int ncclCommWindowRegister(void);
int version(void) { int v = 0; ncclGetVersion(&v); return v + ncclCommWindowRegister(); }
"""
START = "import ctypes, sys; print([ctypes.CDLL(path) for path in sys.argv[1:]][-1].version())"
LOADED = (  # as the entry prints it
    "import ctypes, torch; v = ctypes.c_int(); "
    "ctypes.CDLL('libnccl.so.2').ncclGetVersion(ctypes.byref(v)); print(v.value)"
)


def build(source: str, to: Path, *options: str) -> str:
    to.parent.mkdir(exist_ok=True)
    code = Path("source.c")
    code.write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(to), str(code), *options], check=True, timeout=20)
    return str(to)


def start(*command: str, **variables: str) -> str:
    """What a fresh Python prints, as `import torch` in a new process; its ImportError, if it has one."""
    environment = {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "LD_LIBRARY_PATH")}
    ran = subprocess.run(
        [sys.executable, "-c", *command],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if ran.returncode:
        raise ImportError(ran.stderr.strip().splitlines()[-1])
    return ran.stdout.strip()


def start_framework(ctx: Context, *, old_gets_in: bool, how: str = "", newer_in_path: bool = False) -> None:
    """Load the framework as `import torch` does, in a fresh process; the older library is on disk in both arms."""
    how = how or ctx.params["how"]
    assert how in HOWS, f"how is one of {HOWS}"
    soname = "-Wl,-soname,libnccl.so.2"
    new, old = build(NEW, ctx.dir / "wheel/libnccl.so.2", soname), build(OLD, ctx.dir / "system/libnccl.so.2", soname)
    # as torch's wheels are linked: RPATH, searched before LD_LIBRARY_PATH. Source builds and conda: RUNPATH, after it
    linked = "--enable-new-dtags" if how == "path" else "--disable-new-dtags"
    framework = build(
        FRAMEWORK, ctx.dir / "torch/libtorch_cuda.so", new, f"-Wl,{linked}", "-Wl,-rpath,$ORIGIN/../wheel"
    )
    variables: Dict[str, str] = {}
    if newer_in_path:
        variables["LD_LIBRARY_PATH"] = str(Path(build(NEW, ctx.dir / "apt/libnccl.so.2", soname)).parent)
    libraries = [framework]
    if old_gets_in:
        variables.update({"preload": {"LD_PRELOAD": old}, "path": {"LD_LIBRARY_PATH": "system"}}.get(how, {}))
        libraries = [old, framework] if how == "earlier" else libraries
        if how == "overwritten":
            shutil.copy(old, new)
    elif how == "earlier":
        libraries = [framework, old, framework]  # the fix: the framework first
    ctx.reached()
    version = start(START, *libraries, **variables)
    ctx.note(nccl=int(version))
    assert version == "22703", "the framework runs with NCCL " + version


def import_torch(ctx: Context, *, old_gets_in: bool) -> None:
    """The real torch, with an empty libnccl.so.2 in front of its own; it says which one it has loaded."""
    old = build(OLD, ctx.dir / "old/libnccl.so.2", "-Wl,-soname,libnccl.so.2")
    required = numbers(next(iter(dictated().values())))
    ctx.reached()
    version = start(LOADED, **({"LD_PRELOAD": old} if old_gets_in else {}))
    ctx.note(nccl=int(version), torch_requires=required)
    assert int(version) == 10000 * required[0] + 100 * required[1] + required[2], version


# --- the check: which libnccl is pinned, installed, on the disk, and in front of it ---------------------------------


def version_in(path: str) -> str:
    """`2.27.3` of a libnccl file: NCCL keeps the string in its data for this purpose."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = data.find(b"NCCL version 2.")
            match = re.match(rb"NCCL version (\d+\.\d+\.\d+)", data[at : at + 40]) if at >= 0 else None
    except (OSError, ValueError):
        return ""
    return match.group(1).decode() if match else ""


def dictated() -> Dict[str, str]:
    """What the installed torch requires: `{"nvidia-nccl-cu12": "2.27.3"}`."""
    try:
        rules = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return {}
    result = [re.match(r"(nvidia-nccl-cu\d+)\s*\(?==\s*([\d.]+)", rule) for rule in rules]
    return {item.group(1): item.group(2) for item in result if item}


def check(params: Mapping[str, Any]) -> Finding:
    """Does another NCCL come before the one that torch was built with, here or on another node?"""
    if params["log"]:
        return compare_nodes(params["log"])
    pinned = dictated()
    if not pinned:
        return unknown(
            "the torch of this interpreter requires no NCCL package: it is a CPU build, or holds NCCL itself"
        )
    (package, version), *_ = pinned.items()
    installed = {name: found for name in NCCL_PACKAGES if (found := installed_version(name))}
    evidence = [f"torch requires {package} {version}; installed: {installed or 'none'}"]
    files = [str(metadata.distribution(name).locate_file("nvidia/nccl/lib/libnccl.so.2")) for name in installed]
    on_disk = version_in(files[0]) if files else ""
    evidence.append(f"{files[0] if files else 'its file'} is NCCL {on_disk or 'of unknown version'}")
    advice = f"pip install --force-reinstall --no-deps {package}=={version}"
    if len(installed) > 1:
        others = [name for name in installed if name != package]
        evidence.append("all of these write the same file, nvidia/nccl/lib/libnccl.so.2: the last one installed won")
        state = exposed if on_disk != version else unknown
        return state(*evidence, advice=f"pip uninstall {' '.join(others)}, then {advice}")
    if on_disk and numbers(on_disk) < numbers(version):
        return exposed(*evidence, "older than what torch was built with", advice=advice)
    if not on_disk:
        return unknown(*evidence, "it is not there, or does not say its version", advice=advice)
    ahead = in_front()
    evidence += ahead
    older = [line for line in ahead if "(2." in line and numbers(line.split("(")[1].split(")")[0]) < numbers(version)]
    preloaded = [line for line in ahead if line.startswith("LD_PRELOAD")]
    if any(line in older for line in preloaded):
        return exposed(*evidence, advice="take libnccl out of LD_PRELOAD")
    if preloaded:
        return unknown(*evidence, "what is preloaded is what torch gets: it must not be older than required")
    if older and on_disk == version:
        return unknown(
            *evidence, "an older one is on this machine: what loads it before torch cannot be seen from here"
        )
    if on_disk != version:
        return unknown(*evidence, "newer than what torch was built with: it loads; all nodes must have the same")
    note = "of this node, if nothing loads a libnccl of its own before torch; --set log=FILE compares the nodes"
    return clear(*evidence, note)


def numbers(version: str) -> List[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def in_front() -> List[str]:
    """Other libnccl files that the linker may find first."""
    preload = [path for path in re.split(r"[ :]+", os.environ.get("LD_PRELOAD", "")) if "libnccl.so" in path]
    result = [f"LD_PRELOAD: {path} ({version_in(path) or 'version unknown'})" for path in preload]
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    places = [("LD_LIBRARY_PATH", folder) for folder in folders] + [
        ("system", "/usr/lib/*"),
        ("system", "/usr/local/lib"),
    ]
    for kind, folder in places:
        for path in glob(f"{folder}/libnccl.so.2")[:2]:
            result.append(
                f"{kind}: {path} ({version_in(path) or 'version unknown'}); torch's wheel passes it by, others load it"
            )
    return result


def compare_nodes(log: Path) -> Finding:
    """More than one NCCL in the collected logs of one job?"""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return unknown(f"{log}: {error.strerror}")
    seen: Dict[str, str] = {}
    hosts: Set[str] = set()
    count = 0
    for line in lines:
        match = re.search(r"NCCL version (\d+\.\d+\.\d+)", line)
        if match:
            count += 1
            seen.setdefault(match.group(1), line.strip()[:120])
            host = re.search(r"([\w.-]+):\d+:\d+ \[\d+\] NCCL INFO NCCL version", line)
            hosts.update(host.groups() if host else ())
    if not seen:
        return unknown(f"no `NCCL version` line in {log}", advice="run once with NCCL_DEBUG=INFO on every rank")
    if len(seen) > 1:
        return exposed(*seen.values(), advice="install one NCCL on all nodes: the same wheel, the same image")
    said = f"{count} `NCCL version` lines of {len(hosts)} named hosts, all {', '.join(seen)}; others are not covered"
    if len(hosts) < 2:
        only = "with VERSION, and up to NCCL 2.21 with INFO as well, only rank 0 of a group prints one"
        return unknown(said, only, advice="INFO on every rank, or ask each node as the entry's Fix does")
    return clear(said)


UNDEFINED = r"undefined symbol: nccl[A-Z]\w+"
STANDS_FOR = "libtorch_cuda.so and two releases of libnccl.so.2; the dynamic linker is the real one"
STUB = "the older libnccl.so.2, which holds one function; torch and the dynamic linker are the real ones"


def with_torch(name: str, package: str) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(
            partial(import_torch, old_gets_in=True),
            raised(UNDEFINED),
            "the older library is preloaded",
            "stand-in",
            STUB,
        ),
        treatment=Arm(
            partial(import_torch, old_gets_in=False), completed(), "torch finds its own library", "stand-in", STUB
        ),
        world_size=1,
        needs=Needs(packages={package: ""}, programs=("gcc",), memory_mib=1500),
        deadline_s=120,
        expected_s=(3, 5),
    )


def with_linker(name: str, because: str, fix: str, how: str = "", newer_in_path: bool = False) -> Experiment:
    job = partial(start_framework, how=how, newer_in_path=newer_in_path)
    return Experiment(
        name=name,
        control=Arm(partial(job, old_gets_in=True), raised(UNDEFINED), because, "stand-in", STANDS_FOR),
        treatment=Arm(partial(job, old_gets_in=False), completed(), fix, "stand-in", STANDS_FOR),
        world_size=1,
        needs=Needs(packages={}, programs=("gcc",), memory_mib=128),
        deadline_s=60,
        expected_s=(0.6, 0.6),
    )


probe = Probe(
    params={
        "how": Param("str", f"how the older library gets in: {', '.join(HOWS)}", "earlier"),
        "log": Param("path", "log of all ranks, run with NCCL_DEBUG=INFO: are the NCCL versions equal?"),
    },
    check=check,
    experiments=(
        with_linker(
            "linker",
            "an older library of the same name is in the process before the framework, or in its place",
            "the first libnccl that the framework meets is the one it was built with",
        ),
    ),
    variants=(
        with_linker(
            "overwritten",
            "an older library was written over the one that the framework was built with",
            "the file is again the one that the framework was built with",
            "overwritten",
        ),
        with_linker(
            "newer-elsewhere",
            "the file is overwritten, and a library that is new enough lies in LD_LIBRARY_PATH, which RPATH precedes",
            "the file is again the one that the framework was built with",
            "overwritten",
            newer_in_path=True,
        ),
        with_linker("preload", "an older library is preloaded", "nothing is preloaded", "preload"),
        with_linker(
            "path",
            "LD_LIBRARY_PATH leads to an older library, and the framework has a RUNPATH",
            "the folder is taken out of LD_LIBRARY_PATH",
            "path",
        ),
        with_torch("torch-cu12", "nvidia-nccl-cu12"),
        with_torch("torch-cu13", "nvidia-nccl-cu13"),
    ),
)
