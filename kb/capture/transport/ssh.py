"""The nodes of `ssh:host1,host2`, or of `ssh:@FILE`: the hosts in a launcher's file, one per line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from kb.capture.transport.connection import AGENT, Connection
from kb.errors import UsageError

HOST = re.compile(r"([\w.-]+@)?[\w:][\w.:%-]*")  # never begins with a dash, so it cannot be an option
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-T", "--")


def connections(where: str) -> list[Connection]:
    """A connection per host, in order. Raises `UsageError` for an unreadable file or an invalid host."""
    hosts = list(dict.fromkeys(_from_file(where[1:]) if where.startswith("@") else where.split(",")))
    for host in hosts:
        if not HOST.fullmatch(host):
            raise UsageError(f"{host!r} is no host", "ssh:host1,host2 or ssh:@FILE with a host per line")
    if not hosts:
        raise UsageError("no host is named", "ssh:host1,host2 or ssh:@FILE with a host per line")
    return [_connection(host) for host in hosts]


def _from_file(path: str) -> list[str]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "ssh:@FILE names a file of hosts") from error
    return list(_first_words(text.splitlines()))


def _first_words(lines: Iterable[str]) -> Iterable[str]:
    """The first word of each line: in files of MPI and DeepSpeed, `slots=8` follows the host."""
    for line in lines:
        if words := line.partition("#")[0].split():
            yield words[0]


def _connection(host: str) -> Connection:
    name = host.rpartition("@")[2]
    return Connection(name, (*SSH, host, *AGENT), f"`--nodes ssh:root@{name}`")
