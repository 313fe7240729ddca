"""A node that reports to a service, in a separate process that can be killed at any of its actions."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kb.sharing.client import Service
from kb.sharing.outbox import Outbox
from kb.sharing.sender import send
from tests.support.console import GENEROUS_S
from tests.support.warm_start import PIPE, Fork, start_warm

ON_DISK = {"open", "os.mkdir", "os.rename", "os.remove", "os.listdir", "os.scandir"}
ON_NETWORK = {"socket.connect", "http.client.send"}


def start_node(directory: Path, url: str, *reports: dict[str, Any], **env: str) -> Fork:
    """Start a process that queues these reports and sends those that wait.

    KILL_AT=n kills it with SIGKILL before its n-th action on the directory or the network; otherwise it counts them.
    """
    args = (directory, url, json.dumps(reports))
    return start_warm(
        *args, imports=[__name__], main=f"{__name__}:main", env={**os.environ, **env}, stdout=PIPE, stderr=PIPE
    )


def delivery_of(node: Fork) -> dict[str, Any]:
    """The document that a node prints at the end; {} if it was killed."""
    out, err = node.communicate(timeout=GENEROUS_S)
    if node.returncode == -signal.SIGKILL:
        return {}
    assert node.returncode == 0, err.decode()
    document: dict[str, Any] = json.loads(out)
    return document


def main() -> None:
    """Run the node."""
    directory, url, reports = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    last, count = int(os.environ.get("KILL_AT", "0")), 0

    def act(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in ON_NETWORK or event == "fcntl.flock" or (event in ON_DISK and str(directory) in str(args[0])):
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(act)
    outbox = Outbox(directory)
    if reports:
        outbox.add(url, reports)
    delivery = send(outbox, Service.at(url, os.environ.get("KB_API_KEY", "")), 120)
    sys.stdout.write(json.dumps({**asdict(delivery), "actions": count}))
