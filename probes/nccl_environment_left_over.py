"""NCCL goes by a setting that nobody sees, left in a file or an image. The check lists every setting and its origin."""

from __future__ import annotations

import ctypes
import os
import pwd
import re
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable, List, Mapping, Optional, Tuple

from kb.host import NVIDIA_SMI_S
from kb.nccl import nccl_libraries, nccl_release
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Probe,
    Symptom,
    Unavailable,
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)

# --- how NCCL reads its files: setEnvFile and initEnvFunc of src/misc/param.cc -------------------------------------

HOME_BY_VARIABLE = (2, 30, 3)  # up to 2.29 by account; this release also drops a carriage return at the end
CONF_FILE = (2, 23)


def parsed(text: str, release: Tuple[int, ...] = ()) -> Iterable[Tuple[str, str]]:
    """Name and value of every line. No blank is stripped: `export A=1` is a variable called `export A`."""
    for line in text.split("\n"):
        whole = line[:-1] if line.endswith("\r") and release >= HOME_BY_VARIABLE else line
        name, equals, value = whole.partition("\0")[0].partition("=")
        if equals and not line.startswith("#"):
            yield name, value


def number(value: str) -> int:
    """As strtoll(value, NULL, 0): a word, or a quotation mark before the digit, is 0."""
    found = re.match(r"\s*[-+]?(0[xX][0-9a-fA-F]{1,15}|[0-9]{1,18})", value)
    digits = found[1] if found else "0"
    return int(digits, 16 if digits[1:2] in ("x", "X") else 10)


# --- the job without a GPU: which value reaches NCCL ---------------------------------------------------------------

NAME = "NCCL_P2P_DISABLE"
Reader = Callable[[Path], Tuple[str, str]]


def by_library(conf: Path) -> Tuple[str, str]:
    """NCCL puts the lines of its files into the environment of the C library, where it reads its settings."""
    for nccl, version in nccl_libraries():
        if version >= 22300:  # older ones do not know NCCL_CONF_FILE
            nccl.ncclGetUniqueId((ctypes.c_char * 128)())
            libc = ctypes.CDLL(None)
            libc.getenv.restype = ctypes.c_char_p
            return f"libnccl {version}", (libc.getenv(NAME.encode()) or b"").decode()
    raise Unavailable("no libnccl of 2.23 or newer can be loaded here")


def by_rules(conf: Path) -> Tuple[str, str]:
    read = dict(os.environ)
    for name, value in parsed(conf.read_text()):
        read.setdefault(name, value)
    return "NCCL by its rules", read.get(NAME, "")


def start(ctx: Context, *, left: str, exported: Optional[str] = None, reader: Reader = by_library) -> None:
    """`left` is what the file of an image or account holds, `exported` what the job's script sets the variable to."""
    conf = ctx.dir / "nccl.conf"
    conf.write_text(left)
    os.environ["NCCL_CONF_FILE"] = str(conf)
    os.environ.pop(NAME, None)  # `unset` in the script: it is not there anyway
    if exported is not None:
        os.environ[NAME] = exported
    if NAME in (text_of("/etc/nccl.conf") or ""):
        raise Unavailable(f"/etc/nccl.conf of this machine names {NAME} itself: run the check")
    ctx.reached()
    by, value = reader(conf)
    ctx.note(by=by, value=value)
    if number(value) == 1:
        raise Symptom(f"{NAME} is {os.environ.get(NAME, 'unset')} in os.environ, and {by} goes by {value}")


# --- the job on two GPUs -------------------------------------------------------------------------------------------


def measure(ctx: Context) -> None:
    """Both arms are this job, on two GPUs with NVLink. They differ in NCCL_P2P_DISABLE alone."""
    pairs, _ = links(nvidia_smi_topo())
    if not pairs or not all(pair.startswith("NV") for pair in pairs):
        raise Unavailable(f"not all GPU pairs are on NVLink: {' '.join(pairs) or 'no answer from nvidia-smi topo -m'}")
    import torch

    dist = ctx.init_process_group(timeout_s=60)
    gradients = torch.zeros(1 << 26, device=ctx.device)  # 256 MiB
    ctx.reached()
    for repeat in range(25):
        if repeat == 5:
            torch.cuda.synchronize()
            begun = time.monotonic()
        dist.all_reduce(gradients)
    torch.cuda.synchronize()
    busbw = 20 * gradients.nbytes / (time.monotonic() - begun) / 1e9  # 2(n-1)/n is 1 for two ranks
    log = "".join(path.read_text(errors="replace") for path in ctx.dir.glob(f"nccl.{os.getpid()}*"))
    ways = sorted(set(re.findall(r" via ((?:P2P|SHM|NET)\S*)", log)))
    ctx.note(busbw_gb_s=round(busbw, 1), ways=ways)
    assert ways, "the log of NCCL names no way between the GPUs"
    if not any(way.startswith("P2P") for way in ways):
        raise Symptom(f"all_reduce at busbw {busbw:.0f} GB/s via {' '.join(ways)}, and the GPUs are on {pairs[0]}")


