"""A library has no code for an AMD GPU, or HSA_OVERRIDE_GFX_VERSION makes the runtime take the GPU for another one.

No AMD GPU is used. The check reads what the ROCm runtime reads (sysfs, variables, file names), by the same rules. The
experiments write these files to a folder, so they are models.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Set, Tuple
from unittest.mock import patch

from kb.host import file_text
from kb.packages import numbers
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)

OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
LIMITS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
NODES = "sys/class/kfd/kfd/topology/nodes"
NUMBERED_SINCE = (6, 3)  # releases up to rocm-6.2.4 read only the variable without a number; nobody looked at 6.3
EMPTY_IGNORED_SINCE = (7, 13)  # or later: merged in May 2026
# Each line has the targets that one generic code object serves (rocr-runtime, isa.cpp); gfx908 and gfx90a have none.
FAMILIES = (
    "gfx900 gfx902 gfx904 gfx906 gfx909 gfx90c",
    "gfx942 gfx950",
    "gfx1010 gfx1011 gfx1012 gfx1013",
    "gfx1030 gfx1031 gfx1032 gfx1033 gfx1034 gfx1035 gfx1036",
    "gfx1100 gfx1101 gfx1102 gfx1103 gfx1150 gfx1151 gfx1152 gfx1153",
    "gfx1200 gfx1201",
)


# --- the files that the runtime reads -------------------------------------------------------------------------------


class Card(NamedTuple):
    """A GPU of the topology: its node number as the runtime counts, and its target, which is empty if unknown."""

    node: int
    target: str


def target_of(major: int, minor: int, step: int) -> str:
    return "gfx%d%x%x" % (major, minor, step)


def cards_of(root: Path) -> Tuple[List[Card], List[str]]:
    """The GPUs that the runtime counts, and why it hides others. It counts CPUs too, so a GPU is rarely node 0."""
    cards: List[Card] = []
    hidden: List[str] = []
    number = 0
    try:
        nodes = [int(folder.name) for folder in (root / NODES).iterdir() if folder.name.isdecimal()]
    except (OSError, ValueError):
        return [], []
    for node in sorted(nodes):
        folder = root / NODES / str(node)
        gpu = file_text(folder / "gpu_id")
        values = dict(re.findall(r"^(\w+) (\d{1,20})$", file_text(folder / "properties"), re.MULTILINE))
        if not gpu or (gpu != "0" and not values):
            hidden.append("kb cannot read node %d, as in a container without that GPU" % node)
            continue
        if gpu != "0":
            minor = values.get("drm_render_minor", "0")
            if not list((root / "dev/dri").glob("render?" + minor)):
                hidden.append("node %d has no render device %s here, so the runtime does not count it" % (node, minor))
                continue
            version = int(values.get("gfx_target_version", "0"))
            parts = (version // 10000 % 100, version // 100 % 100, version % 100)
            cards.append(Card(number, target_of(*parts) if version else ""))
        number += 1
    return cards, hidden


def override_of(card: Card, rocm: Tuple[int, ...]) -> Tuple[str, Optional[str]]:
    """The name of the variable that applies to this card, and its value; "" and None if no variable is set."""
    names = ["%s_%d" % (OVERRIDE, card.node), OVERRIDE] if rocm >= NUMBERED_SINCE else [OVERRIDE]
    for name in names:
        if name in os.environ:
            return name, os.environ[name]
    return "", None


def parsed(value: str) -> str:
    """The target that a value names; empty if the runtime rejects the value."""
    match = re.match(r"\s*(\d{1,2})\.(\d{1,3})\.(\d{1,3})$", value, re.ASCII)
    fits = match and int(match[1]) <= 63 and int(match[2]) <= 255 and int(match[3]) <= 255
    return target_of(int(match[1]), int(match[2]), int(match[3])) if match and fits else ""


# --- the targets of the libraries -----------------------------------------------------------------------------------


class Held(NamedTuple):
    """The targets for which a library has code, None if kb cannot read them. `line` is the evidence."""

    targets: Optional[Set[str]]
    line: str
    some: FrozenSet[str] = frozenset()  # targets for which only a part of the library has code

    def serves(self, target: str) -> Optional[bool]:
        if self.targets is None or not target:
            return None
        if target in self.targets:
            return True
        near = self.targets | self.some  # code for gfx90a:xnack+ may not run on this gfx90a
        may_serve = any(held.split(":")[0] == target or "generic" in held for held in near)
        return None if may_serve else False


def torch_folder(given: Optional[Path]) -> Optional[Path]:
    if given:
        return given
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError, AttributeError):
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def kernels(torch: Path) -> Held:
    """The list that torch.cuda.get_arch_list() returns: torch is compiled with it as one string."""
    if (torch.parent / "_rocm_sdk_core").exists():
        found = sorted(path.name.split("-")[0] for path in torch.parent.glob("amd_torch_device_*.dist-info"))
        packages = ", ".join(found) or "none is installed"
        return Held(None, "this torch from AMD's own index keeps its kernels in separate packages: " + packages)
    try:
        data = (torch / "lib/libtorch_python.so").read_bytes()
    except OSError as error:
        return Held(None, "kb cannot read libtorch_python.so: %s" % error.strerror)
    texts = {text.decode() for text in re.findall(rb"\0(gfx[\w:+-]+(?: gfx[\w:+-]+)*)\0", data)}
    longest = max(texts, key=len, default="")
    if not longest or (" " not in longest and len(texts) > 1):
        return Held(None, "libtorch_python.so contains no list of targets that this check can read")
    return Held(set(longest.split()), "torch has kernels for " + longest)


def gemms(torch: Path, root: Path) -> Held:
    """The targets of rocBLAS, which has a separate list of files; it aborts on a GPU without a file."""
    given = os.environ.get("ROCBLAS_TENSILE_LIBPATH")
    folders = [torch / "lib/rocblas/library", *sorted(torch.parent.glob("_rocm_sdk_libraries*/lib/rocblas/library"))]
    for folder in [Path(given)] if given else [*folders, root / "opt/rocm/lib/rocblas/library"]:
        try:
            names = " ".join(os.listdir(str(folder)))
        except OSError:
            continue
        found = set(re.findall(r"\bTensileLibrary_(?:lazy_)?(gfx[0-9a-f]{3,4})\.dat\b", names))
        if found and "TensileLibrary.dat" not in names:
            return Held(found, "rocBLAS has files for %s (%s)" % (" ".join(sorted(found)), folder))
    return Held(None, "kb found no rocBLAS files whose names contain a target")


def in_library(path: Path) -> Held:
    """The targets of an extension. Each of its bundles names its targets, unless the bundle is compressed."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = bundles(data)
    except (OSError, ValueError, IndexError, struct.error) as error:
        return Held(None, "kb cannot read %s: %s" % (path, error))
    if None in found:
        return Held(None, "%s contains compressed code, which does not name its targets" % path.name)
    lists = [targets for targets in found if targets]
    if not lists:
        return Held(None, "%s contains no AMD code that this check can read" % path.name)
    in_some, in_all = set.union(*lists), set.intersection(*lists)
    return Held(in_all, "%s has code for %s" % (path.name, " ".join(sorted(in_some))), frozenset(in_some))


