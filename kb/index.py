"""The search index: a disposable cache of the content roots, and the only module that knows Whoosh.

Opening a Whoosh index runs pickles, so it lives in a directory of mode 0700 that we built ourselves and is
never downloaded. It is built into a fresh directory and swapped in by renaming a pointer; a reader holds
one generation. Stale, foreign, torn or unreadable: it is built again, and when the cache cannot be written
at all, in memory. Postings are scored here; `Searcher` and `QueryParser` are not used (decision 0003). They are
read block by block: a call for each posting, as matchers offer it, is what made ten thousand entries slow.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import io
import json
import marshal
import os
import stat
import time
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from heapq import merge, nlargest
from itertools import accumulate, groupby
from math import log
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from whoosh import fields, index, writing
from whoosh.codec import whoosh3
from whoosh.filedb.filestore import FileStorage, RamStorage, Storage

from kb import __version__, analysis
from kb.errors import IndexUnavailable
from kb.places import cache_home
from kb.root import Root

FORMAT = "13"  # part of the stamp: raised when what is stored changes its meaning
LOCK_S = 60.0
BODY = "body"
GRAM = 5  # characters
BLOCK = 512  # postings that Whoosh keeps, and reads, together
MOST_HELD = 1 << 20  # postings in memory during a build: about 100 MB
FACETS = ("tags", "frameworks", "status", "applies_to", "fixed_in")
K1, B = 8.0, 0.75  # saturation, late because one headline weighs 3; how much a long entry is discounted
GLOSSARY = Path(__file__).with_name("glossary.toml")
Notice = Callable[[str], None]
Side = dict[str, Any]
_Term = tuple["array[int]", "array[float]", list[bytes]]  # its postings: documents, weights, places


class _Postings(NamedTuple):
    """Documents of a term or phrase in ascending order, the weight it has in each, and where a term stands there.

    The places of document `at` are the 32-bit numbers from byte `starts[at]` to byte `starts[at + 1]`.
    """

    numbers: array[int]
    weights: array[float]
    starts: array[int]
    places: bytes

    def places_in(self, number: int) -> tuple[float, array[int]]:
        """(weight, places) in a document that has the term."""
        at = bisect_left(self.numbers, number)
        return self.weights[at], array("I", self.places[self.starts[at] : self.starts[at + 1]])


class _Body(fields.TEXT):  # type: ignore[misc]  # Whoosh is untyped
    """Whoosh's view of `analysis.terms`. A value is a list of (weight, text); a place is four bytes, no pickle."""

    def index(self, value: list[tuple[float, str]], **_: object) -> Iterator[tuple[bytes, int, float, bytes]]:
        """(term, how often, weights added up, places) of each term of a document."""
        places: dict[str, list[int]] = defaultdict(list)
        weights: dict[str, float] = defaultdict(float)
        offset = 0
        for weight, text in value:
            last = 0
            for term, position, *_rest in analysis.terms(text):
                places[term].append(offset + position)
                weights[term] += weight
                last = position + 1
            offset += last + 10  # no phrase reaches over the border of two parts
        for term, at in places.items():
            yield term.encode(), len(at), weights[term], array("I", at).tobytes()


class _Pool:
    """Postings on their way into the index, by term. Whoosh's own pool pickles and compares each of them twice.

    Every `MOST_HELD` they go to a temporary file, sorted by term; `iter_postings` merges those.
    """

    def __init__(self) -> None:
        self._terms: dict[bytes, _Term] = {}
        self._held = 0
        self._runs: list[IO[bytes]] = []

    def add(self, posting: tuple[str, bytes, int, float, bytes]) -> None:
        _, term, number, weight, places = posting
        found = self._terms.get(term)
        if found is None:
            found = self._terms[term] = (array("I"), array("f"), [])
        found[0].append(number)
        found[1].append(weight)
        found[2].append(places)
        self._held += 1
        if self._held >= MOST_HELD:
            self._spill()

    def iter_postings(self) -> Iterator[tuple[bytes, _Term]]:
        """Terms in order, each with all of its postings, in the order of the documents."""
        held = ((term, self._terms.pop(term)) for term in sorted(self._terms))
        merged = merge(*map(_read_run, self._runs), held, key=itemgetter(0))
        for term, parts in groupby(merged, key=itemgetter(0)):
            (_, (numbers, weights, places)), *others = parts
            for _, more in others:
                numbers.extend(more[0])
                weights.extend(more[1])
                places.extend(more[2])
            yield term, (numbers, weights, places)

    def cleanup(self) -> None:
        for file in self._runs:
            file.close()

    def _spill(self) -> None:
        import tempfile

        file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by cleanup
        self._runs.append(file)
        for term in sorted(self._terms):
            numbers, weights, places = self._terms[term]
            marshal.dump((term, numbers.tobytes(), weights.tobytes(), places), file)
        file.seek(0)
        self._terms, self._held = {}, 0


def _read_run(file: IO[bytes]) -> Iterator[tuple[bytes, _Term]]:
    with suppress(EOFError):
        while True:
            term, numbers, weights, places = marshal.load(file)  # noqa: S302  # we wrote it a moment ago
            yield term, (array("I", numbers), array("f", weights), places)


