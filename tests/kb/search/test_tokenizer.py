"""Terms: forms that must meet, and forms that must not appear."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb.search.tokenizer import terms


def forms(text: str) -> set[str]:
    return {term.text for term in terms(text)}


@pytest.mark.parametrize(
    "word, other",
    [
        ("ALLGATHER", "all_gather"),
        ("_ALLGATHER_BASE", "allgather"),
        ("all-gather", "AllGather"),
        ("timeouts", "timeout"),
        ("ProcessGroupNCCL.cpp:632", "ProcessGroupNCCL"),
        ("checkpoints", "checkpoint"),
        ("torch-2.13.0", "2.13"),
        ("v2.18.5", "2.18"),
        ("显存不足", "显存"),
        ("NCCL_P2P_DISABLE", "nccl p2p"),
        ("超时(timeout)", "超时"),
        ("ｔｉｍｅｏｕｔ", "timeout"),
    ],
)
def test_forms_of_one_thing_meet(word: str, other: str) -> None:
    assert forms(word) & forms(other)


@pytest.mark.parametrize("text, absent", [("ZeRO", "ze"), ("P2P", "2"), ("bf16", "16"), ("the", "the")])
def test_fragments_that_mean_nothing_are_not_indexed(text: str, absent: str) -> None:
    assert absent not in forms(text)


def test_an_exit_code_keeps_its_sign() -> None:
    assert "-9" in forms("exitcode: -9")
    assert "-9" not in forms("rank 3-9")


def test_positions_of_a_phrase_are_adjacent() -> None:
    first, second = (term.position for term in terms("expected mark"))
    assert second == first + 1


@given(st.text(max_size=300))
def test_any_text_gives_bounded_terms(text: str) -> None:
    for term in terms(text):
        assert 0 < len(term.text) <= max(64, len(term.surface))


def test_words_that_nobody_writes_are_not_remembered() -> None:
    """A service would keep every one of them: 3 MB for each question that somebody makes up for it."""
    letters = random.Random(1)
    texts = ["".join(chr(letters.randrange(0x4E00, 0x9FFF)) for _ in range(8000)) for _ in range(20)]
    tracemalloc.start()
    try:
        for text in texts:
            assert sum(1 for _ in terms(text)) == 7999
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 10 << 20
