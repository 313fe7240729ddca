"""What the head of a request says of who sends it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from ipaddress import ip_address

COOKIE = "kb_key"
PROXIES = (b"forwarded", b"x-forwarded", b"x-real-ip", b"via")  # how headers begin by which they speak for others

Headers = Mapping[bytes, bytes]  # names in lower case, as ASGI has them


def key_in(headers: Headers) -> tuple[str, bool]:
    """(the text of the key or "", whether a browser sent it by itself)."""
    kind, _, text = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if kind.lower() == "bearer":
        return text.strip() or "-", False
    for part in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE and value:
            return value, True
    return "", False


def is_own_page(headers: Headers, *, otherwise: bool) -> bool:
    """Whether a page of this service sends it, as Sec-Fetch-Site or Origin say; `otherwise` where neither is there."""
    site, origin = headers.get(b"sec-fetch-site", b""), headers.get(b"origin", b"")
    if site:
        return site in (b"same-origin", b"none")
    if origin:
        host = headers.get(b"host", b"")
        return origin in (b"http://" + host, b"https://" + host)
    return otherwise


def is_local(client: str, headers: Headers, version: str) -> bool:
    """Whether a program on this machine asks for itself.

    Not so when a proxy speaks for somebody, and when a page has rebound the name of its own host to this machine. A
    nginx that is told nothing else says nothing of whom it speaks for, but speaks HTTP/1.0.
    """
    if version == "1.0":
        return False
    is_here = _is_loopback(client) and _is_loopback(_host(headers))
    return is_here and not any(name.startswith(PROXIES) for name in headers)


def _host(headers: Headers) -> str:
    host = headers.get(b"host", b"").decode("latin-1")
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


@lru_cache(256)  # reading an address takes longer than all else here
def _is_loopback(host: str) -> bool:
    try:
        return host.lower() == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
