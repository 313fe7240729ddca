"""The CUDA runtime of this environment under a driver of an older major release.

The runtime is the real one of the installed wheel; only the driver is a stub, built with gcc, that reports a CUDA
version and no device. So the gate can be seen on a machine without a GPU, and nothing touches a real driver.
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
    """A folder with a libcuda.so.1 that reports this CUDA version."""
    Path("stub.c").write_text(STUB % (reports, init))
    Path(folder).mkdir()
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1", "stub.c"]
    subprocess.run(command, check=True, timeout=20)
    return ctx.path(folder)


def under_driver(folders: Sequence[str], *command: str) -> Dict[str, Any]:
    """Run a fresh Python, which has loaded no driver, with these folders in front."""
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)}
    ran = subprocess.run(
        [sys.executable, "-c", *command], env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    if ran.returncode:
        raise RuntimeError(f"the process under the stub driver ended with {ran.returncode}: {ran.stderr[-800:]}")
    answer: Dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return answer


def driver_of(ctx: Context, major: int, old: bool) -> int:
    """In the driver's form: 12080 is CUDA 12.8. Without --set the last release before the runtime's own major."""
    return ctx.params["driver"] or (major - 1) * 1000 + 80 if old else major * 1000


def runtime_of(*packages: str) -> Tuple[Path, int]:
    """The libcudart of the first of these packages that is installed, and its CUDA major release."""
    for package in packages or (CUDA_13, CUDA_12):
        try:
            files = [file for file in metadata.files(package) or () if re.match(r"libcudart\.so\.\d+$", file.name)]
        except metadata.PackageNotFoundError:
            continue
        if files:
            return Path(str(files[0].locate())), int(files[0].name.rsplit(".", 1)[1])
    raise Unavailable("no package with a CUDA runtime is installed, as a pip installed torch for CUDA brings it")


def ask_runtime(ctx: Context, runtime: Path, folders: Sequence[str]) -> None:
    answer = under_driver(folders, ASK_RUNTIME, str(runtime))
    ctx.note(runtime=runtime.name, **answer)
    if answer["code"] != NO_DEVICE:  # with it the runtime is past the gate
        raise RuntimeError(f"{answer['said']}: {runtime.name} under a driver that reports {answer['driver']}")


def start_runtime(ctx: Context, *, package: str, old: bool) -> None:
    runtime, major = runtime_of(package)
    ctx.reached()
    ask_runtime(ctx, runtime, [build_driver(ctx, "driver", driver_of(ctx, major, old))])


def add_compat(ctx: Context, *, in_front: bool) -> None:
    """An old driver; a cuda-compat folder for the runtime is there, in front of it or not."""
    runtime, major = runtime_of()
    driver = build_driver(ctx, "driver", driver_of(ctx, major, True))
    compat = build_driver(ctx, "compat", major * 1000)
    ctx.reached()
    ask_runtime(ctx, runtime, [compat, driver] if in_front else [driver])


def remove_compat(ctx: Context, *, in_front: bool) -> None:
    """A driver that is new enough; a cuda-compat folder in front of it, on a GPU for which that is not supported."""
    runtime, major = runtime_of()
    driver = build_driver(ctx, "driver", major * 1000)
    compat = build_driver(ctx, "compat", major * 1000 + 20, COMPAT_NOT_SUPPORTED)
    ctx.reached()
    ask_runtime(ctx, runtime, [compat, driver] if in_front else [driver])


def set_variables(ctx: Context, *, old: bool) -> None:
    """What people export in a container; the job's environment has them in both arms."""
    runtime, major = runtime_of()
    driver = build_driver(ctx, "driver", driver_of(ctx, major, old))
    assert os.environ["NVIDIA_DISABLE_REQUIRE"] == "1" and "CUDA_HOME" in os.environ
    ctx.reached()
    ask_runtime(ctx, runtime, [driver])


def start_torch(ctx: Context, *, package: str, old: bool) -> None:
    result = torch_cuda()
    if not result:
        raise Unavailable(f"{package} is installed, but no torch that is built for CUDA")
    driver = build_driver(ctx, "driver", driver_of(ctx, int(result.split(".")[0]), old))
    ctx.reached()
    answer = under_driver([driver], ASK_TORCH)
    ctx.note(**answer)
    if "No CUDA GPUs are available" not in answer["said"]:
        raise RuntimeError(answer["said"])


# --- the check: the driver that is loaded, against the CUDA that torch was built for --------------------------------

OLDEST = {"11": (450, 80), "12": (525,), "13": (580,)}  # oldest driver that runs any minor release of this major


def torch_cuda() -> str:
    """`12.8` for a build with CUDA 12.8, "" for none, without importing torch."""
    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    except (metadata.PackageNotFoundError, OSError):
        return ""
    match = re.search(r"^cuda\s*(?::[^=]*)?=\s*'([\d.]+)'", text, re.MULTILINE)
    return match.group(1) if match else ""


