"""Runs the CUDA runtime of this environment on a driver of an older major release.

The runtime is the real one of the installed wheel. Only the driver is a stub, built with gcc, that reports a CUDA
version and no device. So a machine without a GPU shows the version check, and nothing touches a real driver.
"""

import json
import os
import re
import subprocess
import sys
from functools import partial
from glob import glob
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Unavailable,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)

STUB = """
int cuDriverGetVersion(int *version) { *version = %d; return 0; }
int cuInit(unsigned flags) { return %d; }
"""
NO_DEVICE, COMPAT_NOT_SUPPORTED = 100, 804  # what cuInit returns; the stub has no device

ASK_RUNTIME = """
import ctypes, json, sys
runtime, count, driver = ctypes.CDLL(sys.argv[1]), ctypes.c_int(), ctypes.c_int()
runtime.cudaGetErrorString.restype = ctypes.c_char_p
code = runtime.cudaGetDeviceCount(ctypes.byref(count))
runtime.cudaDriverGetVersion(ctypes.byref(driver))
print(json.dumps({"code": code, "said": runtime.cudaGetErrorString(code).decode(), "driver": driver.value}))
"""

ASK_TORCH = """
import json, torch
try:
    torch.cuda.init(); said = ""
except Exception as error:
    said = str(error)
print(json.dumps({"cuda": torch.version.cuda, "said": said}))
"""


def build_driver(ctx: Context, folder: str, reports: int, init: int = NO_DEVICE) -> str:
    """Builds a folder with a libcuda.so.1 that reports this CUDA version, and returns its path."""
    Path("stub.c").write_text(STUB % (reports, init))
    Path(folder).mkdir()
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1", "stub.c"]
    subprocess.run(command, check=True, timeout=20)
    return ctx.path(folder)


