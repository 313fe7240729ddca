"""Code was built for another CPU: the first instruction that this CPU lacks ends the process with SIGILL.

The probe cannot run a compiler with -march=native on another node. It names that node's CPU instead: one that has an
extension that /proc/cpuinfo of this machine does not list.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import subprocess
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Callable, FrozenSet, List, Mapping, NamedTuple, Tuple

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
    killed,
    unknown,
)

SOURCE = """
extern "C" void step(unsigned *bits, float *weights, int n) {
    for (int i = 0; i < n; i++) bits[i] = bits[i] << 5 | bits[i] >> 27;
    for (int i = 0; i < n; i++) weights[i] = weights[i] * 0.5f + 1.0f;
}
#ifdef __aarch64__
#define TRAP __asm__ volatile(".inst 0")  // udf; GCC's own trap is a breakpoint on this architecture
#else
#define TRAP __builtin_trap()  // ud2
#endif
extern "C" int check(int size) { if (size < 0) TRAP; return size; }
"""
N = 1024


class Cpu(NamedTuple):
    """A CPU: its name for the compiler, and an extension that it has."""

    march: str
    flag: str


CPUS = {
    "x86_64": (Cpu("bdver4", "xop"), Cpu("skylake-avx512", "avx512f")),  # an Opteron of 2015, a Xeon of 2017
    "aarch64": (Cpu("armv8.2-a+sve", "sve"),),
}
GENERIC = {"x86_64": "x86-64", "aarch64": "armv8-a"}
ROTATE = bytes.fromhex("89f8 c1c005 c3")  # mov eax, edi; rol eax, 5
ROTATE_XOP = bytes.fromhex("c5f96ec7 8fe878c2c005 c5f97ec0 c3")  # the same with vprotd


def cores_in(text: str) -> List[FrozenSet[str]]:
    """The extensions of each core in /proc/cpuinfo, or in the output of lscpu."""
    lines = re.findall(r"^(?:flags|features)\s*:(.*)$", text, re.MULTILINE | re.IGNORECASE)
    return [frozenset(line.split()) for line in lines]


def other_cpu() -> Cpu:
    """A CPU with an extension that this machine lacks."""
    try:
        cores = cores_in(Path("/proc/cpuinfo").read_text(errors="replace"))
    except OSError as error:
        raise Unavailable("kb cannot read /proc/cpuinfo: %s" % error) from error
    candidates = CPUS.get(platform.machine(), ()) if cores else ()
    found = [other for other in candidates if not any(other.flag in core for core in cores)]
    if not found:
        raise Unavailable("kb knows no CPU with an extension that this CPU lacks, or /proc/cpuinfo lists no extensions")
    return found[0]


def call_library(path: str) -> None:
    """Calls the library and checks its results."""
    bits, weights = (ctypes.c_uint32 * N)(*range(N)), (ctypes.c_float * N)(*range(N))
    ctypes.CDLL(path).step(bits, weights, N)
    assert list(bits) == [number << 5 for number in range(N)]
    assert list(weights) == [number * 0.5 + 1 for number in range(N)]


# --- jobs -------------------------------------------------------------------------------------------------------------


def compile_for(ctx: Context, march: str) -> str:
    source, library = Path(ctx.path("step.cpp")), ctx.path("step.so")
    source.write_text(SOURCE)
    command = ["c++", "-O3", "-shared", "-fPIC", "-march=%s" % march, str(source), "-o", library]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise Unavailable("c++ does not compile for %s: %s" % (march, ran.stderr[-200:]))
    return library


def train(ctx: Context, *, generic: bool, variables: bool = False) -> None:
    """Calls a library that was compiled on another machine, as one that comes with an image or a wheel."""
    other = other_cpu()
    library = compile_for(ctx, GENERIC[platform.machine()] if generic else other.march)
    if variables:
        os.environ.update(ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41", MKL_ENABLE_INSTRUCTIONS="SSE4_2")
    ctx.reached()
    call_library(library)


def call_code(ctx: Context, *, generic: bool) -> None:
    """Calls one function of machine code, which needs no compiler."""
    if platform.machine() != "x86_64" or other_cpu().flag != "xop":
        raise Unavailable("the machine code needs an x86 CPU without XOP")
    try:
        memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError as error:
        raise Unavailable("this machine forbids executable memory: %s" % error) from error
    memory.write(ROTATE if generic else ROTATE_XOP)
    rotate = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    ctx.reached()
    assert rotate(3) == 3 << 5


def call_checked(ctx: Context, *, size: int) -> None:
    """Calls a library built for this CPU; if a check in it fails, the library ends the process with a trap."""
    library = ctypes.CDLL(compile_for(ctx, "native"))
    ctx.reached()
    assert library.check(size) == size


def share_cache(ctx: Context, *, folder_per_cpu: bool = False, wrapped: bool = False, at_once: bool = False) -> None:
    """Two nodes share a home folder: rank 0 is the node that builds, rank 1 a node with this CPU that comes later.

    With `at_once`, rank 1 comes while rank 0 still builds, and would itself build with another option.
    """
    from torch.utils import cpp_extension

    other, compiler, source = other_cpu(), Path(ctx.path("cxx-for-all")), Path(ctx.path("step.cpp"))
    node = "native" if ctx.rank == 1 else other.march
    cache = Path(ctx.path("cache-" + node if folder_per_cpu else "cache"))
    cache.mkdir(exist_ok=True)
    os.environ.update(TORCH_EXTENSIONS_DIR=str(cache), CXX=str(compiler))
    os.environ["KB_NODE"] = GENERIC[platform.machine()] if wrapped else node
    if ctx.rank == 0:
        source.write_text(SOURCE)
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
    assert ctx.meet("written")
    if ctx.rank == 1 and not at_once:
        assert ctx.meet("built")
    while ctx.rank == 1 and at_once and not folder_per_cpu and not (cache / "step" / "lock").exists():
        time.sleep(0.001)
    options = ["-O3", "-march=native", *(["-D__AVX%d__" % (512 if ctx.rank == 0 else 256)] if at_once else [])]
    cpp_extension.load("step", [str(source)], extra_cflags=options, is_python_module=False)
    if ctx.rank == 0 and not at_once:
        assert ctx.meet("built")
    ctx.reached()
    if ctx.rank == 1:
        call_library(str(cache / "step" / "step.so"))


# The compiler of both nodes. It replaces -march=native by the CPU of the node, or by the one that a wrapper names.
COMPILER = """#!/bin/sh
for word; do
    shift
    [ "$word" != -march=native ] || word=-march=$KB_NODE
    set -- "$@" "$word"
