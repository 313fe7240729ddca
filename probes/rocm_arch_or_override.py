"""An AMD GPU for which a library has no code, or that HSA_OVERRIDE_GFX_VERSION makes another one.

No AMD GPU is used: what the runtime reads (sysfs, variables, file names) is read by the same rules, and the experiments
write it to a folder. They are models.
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
NUMBERED_SINCE = (6, 3)  # the tags up to rocm-6.2.4 read the variable without a number only; 6.3 was not looked at
EMPTY_IGNORED_SINCE = (7, 13)  # or later: merged in May 2026
# Targets that one generic code object serves: rocr-runtime, isa.cpp. gfx908 and gfx90a are in no family.
FAMILIES = (
    "gfx900 gfx902 gfx904 gfx906 gfx909 gfx90c",
    "gfx942 gfx950",
    "gfx1010 gfx1011 gfx1012 gfx1013",
    "gfx1030 gfx1031 gfx1032 gfx1033 gfx1034 gfx1035 gfx1036",
    "gfx1100 gfx1101 gfx1102 gfx1103 gfx1150 gfx1151 gfx1152 gfx1153",
    "gfx1200 gfx1201",
)


# --- what the runtime reads -----------------------------------------------------------------------------------------


class Card(NamedTuple):
    """A GPU of the topology: the number of its node as the runtime counts, and its target, empty where unknown."""

    node: int
    target: str


def target_of(major: int, minor: int, step: int) -> str:
    return "gfx%d%x%x" % (major, minor, step)


def cards_of(root: Path) -> Tuple[List[Card], List[str]]:
    """The GPUs that the runtime counts, and what hides others. CPUs have numbers as well, so a GPU seldom has 0."""
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
            hidden.append("node %d cannot be read here, as in a container without that GPU" % node)
            continue
        if gpu != "0":
            minor = values.get("drm_render_minor", "0")
            if not list((root / "dev/dri").glob("render?" + minor)):
                hidden.append("node %d has no render device %s here, and is not counted" % (node, minor))
                continue
            version = int(values.get("gfx_target_version", "0"))
            parts = (version // 10000 % 100, version // 100 % 100, version % 100)
            cards.append(Card(number, target_of(*parts) if version else ""))
        number += 1
    return cards, hidden


def override_of(card: Card, rocm: Tuple[int, ...]) -> Tuple[str, Optional[str]]:
    """The name of the variable that holds for this card, and its value; none where nothing is set."""
    names = ["%s_%d" % (OVERRIDE, card.node), OVERRIDE] if rocm >= NUMBERED_SINCE else [OVERRIDE]
    for name in names:
        if name in os.environ:
            return name, os.environ[name]
    return "", None


def parsed(value: str) -> str:
    """The target that a value names, empty where the runtime refuses it."""
    match = re.match(r"\s*(\d{1,2})\.(\d{1,3})\.(\d{1,3})$", value, re.ASCII)
    fits = match and int(match[1]) <= 63 and int(match[2]) <= 255 and int(match[3]) <= 255
    return target_of(int(match[1]), int(match[2]), int(match[3])) if match and fits else ""


# --- what the libraries hold ----------------------------------------------------------------------------------------


class Held(NamedTuple):
    """Targets for which there is code; None where that cannot be read. `line` says where it was read."""

    targets: Optional[Set[str]]
    line: str
    some: FrozenSet[str] = frozenset()  # for which a part of the library has code

    def serves(self, target: str) -> Optional[bool]:
        if self.targets is None or not target:
            return None
        if target in self.targets:
            return True
        near = self.targets | self.some  # gfx90a:xnack+ may not serve this gfx90a
        unclear = any(held.split(":")[0] == target or "generic" in held for held in near)
        return None if unclear else False


def torch_folder(given: Optional[Path]) -> Optional[Path]:
    if given:
        return given
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError, AttributeError):
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def kernels(torch: Path) -> Held:
    """The list that torch.cuda.get_arch_list() returns: torch is compiled with it as one text."""
    if (torch.parent / "_rocm_sdk_core").exists():
        found = sorted(path.name.split("-")[0] for path in torch.parent.glob("amd_torch_device_*.dist-info"))
        said = ", ".join(found) or "none is installed"
        return Held(None, "this torch of AMD's own index has its kernels in packages of their own: " + said)
    try:
        data = (torch / "lib/libtorch_python.so").read_bytes()
    except OSError as error:
        return Held(None, "libtorch_python.so cannot be read: %s" % error.strerror)
    texts = {text.decode() for text in re.findall(rb"\0(gfx[\w:+-]+(?: gfx[\w:+-]+)*)\0", data)}
    longest = max(texts, key=len, default="")
    if not longest or (" " not in longest and len(texts) > 1):
        return Held(None, "libtorch_python.so names no list of targets that this check can read")
    return Held(set(longest.split()), "torch holds kernels for " + longest)


def gemms(torch: Path, root: Path) -> Held:
    """The files of rocBLAS, which has a list of its own; without one of these it aborts."""
    given = os.environ.get("ROCBLAS_TENSILE_LIBPATH")
    folders = [torch / "lib/rocblas/library", *sorted(torch.parent.glob("_rocm_sdk_libraries*/lib/rocblas/library"))]
    for folder in [Path(given)] if given else [*folders, root / "opt/rocm/lib/rocblas/library"]:
        try:
            names = " ".join(os.listdir(str(folder)))
        except OSError:
            continue
        found = set(re.findall(r"\bTensileLibrary_(?:lazy_)?(gfx[0-9a-f]{3,4})\.dat\b", names))
        if found and "TensileLibrary.dat" not in names:
            return Held(found, "rocBLAS holds files for %s (%s)" % (" ".join(sorted(found)), folder))
    return Held(None, "no files of rocBLAS were found that name their targets")


def in_library(path: Path) -> Held:
    """The targets of an extension: each of its bundles names its own, a compressed bundle does not."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = bundles(data)
    except (OSError, ValueError, IndexError, struct.error) as error:
        return Held(None, "%s cannot be read: %s" % (path, error))
    if None in found:
        return Held(None, "%s holds compressed code, which does not name its targets" % path.name)
    lists = [targets for targets in found if targets]
    if not lists:
        return Held(None, "%s holds no AMD code that this check can read" % path.name)
    some, all_of_them = set.union(*lists), set.intersection(*lists)
    return Held(all_of_them, "%s holds code for %s" % (path.name, " ".join(sorted(some))), frozenset(some))


