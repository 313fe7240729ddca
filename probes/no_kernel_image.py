"""A compiled library has no machine code for the GPU.

The experiment compiles a tiny kernel, for another GPU generation or for this one, and loads it. The check reads the GPU
generations of a compiled library, as `cuobjdump --list-elf` does, and compares them with the GPU.
"""

import ctypes
import mmap
import os
import re
import struct
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Iterator, List, Mapping, Set, Tuple

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
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

KERNEL = b'extern "C" __global__ void answer(int *out) { *out = 42; }'


def run_kernel(ctx: Context, *, for_this_gpu: bool) -> None:
    """Compiles a kernel for the GPU, or for another generation, loads it and runs it."""
    import torch

    out = torch.zeros(1, dtype=torch.int32, device=ctx.device)  # also creates the CUDA context
    major, minor = torch.cuda.get_device_capability(ctx.device)
    nvrtc = load_compiler()
    supported = architectures(nvrtc)
    gpu, others = 10 * major + minor, [arch for arch in supported if arch // 10 != major]
    if gpu not in supported or not others:
        raise Unavailable(f"this NVRTC compiles for {supported}, but the GPU is {gpu}")
    arch = gpu if for_this_gpu else others[-1]
    cubin = compile_kernel(nvrtc, arch)
    ctx.note(gpu=gpu, compiled_for=arch)
    ctx.reached()
    cuda, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    require_success(cuda, cuda.cuModuleLoadData(ctypes.byref(module), cubin))
    require_success(cuda, cuda.cuModuleGetFunction(ctypes.byref(function), module, b"answer"))
    pointer = ctypes.c_void_p(out.data_ptr())
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(pointer), ctypes.c_void_p))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    require_success(cuda, cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None))
    torch.cuda.synchronize()
    assert out.item() == 42


def require_success(cuda: Any, code: int) -> None:
    """Raises RuntimeError with the text of a CUDA error, unless the code is 0."""
    text = ctypes.c_char_p()
    if code:
        cuda.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA error: {(text.value or b'').decode()} ({code})")


def load_compiler() -> Any:
    """Loads NVRTC, NVIDIA's run-time compiler, from the installed wheel."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc-cu11"):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        found = [file for file in files if re.match(r"libnvrtc(-builtins)?\.so\.[\d.]+$", file.name)]
        in_order = sorted(found, key=lambda file: file.name)  # libnvrtc needs the builtins, which sort first
        loaded = [ctypes.CDLL(str(file.locate())) for file in in_order]
        if loaded:
            return loaded[-1]
    raise Unavailable("the package nvidia-cuda-nvrtc is not installed")


def architectures(nvrtc: Any) -> List[int]:
    """The GPU generations that this NVRTC compiles for, such as 80 and 90."""
    count = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(archs)
    return sorted(archs)


def compile_kernel(nvrtc: Any, arch: int) -> bytes:
    """Compiles the kernel to machine code for one GPU generation, without PTX."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), KERNEL, b"answer.cu", 0, None, None)
    options = (ctypes.c_char_p * 1)(b"--gpu-architecture=sm_%d" % arch)
    assert nvrtc.nvrtcCompileProgram(program, 1, options) == 0, f"NVRTC did not compile for sm_{arch}"
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return cubin.raw


CLUSTER = ((8, 0), (9, 0))  # two GPU generations


def build_extension(ctx: Context, *, arch_list: str) -> None:
    """Compares the GPUs of the cluster with the code that torch requests from nvcc on a machine with a GPU of 9.0."""
    from unittest.mock import patch

    import torch
    from torch.utils import cpp_extension

    os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
    if arch_list:
        os.environ["TORCH_CUDA_ARCH_LIST"] = arch_list
    machine: Any = {
        "device_count": lambda: 1,
        "get_arch_list": lambda: ["sm_90"],
        "get_device_capability": lambda _: (9, 0),
    }
    with patch.multiple(torch.cuda, **machine):
        ctx.reached()
        flags = " ".join(cpp_extension._get_cuda_arch_flags())
    cubins = {int(number) for number in re.findall(r"code=sm_(\d+)", flags)}
    ptx = {int(number) for number in re.findall(r"code=compute_(\d+)", flags)}
    ctx.note(flags=flags)
    without = [f"{major}.{minor}" for major, minor in CLUSTER if not fits(10 * major + minor, cubins, ptx)]
    if without:
        raise Symptom(f"nvcc is asked for {flags}: no code for {', '.join(without)}")


