"""A compiled extension needs a symbol of another torch than the installed one, or of the other std::string ABI."""

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
from typing import Any, Iterator, List, Mapping, Set, Tuple

from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown

SOURCE = """
#include <string>
namespace c10 {  // as torch's header c10/util/Exception.h has it
struct SourceLocation { const char *function, *file; unsigned line; };
class Error { public: Error(SourceLocation, std::string); private: char body[512]; };
}
extern "C" void *fail() { return new c10::Error({"fail", "extension.cpp", 1}, "wrong shape"); }
"""


def build_and_load(ctx: Context, *, abi_of_torch: bool) -> None:
    """One source, linked to the installed libc10.so; only -D_GLIBCXX_USE_CXX11_ABI differs."""
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
    assert ctypes.CDLL(library, mode=os.RTLD_NOW).fail  # as Python's import loads an extension


def load_from_cache(ctx: Context, *, cache_removed: bool) -> None:
    """torch's just-in-time build finds its folder up to date, and the file in it is of another ABI than torch."""
    import shutil
    import subprocess
    from unittest.mock import patch

    import torch
    from torch.utils import cpp_extension

    os.environ["TORCH_EXTENSIONS_DIR"] = ctx.path("torch_extensions")
    source, op = Path(ctx.path("fused_adam.cpp")), Path(ctx.path("torch_extensions/fused_adam"))
    source.write_text(SOURCE)
    load = partial(cpp_extension.load, "fused_adam", [str(source)], is_python_module=False)
    with patch.object(torch.ops, "load_library"):  # built, not loaded: a process loads a file once
        load()
    options = ["-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={1 - torch.compiled_with_cxx11_abi()}"]
    libraries = f"-L{Path(torch.__file__).parent / 'lib'}"
    (op / "fused_adam.so").unlink()  # in its place a newer file
    subprocess.run(["c++", *options, str(source), "-o", str(op / "fused_adam.so"), libraries, "-lc10"], check=True)
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.clear()  # as in a new process
    ctx.reached()
    if cache_removed:
        shutil.rmtree(op)
    load()


def load_copy(ctx: Context, *, abi_of_torch: bool) -> None:
    """Without a compiler: torch's libshm.so, and a copy that needs a function torch does not have."""
    import ctypes

    import torch

    content = (Path(torch.__file__).parent / "lib" / "libshm.so").read_bytes()
    symbol_match = re.search(rb"\0(_ZN3c10[^\0]+)\0", content)
    assert symbol_match, "libshm.so of this torch uses nothing of c10"
    if not abi_of_torch:
        content = content.replace(symbol_match.group(1), symbol_match.group(1)[:-1] + b"Z", 1)
    Path(ctx.path("extension.so")).write_bytes(content)
    ctx.reached()
    ctypes.CDLL(ctx.path("extension.so"), mode=os.RTLD_NOW)


STABLE = re.compile(  # names in C that torch alone defines; a newer torch has more of them
    r"(aoti_)?torch_(abi_version|call_dispatcher|dtype_|from_blob|get_\w+_data_ptr|library_|list_|string_)"
)
MANGLED = r"_Z((T[ISV]|lsRSoRK)?N[VK]*[RO]?(3c10|2at|5torch|4c10d|6caffe2)|\d+THP[A-Z])"
OF_TORCH = re.compile(rf"{MANGLED}|aoti_torch_|{STABLE.pattern}")
ABI_SYMBOLS = re.compile(r"_ZN[VK]*[RO]?3c10(5Error|4cuda|6detail(14torchCheckFail|23torchInternalAssertFail))")


