"""An index of many entries: built in runs, it answers as one that was read word by word."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from kb.content.catalog import load_catalog
from kb.content.roots import Root, builtin_root
from kb.patterns.literals import find
from kb.search import document, generation, postings_pool, ranking, scoring, tokenizer
from kb.search.fingerprints import recipe
from kb.search.index import Index
from kb.search.index_cache import open_index
from kb.search.index_writer import write_segment
from kb.search.query import LONGEST_TEXT
from kb.search.segment import Segment
from tests.bench import generated, hostile

REAL, GENERATED = 20, 40
HOSTILE = hostile.texts((builtin_root(),))
PHRASES = (("connect", "reset"), ("out", "memori"), ("显存", "存不", "不足"), ("process", "group"))
QUESTIONS = ("ALLGATHER timeout save", "保存检查点 超时", "NCLL timout", "connection reset by peer")


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Root, ...]:
    """Some built-in entries, and generated ones."""
    home = tmp_path_factory.mktemp("roots")
    built_in = builtin_root()
    real = Root(built_in.name, home / "real", built_in.probes, built_in.verified)
    real.entries.mkdir()
    files = built_in.entry_files()
    for path in files[:: len(files) // REAL][:REAL]:  # from all over the alphabet
        shutil.copy(path, real.entries)
    return real, generated.generate(home / "generated", GENERATED)


@pytest.fixture(scope="module")
def large(roots: tuple[Root, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """Built in runs so small that every term of some use is in several of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("large")))
        patch.setattr(postings_pool, "MOST_HELD", 5000)
        with open_index(roots, force=True) as opened:
            yield opened


@pytest.fixture(scope="module")
def texts(roots: tuple[Root, ...]) -> dict[str, list[list[tokenizer.Term]]]:
    """Entry to the terms of each of its texts."""
    catalog = load_catalog(roots)
    ids = catalog.entries.keys()
    return {
        entry.id: [list(tokenizer.terms(text)) for _, text in document.document(entry, ids)[1]] for entry in catalog
    }


def ids_of(large: Index, *terms: str) -> set[str]:
    return {large.numbers[number] for number in large.scores(terms)}


def test_generated_entries_are_sound_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    first, second = (generated.generate(tmp_path / name, 2) for name in ("first", "second"))
    catalog = load_catalog([first])
    assert (len(catalog), catalog.problems) == (2, ())
    assert [path.read_bytes() for path in first.entry_files()] == [path.read_bytes() for path in second.entry_files()]


def test_every_entry_is_in_the_index(large: Index, roots: tuple[Root, ...]) -> None:
    assert set(large.numbers.values()) == load_catalog(roots).entries.keys()
    assert len(large) == REAL + GENERATED


@pytest.mark.parametrize("term", ["nccl", "timeout", "rank", "训练", "显存", "allgath", "2.13", "deepspe", "zirconium"])
def test_a_term_is_found_in_exactly_the_entries_that_have_it(
    large: Index, texts: dict[str, list[list[tokenizer.Term]]], term: str
) -> None:
    having = {
        entry for entry, parts in texts.items() if any(term == occurrence.text for part in parts for occurrence in part)
    }
    assert ids_of(large, term) == having


@pytest.mark.parametrize("terms", PHRASES, ids=" ".join)
def test_a_phrase_is_found_in_exactly_the_entries_that_have_it(
    large: Index, texts: dict[str, list[list[tokenizer.Term]]], terms: tuple[str, ...]
) -> None:
    def has_phrase(part: list[tokenizer.Term]) -> bool:
        ends = {occurrence.position for occurrence in part if occurrence.text == terms[0]}
        for term in terms[1:]:
            ends = {
                occurrence.position
                for occurrence in part
                if occurrence.text == term and ends & {occurrence.position - 1, occurrence.position - 2}
            }
        return bool(ends)

    having = {entry for entry, parts in texts.items() if any(map(has_phrase, parts))}
    assert having
    assert ids_of(large, *terms) == having


def test_scores_of_some_documents_are_those_of_all(large: Index) -> None:
    for terms in (("nccl",), *PHRASES):
        every = large.scores(terms)
        some = frozenset(list(large.numbers)[::3])
        assert large.scores(terms, some) == {number: every[number] for number in every if number in some}


def test_leaving_out_what_only_common_words_find_keeps_the_first_answers(
    large: Index, roots: tuple[Root, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [entry.meta.title for entry in load_catalog(roots[:1])]
    monkeypatch.setattr(scoring, "MOST_CANDIDATES", 1 << 30)
    whole = [ranking.search(large, question, 1).hits[0].id for question in questions]
    monkeypatch.setattr(scoring, "MOST_CANDIDATES", 10)
    assert [ranking.search(large, question, 1).hits[0].id for question in questions] == whole


def test_an_index_in_memory_answers_as_the_one_on_disk(
    roots: tuple[Root, ...], large: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "BUILT_IN_SEGMENT", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    notices: list[str] = []
    with open_index(roots, notices.append) as opened:
        assert "builds it in memory" in notices[0]
        for question in QUESTIONS:
            assert ranking.search(opened, question) == ranking.search(large, question)


def test_no_signature_that_matches_a_text_is_passed_over(large: Index) -> None:
    samples = (entry.meta.signatures[0].sample for entry in load_catalog((builtin_root(),)))
    for text in (*(text[:LONGEST_TEXT] for text in HOSTILE.values()), *samples):
        matching = [signature for signature in large.signatures if find(signature["pattern"], text)]
        offered = large.signatures_in(text)
        assert all(signature in offered for signature in matching)


@pytest.mark.parametrize("title", HOSTILE)
def test_every_text_gets_an_answer(large: Index, title: str) -> None:
    answer = ranking.search(large, HOSTILE[title])
    scores = [hit.score for hit in answer.hits]
    assert scores == sorted(scores, reverse=True)
    assert len({hit.id for hit in answer.hits}) == len(scores) <= 10


def test_opening_a_segment_does_not_read_all_of_it(roots: tuple[Root, ...], tmp_path: Path) -> None:
    write_segment(tmp_path, [(path, root.name) for root in roots for path in root.entry_files()], frozenset())
    (file,) = tmp_path.glob("*.seg")
    tracemalloc.start()
    try:
        with Segment.open(tmp_path, recipe()) as segment:
            assert segment.frequency("nccl") > 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < file.stat().st_size / 3