def share_cache(ctx: Context, *, folder_per_generation: bool) -> None:
    """Compares the folders in which torch keeps a just-in-time build on two nodes with one home.

    A script replaces nvidia-smi, and prints the capability of the node's GPU.
    """
    from torch.utils import cpp_extension

    scripts = {"nvidia-smi": 'echo "$CAPABILITY"', "python": f'exec "{sys.executable}" "$@"'}
    (ctx.dir / "bin").mkdir()
    for name, line in scripts.items():
        script = ctx.dir / "bin" / name
        script.write_text(f"#!/bin/sh\n{line}\n")
        script.chmod(0o755)
    os.environ.update(HOME=str(ctx.dir), PATH=f"{ctx.dir / 'bin'}:{os.environ['PATH']}")
    command = ["bash", "-c", EXPORT + 'printf "$TORCH_EXTENSIONS_DIR"']
    for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    ctx.reached()
    folders = {}
    for capability in (f"{major}.{minor}" for major, minor in CLUSTER):
        os.environ["CAPABILITY"] = capability
        if folder_per_generation:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            os.environ["TORCH_EXTENSIONS_DIR"] = ran.stdout
        folder = cpp_extension._get_build_directory("fused_adam", False)
        folders[capability] = os.path.relpath(folder, str(ctx.dir))
    ctx.note(**folders)
    if len(set(folders.values())) < len(folders):
        raise Symptom(f"nodes of {' and '.join(folders)} share {folders['8.0']}")


EXPORT = r"""
gpu=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0)
torch=$(python -c 'from importlib.metadata import version; print(version("torch"))')
export TORCH_EXTENSIONS_DIR=$HOME/.cache/torch_extensions_${gpu:?no GPU}_${torch:?no torch}
"""  # the script of the entry

# --- the check ------------------------------------------------------------------------------------------------------

Code = Tuple[Set[int], Set[int]]
FATBIN = struct.Struct("<IHHQ")  # magic, version, size of this header, size of what follows
IMAGE = struct.Struct("<HHIQIIHHI")  # kind (1 PTX, 2 cubin), -, size of this header, of the payload, -, -, -, -, arch


def read_parts(path: Path, containers: int = 150) -> List[Code]:
    """The GPU generations that each part of a library has code for, as cubin and as PTX: `[({80, 90}, {90}), ...]`."""
    result: List[Code] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for offset, end in fatbin_sections(data):
            while offset < end - FATBIN.size and containers:
                magic, _, header, size = FATBIN.unpack_from(data, offset)
                if magic != 0xBA55ED50:
                    offset += 8
                    continue
                image, offset, containers = offset + header, offset + header + size, containers - 1
                cubins: Set[int] = set()
                ptx: Set[int] = set()
                while image < offset:
                    kind, _, header, size, *_, arch = IMAGE.unpack_from(data, image)
                    (ptx if kind == 1 else cubins).add(arch)
                    image += (header + size) or IMAGE.size  # the loop must advance even over invalid data
                result.append((cubins, ptx))
    return result


def fatbin_sections(data: Any) -> Iterator[Tuple[int, int]]:
    """The start and end of each section of an ELF file that contains GPU code."""
    if data[:5] != b"\x7fELF\x02":
        return
    (table,), (size, count, names) = struct.unpack_from("<Q", data, 0x28), struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + number * size) for number in range(count)]
    for header in headers:
        name = headers[names][4] + header[0]
        if data[name : name + 11] == b".nv_fatbin\0":
            yield header[4], header[4] + header[5]


