"""An index of several hundred entries: built in runs and blocks, it answers as one that was read word by word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import generated
import hostile
import pytest

from kb import analysis, catalog, document, index, indexing, postings, search
from kb.index import Index, open_index
from kb.root import Root, built_in
from kb.signature import find

ENTRIES = 300
HOSTILE = hostile.texts((built_in(),))
PHRASES = (("connect", "reset"), ("out", "memori"), ("显存", "存不", "不足"), ("process", "group"))


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Root, ...]:
    return built_in(), generated.generate(tmp_path_factory.mktemp("generated") / "root", ENTRIES)


@pytest.fixture(scope="module")
def large(roots: tuple[Root, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """Built with blocks and runs so small that every term of some use takes several of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("large")))
        patch.setattr(postings, "BLOCK", 16)
        patch.setattr(indexing, "MOST_HELD", 20_000)
        with open_index(roots) as opened:
            yield opened


@pytest.fixture(scope="module")
def texts(roots: tuple[Root, ...]) -> dict[str, list[list[analysis.Term]]]:
    """Entry to the terms of each of its texts."""
    entries = catalog.load(roots)
    ids = entries.entries.keys()
    return {entry.id: [list(analysis.terms(text)) for _, text in document.document(entry, ids)[1]] for entry in entries}


def ids_of(large: Index, *terms: str) -> set[str]:
    return {large.numbers[number] for number in large.scores(terms)}


def test_generated_entries_are_sound_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    one, other = (generated.generate(tmp_path / name, 5) for name in ("one", "other"))
    found = catalog.load([one])
    assert (len(found), found.problems) == (5, ())
    assert [path.read_bytes() for path in one.entry_files()] == [path.read_bytes() for path in other.entry_files()]


def test_every_entry_is_in_the_index(large: Index, roots: tuple[Root, ...]) -> None:
    assert set(large.numbers.values()) == catalog.load(roots).entries.keys()


@pytest.mark.parametrize("term", ["nccl", "timeout", "rank", "训练", "显存", "allgath", "2.13", "deepspe", "zirconium"])
def test_a_term_is_found_in_exactly_the_entries_that_have_it(
    large: Index, texts: dict[str, list[list[analysis.Term]]], term: str
) -> None:
    having = {one for one, parts in texts.items() if any(term == found.text for part in parts for found in part)}
    assert ids_of(large, term) == having


@pytest.mark.parametrize("terms", PHRASES, ids=" ".join)
def test_a_phrase_is_found_in_exactly_the_entries_that_have_it(
    large: Index, texts: dict[str, list[list[analysis.Term]]], terms: tuple[str, ...]
) -> None:
    def has_phrase(part: list[analysis.Term]) -> bool:
        ends = {found.position for found in part if found.text == terms[0]}
        for term in terms[1:]:
            ends = {
                found.position
                for found in part
                if found.text == term and ends & {found.position - 1, found.position - 2}
            }
        return bool(ends)

    having = {one for one, parts in texts.items() if any(map(has_phrase, parts))}
    assert having
    assert ids_of(large, *terms) == having


def test_scores_of_some_documents_are_those_of_all(large: Index) -> None:
    for terms in (("nccl",), *PHRASES):
        every = large.scores(terms)
        some = frozenset(list(large.numbers)[::3])
        assert large.scores(terms, some) == {number: every[number] for number in every if number in some}


def test_leaving_out_what_only_common_words_find_keeps_the_first_answers(
    large: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [entry.meta.title for entry in catalog.load((built_in(),))]
    monkeypatch.setattr(search, "MOST_CANDIDATES", 1 << 30)
    whole = [search.search(large, question, 1).hits[0].id for question in questions]
    monkeypatch.setattr(search, "MOST_CANDIDATES", 60)
    assert [search.search(large, question, 1).hits[0].id for question in questions] == whole


def test_an_index_in_memory_answers_as_the_one_on_disk(roots: tuple[Root, ...], large: Index) -> None:
    with index._build_in_memory(roots, "", lambda _: None) as held:
        for question in ("ALLGATHER timeout save", "保存检查点 超时", "NCLL timout", "connection reset by peer"):
            assert search.search(held, question) == search.search(large, question)


def test_no_signature_that_matches_a_text_is_passed_over(large: Index) -> None:
    for text in (*HOSTILE.values(), *(entry.meta.signatures[0].sample for entry in catalog.load((built_in(),)))):
        matching = [one for one in large.signatures if find(one["pattern"], text)]
        offered = large.signatures_in(text)
        assert all(one in offered for one in matching)


@pytest.mark.parametrize("title", HOSTILE)
def test_whatever_is_asked_gets_an_answer(large: Index, title: str) -> None:
    answer = search.search(large, HOSTILE[title])
    scores = [hit.score for hit in answer.hits]
    assert scores == sorted(scores, reverse=True)
    assert len({hit.id for hit in answer.hits}) == len(scores) <= 10
