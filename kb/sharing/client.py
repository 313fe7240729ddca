"""A kb service as one sees it who reports to it: its address, its key, and one POST that may go through a proxy."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Self
from urllib.parse import urlsplit

from kb import __version__
from kb.errors import UsageError
from kb.sharing.response import Ending, Response, printable, understand

PATH = "/v1/reports"
LARGEST = 64 << 10  # bytes; a receipt or a problem document has some hundred
EXAMPLE = "for instance: --report https://kb.example.org"


@dataclass(frozen=True, slots=True)
class Service:
    """A kb service at `url`, without a slash at its end; an `api_key` of "" sends none."""

    url: str
    api_key: str = field(default="", repr=False)

    @classmethod
    def at(cls, url: str, api_key: str = "") -> Self:
        """Raises `UsageError` for what is no address of a service, or no key."""
        if any(char in url for char in "@?#"):  # not repeated: it may hold a secret
            raise UsageError("the address of a kb service has no user, query or fragment", "a key goes into KB_API_KEY")
        if not _is_address(url):
            raise UsageError(f"{url!r} is no address of a kb service", EXAMPLE)
        if re.search(r"[^!-~]", api_key):
            raise UsageError("KB_API_KEY holds what no key has: blanks or special characters", "paste it again")
        return cls(url.rstrip("/"), api_key)

    @property
    def is_loopback(self) -> bool:
        """Whether it is on this machine."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    @property
    def is_exposed(self) -> bool:
        """Whether key and reports can be read on the way."""
        return urlsplit(self.url).scheme == "http" and not self.is_loopback

    def post(self, key: str, body: bytes, timeout_s: float) -> Response:
        """One try. `timeout_s` bounds connecting and each wait for the answer, not their sum. Raises nothing."""
        request = urllib.request.Request(self.url + PATH, body, self._headers(key))  # noqa: S310 - `at` admits http(s)
        try:
            with _opened(request, timeout_s, is_loopback=self.is_loopback) as response:
                headers = {name.lower(): value for name, value in response.headers.items()}
                return understand(self.url, response.status, headers, response.read(LARGEST))
        except urllib.error.URLError as error:  # nothing was answered because nothing could be asked
            return Response(Ending.CLOSED, f"{self.url} cannot be reached: {_reason(error.reason)}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Response(Ending.FAILED, f"{self.url} gave no answer: {_reason(error)}")

    def _headers(self, key: str) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Idempotency-Key": key,
            "User-Agent": f"gpu-kb/{__version__}",
        }
        return {**headers, "Authorization": f"Bearer {self.api_key}"} if self.api_key else headers


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key is for the service that was named, and for no other."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opened(request: urllib.request.Request, timeout_s: float, *, is_loopback: bool) -> Any:
    """The response of any status. Through the proxy that the environment names, except to this machine itself."""
    proxies = urllib.request.ProxyHandler({} if is_loopback else None)
    try:
        return urllib.request.build_opener(_NoRedirects, proxies).open(request, timeout=timeout_s)
    except urllib.error.HTTPError as response:
        return response


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return has_place and parts.scheme in ("http", "https") and not re.search(r"[^!-~]", url)


def _reason(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)
