"""torch.compile and Triton build C and C++ at run time, but the image lacks a compiler, Python.h or libcuda.so."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional, Tuple

from kb.host import compiler_caches, is_noexec
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
    """Reduces PATH to an assembler and a linker, as in an image without gcc and clang."""
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
    """Calls a compiled function once. On a GPU Triton needs the compiler; on the CPU the inductor itself needs it."""
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
    torch._inductor.config.cpp.vec_isa_ok = (
        False  # without vectors, the inductor calls g++ once, not ten times, and briefly
    )
    hidden = torch.randn(64, device=ctx.device)
    compiled = torch.compile(lambda hidden: torch.sin(hidden) * 2, fullgraph=remedy == "force_eager")
    ctx.reached()
    if remedy == "force_eager":
        torch.compiler.set_stance("force_eager")
    elif remedy == "suppress_errors":
        torch._dynamo.config.suppress_errors = True
    assert torch.allclose(compiled(hidden), torch.sin(hidden) * 2, atol=1e-5)


def name_compiler(ctx: Context, *, variable: str) -> None:
    """The compiler is not on PATH; an environment variable names it before the inductor reads its configuration."""
    program = shutil.which("g++" if variable == "CXX" else "gcc")
    assert program
    forget_compilers()
    hide_compilers(ctx)
    os.environ.update({"TORCHINDUCTOR_CACHE_DIR": ctx.path("inductor"), variable: program})
    ctx.reached()
    for name in ("config", "cpp_builder"):  # the import reads the variables; an earlier import read the old ones
        sys.modules.pop(f"torch._inductor.{name}", None)
        importlib.import_module(f"torch._inductor.{name}")
    from torch._inductor.cpp_builder import get_cpp_compiler

    assert get_cpp_compiler() == program


def build(ctx: Context, cache: str = "triton", **options: Any) -> None:
    """Builds a small C module, as Triton does for the first kernel, but without CUDA in it."""
    os.environ["TRITON_CACHE_DIR"] = ctx.path(cache)
    module = importlib.import_module("triton.runtime.build")
    compile_module_from_src = getattr(module, "compile_module_from_src", None)
    if compile_module_from_src is None:
        raise Unavailable("triton.runtime.build of this Triton has no compile_module_from_src")
    if not Path(ctx.path("reached-0")).exists():
        ctx.reached()
    finder = getattr(module, "_find_compiler", None)
    if finder:  # Triton 3.9 caches the compiler in the process; the second job would be another process
        finder.cache_clear()
    assert compile_module_from_src(SOURCE, "cuda_utils", **options).__name__ == "cuda_utils"


def build_without_compiler(ctx: Context, *, compiler_on_path: bool) -> None:
    forget_compilers()
    if not compiler_on_path:
        hide_compilers(ctx)
    build(ctx)


def build_from_cache(ctx: Context, *, same_cache: bool) -> None:
    """The first job has a compiler, the second job has none."""
    build(ctx, "triton-1")
    forget_compilers()
    hide_compilers(ctx)
    build(ctx, "triton-1" if same_cache else "triton-2")


def build_with_cc(ctx: Context, *, cc_is_one_program: bool) -> None:
    program = str(shutil.which("gcc"))
    os.environ["CC"] = program if cc_is_one_program else f"{program} -O1"
    build(ctx)


def build_with_standard(ctx: Context, *, standard: str) -> None:
    """Builds with a compiler whose default is this C standard; the default of gcc 4.8 is gnu90."""
    program = Path(ctx.path("cc"))
    program.write_text('#!/bin/sh\nexec %s -std=%s "$@"\n' % (shutil.which("gcc"), standard))
    program.chmod(0o755)
    os.environ["CC"] = str(program)
    build(ctx)


def build_without_headers(ctx: Context, *, headers_in_cpath: bool) -> None:
    """Python.h is not in the folder that sysconfig names."""
    from unittest.mock import patch

    paths = sysconfig.get_paths()
    headers = paths["include"]
    if not Path(headers, "Python.h").exists():
        raise Unavailable(f"there is no Python.h in {headers}")
    if headers_in_cpath:
        os.environ["CPATH"] = headers
    with patch.object(sysconfig, "get_paths", lambda *_, **__: {**paths, "include": ctx.path("include")}):
        build(ctx)


def link(ctx: Context, *, linked: bool) -> None:
    """The linker does not find the library of the driver, because there is libcuda.so.1 but no libcuda.so."""
    driver, links = Path(ctx.path("driver")), Path(ctx.path("lib"))
    driver.mkdir()
    links.mkdir()
    source, library = Path(ctx.path("empty.c")), driver / "libcuda.so.1"
    source.write_text("int cuInit(unsigned flags) { return (int)flags; }\n")
    command = ["gcc", "-shared", "-fPIC", str(source), "-o"]
    test_link = subprocess.run([*command, ctx.path("a.so"), "-lcuda"], stderr=subprocess.DEVNULL, check=False)
    if test_link.returncode == 0:
        raise Unavailable("the linker of this machine finds libcuda.so")
    subprocess.run([*command, str(library), "-Wl,-soname,libcuda.so.1"], check=True)
    if linked:
        (links / "libcuda.so").symlink_to(library)
    os.environ["LIBRARY_PATH"] = str(links)
    build(ctx, library_dirs=[str(driver)], libraries=["cuda"])


def check(_: Mapping[str, Any]) -> Finding:
    """Can the compilers that Triton and the inductor would call read Python.h? It writes and links nothing."""
    c_compiler = os.environ.get("CC", shutil.which("gcc") or shutil.which("clang"))
    (c_reads, c_text), (cxx_reads, cxx_text) = reads(c_compiler, "c"), reads(os.environ.get("CXX", "g++"), "c++")
    triton = version("triton")
    evidence = [c_text, cxx_text]
    evidence.append(
        f"Triton {triton}" if triton else "Triton is not installed, so torch.compile compiles only for the CPU here"
    )
    if c_reads is None or cxx_reads is None:
        return unknown(*evidence, advice="run the check again when the machine is less busy")
    if not c_reads and (triton or not cxx_reads):
        return exposed(*evidence, advice="install gcc, g++ and the headers of this Python, or set CC and CXX")
    if not cxx_reads:
        message = "this is enough for the kernels of Triton, but the inductor needs C++ to compile for the CPU"
        return unknown(*evidence, message, advice="install g++, or set CXX")
    if not triton:
        return unknown(*evidence, advice="run this in the environment of the job")
    if "-std=c++20" in cxx_text and not (2,) < release("torch")[:2] <= (2, 11):
        message = "the inductor of torch up to 2.11 compiles C++17, that of newer releases C++20"
        return unknown(*evidence, message, advice="set CXX to a newer g++, release 10 or later")
    noexec = [folder for folder in compiler_caches().values() if is_noexec(folder)]
    if noexec:
        return exposed(
            *evidence,
            f"{noexec[0]} is mounted noexec",
            advice="set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to folders that allow execution",
        )
    folders = driver_folders()
    if not folders:
        message = "there is no libcuda.so.1 where Triton looks; this check does not look for the library of an AMD GPU"
        return unknown(*evidence, message, advice="run this on a node with GPUs, in the container of the job")
    spec = importlib.util.find_spec("triton")
    header = os.path.join(os.path.dirname(spec.origin or ""), "backends/nvidia/include/cuda.h") if spec else ""
    if not os.path.exists(header):
        return unknown(
            *evidence,
            "this Triton does not contain cuda.h",
            advice="install the wheel of Triton from PyPI, which contains cuda.h",
        )
    named = filter(None, [*folders, *os.environ.get("LIBRARY_PATH", "").split(":")])
    if release("triton") < (3, 6) and not any(os.path.exists(os.path.join(folder, "libcuda.so")) for folder in named):
        message = f"{folders[0]} contains libcuda.so.1 but no libcuda.so, so the linker does not find -lcuda there"
        advice = "if linking fails, make the link of Fix 4; the linker may search other folders too"
        return unknown(*evidence, message, advice=advice)
    if not shutil.which("ld"):
        return unknown(*evidence, "there is no linker (ld) on PATH", advice="install binutils")
    return clear(*evidence, f"libcuda.so.1 is in {folders[0]}")


def reads(compiler: Optional[str], language: str) -> Tuple[Optional[bool], str]:
    """Whether this compiler reads Python.h, with the evidence; None if it did not answer in time."""
    if not compiler or not shutil.which(compiler):
        return False, f"there is no {language} compiler" + (f": {compiler!r} is not a program" if compiler else "")
    include = sysconfig.get_paths(scheme="posix_prefix")["include"]
    command = [compiler, "-x", language, "-fsyntax-only", f"-I{include}"]
    note = ""
    for standard in ("-std=c++20", "-std=c++17") if language == "c++" else ("",):
        ran = run([*command, *([standard] if standard else []), "-"], SOURCE)
        if ran is None:
            return None, f"{compiler} did not answer in 3 seconds"
        if ran.returncode == 0:
            return True, f"{compiler} reads Python.h{note}"
        note = f", but not with {standard}"
    lines = [line for line in ran.stderr.splitlines() if "error" in line] or ["it failed without an error message"]
    return False, f"{compiler}: {lines[0]}"


def run(command: List[str], text: str = "") -> Any:
    """The finished process; None if the program does not start or takes too long."""
    try:
        return subprocess.run(
            command, input=text, capture_output=True, encoding="utf-8", errors="replace", timeout=3, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def driver_folders() -> List[str]:
    """Where Triton finds the library of the driver: in the linker's cache, otherwise in LD_LIBRARY_PATH."""
    named = os.environ.get("TRITON_LIBCUDA_PATH")
    ran = None if named else run(["/sbin/ldconfig", "-p"])
    lines = ran.stdout.splitlines() if ran else []
    folders = [os.path.dirname(line.split()[-1]) for line in lines if "libcuda.so.1" in line]
    candidates = [named] if named else folders or os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return [folder for folder in candidates if folder and os.path.exists(os.path.join(folder, "libcuda.so.1"))]


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
    """`keyword` has the first of `values` in the control arm and the second in the treatment arm."""
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