# --- the check -----------------------------------------------------------------------------------------------------

QUIET = re.compile(r"NCCL_(CONF_FILE|DEBUG(_\w+)?|VERSION|HOME|ROOT|(INCLUDE|LIB)_DIR|LIBRARY)")  # the last: of builds
NOTES = {
    "NCCL_ALGO": "one choice for every size; 2.24 and newer stop where it leaves nothing for a collective",
    "NCCL_PROTO": "one choice for every size; LL128 that NCCL would not choose itself can corrupt data",
    "NCCL_TOPO_FILE": "is it the file for this type of machine?",
    "NCCL_IB_DISABLE": "no InfiniBand and no RoCE; right where the nodes have nothing but TCP",
    "NCCL_NET": "this transport or none; Socket is TCP",
}
OFF = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")  # 0 and empty change nothing
MOST_BYTES = 1 << 20


def text_of(path: str) -> Optional[str]:
    """Empty where there is no file; None where it is there and cannot be read."""
    try:
        if Path(path).is_fifo():  # reading would wait
            return None
        with open(path, "rb") as file:
            return file.read(MOST_BYTES).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError):
        return None


def files(release: Tuple[int, ...]) -> List[str]:
    """In the order in which they count; where the release is not known, all that one or another would read."""
    named, home = os.environ.get("NCCL_CONF_FILE", ""), os.environ.get("HOME", "")
    try:
        account = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # an account without a name, as in many containers
        account = ""
    homes = [home, account] if not release else [home] if release >= HOME_BY_VARIABLE else [account]
    first = [named] if named and (not release or release >= CONF_FILE) else []
    if not (first and release):
        first += [f"{each}/.nccl.conf" for each in homes if each]
    return [*dict.fromkeys(first), "/etc/nccl.conf"]


def nvidia_smi_topo() -> str:
    command = ["nvidia-smi", "topo", "-m"]
    try:
        return subprocess.run(command, capture_output=True, timeout=NVIDIA_SMI_S).stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return ""


