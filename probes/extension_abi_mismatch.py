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
from typing import Any, Iterator, List, Mapping, Optional, Set, Tuple

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


ABI_SYMBOLS = re.compile(r"_ZNK?3c10(5Error|4cuda|6detail(14torchCheckFail|23torchInternalAssertFail))")


def check(params: Mapping[str, Any]) -> Finding:
    """Symbols of c10::Error and c10::cuda that extensions need, against those of the installed libraries."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return unknown("torch is not installed in this interpreter")
    root = Path(spec.origin).parent
    end = time.monotonic() + 0.6
    has: Set[str] = set()
    for name in ("libc10.so", "libc10_cuda.so"):
        has |= {symbol for symbol, defined in symbols(root / "lib" / name) if defined}
    if not has:
        return unknown(f"the symbols of {root}/lib/libc10.so cannot be read")
    files = [params["extension"]] if params["extension"] else extensions(root.parent)
    read, lacking = [], []
    for file in files:
        if time.monotonic() > end:
            break
        wants = [symbol for symbol, defined in symbols(file) if not defined and ABI_SYMBOLS.match(symbol)]
        if not wants:
            continue
        read.append(file.name)
        missing = sorted(set(wants) - has)
        if missing:
            lacking.append(f"{file} wants {missing[0]}, which the installed torch does not have{why(missing, has)}")
    if lacking:
        return exposed(*lacking[:8], advice="reinstall it for this torch, or delete it if it is in a cache")
    if not read:
        return unknown(
            f"none of the {len(files)} extensions looked at uses c10::Error or c10::cuda",
            advice="--set extension=path/to/some.so",
        )
    return clear(
        f"{', '.join(read[:8])}: what they want of c10::Error and c10::cuda is there; nothing else was compared"
    )


def why(missing: List[str], has: Set[str]) -> str:
    """The two ABIs of std::string give one function two names."""
    new = any("__cxx11" in symbol for symbol in has if "5ErrorC" in symbol)
    if new and any(re.search(r"Ss(E|RK|$)|RKSs", symbol) for symbol in missing):
        return " (it was built with CXX11_ABI=0, torch with 1)"
    if not new and any("__cxx11" in symbol for symbol in missing):
        return " (it was built with CXX11_ABI=1, torch with 0)"
    return ""


def extensions(site: Path) -> List[Path]:
    """Extensions on the top level of site-packages, DeepSpeed's pre-built ops, and the cache of just-in-time builds."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    builds = Path(cache, "torch_extensions").glob("py%d%d_*/*/*.so" % sys.version_info[:2])
    if os.environ.get("TORCH_EXTENSIONS_DIR"):
        builds = Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/*.so")
    result = [*site.glob("*.so"), *site.glob("deepspeed/ops/*/*.so"), *builds]
    return sorted(result)[:60]


def symbols(path: Path) -> Iterator[Tuple[str, bool]]:
    """The dynamic symbols of a 64-bit ELF file, and whether it defines them; none for anything else."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:6] != b"\x7fELF\x02\x01":
                return
            start, size, count = struct.unpack_from("<Q10xHH", data, 0x28)
            sections = [struct.unpack_from("<4xI16xQQI12xQ", data, start + size * index) for index in range(count)]
            table: Optional[Tuple[int, ...]] = next(
                (section for section in sections if section[0] == 11), None
            )  # SHT_DYNSYM
            if table is None:
                return
            names = sections[table[3]][1]
            for at in range(table[1], table[1] + table[2], 24):
                name, section = struct.unpack_from("<I2xH", data, at)
                yield data[names + name : data.find(b"\0", names + name)].decode(errors="replace"), section != 0
    except (OSError, ValueError, IndexError, struct.error):
        return


UNDEFINED = raised(r"undefined symbol: _ZNK?3c10")

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
)