def bundles(data: Any) -> List[Optional[Set[str]]]:
    """The targets of each bundle in the ELF section .hip_fatbin; [None] if a bundle is compressed."""
    result: List[Optional[Set[str]]] = []
    if data[:5] != b"\x7fELF\x02":
        return result
    (table,), (size, count, names) = struct.unpack_from("<Q", data, 0x28), struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + number * size) for number in range(count)]
    for header in headers:
        name = headers[names][4] + header[0]
        if data[name : name + 12] != b".hip_fatbin\0":
            continue
        at, end = header[4], header[4] + header[5]
        while at < end and len(result) < 1000:
            if data[at : at + 4] == b"CCOB":
                return [None]
            if data[at : at + 24] == b"__CLANG_OFFLOAD_BUNDLE__":
                targets, length = targets_in(data, at)
                result.append(targets)
                at += length
            at += 4096 - at % 4096  # each bundle begins on a page
    return result


def targets_in(data: Any, at: int) -> Tuple[Set[str], int]:
    """The targets that one bundle names, and its length."""
    targets: Set[str] = set()
    (count,), entry, length = struct.unpack_from("<Q", data, at + 24), at + 32, 0
    for _ in range(min(count, 200)):
        offset, size, letters = struct.unpack_from("<QQQ", data, entry)
        name = bytes(data[entry + 24 : entry + 24 + min(letters, 200)])
        targets.update(found.decode() for found in re.findall(rb"amdgcn-amd-amdhsa--(gfx[\w:+-]+)", name))
        entry, length = entry + 24 + letters, max(length, offset + size)
    return targets, length


def other_rocm(torch: Optional[Path]) -> List[str]:
    """Folders on LD_LIBRARY_PATH with a ROCm runtime or rocBLAS that may be loaded instead of torch's own."""
    folders = [Path(name) for name in os.environ.get("LD_LIBRARY_PATH", "").split(":") if name]
    own = torch / "lib" if torch else None
    names = ("libamdhip64.so*", "libhsa-runtime64.so*", "librocblas.so*")
    return sorted({str(folder) for folder in folders if folder != own for name in names if list(folder.glob(name))})