def links(topo: str) -> Tuple[List[str], int]:
    """What connects each pair of GPUs (NV18, PIX, SYS, ...), and how many GPUs there are."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topo)
    rows = [line.split()[1:] for line in plain.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]  # the header has none
    pairs = [row[at] for following, row in enumerate(rows, 1) for at in range(following, min(len(rows), len(row)))]
    return [pair for pair in pairs if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", pair)], len(rows)


def is_quiet(name: str, value: str) -> bool:
    return bool(QUIET.fullmatch(name)) or (name in OFF and number(value) == 0)


def judgement(name: str, value: str, every: Mapping[str, str], topo: str) -> Tuple[bool, str]:
    """Whether this machine speaks against the setting, and what it does."""
    pairs, gpus = links(topo)
    no_level = every.get("NCCL_P2P_LEVEL") in ("LOC", "0")
    p2p_off = number(every.get(NAME, "")) == 1 or no_level
    if (name == NAME and number(value) == 1) or (name == "NCCL_P2P_LEVEL" and no_level):
        nvlink = [pair for pair in pairs if pair.startswith("NV")]
        if nvlink:
            return True, f"no P2P, so no NVLink, which {len(nvlink)} of {len(pairs)} GPU pairs have ({nvlink[0]})"
        here = f"GPU pairs are on {' '.join(sorted(set(pairs)))}" if pairs else "nvidia-smi topo -m shows no links here"
        return False, f"no P2P; {here}"
    if name == "NCCL_SHM_DISABLE" and number(value) == 1:
        both = "with P2P off as well, GPUs of one host talk over the network"
        return p2p_off and gpus > 1, both if p2p_off else "no shared memory; some set it where P2P must not fail unseen"
    if name == "NCCL_GRAPH_FILE":
        if (os.path.isabs(value) or not value) and not os.access(value, os.R_OK):
            return True, "cannot be opened here: NCCL stops at its start"
        return False, "paths for one set of GPUs; a job on others stops or is slow"
    return False, NOTES.get(name, "not judged here")


def check(params: Mapping[str, Any]) -> Finding:
    """Every NCCL_ setting that this process would hand to NCCL, where it comes from, and whether it fits here."""
    image = dict(entry.partition("=")[::2] for entry in (text_of("/proc/1/environ") or "").split("\0"))
    every = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    origin = {name: "environment" + ", image or pod" * (image.get(name) == value) for name, value in every.items()}
    doubts: List[str] = []
    release = nccl_release()
    places = files(release)
    unsure = places[:-1] if not release and (len(places) > 2 or every.get("NCCL_CONF_FILE")) else []
    for file in places:
        text = text_of(file) if os.path.isabs(file) else None
        doubts += [f"{file} cannot be read here"] if text is None else []
        for name, value in parsed(text or "", release):
            if name.startswith("NCCL_") and name == name.strip():
                origin.setdefault(name, file + ", by some releases" * (file in unsure))
                every.setdefault(name, value)
            elif "NCCL_" in name:
                doubts.append(f"{file}: {name[:60]!r} is no variable of NCCL; no blanks and no `export` in this file")
    doubts += [f"{file} counts by the release of NCCL, which pip does not know" for file in unsure if text_of(file)]
    sure = {name: value for name, value in every.items() if not origin[name].endswith(", by some releases")}
    topo = nvidia_smi_topo() if {"NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE"} & set(every) else ""
    loud = {name: judgement(name, value, sure, topo) for name, value in every.items() if not is_quiet(name, value)}
    against = [name for name in loud if loud[name][0] and name in sure]
    shown = [*against, *(name for name in loud if name not in against)][:40]
    evidence = [f"{name}={every[name][:120]}: {loud[name][1]} ({origin[name]})" for name in shown] + doubts
    if against:
        return exposed(*evidence, advice=f"run once without {' '.join(against)}, then remove it at its origin")
    if evidence:
        return unknown(*evidence, advice="is each of these meant for this machine? If not: a run without it")
    others = "the job's code or an env plugin of NCCL may set some"
    return clear(f"no NCCL_ setting that changes a path here or in {' '.join(places)}; {others}")


# --- the experiments -----------------------------------------------------------------------------------------------

LOGGED = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "nccl.%p"}
LEFT = f"{NAME}=1\n"
UNSEEN = symptom(rf"{NAME} is unset in os\.environ, and (libnccl \d+|NCCL by its rules) goes by 1$")
IN_FILE = f"{LEFT.strip()} is left in a file that NCCL reads, and the job's script unsets the variable"


def without_gpu(
    name: str, fix: str, control: Mapping[str, Any], treatment: Mapping[str, Any], because: str = IN_FILE
) -> Experiment:
    fidelity = ("model", "NCCL, of which no libnccl is here") if control.get("reader") == by_rules else ("cpu", "")
    return Experiment(
        name=name,
        control=Arm(partial(start, **control), UNSEEN, because, *fidelity),
        treatment=Arm(partial(start, **treatment), completed(), fix, *fidelity),
        world_size=1,
        needs=Needs(packages={}),
        expected_s=(0.1, 0.1),
    )


REMOVED = "the line is removed from the file"
probe = Probe(
    check=check,
    experiments=(
        Experiment(
            name="nvlink",
            control=Arm(
                measure,
                symptom(r"all_reduce at busbw \d+ GB/s via (SHM|NET)\S*.* and the GPUs are on NV\d+"),
                "NCCL_P2P_DISABLE=1 on GPUs that NVLink connects",
                "hardware",
                env={**LOGGED, NAME: "1"},
            ),
            treatment=Arm(measure, completed(), "the variable is not set", "hardware", env=LOGGED),
            backend="nccl",
            needs=Needs(gpus=2),
            deadline_s=120,
            expected_s=(20, 15),
        ),
        without_gpu("left-file", REMOVED, {"left": LEFT}, {"left": ""}),
        without_gpu("rules", REMOVED, {"left": LEFT, "reader": by_rules}, {"left": "", "reader": by_rules}),
    ),
    variants=(
        without_gpu(
            "override",
            "the file stays and the script exports 0, which NCCL prefers",
            {"left": LEFT},
            {"left": LEFT, "exported": "0"},
        ),
        without_gpu(
            "shell-syntax",
            "the same line without export, which comes first and wins",
            {"left": f"export {NAME}=0\n{LEFT}"},
            {"left": f"{NAME}=0\n{LEFT}"},
            "the file is corrected with `export NCCL_P2P_DISABLE=0`, as in a shell",
        ),
    ),
)
