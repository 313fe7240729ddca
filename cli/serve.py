"""`kb serve`: the service on this machine."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kb import root
from kb.errors import StoreUnavailable, UsageError

from .output import RootOption, notice

if TYPE_CHECKING:
    import uvicorn

APPLICATION, SETTINGS = "kb.api.app:create_app", "kb.api.settings:Settings"
CONNECTION, LOGGING = "kb.api.connection:Connection", "kb.api.logs:configuration"
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "pythonjsonlogger", "jinja2", "nh3")  # of gpu-kb[server]
LONGEST_REQUEST = 128 << 10  # bytes of a head: the longest query in Chinese is 72 kB when it is quoted
GRACE_S = 5
UNREAD_S = 30  # how long a client may leave an answer unread before the kernel gives it up
SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on. Beyond loopback everybody needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that answer; one that dies is replaced.")] = 1,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let everybody who reaches it read without a key.")] = False,
    roots: RootOption = None,
) -> int:
    """Serve pages, REST and MCP until Ctrl-C. Needs gpu-kb[server]."""
    with _listen(host, port) as listener:
        address, number = listener.getsockname()[:2]
        config = _config(address, insecure=insecure, roots=root.configured(tuple(roots or ())))
        notice(f"serving on http://{f'[{address}]' if ':' in address else address}:{number} (Ctrl-C ends it)")
        _allow_many_connections()
        _run(config, listener, workers)
    return 0