# --- the check ------------------------------------------------------------------------------------------------------


def judge(card: Card, rocm: Tuple[int, ...], held: List[Held]) -> Tuple[str, str]:
    """Whether the libraries have code for this card: `good`, `bad` or `unsure`, and why."""
    name, value = override_of(card, rocm)
    wanted = parsed(value) if value is not None else card.target
    line = "node %d is %s" % (card.node, card.target or "a GPU whose target the kernel does not report")
    if not wanted:
        if value is None:
            return "unsure", line
        doubt = not value and (not rocm or rocm >= EMPTY_IGNORED_SINCE)
        return "unsure" if doubt else "bad", "%s, and %s=%r is not a version such as 10.3.0" % (line, name, value)
    answers = {library.serves(wanted) for library in held}
    served = False if False in answers else None if None in answers else True
    if wanted == card.target:
        if served is None:
            return "unsure", line
        return ("good", line + ", and has code") if served else ("bad", line + ", and a library has no code for it")
    line += ", and %s makes it %s" % (name, wanted)
    if not card.target:
        return "unsure", line
    if not any({card.target, wanted} <= set(family.split()) for family in FAMILIES):
        return "bad", line + ", whose code is for another family"
    if served is False:
        return "bad", line + ", for which a library has no code either"
    return "unsure", line + ", of the same family: a workaround that AMD does not support"


def check(params: Mapping[str, Any]) -> Finding:
    """Do torch and rocBLAS, or the library in `library`, have code for the AMD GPUs of this machine?"""
    root = params["root"] or Path("/")
    cards, evidence = cards_of(root)
    if not cards:
        return unknown(*evidence, "%s lists no GPU that this process can use" % (root / NODES))
    torch = torch_folder(params["torch"])
    hip = re.search(r"^hip\b.*= *['\"]([\d.]+)", file_text(torch / "version.py"), re.MULTILINE) if torch else None
    if params["library"]:
        held = [in_library(params["library"])]
    elif torch and hip:
        held = [kernels(torch), gemms(torch, root)]
    else:
        return unknown(
            *evidence,
            *("node %d is %s" % (card.node, card.target) for card in cards),
            "torch is not a ROCm build, or is not installed",
            advice="see torch-without-cuda; use --set library=FILE.so to check an extension",
        )
    evidence += [library.line for library in held]
    rocm = numbers(hip.group(1))[:2] if hip else ()
    stray = {name for name in os.environ if re.fullmatch(OVERRIDE + r"_\d+", name)}
    if stray and rocm in ((), NUMBERED_SINCE):
        return unknown(*evidence, "kb cannot tell whether this release of ROCm reads %s" % ", ".join(sorted(stray)))
    if rocm >= NUMBERED_SINCE:
        stray -= {"%s_%d" % (OVERRIDE, card.node) for card in cards}
    if stray:
        why = "no GPU has that number" if rocm >= NUMBERED_SINCE else "this ROCm does not read numbered variables"
        evidence.append("%s has no effect: %s" % (", ".join(sorted(stray)), why))
    verdicts = [judge(card, rocm, held) for card in cards]
    evidence += [line for _, line in verdicts]
    words = [word for word, _ in verdicts]
    if torch and hip and " " in str(torch):
        words.append("unsure")
        evidence.append("the path %s contains a space, and HIP may then report that there is no kernel image" % torch)
    others = other_rocm(torch)
    if others and not (torch and (torch.parent / "_rocm_sdk_core").exists()):
        words.append("unsure")
        evidence.append("LD_LIBRARY_PATH contains another ROCm, which the job may load: %s" % ", ".join(others))
    limits = [name for name in LIMITS if name in os.environ]
    if "bad" in words:
        if limits and set(words) != {"bad"}:
            return unknown(*evidence, "kb cannot tell which of these GPUs %s leaves visible" % " and ".join(limits))
        return exposed(*evidence, advice="follow the entry's Fix: correct the variable first, then the build")
    if "unsure" in words or stray:
        return unknown(*evidence)
    return clear(*evidence, "extensions have their own lists of targets: check each with --set library=FILE.so")


# --- the experiments ------------------------------------------------------------------------------------------------

