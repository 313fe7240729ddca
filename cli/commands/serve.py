"""`kb serve`: run the service on this machine."""

from __future__ import annotations

import resource
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kb.content.roots import configured_roots
from kb.errors import StoreUnavailable, UsageError
from kb.installation import install_command

from ..terminal.output import RootOption, notice

if TYPE_CHECKING:
    import uvicorn

APPLICATION, SETTINGS = "kb.api.app:create_app", "kb.api.settings:Settings"
ANONYMOUS = "kb.api.settings:Anonymous"
CONNECTION = "kb.api.requests.connection:Connection"
NEEDED = ("fastapi", "uvicorn", "jinja2", "nh3", "prometheus_client", "pythonjsonlogger")
LONGEST_HEAD = 128 << 10  # bytes: the longest query in Chinese takes 72 kB when percent-encoded
GRACE_S = 5
UNREAD_MS = 30_000  # how long a client may leave a response unread


def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on. Beyond loopback, every request needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 chooses a free one.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes; one that dies is replaced.")] = 1,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let anyone who can reach the service read without a key.")
    ] = False,
    roots: RootOption = None,
) -> int:
    """Serve pages, REST and MCP until Ctrl-C. Needs kb's extra `server`; `kb key new` creates keys."""
    for name in NEEDED:
        if find_spec(name) is None:
            raise UsageError(f"`kb serve` needs {name}, which is not installed here", install_command("server"))
    extra = tuple(roots or ())
    with _listen(host, port) as listener:
        address, number = listener.getsockname()[:2]
        settings = _settings(address, extra, insecure=insecure)
        notice(f"serving on http://{f'[{address}]' if ':' in address else address}:{number} (Ctrl-C ends it)")
        _allow_many_connections()
        _run(partial(_config, settings.but(listens_early=workers == 1)), workers, listener)
    return 0


def _settings(address: str, extra: tuple[Any, ...], *, insecure: bool) -> Any:
    """The settings, where the address decides who may read without a key.

    Raises `UsageError` for an address beyond loopback when no key exists.
    """
    nobody, everybody = map(resolve_name(ANONYMOUS), ("nobody", "everybody"))
    made = resolve_name(SETTINGS).from_environment(roots=configured_roots(extra))
    if insecure or made.anonymous is everybody:
        notice(f"warning: INSECURE: anybody who can reach {address} can read every entry and report without a key")
        return made.but(anonymous=everybody)
    if ip_address(address.partition("%")[0]).is_loopback:
        return made
    _demand_key(made.database, address)
    return made.but(anonymous=nobody)


def _demand_key(where: Any, address: str) -> None:
    from kb.store import keys
    from kb.store.database import Database

    with Database.open(where) as database:
        try:
            has_key = any(stored.key.revoked_at is None for stored in keys.list_all(database))
        except StoreUnavailable as error:
            notice(f"warning: {error.message}; until it is back, nobody gets an answer")
            return
        if not has_key:
            hint = "create one: `kb key new NAME --scope read`, with the same KB_DATABASE_URL; or --insecure"
            raise UsageError(f"{address} can be reached by others, and {database.name} holds no key", hint)


def _config(settings: Any) -> uvicorn.Config:
    """The configuration of uvicorn, which also sets up the logging of this process.

    It contains the app by name because cli does not import api.
    """
    import uvicorn

    from ..service.server_log import configuration

    return uvicorn.Config(
        partial(resolve_name(APPLICATION), settings),
        factory=True,
        http=resolve_name(CONNECTION),
        ws="none",
        log_config=configuration(is_terminal=sys.stderr.isatty()),
        access_log=False,  # it would contain the query, which may be a pasted log with names in it
        server_header=False,
        h11_max_incomplete_event_size=LONGEST_HEAD,
        timeout_graceful_shutdown=GRACE_S,
    )


def _run(make_config: Callable[[], uvicorn.Config], count: int, listener: socket.socket) -> None:
    config = make_config()
    if count > 1:
        from ..service import workers

        workers.run(make_config, count, listener)
    else:
        import uvicorn

        uvicorn.Server(config).run(sockets=[listener])


def _allow_many_connections() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS reports no limit but has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `UsageError` for an address that cannot be bound."""
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        message = f"cannot listen on {host}, port {port}: {error.strerror or error}"
        raise UsageError(message, "choose another with --port, or --port 0") from None
    # Connections inherit these options. asyncio sets the first one only on sockets created with a protocol number,
    # unlike this one; without it every response waits 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
    return listener
