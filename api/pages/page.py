"""Pages from templates, in the requested language and private to the reader."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kb import __version__

from ..requests.accept import preferred
from . import translation
from .static_files import URLS

LANGUAGES = {"en": "en", "zh": "zh-CN"}  # our name, and the name in HTML
REGION = re.compile(r"-[A-Za-z0-9-]+")  # also a script: any kind of Chinese will do
HEADERS = {"Cache-Control": "private, no-cache", "Vary": "Accept-Language, Cookie"}


def page(request: Request, template: str, status_code: int = 200, /, **values: Any) -> HTMLResponse:
    """The page of a template with these values. Strings are escaped unless they are `Markup`."""
    lang, chosen = language(request), chosen_language(request)
    text = (
        TEMPLATES[lang]
        .get_template(template)
        .render(
            path=request.url.path,
            is_signed_in=request.state.is_signed_in,
            lang=lang,
            chosen=chosen,
            link=partial(address, lang=chosen),
            other_language=_in_other_language(request, lang),
            **values,
        )
    )
    return HTMLResponse(text, status_code, HEADERS)


def language(request: Request) -> str:
    """`en` or `zh`, from the address, the preferences of the browser, or English by default."""
    accepted = REGION.sub("", request.headers.get("accept-language", "en"))
    return chosen_language(request) or preferred(accepted, ("en", "zh")) or "en"


def chosen_language(request: Request) -> str:
    """The language in the address, which the links of the page repeat; "" if the browser decides."""
    name = request.query_params.get("lang", "")
    return name if name in LANGUAGES else ""


def _in_other_language(request: Request, lang: str) -> str:
    query = [(name, value) for name, value in request.query_params.multi_items() if name != "lang"]
    return f"{request.url.path}?{urlencode([*query, ('lang', 'en' if lang == 'zh' else 'zh')])}"


def address(path: str, **query: object) -> str:
    """A URL of this service with the non-empty members of a query; a list repeats its name."""
    path, mark, anchor = path.partition("#")
    text = urlencode({name: value for name, value in query.items() if value}, doseq=True)
    return (f"{path}?{text}" if text else path) + mark + anchor


def _environment(lang: str) -> Environment:
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    translation.install(environment, lang)
    environment.globals.update(static=URLS, version=__version__, languages=LANGUAGES)
    environment.filters["trusted"] = Markup
    return environment


TEMPLATES = {lang: _environment(lang) for lang in LANGUAGES}
