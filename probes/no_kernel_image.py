"""A GPU and a library that holds no code for it.

The experiment compiles one tiny kernel, for a foreign GPU generation or for this one, and loads it. The check reads the
list of GPU generations out of a compiled library, as `cuobjdump --list-elf` does, and compares it with the GPU.
"""

import ctypes
import mmap
import os
import re
import struct
import subprocess
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
    import torch

    out = torch.zeros(1, dtype=torch.int32, device=ctx.device)  # makes the context, too
    major, minor = torch.cuda.get_device_capability(ctx.device)
    nvrtc = compiler()
    known = architectures(nvrtc)
    mine, foreign = 10 * major + minor, [arch for arch in known if arch // 10 != major]
    if mine not in known or not foreign:
        raise Unavailable(f"this NVRTC compiles for {known}, the GPU is {mine}")
    arch = mine if for_this_gpu else foreign[-1]
    cubin = compiled(nvrtc, arch)
    ctx.note(gpu=mine, compiled_for=arch)
    ctx.reached()
    cuda, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    insist(cuda, cuda.cuModuleLoadData(ctypes.byref(module), cubin))
    insist(cuda, cuda.cuModuleGetFunction(ctypes.byref(function), module, b"answer"))
    pointer = ctypes.c_void_p(out.data_ptr())
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(pointer), ctypes.c_void_p))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    insist(cuda, cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None))
    torch.cuda.synchronize()
    assert out.item() == 42


def insist(cuda: Any, code: int) -> None:
    text = ctypes.c_char_p()
    if code:
        cuda.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA error: {(text.value or b'').decode()} ({code})")


