"""torch.compile and Triton build C and C++ at run time, and the image has no compiler, no Python.h or no libcuda.so."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional, Tuple

from kb.packages import release, version
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Probe,
    Unavailable,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)

SOURCE = """
#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "cuda_utils", 0, -1, 0};
PyMODINIT_FUNC PyInit_cuda_utils(void) { return PyModule_Create(&definition); }
static int rank(void) { int sum = 0; for (int i = 0; i < 2; ++i) { sum += i; } return sum; }
int (*used)(void) = rank;
"""


def hide_compilers(ctx: Context) -> None:
    """A PATH with an assembler and a linker, as an image without gcc and clang may have it."""
    folder = Path(ctx.path("bin"))
    folder.mkdir()
    for name in ("as", "ld"):
        program = shutil.which(name)
        if program:
            (folder / name).symlink_to(program)
    os.environ["PATH"] = str(folder)


def forget_compilers() -> None:
    for name in ("CC", "CXX"):
        os.environ.pop(name, None)


def train(ctx: Context, *, remedy: str) -> None:
    """One call of a compiled function. On a GPU Triton needs the compiler, on the CPU the inductor itself does."""
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=ctx.path("inductor"), TRITON_CACHE_DIR=ctx.path("triton"))
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    forget_compilers()
    if remedy != "compiler":
        hide_compilers(ctx)

    import torch
    import torch._dynamo
    import torch._inductor.config

    if hasattr(torch._inductor.config, "cpp_cache_precompile_headers"):
        torch._inductor.config.cpp_cache_precompile_headers = False
    torch._inductor.config.cpp.vec_isa_ok = False  # no vectors: one call of g++, not ten, and a short one
    hidden = torch.randn(64, device=ctx.device)
    compiled = torch.compile(lambda hidden: torch.sin(hidden) * 2, fullgraph=remedy == "force_eager")
    ctx.reached()
    if remedy == "force_eager":
        torch.compiler.set_stance("force_eager")
    elif remedy == "suppress_errors":
        torch._dynamo.config.suppress_errors = True
    assert torch.allclose(compiled(hidden), torch.sin(hidden) * 2, atol=1e-5)


def name_compiler(ctx: Context, *, variable: str) -> None:
    """The compiler is not on PATH, and an environment variable gives its place as the inductor is configured."""
    program = shutil.which("g++" if variable == "CXX" else "gcc")
    assert program
    forget_compilers()
    hide_compilers(ctx)
    os.environ.update({"TORCHINDUCTOR_CACHE_DIR": ctx.path("inductor"), variable: program})
    ctx.reached()
    for name in ("config", "cpp_builder"):  # it reads the variables when it is imported, which may have been before
        sys.modules.pop(f"torch._inductor.{name}", None)
        importlib.import_module(f"torch._inductor.{name}")
    from torch._inductor.cpp_builder import get_cpp_compiler

    assert get_cpp_compiler() == program


def build(ctx: Context, cache: str = "triton", **options: Any) -> None:
    """What Triton does at the first kernel: it builds a small C module, here one without CUDA in it."""
    os.environ["TRITON_CACHE_DIR"] = ctx.path(cache)
    module = importlib.import_module("triton.runtime.build")
    compile_module_from_src = getattr(module, "compile_module_from_src", None)
    if compile_module_from_src is None:
        raise Unavailable("this Triton has the function elsewhere")
    if not (Path(ctx.path("reached-0")).exists()):
        ctx.reached()
    finder = getattr(module, "_find_compiler", None)
    if finder:  # Triton 3.9 remembers the compiler; the second job of a cache is another process
        finder.cache_clear()
    assert compile_module_from_src(SOURCE, "cuda_utils", **options).__name__ == "cuda_utils"


def build_without_compiler(ctx: Context, *, compiler_on_path: bool) -> None:
    forget_compilers()
    if not compiler_on_path:
        hide_compilers(ctx)
    build(ctx)


def build_from_cache(ctx: Context, *, same_cache: bool) -> None:
    """The first job had a compiler, the second has none."""
    build(ctx, "triton-1")
    forget_compilers()
    hide_compilers(ctx)
    build(ctx, "triton-1" if same_cache else "triton-2")


def build_with(ctx: Context, *, cc_is_one_program: bool) -> None:
    program = str(shutil.which("gcc"))
    os.environ["CC"] = program if cc_is_one_program else f"{program} -O1"
    build(ctx)


def build_by(ctx: Context, *, standard: str) -> None:
    """A compiler that takes C in this standard unless it is told another: gnu90 is what gcc 4.8 does."""
    program = Path(ctx.path("cc"))
    program.write_text('#!/bin/sh\nexec %s -std=%s "$@"\n' % (shutil.which("gcc"), standard))
    program.chmod(0o755)
    os.environ["CC"] = str(program)
    build(ctx)


def build_without_headers(ctx: Context, *, headers_in_cpath: bool) -> None:
    """Python.h is not where Python says that it is."""
    from unittest.mock import patch

    paths = sysconfig.get_paths()
    headers = paths["include"]
    if not Path(headers, "Python.h").exists():
        raise Unavailable(f"no Python.h in {headers}")
    if headers_in_cpath:
        os.environ["CPATH"] = headers
    with patch.object(sysconfig, "get_paths", lambda *_, **__: {**paths, "include": ctx.path("include")}):
        build(ctx)


def link(ctx: Context, *, linked: bool) -> None:
    """The driver's library has no name for the linker: libcuda.so.1 without libcuda.so."""
    driver, own = Path(ctx.path("driver")), Path(ctx.path("lib"))
    driver.mkdir()
    own.mkdir()
    source, library = Path(ctx.path("empty.c")), driver / "libcuda.so.1"
    source.write_text("int cuInit(unsigned flags) { return (int)flags; }\n")
    command = ["gcc", "-shared", "-fPIC", str(source), "-o"]
    found = subprocess.run([*command, ctx.path("a.so"), "-lcuda"], stderr=subprocess.DEVNULL, check=False)
    if found.returncode == 0:
        raise Unavailable("the linker of this machine finds libcuda.so")
    subprocess.run([*command, str(library), "-Wl,-soname,libcuda.so.1"], check=True)
    if linked:
        (own / "libcuda.so").symlink_to(library)
    os.environ["LIBRARY_PATH"] = str(own)
    build(ctx, library_dirs=[str(driver)], libraries=["cuda"])