def fits(gpu: int, cubins: Set[int], ptx: Set[int]) -> str:
    """Which code this GPU can run: `cubin`, `PTX`, or "" if none. The file does not record the `a` of sm_100a."""
    older = [arch for arch in cubins if arch // 10 == gpu // 10 and arch < gpu]
    if gpu in cubins or (older and gpu < 90):
        return "cubin"
    if any(arch < 90 for arch in ptx) and min(ptx) <= gpu:
        return "PTX"
    if older:
        return f"cubin for sm_{max(older)}, unless that is sm_{max(older)}a"
    virtual = [arch for arch in ptx if arch <= gpu]
    if virtual:
        return "PTX" if gpu in virtual else f"PTX for compute_{max(virtual)}, unless that is compute_{max(virtual)}a"
    return ""


def gpus_here() -> List[str]:
    """The compute capabilities that nvidia-smi reports, such as 9.0."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=3, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted(set(re.findall(r"^\d+\.\d+$", ran.stdout, re.MULTILINE)))


def check(params: Mapping[str, Any]) -> Finding:
    """Does a library (by default torch) have code for the GPUs of this machine, or for the given capability?"""
    library = params["library"]
    if not library:
        try:
            library = Path(str(metadata.distribution("torch").locate_file("torch/lib/libtorch_cuda.so")))
        except metadata.PackageNotFoundError:
            return unknown("torch is not installed here", advice="name a library: run --set library=FILE.so")
    name_library = "run --set library=FILE.so with the library that fails"
    if not library.exists():
        return unknown(f"there is no {library}, so this torch may be a CPU build", advice=name_library)
    try:
        parts = read_parts(library)
    except (OSError, ValueError, IndexError, struct.error) as error:
        return unknown(f"kb cannot read {library}: {error}", advice=name_library)
    cubins = {arch for part, _ in parts for arch in part}
    ptx = {arch for _, part in parts for arch in part}
    if not cubins and not ptx:
        return unknown(f"{library} has no GPU code that this check can read")
    listed = " ".join([f"sm_{arch}" for arch in sorted(cubins)] + [f"compute_{arch} (PTX)" for arch in sorted(ptx)])
    evidence = [f"{library.name} has code for {listed}"]
    gpus = [params["capability"]] if params["capability"] else gpus_here()
    name_gpu = "run --set capability=9.0 with the capability of the job's GPUs"
    if not all(re.match(r"\d+\.\d$", gpu) for gpu in gpus):
        return unknown(*evidence, f"{gpus[0]} is not a compute capability", advice=name_gpu)
    if not gpus:
        return unknown(*evidence, "nvidia-smi reports no GPU here", advice=name_gpu)
    return compare(evidence, gpus, parts)


def compare(evidence: List[str], gpus: List[str], parts: List[Code]) -> Finding:
    """The finding for these GPUs and the code in the parts of a library."""
    cubins = {arch for part, _ in parts for arch in part}
    ptx = {arch for _, part in parts for arch in part}
    without, unsure, partial_code = [], False, []
    for gpu in gpus:
        code = fits(int(re.sub(r"\D", "", gpu)), cubins, ptx)
        evidence.append(f"a GPU of capability {gpu} " + (f"can run {code}" if code else "finds no code in it"))
        without += [] if code else [gpu]
        unsure |= " for " in code
        lacking = sum(not fits(int(re.sub(r"\D", "", gpu)), *part) for part in parts)
        if code and lacking:
            partial_code.append(f"{lacking} of {len(parts)} parts have no code for {gpu}, and their kernels fail on it")
    if without:
        advice = "install a build of this library for that GPU: see the table and the Fix of the entry"
        return exposed(*evidence, advice=advice)
    if unsure:
        return unknown(*evidence, *partial_code, advice="run cuobjdump --list-elf --list-ptx, which prints the suffix")
    if partial_code:
        return unknown(*evidence, *partial_code, "kb does not know which kernel the job calls")
    note = "kb read at most the first 150 parts of the library; it counts sm_90a and similar targets as sm_90"
    return clear(*evidence, note)


def on_cpu(name: str, job: Any, change: Mapping[str, Any], broken: Mapping[str, Any], **texts: str) -> Experiment:
    """A stand-in experiment: `broken` are the keywords of the control arm, `change` those of the treatment."""
    stands_for = texts["stands_for"]
    return Experiment(
        name=name,
        control=Arm(partial(job, **broken), symptom(texts["pattern"]), texts["because"], "stand-in", stands_for),
        treatment=Arm(partial(job, **change), completed(), texts["fix"], "stand-in", stands_for),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.1", "setuptools": ""}),
        deadline_s=120,
        expected_s=(1, 1),
    )


probe = Probe(
    params={
        "library": Param(
            "path", "compiled library to inspect, such as flash_attn_2_cuda...so; default: libtorch_cuda.so"
        ),
        "capability": Param("str", "compute capability of the job's GPUs (12.0); default: what nvidia-smi says", ""),
    },
    check=check,
    experiments=(
        Experiment(
            name="nvrtc",
            control=Arm(
                partial(run_kernel, for_this_gpu=False),
                expect=raised(r"no kernel image is available for execution on the device"),
                because="the kernel was compiled for another GPU generation, without PTX",
                fidelity="hardware",
            ),
            treatment=Arm(
                partial(run_kernel, for_this_gpu=True),
                expect=completed(),
                because="the kernel was compiled for this GPU",
                fidelity="hardware",
            ),
            world_size=1,
            backend="nccl",
            needs=Needs(gpus=1),
            deadline_s=60,
            settle_s=3,
            expected_s=(10, 10),
        ),
    ),
    variants=(
        on_cpu(
            "arch-list",
            build_extension,
            {"arch_list": "8.0;9.0+PTX"},
            {"arch_list": ""},
            pattern=r"code=sm_90.*: no code for 8\.0$",
            because="torch takes the list from the GPU of the build machine, but the cluster has an older GPU too",
            fix="TORCH_CUDA_ARCH_LIST names all generations of the cluster",
            stands_for="a build machine with a GPU of 9.0; torch's own function makes the list, without a compiler",
        ),
        on_cpu(
            "cache",
            share_cache,
            {"folder_per_generation": True},
            {"folder_per_generation": False},
            pattern=r"nodes of 8\.0 and 9\.0 share \.cache/torch_extensions/",
            because="two nodes with different GPUs share a home, so they build in the same folder",
            fix="TORCH_EXTENSIONS_DIR contains the capability, so each generation has its own folder",
            stands_for="two nodes; a script replaces nvidia-smi and prints a capability, and torch chooses the folder",
        ),
    ),
)
