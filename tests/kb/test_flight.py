"""Flight records compared: who never came, and who disagreed."""

from __future__ import annotations

from typing import Any

from kb.flight import compare


def call(seq: int, op: str = "gloo:all_reduce", size: int = 4) -> dict[str, Any]:
    return {"group": "0", "seq": seq, "op": op, "sizes": [[size]], "dtypes": ["Float"], "retired": True}


def test_a_rank_that_never_came_is_named_with_the_collective() -> None:
    said = compare({0: [call(1), call(2)], 1: [call(1)]}, 2)
    assert said == ("rank 1 never issued collective 2 (gloo:all_reduce [[4]] ['Float']), which rank 0 is in",)


def test_different_sizes_at_one_sequence_number_are_told_apart() -> None:
    said = compare({0: [call(1, size=4)], 1: [call(1, size=5)]}, 2)
    assert said[0].startswith("collective 1 differs: rank 0 ")
    assert "[[5]]" in said[0]


def test_ranks_that_agree_say_nothing() -> None:
    assert compare({0: [call(1)], 1: [call(1)]}, 2) == ()


def test_a_rank_without_a_record_is_mentioned_and_accused_of_nothing() -> None:
    assert compare({0: [call(1)], 2: [call(1)]}, 3) == ("no flight record from rank 1",)
    assert compare({0: [call(1)]}, 2) == ()
