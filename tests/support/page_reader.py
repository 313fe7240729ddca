"""Pages as a browser without scripts gets them."""

from __future__ import annotations

import re
from html import unescape

import httpx

PAGE = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def get(client: httpx.Client, path: str, status: int = 200, /, **headers: str) -> str:
    """The HTML at a path, which must respond with this status."""
    answer = client.get(path, headers={**PAGE, **headers})
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("text/html")
    return answer.text


def text_of(html: str) -> str:
    """The text that is visible on the screen."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())
