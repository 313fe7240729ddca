"""`kb serve`: the REST API on this machine."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated

import typer

from kb import root
from kb.errors import UsageError
from kb.root import Root

from .output import RootOption, notice

if TYPE_CHECKING:
    import uvicorn

APPLICATION, SETTINGS = "kb.api.app:create_app", "kb.api.settings:Settings"
LONGEST_REQUEST = 128 << 10  # bytes of a request line: the longest query in Chinese is 72 kB when it is quoted
GRACE_S = 5


def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on. Beyond loopback anyone there can read.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    roots: RootOption = None,
) -> int:
    """Serve search, entries and reports as JSON until Ctrl-C. Needs gpu-kb[server]."""
    server = _server(root.configured(tuple(roots or ())))
    with _listen(host, port) as listener:
        address, number = listener.getsockname()[:2]
        if not ip_address(address.partition("%")[0]).is_loopback:
            notice(f"warning: whoever reaches {address} can read every entry and report; there is no authentication")
        notice(f"serving on http://{f'[{address}]' if ':' in address else address}:{number} (Ctrl-C ends it)")
        server.run(sockets=[listener])
    return 0


def _server(roots: tuple[Root, ...]) -> uvicorn.Server:
    """The app by its name, since no shell imports another one. Raises `UsageError` without the extra."""
    try:
        import uvicorn

        app = resolve_name(APPLICATION)(resolve_name(SETTINGS)(roots=roots))
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn"):
            raise
        raise UsageError(
            f"`kb serve` needs {error.name}, which is not installed here", "pip install 'gpu-kb[server]'"
        ) from None
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,  # a query may be a pasted log with names in it
            h11_max_incomplete_event_size=LONGEST_REQUEST,
            timeout_graceful_shutdown=GRACE_S,
        )
    )


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `UsageError` for an address that cannot be taken."""
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        message = f"cannot listen on {host}, port {port}: {error.strerror or error}"
        raise UsageError(message, "choose another with --port, or --port 0") from None
    # Connections inherit it. asyncio sets it only on sockets that name their protocol, which this one does not;
    # without it every answer waits 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
