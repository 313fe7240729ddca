"""Where ranks were that raised: failures of their own, different calls, one call, sizes that do not fit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kb.diagnose.story.attempts import read_attempts
from kb.diagnose.story.excerpt import Excerpt, Part
from kb.diagnose.story.fact import Fact
from kb.diagnose.story.lines import read_lines
from kb.diagnose.story.places import own_failures, size_mismatches, waiting_places
from kb.diagnose.story.timeline import Attempt

TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
GAVE_UP = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 6000ms for send operation"
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
SIZES = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at gloo/pair.cc:39] op.preamble.length <= op.nbytes. 4 vs 8"


def attempt(*blocks: Sequence[str]) -> Attempt:
    data = "".join(f"{line}\n" for block in blocks for line in block).encode()
    (only,) = read_attempts(read_lines([Excerpt("job.log", None, None, (Part(1, data),))]))
    return only


def prefixed(rank: int | None, lines: Sequence[str]) -> list[str]:
    return [line if rank is None else f"[rank{rank}]: {line}" for line in lines]


def raised(rank: int | None, *frames: tuple[str, int, str], error: str) -> list[str]:
    listed = [line for file, at, name in frames for line in (f'  File "{file}", line {at}, in {name}', "    x()")]
    return prefixed(rank, ["Traceback (most recent call last):", *listed, error])


def waits(
    rank: int | None, call: str, line: int, function: str = "fit", error: str = GAVE_UP, main: int = 80
) -> list[str]:
    collective = (f"{TORCH}/distributed/distributed_c10d.py", 4287, call)
    return raised(rank, ("/work/t.py", main, "main"), ("/work/t.py", line, function), collective, error=error)


def backward(rank: int, error: str = LOST) -> list[str]:
    return raised(rank, ("/work/t.py", 30, "fit"), (f"{TORCH}/autograd/__init__.py", 9, "backward"), error=error)


def fact(facts: Sequence[Fact], kind: str) -> Fact:
    (only,) = [fact for fact in facts if fact.kind == kind]
    return only


def test_an_exception_that_is_no_waiting_is_the_ranks_own() -> None:
    others = [waits(rank, "all_reduce", 30) for rank in (0, 1, 3)]
    own = raised(2, ("/work/t.py", 12, "collate"), error="KeyError: 'input_ids'")
    found = fact(list(own_failures(attempt(own, *others))), "own-failure")
    assert found.text == "kb: rank 2 raised KeyError: 'input_ids' in t.py:12 collate while ranks 0, 1 and 3 waited"
    assert found.ranks == (2,)
    assert found.lines[-1].number == 4


def test_it_counts_as_well_when_it_is_printed_last() -> None:
    own = raised(2, ("/work/t.py", 12, "collate"), error="KeyError: 'x'")
    found = fact(list(own_failures(attempt(waits(0, "barrier", 30), waits(1, "barrier", 30), own))), "own-failure")
    assert found.ranks == (2,)
    assert found.text.endswith("waited, printed after they had given up")


def test_the_same_exception_of_all_ranks_is_one_fact() -> None:
    ranks = [raised(rank, ("/work/t.py", 12, "load"), error=f"OSError: no shard {rank}") for rank in range(4)]
    found = fact(list(own_failures(attempt(*ranks))), "own-failure")
    assert found.ranks == (0, 1, 2, 3)
    assert found.text.startswith("kb: ranks 0-3 raised OSError")


def test_an_exception_without_a_rank_accuses_none() -> None:
    found = fact(
        list(own_failures(attempt(raised(None, ("/work/t.py", 12, "load"), error="KeyError: 'x'")))), "own-failure"
    )
    assert (found.text, found.ranks) == ("kb: a rank raised KeyError: 'x' in t.py:12 load", ())


def test_ranks_in_different_calls_and_the_odd_one() -> None:
    job = attempt(waits(3, "all_gather", 12, "evaluate"), *(waits(rank, "barrier", 44, "save") for rank in range(3)))
    found = fact(list(waiting_places(job, ())), "places-differ")
    assert found.text == (
        "kb: ranks ended in different calls: rank 3 in all_gather called from t.py:12 evaluate; "
        "ranks 0-2 in barrier called from t.py:44 save"
    )
    assert found.ranks == (3,)
    assert [line.rank for line in found.lines] == [3, 0]


def test_of_two_groups_of_one_size_none_is_odd() -> None:
    calls = [waits(rank, "barrier" if rank % 2 else "all_reduce", 30 + rank % 2) for rank in range(4)]
    assert fact(list(waiting_places(attempt(*calls), ())), "places-differ").ranks == ()


def test_where_the_paths_part() -> None:
    odd = waits(2, "barrier", 50, "save", main=92)
    job = attempt(odd, *(waits(rank, "all_reduce", 30, "fit", main=87) for rank in (0, 1, 3)))
    found = fact(list(waiting_places(job, ())), "paths-part")
    assert found.ranks == (2,)
    assert "paths part in t.py, function main: rank 2 at line 92, within save; " in found.text
    assert "at line 87, within fit" in found.text


def test_a_rank_that_left_the_loop_in_which_the_others_are() -> None:
    collective = (f"{TORCH}/distributed/distributed_c10d.py", 4287, "barrier")
    odd = raised(2, ("/work/t.py", 92, "main"), collective, error=GAVE_UP)
    job = attempt(odd, *(waits(rank, "all_reduce", 30, "fit", main=87) for rank in (0, 1, 3)))
    facts = list(waiting_places(job, ()))
    assert [found.kind for found in facts] == ["left-loop"]
    assert facts[0].ranks == (2,)
    assert "rank 2 had gone on to line 92 of t.py, function main" in facts[0].text


def test_one_call_of_all_is_no_divergence() -> None:
    facts = list(waiting_places(attempt(*(waits(rank, "all_reduce", 30) for rank in range(4))), ()))
    assert [(found.kind, found.ranks, found.is_context) for found in facts] == [("same-place", (), True)]
    assert facts[0].text == "kb: ranks 0-3 ended in the same call: all_reduce called from t.py:30 fit"


def test_who_found_the_others_gone_came_last() -> None:
    job = attempt(*(waits(rank, "barrier", 30) for rank in (0, 1, 2)), waits(3, "barrier", 30, error=LOST))
    found = fact(list(waiting_places(job, ())), "came-last")
    assert found.ranks == (3,)
    assert "ranks 0-2 gave up waiting, then rank 3 lost them" in found.text


def test_a_single_traceback_of_waiting_says_little() -> None:
    (found,) = waiting_places(attempt(waits(1, "barrier", 30)), ())
    assert (found.kind, found.is_context) == ("one-place", True)


def test_who_is_accused_already_is_left_out() -> None:
    job = attempt(waits(3, "all_gather", 12), *(waits(rank, "barrier", 44) for rank in range(3)))
    assert [found.kind for found in waiting_places(job, {3})] == ["same-place"]


def test_without_ranks_places_are_counted() -> None:
    job = attempt(*(waits(None, "barrier", 44) for _ in range(3)), waits(None, "all_gather", 12))
    found = fact(list(waiting_places(job, ())), "places-differ")
    assert "1 rank in all_gather" in found.text
    assert "3 ranks in barrier" in found.text
    assert found.ranks == ()


@pytest.mark.parametrize(
    ("others", "kind", "words"),
    [
        ([waits(rank, "all_gather", 12, error=LOST) for rank in (0, 1, 3)], "sizes-differ-in-call", "the others ended in one call: all_gather"),
        ([backward(rank) for rank in (0, 1, 3)], "drifted", "it was in another call"),
        ([], "sizes-differ", "aborted over a size that it did not expect"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit(others: list[list[str]], kind: str, words: str) -> None:
    job = attempt(*others, prefixed(2, SIZES.splitlines()), ["[rank2]: step", "[rank2]: step", "[rank2]: step"])
    found = fact(list(size_mismatches(job)), kind)
    assert found.ranks == (2,)
    assert words in found.text


def test_an_abort_without_a_rank_is_of_the_rank_with_sigabrt() -> None:
    summary = ["rank      : 1 (local_rank: 1)", "exitcode  : -6 (pid: 7)", "x", "y"]
    assert fact(list(size_mismatches(attempt(SIZES.splitlines(), summary))), "sizes-differ").ranks == (1,)
