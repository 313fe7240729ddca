"""Answers to questions, and the last of them as they were sent: the same question gets the same bytes at once."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends, Request

from kb.search.results import Answer
from kb.sharing.hardware_boost import prefer
from kb.store.reports import Standing

from ..requests.questions import SearchQuestion
from .content import Content

MOST_RIVALS = 20  # hits that may change places; hardly a question has as many that score half of the best
MOST = 1024
MOST_BYTES = 16 << 20


async def answer(content: Content, standings: Sequence[Standing], question: SearchQuestion) -> Answer:
    """The hits in the order of the question's preference. Raises `UsageError` for a filter that no entry can pass."""
    limit = max(question.limit, MOST_RIVALS) if question.here else question.limit
    found = await content.search(question.q, limit, question.only, explain=question.why)
    if not question.here:
        return found
    hits = prefer(found.hits, standings, content.digests, question.here)
    return replace(found, hits=hits[: question.limit])


@dataclass(frozen=True, slots=True)
class Sent:
    """The body of an answer. `answered`: it is a good one; `best` is the entry that came nearest, or ""."""

    body: bytes
    answered: bool
    best: str


class Answers:
    """What was sent last, by question, of one state of the content. For the event loop: one thread at a time."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Sent] = OrderedDict()
        self._bytes = 0
        self._content: weakref.ref[Content] | None = None  # weak, since replaced content is closed when nobody has it

    def get(self, content: Content, question: str) -> Sent | None:
        """What was sent; None when it was not, or is forgotten."""
        if not self._is_of(content):
            self._kept.clear()
            self._bytes = 0
            self._content = weakref.ref(content)
        found = self._kept.get(question)
        if found:
            self._kept.move_to_end(question)
        return found

    def put(self, content: Content, question: str, sent: Sent) -> None:
        """Keep what is sent, unless its content was replaced meanwhile. What was asked longest ago goes."""
        if not self._is_of(content) or question in self._kept:
            return
        self._kept[question] = sent
        self._bytes += _size(question, sent)
        while len(self._kept) > MOST or self._bytes > MOST_BYTES:
            self._bytes -= _size(*self._kept.popitem(last=False))

    def _is_of(self, content: Content) -> bool:
        return self._content is not None and self._content() is content


def _size(question: str, sent: Sent) -> int:
    """About: a character of the question may take four bytes."""
    return len(sent.body) + len(question)


async def answers(request: Request) -> Answers:  # not async, it would run in another thread
    found: Answers = request.app.state.answers
    return found


LastAnswers = Annotated[Answers, Depends(answers)]
