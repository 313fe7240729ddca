"""Conditional responses: a body with its ETag, or 304 when the client has it (RFC 9110, 8.8.3 and 13.1.2)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from fastapi.responses import Response

TAG = re.compile(r'(?:W/)?"([^"]*)"')
ETAG = {"ETag": {"description": "Of this representation; the same on every replica.", "schema": {"type": "string"}}}
CACHING: dict[int | str, dict[str, Any]] = {
    200: {"headers": ETAG},
    304: {"description": "Not modified: your copy is current.", "headers": ETAG},
}


def represent(body: bytes, media_type: str, if_none_match: str, headers: Mapping[str, str] | None = None) -> Response:
    """The body, or 304 when `if_none_match` names it.

    The tag is a hash of the body, so it differs by format and language and is the same on every replica. The comparison
    is weak because a proxy that compresses makes tags weak.
    """
    tag = hashlib.sha256(body).hexdigest()[:32]
    headers = {"Cache-Control": "private, max-age=0, must-revalidate", **(headers or {}), "ETag": f'"{tag}"'}
    if has(if_none_match, tag):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)


def has(if_none_match: str, tag: str) -> bool:
    """Whether the header contains the tag or `*`."""
    return if_none_match.strip() == "*" or tag in TAG.findall(if_none_match)