done
[ "$KB_NODE" = native ] || sleep 0.5
exec c++ "$@"
"""


# --- the check: do other nodes, or extensions that are already built, use an extension that this CPU lacks? ----------

LIST_S, LARGEST = 0.5, 1 << 22
EXTENSION = re.compile(
    r"pni|s?sse|avx|fma|f16c|bmi|abm$|popcnt|movbe|adx|apx|cx16|v?aes|v?pclmul|gfni|sha|sm[34]|amx|xop|tbm|lwp"
)
COMPILER_LINE = re.compile(r"^cxx = (\S*[/-])?(c|g|clang)\+\+(-\d+)?$", re.MULTILINE)
V3 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
OPTIONS = {"-D__AVX512__": "avx512f", "-D__AVX256__": "avx2", "-mavx512f": "avx512f", "-mavx2": "avx2", "-mfma": "fma"}
FOLDERS_ADVICE = "use one folder of extensions per kind of CPU, or build for the weakest CPU: Fix 1 and 2 of the entry"
COMPARE_ADVICE = "to compare this CPU with another node's: ssh NODE cat /proc/cpuinfo > other, then --set other=other"


def check(params: Mapping[str, Any]) -> Finding:
    """Do extensions that torch built, or other nodes, use an instruction that this CPU lacks?"""
    cores, why = read_cores("/proc/cpuinfo")
    if not cores:
        return unknown(why)
    own = frozenset.intersection(*cores)
    builds = read_builds(str(params["cache"] or ""), own)
    notes = [*builds.native[:8], *builds.unread]
    if builds.lacks:
        return exposed(*builds.lacks[:8], *notes, advice=FOLDERS_ADVICE)
    is_x86 = "sse2" in own
    missing = ", ".join(sorted(V3 - own))
    if is_x86 and missing:
        why = "this CPU lacks %s: code for x86-64-v3 dies on it with SIGILL" % missing
        advice = "see Fix 3 of the entry: the VM may hide it" if "hypervisor" in own else "see Fix 4 of the entry"
        return exposed(why, *notes, advice=advice)
    if not params["other"]:
        return unknown(*notes, "kb does not know the CPUs of the other nodes", advice=COMPARE_ADVICE)
    cores, why = read_cores(str(params["other"]))
    if not cores:
        return unknown(*notes, why)
    other = frozenset.union(*cores)
    if ("sse2" in other) != is_x86:
        return unknown(*notes, "the CPU in %s has another architecture" % params["other"])
    more = ", ".join(sorted(flag for flag in other - own if not is_x86 or EXTENSION.match(flag)))
    if more:
        return exposed(
            "this CPU lacks extensions of the CPU in %s: %s" % (params["other"], more), *notes, advice=FOLDERS_ADVICE
        )
    if builds.unread:
        return unknown(*notes)
    why = "this CPU has every extension that %s lists, so code that is built there can run here" % params["other"]
    return clear(why, *notes)


def read_cores(path: str) -> Tuple[List[FrozenSet[str]], str]:
    """The extensions of each core; if there are none, the reason as well."""
    try:
        if not os.path.isfile(path):
            return [], "%s is not a file" % path
        with open(path, errors="replace") as file:
            return cores_in(file.read(LARGEST)), "%s lists no CPU flags" % path
    except (OSError, ValueError) as error:
        return [], "kb cannot read %s: %s" % (path, error)


class Builds(NamedTuple):
    """Evidence about the extensions that torch built: which need more than this CPU has, and which kb cannot judge."""

    lacks: List[str]
    native: List[str]
    unread: List[str]


def read_builds(cache: str, own: FrozenSet[str]) -> Builds:
    root = Path(cache or os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions"))
    found, end = Builds([], [], []), time.monotonic() + LIST_S
    try:
        if cache and not root.is_dir():
            raise FileNotFoundError("it is not a folder")
        for path in chain(root.glob("*/build.ninja"), root.glob("*/*/build.ninja")):
            if time.monotonic() > end:
                raise TimeoutError("reading it takes too long")
            with path.open(errors="replace") as file:
                text = file.read(LARGEST)
            if not COMPILER_LINE.search(text):  # the compiler is a wrapper, which may change the options
                continue
            words = set(text.split())
            for word, flag in OPTIONS.items():
                if word in words and flag not in own:
                    found.lacks.append("%s was built with %s, but this CPU lacks %s" % (path.parent, word, flag))
            if words & {"-march=native", "-mcpu=native"}:
                found.native.append("%s was built for the CPU of the node that built it" % path.parent)
    except (OSError, ValueError) as error:
        found.unread.append("kb did not read all of %s: %s" % (root, error))
    return found


# --- the experiments --------------------------------------------------------------------------------------------------

SIGILL = killed("SIGILL")
MACHINE_CODE = "a library: the probe contains one function as machine code"
FOREIGN = "the library is compiled for a CPU with an instruction that this CPU lacks"
PORTABLE = "the library is compiled for the baseline that every CPU of this architecture has"


def pair(
    name: str,
    fails: Callable[..., None],
    works: Callable[..., None],
    because: str,
    fix: str,
    stands_for: str = "",
    **changes: Any,
) -> Experiment:
    fidelity = "stand-in" if stands_for else "cpu"
    return Experiment(
        name=name,
        control=Arm(fails, SIGILL, because, fidelity, stands_for),
        treatment=Arm(works, completed(), fix, fidelity, stands_for),
        **{"world_size": 1, "needs": Needs(packages={}, programs=("c++",)), "expected_s": (0.5, 0.5), **changes},
    )


NATIVE = "the node that builds first has another CPU, and torch sees the same flag, native, on both nodes"
WAITED = "this node waits while another node builds for its own CPU, then loads that library"
FOLDERS = "each kind of CPU has its own folder of extensions"


def cached(name: str, because: str, fix: str, works: Mapping[str, Any], until: str = "", **both: Any) -> Experiment:
    return pair(
        name,
        partial(share_cache, **both),
        partial(share_cache, **both, **works),
        because,
        fix,
        world_size=2,
        needs=Needs(packages={"torch": ">=2.2" + until, "setuptools": ""}, programs=("c++", "ninja")),
        deadline_s=60,
        expected_s=(3.0, 3.0),
    )


built = pair(
    "built-elsewhere",
    partial(train, generic=False),
    partial(train, generic=True),
    FOREIGN,
    PORTABLE,
)
machine_code = pair(
    "machine-code",
    partial(call_code, generic=False),
    partial(call_code, generic=True),
    "the function contains an instruction that this CPU lacks",
    "the function contains only instructions that this CPU has",
    needs=Needs(packages={}),
    stands_for=MACHINE_CODE,
)

probe = Probe(
    check=check,
    params={
        "other": Param(
            "path",
            "copy of /proc/cpuinfo from the node that built the code; one file may contain copies from more nodes",
        ),
        "cache": Param("path", "folder of the job's torch extensions, if it is not the default"),
    },
    experiments=(built, machine_code),
    variants=(
        cached("shared-cache", NATIVE, FOLDERS, {"folder_per_cpu": True}),
        cached(
            "wrapper",
            NATIVE,
            "a compiler wrapper on both nodes replaces native by the baseline of all CPUs",
            {"wrapped": True},
        ),
        cached("waiting", WAITED, FOLDERS, {"folder_per_cpu": True}, until=",<2.14", at_once=True),
        pair(
            "variables",
            partial(train, generic=False, variables=True),
            partial(train, generic=True, variables=True),
            "the library needs an instruction that this CPU lacks; variables of torch, oneDNN and MKL do not help",
            PORTABLE,
        ),
        pair(
            "trap",
            partial(call_checked, size=-1),
            partial(call_checked, size=1),
            "the library is compiled for this CPU, but a check in it fails and traps",
            "the check in the library succeeds",
        ),
    ),
)
