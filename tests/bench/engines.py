"""The engines that `search_engines.py` compares: one class each, with `build`, `open` and `search`.

FTS5 reads the entry files unchanged. tantivy and bm25s get the terms that kb makes of an entry and of a question,
without its weights, synonyms and corrections, so that they compare ranking and speed, not analysis.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from kb.content.roots import Root, builtin_root, root_at
from kb.search.tokenizer import terms

TITLES = {"kb": "kb", "fts5": "SQLite FTS5", "tantivy": "tantivy", "bm25s": "bm25s"}
LIMIT = 10
Hit = tuple[str, float]  # id and score of an entry; for kb, the probability that the first hit is an answer


class Engine(ABC):
    """An index in its own directory below `place`, which also contains the roots and terms of the entries."""

    name: str

    def __init__(self, place: Path) -> None:
        self.place = place
        self.home = place / self.name / "index"
        self.home.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def build(self) -> None: ...

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def search(self, text: str) -> list[Hit]:
        """The best entries, best first."""


def roots(place: Path) -> tuple[Root, ...]:
    return builtin_root(), *(root_at(Path(path)) for path in json.loads((place / "roots.json").read_text()))


def write_terms(place: Path) -> None:
    """Write id and terms of each entry on a line, for engines without analysis for two languages."""
    from kb.content.catalog import load_catalog
    from kb.search.document import document

    catalog = load_catalog(roots(place))
    with (place / "terms.txt").open("w", encoding="utf-8") as file:
        for entry in catalog:
            _, parts = document(entry, catalog.entries.keys())
            words = (term.text for _, text in parts for term in terms(text))
            file.write(f"{entry.id}\t{' '.join(words)}\n")


def read_terms(place: Path) -> list[tuple[str, str]]:
    lines = (place / "terms.txt").read_text(encoding="utf-8").split("\n")
    return [(entry_id, words) for entry_id, _, words in (line.partition("\t") for line in lines) if entry_id]


def query_terms(text: str) -> list[str]:
    """The terms of a question, at most as many as all engines accept."""
    return list(dict.fromkeys(term.text for term in terms(text)))[:1000]


class Kb(Engine):
    name = "kb"

    def build(self) -> None:
        self.open()

    def open(self) -> None:
        from kb.search.index_cache import open_index

        os.environ["XDG_CACHE_HOME"] = str(self.home)
        self._index = open_index(roots(self.place))

    def search(self, text: str) -> list[Hit]:
        from kb.search.ranking import search

        answer = search(self._index, text, LIMIT)
        return [(hit.id, answer.probability) for hit in answer.hits]


class Fts5(Engine):
    """What a user would have without kb: words for English, trigrams for Chinese, ranked by bm25."""

    name = "fts5"

    def open(self) -> None:
        self._database = sqlite3.connect(self.home / "entries.db")

    def build(self) -> None:
        self.open()
        entries = [
            (path.stem, path.read_text(encoding="utf-8")) for root in roots(self.place) for path in root.entry_files()
        ]
        for table, tokenizer in (("words", "porter unicode61"), ("trigrams", "trigram")):
            self._database.execute(
                f"CREATE VIRTUAL TABLE {table} USING fts5(id UNINDEXED, text, tokenize='{tokenizer}')"
            )
            self._database.executemany(f"INSERT INTO {table} VALUES (?, ?)", entries)
        self._database.commit()

    def search(self, text: str) -> list[Hit]:
        is_chinese = re.search(r"[\u4e00-\u9fff]", text) is not None
        words = re.findall(r"[\u4e00-\u9fff]{3,}|[A-Za-z0-9_]{2,}", text)[:64]
        if is_chinese:
            words = [word[at : at + 3] for word in words for at in range(max(1, len(word) - 2))]
        match = " OR ".join(f'"{word}"' for word in dict.fromkeys(words[:1000]))
        table = "trigrams" if is_chinese else "words"
        query = (
            f"SELECT id, -bm25({table}) AS score FROM {table} WHERE {table} MATCH ? ORDER BY score DESC LIMIT {LIMIT}"
        )
        return list(self._database.execute(query, (match,))) if match else []


class Tantivy(Engine):
    name = "tantivy"

    def _schema(self) -> Any:
        import tantivy

        builder = tantivy.SchemaBuilder()
        builder.add_text_field("id", stored=True, tokenizer_name="raw")
        builder.add_text_field("body", tokenizer_name="whitespace")
        return builder.build()

    def build(self) -> None:
        import tantivy

        writer = tantivy.Index(self._schema(), path=str(self.home)).writer(heap_size=100_000_000, num_threads=1)
        for entry_id, words in read_terms(self.place):
            writer.add_document(tantivy.Document(id=entry_id, body=words))
        writer.commit()
        writer.wait_merging_threads()

    def open(self) -> None:
        import tantivy

        self._opened = tantivy.Index.open(str(self.home))
        self._searcher = self._opened.searcher()

    def search(self, text: str) -> list[Hit]:
        from tantivy import Occur, Query

        words = [(Occur.Should, Query.term_query(self._opened.schema, "body", term)) for term in query_terms(text)]
        hits = self._searcher.search(Query.boolean_query(words), LIMIT).hits if words else []
        return [(self._searcher.doc(address)["id"][0], score) for score, address in hits]


class Bm25s(Engine):
    name = "bm25s"

    def build(self) -> None:
        import bm25s

        entries = read_terms(self.place)
        retriever = bm25s.BM25()
        retriever.index([words.split(" ") for _, words in entries], show_progress=False)
        retriever.save(self.home)
        (self.home / "ids.json").write_text(json.dumps([entry_id for entry_id, _ in entries]))

    def open(self) -> None:
        import bm25s

        self._retriever = bm25s.BM25.load(self.home)
        self._ids = json.loads((self.home / "ids.json").read_text())

    def search(self, text: str) -> list[Hit]:
        words = [term for term in query_terms(text) if term in self._retriever.vocab_dict]
        if not words:
            return []
        numbers, scores = self._retriever.retrieve([words], k=LIMIT, show_progress=False)
        return [(self._ids[number], float(score)) for number, score in zip(numbers[0], scores[0], strict=True)]


ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (Kb, Fts5, Tantivy, Bm25s)}