def check(_: Mapping[str, Any]) -> Finding:
    """Ask the compilers that Triton and the inductor would take to read Python.h; nothing is written or linked."""
    c_compiler = os.environ.get("CC", shutil.which("gcc") or shutil.which("clang"))
    (c_reads, c_text), (cxx_reads, cxx_text) = reads(c_compiler, "c"), reads(os.environ.get("CXX", "g++"), "c++")
    triton = version("triton")
    evidence = [c_text, cxx_text]
    evidence.append(f"Triton {triton}" if triton else "Triton is not installed: torch.compile is for the CPU here")
    if c_reads is None or cxx_reads is None:
        return unknown(*evidence, advice="try again when the machine is less busy")
    if not c_reads and (triton or not cxx_reads):
        return exposed(*evidence, advice="install gcc, g++ and the headers of this Python, or set CC and CXX")
    if not cxx_reads:
        message = "enough for Triton's kernels; what the inductor compiles for the CPU needs C++"
        return unknown(*evidence, message, advice="install g++, or set CXX")
    if not triton:
        return unknown(*evidence, advice="run this in the environment of the job")
    if "-std=c++20" in cxx_text and not (2,) < release("torch")[:2] <= (2, 11):
        message = "the inductor of torch up to 2.11 asks for C++17, a newer one for C++20"
        return unknown(*evidence, message, advice="name a newer g++ in CXX, gcc 10 at least")
    noexec = [folder for folder in cache_folders() if is_noexec(folder)]
    if noexec:
        return exposed(*evidence, f"{noexec[0]} is mounted noexec", advice="TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR")
    folders = driver_folders()
    if not folders:
        message = "no libcuda.so.1 where Triton looks; of an AMD GPU's library this check knows nothing"
        return unknown(*evidence, message, advice="run this on a node with GPUs, in the container of the job")
    spec = importlib.util.find_spec("triton")
    header = os.path.join(os.path.dirname(spec.origin or ""), "backends/nvidia/include/cuda.h") if spec else ""
    if not os.path.exists(header):
        return unknown(*evidence, "this Triton has no cuda.h of its own", advice="the wheel of PyPI has one")
    named = filter(None, [*folders, *os.environ.get("LIBRARY_PATH", "").split(":")])
    if release("triton") < (3, 6) and not any(os.path.exists(os.path.join(folder, "libcuda.so")) for folder in named):
        message = f"libcuda.so.1 is in {folders[0]}, libcuda.so is not: -lcuda is not found there"
        advice = "if linking fails, the link of fix 4; the linker may know other folders"
        return unknown(*evidence, message, advice=advice)
    if not shutil.which("ld"):
        return unknown(*evidence, "there is no ld on PATH", advice="install binutils")
    return clear(*evidence, f"libcuda.so.1 is in {folders[0]}")


