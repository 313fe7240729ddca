"""GPU health according to driver and kernel log: ECC, remapped rows, a lost GPU, Xid and SXid events.

A check only: a hardware fault cannot, and must not, be provoked. It reads this machine or, with
`--set dmesg=FILE --set smi=FILE`, what was collected on another one, and then nothing else.
"""

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, List, Mapping, Tuple

from kb.probe import Finding, Param, Probe, clear, exposed, unknown

XIDS = {  # NVIDIA's catalogue: what the driver reports, and the first action
    46: ("GPU stopped processing", "reset the GPU"),
    48: ("double-bit ECC error", "drain and reset; counts on one GPU that grow: replace it"),
    62: ("microcontroller halt", "reset the GPU"),
    64: ("row remapping failed", "reset the GPU, then NVIDIA support"),
    74: ("NVLink error", "drain, then check the link: nvidia-smi nvlink -e"),
    79: ("GPU has fallen off the bus", "reboot or power-cycle the node"),
    94: ("contained memory error", "restart the job; reset the GPU when the node is empty"),
    95: ("uncontained memory error", "reset the GPU"),
    109: ("context switch timeout", "reset the GPU"),
    110: ("security fault", "reset the GPU"),
    119: ("GSP firmware did not answer", "reset the GPU; a newer driver if it repeats"),
    120: ("GSP firmware error", "reset the GPU; a newer driver if it repeats"),
    136: ("NVLink training failed", "reset the GPU"),
    140: ("unrecovered ECC error", "reset the GPU"),
    143: ("GPU initialisation failed", "reset the GPU"),
    155: ("NVLink error seen by software", "reset the GPU"),
    158: ("fatal timeout", "reset the GPU"),
    171: ("uncorrectable DRAM error", "drain and reset; counts on one GPU that grow: replace it"),
    172: ("uncorrectable SRAM error", "drain and reset; counts on one GPU that grow: replace it"),
    175: ("GSP firmware did not answer", "reset the GPU; a newer driver if it repeats"),
}
XIDS.update(dict.fromkeys(range(144, 151), ("NVLink error", "drain; Xid 154 says what the driver wants")))
OF_PROGRAMS = {13, 31, 43, 69}  # a kernel of the program's own in most cases: see illegal-memory-access
HARMLESS = {63, 106, 107, 154}  # ignore, in the catalogue; 154 is judged by what it asks for

MIG = r"(?: GPU-C?I:\d+)*"  # the instance, where the GPU is divided
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)" + MIG + r"\): (\d+)\b(?!, \w+ Nonfatal\b)")
LOST = re.compile(r"fallen off the bus|GPU is lost|Unable to determine the device handle")
RECOVERY = re.compile(r"Xid \((?:PCI:)?([0-9a-fA-F:.]+)" + MIG + r"\): 154,.*changed .*to 0x[1-9a-f] \(([^)]+)\)")
FROM_BOOT = re.compile(r"Linux version \d")  # the first words of a kernel
SUSPECT = re.compile(r"RmInitAdapter failed|PCIe Bus Error: severity=(?:Uncorrected|Uncorrectable)\b")
SWITCH = re.compile(r"SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+), Fatal")


def lines_of(saved: Path) -> Tuple[List[str], str]:
    """Lines of a file and "", or no lines and the reason."""
    try:
        return saved.read_text(errors="replace").splitlines(), ""
    except OSError as error:
        return [], f"{saved}: {error.strerror}"


