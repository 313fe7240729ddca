"""Runs the first collectives between two GPUs, with the transport that NCCL chooses and with P2P off."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

PATIENCE_S = 45.0
NUMELS = (1, 1 << 18, 1 << 22)  # one element as a barrier, 1 MiB, 16 MiB: NCCL uses a different protocol for each


def first_collectives(ctx: Context) -> None:
    """The job of both arms, which differ only in NCCL_P2P_DISABLE, a variable that NCCL reads."""
    if "NCCL_P2P_DISABLE" in os.environ and still_busy():
        raise Unavailable(
            "a GPU is at 100 % before the run without P2P begins: reset the GPUs or reboot, and run again"
        )
    ctx.init_process_group(timeout_s=600, device_id=None)  # lazy: NCCL's own set-up may be what hangs
    ctx.reached()
    collectives = Collectives(ctx)
    worker = threading.Thread(target=collectives.run, daemon=True)
    worker.start()
    worker.join(PATIENCE_S)  # no CUDA call here: the main thread must be able to report while the GPU spins
    transports = chosen_transports(ctx)
    ctx.note(
        transports=transports,
        busbw_gb_s=collectives.busbw_gb_s,
        nccl_p2p_disable=os.environ.get("NCCL_P2P_DISABLE"),
    )
    if collectives.errors:
        raise collectives.errors[0]
    over = f"transports {', '.join(transports) or 'not logged'}"
    if collectives.wrong:
        raise Symptom(f"the first collectives returned wrong values on rank {ctx.rank}: {collectives.wrong}; {over}")
    if worker.is_alive():
        raise Symptom(f"{collectives.current} never completed on rank {ctx.rank} in {PATIENCE_S:.0f} s; {over}")
    if "NCCL_P2P_DISABLE" not in os.environ and transports and not any(t.startswith("P2P") for t in transports):
        raise Unavailable(f"NCCL itself does not use P2P between these two GPUs, it chose {', '.join(transports)}")


class Collectives:
    """The first collectives of a rank. They run in a thread, and the main thread reads how far they got."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.current = "torch.cuda.set_device"
        self.wrong = ""
        self.busbw_gb_s = 0.0
        self.errors: list[BaseException] = []

    def run(self) -> None:
        import torch

        try:
            torch.cuda.set_device(self.ctx.device)
            for numel in NUMELS:
                self.compare(numel)
                if self.wrong:
                    return
            self.measure()
            self.current = ""
        except BaseException as error:
            self.errors.append(error)

    def compare(self, numel: int) -> None:
        """Reduces and gathers integers that differ per rank and element, so a result is exact or wrong."""
        import torch
        import torch.distributed as dist

        base = torch.arange(numel, dtype=torch.int32, device=self.ctx.device) % 1000
        numbers = base + 1000 * (self.ctx.rank + 1)
        self.current = f"all_reduce of {numel} int32"
        total = numbers.clone()
        dist.all_reduce(total)
        wrong = int((total != 2 * base + 3000).sum())
        self.current = f"all_gather of {numel} int32"
        pieces = [torch.zeros_like(numbers) for _ in range(self.ctx.world_size)]
        dist.all_gather(pieces, numbers)
        wrong += sum(int((piece != base + 1000 * (rank + 1)).sum()) for rank, piece in enumerate(pieces))
        if wrong:
            self.wrong = f"{wrong} of {3 * numel} elements of size {numel}"

    def measure(self) -> None:
        import torch
        import torch.distributed as dist

        self.current = "the bandwidth measurement"
        big = torch.zeros(1 << 24, device=self.ctx.device)  # 64 MiB
        for repeat in range(25):
            if repeat == 5:
                torch.cuda.synchronize()
                begun = time.monotonic()
            dist.all_reduce(big)
        torch.cuda.synchronize()
        self.busbw_gb_s = round(20 * big.nbytes / (time.monotonic() - begun) / 1e9, 2)  # 2(n-1)/n is 1 for n=2


def still_busy() -> bool:
    """Is a GPU at 100 %, or does nvidia-smi not answer? A hang over P2P may leave both; then any later run hangs."""
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return False
    try:
        return "100" in process.communicate(timeout=10)[0].split()
    except subprocess.TimeoutExpired:
        process.kill()  # do not wait for it: with a hung driver it cannot die
        return True