def bundles(data: Any) -> List[Optional[Set[str]]]:
    """The targets of each bundle in the ELF section .hip_fatbin, None for a compressed one."""
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
            at += 4096 - at % 4096  # each begins a page
    return result


def targets_in(data: Any, at: int) -> Tuple[Set[str], int]:
    """What one bundle names, and how long it is."""
    targets: Set[str] = set()
    (count,), entry, length = struct.unpack_from("<Q", data, at + 24), at + 32, 0
    for _ in range(min(count, 200)):
        offset, size, letters = struct.unpack_from("<QQQ", data, entry)
        name = bytes(data[entry + 24 : entry + 24 + min(letters, 200)])
        targets.update(found.decode() for found in re.findall(rb"amdgcn-amd-amdhsa--(gfx[\w:+-]+)", name))
        entry, length = entry + 24 + letters, max(length, offset + size)
    return targets, length


# --- the check ------------------------------------------------------------------------------------------------------


def judge(card: Card, rocm: Tuple[int, ...], held: List[Held]) -> Tuple[str, str]:
    """Whether this card gets its own code: `good`, `bad` or `unsure`, and why."""
    name, value = override_of(card, rocm)
    wanted = parsed(value) if value is not None else card.target
    said = "node %d is %s" % (card.node, card.target or "a GPU whose target the kernel does not tell")
    if not wanted:
        if value is None:
            return "unsure", said
        doubt = not value and (not rocm or rocm >= EMPTY_IGNORED_SINCE)
        return "unsure" if doubt else "bad", "%s, and %s=%r is no version such as 10.3.0" % (said, name, value)
    answers = {one.serves(wanted) for one in held}
    served = False if False in answers else None if None in answers else True
    if wanted == card.target:
        if served is None:
            return "unsure", said
        return ("good", said + ", and has code") if served else ("bad", said + ", and a library has no code for it")
    said += ", and %s makes it %s" % (name, wanted)
    if not card.target:
        return "unsure", said
    if not any({card.target, wanted} <= set(family.split()) for family in FAMILIES):
        return "bad", said + ", whose code is for another family"
    if served is False:
        return "bad", said + ", for which a library has no code either"
    return "unsure", said + ", of the same family: a workaround that AMD does not support"


