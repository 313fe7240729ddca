"""NCCL uses a setting that nobody sees, left in a file or an image. The check lists every setting and its origin."""

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

HOME_BY_VARIABLE = (2, 30, 3)  # NCCL up to 2.29 asks the account; this release also drops a final carriage return
CONF_FILE = (2, 23)


def parsed(text: str, release: Tuple[int, ...] = ()) -> Iterable[Tuple[str, str]]:
    """Name and value of every line. NCCL strips no blanks: `export A=1` is a variable named `export A`."""
    for line in text.split("\n"):
        whole = line[:-1] if line.endswith("\r") and release >= HOME_BY_VARIABLE else line
        name, equals, value = whole.partition("\0")[0].partition("=")
        if equals and not line.startswith("#"):
            yield name, value


def number(value: str) -> int:
    """Reads a number as strtoll(value, NULL, 0) does: a word, or a quotation mark before the digit, is 0."""
    found = re.match(r"\s*[-+]?(0[xX][0-9a-fA-F]{1,15}|[0-9]{1,18})", value)
    digits = found[1] if found else "0"
    return int(digits, 16 if digits[1:2] in ("x", "X") else 10)


# --- the job without a GPU: which value does NCCL use? -------------------------------------------------------------

NAME = "NCCL_P2P_DISABLE"
Reader = Callable[[Path], Tuple[str, str]]


def by_library(conf: Path) -> Tuple[str, str]:
    """Asks libnccl: NCCL puts the lines of its files into the C library's environment, and reads its settings there."""
    for nccl, version in nccl_libraries():
        if version >= 22300:  # older releases do not read NCCL_CONF_FILE
            nccl.ncclGetUniqueId((ctypes.c_char * 128)())
            libc = ctypes.CDLL(None)
            libc.getenv.restype = ctypes.c_char_p
            return f"libnccl {version}", (libc.getenv(NAME.encode()) or b"").decode()
    raise Unavailable("kb cannot load libnccl 2.23 or newer here")


def by_rules(conf: Path) -> Tuple[str, str]:
    """Applies NCCL's rules, without libnccl."""
    read = dict(os.environ)
    for name, value in parsed(conf.read_text()):
        read.setdefault(name, value)
    return "NCCL by its rules", read.get(NAME, "")


def start(ctx: Context, *, left: str, exported: Optional[str] = None, reader: Reader = by_library) -> None:
    """`left` is the text of the file of an image or account; `exported` is the value that the job's script exports."""
    conf = ctx.dir / "nccl.conf"
    conf.write_text(left)
    os.environ["NCCL_CONF_FILE"] = str(conf)
    os.environ.pop(NAME, None)  # as `unset` in the job's script
    if exported is not None:
        os.environ[NAME] = exported
    if NAME in (text_of("/etc/nccl.conf") or ""):
        raise Unavailable(f"/etc/nccl.conf of this machine sets {NAME} itself: run the check instead")
    ctx.reached()
    source, value = reader(conf)
    ctx.note(source=source, value=value)
    if number(value) == 1:
        raise Symptom(f"{NAME} is {os.environ.get(NAME, 'unset')} in os.environ, and {source} goes by {value}")


# --- the job on two GPUs -------------------------------------------------------------------------------------------


def measure(ctx: Context) -> None:
    """The job of both arms, on two GPUs with NVLink. The arms differ only in NCCL_P2P_DISABLE."""
    pairs, _ = links(nvidia_smi_topo())
    if not pairs or not all(pair.startswith("NV") for pair in pairs):
        raise Unavailable(
            f"NVLink does not connect all GPU pairs: {' '.join(pairs) or 'nvidia-smi topo -m does not answer'}"
        )
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
    transports = sorted(set(re.findall(r" via ((?:P2P|SHM|NET)\S*)", log)))
    ctx.note(busbw_gb_s=round(busbw, 1), transports=transports)
    assert transports, "the log of NCCL names no transport between the GPUs"
    if not any(transport.startswith("P2P") for transport in transports):
        raise Symptom(
            f"all_reduce at busbw {busbw:.0f} GB/s via {' '.join(transports)}, and the GPUs are on {pairs[0]}"
        )


# --- the check -----------------------------------------------------------------------------------------------------

QUIET = re.compile(
    r"NCCL_(CONF_FILE|DEBUG(_\w+)?|VERSION|HOME|ROOT|(INCLUDE|LIB)_DIR|LIBRARY)"
)  # the last four are for builds
NOTES = {
    "NCCL_ALGO": "forces one algorithm for every size; 2.24 and newer stop if it fits no algorithm of a collective",
    "NCCL_PROTO": "forces one protocol for every size; LL128 can corrupt data if NCCL would not choose it itself",
    "NCCL_TOPO_FILE": "check that this file is for this type of machine",
    "NCCL_IB_DISABLE": "turns off InfiniBand and RoCE, which is right only if the nodes have nothing but TCP",
    "NCCL_NET": "forces this network transport; Socket is TCP",
}
OFF = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")  # 0 and an empty value change nothing
MOST_BYTES = 1 << 20


