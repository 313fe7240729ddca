"""The search index: a disposable cache of the content roots.

Opening a Whoosh index runs pickles, so it lives in a directory of mode 0700 that we built ourselves and is
never downloaded. It is built into a fresh directory and swapped in by renaming a pointer; a reader holds
one generation. Stale, foreign, torn or unreadable: it is built again, and when the cache cannot be written
at all, in memory. Only this module, `kb.search.whoosh_codec` and
`kb.search.index_writer` know Whoosh; postings are scored here, its `Searcher` and `QueryParser` are not used
(decision 0003).
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import stat
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from heapq import nlargest
from math import log
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, Self

from whoosh import index
from whoosh.filedb.filestore import FileStorage, RamStorage

from kb import __version__
from kb.content.roots import Root
from kb.errors import IndexUnavailable
from kb.paths import cache_home
from kb.search.whoosh_codec import BODY, Postings, adjacent, read

FORMAT = "14"  # part of the stamp: raised when what is stored changes its meaning
LOCK_S = 60.0
K1, B = 8.0, 0.75  # saturation, late because one headline weighs 3; how much a long entry is discounted
GLOSSARY = Path(__file__).with_name("synonyms.toml")
Notice = Callable[[str], None]
Side = dict[str, Any]


class Index:
    """One generation, open for reading. Document numbers are only meaningful within it.

    `numbers` maps them to entry ids, withdrawn entries left out: they are kept, but answer nothing.
    """

    def __init__(self, opened: index.FileIndex, side: Side, later: IO[bytes]) -> None:
        self._reader = opened.reader()
        self._count = int(self._reader.doc_count_all())
        self._norms = self._length_norms()
        self.signatures: list[dict[str, Any]] = side["signatures"]
        self.causes: list[tuple[str, str]] = [(cause, effect) for cause, effect in side["causes"]]
        self.masks: list[tuple[str, str]] = [(seen, hidden) for seen, hidden in side["masks"]]
        self._later = later
        self._grams: dict[str, list[int]] = side["grams"]
        self._gram_lengths = set(map(len, self._grams))
        self.problems: list[str] = side["problems"]
        self.synonyms = {tuple(key): tuple(map(tuple, others)) for key, others in side["synonyms"]}
        self.stamp: str = side["stamp"]
        self.numbers = {number: name for number, name in enumerate(side["ids"]) if name}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self._later.close()

    def __len__(self) -> int:
        return int(self._reader.doc_count())

    def _length_norms(self) -> list[float]:
        """Per document what its length adds to the saturation of a weight: K1 for an entry of average length."""
        average = float(self._reader.field_length(BODY)) / max(1, self._count)
        lengths = (self._reader.doc_field_length(number, BODY, 0) for number in range(self._count))
        return [K1 * (1 - B + B * length / average) for length in lengths]

    def has(self, term: str) -> bool:
        return self._frequency(term) > 0

    def idf(self, term: str) -> float:
        """How much a term tells entries apart: 1 when all have it, growing with the log of how few do."""
        return 1 + log(self._count / (self._frequency(term) + 1))

    def scores(self, terms: tuple[str, ...], among: frozenset[int] | None = None) -> dict[int, float]:
        """BM25 of every document that has the term, or the terms one after the other; of those `among` them only.

        Okapi BM25 (Robertson and Zaragoza 2009), with weights of fields added up before they saturate (BM25F).
        """
        if not all(map(self.has, terms)):
            return {}
        found: Iterable[tuple[int, float]]
        if len(terms) > 1:
            found = self._phrase(terms) if among is None else self._phrase_among(terms, among)
        elif among is None:
            found = zip(*self._postings(terms[0])[:2], strict=True)
        else:
            numbers, weights, *_ = self._postings(terms[0])
            found = ((number, weights[bisect_left(numbers, number)]) for number in among.intersection(numbers))
        norms = self._norms
        factor = sum(map(self.idf, terms)) * (K1 + 1)
        return {number: factor * weight / (weight + norms[number]) for number, weight in found}

    @lru_cache(4096)  # noqa: B019
    def champions(self, terms: tuple[str, ...], count: int) -> Mapping[int, float]:
        """The highest of `scores`."""
        found = self.scores(terms)
        return dict(nlargest(count, found.items(), itemgetter(1))) if len(found) > count else found

    @lru_cache(1 << 14)  # noqa: B019  # an Index lives as long as its process or request handler
    def _frequency(self, term: str) -> int:
        return int(self._reader.doc_frequency(BODY, term))

    @lru_cache(2048)  # noqa: B019
    def _postings(self, term: str) -> Postings:
        """Kept for the next question: the common terms, whose lists are the long ones, come again."""
        return read(self._reader, term)

    @lru_cache(256)  # noqa: B019
    def _phrase(self, terms: tuple[str, ...]) -> list[tuple[int, float]]:
        return self._phrase_among(terms, frozenset(self._postings(terms[0]).numbers))

    def _phrase_among(self, terms: tuple[str, ...], among: frozenset[int]) -> list[tuple[int, float]]:
        """Documents in which the terms follow each other, weighted as the rarest of them is there."""
        postings = [self._postings(term) for term in terms]
        shared = among
        for posting in sorted(postings, key=lambda posting: len(posting.numbers)):
            shared = shared.intersection(posting.numbers)
        found = []
        for number in sorted(shared):
            held = [posting.places_in(number) for posting in postings]
            ends = adjacent([places for _, places in held])
            if ends:
                found.append((number, min(weight / len(places) for weight, places in held) * ends))
        return found

    def document(self, number: int) -> dict[str, Any]:
        """What was stored for a document."""
        stored: dict[str, Any] = json.loads(self._stored(number))
        return stored

    @lru_cache(256)  # noqa: B019
    def _stored(self, number: int) -> str:
        return str(self._reader.stored_fields(number)["document"])

    @cached_property
    def facets(self) -> dict[int, dict[str, Any]]:
        """What entries are filtered by, of those that answer."""
        return {number: facets for number, facets in enumerate(self._side["facets"]) if number in self.numbers}

    @cached_property
    def surfaces(self) -> dict[str, list[str]]:
        """Plain English terms, each with its usual spellings."""
        found: dict[str, list[str]] = self._side["surfaces"]
        return found

    @cached_property
    def _side(self) -> Side:
        """Tables that only some searches read."""
        found: Side = json.load(self._later)
        return found

    def signatures_in(self, text: str) -> list[dict[str, Any]]:
        """The signatures that may match a text: it has one of their literals, or they have none."""
        pieces = {text[at : at + length] for length in self._gram_lengths for at in range(len(text))}
        numbers = sorted({number for piece in pieces & self._grams.keys() for number in self._grams[piece]})
        return [one for one in map(self.signatures.__getitem__, numbers) if _may_match(one["literals"], text)]

    def documents(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((number, self.document(number)) for number in self._reader.all_doc_ids())


def _may_match(literals: list[str], text: str) -> bool:
    return not literals or any(literal in text for literal in literals)


def home(roots: tuple[Root, ...]) -> Path:
    """Where the index of these roots is cached."""
    names = "\n".join(str(root.entries) for root in roots)
    return cache_home() / "index" / hashlib.sha256(names.encode()).hexdigest()[:16]


def stamp(roots: tuple[Root, ...]) -> str:
    """Changes whenever an entry file, the glossary, kb or the format of the index does."""
    state = hashlib.sha256(f"{FORMAT} {__version__} {GLOSSARY.stat().st_mtime_ns}".encode())
    for root in roots:
        for path in root.entry_files():
            found = path.stat()
            state.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode())
    return state.hexdigest()


def open_index(roots: tuple[Root, ...], notice: Notice = lambda _: None, *, force: bool = False) -> Index:
    """The index of these roots, built first when that is needed. `notice` hears what takes long or went wrong."""
    wanted, directory = stamp(roots), home(roots)
    if not force:
        found = _open(directory, wanted)
        if found:
            return found
    try:
        _prepare(directory)
        with _locked(directory):
            found = None if force else _open(directory, wanted)  # somebody else built it while we waited
            return found or _build_into(directory, roots, wanted, notice)
    except OSError as error:
        notice(f"the index cannot be kept in {directory} ({error.strerror or error}); this search builds it in memory")
        return _build_in_memory(roots, wanted, notice)


def open_if_fresh(roots: tuple[Root, ...]) -> Index | None:
    """The cached index when it can be used as it is; builds nothing."""
    return _open(home(roots), stamp(roots))


def _open(directory: Path, wanted: str) -> Index | None:
    """The current generation, or None when there is none, it is stale, it is not ours, or it cannot be read."""
    try:
        if not _is_ours(directory):
            return None
        pointer = json.loads((directory / "current.json").read_text())
        if pointer["stamp"] != wanted:
            return None
        generation = directory / Path(pointer["generation"]).name
        side = json.loads((generation / "side.json").read_text())
        storage = FileStorage(str(generation), supports_mmap=True)
        # Opened now and read when it is wanted: by then another process may have put a new generation in its place.
        opened = Index(index.FileIndex(storage), side, (generation / "later.json").open("rb"))
        if len(opened) != side["documents"]:
            return None
        for number in range(min(len(opened), 1)):  # read one: a torn segment shows only then
            opened.document(number)
        return opened
    except Exception:  # Whoosh raises anything on a torn index: EOFError, zlib.error, TypeError, struct.error ...
        return None


def _is_ours(directory: Path) -> bool:
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _prepare(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(directory):
        raise PermissionError(0, "somebody else can write there")
    directory.chmod(0o700)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One builder at a time; the lock goes with the process. Raises `IndexUnavailable` after `LOCK_S`."""
    with (directory / "lock").open("w") as file:
        end = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise IndexUnavailable(
                        f"another process has been building the index in {directory} for a minute",
                        "wait for it, or end it: the lock goes with the process",
                    ) from None
                time.sleep(0.05)
        yield


