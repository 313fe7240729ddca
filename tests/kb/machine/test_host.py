"""kb.machine.host and kb.machine.network on the machine that runs the tests, and with what the kernel shows of others."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from kb.machine import host, network
from kb.runtime.survey_fields import Reader

SIOCGIFADDR = 0x8915  # the first IPv4 address of an interface


def test_describes_this_host() -> None:
    result = Reader().values("host", host.SOURCES)
    assert result["kernel"] == os.uname().release
    assert result["cpus"] == len(os.sched_getaffinity(0))
    assert 0 < result["memory_available_mib"] <= result["memory_total_mib"]
    assert 0 <= result["shm_free_mib"] <= result["shm_total_mib"]


def test_the_hosts_name_is_hashed() -> None:
    result = host.SOURCES["id"]()
    assert result != socket.gethostname()
    assert len(result) == 12


def test_limits_are_soft_and_hard() -> None:
    result = Reader().values("limits", host.LIMITS)
    assert set(result) == {"nofile", "memlock", "nproc", "core", "stack"}
    assert all(set(pair) == {"soft", "hard"} for pair in result.values())


def test_tells_kubernetes_from_its_container_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert host.SOURCES["container"]() == "kubernetes"


def has_ipv4(nic: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, suppress(OSError):
        return bool(fcntl.ioctl(asked, SIOCGIFADDR, nic.encode().ljust(40, b"\0")))
    return False


def test_counts_the_addresses_of_each_interface() -> None:
    nics = network.sources(Reader())["nics"]()
    assert set(nics) == {name for _, name in socket.if_nameindex()}
    assert {name for name, nic in nics.items() if nic["ipv4_addresses"]} == set(filter(has_ipv4, nics))
    assert nics["lo"]["ipv4_addresses"] >= 1


def test_lists_every_port_of_every_rdma_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`/sys/class/infiniband` holds links to devices."""
    files = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}
    port = tmp_path / "devices" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in files.items():
        (port / name).write_text(f"{text}\n")
    (tmp_path / "infiniband").mkdir()
    (tmp_path / "infiniband" / "mlx5_0").symlink_to(tmp_path / "devices" / "mlx5_0")
    monkeypatch.setattr(network, "INFINIBAND", tmp_path / "infiniband")
    reader = Reader()
    assert network.sources(reader)["infiniband"]() == {"mlx5_0/1": {**files, "link_layer": None}}
    assert reader.reasons == {"network.infiniband.mlx5_0/1.link_layer": "no such file or directory"}