class _FieldWriter(whoosh3.W3FieldWriter):  # type: ignore[misc]
    """Writes the postings of a term as blocks: weights and places as one piece of bytes, quick to read.

    The attributes of its writer are private; 2.7.4 is pinned exactly.
    """

    def add_postings(self, schema: fields.Schema, _: object, terms: Iterable[tuple[bytes, _Term]]) -> None:
        self.start_field(BODY, schema[BODY])
        for term, (numbers, weights, places) in terms:
            self.start_term(term)
            self._postwriter._compression = 3 if len(numbers) > 8 else 0  # most terms are rare, and not worth its time
            for at in range(0, len(numbers), BLOCK):
                if at:
                    self._postwriter._write_block()
                some = places[at : at + BLOCK]
                sizes = array("I", map(len, some))
                self._postwriter._ids = numbers[at : at + BLOCK]
                self._postwriter._weights = array("f", [1.0]) * len(some)
                self._postwriter._values = [weights[at : at + BLOCK].tobytes() + sizes.tobytes() + b"".join(some)]
            self.finish_term()
        self.finish_field()


class _Codec(whoosh3.W3Codec):  # type: ignore[misc]
    length_stats = False  # per block, for scorers that we do not use

    def field_writer(self, storage: Storage, segment: object) -> _FieldWriter:
        return _FieldWriter(self, storage, segment)


def _schema() -> fields.Schema:
    return fields.Schema(**{BODY: _Body(), "document": fields.STORED})


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
    def _postings(self, term: str) -> _Postings:
        """Kept for the next question: the common terms, whose lists are the long ones, come again.

        Read by block, from attributes of the matcher that have no public names; 2.7.4 is pinned exactly.
        """
        numbers, weights, sizes, places = array("I"), array("f"), array("I"), bytearray()
        matcher = self._reader.postings(BODY, term)
        while matcher.is_active():
            matcher._read_data()
            steps, _, (data,) = matcher._data
            end = len(steps) * weights.itemsize
            numbers.extend(accumulate(steps))
            weights.frombytes(data[:end])
            sizes.frombytes(data[end : 2 * end])
            places += data[2 * end :]
            matcher._next_block()
        return _Postings(numbers, weights, array("I", accumulate(sizes, initial=0)), bytes(places))

    @lru_cache(256)  # noqa: B019
    def _phrase(self, terms: tuple[str, ...]) -> list[tuple[int, float]]:
        return self._phrase_among(terms, frozenset(self._postings(terms[0]).numbers))

    def _phrase_among(self, terms: tuple[str, ...], among: frozenset[int]) -> list[tuple[int, float]]:
        """Documents in which the terms follow each other, weighted as the rarest of them is there."""
        postings = [self._postings(term) for term in terms]
        shared = among
        for one in sorted(postings, key=lambda one: len(one.numbers)):
            shared = shared.intersection(one.numbers)
        found = []
        for number in sorted(shared):
            held = [one.places_in(number) for one in postings]
            ends = _adjacent([places for _, places in held])
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


def _adjacent(places: list[array[int]]) -> int:
    """How often terms with these places follow each other, with at most one word between two of them."""
    ends = set(places[0])
    for later in places[1:]:
        ends = {place for place in later if place - 1 in ends or place - 2 in ends}
    return len(ends)


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

    generation = Path(tempfile.mkdtemp(prefix="generation-", dir=directory))
    try:
        side, later = _write(FileStorage(str(generation)), roots, wanted, notice)
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
    storage = RamStorage()
    side, later = _write(storage, roots, wanted, notice)
    return Index(index.FileIndex(storage), side, io.BytesIO(json.dumps(later).encode()))


def _write(storage: Storage, roots: tuple[Root, ...], wanted: str, notice: Notice) -> tuple[Side, Side]:
    """Write every current entry; returns what is kept beside the index: for any search, and for some."""
    from kb import document  # only a build reads Markdown: a search starts without its parsers

    ids: list[str] = []
    facets: list[dict[str, Any]] = []
    words: Counter[str] = Counter()
    with _rare_garbage_collection():
        documents, side = document.collect(roots, notice)
        with _writing(storage) as writer:
            for stored, parts in documents:
                writer.add_document(**{BODY: parts, "document": json.dumps(stored, ensure_ascii=False)})
                ids.append("" if stored["status"] == "withdrawn" else stored["id"])
                facets.append({name: stored[name] for name in FACETS})
                words.update(document.plain_words(parts))
    grams = _grams([one["literals"] for one in side["signatures"]])
    later = {"surfaces": document.surfaces(words), "facets": facets}
    return {**side, "stamp": wanted, "documents": len(ids), "ids": ids, "grams": grams}, later


@contextmanager
def _writing(storage: Storage) -> Iterator[writing.SegmentWriter]:
    """A writer of one segment, committed at the end, or on any error given up."""
    writer = storage.create_index(_schema()).writer(codec=_Codec())
    writer.pool = _Pool()
    try:
        yield writer
        writer.commit(optimize=True)
    except BaseException:
        writer.cancel()
        raise


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """A build makes millions of objects and few circles; looking for those takes a quarter of its time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _grams(literals: list[list[str]]) -> dict[str, list[int]]:
    """Some characters of each literal, those that the fewest literals have, to the numbers of their signatures."""
    counts = Counter(gram for texts in literals for text in texts for gram in set(_grams_of(text)))
    table: dict[str, list[int]] = {}
    for number, texts in enumerate(literals):
        for gram in {min(_grams_of(text), key=lambda one: counts[one]) for text in texts} or {""}:
            table.setdefault(gram, []).append(number)
    return table


def _grams_of(text: str) -> list[str]:
    """Its pieces of `GRAM` characters; the whole of a shorter text."""
    return [text[at : at + GRAM] for at in range(max(1, len(text) - GRAM + 1))]
