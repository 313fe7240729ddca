"""Have the GPUs of an NVSwitch machine joined the NVLink fabric, and does the fabric manager fit the driver?

A check only: stopping a node's fabric manager would end the jobs of others. It reads this machine or, with
`--set smi=FILE`, the saved output of `nvidia-smi -q` of another one.
"""

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

from kb.probe import Finding, Param, Probe, clear, exposed, unknown

START = "sudo systemctl status nvidia-fabricmanager; its package must have exactly the version of the driver"
ALONE = ", unless it is one GPU alone in a virtual machine"


def ask(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=3, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def fabric_of(report: str) -> Tuple[Dict[str, str], str]:
    """GPU to `State/Status` of its section Fabric in `nvidia-smi -q`, and the driver version."""
    gpu, inside = "", False
    states: Dict[str, str] = {}
    for line in report.splitlines():
        if re.match(r"GPU [0-9A-F]{8}:", line):
            gpu = line[4:].strip()
        elif re.match(r"    \S", line):
            inside = line.strip() == "Fabric"
        match = re.match(r"\s{8}(State|Status)\s*:\s*(.+)", line) if inside else None
        if match:
            states[gpu] = f"{states[gpu]}/{match[2].strip()}" if match[1] == "Status" else match[2].strip()
    driver = re.search(r"(?:Driver|KMD) Version\s*:\s*(\S+)", report)
    return states, driver[1] if driver else ""


def switches() -> int:
    """NVSwitches that this system sees: NVIDIA bridges of PCI class 0x0680."""
    count = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            nvidia = (device / "vendor").read_text().strip() == "0x10de"
            count += nvidia and (device / "class").read_text().startswith("0x0680")
        except OSError:
            continue
    return count


def is_running(name: str) -> bool:
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().strip() == name[:15]:  # what the kernel keeps of a name
                return True
        except OSError:
            continue
    return False


def is_in(path: str, text: str) -> bool:
    try:
        return text in Path(path).read_text().split("\n\n", 1)[0]
    except OSError:
        return False


def check(params: Mapping[str, Any]) -> Finding:
    """Would CUDA start on every GPU here, as far as the NVLink fabric decides it?"""
    saved = params["smi"]
    try:
        report = saved.read_text(errors="replace") if saved else ask("nvidia-smi", "-q")
    except OSError as error:
        return unknown(f"{saved}: {error.strerror}")
    states, driver = fabric_of(report)
    if not driver:
        return unknown("no answer of nvidia-smi -q", advice="on the GPU node, or with --set smi=FILE of nvidia-smi -q")
    attached = re.search(r"Attached GPUs\s*:\s*(\d+)", report)
    if attached and len(states) < int(attached[1]) and states:
        states["others"] = "not reported"
    tally = Counter(states.values())
    fabric = ", ".join(f"{count} GPUs {state}" for state, count in tally.items())
    evidence = [f"driver {driver}; fabric: {fabric or 'not reported'}"]
    waiting = [gpu for gpu, state in states.items() if re.match(r"Not Started|In Progress", state)]
    failed = [gpu for gpu, state in states.items() if state.startswith("Completed") and "Success" not in state]
    if waiting or failed:
        names = ", ".join((waiting + failed)[:8])
        return exposed(*evidence, f"not in the fabric: {names}; CUDA answers 802 there{ALONE}", advice=START)
    if saved:
        if states and all(state.startswith("Completed") for state in states.values()):
            return clear(*evidence)
        why = "no GPU reports a fabric: none is needed (PCIe cards), or it is an A100, whose driver does not report it"
        return unknown(*evidence, why, advice="on the node itself, where the switches and the service can be seen")
    is_complete = bool(states) and all(state.startswith("Completed") for state in states.values())
    names = ", ".join(sorted(set(re.findall(r"Product Name\s*:\s*(.+)", report))))
    return on_this_machine(evidence, driver, is_complete, names)


WITHOUT_SWITCH = re.compile(r"PCI[eE]|NVL\b|GeForce|RTX|Quadro|TITAN|Tesla (T4|P)|\b(L4|L40S?|A2|A10G?|A16|A30|A40)\b")


def on_this_machine(evidence: List[str], driver: str, completed: bool, names: str) -> Finding:
    seen, running = switches(), is_running("nv-fabricmanager")
    match = re.search(r"\d{3}\.\d+(\.\d+)?", ask("nv-fabricmanager", "-v"))
    evidence = [*evidence, f"{seen} NVSwitches on PCI, nv-fabricmanager {'runs' if running else 'does not run'}"]
    no_fabric = not (seen or completed) and bool(WITHOUT_SWITCH.search(names))
    if match and match[0] != driver and not no_fabric:
        evidence.append(f"the installed fabric manager is {match[0]}: it refuses driver {driver} at its next start")
        return exposed(*evidence, advice="install the fabric manager of the driver's exact version, and hold both back")
    if completed:
        note = "NVLS wants the GPUs reset after each restart of the manager, which cannot be seen from here"
        return clear(*evidence, f"all GPUs have joined the fabric; {note}")
    if seen and not running:
        if not is_in("/proc/2/comm", "kthreadd"):  # a container, or /proc with hidepid
            return unknown(*evidence, "the host's processes cannot be seen from here", advice="on the host itself")
        return exposed(*evidence, "switches without their manager: CUDA answers 802", advice=START)
    if seen:
        return unknown(*evidence, "the manager runs; this driver does not report the fabric state of these GPUs")
    if is_in("/proc/cpuinfo", " hypervisor"):
        return unknown(*evidence, "a virtual machine: the switches and their manager may belong to the host")
    if not no_fabric:
        return unknown(*evidence, f"{names or 'no product name'}: B200 and newer boards show no switch on the PCI bus")
    return clear(*evidence, "no NVSwitch, and cards that have none: there is no fabric to manage")


probe = Probe(
    params={"smi": Param("path", "saved output of `nvidia-smi -q` of the node in question")},
    check=check,
)
