"""Have the GPUs of an NVSwitch machine joined the NVLink fabric, and does the fabric manager fit the driver?

The probe has only a check: an experiment would have to stop a node's fabric manager, which ends every job on it. The
check reads this machine or, with `--set smi=FILE`, the saved output of `nvidia-smi -q` from another one.
"""

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

from kb.probe import Finding, Param, Probe, clear, exposed, unknown

START = "run sudo systemctl status nvidia-fabricmanager; its package must have exactly the driver's version"
SINGLE = ", unless it is the only GPU of a virtual machine"


def output_of(*command: str) -> str:
    """The standard output of a command, or "" if it cannot run or takes over 3 s."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=3, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def fabric_of(report: str) -> Tuple[Dict[str, str], str]:
    """The `State/Status` of each GPU, from the section Fabric of `nvidia-smi -q`, and the driver version."""
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


def count_switches() -> int:
    """The number of NVSwitches that this system sees: NVIDIA bridges of PCI class 0x0680."""
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
            if comm.read_text().strip() == name[:15]:  # the kernel keeps 15 characters of a name
                return True
        except OSError:
            continue
    return False


def is_in(path: str, text: str) -> bool:
    """Does the first paragraph of the file contain this text? False if the file cannot be read."""
    try:
        return text in Path(path).read_text().split("\n\n", 1)[0]
    except OSError:
        return False


def check(params: Mapping[str, Any]) -> Finding:
    """Does the NVLink fabric let CUDA start on every GPU of this node?"""
    saved = params["smi"]
    try:
        report = saved.read_text(errors="replace") if saved else output_of("nvidia-smi", "-q")
    except OSError as error:
        return unknown(f"{saved}: {error.strerror}")
    states, driver = fabric_of(report)
    if not driver:
        advice = "run this on the GPU node, or save the output of nvidia-smi -q there and run --set smi=FILE"
        return unknown("nvidia-smi -q reports no driver", advice=advice)
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
        return exposed(*evidence, f"not in the fabric: {names}; CUDA returns error 802 there{SINGLE}", advice=START)
    if saved:
        if states and all(state.startswith("Completed") for state in states.values()):
            return clear(*evidence)
        why = "not every GPU reports its fabric; PCIe cards need none, and for an A100 the driver does not report it"
        return unknown(*evidence, why, advice="run this on the node, where kb sees the switches and the service")
    is_complete = bool(states) and all(state.startswith("Completed") for state in states.values())
    names = ", ".join(sorted(set(re.findall(r"Product Name\s*:\s*(.+)", report))))
    return on_this_machine(evidence, driver, is_complete, names)


WITHOUT_SWITCH = re.compile(r"PCI[eE]|NVL\b|GeForce|RTX|Quadro|TITAN|Tesla (T4|P)|\b(L4|L40S?|A2|A10G?|A16|A30|A40)\b")


def on_this_machine(evidence: List[str], driver: str, completed: bool, names: str) -> Finding:
    """The finding from the switches, the service and its version on this machine."""
    switches, running = count_switches(), is_running("nv-fabricmanager")
    match = re.search(r"\d{3}\.\d+(\.\d+)?", output_of("nv-fabricmanager", "-v"))
    evidence = [*evidence, f"{switches} NVSwitches on PCI, nv-fabricmanager {'runs' if running else 'does not run'}"]
    no_fabric = not (switches or completed) and bool(WITHOUT_SWITCH.search(names))
    if match and match[0] != driver and not no_fabric:
        evidence.append(f"the installed fabric manager is {match[0]}, and refuses driver {driver} when it next starts")
        return exposed(*evidence, advice="install the fabric manager of the driver's exact version, and hold both back")
    if completed:
        note = "NVLS needs a GPU reset after each restart of the fabric manager; kb cannot see whether that was done"
        return clear(*evidence, f"all GPUs have joined the fabric; {note}")
    if switches and not running:
        if not is_in("/proc/2/comm", "kthreadd"):  # this is a container, or /proc has hidepid
            return unknown(*evidence, "kb cannot see the host's processes from here", advice="run this on the host")
        return exposed(*evidence, "the node has switches but no fabric manager: CUDA returns error 802", advice=START)
    if switches:
        return unknown(*evidence, "the manager runs, but this driver does not report the fabric state of these GPUs")
    if is_in("/proc/cpuinfo", " hypervisor"):
        return unknown(*evidence, "this is a virtual machine: its switches and their manager may belong to the host")
    if not no_fabric:
        return unknown(*evidence, f"{names or 'no product name'}: B200 and newer boards show no switch on the PCI bus")
    return clear(*evidence, "the node has no NVSwitch, and its cards need none, so there is no fabric to manage")


probe = Probe(
    params={"smi": Param("path", "saved output of `nvidia-smi -q` from the node in question")},
    check=check,
)
