"""What the response of a kb service means for the report that was sent to it. Pure: nothing is sent here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

LONGEST_PROBLEM = 300  # characters shown of what a service says
NO_SERVICE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED)


class Ending(Enum):
    """What one try came to."""

    TAKEN = auto()  # the service has the report
    REFUSED = auto()  # it has read it and will never take it
    BUSY = auto()  # it asks to come again after a while
    FAILED = auto()  # this report could not be delivered now; another may
    CLOSED = auto()  # none can be delivered now


@dataclass(frozen=True, slots=True)
class Response:
    """How a try ended, what was wrong ("" when it was taken), and how many seconds a busy service asks for."""

    ending: Ending
    problem: str = ""
    wait_s: float = 0.0


def understand(url: str, status: int, headers: Mapping[str, str], body: bytes) -> Response:
    """The meaning of an HTTP response. Only a problem document of a service refuses: a proxy knows nothing of reports.

    `headers` by their lower-case names.
    """
    if status in (HTTPStatus.OK, HTTPStatus.CREATED) and "id" in _document(body):
        return Response(Ending.TAKEN)
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return Response(Ending.BUSY, _said(url, status, body), _seconds(headers.get("retry-after", "")))
    closed = _closed(url, status, headers)
    if closed:
        return Response(Ending.CLOSED, closed)
    is_problem = headers.get("content-type", "").startswith("application/problem+json")
    is_refused = is_problem and 400 <= status < 500 and status != HTTPStatus.REQUEST_TIMEOUT
    return Response(Ending.REFUSED if is_refused else Ending.FAILED, _said(url, status, body))


def printable(text: str) -> str:
    """For a terminal: a service must not colour or move it."""
    return "".join(char if char.isprintable() else " " for char in text[:LONGEST_PROBLEM])


def _closed(url: str, status: int, headers: Mapping[str, str]) -> str:
    """Why no report can be delivered; "" when one can."""
    if status == HTTPStatus.UNAUTHORIZED:
        return f"{url} wants a key that it knows: set KB_API_KEY"
    if status == HTTPStatus.FORBIDDEN:
        return f"{url} wants a key that may report: the one in KB_API_KEY may not"
    if 300 <= status < 400:
        return f"{url} redirects to {printable(headers.get('location', 'elsewhere'))}: name the address behind it"
    return f"no kb service takes reports at {url}: {_name(status)}" if status in NO_SERVICE else ""


def _said(url: str, status: int, body: bytes) -> str:
    document = _document(body)
    detail = document.get("detail") or document.get("title") or "no kb service speaks so"
    return f"{url} answered {_name(status)}: {printable(str(detail))}"


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