def check(params: Mapping[str, Any]) -> Finding:
    """Have the AMD GPUs of this machine code of their own in torch and rocBLAS, or in the library that is named?"""
    root = params["root"] or Path("/")
    cards, evidence = cards_of(root)
    if not cards:
        return unknown(*evidence, "%s names no GPU that can be used here" % (root / NODES))
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
            "torch here is no ROCm build, or not installed",
            advice="see torch-without-cuda; --set library=FILE.so asks about an extension",
        )
    evidence += [one.line for one in held]
    rocm = numbers(hip.group(1))[:2] if hip else ()
    stray = {name for name in os.environ if re.fullmatch(OVERRIDE + r"_\d+", name)}
    if stray and rocm in ((), NUMBERED_SINCE):
        return unknown(*evidence, "whether the ROCm here reads %s is not known" % ", ".join(sorted(stray)))
    if rocm >= NUMBERED_SINCE:
        stray -= {"%s_%d" % (OVERRIDE, card.node) for card in cards}
    if stray:
        why = "no GPU has that number" if rocm >= NUMBERED_SINCE else "this ROCm does not read numbered variables"
        evidence.append("%s changes nothing: %s" % (", ".join(sorted(stray)), why))
    verdicts = [judge(card, rocm, held) for card in cards]
    evidence += [line for _, line in verdicts]
    words = [word for word, _ in verdicts]
    if torch and hip and " " in str(torch):
        words.append("unsure")
        evidence.append("%s has a space in it, for which HIP has said that there is no kernel image" % torch)
    limits = [name for name in LIMITS if name in os.environ]
    if "bad" in words:
        if limits and set(words) != {"bad"}:
            return unknown(*evidence, "which of these GPUs %s leaves is not known here" % " and ".join(limits))
        return exposed(*evidence, advice="see the entry's Fix: the variable first, then the build")
    if "unsure" in words or stray:
        return unknown(*evidence)
    return clear(*evidence, "extensions have lists of their own")


# --- the experiments ------------------------------------------------------------------------------------------------

CPU = ""  # a node without GPU
HIDDEN = "-"  # behind a GPU whose render device is not there
ROCM, OLD_ROCM = "6.4.43482", "6.2.41134"
WHEEL = "gfx900 gfx906 gfx908 gfx90a gfx942 gfx1030 gfx1100 gfx1101 gfx1102 gfx1200 gfx1201"


def written(folder: Path, nodes: Tuple[str, ...], targets: str, hip: str) -> Dict[str, Any]:
    """A machine with these nodes and a torch with these targets, as files; the params that ask the check about it."""
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


def forget() -> None:
    """No variable of the reader's own changes what an arm shows."""
    for name in list(os.environ):
        if name.startswith(OVERRIDE) or name in (*LIMITS, "ROCBLAS_TENSILE_LIBPATH"):
            del os.environ[name]


def ask(
    ctx: Context, *, nodes: Tuple[str, ...], want: str, targets: str = WHEEL, variables: str = "", hip: str = ROCM
) -> None:
    """What the rules of the runtime make of this machine under these variables."""
    forget()
    os.environ.update(dict(pair.split("=", 1) for pair in variables.split()))
    params = written(ctx.dir, nodes, targets, hip)
    ctx.reached()
    finding = check(params)
    ctx.note(state=finding.state)
    said = "; ".join(finding.evidence[2:])
    if finding.state == "exposed":
        raise Symptom(said)
    assert want in said, said


def build_extension(ctx: Context, *, arch: str) -> None:
    """What torch asks hipcc for on a build machine with an MI250, and a torch that was built there."""
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
    asked = {flag.split("=")[1] for flag in flags if flag.startswith("--offload-arch=")}
    without = sorted({"gfx90a", "gfx942"} - asked)
    if without:
        raise Symptom("hipcc is asked for %s: no code for %s" % (" ".join(flags), ", ".join(without)))


