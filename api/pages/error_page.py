"""What went wrong, for a person with a browser: what happened, what to do, and links to what may have been meant."""

from __future__ import annotations

import re

from fastapi import Request
from fastapi.responses import Response
from markupsafe import Markup, escape

from kb.errors import IndexUnavailable

from ..requests.access import sign_out
from ..state.content import served_content
from .page import address, page

WORD = re.compile(r"(`[^`]+`|[a-z0-9]+(?:-[a-z0-9]+)+)")
RELOAD_S = 2


def error_page(request: Request, status: int, title: str, detail: str, hint: str) -> Response:
    """A page with this status. While the index is being opened it loads itself again."""
    is_loading = status == 503 and _known(request) is None
    response = page(
        request,
        "error.html",
        status,
        status=status,
        title="One moment" if is_loading else title,
        detail=detail,
        hint=linked(hint, _known(request) or frozenset()),
        reload_s=RELOAD_S if is_loading else 0,
        to=_again(request),
    )
    if status == 401 and request.state.is_signed_in:  # a key that is not accepted would be sent again and again
        sign_out(response)
    return response


def _again(request: Request) -> str:
    """Where a reader who has signed in goes on."""
    if request.method != "GET":
        return "/"
    return f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path


def linked(hint: str, known: frozenset[str]) -> Markup:
    """A hint with its commands as code and the ids of entries as links."""
    return Markup("").join(_linked(one, known) for one in WORD.split(hint))


def _linked(word: str, known: frozenset[str]) -> Markup:
    if word.startswith("`") and len(word) > 2:
        return Markup("<code>{}</code>").format(word[1:-1])
    return Markup('<a href="{}">{}</a>').format(address(f"/entries/{word}"), word) if word in known else escape(word)


def _known(request: Request) -> frozenset[str] | None:
    """The ids of the entries, None while they are not there."""
    try:
        return frozenset(served_content(request).catalog.entries)
    except IndexUnavailable:
        return None
