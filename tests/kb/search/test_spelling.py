"""kb.search.spelling: words that nobody wrote that way, in questions of two languages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb.content.roots import builtin_root
from kb.search.index import Index
from kb.search.index_cache import open_index
from kb.search.ranking import search
from kb.search.spelling import A_QUESTION, distance


@pytest.fixture
def index() -> Iterator[Index]:
    with open_index((builtin_root(),)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("ncll timout", "nccl timeout"),
        ("dataloder worekr kiled", "dataloader worker killed"),
        ("Timout, then TIMOUT", "timeout, then timeout"),
        ("allgahter watchdgo", "allgather watchdog"),
        ("NCLL超时 chekpoint保存", "nccl超时 checkpoint保存"),
        ("保存chekpoint时 timout 卡住", "保存checkpoint时 timeout 卡住"),
        ("toch.distributed bakend", "torch.distributed backend"),
        ("NCCL_TIMOUT at all-gahter", "NCCL_timeout at all-gather"),
        ("timout of my_timout_hook", "timeout of my_timeout_hook"),
    ],
)
def test_each_misspelt_word_is_respelled_and_the_rest_stays(index: Index, asked: str, meant: str) -> None:
    assert search(index, asked).did_you_mean == meant


def test_a_misspelt_question_finds_what_was_meant(index: Index) -> None:
    assert search(index, "forkd tokneizers deadlokc").hits[0].id == "tokenizers-fork-deadlock"


@pytest.mark.parametrize(
    "asked", ["NCCL timeout", "保存检查点 超时", "zzqqxx", "Q", "-9", "0xdeadbeef", "…", "saveing"]
)
def test_nothing_is_asked_back_when_nothing_is_near(index: Index, asked: str) -> None:
    assert search(index, asked).did_you_mean == ""


def test_nothing_is_asked_back_about_another_subject(index: Index) -> None:
    """ "cook rice" has its nearest spelling in "cool roce"."""
    assert search(index, "cook rice").did_you_mean == ""


def test_nothing_is_respelled_in_what_was_pasted(index: Index) -> None:
    pasted = "timout of the chekpoint " * 20
    assert len(pasted) > A_QUESTION
    assert search(index, pasted).did_you_mean == ""


@pytest.mark.parametrize(
    ("word", "other", "edits"),
    [("save", "save", 0), ("tset", "test", 1), ("timout", "timeout", 1), ("bakned", "backend", 2), ("save", "load", 3)],
)
def test_letters_that_changed_places_are_one_edit(word: str, other: str, edits: int) -> None:
    assert distance(word, other, 2) == edits


@given(st.text("abc", max_size=8), st.text("abc", max_size=8))
def test_a_distance_is_symmetric_and_bounded(word: str, other: str) -> None:
    assert distance(word, other, 2) == distance(other, word, 2) <= 3
    assert (distance(word, other, 2) == 0) == (word == other)
