"""A template and what it shows, as a response: in the language that is asked for, and for this reader alone."""

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

LANGUAGES = {"en": "en", "zh": "zh-CN"}  # as we name them, and as HTML does
REGION = re.compile(r"-[A-Za-z0-9-]+")  # and script: any Chinese is better than none
HEADERS = {"Cache-Control": "private, no-cache", "Vary": "Accept-Language, Cookie"}


def page(request: Request, template: str, status_code: int = 200, /, **shown: Any) -> HTMLResponse:
    """The page that a template makes of what it is shown; every string in it is escaped unless it is `Markup`."""
    made = TEMPLATES.get_template(template)
    text = made.render(path=request.url.path, is_signed_in=request.state.is_signed_in, **shown)
    return HTMLResponse(text, status_code, HEADERS)


def language(request: Request) -> str:
    """`en` or `zh`: what the address says, else what the browser prefers, else English."""
    asked = request.query_params.get("lang", "")
    if asked in LANGUAGES:
        return asked
    wanted = REGION.sub("", request.headers.get("accept-language", "en"))
    return preferred(wanted, ("en", "zh")) or "en"


def address(path: str, **query: object) -> str:
    """A URL of this service with the parts of a query that say something; a list says a name several times."""
    said = urlencode({name: value for name, value in query.items() if value}, doseq=True)
    return f"{path}?{said}" if said else path


def _day(time: datetime.datetime | str) -> str:
    return str(time)[:10]


def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.globals.update(static=URLS, version=__version__, address=address, languages=LANGUAGES)
    made.filters.update(day=_day, trusted=Markup)
    return made


TEMPLATES = _environment()
