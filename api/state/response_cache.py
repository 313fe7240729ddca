"""A cache of recent responses, so that a repeated question gets the same bytes at once."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass

from .content import Content

MOST = 1024
MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class CachedResponse:
    """The body of a response. `answered`: a hit is good enough to rely on. `best`: the nearest entry, or ""."""

    body: bytes
    answered: bool
    best: str


class ResponseCache:
    """Responses by question, for one state of the content. For use in the event loop."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, CachedResponse] = OrderedDict()
        self._bytes = 0
        self._content: weakref.ref[Content] | None = None  # weak: replaced content is closed once unreferenced

    def get(self, content: Content, question: str) -> CachedResponse | None:
        if not self._is_of(content):
            self._responses.clear()
            self._bytes = 0
            self._content = weakref.ref(content)
        response = self._responses.get(question)
        if response:
            self._responses.move_to_end(question)
        return response

    def put(self, content: Content, question: str, response: CachedResponse) -> None:
        """Cache a response unless its content was replaced meanwhile. Drops the least recently used responses."""
        if not self._is_of(content) or question in self._responses:
            return
        self._responses[question] = response
        self._bytes += _size(question, response)
        while len(self._responses) > MOST or self._bytes > MOST_BYTES:
            self._bytes -= _size(*self._responses.popitem(last=False))

    def _is_of(self, content: Content) -> bool:
        return self._content is not None and self._content() is content


def _size(question: str, response: CachedResponse) -> int:
    """The approximate size in bytes: a character of the question may take four."""
    return len(response.body) + len(question)
