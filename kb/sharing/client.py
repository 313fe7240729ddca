"""The client of a kb service: its URL, an API key and one POST request, possibly through a proxy."""

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
from kb.sharing.response import DeliveryStatus, Response, interpret, sanitize

REPORTS_PATH = "/v1/reports"
MAX_RESPONSE_BYTES = 64 << 10  # a receipt or a problem document has a few hundred bytes
EXAMPLE = "for instance: --report https://kb.example.org"


@dataclass(frozen=True, slots=True)
class Service:
    """A kb service at `url`, without a trailing slash. If `api_key` is empty, none is sent."""

    url: str
    api_key: str = field(default="", repr=False)

    @classmethod
    def at(cls, url: str, api_key: str = "") -> Self:
        """The service at a URL. Raises `UsageError` for an invalid URL or API key."""
        if any(char in url for char in "@?#"):  # the message omits the URL, which may contain a secret
            raise UsageError(
                "the URL of a kb service has no user, query or fragment", "the API key goes into KB_API_KEY"
            )
        if not _is_http_url(url):
            raise UsageError(f"{url!r} is not the URL of a kb service", EXAMPLE)
        if re.search(r"[^!-~]", api_key):
            raise UsageError("KB_API_KEY contains blanks or special characters, which no API key has", "paste it again")
        return cls(url.rstrip("/"), api_key)

    @property
    def is_loopback(self) -> bool:
        """Whether the service is on this machine."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    @property
    def is_exposed(self) -> bool:
        """Whether the API key and reports are sent unencrypted over a network."""
        return urlsplit(self.url).scheme == "http" and not self.is_loopback

    def post(self, key: str, body: bytes, timeout_s: float) -> Response:
        """Send once. `timeout_s` limits connecting and each wait for the response, not their sum. Never raises."""
        request = urllib.request.Request(self.url + REPORTS_PATH, body, self._headers(key))  # noqa: S310 - `at` allows only http(s)
        try:
            with _open(request, timeout_s, is_loopback=self.is_loopback) as response:
                headers = {name.lower(): value for name, value in response.headers.items()}
                body = response.read(MAX_RESPONSE_BYTES)
                return interpret(self.url, response.status, headers, body, has_key=bool(self.api_key))
        except urllib.error.URLError as error:  # the request could not be sent
            return Response(DeliveryStatus.UNAVAILABLE, f"{self.url} cannot be reached: {_reason(error.reason)}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Response(DeliveryStatus.FAILED, f"{self.url} sent no response: {_reason(error)}")

    def _headers(self, key: str) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Idempotency-Key": key,
            "User-Agent": f"gpu-kb/{__version__}",
        }
        return {**headers, "Authorization": f"Bearer {self.api_key}"} if self.api_key else headers


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects, so that an API key is sent only to the named service."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _open(request: urllib.request.Request, timeout_s: float, *, is_loopback: bool) -> Any:
    """The response, whatever its status. It uses a proxy from the environment, except for this machine."""
    proxies = urllib.request.ProxyHandler({} if is_loopback else None)
    try:
        return urllib.request.build_opener(_NoRedirects, proxies).open(request, timeout=timeout_s)
    except urllib.error.HTTPError as response:
        return response


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return has_host and parts.scheme in ("http", "https") and not re.search(r"[^!-~]", url)


def _reason(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return sanitize(getattr(error, "strerror", None) or str(error) or type(error).__name__)