def ask(*command: str) -> Tuple[str, str]:
    """Output of a command, and "" or the reason not to trust it."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=3, check=False)
    except OSError:
        return "", f"{command[0]} is not installed"
    except subprocess.TimeoutExpired:
        return "", f"{command[0]} did not answer in 3 s: it is slow, or the driver hangs"
    return ran.stdout + ran.stderr, (ran.stderr or ran.stdout).strip()[:200] if ran.returncode else ""


def events(lines: List[str]) -> Tuple[List[str], List[str], List[str]]:
    """Evidence of hardware in the kernel log, events that may have another cause, and what to do."""
    seen = Counter((int(result[2]), result[1]) for result in map(XID.search, lines) if result)
    hardware = [
        f"Xid {code} on {gpu}, {count} times: {XIDS[code][0]}" for (code, gpu), count in seen.items() if code in XIDS
    ]
    advice = [f"Xid {code}: {XIDS[code][1]}" for code in sorted({code for code, _ in seen if code in XIDS})]
    recovery = {result[1]: result[2] for result in map(RECOVERY.search, lines) if result}
    wanted = {gpu: f"Xid 154 on {gpu}: the driver asks for: {action}" for gpu, action in recovery.items()}
    hardware += [text for gpu, text in wanted.items() if "IMEX" not in recovery[gpu]]
    if not hardware:
        hardware += [line.strip()[:160] for line in lines if LOST.search(line)][:3]
    for result in filter(None, map(SWITCH.search, lines)):
        hardware.append(f"NVSwitch {result[1]}: fatal SXid {result[2]}")
    others = {key: count for key, count in seen.items() if key[0] not in {*XIDS, *HARMLESS}}
    open_ones = [
        f"Xid {code} on {gpu}, {count} times" + ": a program's own fault in most cases" * (code in OF_PROGRAMS)
        for (code, gpu), count in others.items()
    ] + [text for gpu, text in wanted.items() if "IMEX" in recovery[gpu]]  # of the domain, not of this GPU
    return hardware, open_ones + [line.strip()[:160] for line in lines if SUSPECT.search(line)][:2], advice


def health(report: str) -> Tuple[List[str], List[str], int]:
    """Faults and remarks in the text of `nvidia-smi -q`, and how many GPUs it describes."""
    faults, remarks, gpu, path, gpus = [], [], "", [""] * 12, 0
    faults += [line.strip()[:160] for line in report.splitlines() if LOST.search(line)][:3]
    for line in report.splitlines():
        if re.match(r"GPU [0-9A-F]{8}:", line):
            gpu, gpus = line[4:].strip(), gpus + 1
        depth = (len(line) - len(line.lstrip())) // 4
        name, _, value = (part.strip() for part in line.partition(" : "))
        path = [*path[:depth], name, *[""] * 12][:12]
        where = " ".join(path)
        if re.search(r"Volatile.*(Uncorrectable|Double Bit)", where) and value.isdigit() and int(value):
            faults.append(f"{gpu}: {value} x {name} since the last reset")
        elif name == "Remapping Failure Occurred" and value == "Yes":
            faults.append(f"{gpu}: row remapping has failed, the GPU is to be replaced")
        elif name == "SRAM Threshold Exceeded" and value == "Yes":
            faults.append(f"{gpu}: SRAM errors above the threshold of NVIDIA's field diagnosis, ask for a replacement")
        elif name == "GPU Recovery Action" and value not in ("None", "N/A", "") and "IMEX" not in value:
            faults.append(f"{gpu}: the driver asks for: {value}")
        elif "Remapped Rows" in where and name == "Pending" and value == "Yes":
            remarks.append(f"{gpu}: a row remap waits for the next reset; new work may run until then")
        elif name.startswith("Pending Page") and value == "Yes":
            remarks.append(f"{gpu}: retired pages wait for the next reset")
    return faults, remarks, gpus


def gpus_on_bus() -> int:
    count = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            nvidia = (device / "vendor").read_text().strip() == "0x10de"
            count += nvidia and (device / "class").read_text().startswith(("0x0300", "0x0302"))
        except OSError:
            continue
    return count


def check(params: Mapping[str, Any]) -> Finding:
    """Has a GPU here reported a fault since the kernel log begins, or the driver since its last reset?"""
    is_saved = bool(params["dmesg"] or params["smi"])
    lines: List[str] = []
    no_log = "no dmesg file was given"
    if params["dmesg"] or not is_saved:
        output, no_log = ("", "") if params["dmesg"] else ask("dmesg")
        lines, no_log = lines_of(params["dmesg"]) if params["dmesg"] else (output.splitlines(), no_log)
    hardware, open_ones, advice = events(lines)
    report, no_smi = "", "no nvidia-smi file was given"
    if params["smi"]:
        saved, no_smi = lines_of(params["smi"])
        report = "\n".join(saved)
    elif not is_saved:
        report, no_smi = ask("nvidia-smi", "-q")  # all: the recovery action has no -d of its own
    faults, remarks, described = health(report)
    expected = int((re.search(r"Attached GPUs\s*:\s*(\d+)", report) or [0, described])[1])
    on_bus = 0 if is_saved else gpus_on_bus()
    if described and expected > described:
        faults.append(f"{expected} GPUs attached, {described} answer nvidia-smi")
    hidden = on_bus > described > 0  # a container or a cgroup of Slurm hides GPUs, too
    if hidden:
        seen = f"{on_bus} GPUs on the bus, {described} answer nvidia-smi"
        remarks.insert(0, f"{seen}: one is lost, or this container or job has only these")
    evidence = hardware[:8] + faults[:8] + remarks[:4]
    evidence += open_ones[:4]
    if hardware or faults:
        return exposed(*evidence, advice="; ".join(advice[:4]) or "drain the node and reset or replace the GPU")
    if not is_saved and not on_bus and not described:
        return unknown(
            "no NVIDIA GPU here: point it at files with --set dmesg=FILE and --set smi=FILE of nvidia-smi -q"
        )
    if hidden:
        return unknown(*evidence, f"{len(lines)} lines of kernel log read", advice="run it on the host, outside a job")
    if any(map(str.strip, lines)) and described:
        first = next(line.strip()[:60] for line in lines if line.strip())
        read = f"{described} GPUs, {len(lines)} lines of kernel log, no hardware event in them"
        if open_ones:
            catalogue = "look the numbers up in NVIDIA's Xid catalogue; 13, 31, 43 and 69: illegal-memory-access"
            return unknown(*evidence, f"{len(lines)} lines of kernel log read", advice=catalogue)
        if not any(map(FROM_BOOT.search, lines[:30])):
            return unknown(*evidence, f"{read}; it does not reach back to the boot, and begins with: {first}")
        return clear(*evidence, f"{read}, which begin at the boot: an event before it cannot be seen")
    missing = "; ".join(reason for reason in (no_log, no_smi) if reason) or "neither describes a GPU"
    read = f"read: {len(lines)} lines of kernel log, {described} GPUs in nvidia-smi; missing: {missing}"
    return unknown(*evidence, read, advice="sudo dmesg -T > FILE on the node, then --set dmesg=FILE")


probe = Probe(
    params={
        "dmesg": Param("path", "saved kernel log (dmesg -T, journalctl -k) of the node in question"),
        "smi": Param("path", "saved output of `nvidia-smi -q` of the node in question"),
    },
    check=check,
)
