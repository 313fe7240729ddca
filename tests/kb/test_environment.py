"""kb.environment on machines where something is broken: each is made of real files and real commands."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kb import environment, processes
from kb.environment import Environment, capture

PYTHON = Path(sys.executable)
IDLE = "{0}, GPU-{0}, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4, 81000, 0, Default, 00000000:1{0}:00.0, Disabled, 0"
BANNER = "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |"
TOPOLOGY = "\x1b[4m\tGPU0\tGPU1\x1b[0m\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n"

Smi = Callable[..., Path]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Put an `nvidia-smi` first on PATH that answers each kind of question with a shell command."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(query: str, version: str = "exit 2", topo: str = "exit 3", banner: str = "exit 9") -> Path:
        path = folder / "nvidia-smi"
        cases = {"--query-gpu=*": query, "--version": version, "topo": topo, "*": banner}
        lines = [f"{pattern}) {command} ;;" for pattern, command in cases.items()]
        path.write_text("\n".join(["#!/bin/sh", f"echo $$ >> {tmp_path}/pids", 'case "$1" in', *lines, "esac\n"]))
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def no_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def say(tmp_path: Path, name: str, text: str) -> str:
    (tmp_path / name).write_text(text)
    return f"cat {tmp_path / name}"


@pytest.fixture
def two_gpus(smi: Smi, tmp_path: Path) -> None:
    rows = "\n".join(IDLE.format(index) for index in range(2)) + "\n"
    smi(say(tmp_path, "rows", rows), say(tmp_path, "version", "CUDA Version : 12.4\n"), say(tmp_path, "topo", TOPOLOGY))


def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    folder = tmp_path / "site" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(text)
    (folder / "version.py").write_text("__version__ = '2.6.0'\ncuda = '12.4'\n")
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    return folder


def nulls(value: Any, path: str = "") -> Iterator[str]:
    """Dotted path of every null in a document."""
    if value is None:
        yield path
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from nulls(one, f"{path}.{key}".lstrip("."))


def unexplained(found: Environment) -> list[str]:
    document = json.loads(json.dumps(found.to_json()))
    fine = {"python.torch_import.error"}  # no error is no gap in our knowledge
    return [path for path in nulls(document) if path not in found.reasons and path not in fine]


@pytest.mark.usefixtures("two_gpus")
def test_lists_gpus_with_driver_and_topology() -> None:
    found = capture(PYTHON)
    assert found.gpus is not None
    assert [(gpu.index, gpu.uuid, gpu.memory_free_mib) for gpu in found.gpus] == [
        (0, "GPU-0", 81000),
        (1, "GPU-1", 81000),
    ]
    assert found.to_json()["gpus"][1] == {
        "index": 1,
        "uuid": "GPU-1",
        "name": "NVIDIA H100 80GB HBM3",
        "driver_version": "550.54.15",
        "memory_total_mib": 81559,
        "memory_used_mib": 4,
        "memory_free_mib": 81000,
        "utilization_percent": 0,
        "compute_mode": "Default",
        "pci_bus_id": "00000000:11:00.0",
        "mig_mode": "Disabled",
        "ecc_uncorrected": 0,
    }
    assert found.driver["cuda_version"] == "12.4"
    assert found.driver["topology"] == "GPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X"
    assert "gpus" not in found.reasons


@pytest.mark.usefixtures("two_gpus")
def test_every_null_has_a_reason_on_a_machine_with_gpus() -> None:
    assert unexplained(capture(PYTHON)) == []


@pytest.mark.usefixtures("no_smi")
def test_every_null_has_a_reason_on_a_machine_without() -> None:
    found = capture(PYTHON, import_torch=True)
    assert unexplained(found) == []
    assert found.gpus is None
    assert found.reasons["gpus"] == found.reasons["driver.topology"] == "nvidia-smi is not installed"


def test_describes_this_host() -> None:
    found = capture(PYTHON)
    assert found.host["kernel"] == os.uname().release
    assert found.host["cpus"] == len(os.sched_getaffinity(0))
    assert 0 < found.host["memory_available_mib"] <= found.host["memory_total_mib"]
    assert 0 < (found.usable_memory_mib or 0) <= found.host["memory_available_mib"]
    assert set(found.limits) == {"nofile", "memlock", "nproc", "core", "stack"}
    assert set(found.limits["nofile"]) == {"soft", "hard"}
    assert found.network["nics"]["lo"]["ipv4_addresses"] >= 1


def test_names_neither_the_host_nor_its_addresses() -> None:
    found = capture(PYTHON)
    assert found.host["id"] != socket.gethostname()
    assert len(found.host["id"]) == 12
    assert "127.0.0.1" not in json.dumps(found.to_json())


def test_an_old_driver_that_refuses_a_field_gives_the_others(smi: Smi, tmp_path: Path) -> None:
    row = ", ".join(IDLE.format(0).split(", ")[:10]) + ", 0\n"
    refusal = "echo 'Field \"mig.mode.current\" is not a valid field to query.'; exit 2"
    smi(f'case "$1" in *mig*) {refusal};; *) {say(tmp_path, "rows", row)};; esac')
    found = capture(PYTHON)
    assert found.gpus is not None
    assert (found.gpus[0].mig_mode, found.gpus[0].ecc_uncorrected) == (None, 0)
    assert found.reasons["gpus.0.mig_mode"] == "this nvidia-smi does not know the field"


@pytest.mark.parametrize(
    "banner", [BANNER, "| NVIDIA-SMI 610.43.02       KMD Version: 610.43.02     CUDA UMD Version: 12.4     |"]
)
def test_reads_cuda_from_the_heading_when_there_is_no_version_option(smi: Smi, tmp_path: Path, banner: str) -> None:
    smi(say(tmp_path, "rows", IDLE.format(0)), banner=say(tmp_path, "banner", banner))
    assert capture(PYTHON).driver["cuda_version"] == "12.4"


def test_a_lost_gpu_is_told_beside_the_others(smi: Smi, tmp_path: Path) -> None:
    lost = "Unable to determine the device handle for GPU 0000:1A:00.0: GPU is lost.  Reboot the system"
    smi(f"{say(tmp_path, 'rows', IDLE.format(0) + chr(10) + lost)}; exit 15")
    found = capture(PYTHON)
    assert found.gpus is not None
    assert len(found.gpus) == 1
    assert found.reasons["gpus"] == f"nvidia-smi (exit code 15): {lost}"


def test_values_that_the_driver_does_not_give_are_null(smi: Smi, tmp_path: Path) -> None:
    row = "0, GPU-0, NVIDIA GB10, 580.65, [N/A], [Not Supported], , [N/A], Default, 0:01, [N/A], [Unknown Error]"
    smi(say(tmp_path, "rows", row))
    found = capture(PYTHON)
    assert found.gpus is not None
    assert (found.gpus[0].memory_total_mib, found.gpus[0].memory_free_mib, found.gpus[0].mig_mode) == (None, None, None)
    assert found.reasons["gpus.0.memory_used_mib"] == "nvidia-smi says '[Not Supported]'"


def test_a_driver_that_does_not_fit_its_library_is_the_reason(smi: Smi) -> None:
    smi("echo 'Failed to initialize NVML: Driver/library version mismatch'; echo 'NVML library version: 550'; exit 18")
    found = capture(PYTHON)
    assert found.gpus is None
    assert found.reasons["gpus"] == (
        "nvidia-smi (exit code 18): Failed to initialize NVML: Driver/library version mismatch"
    )


def test_a_driver_that_hangs_is_asked_once(smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "SMI_S", 0.5)
    smi("trap '' TERM; while :; do sleep 1000; done")
    found = capture(PYTHON)
    assert found.gpus is None
    for path in ("gpus", "driver.cuda_version", "driver.topology"):
        assert found.reasons[path] == "nvidia-smi did not end within 0.5 s"
    (pid,) = (tmp_path / "pids").read_text().split()
    left = processes.read(int(pid))
    assert left is None or not left.is_alive
    assert found.python is not None


def test_a_driver_that_floods_is_cut_off(smi: Smi) -> None:
    smi("exec yes")
    found = capture(PYTHON)
    assert found.gpus is None
    assert found.reasons["gpus"] == "nvidia-smi printed more than 16 MiB"


def test_variables_are_shown_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("NVIDIA_API_KEY", "nvapi-1")
    monkeypatch.setenv("TORCH_HUB_token", "t-1")
    monkeypatch.setenv("TORCH_PROXY", "http://me:pw@proxy")
    monkeypatch.setenv("AWS_REGION", "mars")
    found = capture(PYTHON).variables
    assert found["NCCL_SOCKET_IFNAME"] == "eth0"
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert {found[name] for name in ("NVIDIA_API_KEY", "TORCH_HUB_token", "TORCH_PROXY")} == {"(redacted)"}
    assert "AWS_REGION" not in found


def test_shows_the_file_that_nccl_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nccl.conf"
    path.write_text("# ours\nNCCL_IB_DISABLE=1\nNCCL_AUTH_TOKEN=t-1\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(path))
    found = capture(PYTHON).nccl_files
    assert found[str(path)] == "# ours\nNCCL_IB_DISABLE=1\nNCCL_AUTH_TOKEN=(redacted)"
    assert "~/.nccl.conf" not in found  # NCCL reads one or the other


def test_tells_kubernetes_from_its_container_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert capture(PYTHON).host["container"] == "kubernetes"


def test_a_plain_directory_of_the_name_sets_no_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1048576\n")
    found = capture(PYTHON)
    assert set(found.cgroup.values()) == {None}
    assert "is no cgroup file system" in found.reasons["cgroup.memory_limit_mib"]
    assert found.usable_memory_mib == found.host["memory_available_mib"]


def test_reads_the_limits_of_cgroup_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are those of version 2; only the file system they lie on is not."""
    monkeypatch.setattr(environment, "CGROUP", tmp_path)
    monkeypatch.setattr(environment, "CGROUP2_MAGIC", environment._file_system(tmp_path))
    files = {
        "memory.max": f"{512 << 20}\n",
        "memory.current": f"{300 << 20}\n",
        "memory.stat": f"anon 1\ninactive_file {100 << 20}\n",
        "cpu.max": "150000 100000\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = capture(PYTHON)
    assert found.cgroup == {"version": 2, "memory_limit_mib": 512, "memory_used_mib": 200, "cpu_quota": 1.5}
    assert found.usable_memory_mib == 312


def test_a_cgroup_without_limits_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "CGROUP", tmp_path)
    monkeypatch.setattr(environment, "CGROUP2_MAGIC", environment._file_system(tmp_path))
    for name, text in {
        "memory.max": "max\n",
        "memory.current": "0\n",
        "memory.stat": "",
        "cpu.max": "max 100000\n",
    }.items():
        (tmp_path / name).write_text(text)
    found = capture(PYTHON)
    assert (found.cgroup["memory_limit_mib"], found.cgroup["cpu_quota"]) == ("unlimited", "unlimited")


