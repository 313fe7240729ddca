"""A framework was built against a newer libnccl.so.2, but the process loads an older library of that name.

Three small libraries stand for libtorch_cuda.so and two releases of NCCL, and the real dynamic linker decides which one
the process uses. `how` chooses the way in which the older library gets into the process.
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
LOADED = (  # the code that the entry prints
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
    """Runs code in a new Python process and returns its output. Raises its last line as `ImportError` if it fails."""
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
    """Loads the framework in a new process, as `import torch` does. The older library is on disk in both arms."""
    how = how or ctx.params["how"]
    assert how in HOWS, f"how is one of {HOWS}"
    soname = "-Wl,-soname,libnccl.so.2"
    new, old = build(NEW, ctx.dir / "wheel/libnccl.so.2", soname), build(OLD, ctx.dir / "system/libnccl.so.2", soname)
    # torch's wheels have an RPATH, searched before LD_LIBRARY_PATH; source builds and conda a RUNPATH, searched after
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
        libraries = [framework, old, framework]  # the fix: load the framework first
    ctx.reached()
    version = start(START, *libraries, **variables)
    ctx.note(nccl=int(version))
    assert version == "22703", "the framework uses NCCL " + version


def import_torch(ctx: Context, *, old_gets_in: bool) -> None:
    """Imports the real torch, perhaps after a stub of libnccl.so.2, and reads the version that the process uses."""
    old = build(OLD, ctx.dir / "old/libnccl.so.2", "-Wl,-soname,libnccl.so.2")
    required = numbers(next(iter(nccl_requirements().values())))
    ctx.reached()
    version = start(LOADED, **({"LD_PRELOAD": old} if old_gets_in else {}))
    ctx.note(nccl=int(version), torch_requires=required)
    assert int(version) == 10000 * required[0] + 100 * required[1] + required[2], version


# --- the check: which NCCL does torch require, which is installed, and which does the linker find first? ------------


def version_in(path: str) -> str:
    """The version of a libnccl file, such as `2.27.3`, from a string that NCCL has in its data for this purpose."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = data.find(b"NCCL version 2.")
            match = re.match(rb"NCCL version (\d+\.\d+\.\d+)", data[at : at + 40]) if at >= 0 else None
    except (OSError, ValueError):
        return ""
    return match.group(1).decode() if match else ""


def nccl_requirements() -> Dict[str, str]:
    """The NCCL package that the installed torch requires, such as `{"nvidia-nccl-cu12": "2.27.3"}`."""
    try:
        rules = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return {}
    result = [re.match(r"(nvidia-nccl-cu\d+)\s*\(?==\s*([\d.]+)", rule) for rule in rules]
    return {item.group(1): item.group(2) for item in result if item}


def check(params: Mapping[str, Any]) -> Finding:
    """Does the linker find another NCCL before the one that torch was built with, or do nodes have different ones?"""
    if params["log"]:
        return compare_nodes(params["log"])
    pinned = nccl_requirements()
    if not pinned:
        return unknown("the torch of this interpreter requires no NCCL package: it is a CPU build, or it contains NCCL")
    (package, version), *_ = pinned.items()
    installed = {name: found for name in NCCL_PACKAGES if (found := installed_version(name))}
    evidence = [f"torch requires {package} {version}; installed: {installed or 'none'}"]
    files = [str(metadata.distribution(name).locate_file("nvidia/nccl/lib/libnccl.so.2")) for name in installed]
    on_disk = version_in(files[0]) if files else ""
    evidence.append(f"{files[0] if files else 'its file'} is NCCL {on_disk or 'of an unknown version'}")
    advice = f"pip install --force-reinstall --no-deps {package}=={version}"
    if len(installed) > 1:
        others = [name for name in installed if name != package]
        evidence.append(
            "these packages all write nvidia/nccl/lib/libnccl.so.2, so the last one installed decides its version"
        )
        state = exposed if on_disk != version else unknown
        return state(*evidence, advice=f"pip uninstall {' '.join(others)}, then {advice}")
    if on_disk and numbers(on_disk) < numbers(version):
        return exposed(*evidence, "this NCCL is older than the one that torch was built with", advice=advice)
    if not on_disk:
        return unknown(
            *evidence, "kb cannot read the version: the file is missing, or does not contain one", advice=advice
        )
    others = other_libraries()
    evidence += others
    older = [line for line in others if "(2." in line and numbers(line.split("(")[1].split(")")[0]) < numbers(version)]
    preloaded = [line for line in others if line.startswith("LD_PRELOAD")]
    if any(line in older for line in preloaded):
        return exposed(*evidence, advice="remove libnccl from LD_PRELOAD")
    if preloaded:
        return unknown(*evidence, "torch uses the preloaded library, which must not be older than the required version")
    if older and on_disk == version:
        return unknown(
            *evidence, "this machine has an older NCCL, and kb cannot tell whether the job loads it before torch"
        )
    if on_disk != version:
        return unknown(
            *evidence,
            "this NCCL is newer than the one that torch was built with: it loads, but all nodes must have the same",
        )
    note = "this holds for this node, if nothing loads another libnccl before torch; --set log=FILE compares the nodes"
    return clear(*evidence, note)