def _build_into(directory: Path, roots: tuple[Root, ...], wanted: str, notice: Notice) -> Index:
    import shutil
    import tempfile

    from kb.search.index_writer import write

    generation = Path(tempfile.mkdtemp(prefix="generation-", dir=directory))
    try:
        side, later = write(FileStorage(str(generation)), roots, wanted, notice)
        (generation / "side.json").write_text(json.dumps(side))
        (generation / "later.json").write_text(json.dumps(later))
        pointer = directory / "current.json.part"
        pointer.write_text(json.dumps({"stamp": wanted, "generation": generation.name}))
        pointer.replace(directory / "current.json")
    except BaseException:
        shutil.rmtree(generation, ignore_errors=True)
        raise
    for old in directory.glob("generation-*"):  # a reader that still holds one keeps its files open
        if old != generation:
            shutil.rmtree(old, ignore_errors=True)
    opened = _open(directory, wanted)
    if opened is None:
        raise IndexUnavailable(f"the index just built in {directory} cannot be read", "`kb doctor` says more")
    return opened


def _build_in_memory(roots: tuple[Root, ...], wanted: str, notice: Notice) -> Index:
    from kb.search.index_writer import write

    storage = RamStorage()
    side, later = write(storage, roots, wanted, notice)
    return Index(index.FileIndex(storage), side, io.BytesIO(json.dumps(later).encode()))