NO_COMPILER = "no compiler is on PATH, and neither CC nor CXX is set"
MODULE = "the C module that Triton builds for CUDA; the one built here needs Python.h but no GPU"
inductor = pair(
    "inductor",
    train,
    "remedy",
    raised(NO_CXX),
    NO_COMPILER,
    "g++ is on PATH, and the inductor compiles with it",
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
            "CC names gcc, but the inductor does not read CC",
            "CXX names g++, and the inductor reads CXX",
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
            NO_COMPILER,
            "the stance force_eager runs the same function uncompiled, even with fullgraph=True",
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
            NO_COMPILER,
            "with suppress_errors, a function that cannot be compiled runs uncompiled, with a warning",
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
            NO_COMPILER,
            "gcc is on PATH, and Triton builds with it",
            stands_for=MODULE,
        ),
        pair(
            "triton-cache",
            build_from_cache,
            "same_cache",
            raised(NO_CC),
            "the job without a compiler uses a different cache folder than the job that had one",
            "the job without a compiler reuses the cache of the job that had one",
            stands_for=MODULE,
        ),
        pair(
            "cc-words",
            build_with_cc,
            "cc_is_one_program",
            raised(r"No such file or directory: '\S+ -O1'"),
            "CC holds a program and an option, which Triton takes for the name of one program",
            "CC holds only the name of the program",
            stands_for=MODULE,
        ),
        pair(
            "old-compiler",
            build_with_standard,
            "standard",
            raised(r"Command '\['[^']*/cc', '[^']*cuda_utils\.c'.* returned non-zero exit status 1"),
            "the compiler defaults to C of 1990, in which a for loop cannot declare a variable",
            "the compiler defaults to C of 2011",
            values=("gnu90", "gnu11"),
            stands_for="gcc 4.8, by a newer gcc with its default; and " + MODULE,
        ),
        pair(
            "python-h",
            build_without_headers,
            "headers_in_cpath",
            raised(r"Command '\['[^']*gcc', '[^']*cuda_utils\.c'.* returned non-zero exit status 1"),
            "there is no Python.h where Python looks for its headers",
            "CPATH names the folder that contains Python.h",
            stands_for=MODULE,
        ),
        pair(
            "libcuda",
            link,
            "linked",
            raised(r"Command '\['[^']*gcc', '[^']*cuda_utils\.c'.*'-lcuda'.* returned non-zero exit status 1"),
            "the folder of the driver has libcuda.so.1 but no libcuda.so",
            "a symbolic link libcuda.so points to libcuda.so.1",
            stands_for="the library of the driver, by an empty one of the same name; and " + MODULE,
        ),
    ),
)
