"""`/`: the front page with all entries, or the entries that answer a question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ValidationError

from kb.content.area import Area
from kb.content.entry import Status
from kb.content.filters import STATUSES, Filter
from kb.errors import UsageError
from kb.search.gap import observations, subjects
from kb.search.query import LONGEST_TEXT
from kb.search.results import Answer

from ..requests.questions import SearchQuestion
from ..state.application import application
from ..state.content import Content, Listing, served_content, served_listing
from ..state.gap_queue import count
from .highlight import highlighted
from .page import page

SHOWN = 10
LEAST_SHARED = 3  # the page offers a tag if at least this many entries have it
NO_AREA = "other"
EXAMPLES = (
    "ALLGATHER timeout save",
    "loss becomes nan after a few hundred steps",
    "CUDA out of memory only on rank 0",
    "保存检查点时卡住",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device",
)

router = APIRouter()


class SearchForm(BaseModel):
    """The form of the page. Empty members are ignored."""

    q: str = ""
    tag: list[str] = []
    status: str = ""
    area: str = ""
    gpu: str = ""
    torch: str = ""

    @property
    def only(self) -> Filter:
        return Filter.of(self.tag, None, filter(None, [self.status]), filter(None, [self.area]))

    @property
    def question(self) -> SearchQuestion:
        """The question in the form. Raises `ValidationError` for a member that is too long."""
        return SearchQuestion(
            q=self.q[:LONGEST_TEXT],
            limit=SHOWN,
            tag=self.tag,
            framework=None,
            status=[self.status] if self.status else None,
            area=[self.area] if self.area else None,
            gpu=self.gpu,
            torch=self.torch,
            why=False,
        )


@router.get("/")
async def search_page(request: Request, asked: Annotated[SearchForm, Query()]) -> HTMLResponse:
    asked.tag = [tag for tag in asked.tag if tag]
    values: dict[str, Any] = {
        "asked": asked,
        "statuses": sorted(STATUSES),
        "areas": tuple(Area),
        "problem": None,
    }
    try:
        if asked.q.strip():
            answered = await _answered(request, served_content(request), asked.question)
            return page(request, "search.html", **values, **answered)
        return page(request, "home.html", **values, **_everything(served_listing(request), asked.only))
    except ValidationError as error:
        return _refused(request, values, UsageError(f"{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}"))
    except UsageError as problem:  # a filter that no entry can pass
        return _refused(request, values, problem)


def _refused(request: Request, values: dict[str, Any], problem: UsageError) -> HTMLResponse:
    return page(request, "search.html", 422, **{**values, "problem": problem}, answer=None, hits=[])


async def _answered(request: Request, content: Content, question: SearchQuestion) -> dict[str, Any]:
    answer = await content.answer(question, application(request).snapshot.verdict_counts)
    if request.headers.get("sec-fetch-dest", "document") == "document":  # a page load, not a search on a key press
        count(request, "" if question.only else question.q, answer)
    return {
        "answer": answer,
        "hits": hits(answer),
        "outside": subjects(answer),
        "observations": observations(answer, content.triage),
    }


def hits(answer: Answer) -> list[dict[str, Any]]:
    """Hits with the matched words marked in the snippet."""
    return [{"hit": hit, "snippet": highlighted(hit.snippet, hit.matched)} for hit in answer.hits]


def _everything(listing: Listing, only: Filter) -> dict[str, Any]:
    """All entries that pass the filter. Raises `UsageError` for a filter that no entry can pass."""
    current = [summary for summary in listing.summaries if summary["status"] != Status.WITHDRAWN]
    passing = only.admitted(dict(enumerate(current)))
    listed = [current[number] for number in sorted(passing)]
    return {
        "total": len(current),
        "listed": listed,
        "popular": popular(current),
        "groups": groups(listed),
        "examples": EXAMPLES,
    }


def popular(summaries: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    """Tags by number of entries, the most frequent first, without rare ones."""
    counts = Counter(tag for summary in summaries for tag in summary["tags"])
    return [(tag, count) for tag, count in counts.most_common() if count >= LEAST_SHARED]


def groups(summaries: Iterable[dict[str, Any]]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(area, meaning, entries) for each area that has entries; entries without an area come last."""
    by_area: dict[str | None, list[dict[str, Any]]] = {}
    for summary in summaries:
        by_area.setdefault(summary["area"], []).append(summary)
    sections = [(area.value, area.meaning, by_area[area]) for area in Area if area in by_area]
    return [*sections, (NO_AREA, "entries without an area", by_area[None])] if None in by_area else sections
