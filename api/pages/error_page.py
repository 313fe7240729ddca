"""Error pages: what happened, what to do next, and links to entries that may have been meant."""

from __future__ import annotations

import re

from fastapi import Request
from fastapi.responses import Response
from markupsafe import Markup, escape

from kb.errors import IndexUnavailable

from ..requests.access import sign_out
from ..state.content import served_content
from .page import address, chosen_language, language, page
from .translation import translated

WORD = re.compile(r"(`[^`]+`|[a-z0-9]+(?:-[a-z0-9]+)+)")
RELOAD_S = 2


def error_page(request: Request, status: int, title: str, detail: str, hint: str) -> Response:
    """An error page with this status. It reloads itself while the index is being opened."""
    is_loading = status == 503 and _entry_ids(request) is None
    response = page(
        request,
        "error.html",
        status,
        status=status,
        title="Starting up" if is_loading else title,
        detail=detail,
        hint=_hint(request, hint),
        reload_s=RELOAD_S if is_loading else 0,
        to=_return_address(request),
    )
    if status == 401 and request.state.is_signed_in:  # otherwise the browser keeps sending the rejected key
        sign_out(response)
    return response


def _hint(request: Request, hint: str) -> Markup:
    lang = language(request)
    chinese = translated(hint) if lang == "zh" else ""
    html = linked(chinese or hint, _entry_ids(request) or frozenset(), chosen_language(request))
    return html if chinese or lang == "en" else Markup('<span lang="en">{}</span>').format(html)


def _return_address(request: Request) -> str:
    """The address that a reader goes to after signing in."""
    if request.method != "GET":
        return "/"
    return f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path


def linked(hint: str, known: frozenset[str], lang: str = "") -> Markup:
    """A hint as HTML, with commands as code and ids of entries as links."""
    return Markup("").join(_link(word, known, lang) for word in WORD.split(hint))


def _link(word: str, known: frozenset[str], lang: str) -> Markup:
    if word.startswith("`") and len(word) > 2:
        return Markup("<code>{}</code>").format(word[1:-1])
    if word not in known:
        return escape(word)
    return Markup('<a href="{}" lang="en">{}</a>').format(address(f"/entries/{word}", lang=lang), word)


def _entry_ids(request: Request) -> frozenset[str] | None:
    """The ids of all entries, or None while the content is being read."""
    try:
        return frozenset(served_content(request).catalog.entries)
    except IndexUnavailable:
        return None
