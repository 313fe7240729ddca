"""Chinese bigrams that a hit shows: as the words that a reader wrote, where the entry has them."""

from __future__ import annotations

from kb.search.query import joined_bigrams

QUESTION = "训练到一半突然卡住，GPU 利用率 100%"


def test_bigrams_that_overlap_in_the_question_are_one_where_the_entry_has_it() -> None:
    surfaces = ["利用", "用率", "GPU", "训练"]
    assert joined_bigrams(surfaces, QUESTION, lambda word: word in "GPU 利用率低") == ["利用率", "GPU", "训练"]
    assert joined_bigrams(surfaces, QUESTION, lambda word: word in "利用 GPU 的用率") == surfaces


def test_the_rank_is_the_best_of_the_parts_whatever_the_order() -> None:
    assert joined_bigrams(["突然", "GPU", "半突", "一半"], QUESTION, lambda _: True) == ["一半突然", "GPU"]


def test_bigrams_that_stand_apart_in_the_question_stay_apart() -> None:
    assert joined_bigrams(["训练", "练习"], "训练的练习", lambda _: True) == ["训练", "练习"]