def numbers(version: str) -> List[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def other_libraries() -> List[str]:
    """Lists other libnccl files that the linker may find first."""
    preload = [path for path in re.split(r"[ :]+", os.environ.get("LD_PRELOAD", "")) if "libnccl.so" in path]
    result = [f"LD_PRELOAD: {path} ({version_in(path) or 'version unknown'})" for path in preload]
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    places = [("LD_LIBRARY_PATH", folder) for folder in folders] + [
        ("system", "/usr/lib/*"),
        ("system", "/usr/local/lib"),
    ]
    for kind, folder in places:
        for path in glob(f"{folder}/libnccl.so.2")[:2]:
            version = version_in(path) or "version unknown"
            result.append(f"{kind}: {path} ({version}); torch's wheel ignores it, but other libraries load it")
    return result


def compare_nodes(log: Path) -> Finding:
    """Do the collected logs of one job contain more than one NCCL version?"""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return unknown(f"{log}: {error.strerror}")
    line_of_version: Dict[str, str] = {}
    hosts: Set[str] = set()
    count = 0
    for line in lines:
        match = re.search(r"NCCL version (\d+\.\d+\.\d+)", line)
        if match:
            count += 1
            line_of_version.setdefault(match.group(1), line.strip()[:120])
            host = re.search(r"([\w.-]+):\d+:\d+ \[\d+\] NCCL INFO NCCL version", line)
            hosts.update(host.groups() if host else ())
    if not line_of_version:
        return unknown(
            f"{log} has no `NCCL version` line", advice="run the job once with NCCL_DEBUG=INFO on every rank"
        )
    if len(line_of_version) > 1:
        return exposed(
            *line_of_version.values(), advice="install the same NCCL on all nodes: the same wheel, the same image"
        )
    (version,) = line_of_version
    message = f"all {count} `NCCL version` lines, from {len(hosts)} named hosts, say {version}"
    if len(hosts) < 2:
        only = "with NCCL_DEBUG=VERSION, and up to NCCL 2.21 also with INFO, only rank 0 of a group prints this line"
        return unknown(
            message, only, advice="set NCCL_DEBUG=INFO on every rank, or ask each node as the entry's Fix does"
        )
    return clear(message + "; other hosts are not covered")


UNDEFINED = r"undefined symbol: nccl[A-Z]\w+"
STANDS_FOR = "libtorch_cuda.so and two releases of libnccl.so.2, but the dynamic linker is the real one"
STUB = "the older libnccl.so.2, replaced by one function; torch and the dynamic linker are the real ones"


def with_torch(name: str, package: str) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(
            partial(import_torch, old_gets_in=True),
            raised(UNDEFINED),
            "LD_PRELOAD loads the older library before torch loads its own",
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
        "how": Param("str", f"how the older library gets into the process: {', '.join(HOWS)}", "earlier"),
        "log": Param("path", "a log of all ranks with NCCL_DEBUG=INFO, whose NCCL versions kb compares"),
    },
    check=check,
    experiments=(
        with_linker(
            "linker",
            "the process has loaded an older libnccl.so.2 before the framework, or finds it first",
            "the process loads the libnccl that the framework was built with first",
        ),
    ),
    variants=(
        with_linker(
            "overwritten",
            "an older library has overwritten the one that the framework was built with",
            "the file is the one that the framework was built with",
            "overwritten",
        ),
        with_linker(
            "newer-elsewhere",
            "the file is overwritten, and RPATH precedes LD_LIBRARY_PATH, which has a library that is new enough",
            "the file is the one that the framework was built with",
            "overwritten",
            newer_in_path=True,
        ),
        with_linker("preload", "LD_PRELOAD loads an older library first", "LD_PRELOAD is not set", "preload"),
        with_linker(
            "path",
            "LD_LIBRARY_PATH contains an older library, and precedes the framework's RUNPATH",
            "LD_LIBRARY_PATH does not contain the folder of the older library",
            "path",
        ),
        with_torch("torch-cu12", "nvidia-nccl-cu12"),
        with_torch("torch-cu13", "nvidia-nccl-cu13"),
    ),
)
