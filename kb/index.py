"""The search index: a disposable cache of the content roots, and the only module that knows Whoosh.

Opening a Whoosh index runs pickles, so it lives in a directory of mode 0700 that we built ourselves and is
never downloaded. It is built into a fresh directory and swapped in by renaming a pointer; a reader holds
one generation. Stale, foreign, torn or unreadable: it is built again, and when the cache cannot be written
at all, in memory. Postings are scored here; `Searcher` and `QueryParser` are not used (decision 0003).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import log
from pathlib import Path
from typing import Any, Self

from whoosh import fields, index
from whoosh.analysis import Token, Tokenizer
from whoosh.filedb.filestore import FileStorage, RamStorage, Storage

from kb import __version__, analysis
from kb.errors import IndexUnavailable
from kb.places import cache_home
from kb.root import Root

FORMAT = "2"  # part of the stamp: raised when what is stored changes its meaning
LOCK_S = 60.0
BODY = "body"
K1, B = 1.2, 0.75  # the usual values: saturation, and how much a long entry is discounted
GLOSSARY = Path(__file__).with_name("glossary.toml")
Notice = Callable[[str], None]


class _Weighted(Tokenizer):  # type: ignore[misc]  # Whoosh is untyped
    """Whoosh's view of `analysis.terms`. A value is parts joined by `_join`, each with its own weight."""

    def __call__(self, value: str, positions: bool = False, chars: bool = False, **options: Any) -> Iterator[Token]:
        token = Token(positions, chars, removestops=True, mode=options.get("mode", ""))
        token.stopped = False
        offset = 0
        for weight, text in _split(value):
            last = 0
            for term in analysis.terms(text):
                token.text, token.boost, token.pos = term.text, weight, offset + term.position
                last = term.position + 1
                yield token
            offset += last + 10  # no phrase reaches over the border of two parts


def join(parts: list[tuple[float, str]]) -> str:
    """Weighted texts as one field value."""
    return "".join(f"\x1f{weight}\x1f{text}" for weight, text in parts)


def _split(value: str) -> Iterator[tuple[float, str]]:
    pieces = value.split("\x1f")[1:]
    return ((float(weight), text) for weight, text in zip(pieces[::2], pieces[1::2], strict=True))


def _schema() -> fields.Schema:
    return fields.Schema(**{BODY: fields.TEXT(analyzer=_Weighted(), phrase=True), "document": fields.STORED})


class Index:
    """One generation, open for reading. Document numbers are only meaningful within it.

    `numbers` maps them to entry ids, withdrawn entries left out: they are kept, but answer nothing.
    """

    def __init__(self, opened: index.FileIndex, side: dict[str, Any]) -> None:
        self._reader = opened.reader()
        self._count = int(self._reader.doc_count_all())
        self._average_length = float(self._reader.field_length(BODY)) / max(1, self._count)
        self.signatures: list[dict[str, str]] = side["signatures"]
        self.surfaces: dict[str, str] = side["surfaces"]
        self.problems: list[str] = side["problems"]
        self.synonyms = {tuple(key): tuple(map(tuple, others)) for key, others in side["synonyms"]}
        self.stamp: str = side["stamp"]
        self.numbers = {number: name for number, name in enumerate(side["ids"]) if name}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def __len__(self) -> int:
        return int(self._reader.doc_count())

    def has(self, term: str) -> bool:
        return (BODY, term) in self._reader

    def idf(self, term: str) -> float:
        """How much a term tells entries apart: 1 when all have it, growing with the log of how few do."""
        return 1 + log(self._count / (int(self._reader.doc_frequency(BODY, term)) + 1))

    def near(self, term: str) -> list[str]:
        """Indexed terms at an edit distance of at most two with the same first letter, best first."""
        for distance in (1, 2) if len(term) > 4 else (1,):
            found = list(self._reader.terms_within(BODY, term, distance, prefix=1))
            if found:
                return sorted(
                    found, key=lambda one: (abs(len(one) - len(term)), -self._reader.doc_frequency(BODY, one))
                )
        return []

    def scores(self, terms: tuple[str, ...]) -> dict[int, float]:
        """BM25 of every document that has the term, or the terms one after the other."""
        if not all(map(self.has, terms)):
            return {}
        idf = sum(map(self.idf, terms))
        weights = self._weights(terms[0]) if len(terms) == 1 else self._phrase_weights(terms)
        return {number: self._bm25(number, weight, idf) for number, weight in weights.items()}

    def _bm25(self, number: int, weight: float, idf: float) -> float:
        """Okapi BM25 (Robertson and Zaragoza 2009), with weights of fields added up before they saturate (BM25F)."""
        length: float = self._reader.doc_field_length(number, BODY) / self._average_length
        return idf * weight * (K1 + 1) / (weight + K1 * (1 - B + B * length))

    def _weights(self, term: str) -> dict[int, float]:
        matcher = self._reader.postings(BODY, term)
        found = {}
        while matcher.is_active():
            found[matcher.id()] = matcher.weight()
            matcher.next()
        return found

    def _phrase_weights(self, terms: tuple[str, ...]) -> dict[int, float]:
        """Documents in which the terms follow each other, weighted as the rarest of them is there."""
        places = [self._positions(term) for term in terms]
        found = {}
        for number in set(places[0]).intersection(*places[1:]):
            ends = places[0][number][1]
            for place in places[1:]:
                ends = {position for position in place[number][1] if ends & {position - 1, position - 2}}
            if ends:
                found[number] = min(weight / len(at) for weight, at in (place[number] for place in places)) * len(ends)
        return found

    def _positions(self, term: str) -> dict[int, tuple[float, set[int]]]:
        """Document to (weight, positions) of a term."""
        matcher = self._reader.postings(BODY, term)
        found = {}
        while matcher.is_active():
            found[matcher.id()] = (matcher.weight(), set(matcher.value_as("positions")))
            matcher.next()
        return found

    def document(self, number: int) -> dict[str, Any]:
        """What was stored for a document."""
        stored: dict[str, Any] = json.loads(self._stored(number))
        return stored

    @lru_cache(256)  # noqa: B019  # an Index lives as long as its process or request handler
    def _stored(self, number: int) -> str:
        return str(self._reader.stored_fields(number)["document"])

    def documents(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((number, self.document(number)) for number in self._reader.all_doc_ids())


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
        opened = Index(index.FileIndex(FileStorage(str(generation), supports_mmap=True)), side)
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
        side = _write(FileStorage(str(generation)), roots, wanted, notice)
        (generation / "side.json").write_text(json.dumps(side))
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
    side = _write(storage, roots, wanted, notice)
    return Index(index.FileIndex(storage), side)


def _write(storage: Storage, roots: tuple[Root, ...], wanted: str, notice: Notice) -> dict[str, Any]:
    """Write every current entry; returns what is kept beside the index."""
    from kb.document import collect  # only a build reads Markdown: a search starts without its parsers

    documents, side = collect(roots, notice)
    writer = storage.create_index(_schema()).writer(limitmb=64)
    try:
        for stored, parts in documents:
            writer.add_document(**{BODY: join(parts), "document": json.dumps(stored, ensure_ascii=False)})
        writer.commit(optimize=True)
    except BaseException:
        writer.cancel()
        raise
    ids = ["" if stored["status"] == "withdrawn" else stored["id"] for stored, _ in documents]
    return {**side, "stamp": wanted, "documents": len(documents), "ids": ids}
