"""An index of several hundred entries: built in runs and blocks, it answers as one that was read word by word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kb.content.catalog import load_catalog
from kb.content.roots import Root, builtin_root
from kb.patterns.literals import find
from kb.search import document, index, index_writer, ranking, tokenizer, whoosh_codec
from kb.search.index import Index, open_index
from tests.bench import generated, hostile

ENTRIES = 300
HOSTILE = hostile.texts((builtin_root(),))
PHRASES = (("connect", "reset"), ("out", "memori"), ("显存", "存不", "不足"), ("process", "group"))


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Root, ...]:
    return builtin_root(), generated.generate(tmp_path_factory.mktemp("generated") / "root", ENTRIES)


@pytest.fixture(scope="module")
def large(roots: tuple[Root, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """Built with blocks and runs so small that every term of some use takes several of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("large")))
        patch.setattr(whoosh_codec, "BLOCK", 16)
        patch.setattr(index_writer, "MOST_HELD", 20_000)
        with open_index(roots) as opened:
            yield opened


@pytest.fixture(scope="module")
def texts(roots: tuple[Root, ...]) -> dict[str, list[list[tokenizer.Term]]]:
    """Entry to the terms of each of its texts."""
    entries = load_catalog(roots)
    ids = entries.entries.keys()
    return {
        entry.id: [list(tokenizer.terms(text)) for _, text in document.document(entry, ids)[1]] for entry in entries
    }


def ids_of(large: Index, *terms: str) -> set[str]:
    return {large.numbers[number] for number in large.scores(terms)}


def test_generated_entries_are_sound_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    one, other = (generated.generate(tmp_path / name, 5) for name in ("one", "other"))
    found = load_catalog([one])
    assert (len(found), found.problems) == (5, ())
    assert [path.read_bytes() for path in one.entry_files()] == [path.read_bytes() for path in other.entry_files()]


def test_every_entry_is_in_the_index(large: Index, roots: tuple[Root, ...]) -> None:
    assert set(large.numbers.values()) == load_catalog(roots).entries.keys()


@pytest.mark.parametrize("term", ["nccl", "timeout", "rank", "训练", "显存", "allgath", "2.13", "deepspe", "zirconium"])
def test_a_term_is_found_in_exactly_the_entries_that_have_it(
    large: Index, texts: dict[str, list[list[tokenizer.Term]]], term: str
) -> None:
    having = {one for one, parts in texts.items() if any(term == found.text for part in parts for found in part)}
    assert ids_of(large, term) == having


@pytest.mark.parametrize("terms", PHRASES, ids=" ".join)
def test_a_phrase_is_found_in_exactly_the_entries_that_have_it(
    large: Index, texts: dict[str, list[list[tokenizer.Term]]], terms: tuple[str, ...]
) -> None:
    def has_phrase(part: list[tokenizer.Term]) -> bool:
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
    questions = [entry.meta.title for entry in load_catalog((builtin_root(),))]
    monkeypatch.setattr(ranking, "MOST_CANDIDATES", 1 << 30)
    whole = [ranking.search(large, question, 1).hits[0].id for question in questions]
    monkeypatch.setattr(ranking, "MOST_CANDIDATES", 60)
    assert [ranking.search(large, question, 1).hits[0].id for question in questions] == whole


def test_an_index_in_memory_answers_as_the_one_on_disk(roots: tuple[Root, ...], large: Index) -> None:
    with index._build_in_memory(roots, "", lambda _: None) as held:
        for question in ("ALLGATHER timeout save", "保存检查点 超时", "NCLL timout", "connection reset by peer"):
            assert ranking.search(held, question) == ranking.search(large, question)


def test_no_signature_that_matches_a_text_is_passed_over(large: Index) -> None:
    for text in (*HOSTILE.values(), *(entry.meta.signatures[0].sample for entry in load_catalog((builtin_root(),)))):
        matching = [signature for signature in large.signatures if find(signature["pattern"], text)]
        offered = large.signatures_in(text)
        assert all(one in offered for one in matching)


@pytest.mark.parametrize("title", HOSTILE)
def test_whatever_is_asked_gets_an_answer(large: Index, title: str) -> None:
    answer = ranking.search(large, HOSTILE[title])
    scores = [hit.score for hit in answer.hits]
    assert scores == sorted(scores, reverse=True)
    assert len({hit.id for hit in answer.hits}) == len(scores) <= 10
