"""Nodes on one machine, each with its own process namespace and host name, reached through a real sshd.

An sshd on loopback has a key per node, whose forced command enters the namespaces of the node. `ssh` is the real one,
called by a script on PATH that passes the configuration with the aliases.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.console import wait_for

NAMESPACES = ("--pid", "--mount", "--uts")
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") or ""
READY_S = 20.0


@dataclass
class Nodes:
    """The nodes. `path` is the PATH with the script called ssh; `enter` is the beginning of a command on a node."""

    folder: Path
    names: Sequence[str]
    pids: dict[str, int] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"{self.folder}/bin:{os.environ['PATH']}"

    def enter(self, name: str) -> list[str]:
        return ["nsenter", f"--target={self.pids[name]}", *NAMESPACES, "env", "GLOO_SOCKET_IFNAME=lo"]

    @contextmanager
    def instead(self, name: str, command: str) -> Iterator[None]:
        """Make the login of a node run this command instead of the requested one."""
        path = self.folder / f"{name}.command"
        path.write_text(command)
        yield
        path.unlink()


@contextmanager
def ssh_nodes(folder: Path, names: Sequence[str]) -> Iterator[Nodes]:
    """Nodes that ssh can reach. Skips if sshd is missing or namespaces are forbidden."""
    if not SSHD or not shutil.which("ssh"):
        pytest.skip("needs sshd")
    with separated_nodes(folder, names) as nodes, _sshd(nodes):
        yield nodes


@contextmanager
def separated_nodes(folder: Path, names: Sequence[str]) -> Iterator[Nodes]:
    """Nodes that cannot be reached yet. Skips if namespaces are forbidden."""
    if os.geteuid() != 0 or subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True).returncode:
        pytest.skip("only root can make namespaces")
    folder.mkdir()
    nodes = Nodes(folder, names)
    with ExitStack() as stack:
        for name in names:
            nodes.pids[name] = stack.enter_context(_namespace(name))
        yield nodes


@contextmanager
def _namespace(name: str) -> Iterator[int]:
    """The pid, in this namespace, of the first process of a node. All others of the node end with it."""
    inside = f"mount -t proc proc /proc && hostname {name} && exec sleep 600"
    with subprocess.Popen(["unshare", *NAMESPACES, "--fork", "--kill-child", "sh", "-c", inside]) as outer:
        try:
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
            wait_for(lambda: children.read_text().split(), f"the namespaces of {name}", READY_S)
            pid = int(children.read_text().split()[0])
            wait_for(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", f"the node {name}", READY_S)
            yield pid
        finally:
            outer.send_signal(signal.SIGKILL)


@contextmanager
def _sshd(nodes: Nodes) -> Iterator[None]:
    folder = nodes.folder
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    keys, aliases = [], []
    for name in ("host", *nodes.names):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / f"key-{name}"))
    for name in nodes.names:
        public = (folder / f"key-{name}.pub").read_text()
        keys.append(f'restrict,command="{_login(nodes, name)}" {public}')
        aliases.append(f"Host {name}\n  HostName 127.0.0.1\n  IdentityFile {folder}/key-{name}\n")
    (folder / "authorized").write_text("".join(keys))
    (folder / "known").write_text(f"* {(folder / 'key-host.pub').read_text()}")
    (folder / "client").write_text(
        "".join(aliases) + f"Host *\n  Port {port}\n  User root\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder}/known\n  GlobalKnownHostsFile none\n"
    )
    (folder / "server").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/key-host\nAuthorizedKeysFile {folder}/authorized\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        "PermitRootLogin yes\nMaxStartups 100\n"
    )
    script(folder / "bin" / "ssh", f'exec {shutil.which("ssh")} -F {folder}/client "$@"')
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd confines sessions that are not logged in yet
    with (folder / "sshd.log").open("wb") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "server")], stderr=log, stdout=log)
    try:
        wait_for(lambda: _listens(port) or server.poll() is not None, "sshd", READY_S)
        assert server.poll() is None, (folder / "sshd.log").read_text()
        yield
    finally:
        server.terminate()
        server.wait()


def _login(nodes: Nodes, name: str) -> Path:
    """The script that sshd runs for a node's key, which runs the client's command in the namespaces of the node."""
    inside = f'sh -c "$(cat {nodes.folder}/{name}.command 2>/dev/null || echo "$SSH_ORIGINAL_COMMAND")"'
    return script(nodes.folder / f"login-{name}", f"exec {' '.join(nodes.enter(name))} {inside}")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def script(path: Path, body: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
