"""A compiled extension needs a symbol that the installed torch lacks: it was built for another torch or C++ ABI."""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import struct
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Iterator, List, Mapping, NamedTuple, Set, Tuple

from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown

SOURCE = """
#include <string>
namespace c10 {  // as in torch's header c10/util/Exception.h
struct SourceLocation { const char *function, *file; unsigned line; };
class Error { public: Error(SourceLocation, std::string); private: char body[512]; };
}
extern "C" void *fail() { return new c10::Error({"fail", "extension.cpp", 1}, "wrong shape"); }
"""


def build_and_load(ctx: Context, *, abi_of_torch: bool) -> None:
    """Compiles one source, links it to the installed libc10.so, and loads it. Only _GLIBCXX_USE_CXX11_ABI differs."""
    import ctypes
    import subprocess

    import torch

    abi = int(torch.compiled_with_cxx11_abi() == abi_of_torch)
    libraries = Path(torch.__file__).parent / "lib"
    source, library = Path(ctx.path("extension.cpp")), ctx.path("extension.so")
    source.write_text(SOURCE)
    options = ["-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    subprocess.run(["c++", *options, str(source), "-o", library, f"-L{libraries}", "-lc10"], check=True)
    ctx.note(torch=torch.__version__, abi_of_torch=int(torch.compiled_with_cxx11_abi()), abi_of_extension=abi)
    ctx.reached()
    assert ctypes.CDLL(library, mode=os.RTLD_NOW).fail  # like Python's import of an extension


def load_from_cache(ctx: Context, *, cache_removed: bool) -> None:
    """Runs torch's just-in-time build while its cache, which looks up to date, holds a file with the other ABI."""
    import shutil
    import subprocess
    from unittest.mock import patch

    import torch
    from torch.utils import cpp_extension

    os.environ["TORCH_EXTENSIONS_DIR"] = ctx.path("torch_extensions")
    source, op = Path(ctx.path("fused_adam.cpp")), Path(ctx.path("torch_extensions/fused_adam"))
    source.write_text(SOURCE)
    load = partial(cpp_extension.load, "fused_adam", [str(source)], is_python_module=False)
    with patch.object(torch.ops, "load_library"):  # builds without loading, because a process loads a file only once
        load()
    options = ["-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={1 - torch.compiled_with_cxx11_abi()}"]
    libraries = f"-L{Path(torch.__file__).parent / 'lib'}"
    (op / "fused_adam.so").unlink()  # the next line writes a newer file in its place
    subprocess.run(["c++", *options, str(source), "-o", str(op / "fused_adam.so"), libraries, "-lc10"], check=True)
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.clear()  # as in a new process
    ctx.reached()
    if cache_removed:
        shutil.rmtree(op)
    load()


def load_copy(ctx: Context, *, abi_of_torch: bool) -> None:
    """Loads a copy of torch's libshm.so, which may need a function that torch lacks. This needs no compiler."""
    import ctypes

    import torch

    content = (Path(torch.__file__).parent / "lib" / "libshm.so").read_bytes()
    symbol_match = re.search(rb"\0(_ZN3c10[^\0]+)\0", content)
    assert symbol_match, "libshm.so of this torch uses no symbol of c10"
    if not abi_of_torch:
        content = content.replace(symbol_match.group(1), symbol_match.group(1)[:-1] + b"Z", 1)
    Path(ctx.path("extension.so")).write_bytes(content)
    ctx.reached()
    ctypes.CDLL(ctx.path("extension.so"), mode=os.RTLD_NOW)


STABLE = re.compile(  # C names that only torch defines; newer releases have more of them
    r"(aoti_)?torch_(abi_version|call_dispatcher|dtype_|from_blob|get_\w+_data_ptr|library_|list_|string_)"
)
MANGLED = r"_Z((T[ISV]|lsRSoRK)?N[VK]*[RO]?(3c10|2at|5torch|4c10d|6caffe2)|\d+THP[A-Z])"
OF_TORCH = re.compile(rf"{MANGLED}|aoti_torch_|{STABLE.pattern}")
ABI_SYMBOLS = re.compile(r"_ZN[VK]*[RO]?3c10(5Error|4cuda|6detail(14torchCheckFail|23torchInternalAssertFail))")


class Scan(NamedTuple):
    """What compiled files need of torch."""

    read: List[str]  # the files that use torch
    lacking: List[str]  # the symbols of c10 that the installed torch lacks, in words
    others: List[Tuple[Path, str]]  # symbols that libc10.so does not define; a larger library of torch may
    looked_at: int
    late: bool  # files are left for which there was no time


def check(params: Mapping[str, Any]) -> Finding:
    """Does an extension need symbols of c10, at or torch that the installed libraries do not define?"""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return unknown("torch is not installed in this interpreter")
    root = Path(spec.origin).parent
    end = time.monotonic() + 0.8
    has: Set[str] = set()
    for name in ("libc10.so", "libc10_cuda.so"):
        has |= {symbol for symbol, defined in symbols(root / "lib" / name) if defined}
    if not has:
        return unknown(f"kb cannot read the symbols of {root}/lib/libc10.so")
    files = iter([params["extension"]]) if params["extension"] else extensions(root)
    scan = scan_files(files, root.parent, has, end)
    if scan.lacking:
        return exposed(*scan.lacking[:8], advice="reinstall it for this torch, or delete it if it is in a cache")
    if not scan.read:
        return unknown(
            f"none of the {scan.looked_at} libraries that kb read uses c10, at or torch",
            advice="--set extension=path/to/extension.so",
        )
    return judge_others(scan, root, end)


def scan_files(files: Iterator[Path], site: Path, has: Set[str], end: float) -> Scan:
    """Compares the symbols that the files need with those that libc10.so and libc10_cuda.so have, until `end`."""
    read, lacking, others = [], [], []
    looked_at, late = 0, False
    for file in files:
        if time.monotonic() > end:
            late = True
            break
        looked_at += 1
        if not NAMES.search(tables(file)[1]):
            continue
        needed = {symbol for symbol, defined in symbols(file) if not defined and OF_TORCH.match(symbol)}
        if not needed:
            continue
        read.append(file.name if file.parent == site else f"{file.parent.name}/{file.name}")
        missing = sorted(symbol for symbol in needed - has if ABI_SYMBOLS.match(symbol))
        others += [(file, symbol) for symbol in sorted(needed - has) if not ABI_SYMBOLS.match(symbol)]
        if missing:
            lacking.append(f"{file} needs {missing[0]}, which the installed torch lacks{explain_abi(missing, has)}")
    return Scan(read, lacking, others, looked_at, late)


def judge_others(scan: Scan, root: Path, end: float) -> Finding:
    """Looks for the other symbols in the larger libraries of torch."""
    message = f"{', '.join(scan.read[:8])}: torch has all symbols of c10::Error and c10::cuda that these need"
    wanted, looked_in = {symbol for _, symbol in scan.others}, 0
    for name in REST:
        if wanted and time.monotonic() < end:
            wanted = missing_from(root / "lib" / name, wanted)
            looked_in += 1
    absent = [(file, symbol) for file, symbol in scan.others if symbol in wanted]
    newer = {file: symbol for file, symbol in absent if STABLE.match(symbol)}
    if newer and looked_in == len(REST) and (root / "lib" / REST[0]).exists():
        lacking = [f"{file} needs {symbol}: it was built for a newer torch" for file, symbol in newer.items()]
        return exposed(*lacking[:8], advice="install its release for this torch")
    unnamed = [f"{file} needs {symbol}, which kb did not find in torch" for file, symbol in absent]
    if scan.late or unnamed:
        left = ["there are more libraries, which kb did not read in time"] if scan.late else []
        return unknown(message, *left, *unnamed[:4], advice="import the extension, because only the linker can tell")
    extent = (
        f"kb read {scan.looked_at} libraries, at most two folders below {root.parent}; it compared no object layouts"
    )
    return clear(message, "torch also has all symbols of at and torch that they need", extent)


REST = ("libtorch_cpu.so", "libtorch_cuda.so", "libtorch_python.so")


def explain_abi(missing: List[str], has: Set[str]) -> str:
    """Says which ABI of std::string the extension has, if that differs from torch's: a function's name shows it."""
    new = any("__cxx11" in symbol for symbol in has if "5ErrorC" in symbol)
    if new and any(re.search(r"Ss(E|RK|$)|RKSs", symbol) for symbol in missing):
        return " (it was built with CXX11_ABI=0, torch with 1)"
    if not new and any("__cxx11" in symbol for symbol in missing):
        return " (it was built with CXX11_ABI=1, torch with 0)"
    return ""


NAMES = re.compile(rb"\0(?:" + OF_TORCH.pattern.encode() + rb")")
OWN = ("torch", "functorch", "torchgen", "nvidia", "triton")  # torch itself and the packages that it loads


def extensions(root: Path) -> Iterator[Path]:
    """Yields libraries at the top of site-packages, DeepSpeed's ops, just-in-time builds, then those in packages."""
    site = root.parent
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    python = "py%d%d%s" % (*sys.version_info[:2], getattr(sys, "abiflags", ""))
    builds = Path(cache, "torch_extensions").glob("%s_%s/*/*.so" % (python, accelerator(root)))
    if os.environ.get("TORCH_EXTENSIONS_DIR"):
        builds = Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/*.so")
    yield from sorted([*site.glob("*.so"), *site.glob("deepspeed/ops/*/*.so"), *builds])
    for folder in sorted(site.iterdir()):  # torchvision/_C.so, vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so
        if folder.name not in OWN and folder.suffix not in (".dist-info", ".libs", ".py", ".so"):
            yield from sorted(folder.glob("*.so"))
            yield from sorted(folder.glob("*/*.so"))


def accelerator(root: Path) -> str:
    """The part of the cache's name that this torch reads, such as cu124; a build for another CUDA is not loaded."""
    try:
        text = (root / "version.py").read_text(errors="replace")
    except OSError:
        return "*"
    values = dict(re.findall(r"^(cuda|hip)\b[^=\n]*= *['\"]?([\d.]+|None)", text, re.MULTILINE))
    if values.get("hip", "None") != "None":
        return "rocm*"
    if "cuda" not in values:
        return "*"
    return "cpu" if values["cuda"] == "None" else "cu" + values["cuda"].replace(".", "")


def tables(path: Path) -> Tuple[bytes, bytes]:
    """Returns the dynamic symbols of a 64-bit ELF file and their zero-separated names, or nothing for other files."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:6] != b"\x7fELF\x02\x01":
                return b"", b""
            start, size, count = struct.unpack_from("<Q10xHH", data, 0x28)
            sections = [struct.unpack_from("<4xI16xQQI12xQ", data, start + size * index) for index in range(count)]
            for kind, at, length, names, _ in sections:
                if kind == 11:  # SHT_DYNSYM
                    table = data[at : at + length // 24 * 24]
                    return table, data[sections[names][1] : sections[names][1] + sections[names][2]]
    except (OSError, ValueError, IndexError, struct.error):
        pass
    return b"", b""


def symbols(path: Path) -> Iterator[Tuple[str, bool]]:
    """Yields the dynamic symbols of a file, and whether each is defined there or may stay undefined."""
    table, names = tables(path)
    for name, kind, section in struct.iter_unpack("<IBxH16x", table):
        found = section != 0 or kind >> 4 == 2  # a weak symbol may stay undefined
        yield names[name : names.find(b"\0", name)].decode(errors="replace"), found


def missing_from(path: Path, wanted: Set[str]) -> Set[str]:
    """Returns the symbols that a large library does not define. Its table may store one as the end of a longer name."""
    table, names = tables(path)
    whole = set(names.split(b"\0"))
    left = {symbol for symbol in wanted if symbol.encode() not in whole}
    starts = {name for name, section in struct.iter_unpack("<I2xH16x", table) if section} if left else set()

    def is_end(symbol: str) -> bool:
        at = names.find(symbol.encode() + b"\0")
        while at >= 0 and at not in starts:
            at = names.find(symbol.encode() + b"\0", at + 1)
        return at >= 0

    return {symbol for symbol in left if not is_end(symbol)}


UNDEFINED = raised(r"undefined symbol: _ZN[VK]*[RO]?3c10")

probe = Probe(
    check=check,
    params={"extension": Param("path", "a compiled extension to read (default: those in site-packages and caches)")},
    experiments=(
        Experiment(
            name="compiler",
            control=Arm(
                partial(build_and_load, abi_of_torch=False),
                expect=UNDEFINED,
                because="the extension was compiled with a different value of _GLIBCXX_USE_CXX11_ABI than torch",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(build_and_load, abi_of_torch=True),
                expect=completed(),
                because="the same source was compiled with torch's own value of _GLIBCXX_USE_CXX11_ABI",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1"}, programs=("c++",)),
            deadline_s=60,
            expected_s=(1.0, 1.0),
        ),
        Experiment(
            name="copy",
            control=Arm(
                partial(load_copy, abi_of_torch=False),
                expect=UNDEFINED,
                because="the library needs a function that the installed torch lacks",
                fidelity="stand-in",
                stands_for="an extension built for another torch; libshm.so has one letter of a symbol changed",
            ),
            treatment=Arm(
                partial(load_copy, abi_of_torch=True),
                expect=completed(),
                because="the unchanged library was built for this torch",
                fidelity="stand-in",
                stands_for="an extension built for this torch; it is torch's own libshm.so",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1"}),
            deadline_s=30,
            expected_s=(0.2, 0.2),
        ),
    ),
    variants=(
        Experiment(
            name="cache",
            control=Arm(
                partial(load_from_cache, cache_removed=False),
                expect=UNDEFINED,
                because="torch's build takes the cache for up to date, and loads the file with the other ABI from it",
                fidelity="stand-in",
                stands_for="an op that was built before torch was replaced; it is compiled here with the other ABI",
            ),
            treatment=Arm(
                partial(load_from_cache, cache_removed=True),
                expect=completed(),
                because="the folder of the op is removed, so torch builds the op again",
                fidelity="stand-in",
                stands_for="an op that was built before torch was replaced; it is compiled here with the other ABI",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1", "setuptools": ""}, programs=("c++", "ninja")),
            deadline_s=120,
            expected_s=(4.0, 6.0),
        ),
    ),
)