SYSFS = "the files of a machine with AMD GPUs; the check applies the runtime's rules to them"


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
    """The keyword in `differs` has the value of the control arm, then that of the treatment."""
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
    ask,
    nodes=(CPU, "120000", "100302"),
    want="node 1 is gfx1200, and has code; node 2 is gfx1032, and HSA_OVERRIDE_GFX_VERSION_2 makes it gfx1030",
)
MI210 = partial(ask, nodes=(CPU, CPU, "90010"), want="node 2 is gfx90a, and has code")
RX6600 = partial(ask, nodes=(CPU, "100302"))
WITH_IGPU = partial(ask, want="node 1 is gfx1100, and has code")  # RX 7900 XTX in a Ryzen 7000

probe = Probe(
    params={
        "root": Param("path", "folder with the sys/, dev/ and opt/ of another machine; default /"),
        "torch": Param("path", "folder of another torch, .../site-packages/torch; default the installed one"),
        "library": Param("path", "compiled extension to look into in place of torch, such as flash_attn_2_cuda...so"),
    },
    check=check,
    experiments=(
        model(
            "mixed",
            MIXED,
            r"node 1 is gfx1200, and HSA_OVERRIDE_GFX_VERSION makes it gfx1030, whose code is for another family",
            "the variable that one card needs holds for both",
            "the variable with the number of that card's node",
            variables=(EVERYWHERE, NUMBERED),
        ),
    ),
    variants=(
        model(
            "leftover",
            MI210,
            r"node 2 is gfx90a, and HSA_OVERRIDE_GFX_VERSION makes it gfx1030, whose code is for another family",
            "the variable of a former card is still set",
            "it is unset",
            variables=(EVERYWHERE, ""),
        ),
        model(
            "empty",
            MI210,
            r"HSA_OVERRIDE_GFX_VERSION='' is no version",
            "a container passes the variable on without a value",
            "it is unset",
            variables=(OVERRIDE + "=", ""),
        ),
        model(
            "numbering",
            MIXED,
            r"HSA_OVERRIDE_GFX_VERSION_1 makes it gfx1030, whose code is for another family",
            "the number is that of the HIP device, 1, and node 1 is the other card",
            "the variable with the number of that card's node",
            variables=(OVERRIDE + "_1=10.3.0", NUMBERED),
        ),
        model(
            "old-runtime",
            partial(MIXED, variables=NUMBERED),
            r"HSA_OVERRIDE_GFX_VERSION_2 changes nothing.*node 2 is gfx1032, and a library has no code for it",
            "ROCm 6.2 does not read the numbered variable",
            "ROCm 6.4 does",
            hip=(OLD_ROCM, ROCM),
        ),
        model(
            "no-code",
            partial(RX6600, want="node 1 is gfx1032, and has code"),
            r"node 1 is gfx1032, and a library has no code for it",
            "no list holds gfx1032",
            "a build that holds it",
            targets=(WHEEL, WHEEL + " gfx1032"),
        ),
        model(
            "family",
            partial(RX6600, want="makes it gfx1030, of the same family"),
            r"node 1 is gfx1032, and HSA_OVERRIDE_GFX_VERSION makes it gfx1100, whose code is for another family",
            "the variable names another family",
            "it names a target of the card's family, for which there is code",
            variables=(OVERRIDE + "=11.0.0", EVERYWHERE),
        ),
        model(
            "igpu",
            WITH_IGPU,
            r"node 2 is gfx1036, and a library has no code for it",
            "the GPU inside the CPU is counted as well",
            "the container has the render device of the other card alone",
            nodes=((CPU, "110000", "100306"), (CPU, "110000", "100306" + HIDDEN)),
        ),
        model(
            "arch-list",
            build_extension,
            r"--offload-arch=gfx90a -fno-gpu-rdc: no code for gfx942$",
            "the list is that of the build machine",
            "PYTORCH_ROCM_ARCH names all cards of the cluster",
            ("stand-in", "a build machine with an MI250; torch's own function makes the list, nothing is compiled"),
            {"torch": ">=2.1", "setuptools": ""},
            arch=("", "gfx90a;gfx942"),
        ),
    ),
)
