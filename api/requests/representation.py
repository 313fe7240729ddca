"""A body that a client may have already: with an ETag, or 304 in its place (RFC 9110, 8.8.3 and 13.1.2)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from fastapi.responses import Response

TAG = re.compile(r'(?:W/)?"([^"]*)"')
TAGGED = {
    "ETag": {"description": "Of this form of the document, equal on every replica.", "schema": {"type": "string"}}
}
CACHING: dict[int | str, dict[str, Any]] = {
    200: {"headers": TAGGED},
    304: {"description": "What you have is what you would get.", "headers": TAGGED},
}


def represent(body: bytes, media_type: str, if_none_match: str, headers: Mapping[str, str] | None = None) -> Response:
    """The body, or 304 when the client says that it has it.

    The tag is made of the body: it differs by form and language, and it is equal on every replica that serves the
    same. The comparison is the weak one: a proxy that compresses makes a tag weak.
    """
    tag = hashlib.sha256(body).hexdigest()[:32]
    told = {"Cache-Control": "private, max-age=0, must-revalidate", **(headers or {}), "ETag": f'"{tag}"'}
    if has(if_none_match, tag):
        return Response(status_code=304, headers=told)
    return Response(body, media_type=media_type, headers=told)


def has(if_none_match: str, tag: str) -> bool:
    """Whether the header names the tag, or anything at all."""
    return if_none_match.strip() == "*" or tag in TAG.findall(if_none_match)
