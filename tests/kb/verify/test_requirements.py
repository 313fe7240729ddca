"""kb.verify.requirements: which experiments a machine can run, and what it says when it cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kb.errors import ProbeError
from kb.machine.gpus import Gpu
from kb.machine.snapshot import MachineSnapshot
from kb.probe import Needs
from kb.verify.requirements import free_gpus, unmet

IDLE = Gpu(
    memory_total_mib=81559,
    memory_used_mib=4,
    memory_free_mib=81000,
    utilization_percent=0,
    compute_mode="Default",
    mig_mode="Disabled",
)
CUDA_TORCH = {"version": "2.6.0+cu124", "cuda": "12.4", "hip": None}


def gpus(count: int, **changed: Gpu) -> tuple[Gpu, ...]:
    """So many idle GPUs; `gpu3=...` puts another in the third place."""
    every = [changed.get(f"gpu{index}", IDLE) for index in range(count)]
    return tuple(replace(gpu, index=index, uuid=f"GPU-{index}") for index, gpu in enumerate(every))


def machine(
    gpus: tuple[Gpu, ...] | None = None, packages: dict[str, str | None] | None = None, **other: Any
) -> MachineSnapshot:
    values: dict[str, Any] = {
        "host": {"memory_available_mib": 16_000},
        "python": {"packages": {"torch": "2.6.0+cu124"} if packages is None else packages, "torch": CUDA_TORCH},
        **other,
    }
    return MachineSnapshot(interpreter=Path("/usr/bin/python3"), gpus=gpus, **values)


def used(mib: int, **changed: Any) -> Gpu:
    return replace(IDLE, memory_used_mib=mib, memory_free_mib=81_000 - mib, **changed)


def test_nothing_is_missing() -> None:
    assert unmet(Needs(gpus=2, programs=("sh",)), machine(gpus(2))) == ""


def test_a_package_that_is_not_installed() -> None:
    assert unmet(Needs(), machine(packages={})) == "torch is not installed in /usr/bin/python3"


@pytest.mark.parametrize(
    ("version", "specifier", "is_met"),
    [
        ("2.13.0+cpu", ">=2.1", True),
        ("2.13.0+cpu", "==2.13.0", True),
        ("2.13.0+cpu", "<2.13", False),
        ("2.7.0.dev20250101+cu128", ">=2.6", True),
        ("2.7.0a0+git1234", ">=2.7", False),
        ("2.6.0a0+ecf3bae40a.nv25.1", ">=2.1,<2.7", True),
        ("2.0.1", ">=2.1", False),
        ("2.0.1", "", True),
        ("whatever", "", True),
        ("whatever", ">=2.1", False),
        (None, ">=2.1", False),
    ],
)
def test_versions_follow_pep_440(version: str | None, specifier: str, is_met: bool) -> None:
    reason = unmet(Needs(packages={"torch": specifier}), machine(packages={"torch": version}))
    assert (reason == "") is is_met


def test_a_version_that_does_not_do_is_named() -> None:
    result = machine(packages={"torch": "2.0.1"})
    assert unmet(Needs(), result) == "torch 2.0.1 in /usr/bin/python3 is not >=2.1"


def test_names_are_compared_as_pypi_does() -> None:
    assert unmet(Needs(packages={"Flash_Attn": ""}), machine(packages={"flash-attn": "2.7"})) == ""


def test_a_specifier_that_is_none_is_the_fault_of_the_probe() -> None:
    with pytest.raises(ProbeError, match="newer than 2"):
        unmet(Needs(packages={"torch": "newer than 2"}), machine())


def test_an_interpreter_that_did_not_answer() -> None:
    result = machine(python=None, reasons={"python": "died of SIGILL"})
    assert unmet(Needs(), result) == "what is installed in /usr/bin/python3 is unknown: died of SIGILL"
    assert unmet(Needs(packages={}), result) == ""


def test_a_program_that_is_not_there() -> None:
    assert unmet(Needs(programs=("kb-no-such-program",)), machine()) == "kb-no-such-program is not on PATH"


def test_memory_of_the_machine_and_of_the_cgroup() -> None:
    needs = Needs(memory_mib=4096)
    assert unmet(needs, machine()) == ""
    small = machine(cgroup={"memory_limit_mib": 2048, "memory_used_mib": 1024})
    assert unmet(needs, small) == "1024 MiB of memory are available of the 4096 MiB needed"
    assert unmet(needs, machine(cgroup={"memory_limit_mib": "unlimited", "memory_used_mib": 9})) == ""


def test_memory_that_is_unknown() -> None:
    result = machine(host={}, reasons={"host.memory_available_mib": "no such file"})
    assert unmet(Needs(), result) == "how much memory is available is unknown: no such file"


def test_gpus_that_are_unknown() -> None:
    result = machine(reasons={"gpus": "nvidia-smi is not installed"})
    assert unmet(Needs(gpus=2), result) == "needs 2 GPUs: nvidia-smi is not installed"
    assert unmet(Needs(gpus=0), result) == ""
    assert free_gpus(result) == ()


def test_busy_gpus_are_named_with_what_keeps_them() -> None:
    busy = used(41_000)
    every = gpus(4, gpu0=busy, gpu1=busy, gpu2=replace(IDLE, utilization_percent=97))
    reason = unmet(Needs(gpus=2), machine(every))
    assert reason == "needs 2 GPUs: 1 of 4 GPUs are free; busy: 0,1 (used 41000 MiB), 2 (97 % utilized)"


def test_force_ignores_busyness_and_takes_the_emptiest_first() -> None:
    result = machine(gpus(3, gpu0=used(41_000), gpu1=used(9_000)))
    assert free_gpus(result) == ("GPU-2",)
    assert free_gpus(result, force=True) == ("GPU-2", "GPU-1", "GPU-0")
    assert unmet(Needs(gpus=3), result, force=True) == ""


def test_idle_gpus_keep_their_order() -> None:
    result = machine(gpus(3, gpu0=used(490), gpu2=used(2, utilization_percent=9)))
    assert free_gpus(result) == ("GPU-0", "GPU-1", "GPU-2")


def test_a_gpu_with_too_little_memory_does_not_count() -> None:
    result = machine(gpus(2, gpu1=replace(IDLE, memory_free_mib=800)))
    reason = unmet(Needs(gpus=2, gpu_memory_mib=1024), result)
    assert reason == "needs 2 GPUs: 1 of 2 GPUs are free; less than 1024 MiB free: 1 (800 MiB)"
    assert free_gpus(result, memory_mib=1024) == ("GPU-0",)


@pytest.mark.parametrize("force", [False, True])
def test_a_gpu_that_another_process_has_for_itself_is_never_free(force: bool) -> None:
    taken = machine(gpus(1, gpu0=used(41_000, compute_mode="Exclusive_Process")))
    reason = unmet(Needs(gpus=1), taken, force=force)
    assert reason == "needs 1 GPU: 0 of 1 GPUs are free; compute mode Exclusive_Process: 0 (used 41000 MiB)"
    assert free_gpus(machine(gpus(1, gpu0=used(0, compute_mode="Exclusive_Process"))), force) == ("GPU-0",)
    assert free_gpus(machine(gpus(1, gpu0=used(0, compute_mode="Prohibited"))), force) == ()


def test_a_gpu_in_mig_mode_is_no_whole_gpu() -> None:
    result = machine(gpus(1, gpu0=replace(IDLE, mig_mode="Enabled", utilization_percent=None)))
    assert unmet(Needs(gpus=1), result, force=True) == "needs 1 GPU: 0 of 1 GPUs are free; in MIG mode: 0"


def test_a_gpu_whose_memory_is_unknown_is_used_by_force_only() -> None:
    result = machine(gpus(1, gpu0=replace(IDLE, memory_used_mib=None, memory_free_mib=None)))
    assert unmet(Needs(gpus=1), result) == "needs 1 GPU: 0 of 1 GPUs are free; busy: 0 (memory use unknown)"
    assert unmet(Needs(gpus=1), result, force=True) == ""


def test_a_lost_gpu_cannot_be_used() -> None:
    result = machine((replace(IDLE, index=None),))
    assert unmet(Needs(gpus=1), result, force=True).endswith("lost: ? (the driver gives no UUID)")


@pytest.mark.parametrize(
    ("given", "free"),
    [
        ("1,3", ("GPU-1", "GPU-3")),
        ("GPU-2", ("GPU-2",)),
        ("0,9,1", ("GPU-0",)),  # CUDA ignores what follows a name that is none
        ("", ()),
        ("-1", ()),
        ("MIG-1", ()),
    ],
)
def test_only_gpus_that_the_caller_was_given_count(given: str, free: tuple[str, ...]) -> None:
    result = machine(gpus(4), variables={"CUDA_VISIBLE_DEVICES": given})
    assert free_gpus(result, force=True) == free
    assert "not in CUDA_VISIBLE_DEVICES: " in unmet(Needs(gpus=4), result)


def test_a_torch_without_cuda_cannot_use_a_gpu() -> None:
    result = machine(
        gpus(1),
        python={"packages": {"torch": "2.6.0+cpu"}, "torch": {"version": "2.6.0+cpu", "cuda": None, "hip": None}},
    )
    reason = unmet(Needs(gpus=1), result)
    assert reason == "needs 1 GPU: torch 2.6.0+cpu in /usr/bin/python3 is built without CUDA"
    assert unmet(Needs(), result) == ""


def test_every_missing_thing_is_named() -> None:
    reason = unmet(
        Needs(gpus=1, memory_mib=99_999), machine(packages={}, reasons={"gpus": "nvidia-smi is not installed"})
    )
    assert reason == (
        "torch is not installed in /usr/bin/python3; 16000 MiB of memory are available of the 99999 MiB needed; "
        "needs 1 GPU: nvidia-smi is not installed"
    )
