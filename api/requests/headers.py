"""What the headers of a request say about its sender."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from ipaddress import ip_address

COOKIE = "kb_key"
PROXIES = (b"forwarded", b"x-forwarded", b"x-real-ip", b"via")  # prefixes of headers that a proxy adds

Headers = Mapping[bytes, bytes]  # names in lower case, as in ASGI


def find_key(headers: Headers) -> tuple[str, bool]:
    """The text of the key or "", and whether it is in the cookie."""
    kind, _, text = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if kind.lower() == "bearer":
        return text.strip() or "-", False
    for part in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE and value:
            return value, True
    return "", False


def is_same_site(headers: Headers, *, default: bool) -> bool:
    """Whether a page of this service sent the request, by Sec-Fetch-Site or Origin; `default` without either."""
    site, origin = headers.get(b"sec-fetch-site", b""), headers.get(b"origin", b"")
    if site:
        return site in (b"same-origin", b"none")
    if origin:
        host = headers.get(b"host", b"")
        return origin in (b"http://" + host, b"https://" + host)
    return default


def is_local(client: str, headers: Headers, version: str) -> bool:
    """Whether the client is a program on this machine that acts for itself.

    A proxy does not, nor does a page that has rebound its host name to this machine. nginx by default adds no proxy
    header, but speaks HTTP/1.0.
    """
    if version == "1.0":
        return False
    is_loopback = _is_loopback(client) and _is_loopback(_host(headers))
    return is_loopback and not any(name.startswith(PROXIES) for name in headers)


def _host(headers: Headers) -> str:
    host = headers.get(b"host", b"").decode("latin-1")
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


@lru_cache(256)  # parsing an address takes longer than the rest of this module
def _is_loopback(host: str) -> bool:
    try:
        return host.lower() == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