def check(params: Mapping[str, Any]) -> Finding:
    """Symbols of c10::Error and c10::cuda that extensions need, against those of the installed libraries."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return unknown("torch is not installed in this interpreter")
    root = Path(spec.origin).parent
    end = time.monotonic() + 0.8
    has: Set[str] = set()
    for name in ("libc10.so", "libc10_cuda.so"):
        has |= {symbol for symbol, defined in symbols(root / "lib" / name) if defined}
    if not has:
        return unknown(f"the symbols of {root}/lib/libc10.so cannot be read")
    files = iter([params["extension"]]) if params["extension"] else extensions(root.parent)
    read, lacking, others = [], [], []
    looked_at, late = 0, False
    for file in files:
        if time.monotonic() > end:
            late = True
            break
        looked_at += 1
        if not NAMES.search(tables(file)[1]):
            continue
        wants = {symbol for symbol, defined in symbols(file) if not defined and OF_TORCH.match(symbol)}
        if not wants:
            continue
        read.append(file.name if file.parent == root.parent else f"{file.parent.name}/{file.name}")
        missing = sorted(symbol for symbol in wants - has if ABI_SYMBOLS.match(symbol))
        others += [(file, symbol) for symbol in sorted(wants - has) if not ABI_SYMBOLS.match(symbol)]
        if missing:
            lacking.append(f"{file} wants {missing[0]}, which the installed torch does not have{why(missing, has)}")
    if lacking:
        return exposed(*lacking[:8], advice="reinstall it for this torch, or delete it if it is in a cache")
    if not read:
        return unknown(
            f"none of the {looked_at} libraries looked at uses c10, at or torch",
            advice="--set extension=path/to/some.so",
        )
    told = f"{', '.join(read[:8])}: what they want of c10::Error and c10::cuda is there"
    wanted, looked_in = {symbol for _, symbol in others}, 0
    for name in REST:
        if wanted and time.monotonic() < end:
            wanted = missing_from(root / "lib" / name, wanted)
            looked_in += 1
    absent = [(file, symbol) for file, symbol in others if symbol in wanted]
    newer = {file: symbol for file, symbol in absent if STABLE.match(symbol)}
    if newer and looked_in == len(REST) and (root / "lib" / REST[0]).exists():
        lacking = [f"{file} wants {symbol}: it was built for a newer torch" for file, symbol in newer.items()]
        return exposed(*lacking[:8], advice="install its release for this torch")
    unnamed = [f"{file} wants {symbol}" for file, symbol in absent]
    if late or unnamed:
        left = ["there are more, which were not read in time"] if late else []
        return unknown(told, *left, *unnamed[:4], advice="import it: the linker has the last word")
    looked = f"of {looked_at} libraries, in {root.parent} down to two folders; layouts of objects were not compared"
    return clear(told, "and so is what they want of at and torch", looked)


REST = ("libtorch_cpu.so", "libtorch_cuda.so", "libtorch_python.so")


def why(missing: List[str], has: Set[str]) -> str:
    """The two ABIs of std::string give one function two names."""
    new = any("__cxx11" in symbol for symbol in has if "5ErrorC" in symbol)
    if new and any(re.search(r"Ss(E|RK|$)|RKSs", symbol) for symbol in missing):
        return " (it was built with CXX11_ABI=0, torch with 1)"
    if not new and any("__cxx11" in symbol for symbol in missing):
        return " (it was built with CXX11_ABI=1, torch with 0)"
    return ""


NAMES = re.compile(rb"\0(?:" + OF_TORCH.pattern.encode() + rb")")
OWN = ("torch", "functorch", "torchgen", "nvidia", "triton")  # torch itself and what it loads


def extensions(site: Path) -> Iterator[Path]:
    """The top level of site-packages, DeepSpeed's ops, the cache of just-in-time builds, then what packages hold."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    builds = Path(cache, "torch_extensions").glob("py%d%d_*/*/*.so" % sys.version_info[:2])
    if os.environ.get("TORCH_EXTENSIONS_DIR"):
        builds = Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/*.so")
    yield from sorted([*site.glob("*.so"), *site.glob("deepspeed/ops/*/*.so"), *builds])
    for folder in sorted(site.iterdir()):  # torchvision/_C.so, vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so
        if folder.name not in OWN and folder.suffix not in (".dist-info", ".libs", ".py", ".so"):
            yield from sorted(folder.glob("*.so"))
            yield from sorted(folder.glob("*/*.so"))


def tables(path: Path) -> Tuple[bytes, bytes]:
    """The dynamic symbols of a 64-bit ELF file and their names, each between zeros; nothing for anything else."""
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
    """The dynamic symbols of a file, and whether they need no other library."""
    table, names = tables(path)
    for name, kind, section in struct.iter_unpack("<IBxH16x", table):
        found = section != 0 or kind >> 4 == 2  # a weak symbol may stay undefined
        yield names[name : names.find(b"\0", name)].decode(errors="replace"), found


def missing_from(path: Path, wanted: Set[str]) -> Set[str]:
    """Those of these symbols that a large library does not name; a name may be the end of a longer one."""
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
    params={
        "extension": Param("path", "one compiled extension to look at (default: those in site-packages and caches)")
    },
    experiments=(
        Experiment(
            name="compiler",
            control=Arm(
                partial(build_and_load, abi_of_torch=False),
                expect=UNDEFINED,
                because="the extension was compiled with the other value of _GLIBCXX_USE_CXX11_ABI than torch",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(build_and_load, abi_of_torch=True),
                expect=completed(),
                because="the same source compiled with torch's own value",
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
                because="the library wants a function by a name that the installed torch does not have",
                fidelity="stand-in",
                stands_for="an extension built for another torch: libshm.so with one letter of a symbol changed",
            ),
            treatment=Arm(
                partial(load_copy, abi_of_torch=True),
                expect=completed(),
                because="the unchanged library, built for this torch",
                fidelity="stand-in",
                stands_for="an extension built for this torch: its own libshm.so",
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
                because="torch's build finds nothing to do, and loads the file of the other ABI that is in the cache",
                fidelity="stand-in",
                stands_for="an op that was built before torch was replaced: compiled here with the other ABI",
            ),
            treatment=Arm(
                partial(load_from_cache, cache_removed=True),
                expect=completed(),
                because="the folder of the op is removed, so torch builds it anew",
                fidelity="stand-in",
                stands_for="an op that was built before torch was replaced: compiled here with the other ABI",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1", "setuptools": ""}, programs=("c++", "ninja")),
            deadline_s=120,
            expected_s=(4.0, 6.0),
        ),
    ),
)
