"""Interprets the response of a kb service to a report. It does no I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

MAX_PROBLEM_LENGTH = 300  # characters of a service's message that are shown
NO_SERVICE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED)


class DeliveryStatus(Enum):
    """The result of sending one report once."""

    ACCEPTED = auto()  # the service has the report
    REFUSED = auto()  # the service read the report and will never accept it
    BUSY = auto()  # the service asks to try again after a while
    FAILED = auto()  # this report could not be delivered now; another one may be
    UNAVAILABLE = auto()  # no report can be delivered now


@dataclass(frozen=True, slots=True)
class Response:
    """The result, the problem ("" if accepted), and how many seconds a busy service asks to wait."""

    status: DeliveryStatus
    problem: str = ""
    wait_s: float = 0.0


def interpret(url: str, code: int, headers: Mapping[str, str], body: bytes, *, has_key: bool) -> Response:
    """Interpret an HTTP response; `headers` have lower-case names. `has_key`: an API key was sent.

    Only a problem document can refuse a report; other bodies are from a proxy, which knows nothing about reports.
    """
    if code in (HTTPStatus.OK, HTTPStatus.CREATED) and "id" in _json_object(body):
        return Response(DeliveryStatus.ACCEPTED)
    if code in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return Response(DeliveryStatus.BUSY, _problem(url, code, body), _wait_s(headers.get("retry-after", "")))
    unavailable = _why_unavailable(url, code, headers, has_key=has_key)
    if unavailable:
        return Response(DeliveryStatus.UNAVAILABLE, unavailable)
    is_problem = headers.get("content-type", "").startswith("application/problem+json")
    is_refused = is_problem and 400 <= code < 500 and code != HTTPStatus.REQUEST_TIMEOUT
    return Response(DeliveryStatus.REFUSED if is_refused else DeliveryStatus.FAILED, _problem(url, code, body))


def sanitize(text: str) -> str:
    """A text made safe for the terminal, which a service must not be able to control."""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_PROBLEM_LENGTH])


def _why_unavailable(url: str, code: int, headers: Mapping[str, str], *, has_key: bool) -> str:
    """Why no report can be delivered; "" if one can."""
    if code == HTTPStatus.UNAUTHORIZED and has_key:
        return (
            f"{url} does not accept the API key in KB_API_KEY: it is incomplete, revoked or of another service;"
            " its operator makes a new one with `kb key new NAME --scope report`"
        )
    if code == HTTPStatus.UNAUTHORIZED:
        return f"{url} requires an API key, and none was sent: set KB_API_KEY"
    if code == HTTPStatus.FORBIDDEN:
        return f"{url} requires an API key that may report: the one in KB_API_KEY may not"
    if 300 <= code < 400:
        return f"{url} redirects to {sanitize(headers.get('location', 'elsewhere'))}: use that address"
    return f"no kb service accepts reports at {url}: {_status_line(code)}" if code in NO_SERVICE else ""


def _problem(url: str, code: int, body: bytes) -> str:
    document = _json_object(body)
    detail = document.get("detail") or document.get("title") or "not the response of a kb service"
    return f"{url} answered {_status_line(code)}: {sanitize(str(detail))}"


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _wait_s(retry_after: str) -> float:
    """The seconds in a `Retry-After` header; 1 if a proxy sends a date or nothing, since kb services send seconds."""
    return float(retry_after) if re.fullmatch(r"[0-9]{1,6}", retry_after) else 1.0


def _status_line(code: int) -> str:
    try:
        return f"{code} {HTTPStatus(code).phrase}"
    except ValueError:
        return str(code)