def text_of(path: str) -> Optional[str]:
    """The text of a file; empty if the file does not exist, None if kb cannot read it."""
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
    """NCCL's files, the first with priority; if kb does not know the release, the files that any release reads."""
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
    """The link of each pair of GPUs (NV18, PIX, SYS, ...), and the number of GPUs."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topo)
    rows = [line.split()[1:] for line in plain.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]  # the header has no X
    pairs = [row[at] for following, row in enumerate(rows, 1) for at in range(following, min(len(rows), len(row)))]
    return [pair for pair in pairs if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", pair)], len(rows)


def is_quiet(name: str, value: str) -> bool:
    return bool(QUIET.fullmatch(name)) or (name in OFF and number(value) == 0)


def judge(name: str, value: str, settings: Mapping[str, str], topo: str) -> Tuple[bool, str]:
    """Whether the setting is wrong on this machine, and what the setting does."""
    pairs, gpus = links(topo)
    no_level = settings.get("NCCL_P2P_LEVEL") in ("LOC", "0")
    p2p_off = number(settings.get(NAME, "")) == 1 or no_level
    if (name == NAME and number(value) == 1) or (name == "NCCL_P2P_LEVEL" and no_level):
        nvlink = [pair for pair in pairs if pair.startswith("NV")]
        if nvlink:
            return (
                True,
                f"turns off P2P, so also NVLink, which {len(nvlink)} of {len(pairs)} GPU pairs have ({nvlink[0]})",
            )
        topology = f"GPU pairs are on {' '.join(sorted(set(pairs)))}" if pairs else "nvidia-smi topo -m shows no links"
        return False, f"turns off P2P; {topology}"
    if name == "NCCL_SHM_DISABLE" and number(value) == 1:
        if p2p_off:
            return gpus > 1, "turns off shared memory; P2P is off too, so GPUs of one host use the network"
        return False, "turns off shared memory; some set it so that P2P cannot fail unnoticed"
    if name == "NCCL_GRAPH_FILE":
        if (os.path.isabs(value) or not value) and not os.access(value, os.R_OK):
            return True, "this process cannot open the file, so NCCL stops when it starts"
        return False, "has the paths for one set of GPUs; a job on other GPUs stops or is slow"
    return False, NOTES.get(name, "kb does not judge this setting")


def check(params: Mapping[str, Any]) -> Finding:
    """Which NCCL_ settings would NCCL get from this process, where do they come from, and do they fit this machine?"""
    image = dict(entry.partition("=")[::2] for entry in (text_of("/proc/1/environ") or "").split("\0"))
    settings = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    origin = {name: "environment" + ", image or pod" * (image.get(name) == value) for name, value in settings.items()}
    doubts: List[str] = []
    release = nccl_release()
    places = files(release)
    unsure = places[:-1] if not release and (len(places) > 2 or settings.get("NCCL_CONF_FILE")) else []
    for file in places:
        text = text_of(file) if os.path.isabs(file) else None
        doubts += [f"kb cannot read {file}"] if text is None else []
        for name, value in parsed(text or "", release):
            if name.startswith("NCCL_") and name == name.strip():
                origin.setdefault(name, file + ", by some releases" * (file in unsure))
                settings.setdefault(name, value)
            elif "NCCL_" in name:
                doubts.append(f"{file}: {name[:60]!r} is not a variable of NCCL; remove blanks and `export`")
    doubts += [
        f"only some releases of NCCL read {file}, and kb does not know the release here"
        for file in unsure
        if text_of(file)
    ]
    sure = {name: value for name, value in settings.items() if not origin[name].endswith(", by some releases")}
    topo = nvidia_smi_topo() if {"NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE"} & set(settings) else ""
    judged = {name: judge(name, value, sure, topo) for name, value in settings.items() if not is_quiet(name, value)}
    wrong = [name for name in judged if judged[name][0] and name in sure]
    shown = [*wrong, *(name for name in judged if name not in wrong)][:40]
    evidence = [f"{name}={settings[name][:120]}: {judged[name][1]} ({origin[name]})" for name in shown] + doubts
    if wrong:
        return exposed(*evidence, advice=f"run once without {' '.join(wrong)}, then remove it at its origin")
    if evidence:
        return unknown(*evidence, advice="for each setting that is not meant for this machine, run once without it")
    others = "the job's code or an env plugin of NCCL may set more"
    return clear(f"neither the environment nor {' '.join(places)} has an NCCL_ setting that changes a path; {others}")


# --- the experiments -----------------------------------------------------------------------------------------------

LOGGED = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "nccl.%p"}
LEFT = f"{NAME}=1\n"
UNSEEN = symptom(rf"{NAME} is unset in os\.environ, and (libnccl \d+|NCCL by its rules) goes by 1$")
IN_FILE = f"{LEFT.strip()} is left in a file that NCCL reads; the job's script unsets the variable, which does not help"


def without_gpu(
    name: str, fix: str, control: Mapping[str, Any], treatment: Mapping[str, Any], because: str = IN_FILE
) -> Experiment:
    fidelity = (
        ("model", "NCCL: the probe applies its rules without libnccl")
        if control.get("reader") == by_rules
        else ("cpu", "")
    )
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
                "NCCL_P2P_DISABLE=1 is set on GPUs that NVLink connects",
                "hardware",
                env={**LOGGED, NAME: "1"},
            ),
            treatment=Arm(
                measure, completed(), "NCCL_P2P_DISABLE is not set, so NCCL uses NVLink", "hardware", env=LOGGED
            ),
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
            "the line stays in the file, but the script exports 0, which NCCL prefers",
            {"left": LEFT},
            {"left": LEFT, "exported": "0"},
        ),
        without_gpu(
            "shell-syntax",
            "the file has the line without `export`, which comes first and wins",
            {"left": f"export {NAME}=0\n{LEFT}"},
            {"left": f"{NAME}=0\n{LEFT}"},
            "the file has `export NCCL_P2P_DISABLE=0` as in a shell, which NCCL does not understand",
        ),
    ),
)
