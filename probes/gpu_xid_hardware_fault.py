"""Checks GPU health by driver and kernel log: ECC errors, remapped rows, a lost GPU, Xid and SXid events.

There is no experiment, because nobody can, or should, provoke a hardware fault. The check reads this machine or, with
`--set dmesg=FILE --set smi=FILE`, only files from another one.
"""

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, List, Mapping, Tuple

from kb.probe import Finding, Param, Probe, clear, exposed, unknown

REPLACE_IF_REPEATED = "drain the node and reset the GPU; replace it if its counts grow"
UPDATE_IF_REPEATED = "reset the GPU; install a newer driver if it happens again"
XIDS = {  # from NVIDIA's catalogue: what the driver reports, and the first action
    46: ("GPU stopped processing", "reset the GPU"),
    48: ("double-bit ECC error", REPLACE_IF_REPEATED),
    62: ("microcontroller halt", "reset the GPU"),
    64: ("row remapping failed", "reset the GPU, then contact NVIDIA support"),
    74: ("NVLink error", "drain the node, then check the link: nvidia-smi nvlink -e"),
    79: ("GPU has fallen off the bus", "reboot or power-cycle the node"),
    94: ("contained memory error", "restart the job; reset the GPU when the node is empty"),
    95: ("uncontained memory error", "reset the GPU"),
    109: ("context switch timeout", "reset the GPU"),
    110: ("security fault", "reset the GPU"),
    119: ("GSP firmware did not answer", UPDATE_IF_REPEATED),
    120: ("GSP firmware error", UPDATE_IF_REPEATED),
    136: ("NVLink training failed", "reset the GPU"),
    140: ("unrecovered ECC error", "reset the GPU"),
    143: ("GPU initialisation failed", "reset the GPU"),
    155: ("NVLink error seen by software", "reset the GPU"),
    158: ("fatal timeout", "reset the GPU"),
    171: ("uncorrectable DRAM error", REPLACE_IF_REPEATED),
    172: ("uncorrectable SRAM error", REPLACE_IF_REPEATED),
    175: ("GSP firmware did not answer", UPDATE_IF_REPEATED),
}
XIDS.update(
    dict.fromkeys(range(144, 151), ("NVLink error", "drain the node; Xid 154 says which action the driver requests"))
)
OF_PROGRAMS = {13, 31, 43, 69}  # usually a fault in a kernel of the program: see illegal-memory-access
HARMLESS = {63, 106, 107, 154}  # the catalogue says to ignore these; RECOVERY reads 154

MIG = r"(?: GPU-C?I:\d+)*"  # the instance, if the GPU is divided
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)" + MIG + r"\): (\d+)\b(?!, \w+ Nonfatal\b)")
LOST = re.compile(r"fallen off the bus|GPU is lost|Unable to determine the device handle")
RECOVERY = re.compile(r"Xid \((?:PCI:)?([0-9a-fA-F:.]+)" + MIG + r"\): 154,.*changed .*to 0x[1-9a-f] \(([^)]+)\)")
FROM_BOOT = re.compile(r"Linux version \d")  # a kernel log begins with this at boot
SUSPECT = re.compile(r"RmInitAdapter failed|PCIe Bus Error: severity=(?:Uncorrected|Uncorrectable)\b")
SWITCH = re.compile(r"SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+), Fatal")


def lines_of(saved: Path) -> Tuple[List[str], str]:
    """Returns the lines of a file and "", or no lines and the reason."""
    try:
        return saved.read_text(errors="replace").splitlines(), ""
    except OSError as error:
        return [], f"{saved}: {error.strerror}"


