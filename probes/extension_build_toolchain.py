"""The build of a torch extension fails: ninja, the compiler, a header or the GPU architecture is missing or unfit."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any, Callable, List, Mapping, Tuple
from unittest.mock import patch

from kb.packages import release as installed
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
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

SOURCE = 'extern "C" int answer() { return 42; }\n'
PROGRAMS = ("c++", "g++", "gcc", "cc", "clang", "clang++", "as", "ld", "sh", "which", "ninja")
VARIABLES = ("CC", "CXX", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "TORCH_CUDA_ARCH_LIST")
PATHS = ("CPATH", "LIBRARY_PATH")
KNOWN = re.compile(r"\d\.\da?(\+PTX)?$|$")  # torch 2.1 knows these names; later releases know more


def write_script(ctx: Context, name: str, text: str) -> None:
    path = Path(ctx.path(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text + "\n")
    path.chmod(0o755)


def build(
    ctx: Context,
    environment: Mapping[str, str],
    suffix: str = "cpp",
    text: str = SOURCE,
    load: bool = True,
    link: Tuple[str, ...] = (),
) -> None:
    """Compiles, loads and calls an extension that torch builds at run time."""
    import ctypes

    from torch.utils import cpp_extension

    source, folder = Path(ctx.path("answer." + suffix)), Path(ctx.path("torch_extensions/answer"))
    source.write_text(text)
    folder.mkdir(parents=True)
    for name in VARIABLES + PATHS:
        os.environ.pop(name, None)
    os.environ.update(environment)
    ctx.reached()
    options: Any = {"extra_ldflags": list(link), "build_directory": str(folder), "is_python_module": False}
    cpp_extension.load("answer", [str(source)], **options)
    library = folder / "answer.so"
    assert ctypes.CDLL(str(library)).answer() == 42 if load else library.stat().st_size > 1000


def with_ninja(ctx: Context, *, on_path: bool) -> None:
    """Two folders of links: one for ninja, like the bin of an environment, one for all other programs of a build."""
    environment, system = ctx.path("environment"), ctx.path("system")
    os.mkdir(environment)
    os.mkdir(system)
    for name in filter(shutil.which, PROGRAMS):
        os.symlink(str(shutil.which(name)), os.path.join(environment if name == "ninja" else system, name))
    build(ctx, {"PATH": environment + os.pathsep + system if on_path else system})


def with_compiler(ctx: Context, *, present: bool) -> None:
    build(ctx, {"CXX": str(shutil.which("c++")) if present else "/opt/gcc-toolset-99/bin/g++"})


def with_headers(ctx: Context, *, cpath: bool) -> None:
    """The folder in which Python looks for its headers is empty, as without python3-dev."""
    headers = sysconfig.get_paths()["include"]
    if not os.path.exists(os.path.join(headers, "Python.h")):
        raise Unavailable("this Python has no headers: %s" % headers)
    os.makedirs(ctx.path("empty"))
    with patch("sysconfig.get_path", lambda *_, **__: ctx.path("empty")):
        build(ctx, {"CPATH": headers} if cpath else {}, text="#include <Python.h>\n" + SOURCE)


def with_library(ctx: Context, *, named: bool) -> None:
    """Links libcudart, as torch does for CUDA extensions; here it is a linker script in a separate folder."""
    Path(ctx.path("lib")).mkdir()
    Path(ctx.path("lib/libcudart.so")).write_text("INPUT(-lc)\n")
    plain = {name: value for name, value in os.environ.items() if name not in PATHS}
    found = ["c++", "-shared", "-x", "c++", "/dev/null", "-lcudart", "-o", ctx.path("found.so")]
    if subprocess.run(found, env=plain, stderr=subprocess.DEVNULL, check=False).returncode == 0:
        raise Unavailable("the linker of this machine finds libcudart without LIBRARY_PATH")
    build(ctx, {"LIBRARY_PATH": ctx.path("lib")} if named else {}, link=("-lcudart",))


def flags_of_nvcc(ctx: Context, environment: Mapping[str, str]) -> List[str]:
    """The arguments that torch passes to nvcc on a machine without GPUs: nvcc is a script that saves them."""
    import torch
    from torch.utils import cpp_extension

    write_script(ctx, "cuda/bin/nvcc", 'echo "$@" > %s; exit 1' % ctx.path("flags"))
    count = patch.object(torch.cuda, "device_count", lambda: 0)
    with count, patch.object(cpp_extension, "CUDA_HOME", ctx.path("cuda")):
        try:
            build(ctx, environment, suffix="cu")
        except RuntimeError as error:
            assert "Error building extension" in str(error), error
    return Path(ctx.path("flags")).read_text().split()


def for_nvcc(ctx: Context, *, cc: bool) -> None:
    compilers = {"CXX": str(shutil.which("c++")), **({"CC": "/opt/gcc-13/bin/gcc"} if cc else {})}
    flags = flags_of_nvcc(ctx, {**compilers, "TORCH_CUDA_ARCH_LIST": "9.0"})
    if "-ccbin" not in flags:
        raise Symptom("CXX is set, and of %d arguments of nvcc none is -ccbin" % len(flags))
    assert flags[flags.index("-ccbin") + 1] == "/opt/gcc-13/bin/gcc"


def for_architectures(ctx: Context, *, named: bool) -> None:
    flags = flags_of_nvcc(ctx, {"TORCH_CUDA_ARCH_LIST": "8.0;9.0+PTX"} if named else {})
    wanted = {"compute_80,code=sm_80", "compute_90,code=sm_90", "compute_90,code=compute_90"}
    assert {flag.split("arch=")[-1] for flag in flags if flag.startswith("-gencode")} == wanted


def with_nvcc(ctx: Context, *, cc: bool) -> None:
    """Runs the real nvcc, with a gcc first on PATH that claims to be release 99."""
    from torch.utils import cpp_extension

    nvcc, gcc, cxx = str(shutil.which("nvcc")), str(shutil.which("gcc")), str(shutil.which("g++"))
    write_script(ctx, "new/gcc", 'exec %s -U__GNUC__ -D__GNUC__=99 "$@"' % gcc)
    environment = {"PATH": ctx.path("new") + os.pathsep + os.environ["PATH"], "CXX": cxx, "TORCH_CUDA_ARCH_LIST": "8.0"}
    nothing: List[str] = []  # torch may be a CPU build, without the libraries that linking needs
    replaced: Any = {"_prepare_ldflags": lambda *_: nothing, "_import_module_from_library": lambda *_: None}
    with patch.multiple(cpp_extension, CUDA_HOME=str(Path(nvcc).parent.parent), **replaced):
        build(ctx, {**environment, **({"CC": gcc} if cc else {})}, suffix="cu", load=False)


def check_of_torch(ctx: Context, *, version: str) -> None:
    """Runs the test of BuildExtension before it compiles; CUDA toolkit 11.7 accepts gcc up to 11."""
    import torch
    from torch.utils import cpp_extension

    write_script(ctx, "cuda/bin/nvcc", "echo 'Cuda compilation tools, release 11.7, V11.7.99'")
    os.environ.pop("TORCH_DONT_CHECK_COMPILER_ABI", None)
    with patch.object(cpp_extension, "CUDA_HOME", ctx.path("cuda")), patch.object(torch.version, "cuda", "11.7"):
        ctx.reached()
        cpp_extension._check_cuda_version("g++", torch.torch_version.TorchVersion(version))


def with_edited_torch(ctx: Context, *, prints_version: bool) -> None:
    """The folklore replaces `ninja -v` in cpp_extension.py by `ninja --version`. The toolchain is complete."""
    run: Callable[..., Any] = subprocess.run

    def run_edited(command: Any, *args: Any, **options: Any) -> Any:
        is_edited = prints_version and command[:2] == ["ninja", "-v"]
        return run(["ninja", "--version"] if is_edited else command, *args, **options)

    with patch("subprocess.run", run_edited):
        build(ctx, {})


def check(_: Mapping[str, Any]) -> Finding:
    """Are ninja, a compiler and Python's headers there, and does nvcc accept the gcc that torch would pass to it?"""
    problems: List[str] = []
    ninja = shutil.which("ninja")
    if ninja is None:
        near_python = Path(sys.executable).with_name("ninja")
        problems.append("ninja is not on PATH%s" % (", but exists: %s" % near_python if near_python.exists() else ""))
    elif version_of(ninja)[0] not in (0, None):
        problems.append("%s --version exits with status %s" % (ninja, version_of(ninja)[0]))
    compiler, host = os.environ.get("CXX", "c++"), os.environ.get("CC", "gcc")
    if shutil.which((compiler.split() or [""])[0]) is None:
        problems.append(
            "there is no program %r, the C++ compiler that torch would use (CXX, or c++ if CXX is unset)" % compiler
        )
    release, host_release, limit = release_of(compiler), release_of(host), limit_of_nvcc()
    if 0 < release < 9 or (release == 9 and installed("torch") >= (2, 12)):
        problems.append("%s is release %d, but torch 2.2.2 needs 9 and torch 2.12 needs 10" % (compiler, release))
    headers = [sysconfig.get_paths()["include"], *os.environ.get("CPATH", "").split(os.pathsep)]
    if not any(folder and os.path.exists(os.path.join(folder, "Python.h")) for folder in headers):
        problems.append("Python.h is neither in %s nor in CPATH" % headers[0])
    if not host:
        problems.append("CC is set but empty, and torch passes it to nvcc: unset CC")
    chosen = any("ccbin" in os.environ.get(name, "") for name in VARIABLES) or "NVCC_CCBIN" in os.environ
    if 0 < limit < host_release and not chosen:
        problems.append("nvcc accepts gcc up to release %d, but %s is release %d" % (limit, host, host_release))
    if importlib.util.find_spec("setuptools") is None:
        problems.append("setuptools is not installed, but torch.utils.cpp_extension imports it")
    if problems:
        return exposed(
            *problems, advice="install a prebuilt wheel, which needs none of this, or install what is missing"
        )
    evidence = "ninja, %s and Python.h are installed" % compiler
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1", "NoDevFiles")
    if not os.environ.get("TORCH_CUDA_ARCH_LIST") and not (visible and os.path.exists("/dev/nvidiactl")):
        return unknown(evidence, "kb sees no GPU, so a CUDA build needs TORCH_CUDA_ARCH_LIST")
    if chosen or not limit or not host_release or not release:
        return unknown(
            evidence,
            "kb cannot tell which gcc nvcc would accept: its flags, gcc, or the header with its limit is unclear",
        )
    if not (cuda_root() / "bin" / "nvcc").exists():
        return unknown(evidence, "%s has no bin/nvcc, which compiles the .cu files" % cuda_root())
    unclear = [name for name in re.split("[; ]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "")) if not KNOWN.match(name)]
    if unclear:
        return unknown(evidence, "kb cannot tell whether this torch knows %s in TORCH_CUDA_ARCH_LIST" % unclear)
    if release == 9 or glibc() >= (2, 41):
        return unknown(evidence, "the build may still refuse gcc 9, or glibc 2.41 with a CUDA toolkit up to 13.1")
    if not any((cuda_root() / folder / "libcudart.so").exists() for folder in ("lib64", "lib")):
        return unknown(evidence, "the toolkit's folders contain no libcudart.so, which CUDA extensions are linked to")
    return clear(evidence, "%s is release %d, and nvcc accepts gcc up to %d" % (host, host_release, limit))


def version_of(program: str) -> Tuple[Any, str]:
    """Exit status and output of `program --version`; None and "" if it cannot run or takes too long."""
    try:
        run = subprocess.run(
            [program, "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=0.3, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None, ""
    return run.returncode, run.stdout.decode(errors="replace")


def release_of(compiler: str) -> int:
    """The release of a gcc; 0 for clang, and if the compiler does not print its release."""
    text = version_of(compiler)[1]
    match = re.search(r"\) (\d+)\.\d", text.split("\n")[0])  # gcc (Debian 12.2.0-14) 12.2.0
    return int(match.group(1)) if match and "clang" not in text else 0


def numbers(text: str) -> Tuple[int, ...]:
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def glibc() -> Tuple[int, ...]:
    try:
        return numbers(os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (AttributeError, OSError, ValueError):
        return (0, 0)


def cuda_root() -> Path:
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or (nvcc and str(Path(nvcc).parent.parent))
    return Path(home or "/usr/local/cuda")


def limit_of_nvcc() -> int:
    root = cuda_root()
    try:
        for path in (root / "include/crt/host_config.h", *root.glob("targets/*/include/crt/host_config.h")):
            match = re.search(r"__GNUC__ > (\d+)", path.read_text(errors="replace")) if path.is_file() else None
            if match:
                return int(match.group(1))
    except (OSError, ValueError):
        pass
    return 0


def pair(
    name: str,
    job: Callable[..., None],
    keyword: str,
    values: Tuple[Any, Any],
    expect: Expect,
    because: str,
    fix: str,
    stands_for: str = "",
    programs: Tuple[str, ...] = ("ninja", "c++"),
) -> Experiment:
    fidelity = "stand-in" if stands_for else "cpu"
    fails, works = (partial(job, **{keyword: value}) for value in values)
    return Experiment(
        name=name,
        control=Arm(fails, expect, because, fidelity, stands_for),
        treatment=Arm(works, completed(), fix, fidelity, stands_for),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.1", "setuptools": ""}, programs=programs),
        deadline_s=60,
        expected_s=(1.0, 2.0),
    )


OFF_ON = (False, True)
BROKEN = r"Error building extension 'answer'[\s\S]*"
NO_NINJA = raised(r"Ninja is required to load C\+\+ extensions")
WHICH = r"Command '\['which', '\S+g\+\+'\]' returned non-zero"  # torch 2.2, no longer 2.5
NOT_FOUND = raised(BROKEN + r"g\+\+: (not found|No such file)|" + WHICH)
NO_HEADER = raised(BROKEN + r"fatal error: '?Python\.h")
NO_LIBRARY = raised(BROKEN + r"cannot find -lcudart")
REFUSED = raised(BROKEN + r"unsupported GNU version! gcc versions later than \d+ are not supported")
NO_CCBIN = symptom(r"of \d+ arguments of nvcc none is -ccbin")
NO_GPU = raised("list index out of range")
TOO_NEW = raised(r"The current installed version of g\+\+ \(12\.2\.0\) is greater than the maximum required version")
NEW_GCC = "a gcc that is too new: here a gcc that claims to be release 99"
NO_HEADERS = "a Python without headers: here Python names an empty folder"
STUB = "libcudart: here a linker script"
SCRIPT, REAL, VERSIONS = "nvcc: here a script", ("ninja", "gcc", "g++", "nvcc"), ("12.2.0", "11.4.0")

probe = Probe(
    check=check,
    experiments=(
        pair(
            "ninja",
            with_ninja,
            "on_path",
            OFF_ON,
            NO_NINJA,
            "the folder of ninja is not on PATH",
            "the folder of ninja is on PATH",
        ),
    ),
    variants=(
        pair(
            "compiler",
            with_compiler,
            "present",
            OFF_ON,
            NOT_FOUND,
            "CXX names a program that does not exist",
            "CXX names an installed compiler",
        ),
        pair(
            "headers",
            with_headers,
            "cpath",
            OFF_ON,
            NO_HEADER,
            "the folder of Python's headers is empty",
            "CPATH names a folder with Python.h",
            NO_HEADERS,
        ),
        pair(
            "linker",
            with_library,
            "named",
            OFF_ON,
            NO_LIBRARY,
            "the linker does not search the folder of libcudart",
            "LIBRARY_PATH names the folder of libcudart",
            STUB,
        ),
        pair(
            "nvcc",
            with_nvcc,
            "cc",
            OFF_ON,
            REFUSED,
            "only CXX names an older gcc, so nvcc uses the gcc on PATH, which is too new",
            "CC names the older gcc too, and torch passes CC to nvcc",
            NEW_GCC,
            REAL,
        ),
        pair(
            "ccbin",
            for_nvcc,
            "cc",
            OFF_ON,
            NO_CCBIN,
            "only CXX names a compiler, so torch does not pass -ccbin to nvcc",
            "CC names a compiler too, so torch passes it to nvcc as -ccbin",
            SCRIPT,
        ),
        pair(
            "architectures",
            for_architectures,
            "named",
            OFF_ON,
            NO_GPU,
            "there is no GPU, and TORCH_CUDA_ARCH_LIST is not set",
            "TORCH_CUDA_ARCH_LIST names the architectures",
            SCRIPT,
        ),
        pair(
            "limits",
            check_of_torch,
            "version",
            VERSIONS,
            TOO_NEW,
            "gcc is release 12, but CUDA 11.7 accepts gcc up to 11",
            "gcc is release 11",
            SCRIPT,
        ),
        pair(
            "edited",
            with_edited_torch,
            "prints_version",
            (True, False),
            raised(r"answer\.so"),
            "torch calls `ninja --version` instead of `ninja -v`, so it builds nothing",
            "torch calls `ninja -v`, which builds the extension",
        ),
    ),
)