def chosen_transports(ctx: Context) -> list[str]:
    """The transports that NCCL logged, as in `Channel 00/0 : 0[0] -> 1[1] via P2P/IPC`; empty if it logged none."""
    text = ""
    for path in ctx.dir.glob(f"nccl.{os.getpid()}*"):
        text += path.read_text(errors="replace")
    return sorted(set(re.findall(r" via ((?:P2P|SHM|NET)\S*)", text)))


# --- the check: can this machine break P2P? It reads /proc, /sys and nvidia-smi -----------------------------------

PCI = Path("/sys/bus/pci/devices")
BLIND = "kb cannot see a fault of driver or hardware; only the experiment can show it"
REFUSED = {"CNS", "GNS", "TNS", "NS", "DR"}  # of nvidia-smi topo -p2p; not U, which it prints if it does not know
REDIRECTS = {0x04: "ReqRedir", 0x08: "CmpltRedir"}  # bits of ACSCtl that redirect a direct transfer to the root complex


def nvidia_gpus() -> list[Path]:
    result = []
    for device in sorted(PCI.glob("*")):
        try:
            is_nvidia = (device / "vendor").read_text().strip() == "0x10de"
            is_gpu = (device / "class").read_text().startswith(("0x0300", "0x0302"))
        except OSError:
            continue
        if is_nvidia and is_gpu:
            result.append(device)
    return result


def acs_redirects(bridge: Path) -> str | None:
    """The redirecting bits of a bridge's ACS control as lspci names them, "" for none; None if kb cannot read them."""
    try:
        space = (bridge / "config").read_bytes()
    except OSError:
        return None
    if len(space) < 0x104:
        return None  # without root, the file has only the first 64 bytes
    at = 0x100
    for _ in range(96):  # the list of extended capabilities; the loop is bounded because a broken list may be a ring
        header = int.from_bytes(space[at : at + 4], "little")
        if header & 0xFFFF == 0x000D:
            control = int.from_bytes(space[at + 6 : at + 8], "little")
            return " ".join(f"{name}+" for bit, name in REDIRECTS.items() if control & bit)
        at = header >> 20
        if not 0x100 <= at < len(space) - 8:
            break
    return ""


def bridges_above(gpu: Path) -> list[Path]:
    """The PCI devices between a GPU and its root complex."""
    address = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
    return [parent for parent in gpu.resolve().parents if address.match(parent.name)]


