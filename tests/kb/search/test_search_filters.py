"""kb.search with filters, with the versions that are installed, and with the reasons of its scores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kb.content.applicability import State
from kb.content.entry import Status
from kb.content.filters import STATUSES, Filter
from kb.content.roots import root_at
from kb.errors import UsageError
from kb.search.index import Index
from kb.search.index_cache import open_index
from kb.search.ranking import search
from tests.support.console import ContentRoot

QUESTION = "the thing broke on the zirconium disk"


@pytest.fixture
def index(content: ContentRoot) -> Iterator[Index]:
    """Four entries that answer the question, of which one is withdrawn."""
    content.entry("plain-thing", has_probe=False)
    ranges = 'applies_to: {torch: ">=2.1,<2.5"}\nfixed_in: {flash-attn: ">=3"}\n'
    _tag(content, "old-torch", "[test, storage, FSDP]", extra=ranges, symptom="The zirconium broke.")
    _tag(content, "new-torch", "[test, storage]", extra='applies_to: {torch: ">=2.5"}\n')
    _tag(content, "withdrawn-thing", "[test, folklore]", status="withdrawn")
    _tag(content, "reported-thing", "[test]", status="reported")
    with open_index((root_at(content.path),)) as opened:
        yield opened


def _tag(content: ContentRoot, entry_id: str, tags: str, *, status: str = "confirmed", **words: str) -> None:
    path = content.entry(entry_id, has_probe=False, **words)
    text = path.read_text().replace("tags: [test]", f"tags: {tags}").replace("status: confirmed", f"status: {status}")
    path.write_text(text)


def ids(index: Index, only: Filter, limit: int = 10) -> set[str]:
    return {hit.id for hit in search(index, QUESTION, limit, only=only).hits}


def test_every_tag_must_be_there(index: Index) -> None:
    assert ids(index, Filter.of(["storage"])) == {"old-torch", "new-torch"}
    assert ids(index, Filter.of(["storage", "fsdp"])) == {"old-torch"}


def test_a_framework_is_a_package_of_a_range_or_a_tag_and_one_is_enough(index: Index) -> None:
    assert ids(index, Filter.of(frameworks=["torch"])) == {"old-torch", "new-torch"}
    assert ids(index, Filter.of(frameworks=["flash_attn"])) == {"old-torch"}
    assert ids(index, Filter.of(frameworks=["FSDP"])) == {"old-torch"}
    assert ids(index, Filter.of(frameworks=["fsdp", "torch"])) == {"old-torch", "new-torch"}


def test_one_status_is_enough(index: Index) -> None:
    assert ids(index, Filter.of(statuses=["reported"])) == {"reported-thing"}
    assert ids(index, Filter.of(statuses=["reported", "confirmed"])) == ids(index, Filter())


def test_filters_of_different_kinds_must_all_hold(index: Index) -> None:
    assert ids(index, Filter.of(["storage"], ["fsdp"], ["confirmed"])) == {"old-torch"}
    assert ids(index, Filter.of(["storage"], statuses=["reported"])) == set()


def test_the_limit_counts_what_passed(index: Index) -> None:
    best = search(index, QUESTION, 1).hits[0].id
    other = next(hit for hit in search(index, QUESTION, 10).hits if hit.status == "reported")
    assert best != other.id
    assert ids(index, Filter.of(statuses=["reported"]), limit=1) == {other.id}


def test_a_filter_changes_no_score(index: Index) -> None:
    whole = {hit.id: hit.score for hit in search(index, QUESTION).hits}
    for hit in search(index, QUESTION, only=Filter.of(["storage"])).hits:
        assert hit.score == whole[hit.id]


@pytest.mark.parametrize(
    ("only", "message", "hint"),
    [
        (Filter.of(["storge"]), "no entry that answers has the tag 'storge'", "nearest: storage"),
        (Filter.of(["test", "storge"]), "tag 'storge'", "nearest: storage"),
        (Filter.of(frameworks=["torch", "pytroch"]), "framework 'pytroch'", "nearest: torch"),
        (Filter.of(["folklore"]), "tag 'folklore'", "kb list"),
        (Filter.of(statuses=["confirmed", "conf"]), "status 'conf'", "confirmed, disputed, reported"),
        (Filter.of(statuses=["withdrawn"]), "status 'withdrawn'", "kb list --status withdrawn"),
    ],
)
def test_what_no_entry_has_is_an_error_with_the_nearest(index: Index, only: Filter, message: str, hint: str) -> None:
    for question in (QUESTION, "nothingfindsthis"):
        with pytest.raises(UsageError) as raised:
            search(index, question, only=only)
        assert message in raised.value.message
        assert hint in raised.value.hint


def test_a_known_status_that_no_entry_has_finds_nothing(index: Index) -> None:
    assert search(index, QUESTION, only=Filter.of(statuses=["disputed"])).hits == ()


def test_statuses_are_those_of_entries_that_answer() -> None:
    assert {*STATUSES, "withdrawn"} == set(Status)


def test_what_applies_comes_first_and_what_does_not_last(index: Index) -> None:
    hits = search(index, QUESTION, installed={"torch": "2.4.1", "flash-attn": "2.5"}).hits
    states = [hit.applicability.state for hit in hits if hit.applicability]
    assert states == [State.APPLIES, State.UNKNOWN, State.UNKNOWN, State.DOES_NOT_APPLY]
    assert hits[0].id == "old-torch"
    assert hits[0].applicability
    assert "torch 2.4.1 is within >=2.1,<2.5" in hits[0].applicability.reason
    assert hits[-1].id == "new-torch"
    assert hits[1].score >= hits[2].score
    assert search(index, QUESTION, 1, installed={"torch": "2.6"}).hits[0].id == "new-torch"


def test_with_nothing_known_the_order_is_that_of_the_scores(index: Index) -> None:
    plain = [hit.id for hit in search(index, QUESTION).hits]
    assert [hit.id for hit in search(index, QUESTION, installed={}).hits] == plain


@pytest.mark.parametrize(
    "question", [QUESTION, "the thing broke: code 9 on a disk", "坏了 the thing 故意弄坏", "thign brok"]
)
def test_the_parts_of_a_score_add_up_to_it(index: Index, question: str) -> None:
    hits = search(index, question, explain=True).hits
    assert hits
    for hit in hits:
        assert hit.why
        assert round(hit.why.score, 3) == hit.score
        assert {concept.word for concept in hit.why.concepts} >= {word for word in hit.matched if word.isascii()}
        assert all(any(concept.word in word for word in hit.matched) for concept in hit.why.concepts)
        assert bool(hit.why.signature) == bool(hit.signature)
        assert 0 <= hit.why.coverage <= 1
        for concept in hit.why.concepts:
            assert concept.score == pytest.approx(concept.bm25 * concept.weight)


def test_the_term_that_won_is_named(index: Index) -> None:
    (factor,) = search(index, "zirconuim", explain=True).hits[0].why.concepts  # type: ignore[union-attr]
    assert (factor.word, factor.term, factor.weight) == ("zirconuim", "zirconium", 0.8)


def test_nobody_who_did_not_ask_is_told_why(index: Index) -> None:
    hit = search(index, QUESTION).hits[0]
    assert hit.why is None
    assert not {"why", "applicability"} & hit.to_json().keys()
    assert "probe" in hit.to_json(), "an entry without a probe says so"


def test_a_signature_without_a_literal_is_searched_for_all_the_same(content: ContentRoot) -> None:
    path = content.entry("shouted", has_probe=False)
    path.write_text(path.read_text().replace("'the thing broke: code \\d+'", "'(?i)the thing broke: code \\d+'"))
    with open_index((root_at(content.path),)) as opened:
        assert search(opened, "THE THING BROKE: CODE 3").hits[0].signature.startswith("(?i)")