def reads(compiler: Optional[str], language: str) -> Tuple[Optional[bool], str]:
    """Whether this compiler reads Python.h; None where it did not answer in time."""
    if not compiler or not shutil.which(compiler):
        return False, f"no {language} compiler" + (f": {compiler!r} is not a program" if compiler else "")
    include = sysconfig.get_paths(scheme="posix_prefix")["include"]
    command = [compiler, "-x", language, "-fsyntax-only", f"-I{include}"]
    note = ""
    for standard in ("-std=c++20", "-std=c++17") if language == "c++" else ("",):
        ran = run([*command, *([standard] if standard else []), "-"], SOURCE)
        if ran is None:
            return None, f"{compiler} did not answer"
        if ran.returncode == 0:
            return True, f"{compiler} reads Python.h{note}"
        note = f", but not with {standard}"
    lines = [line for line in ran.stderr.splitlines() if "error" in line] or ["it failed"]
    return False, f"{compiler}: {lines[0]}"


def run(command: List[str], text: str = "") -> Any:
    """None where the program does not start or takes too long."""
    try:
        return subprocess.run(
            command, input=text, capture_output=True, encoding="utf-8", errors="replace", timeout=3, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def cache_folders() -> List[str]:
    """Where Triton and the inductor keep what they build and load."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    triton = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    return [triton, os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()]


def is_noexec(folder: str) -> bool:
    """Whether nothing may be executed there; a folder that is still to come has the flags of the one above."""
    for above in (Path(folder).absolute(), *Path(folder).absolute().parents):
        if above.is_dir():
            return bool(os.statvfs(above).f_flag & os.ST_NOEXEC)
    return False


def driver_folders() -> List[str]:
    """Where Triton would find the driver's library: first the linker's cache, else LD_LIBRARY_PATH."""
    named = os.environ.get("TRITON_LIBCUDA_PATH")
    ran = None if named else run(["/sbin/ldconfig", "-p"])
    lines = ran.stdout.splitlines() if ran else []
    folders = [os.path.dirname(line.split()[-1]) for line in lines if "libcuda.so.1" in line]
    others = [named] if named else folders or os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return [folder for folder in others if folder and os.path.exists(os.path.join(folder, "libcuda.so.1"))]


NO_CC = r"Failed to find C compiler\. Please specify via CC environment variable"
NO_CXX = r"No working C\+\+ compiler found in torch\._inductor\.config\.cpp\.cxx"


def pair(
    name: str,
    job: Callable[..., None],
    keyword: str,
    expect: Expect,
    because: str,
    fix: str,
    values: Any = (False, True),
    stands_for: str = "",
    needs: Mapping[str, str] = {"triton": ">=3.5"},
    programs: Any = ("gcc",),
    seconds: float = 1.0,
) -> Experiment:
    """`keyword` has the first value in the control arm and the second in the treatment."""
    fidelity = "stand-in" if stands_for else "cpu"
    control, treatment = (partial(job, **{keyword: value}) for value in values)
    return Experiment(
        name=name,
        control=Arm(control, expect, because, fidelity, stands_for),
        treatment=Arm(treatment, completed(), fix, fidelity, stands_for),
        world_size=1,
        needs=Needs(packages=needs, programs=programs),
        deadline_s=150,
        expected_s=(seconds, 2 * seconds),
    )


NOTHING = "no compiler is on PATH"
MODULE = "the C module that Triton builds for CUDA: here one that needs Python.h and no GPU"
inductor = pair(
    "inductor",
    train,
    "remedy",
    raised(NO_CXX),
    NOTHING,
    "g++ is on PATH",
    values=("", "compiler"),
    needs={"torch": ">=2.2"},
    programs=("g++",),
    seconds=6.0,
)

probe = Probe(
    check=check,
    experiments=(inductor.on_gpus(gpus=1, expect=raised(NO_CC), expected_s=(20.0, 30.0)), inductor),
    variants=(
        pair(
            "cxx",
            name_compiler,
            "variable",
            raised(NO_CXX),
            "CC gives the place of gcc, which the inductor does not read",
            "CXX gives the place of g++",
            values=("CC", "CXX"),
            needs={"torch": ">=2.5"},
            programs=("gcc", "g++"),
            seconds=2.0,
        ),
        pair(
            "disabled",
            train,
            "remedy",
            raised(NO_CXX),
            NOTHING,
            "the stance is force_eager: the same function runs uncompiled, with fullgraph=True as well",
            values=("", "force_eager"),
            needs={"torch": ">=2.6"},
            programs=(),
            seconds=4.0,
        ),
        pair(
            "suppressed",
            train,
            "remedy",
            raised(NO_CXX),
            NOTHING,
            "suppress_errors is on: what cannot be compiled runs uncompiled, with a warning",
            values=("", "suppress_errors"),
            needs={"torch": ">=2.2"},
            programs=(),
            seconds=4.0,
        ),
        pair(
            "triton",
            build_without_compiler,
            "compiler_on_path",
            raised(NO_CC),
            NOTHING,
            "gcc is on PATH",
            stands_for=MODULE,
        ),
        pair(
            "triton-cache",
            build_from_cache,
            "same_cache",
            raised(NO_CC),
            "another cache folder than in the job that had a compiler",
            "the cache of the job that had a compiler",
            stands_for=MODULE,
        ),
        pair(
            "cc-words",
            build_with,
            "cc_is_one_program",
            raised(r"No such file or directory: '\S+ -O1'"),
            "CC holds a program and an option, which are taken for one name",
            "CC holds the program alone",
            stands_for=MODULE,
        ),
        pair(
            "old-compiler",
            build_by,
            "standard",
            raised(r"Command '\['[^']*/cc', '[^']*cuda_utils\.c'.* returned non-zero exit status 1"),
            "the compiler takes C of 1990, where a for loop declares nothing",
            "the compiler takes C of 2011",
            values=("gnu90", "gnu11"),
            stands_for=MODULE + "; and a newer gcc with the default of gcc 4.8",
        ),
        pair(
            "python-h",
            build_without_headers,
            "headers_in_cpath",
            raised(r"Command '\['[^']*gcc', '[^']*cuda_utils\.c'.* returned non-zero exit status 1"),
            "there is no Python.h where Python looks for its headers",
            "CPATH gives the folder that has it",
            stands_for=MODULE,
        ),
        pair(
            "libcuda",
            link,
            "linked",
            raised(r"Command '\['[^']*gcc', '[^']*cuda_utils\.c'.*'-lcuda'.* returned non-zero exit status 1"),
            "the folder of the driver has libcuda.so.1 and no libcuda.so",
            "a link libcuda.so leads to it",
            stands_for=MODULE + "; and an empty library with the name of the driver's",
        ),
    ),
)