def matrices() -> tuple[list[str], list[str]]:
    """P2P status (OK, NS, ...) and distance (NV12, PIX, ...) of each pair of GPUs, from the driver."""
    processes = []
    for arguments in (["-p2p", "r"], ["-m"]):
        try:
            processes.append(
                subprocess.Popen(
                    ["nvidia-smi", "topo", *arguments],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    errors="replace",
                )
            )
        except OSError:
            return [], []
    answers = []
    end = time.monotonic() + 3
    for process in processes:
        try:
            answers.append(process.communicate(timeout=max(0.1, end - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            process.kill()  # do not wait for it: with a hung driver it cannot die
            answers.append("")
    return upper_triangle(answers[0]), upper_triangle(answers[1])


def upper_triangle(text: str) -> list[str]:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split()[1:] for line in plain.splitlines() if re.match(r"\s*GPU\d+\s+(X|[A-Z]+\d*)\s", line + " ")]
    rows = [row for row in rows if "X" in row]  # the header names GPUs and has no X
    return [row[column] for number, row in enumerate(rows) for column in range(number + 1, min(len(rows), len(row)))]


def check(_: Mapping[str, Any]) -> Finding:
    """Is there a known cause of broken P2P: a PCIe bridge that redirects, or an IOMMU that translates?"""
    gpus = nvidia_gpus()
    statuses, distances = matrices()
    if not gpus and not statuses:
        return unknown("kb finds no NVIDIA GPU in /sys/bus/pci, and nvidia-smi does not answer")
    if len(gpus) < 2 and not statuses:
        return unknown("kb sees one GPU, but P2P needs two")
    evidence = [f"{len(gpus)} NVIDIA GPUs in /sys/bus/pci"]
    if statuses:
        evidence.append(f"nvidia-smi topo -p2p r, GPU pairs: {tally(statuses)}")
    if distances:
        evidence.append(f"nvidia-smi topo -m, GPU pairs: {tally(distances)}")
    if statuses and set(statuses) <= REFUSED:
        return clear(
            *evidence, "the driver offers no P2P, so NCCL does not use it and NCCL_P2P_DISABLE=1 changes nothing"
        )

    redirecting, unreadable = [], 0
    for bridge in sorted({bridge for gpu in gpus for bridge in bridges_above(gpu)}):
        bits = acs_redirects(bridge)
        unreadable += bits is None
        if bits:
            redirecting.append(f"{bridge.name} ({bits})")
    domains = sorted({iommu_domain(gpu) for gpu in gpus})
    evidence.append(f"IOMMU domain of the GPUs: {', '.join(domains)}; kernel command line: {iommu_options()}")
    translating = any(domain.startswith("DMA") for domain in domains)
    if redirecting:
        evidence.append(f"ACS redirects P2P at {', '.join(redirecting[:8])}")
    elif unreadable:
        evidence.append(f"kb cannot read ACS of {unreadable} bridges above the GPUs without root")
    virtual = is_virtual()
    if virtual:
        evidence.append("this is a virtual machine: its host configures ACS and IOMMU, which a guest cannot see")
    if distances and all(distance.startswith("NV") for distance in distances):
        return unknown(*evidence, f"NVLink connects all pairs, and ACS and IOMMU do not affect it; {BLIND}")
    if distances and not any(distance in ("PIX", "PXB") for distance in distances) and not (is_amd() and len(gpus) < 3):
        jobs = "in jobs with more than two GPUs" if is_amd() else "over PCIe"
        return unknown(*evidence, f"NCCL 2.23 and newer do not use P2P {jobs} at these distances; other libraries may")
    if (redirecting or translating) and not virtual:
        return exposed(
            *evidence,
            advice="run the experiment; if it hangs, set iommu=pt and turn ACS off (BIOS or setpci), "
            "and use NCCL_P2P_DISABLE=1 until then",
        )
    if virtual or unreadable or not statuses or not gpus:
        return unknown(*evidence, advice="run the experiment, and read ACS as root: sudo lspci -vvv | grep ACSCtl")
    return unknown(*evidence, f"no bridge above the GPUs redirects and no IOMMU translates; {BLIND}")


def tally(values: list[str]) -> str:
    return ", ".join(f"{values.count(value)} x {value}" for value in sorted(set(values)))


def iommu_domain(gpu: Path) -> str:
    """`DMA` and `DMA-FQ` translate, `identity` (iommu=pt) does not; `none` without an IOMMU."""
    group = gpu / "iommu_group"
    if not group.exists():
        return "none"
    try:
        return (group / "type").read_text().strip()
    except OSError:
        return "not readable"


def iommu_options() -> str:
    try:
        words = Path("/proc/cmdline").read_text().split()
    except OSError:
        return "not readable"
    return " ".join(word for word in words if "iommu" in word or word.startswith("pci=")) or "no iommu or pci option"


def first_cpu() -> str:
    try:
        return Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return ""


def is_virtual() -> bool:
    return " hypervisor" in first_cpu()


def is_amd() -> bool:
    return "AuthenticAMD" in first_cpu()


LOGGED = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "nccl.%p"}  # in both arms: NCCL logs which transport it chooses

probe = Probe(
    check=check,
    experiments=(
        Experiment(
            name="nccl",
            control=Arm(
                first_collectives,
                expect=symptom(r"never completed on rank|returned wrong values on rank"),
                because="NCCL chooses the transport itself, and uses P2P if the driver offers it",
                fidelity="hardware",
                env=LOGGED,
            ),
            treatment=Arm(
                first_collectives,
                expect=completed(),
                because="with NCCL_P2P_DISABLE=1 NCCL uses shared memory of the host instead of P2P",
                fidelity="hardware",
                env={**LOGGED, "NCCL_P2P_DISABLE": "1"},
            ),
            backend="nccl",
            needs=Needs(gpus=2),
            deadline_s=120,
            settle_s=10,
            expected_s=(60, 15),
        ),
    ),
)