def driver_version(saved: Optional[Path]) -> Tuple[str, str]:
    """Version and where it was read: the saved output of nvidia-smi, else the kernel module that is loaded here."""
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
    """Can the CUDA that torch was built for run on the driver of this machine?"""
    cuda, (driver, source) = params["cuda"] or torch_cuda(), driver_version(params["smi"])
    if not driver:
        where = params["smi"] or "/proc/driver/nvidia/version: no NVIDIA kernel module is loaded here"
        return unknown(f"no driver version in {where}", advice="on the GPU node, or with --set smi=FILE of nvidia-smi")
    if not cuda:
        return unknown(
            f"driver {driver}; the torch of this interpreter is no CUDA build (--set cuda=12.8 asks for one)"
        )
    numbers = tuple(int(part) for part in driver.split("."))
    evidence = [f"driver {driver} ({source}), torch for CUDA {cuda}"]
    least = OLDEST.get(cuda.split(".")[0])
    if least is None:
        return unknown(*evidence, f"no table row for CUDA {cuda}")
    libraries = [] if params["smi"] else user_libraries()
    own = [name for name in libraries if "compat" not in name and re.search(r"libcuda\.so\.\d{3}", name)]
    strange = [name for name in own if not name.endswith(driver)]
    compat = [name for name in libraries if "compat" in name]
    if compat:
        evidence.append(f"forward compatibility libraries: {', '.join(compat)} (data center GPUs only, else error 804)")
    if numbers < least:
        need = ".".join(map(str, least))
        evidence.append(f"CUDA {cuda} needs driver {need} or newer" + ("" if not compat else ", unless compat is used"))
        advice = f"install a torch build for an older CUDA (or, as administrator, driver {need} or newer)"
        return unknown(*evidence, advice=advice) if compat else exposed(*evidence, advice=advice)
    in_front = "" if params["smi"] else compat_in_front()
    if in_front:
        said = f"{in_front} has a compat folder, which some GPUs (804) and some drivers (803) refuse"
        return unknown(*evidence, said, advice="ldconfig -p | grep libcuda.so")
    if not (own or params["smi"]):
        return unknown(*evidence, "which release libcuda is of cannot be seen", advice="ldconfig -p | grep libcuda.so")
    if strange:
        evidence.append(f"libcuda of another version than the kernel module: {', '.join(strange)}")
        return exposed(*evidence, advice="reboot or reload the kernel module after a driver update (error 803 or 804)")
    return clear(*evidence, "PTX (error 222) and newer functions (36) may still want the newer minor release")


def compat_in_front() -> str:
    """What puts a compat folder before the driver's own: the environment, or a file of the linker."""
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
    """The libcuda files of the driver packages, by their real names: libcuda.so.535.129.03."""
    folders = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/cuda*/compat"]
    return sorted({os.path.realpath(path) for folder in folders for path in glob(f"{folder}/libcuda.so.1")})


STANDS_FOR = "the NVIDIA driver: the stub reports a CUDA version and no device; everything above it is the real one"
NEWER = "the driver is of the runtime's own major release, its oldest one"


def under_stub(
    name: str,
    fails: Callable[[Context], None],
    works: Callable[[Context], None],
    pattern: str,
    *,
    package: str = "",
    because: str = "the driver is of the major release before the one that the runtime belongs to",
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
        "smi": Param("path", "saved output of `nvidia-smi` or `nvidia-smi -q` of the node in question"),
        "cuda": Param("str", "CUDA version to ask about instead of the installed torch's, such as 13.0", ""),
        "driver": Param("int", "what the old driver of the control arm reports, such as 12020 for CUDA 12.2", 0),
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
            because="the driver is of the older major release, and a compat folder is on the disk only",
            fix="LD_LIBRARY_PATH has the compat folder in front, whose libcuda is of the runtime's release",
        ),
        under_stub(
            "compat-in-the-way",
            partial(remove_compat, in_front=True),
            partial(remove_compat, in_front=False),
            r"forward compatibility was attempted on non supported HW",
            because="LD_LIBRARY_PATH has a compat folder in front, whose libcuda refuses this GPU",
            fix="LD_LIBRARY_PATH leads to the libcuda of the driver",
        ),
        under_stub(
            "variables",
            partial(set_variables, old=True),
            partial(set_variables, old=False),
            INSUFFICIENT,
            because="the driver is of the older major release; CUDA_HOME, NVIDIA_DISABLE_REQUIRE and NCCL's are set",
            env={"CUDA_HOME": "/usr/local/cuda", "NVIDIA_DISABLE_REQUIRE": "1", "NCCL_P2P_DISABLE": "1"},
        ),
    ),
)
