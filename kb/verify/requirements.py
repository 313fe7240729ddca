"""Decides from the machine snapshot, before any process starts, whether a machine has what an experiment needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from math import inf

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from kb.errors import ProbeError
from kb.machine.gpus import Gpu
from kb.machine.snapshot import MachineSnapshot
from kb.probe import Needs

BUSY_MIB = 500  # an idle driver holds less
BUSY_PERCENT = 10
EXCLUSIVE = ("Exclusive_Process", "Exclusive_Thread")


def unmet(needs: Needs, machine: MachineSnapshot, *, force: bool = False) -> str:
    """What is missing, or "" if nothing is. With `force`, busy GPUs count as well.

    What the snapshot could not determine counts as missing, with the snapshot's own reason.
    """
    missing = [*_packages(needs, machine), *_programs(needs), *_memory(needs, machine)]
    return "; ".join([*missing, *_gpus(needs, machine, force)])


def free_gpus(machine: MachineSnapshot, force: bool = False, memory_mib: int = 0) -> tuple[str, ...]:
    """UUIDs of the GPUs that an arm may use and that have this much memory free: idle ones, then the emptiest."""
    usable = [gpu for gpu in machine.gpus or () if not any(_refusal(gpu, machine, force, memory_mib))]
    usable.sort(key=lambda gpu: -(gpu.memory_free_mib or 0) if _use(gpu) else -inf)
    return tuple(gpu.uuid for gpu in usable if gpu.uuid)


def _packages(needs: Needs, machine: MachineSnapshot) -> Iterator[str]:
    python = machine.interpreter
    if machine.python is None:
        if needs.packages:
            yield f"what is installed in {python} is unknown: {machine.reasons.get('python', 'it was not asked')}"
        return
    installed = {canonicalize_name(name): version for name, version in machine.python["packages"].items()}
    for name, specifier in needs.packages.items():
        version = installed.get(canonicalize_name(name), "")
        if version == "":
            yield f"{name} is not installed in {python}"
        elif not _is_within(version, specifier):
            yield f"{name} {version or 'of an unknown version'} in {python} is not {specifier}"


def _is_within(version: str | None, specifier: str) -> bool:
    """Whether a version is within a PEP 440 specifier; pre-releases and local versions (`2.13.0+cpu`) count too."""
    try:
        return not specifier or SpecifierSet(specifier).contains(Version(version or ""), prereleases=True)
    except InvalidSpecifier:
        raise ProbeError(f"needs: {specifier!r} is not a PEP 440 specifier") from None
    except InvalidVersion:
        return False


def _programs(needs: Needs) -> Iterator[str]:
    for program in needs.programs:
        if shutil.which(program) is None:
            yield f"{program} is not on PATH"


def _memory(needs: Needs, machine: MachineSnapshot) -> Iterator[str]:
    usable = machine.usable_memory_mib
    if usable is None:
        yield f"how much memory is available is unknown: {machine.reasons.get('host.memory_available_mib', '')}"
    elif usable < needs.memory_mib:
        yield f"{usable} MiB of memory are available of the {needs.memory_mib} MiB needed"


def _gpus(needs: Needs, machine: MachineSnapshot, force: bool) -> Iterator[str]:
    if not needs.gpus:
        return
    requirement = f"needs {needs.gpus} GPU{'s' if needs.gpus > 1 else ''}"
    if machine.gpus is None:
        yield f"{requirement}: {machine.reasons.get('gpus', 'they are unknown')}"
        return
    free = free_gpus(machine, force, needs.gpu_memory_mib)
    if len(free) < needs.gpus:
        why = _why_not(machine, force, needs.gpu_memory_mib)
        yield "; ".join([f"{requirement}: {len(free)} of {len(machine.gpus)} GPUs are free", *why])
    torch = (machine.python or {}).get("torch") or {}
    if "torch" in needs.packages and torch.get("version") and not (torch.get("cuda") or torch.get("hip")):
        yield f"{requirement}: torch {torch['version']} in {machine.interpreter} is built without CUDA"


def _why_not(machine: MachineSnapshot, force: bool, memory_mib: int) -> list[str]:
    """The GPUs that cannot be used, for instance `busy: 0,1 (used 41000 MiB), 2 (97 % utilized)`."""
    refused: dict[str, dict[str, list[str]]] = {}
    for gpu in machine.gpus or ():
        kind, detail = _refusal(gpu, machine, force, memory_mib)
        if kind:
            refused.setdefault(kind, {}).setdefault(detail, []).append("?" if gpu.index is None else str(gpu.index))
    return [
        f"{kind}: "
        + ", ".join(",".join(indices) + (f" ({detail})" if detail else "") for detail, indices in groups.items())
        for kind, groups in refused.items()
    ]


def _refusal(gpu: Gpu, machine: MachineSnapshot, force: bool, memory_mib: int) -> tuple[str, str]:
    """Why an arm may not use this GPU: the kind of obstacle and its detail, both "" if it may."""
    use = _use(gpu)
    if gpu.uuid is None:
        return "lost", "the driver gives no UUID"
    if not _is_visible(gpu, machine):
        return "not in CUDA_VISIBLE_DEVICES", ""
    if gpu.mig_mode == "Enabled":
        return "in MIG mode", ""  # kb assigns whole GPUs only
    if gpu.compute_mode == "Prohibited" or (gpu.compute_mode in EXCLUSIVE and use):
        return f"compute mode {gpu.compute_mode}", use
    if use and not force:
        return "busy", use
    if gpu.memory_free_mib is not None and gpu.memory_free_mib < memory_mib:
        return f"less than {memory_mib} MiB free", f"{gpu.memory_free_mib} MiB"
    return "", ""


def _use(gpu: Gpu) -> str:
    """How other processes use it, judged by memory and utilization, since containers hide foreign processes."""
    if gpu.memory_used_mib is None:
        return "memory use unknown"
    if gpu.memory_used_mib > BUSY_MIB:
        return f"used {gpu.memory_used_mib} MiB"
    if (gpu.utilization_percent or 0) >= BUSY_PERCENT:
        return f"{gpu.utilization_percent} % utilized"
    return ""


def _is_visible(gpu: Gpu, machine: MachineSnapshot) -> bool:
    """Whether the caller may use it: on a shared machine, this variable may be all that assigns GPUs to users."""
    given = machine.variables.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return True
    every = machine.gpus or ()
    for name in (part.strip() for part in given.split(",")):
        named = [other for other in every if _is_called(other, name)]
        if not named:
            return False  # CUDA ignores everything after an invalid name
        if gpu in named:
            return True
    return False


def _is_called(gpu: Gpu, name: str) -> bool:
    return name == str(gpu.index) or (name.startswith("GPU-") and (gpu.uuid or "").startswith(name))
