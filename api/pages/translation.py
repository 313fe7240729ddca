"""The Chinese texts of the pages, in `chinese.toml` by their English text, in addition to those of the core.

`texts` are the messages of the templates, `labels` the values of closed lists, and `sentences` what the service
prints, with `{}` for variable parts. A text without a translation stays in English and is marked as such.
"""

from __future__ import annotations

import datetime
import tomllib
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from kb.content.chinese import Dictionary, dictionary
from kb.content.html import LOOK_ALIKE

_TABLES: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("chinese.toml").read_text("utf-8"))
TEXTS = _TABLES["texts"]
LABELS = {**dictionary().labels, **_TABLES["labels"]}
SENTENCES = {**_TABLES["sentences"], **dictionary().sentences}
CHINESE = Dictionary(LABELS, SENTENCES)


def install(environment: Environment, lang: str) -> None:
    """Add `_`, `trans`, and the filters `label`, `sentence` and `day` of a language to the templates."""
    environment.add_extension("jinja2.ext.i18n")
    environment.policies["ext.i18n.trimmed"] = True
    environment.install_gettext_callables(  # type: ignore[attr-defined]
        lambda text: message(text, lang),
        lambda singular, plural, count: _plural(singular, plural, count, lang),
        newstyle=True,
    )
    environment.filters.update(
        label=lambda value: label(value, lang),
        sentence=lambda value: sentence(value, lang),
        day=lambda time: day(time, lang),
        captioned=lambda html: captioned(html, lang),
    )


def message(text: str, lang: str) -> str:
    """A message of a template or a page, in this language."""
    return TEXTS.get(text, text) if lang == "zh" else text


def _plural(singular: str, plural: str, count: int, lang: str) -> str:
    return TEXTS.get(plural, plural) if lang == "zh" else (singular if count == 1 else plural)


def label(value: str, lang: str) -> str:
    """A value of a closed list, such as a status or an area, in this language."""
    return CHINESE.label(value) if lang == "zh" else value


def sentence(text: str, lang: str) -> str | Markup:
    """A sentence of the core or of the service, in this language, or marked as English if it has no translation."""
    if lang != "zh":
        return text
    return translated(text) or Markup('<span lang="en">{}</span>').format(text)


@lru_cache(maxsize=256)
def translated(text: str) -> str:
    """A sentence in Chinese; "" if it has no translation."""
    return CHINESE.sentence(text)


def captioned(html: str, lang: str) -> str:
    """A section of an entry with our captions in the language of the page."""
    chinese = f'<figcaption lang="zh-CN">{LABELS[LOOK_ALIKE]}'
    return html.replace(f"<figcaption>{LOOK_ALIKE}", chinese) if lang == "zh" else html


def day(time: datetime.datetime | str, lang: str) -> str:
    """The day of an ISO 8601 text or a `datetime`, for instance `2026-11-03` or `2026年11月3日`."""
    text = str(time)[:10]
    parts = text.split("-")
    if lang != "zh" or not (len(parts) == 3 and all(part.isdigit() for part in parts)):
        return text
    year, month, number = map(int, parts)
    return f"{year}年{month}月{number}日"