CPU = ""  # a node without GPU
HIDDEN = "-"  # follows the version of a GPU whose render device is missing
ROCM, OLD_ROCM = "6.4.43482", "6.2.41134"
WHEEL = "gfx900 gfx906 gfx908 gfx90a gfx942 gfx1030 gfx1100 gfx1101 gfx1102 gfx1200 gfx1201"


def write_machine(folder: Path, nodes: Tuple[str, ...], targets: str, hip: str) -> Dict[str, Any]:
    """Writes the files of a machine with these nodes and a torch with these targets; returns params for the check."""
    for number, version in enumerate(nodes):
        node, minor = folder / NODES / str(number), 128 + number
        node.mkdir(parents=True)
        (node / "gpu_id").write_text("%d\n" % (4000 + number if version else 0))
        target = version.rstrip(HIDDEN)
        lines = "drm_render_minor %d\ngfx_target_version %s\n" % (minor, target) if version else "cpu_cores_count 64\n"
        (node / "properties").write_text(lines)
        if version and version == target:
            device = folder / "dev/dri/render{}{}".format("D", minor)
            device.parent.mkdir(parents=True, exist_ok=True)
            device.write_text("")
    torch = folder / "torch"
    (torch / "lib/rocblas/library").mkdir(parents=True)
    for target in targets.split():
        (torch / "lib/rocblas/library" / ("TensileLibrary_lazy_%s.dat" % target)).write_text("")
    (torch / "lib/libtorch_python.so").write_bytes(b"\x7fELF\0" + targets.encode() + b"\0")
    (torch / "version.py").write_text("hip: Optional[str] = '%s'\n" % hip)
    return {"root": folder, "torch": torch, "library": None}


def unset_variables() -> None:
    """Removes the variables of the user's own shell, which would change the result of an arm."""
    for name in list(os.environ):
        if name.startswith(OVERRIDE) or name in (*LIMITS, "ROCBLAS_TENSILE_LIBPATH", "LD_LIBRARY_PATH"):
            del os.environ[name]


def run_check(
    ctx: Context, *, nodes: Tuple[str, ...], want: str, targets: str = WHEEL, variables: str = "", hip: str = ROCM
) -> None:
    """Runs the check on a machine with these nodes and variables."""
    unset_variables()
    os.environ.update(dict(pair.split("=", 1) for pair in variables.split()))
    params = write_machine(ctx.dir, nodes, targets, hip)
    ctx.reached()
    finding = check(params)
    ctx.note(state=finding.state)
    evidence = "; ".join(finding.evidence[2:])
    if finding.state == "exposed":
        raise Symptom(evidence)
    assert want in evidence, evidence


def build_extension(ctx: Context, *, arch: str) -> None:
    """The flags that torch passes to hipcc on a build machine with an MI250, for a torch that was built there."""
    import torch
    from torch.utils import cpp_extension

    card = type("Properties", (), {"gcnArchName": "gfx90a:sramecc+:xnack-"})
    os.environ.pop("PYTORCH_ROCM_ARCH", None)
    if arch:
        os.environ["PYTORCH_ROCM_ARCH"] = arch
    machine: Dict[str, Any] = {"device_count": lambda: 1, "get_device_properties": lambda _: card}
    library: Dict[str, Any] = {"_cuda_getArchFlags": lambda: "gfx90a"}
    with patch.multiple(torch.cuda, **machine), patch.multiple(torch._C, create=True, **library):
        ctx.reached()
        flags: List[str] = cpp_extension._get_rocm_arch_flags()
    ctx.note(flags=" ".join(flags))
    targets = {flag.split("=")[1] for flag in flags if flag.startswith("--offload-arch=")}
    without = sorted({"gfx90a", "gfx942"} - targets)
    if without:
        raise Symptom("torch calls hipcc with %s: no code for %s" % (" ".join(flags), ", ".join(without)))


SYSFS = "a machine with AMD GPUs: the check applies the runtime's rules to its files"


def model(
    name: str,
    job: Callable[..., None],
    pattern: str,
    because: str,
    fix: str,
    grade: Tuple[str, str] = ("model", SYSFS),
    packages: Optional[Mapping[str, str]] = None,
    **differs: Tuple[Any, Any],
) -> Experiment:
    """Each keyword in `differs` gives the value for the control arm, then the value for the treatment arm."""
    fails, works = ({word: pair[arm] for word, pair in differs.items()} for arm in (0, 1))
    arm = partial(Arm, fidelity=grade[0], stands_for=grade[1])
    return Experiment(
        name,
        control=arm(partial(job, **fails), symptom(pattern), because=because),
        treatment=arm(partial(job, **works), completed(), because=fix),
        world_size=1,
        needs=Needs(packages=packages or {}),
        deadline_s=60,
        expected_s=(1, 1),
    )


