"""A kb service as one sees it who reports to it: its address, one POST, and what the answer means for the report."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from email.message import Message
from enum import Enum, auto
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, Self
from urllib.parse import urlsplit

from kb import __version__
from kb.errors import UsageError

PATH = "/v1/reports"
LARGEST_ANSWER = 64 << 10  # bytes; a receipt or a problem document has some hundred
LONGEST_PROBLEM = 300  # characters shown of what the service says
EXAMPLE = "for instance: --report https://kb.example.org"


class Ending(Enum):
    """What one try came to."""

    TAKEN = auto()  # the service has the report
    REFUSED = auto()  # it has read it and will never take it
    BUSY = auto()  # it asks to come again after a while
    FAILED = auto()  # this report could not be delivered now; another may
    CLOSED = auto()  # none can be delivered now


@dataclass(frozen=True, slots=True)
class Answer:
    """How a try ended, what was wrong ("" when it was taken), and how many seconds a busy service asks for."""

    ending: Ending
    problem: str = ""
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Service:
    """A kb service at `url`, without a slash at its end; an `api_key` of "" sends none."""

    url: str
    api_key: str = field(default="", repr=False)

    @classmethod
    def at(cls, url: str, api_key: str = "") -> Self:
        """Raises `UsageError` for what is no address of a service, or no key."""
        try:
            parts = urlsplit(url)
            has_place = bool(parts.hostname) and parts.port != 0
        except ValueError:
            has_place = False
        if not has_place or parts.scheme not in ("http", "https") or re.search(r"[^!-~]", url):
            raise UsageError(f"{url!r} is no address of a kb service", EXAMPLE)
        if parts.username is not None or parts.query or parts.fragment:
            raise UsageError("the address of a kb service has no user, query or fragment", "a key goes into KB_API_KEY")
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
        return self.url.startswith("http:") and not self.is_loopback

    def post(self, key: str, body: bytes, timeout_s: float) -> Answer:
        """One try. `timeout_s` bounds connecting and each wait for the answer, not their sum. Raises nothing."""
        request = urllib.request.Request(self.url + PATH, body, self._headers(key))  # noqa: S310 - `at` admits http(s)
        try:
            with _opener(self.is_loopback).open(request, timeout=timeout_s) as answer:
                return self._understood(answer.status, answer.headers, answer.read(LARGEST_ANSWER))
        except urllib.error.HTTPError as error:
            with error:
                return self._understood(error.code, error.headers, _read(error))
        except urllib.error.URLError as error:  # nothing was answered because nothing could be asked
            return Answer(Ending.CLOSED, f"{self.url} cannot be reached: {_reason(error.reason)}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Answer(Ending.FAILED, f"{self.url} gave no answer: {_reason(error)}")

    def _headers(self, key: str) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Idempotency-Key": key,
            "User-Agent": f"gpu-kb/{__version__}",
        }
        return {**headers, "Authorization": f"Bearer {self.api_key}"} if self.api_key else headers

    def _understood(self, status: int, headers: Message, body: bytes) -> Answer:
        if status in (HTTPStatus.OK, HTTPStatus.CREATED) and "id" in _document(body):
            return Answer(Ending.TAKEN)
        if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            return Answer(Ending.BUSY, self._said(status, body), _seconds(headers.get("Retry-After", "")))
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return Answer(Ending.CLOSED, self._denied(status))
        if 300 <= status < 400:
            target = _printable(headers.get("Location", "elsewhere"))
            return Answer(Ending.CLOSED, f"{self.url} redirects to {target}: name the address that answers itself")
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED):
            return Answer(Ending.CLOSED, f"no kb service takes reports at {self.url}: {_name(status)}")
        is_judged = headers.get("Content-Type", "").startswith("application/problem+json")
        if 400 <= status < 500 and status != HTTPStatus.REQUEST_TIMEOUT and is_judged:
            return Answer(Ending.REFUSED, self._said(status, body))
        return Answer(Ending.FAILED, self._said(status, body))

    def _denied(self, status: int) -> str:
        if status == HTTPStatus.FORBIDDEN and self.api_key:
            return f"{self.url} wants a key that may report: the one in KB_API_KEY may not"
        if self.api_key:
            return f"{self.url} does not know the key in KB_API_KEY: set another"
        return f"{self.url} wants a key: set KB_API_KEY"

    def _said(self, status: int, body: bytes) -> str:
        document = _document(body)
        detail = document.get("detail") or document.get("title") or "no kb service speaks so"
        return f"{self.url} answered {_name(status)}: {_printable(str(detail))}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key is for the service that was named, and for no other."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opener(is_loopback: bool) -> urllib.request.OpenerDirector:
    """Through the proxy that the environment names, except to this machine itself."""
    proxies = urllib.request.ProxyHandler({} if is_loopback else None)
    return urllib.request.build_opener(_NoRedirects, proxies)


def _read(answer: urllib.error.HTTPError) -> bytes:
    try:
        return answer.read(LARGEST_ANSWER)
    except (OSError, http.client.HTTPException):  # the status alone says enough
        return b""


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _seconds(retry_after: str) -> float:
    """Services of kb give whole seconds; one second where a proxy gives a date or nothing."""
    return float(retry_after) if re.fullmatch(r"[0-9]{1,6}", retry_after) else 1.0


def _name(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _reason(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return _printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _printable(text: str) -> str:
    """For a terminal: a service must not colour or move it."""
    return "".join(char if char.isprintable() else " " for char in text[:LONGEST_PROBLEM])