def output_of(*command: str) -> Tuple[str, str]:
    """Returns the output of a command, and "" or the reason not to trust it."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=3, check=False)
    except OSError:
        return "", f"{command[0]} is not installed"
    except subprocess.TimeoutExpired:
        return "", f"{command[0]} did not answer within 3 s: it is slow, or the driver hangs"
    return ran.stdout + ran.stderr, (ran.stderr or ran.stdout).strip()[:200] if ran.returncode else ""


def events(lines: List[str]) -> Tuple[List[str], List[str], List[str]]:
    """Returns the hardware faults in the kernel log, events that may have another cause, and what to do."""
    seen = Counter((int(result[2]), result[1]) for result in map(XID.search, lines) if result)
    hardware = [
        f"Xid {code} on {gpu} was logged {times(count)}: {XIDS[code][0]}"
        for (code, gpu), count in seen.items()
        if code in XIDS
    ]
    advice = [f"Xid {code}: {XIDS[code][1]}" for code in sorted({code for code, _ in seen if code in XIDS})]
    recovery = {result[1]: result[2] for result in map(RECOVERY.search, lines) if result}
    wanted = {gpu: f"Xid 154 on {gpu}: the driver requests this action: {action}" for gpu, action in recovery.items()}
    hardware += [text for gpu, text in wanted.items() if "IMEX" not in recovery[gpu]]
    if not hardware:
        hardware += [line.strip()[:160] for line in lines if LOST.search(line)][:3]
    for result in filter(None, map(SWITCH.search, lines)):
        hardware.append(f"NVSwitch {result[1]} reported the fatal SXid {result[2]}")
    others = {key: count for key, count in seen.items() if key[0] not in {*XIDS, *HARMLESS}}
    ambiguous = [
        f"Xid {code} on {gpu} was logged {times(count)}" + ": usually a fault in the program" * (code in OF_PROGRAMS)
        for (code, gpu), count in others.items()
    ] + [text for gpu, text in wanted.items() if "IMEX" in recovery[gpu]]  # concerns the domain, not this GPU
    return hardware, ambiguous + [line.strip()[:160] for line in lines if SUSPECT.search(line)][:2], advice


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def health(report: str) -> Tuple[List[str], List[str], int]:
    """Returns the faults and remarks in the text of `nvidia-smi -q`, and how many GPUs it describes."""
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
            faults.append(f"{gpu}: {name} was counted {times(int(value))} since the last reset")
        elif name == "Remapping Failure Occurred" and value == "Yes":
            faults.append(f"{gpu}: row remapping has failed, so replace the GPU")
        elif name == "SRAM Threshold Exceeded" and value == "Yes":
            faults.append(
                f"{gpu}: SRAM errors exceed the threshold of NVIDIA's field diagnosis, so request a replacement"
            )
        elif name == "GPU Recovery Action" and value not in ("None", "N/A", "") and "IMEX" not in value:
            faults.append(f"{gpu}: the driver requests this action: {value}")
        elif "Remapped Rows" in where and name == "Pending" and value == "Yes":
            remarks.append(f"{gpu}: a row remap waits for the next reset; jobs may run until then")
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
    """Does the kernel log, or the driver since its last reset, report a fault of a GPU here?"""
    is_saved = bool(params["dmesg"] or params["smi"])
    lines: List[str] = []
    no_log = "no dmesg file was named"
    if params["dmesg"]:
        lines, no_log = lines_of(params["dmesg"])
    elif not is_saved:
        output, no_log = output_of("dmesg")
        lines = output.splitlines()
    hardware, ambiguous, actions = events(lines)
    report, no_smi = "", "no nvidia-smi file was named"
    if params["smi"]:
        saved, no_smi = lines_of(params["smi"])
        report = "\n".join(saved)
    elif not is_saved:
        report, no_smi = output_of("nvidia-smi", "-q")  # without -d, which cannot select the recovery action
    faults, remarks, described = health(report)
    expected = int((re.search(r"Attached GPUs\s*:\s*(\d+)", report) or [0, described])[1])
    on_bus = 0 if is_saved else gpus_on_bus()
    if described and expected > described:
        faults.append(f"{expected} GPUs are attached, but only {described} answer nvidia-smi")
    hidden = on_bus > described > 0  # a container or a cgroup of Slurm hides GPUs, too
    if hidden:
        message = f"the bus has {on_bus} GPUs, but only {described} answer nvidia-smi"
        remarks.insert(0, f"{message}: one is lost, or this container or job has only these")
    evidence = hardware[:8] + faults[:8] + remarks[:4] + ambiguous[:4]
    if hardware or faults:
        return exposed(*evidence, advice="; ".join(actions[:4]) or "drain the node and reset or replace the GPU")
    if not is_saved and not on_bus and not described:
        advice = "--set dmesg=FILE --set smi=FILE, with the kernel log and the output of nvidia-smi -q from the node"
        return unknown("kb found no NVIDIA GPU here", advice=advice)
    read = f"kb read {len(lines)} lines of kernel log"
    if hidden:
        return unknown(*evidence, read, advice="run this on the host, outside a job")
    if any(map(str.strip, lines)) and described:
        return judge_log(lines, described, evidence, is_ambiguous=bool(ambiguous))
    missing = "; ".join(reason for reason in (no_log, no_smi) if reason) or "neither describes a GPU"
    read += f", and nvidia-smi describes {described} GPUs; missing: {missing}"
    return unknown(*evidence, read, advice="on the node run sudo dmesg -T > FILE, then --set dmesg=FILE")


def judge_log(lines: List[str], described: int, evidence: List[str], *, is_ambiguous: bool) -> Finding:
    """Judges a kernel log without a hardware fault: an ambiguous event, or a log that begins late, leaves it open."""
    if is_ambiguous:
        catalogue = "look the numbers up in NVIDIA's Xid catalogue; for 13, 31, 43 and 69 see illegal-memory-access"
        return unknown(*evidence, f"kb read {len(lines)} lines of kernel log", advice=catalogue)
    message = f"nvidia-smi describes {described} GPUs, and {len(lines)} lines of kernel log contain no hardware event"
    if not any(map(FROM_BOOT.search, lines[:30])):
        first = next(line.strip()[:60] for line in lines if line.strip())
        return unknown(*evidence, f"{message}, but the log does not reach back to the boot; it begins with: {first}")
    return clear(*evidence, f"{message}; it begins at the boot, so kb cannot see earlier events")


probe = Probe(
    params={
        "dmesg": Param("path", "saved kernel log (dmesg -T, journalctl -k) from the node in question"),
        "smi": Param("path", "saved output of `nvidia-smi -q` from the node in question"),
    },
    check=check,
)
