"""What the API serves: the index and the entries as they were when it started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Self

from fastapi import Depends, Request

from kb.content.catalog import Catalog, file_digest, load_catalog
from kb.content.causes import Graph, graph
from kb.content.filters import Filter
from kb.content.gpu_records import Proof, add_standing, proofs, standing
from kb.content.roots import Root
from kb.diagnose.diagnosis import Diagnosis, diagnose
from kb.diagnose.evidence import Scan
from kb.diagnose.scan.signature_matcher import Matcher
from kb.errors import IndexUnavailable
from kb.search.index import Index, open_index
from kb.search.ranking import EVERYTHING, search
from kb.search.results import Answer
from kb.store.database import Database

from ..requests.problems import log
from .scanning import Scanning

MOST_UPLOADS = 8  # forms with a log that are held in memory at the same time


@dataclass(frozen=True, slots=True)
class Listing:
    """The entries, which are there before an index over them is built. `summaries` are by id."""

    catalog: Catalog
    summaries: tuple[dict[str, Any], ...]

    @classmethod
    def load(cls, roots: Sequence[Root]) -> Self:
        found = load_catalog(roots)
        summaries = tuple(entry.summary() for entry in found)
        add_standing(summaries, roots)
        return cls(found, summaries)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Content:
    """One state of the content roots, in memory. A change on disk shows after a restart or a reindex, never half.

    `searching` has one thread, which alone touches the index: the readers of Whoosh share a file cursor, and two
    threads in one searcher get wrong answers or errors. Questions wait in order, so none is passed over.
    """

    index: Index
    listing: Listing
    texts: Mapping[str, str]
    probe_digests: Mapping[str, str]
    hardware: Mapping[str, str]
    proofs: Mapping[str, tuple[Proof, ...]]
    links: Graph
    searching: ThreadPoolExecutor
    scanning: Scanning
    uploading: asyncio.Semaphore

    @classmethod
    def load(cls, roots: Sequence[Root], searching: ThreadPoolExecutor, listing: Listing | None = None) -> Self:
        """Read everything. Raises `KbError`; entries that cannot be used are left out and logged."""
        listing = listing or Listing.load(roots)
        found = listing.catalog
        index = open_index(tuple(roots), log.warning)
        known = proofs(roots)
        hardware = {
            entry.id: standing(found.probe_file(entry), known.get(entry.id, ()), entry.digest) for entry in found
        }
        probe_digests = {entry.id: file_digest(found.probe_file(entry)) for entry in found}
        texts = {entry.id: entry.path.read_text(encoding="utf-8") for entry in found}
        links = graph(found.current())
        return cls(
            index=index,
            listing=listing,
            texts=texts,
            probe_digests=probe_digests,
            hardware=hardware,
            proofs=known,
            links=links,
            searching=searching,
            scanning=Scanning(Matcher(index.signatures)),
            uploading=asyncio.Semaphore(MOST_UPLOADS),
        )

    @property
    def catalog(self) -> Catalog:
        return self.listing.catalog

    def close(self) -> None:
        self.scanning.close()
        with self.index:
            pass

    async def diagnose(self, found: Scan) -> Diagnosis:
        """What a scan means. Raises nothing."""
        return await asyncio.get_running_loop().run_in_executor(self.searching, diagnose, self.index, found)

    async def search(self, text: str, limit: int, only: Filter = EVERYTHING, *, explain: bool = False) -> Answer:
        """No hit is an answer. Raises `UsageError` for a filter that no entry can pass."""
        ask = partial(search, self.index, text, limit, only=only, explain=explain)
        return await asyncio.get_running_loop().run_in_executor(self.searching, ask)

    @property
    def digests(self) -> dict[str, str]:
        return {entry.id: entry.digest for entry in self.catalog}


def listed(request: Request) -> Listing:
    """The entries. Raises what `loaded` does, for a shorter time."""
    found: Listing | None = request.app.state.listing
    return found or loaded(request).listing


def loaded(request: Request) -> Content:
    """The content. Raises `IndexUnavailable` while it is being read, and when it could not be."""
    loading: Future[Content] = request.app.state.loading
    if not loading.done():
        raise IndexUnavailable("the search index is being opened", "ask again in a moment")
    if loading.exception():
        raise IndexUnavailable("the search index could not be opened", "the log of the server says why")
    return loading.result()


def database(request: Request) -> Database:
    found: Database = request.app.state.database
    return found


async def _loaded(request: Request) -> Content:  # not async, it would run in another thread
    return loaded(request)


async def _database(request: Request) -> Database:
    return database(request)


Loaded = Annotated[Content, Depends(_loaded)]
Kept = Annotated[Database, Depends(_database)]