def test_asks_the_interpreter_it_is_given(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    found = capture(python)
    assert found.interpreter == python
    assert found.python is not None
    assert found.python["packages"] == {}
    assert found.reasons["python.torch"] == "torch is not installed"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "#!/bin/sh\necho 'SyntaxError: future feature annotations is not defined' >&2; exit 1",
            "exit code 1: SyntaxError",
        ),
        ("#!/bin/sh\necho hello", "answered something else: 'hello"),
        ("#!/bin/sh\n", "answered something else: ''"),
        ("#!/bin/sh\nkill -ILL $$", "died of SIGILL"),
    ],
)
def test_an_interpreter_that_does_not_answer_is_null_with_a_reason(tmp_path: Path, text: str, reason: str) -> None:
    python = tmp_path / "python"
    python.write_text(text)
    python.chmod(0o755)
    found = capture(python)
    assert found.python is None
    assert reason in found.reasons["python"]


def test_an_interpreter_that_is_not_there_is_null_with_a_reason(tmp_path: Path) -> None:
    found = capture(tmp_path / "python")
    assert found.python is None
    assert "cannot be started" in found.reasons["python"]
    assert found.host["kernel"]


def test_a_torch_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(tmp_path, monkeypatch, "raise OSError('libnccl.so.2: cannot open shared object file')")
    found = capture(PYTHON, import_torch=True)
    assert found.python is not None
    assert found.python["torch"]["cuda"] == "12.4"
    assert found.python["torch_import"]["error"] == "OSError: libnccl.so.2: cannot open shared object file"


def test_a_torch_that_kills_its_process_costs_the_import_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(tmp_path, monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    found = capture(PYTHON, import_torch=True)
    assert found.python is not None
    assert found.python["torch"]["version"] == "2.6.0"
    assert found.python["torch_import"] is None
    assert found.reasons["python.torch_import"] == "importing torch: died of SIGSEGV"


def test_a_torch_that_hangs_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environment.SURVEY_S, True, 3.0)
    folder = fake_torch(tmp_path, monkeypatch, "import time\ntime.sleep(1000)\n")
    found = capture(PYTHON, import_torch=True)
    assert found.python is not None
    assert found.python["packages"]
    reason = found.reasons["python.torch_import"]
    assert "did not end within 3 s" in reason
    assert f'it was at File "{folder}/__init__.py", line 2' in reason