EVERYWHERE, NUMBERED = OVERRIDE + "=10.3.0", OVERRIDE + "_2=10.3.0"
MIXED = partial(  # RX 9060 XT and RX 6600
    run_check,
    nodes=(CPU, "120000", "100302"),
    want="node 1 is gfx1200, and has code; node 2 is gfx1032, and HSA_OVERRIDE_GFX_VERSION_2 makes it gfx1030",
)
MI210 = partial(run_check, nodes=(CPU, CPU, "90010"), want="node 2 is gfx90a, and has code")
RX6600 = partial(run_check, nodes=(CPU, "100302"))
WITH_IGPU = partial(run_check, want="node 1 is gfx1100, and has code")  # RX 7900 XTX in a Ryzen 7000

probe = Probe(
    params={
        "root": Param("path", "folder that contains sys/, dev/ and opt/ of another machine (default: /)"),
        "torch": Param("path", "folder of another torch, .../site-packages/torch (default: the installed torch)"),
        "library": Param("path", "compiled extension to check instead of torch, such as flash_attn_2_cuda...so"),
    },
    check=check,
    experiments=(
        model(
            "mixed",
            MIXED,
            r"node 1 is gfx1200, and HSA_OVERRIDE_GFX_VERSION makes it gfx1030, whose code is for another family",
            "HSA_OVERRIDE_GFX_VERSION is meant for one card but applies to both",
            "the variable has the node number of the card that needs it",
            variables=(EVERYWHERE, NUMBERED),
        ),
    ),
    variants=(
        model(
            "leftover",
            MI210,
            r"node 2 is gfx90a, and HSA_OVERRIDE_GFX_VERSION makes it gfx1030, whose code is for another family",
            "the variable that a previous card needed is still set",
            "the variable is unset",
            variables=(EVERYWHERE, ""),
        ),
        model(
            "empty",
            MI210,
            r"HSA_OVERRIDE_GFX_VERSION='' is not a version",
            "the container sets the variable to an empty value, which the runtime rejects",
            "the variable is unset",
            variables=(OVERRIDE + "=", ""),
        ),
        model(
            "numbering",
            MIXED,
            r"HSA_OVERRIDE_GFX_VERSION_1 makes it gfx1030, whose code is for another family",
            "the variable ends in 1, the number of the HIP device, but node 1 is the other card",
            "the variable has the node number of the card that needs it",
            variables=(OVERRIDE + "_1=10.3.0", NUMBERED),
        ),
        model(
            "old-runtime",
            partial(MIXED, variables=NUMBERED),
            r"HSA_OVERRIDE_GFX_VERSION_2 has no effect.*node 2 is gfx1032, and a library has no code for it",
            "ROCm 6.2 does not read the numbered variable",
            "ROCm 6.4 reads the numbered variable",
            hip=(OLD_ROCM, ROCM),
        ),
        model(
            "no-code",
            partial(RX6600, want="node 1 is gfx1032, and has code"),
            r"node 1 is gfx1032, and a library has no code for it",
            "neither torch nor rocBLAS has code for gfx1032",
            "torch and rocBLAS are builds with code for gfx1032",
            targets=(WHEEL, WHEEL + " gfx1032"),
        ),
        model(
            "family",
            partial(RX6600, want="makes it gfx1030, of the same family"),
            r"node 1 is gfx1032, and HSA_OVERRIDE_GFX_VERSION makes it gfx1100, whose code is for another family",
            "the variable names a target of a different family than the card",
            "the variable names a target of the card's family for which the libraries have code",
            variables=(OVERRIDE + "=11.0.0", EVERYWHERE),
        ),
        model(
            "igpu",
            WITH_IGPU,
            r"node 2 is gfx1036, and a library has no code for it",
            "the runtime also counts the iGPU, for which a library has no code",
            "the container gets only the render device of the discrete card",
            nodes=((CPU, "110000", "100306"), (CPU, "110000", "100306" + HIDDEN)),
        ),
        model(
            "arch-list",
            build_extension,
            r"--offload-arch=gfx90a -fno-gpu-rdc: no code for gfx942$",
            "PYTORCH_ROCM_ARCH is unset, so torch builds only for the card of the build machine",
            "PYTORCH_ROCM_ARCH names the targets of all cards in the cluster",
            (
                "stand-in",
                "a build machine with an MI250: torch's own function makes the flags, but nothing is compiled",
            ),
            {"torch": ">=2.1", "setuptools": ""},
            arch=("", "gfx90a;gfx942"),
        ),
    ),
)
