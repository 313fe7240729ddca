"""Templates as responses, in the requested language, private to the reader."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kb import __version__

from ..requests.accept import preferred
from .static_files import URLS

LANGUAGES = {"en": "en", "zh": "zh-CN"}  # our name, and that of HTML
REGION = re.compile(r"-[A-Za-z0-9-]+")  # and script: any Chinese will do
HEADERS = {"Cache-Control": "private, no-cache", "Vary": "Accept-Language, Cookie"}


def page(request: Request, template: str, status_code: int = 200, /, **values: Any) -> HTMLResponse:
    """The page of a template with these values. Strings are escaped unless they are `Markup`."""
    text = TEMPLATES.get_template(template).render(
        path=request.url.path, is_signed_in=request.state.is_signed_in, **values
    )
    return HTMLResponse(text, status_code, HEADERS)


def language(request: Request) -> str:
    """`en` or `zh`: from the address, else what the browser prefers, else English."""
    name = request.query_params.get("lang", "")
    if name in LANGUAGES:
        return name
    accepted = REGION.sub("", request.headers.get("accept-language", "en"))
    return preferred(accepted, ("en", "zh")) or "en"


def address(path: str, **query: object) -> str:
    """A URL of this service with the non-empty members of a query; a list repeats its name."""
    text = urlencode({name: value for name, value in query.items() if value}, doseq=True)
    return f"{path}?{text}" if text else path


def _day(time: datetime.datetime | str) -> str:
    return str(time)[:10]


def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(static=URLS, version=__version__, address=address, languages=LANGUAGES)
    environment.filters.update(day=_day, trusted=Markup)
    return environment


TEMPLATES = _environment()