def under_driver(folders: Sequence[str], *command: str) -> Dict[str, Any]:
    """Runs a new Python process, which has not loaded a driver, with these folders in LD_LIBRARY_PATH."""
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)}
    ran = subprocess.run(
        [sys.executable, "-c", *command], env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    if ran.returncode:
        raise RuntimeError(f"the process with the stub driver exited with {ran.returncode}: {ran.stderr[-800:]}")
    answer: Dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return answer


def driver_of(ctx: Context, major: int, old: bool) -> int:
    """Returns the CUDA release that the stub reports; 12080 is 12.8. An old driver is of the previous major release."""
    return ctx.params["driver"] or (major - 1) * 1000 + 80 if old else major * 1000


def runtime_of(*packages: str) -> Tuple[Path, int]:
    """Returns libcudart of the first of these packages that is installed, and its CUDA major release."""
    for package in packages or (CUDA_13, CUDA_12):
        try:
            files = [file for file in metadata.files(package) or () if re.match(r"libcudart\.so\.\d+$", file.name)]
        except metadata.PackageNotFoundError:
            continue
        if files:
            return Path(str(files[0].locate())), int(files[0].name.rsplit(".", 1)[1])
    raise Unavailable("no package with a CUDA runtime is installed; pip installs one with a CUDA build of torch")


def ask_runtime(ctx: Context, runtime: Path, folders: Sequence[str]) -> None:
    answer = under_driver(folders, ASK_RUNTIME, str(runtime))
    ctx.note(runtime=runtime.name, **answer)
    if answer["code"] != NO_DEVICE:  # NO_DEVICE means that the runtime accepted the driver
        raise RuntimeError(f"{answer['said']}: {runtime.name} on a driver that reports {answer['driver']}")


def start_runtime(ctx: Context, *, package: str, old: bool) -> None:
    runtime, major = runtime_of(package)
    ctx.reached()
    ask_runtime(ctx, runtime, [build_driver(ctx, "driver", driver_of(ctx, major, old))])


def add_compat(ctx: Context, *, in_front: bool) -> None:
    """Uses an old driver, with or without the runtime's cuda-compat folder before it in LD_LIBRARY_PATH."""
    runtime, major = runtime_of()
    driver = build_driver(ctx, "driver", driver_of(ctx, major, True))
    compat = build_driver(ctx, "compat", major * 1000)
    ctx.reached()
    ask_runtime(ctx, runtime, [compat, driver] if in_front else [driver])


def remove_compat(ctx: Context, *, in_front: bool) -> None:
    """Uses a driver that is new enough, with or without a cuda-compat folder before it that refuses the GPU."""
    runtime, major = runtime_of()
    driver = build_driver(ctx, "driver", major * 1000)
    compat = build_driver(ctx, "compat", major * 1000 + 20, COMPAT_NOT_SUPPORTED)
    ctx.reached()
    ask_runtime(ctx, runtime, [compat, driver] if in_front else [driver])


def set_variables(ctx: Context, *, old: bool) -> None:
    """Runs with the variables that people export in a container; both arms set them."""
    runtime, major = runtime_of()
    driver = build_driver(ctx, "driver", driver_of(ctx, major, old))
    assert os.environ["NVIDIA_DISABLE_REQUIRE"] == "1" and "CUDA_HOME" in os.environ
    ctx.reached()
    ask_runtime(ctx, runtime, [driver])


def start_torch(ctx: Context, *, package: str, old: bool) -> None:
    result = torch_cuda()
    if not result:
        raise Unavailable(f"{package} is installed, but not a CUDA build of torch")
    driver = build_driver(ctx, "driver", driver_of(ctx, int(result.split(".")[0]), old))
    ctx.reached()
    answer = under_driver([driver], ASK_TORCH)
    ctx.note(**answer)
    if "No CUDA GPUs are available" not in answer["said"]:
        raise RuntimeError(answer["said"])


# --- the check: compares the driver with the CUDA release that torch was built for ----------------------------------

OLDEST = {
    "11": (450, 80),
    "12": (525,),
    "13": (580,),
}  # the oldest driver that runs every minor release of this major release


def torch_cuda() -> str:
    """Returns `12.8` for a build for CUDA 12.8, "" for a build without CUDA, and does not import torch."""
    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    except (metadata.PackageNotFoundError, OSError):
        return ""
    match = re.search(r"^cuda\s*(?::[^=]*)?=\s*'([\d.]+)'", text, re.MULTILINE)
    return match.group(1) if match else ""


def driver_version(saved: Optional[Path]) -> Tuple[str, str]:
    """Returns the version, and the file that says so: saved output of nvidia-smi, or that of the kernel module."""
    for path in [saved] if saved else [Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version")]:
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        match = re.search(
            r"(?:(?:Driver|KMD) Version\s*:\s*|<(?:driver|kmd)_version>|Module.*?\s|^)(\d{3}\.\d+(?:\.\d+)?)\b", text
        )
        if match:
            return match.group(1), str(path)
    return "", ""


def check(params: Mapping[str, Any]) -> Finding:
    """Does the driver of this machine support the CUDA release that torch was built for?"""
    cuda, (driver, source) = params["cuda"] or torch_cuda(), driver_version(params["smi"])
    if not driver:
        where = params["smi"] or "/proc/driver/nvidia/version: no NVIDIA kernel module is loaded here"
        advice = "run this on the GPU node, or pass saved output of nvidia-smi: --set smi=FILE"
        return unknown(f"kb found no driver version in {where}", advice=advice)
    if not cuda:
        return unknown(
            f"the driver is {driver}, but this interpreter has no CUDA build of torch",
            advice="name the CUDA release of the job's torch: --set cuda=12.8",
        )
    numbers = tuple(int(part) for part in driver.split("."))
    evidence = [f"the driver is {driver} ({source}), and torch was built for CUDA {cuda}"]
    least = OLDEST.get(cuda.split(".")[0])
    if least is None:
        return unknown(*evidence, f"kb does not know which driver CUDA {cuda} needs")
    libraries = [] if params["smi"] else user_libraries()
    of_driver = [name for name in libraries if "compat" not in name and re.search(r"libcuda\.so\.\d{3}", name)]
    mismatched = [name for name in of_driver if not name.endswith(driver)]
    compat = [name for name in libraries if "compat" in name]
    if compat:
        message = f"forward compatibility libraries are installed: {', '.join(compat)}"
        evidence.append(f"{message}; they need a data center GPU, and fail with error 804 on others")
    if numbers < least:
        need = ".".join(map(str, least))
        evidence.append(
            f"CUDA {cuda} needs driver {need} or newer"
            + ("" if not compat else ", unless the job uses the compat libraries")
        )
        advice = f"install a torch build for an older CUDA release (or, as administrator, driver {need} or newer)"
        return unknown(*evidence, advice=advice) if compat else exposed(*evidence, advice=advice)
    in_front = "" if params["smi"] else compat_in_front()
    if in_front:
        message = f"{in_front} names a compat folder, which some GPUs (error 804) and some drivers (error 803) refuse"
        return unknown(*evidence, message, advice="ldconfig -p | grep libcuda.so")
    if not (of_driver or params["smi"]):
        return unknown(*evidence, "kb cannot tell the version of libcuda", advice="ldconfig -p | grep libcuda.so")
    if mismatched:
        evidence.append(f"the version of libcuda differs from that of the kernel module: {', '.join(mismatched)}")
        return exposed(*evidence, advice="reboot or reload the kernel module after a driver update (error 803 or 804)")
    return clear(*evidence, "PTX code (error 222) and newer functions (error 36) may still need a newer minor release")


def compat_in_front() -> str:
    """Returns what puts a compat folder before the driver's libraries: LD_LIBRARY_PATH or a file of the linker."""
    if "compat" in os.environ.get("LD_LIBRARY_PATH", ""):
        return "LD_LIBRARY_PATH"
    for path in sorted(Path("/etc/ld.so.conf.d").glob("*.conf")):
        try:
            if re.search(r"^\s*/\S*cuda\S*/compat\b", path.read_text(errors="replace"), re.MULTILINE):
                return str(path)
        except OSError:
            continue
    return ""


def user_libraries() -> List[str]:
    """Returns the libcuda files of the driver packages by their real names, such as libcuda.so.535.129.03."""
    folders = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/cuda*/compat"]
    return sorted({os.path.realpath(path) for folder in folders for path in glob(f"{folder}/libcuda.so.1")})


STANDS_FOR = "the NVIDIA driver; a stub reports a CUDA version and no device, and everything above it is real"
NEWER = "the driver reports the first CUDA release of the runtime's major release"


def under_stub(
    name: str,
    fails: Callable[[Context], None],
    works: Callable[[Context], None],
    pattern: str,
    *,
    package: str = "",
    because: str = "the driver reports a CUDA release of the major release before the runtime's",
    fix: str = NEWER,
    env: Mapping[str, str] = MappingProxyType({}),
    expected_s: float = 0.4,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(fails, raised(pattern), because, "stand-in", STANDS_FOR, env),
        treatment=Arm(works, completed(), fix, "stand-in", STANDS_FOR, env),
        world_size=1,
        needs=Needs(packages={package: ""} if package else {}, programs=("gcc",)),
        deadline_s=120,
        expected_s=(expected_s, expected_s),
    )


def with_package(name: str, job: Callable[..., None], package: str, pattern: str, expected_s: float) -> Experiment:
    old, new = partial(job, package=package, old=True), partial(job, package=package, old=False)
    return under_stub(name, old, new, pattern, package=package, expected_s=expected_s)


INSUFFICIENT = r"CUDA driver version is insufficient for CUDA runtime version"
TOO_OLD = r"The NVIDIA driver on your system is too old \(found version \d+\)"
CUDA_13, CUDA_12 = "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"

probe = Probe(
    params={
        "smi": Param("path", "saved output of `nvidia-smi` or `nvidia-smi -q` from the node in question"),
        "cuda": Param("str", "CUDA release to check instead of the installed torch's, such as 13.0", ""),
        "driver": Param(
            "int", "CUDA release that the old driver of the control arm reports, such as 12020 for 12.2", 0
        ),
    },
    check=check,
    experiments=(
        with_package("runtime", start_runtime, CUDA_13, INSUFFICIENT, 0.4),
        with_package("runtime-cu12", start_runtime, CUDA_12, INSUFFICIENT, 0.4),
    ),
    variants=(
        with_package("torch", start_torch, CUDA_13, TOO_OLD, 5),
        with_package("torch-cu12", start_torch, CUDA_12, TOO_OLD, 5),
        under_stub(
            "compat",
            partial(add_compat, in_front=False),
            partial(add_compat, in_front=True),
            INSUFFICIENT,
            because="the driver is of an older major release, and LD_LIBRARY_PATH does not name the compat folder",
            fix="LD_LIBRARY_PATH begins with the compat folder, whose libcuda matches the runtime",
        ),
        under_stub(
            "compat-in-the-way",
            partial(remove_compat, in_front=True),
            partial(remove_compat, in_front=False),
            r"forward compatibility was attempted on non supported HW",
            because="LD_LIBRARY_PATH begins with a compat folder, whose libcuda refuses this GPU",
            fix="LD_LIBRARY_PATH names only the folder of the driver's libcuda",
        ),
        under_stub(
            "variables",
            partial(set_variables, old=True),
            partial(set_variables, old=False),
            INSUFFICIENT,
            because="CUDA_HOME, NVIDIA_DISABLE_REQUIRE and an NCCL variable do not make an old driver newer",
            env={"CUDA_HOME": "/usr/local/cuda", "NVIDIA_DISABLE_REQUIRE": "1", "NCCL_P2P_DISABLE": "1"},
        ),
    ),
)