def compiler() -> Any:
    """NVIDIA's run-time compiler as the installed wheel has it."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc-cu11"):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        result = [file for file in files if re.match(r"libnvrtc(-builtins)?\.so\.[\d.]+$", file.name)]
        loaded = [
            ctypes.CDLL(str(file.locate())) for file in sorted(result, key=lambda file: file.name)
        ]  # builtins first
        if loaded:
            return loaded[-1]
    raise Unavailable("no nvidia-cuda-nvrtc package is installed")


def architectures(nvrtc: Any) -> List[int]:
    count = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(archs)
    return sorted(archs)


def compiled(nvrtc: Any, arch: int) -> bytes:
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
    """What torch asks nvcc for on the build machine, which has a GPU of 9.0, against the GPUs of the cluster."""
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
    """Two nodes, one home: where torch keeps a just-in-time build on each. nvidia-smi is a script, a GPU a number."""
    from torch.utils import cpp_extension

    script = ctx.dir / "bin/nvidia-smi"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\necho "$CAPABILITY"\n')
    script.chmod(0o755)
    os.environ.update(HOME=str(ctx.dir), PATH=f"{script.parent}:{os.environ['PATH']}")
    command = ["bash", "-c", EXPORT + '; printf "$TORCH_EXTENSIONS_DIR"']
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


EXPORT = (  # as the entry prints it
    "export TORCH_EXTENSIONS_DIR=$HOME/.cache/"
    "torch_extensions_$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0)"
)

# --- the check ------------------------------------------------------------------------------------------------------

Code = Tuple[Set[int], Set[int]]
FATBIN = struct.Struct("<IHHQ")  # magic, version, size of this header, size of what follows
IMAGE = struct.Struct("<HHIQIIHHI")  # kind (1 PTX, 2 cubin), -, size of this header, of the payload, -, -, -, -, arch


def images(path: Path, containers: int = 150) -> List[Code]:
    """GPU generations that each part of a library holds code for, as cubin and as PTX: `[({80, 90}, {90}), ...]`."""
    result: List[Code] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for at, end in fatbin_sections(data):
            while at < end - FATBIN.size and containers:
                magic, _, header, size = FATBIN.unpack_from(data, at)
                if magic != 0xBA55ED50:
                    at += 8
                    continue
                image, at, containers = at + header, at + header + size, containers - 1
                cubins: Set[int] = set()
                ptx: Set[int] = set()
                while image < at:
                    kind, _, header, size, *_, arch = IMAGE.unpack_from(data, image)
                    (ptx if kind == 1 else cubins).add(arch)
                    image += (header + size) or IMAGE.size  # garbage must not stop the loop
                result.append((cubins, ptx))
    return result


def fatbin_sections(data: Any) -> Iterator[Tuple[int, int]]:
    """Where the ELF file keeps its GPU code."""
    if data[:5] != b"\x7fELF\x02":
        return
    (table,), (size, count, names) = struct.unpack_from("<Q", data, 0x28), struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + number * size) for number in range(count)]
    for header in headers:
        name = headers[names][4] + header[0]
        if data[name : name + 11] == b".nv_fatbin\0":
            yield header[4], header[4] + header[5]


def fits(gpu: int, cubins: Set[int], ptx: Set[int]) -> str:
    """How this GPU gets code: `cubin`, `PTX`, or "" if it gets none. The file does not say `a`, as in sm_100a."""
    older = [arch for arch in cubins if arch // 10 == gpu // 10 and arch < gpu]
    if gpu in cubins or (older and gpu < 90):
        return "cubin"
    if any(arch < 90 for arch in ptx) and min(ptx) <= gpu:
        return "PTX"
    if older:
        return f"cubin for sm_{max(older)}, if that is no sm_{max(older)}a"
    virtual = [arch for arch in ptx if arch <= gpu]
    if virtual:
        return "PTX" if gpu in virtual else f"PTX for compute_{max(virtual)}, if that is no compute_{max(virtual)}a"
    return ""


def gpus_here() -> List[str]:
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=3, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted(set(re.findall(r"^\d+\.\d+$", ran.stdout, re.MULTILINE)))


def check(params: Mapping[str, Any]) -> Finding:
    """Does torch, or the library that is named, hold code for the GPUs of this machine or for the one that is named?"""
    library = params["library"]
    if not library:
        try:
            library = Path(str(metadata.distribution("torch").locate_file("torch/lib/libtorch_cuda.so")))
        except metadata.PackageNotFoundError:
            return unknown("torch is not installed here: --set library=FILE.so names a library")
    if not library.exists():
        return unknown(
            f"there is no {library}: a CPU build of torch has none", advice="--set library=FILE.so names another"
        )
    try:
        parts = images(library)
    except (OSError, ValueError, IndexError, struct.error) as error:
        return unknown(f"{library} cannot be read: {error}", advice="--set library=FILE.so names a library")
    cubins = {arch for part, _ in parts for arch in part}
    ptx = {arch for _, part in parts for arch in part}
    if not cubins and not ptx:
        return unknown(f"{library} holds no GPU code that this check can read")
    held = " ".join([f"sm_{arch}" for arch in sorted(cubins)] + [f"compute_{arch} (PTX)" for arch in sorted(ptx)])
    evidence = [f"{library.name} holds {held}"]
    gpus = [params["capability"]] if params["capability"] else gpus_here()
    if not all(re.match(r"\d+\.\d$", gpu) for gpu in gpus):
        return unknown(*evidence, f"{gpus[0]} is no compute capability", advice="--set capability=9.0 asks about a GPU")
    if not gpus:
        return unknown(*evidence, "nvidia-smi names no GPU here", advice="--set capability=9.0 asks about a GPU")
    without, unsure, partial_code = [], False, []
    for gpu in gpus:
        way = fits(int(re.sub(r"\D", "", gpu)), cubins, ptx)
        evidence.append(f"a GPU of capability {gpu} " + (f"is served by {way}" if way else "finds no code in it"))
        without += [] if way else [gpu]
        unsure |= " for " in way
        lacking = sum(not fits(int(re.sub(r"\D", "", gpu)), *part) for part in parts)
        if way and lacking:
            partial_code.append(f"{lacking} of {len(parts)} parts hold none for {gpu}: what is in these fails on it")
    if without:
        return exposed(*evidence, advice="a build of this library for that GPU: see the entry's table and its Fix")
    if unsure:
        return unknown(*evidence, *partial_code, advice="cuobjdump --list-elf --list-ptx prints the suffix")
    if partial_code:
        return unknown(*evidence, *partial_code, advice="which kernel the job calls is not known here")
    note = "of a large library the first 150 parts were read; sm_90a and the like count as sm_90"
    return clear(*evidence, note)


def on_cpu(name: str, job: Any, change: Mapping[str, Any], broken: Mapping[str, Any], **words: str) -> Experiment:
    stands_for = words["stands_for"]
    return Experiment(
        name=name,
        control=Arm(partial(job, **broken), symptom(words["pattern"]), words["because"], "stand-in", stands_for),
        treatment=Arm(partial(job, **change), completed(), words["fix"], "stand-in", stands_for),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.1", "setuptools": ""}),
        deadline_s=120,
        expected_s=(1, 1),
    )


probe = Probe(
    params={
        "library": Param(
            "path", "compiled library to look into, such as flash_attn_2_cuda...so; default libtorch_cuda.so"
        ),
        "capability": Param("str", "compute capability to ask about instead of this machine's GPUs, such as 12.0", ""),
    },
    check=check,
    experiments=(
        Experiment(
            name="nvrtc",
            control=Arm(
                partial(run_kernel, for_this_gpu=False),
                expect=raised(r"no kernel image is available for execution on the device"),
                because="the kernel is compiled for another GPU generation, without PTX",
                fidelity="hardware",
            ),
            treatment=Arm(
                partial(run_kernel, for_this_gpu=True),
                expect=completed(),
                because="the same kernel, compiled for this GPU",
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
            because="the list is taken from the GPU of the build machine, and the cluster has an older one as well",
            fix="TORCH_CUDA_ARCH_LIST names all generations of the cluster",
            stands_for="a GPU of 9.0 in the build machine; torch's own function makes the list, nothing is compiled",
        ),
        on_cpu(
            "cache",
            share_cache,
            {"folder_per_generation": True},
            {"folder_per_generation": False},
            pattern=r"nodes of 8\.0 and 9\.0 share \.cache/torch_extensions/",
            because="two nodes with different GPUs and one home build in one folder",
            fix="TORCH_EXTENSIONS_DIR holds the capability, so each generation has its folder",
            stands_for="two nodes: nvidia-smi is a script that prints a capability; the folder is torch's own",
        ),
    ),
)
