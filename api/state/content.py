"""The index and the entries that a process serves, as they were when they were read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Self

from fastapi import Depends, Request

from kb.content.catalog import Catalog, file_digest, load_catalog
from kb.content.causes import Graph, graph
from kb.content.entry import Entry
from kb.content.filters import Filter
from kb.content.roots import Root
from kb.content.triage import Triage, load_triage
from kb.diagnose.diagnosis import Diagnosis, diagnose
from kb.diagnose.inputs.sources import Stream
from kb.diagnose.questions import Question, questions
from kb.errors import IndexUnavailable
from kb.records.hardware import Proof, add_gpu_summaries, gpu_summary, proofs
from kb.records.libraries import LibraryVerdict, library_verdicts
from kb.records.releases import ReleaseVerdict, add_releases, release_verdicts, releases_by_verdict
from kb.search.gap import gap
from kb.search.index import Index
from kb.search.index_cache import open_index
from kb.search.ranking import Preference, search
from kb.search.results import Answer
from kb.sharing.hardware_boost import preference
from kb.store.database import Database
from kb.store.reports import VerdictCount

from ..log import log
from ..requests.questions import SearchQuestion
from .application import application
from .fair_queue import FairQueue
from .scanning import ScanPool

MOST_UPLOADS = 8  # simultaneous forms with logs in memory


@dataclass(frozen=True, slots=True)
class Listing:
    """The entries, which are available before the index is built. `summaries` are sorted by id."""

    catalog: Catalog
    summaries: tuple[dict[str, Any], ...]

    @classmethod
    def load(cls, roots: Sequence[Root]) -> Self:
        catalog = load_catalog(roots)
        summaries = tuple(entry.summary() for entry in catalog)
        add_gpu_summaries(summaries, roots)
        add_releases(summaries, roots)
        return cls(catalog, summaries)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Content:
    """One state of the content roots, in memory. Changes on disk are served together, after a restart or a reindex.

    `searching` has a single thread, the only one that uses the index: the readers of Whoosh share a file cursor, so two
    threads in one searcher get wrong answers or errors. Requests share the thread through `questions`. A diagnosis
    scans its streams for seconds in a process of `scanning`, then uses the index for milliseconds.
    """

    index: Index
    listing: Listing
    texts: Mapping[str, str]
    probe_digests: Mapping[str, str]
    hardware: Mapping[str, str]
    proofs: Mapping[str, tuple[Proof, ...]]
    releases: Mapping[str, tuple[ReleaseVerdict, ...]]
    libraries: Mapping[str, tuple[LibraryVerdict, ...]]
    triage: Triage
    links: Graph
    searching: ThreadPoolExecutor
    questions: FairQueue
    scanning: ScanPool
    uploading: asyncio.Semaphore

    @classmethod
    def load(cls, roots: Sequence[Root], searching: ThreadPoolExecutor, listing: Listing | None = None) -> Self:
        """Load the content of these roots. Entries that cannot be used are logged and left out. Raises `KbError`."""
        listing = listing or Listing.load(roots)
        catalog = listing.catalog
        index = open_index(tuple(roots), log.warning)
        proofs_by_entry = proofs(roots)
        hardware = {
            entry.id: gpu_summary(catalog.probe_file(entry), proofs_by_entry.get(entry.id, ()), entry.digest)
            for entry in catalog
        }
        probe_digests = {entry.id: file_digest(catalog.probe_file(entry)) for entry in catalog}
        texts = {entry.id: entry.path.read_text(encoding="utf-8") for entry in catalog}
        links = graph(catalog.current())
        return cls(
            index=index,
            listing=listing,
            texts=texts,
            probe_digests=probe_digests,
            hardware=hardware,
            proofs=proofs_by_entry,
            releases=release_verdicts(roots),
            libraries=library_verdicts(roots),
            triage=load_triage(roots),
            links=links,
            searching=searching,
            questions=FairQueue(searching, 1),
            scanning=ScanPool(index.signatures),
            uploading=asyncio.Semaphore(MOST_UPLOADS),
        )

    @property
    def catalog(self) -> Catalog:
        return self.listing.catalog

    def close(self) -> None:
        self.scanning.close()
        self.index.close()

    async def diagnose(self, streams: Sequence[Stream]) -> Diagnosis:
        """Diagnose logs. Raises `UsageError` for logs that take too long, and the errors of the streams."""
        scan = await self.scanning.scan(streams)
        return await self.questions.run(partial(diagnose, self.index, scan))

    async def answer(self, question: SearchQuestion, verdict_counts: Sequence[VerdictCount]) -> Answer:
        """Answer a question. Raises `UsageError` for a filter that no entry can pass."""
        preferred = preference(verdict_counts, self.digests, question.here)
        return await self.search(question.q, question.limit, question.only, preferred, explain=question.why)

    async def search(
        self,
        text: str,
        limit: int,
        only: Filter | None = None,
        preferred: Preference | None = None,
        *,
        explain: bool = False,
    ) -> Answer:
        return await self.questions.run(
            partial(search, self.index, text, limit, only=only, preference=preferred, explain=explain)
        )

    def on_record(self, entry: Entry) -> dict[str, Any]:
        """The records of an entry: what ran on GPUs, and its verdicts with releases of torch."""
        releases = releases_by_verdict(self.releases.get(entry.id, ()))
        return {"hardware": self.hardware[entry.id] or None, "releases": releases}

    def gap(self, answer: Answer) -> dict[str, Any]:
        """The members of a document that are filled only for a question without an answer."""
        return {**gap(answer, self.triage), "ask": [asdict(question) for question in self.open_questions(answer)]}

    def open_questions(self, answer: Answer) -> tuple[Question, ...]:
        """The questions to ask a person whose query no hit answers."""
        if answer.answered:
            return ()
        return questions([self.catalog.entries[hit.id] for hit in answer.hits if hit.id in self.catalog.entries])

    @property
    def digests(self) -> dict[str, str]:
        return {entry.id: entry.digest for entry in self.catalog}


def served_listing(request: Request) -> Listing:
    """The listing. Raises like `served_content`, but only until the entries are read."""
    return application(request).listing or served_content(request).listing


def served_content(request: Request) -> Content:
    """The content. Raises `IndexUnavailable` while it is being read, and if it could not be read."""
    loading = application(request).loading
    if not loading.done():
        raise IndexUnavailable("the search index is being opened", "try again in a moment")
    if loading.exception():
        raise IndexUnavailable("the search index could not be opened", "the server log says why")
    return loading.result()


async def _content(request: Request) -> Content:  # async, so that it does not run in another thread
    return served_content(request)


async def _database(request: Request) -> Database:
    return application(request).database


ServedContent = Annotated[Content, Depends(_content)]
StoreDatabase = Annotated[Database, Depends(_database)]
