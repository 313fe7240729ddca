"""Ranks without a traceback while others waited: busy, silent, done, late or gone. Nobody else is accused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kb.diagnose.story.attempts import read_attempts
from kb.diagnose.story.excerpt import Excerpt, Part
from kb.diagnose.story.fact import Fact
from kb.diagnose.story.lines import read_lines
from kb.diagnose.story.timeline import Attempt
from kb.diagnose.story.waiting import late_ranks, missing_ranks, steps_behind

TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
GAVE_UP = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 6000ms for send operation"
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
PLACE = "barrier called from t.py:44 save"


def attempt(*blocks: Sequence[str]) -> Attempt:
    return of_logs([line for block in blocks for line in block])


def of_logs(*logs: Sequence[str]) -> Attempt:
    excerpts = [
        Excerpt(f"rank{number}.log", None, None, (Part(1, "".join(f"{line}\n" for line in log).encode()),))
        for number, log in enumerate(logs)
    ]
    (only,) = read_attempts(read_lines(excerpts))
    return only


def prefixed(rank: int | None, lines: Sequence[str]) -> list[str]:
    return [line if rank is None else f"[rank{rank}]: {line}" for line in lines]


def waits(rank: int | None, error: str = GAVE_UP) -> list[str]:
    frames = ['  File "/work/t.py", line 44, in save', "    dist.barrier()"]
    frames += [f'  File "{TORCH}/distributed/distributed_c10d.py", line 4287, in barrier', "    work.wait()"]
    return prefixed(rank, ["Traceback (most recent call last):", *frames, error])


def steps(rank: int | None, first: int, last: int, words: str = "step {} loss 1.25") -> list[str]:
    return prefixed(rank, [words.format(step) for step in range(first, last + 1)])


def terminated(rank: int, code: int = -15) -> list[str]:
    return [f"rank      : {rank} (local_rank: {rank})", f"exitcode  : {code} (pid: 7)"]


def only(job: Attempt) -> Fact:
    (fact,) = missing_ranks(job)
    return fact


def started(ranks: int = 4) -> list[str]:
    return [line for step in range(1, 5) for rank in range(ranks) for line in steps(rank, step, step)]


def in_bursts(ranks: int = 4) -> list[str]:
    """As `torchrun --tee` prints what each rank wrote since it looked last."""
    return [line for rank in range(ranks) for line in steps(rank, 1, 4)]


def test_who_went_on_while_the_others_waited_is_busy() -> None:
    shards = steps(0, 1, 37, "tokenizing shard {}/40")
    fact = only(attempt(started(), shards, *map(waits, (1, 2, 3))))
    assert (fact.kind, fact.ranks) == ("busy", (0,))
    assert fact.text == f"kb: rank 0 went on with tokenize shard 37/40 while ranks 1-3 waited in {PLACE}"


def test_that_the_launcher_ended_it_is_said() -> None:
    fact = only(attempt(started(), steps(0, 1, 9, "validation batch {}/30"), *map(waits, (1, 2, 3)), terminated(0)))
    assert fact.text.endswith(", alive when the launcher ended it")


def test_who_printed_nothing_more_is_silent() -> None:
    fact = only(attempt(started(), steps(2, 5, 8), *(steps(rank, 5, 8) for rank in (0, 1, 3)), *map(waits, (0, 1, 3))))
    assert (fact.kind, fact.ranks) == ("silent", (2,))
    assert "rank 2 printed nothing after train step 8 and raised nothing while ranks 0, 1 and 3 waited" in fact.text


def test_who_never_printed_anything_is_silent() -> None:
    fact = only(attempt(["dist_world_size=4"], *(steps(rank, 1, 4) for rank in (0, 1, 3)), *map(waits, (0, 1, 3))))
    assert (fact.kind, fact.ranks) == ("silent", (2,))
    assert "rank 2 printed nothing at all" in fact.text


def test_several_silent_ranks_are_one_sentence() -> None:
    fact = only(attempt(started(), *map(waits, (0, 3))))
    assert (fact.kind, fact.ranks) == ("silent", (1, 2))
    assert fact.text == (
        f"kb: ranks 1 and 2 left no traceback while ranks 0 and 3 waited in {PLACE}: one of them did not come"
    )


def test_of_several_missing_ranks_only_the_busy_one_is_named() -> None:
    job = attempt(started(), steps(1, 1, 9, "validation batch {}/30"), *map(waits, (0, 3)))
    assert [(fact.kind, fact.ranks) for fact in missing_ranks(job)] == [("busy", (1,))]


def test_who_had_finished_is_done() -> None:
    job = attempt(started(), ["[rank2]: training finished"], *(steps(rank, 5, 6) for rank in (0, 1, 3)), *map(waits, (0, 1, 3)))  # fmt: skip
    fact = only(job)
    assert (fact.kind, fact.ranks) == ("done", (2,))
    assert "rank 2 had finished (teardown) while ranks 0, 1 and 3 waited" in fact.text


def test_a_signal_handler_says_where_a_silent_rank_was() -> None:
    frames = [
        '  File "/work/t.py", line 31, in load',
        "    x()",
        '  File "/work/t.py", line 9, in handle_sigterm',
        "    y()",
    ]
    interrupted = prefixed(2, ["Traceback (most recent call last):", *frames, "SystemExit: 143"])
    fact = only(attempt(started(), *map(waits, (0, 1, 3)), interrupted))
    assert (fact.kind, fact.ranks) == ("silent", (2,))
    assert fact.text.endswith(", interrupted in t.py:31 load")


def test_who_came_late_and_found_the_others_gone() -> None:
    job = attempt(
        started(),
        steps(3, 1, 5, "uploading part {} of 9"),
        *map(waits, (0, 1, 2)),
        steps(3, 6, 9, "uploading part {} of 9"),
        waits(3, LOST),
    )
    (fact,) = late_ranks(job)
    assert (fact.kind, fact.ranks) == ("busy", (3,))
    assert fact.text == (
        f"kb: rank 3 went on with save part 9/9 while ranks 0-2 waited in {PLACE}, and came late to {PLACE}"
    )


def test_who_only_lost_the_others_is_not_late() -> None:
    assert not list(late_ranks(attempt(started(), *map(waits, (0, 1, 2)), waits(3, LOST))))


def test_a_burst_of_steps_that_the_others_had_done_before_is_not_late() -> None:
    assert not list(late_ranks(attempt(in_bursts(), *map(waits, (0, 1, 2)), waits(3, LOST))))


def test_a_burst_of_steps_that_the_others_had_done_before_is_not_busy() -> None:
    assert only(attempt(in_bursts(), *map(waits, (0, 1, 2)))).kind == "silent"


def test_who_lost_them_first_is_not_late() -> None:
    job = attempt(started(), steps(3, 1, 9, "uploading part {}"), waits(3, LOST), *map(waits, (0, 1, 2)))
    assert not list(late_ranks(job))


@pytest.mark.parametrize("is_named", [True, False])
def test_where_all_only_lost_others_somebody_was_gone(is_named: bool) -> None:
    losers = [waits(rank if is_named else None, LOST) for rank in (0, 1, 3)]
    fact = only(attempt(started(), *losers))
    assert fact.kind == "all-lost"
    assert fact.ranks == ((2,) if is_named else ())
    assert ("rank 2 left no traceback" if is_named else "no line says which rank left first") in fact.text


def test_while_others_wait_a_line_without_a_rank_is_of_the_missing_one() -> None:
    shards = steps(None, 1, 37, "tokenizing shard {}/40")
    fact = only(attempt(["dist_world_size=4"], started(), shards, *map(waits, (1, 2, 3))))
    assert (fact.kind, fact.ranks) == ("busy", (0,))


def test_without_a_missing_rank_it_is_of_some_rank() -> None:
    shards = steps(None, 1, 37, "tokenizing shard {}/40")
    fact = only(attempt(*(steps(rank, 1, 4) for rank in (1, 2)), shards, *map(waits, (1, 2))))
    assert (fact.kind, fact.ranks) == ("busy", ())
    assert fact.text == f"kb: a rank went on with tokenize shard 37/40 while others waited in {PLACE}"


def test_a_stream_that_several_ranks_print_to_accuses_none() -> None:
    shards = [line for line in steps(None, 1, 37, "tokenizing shard {}/40") for _ in range(3)]
    assert not list(missing_ranks(attempt(*(steps(rank, 1, 4) for rank in (1, 2)), shards, *map(waits, (1, 2)))))


def test_nobody_is_missing_where_all_waited_or_nobody_did() -> None:
    assert not list(missing_ranks(attempt(started(), *map(waits, range(4)))))
    assert not list(missing_ranks(attempt(started())))


def test_who_was_killed_is_not_silent() -> None:
    assert not list(missing_ranks(attempt(started(), *map(waits, (0, 1, 3)), terminated(2, -9))))


def test_logs_of_ranks_without_a_clock_show_a_counter_that_stopped() -> None:
    logs = [[*steps(rank, 1, 4), *waits(rank)] for rank in (1, 2, 3)]
    busy = of_logs([*steps(0, 1, 4), *steps(0, 1, 37, "tokenizing shard {}/40")], *logs)
    assert [(fact.kind, fact.ranks) for fact in missing_ranks(busy)] == [("busy", (0,))]
    complete = of_logs([*steps(0, 1, 4), *steps(0, 1, 40, "tokenizing shard {}/40")], *logs)
    assert [(fact.kind, fact.ranks) for fact in missing_ranks(complete)] == [("silent", (0,))]


def test_steps_that_differ_by_two_or_more() -> None:
    job = attempt(*(steps(rank, 1, 24) for rank in (0, 1, 3)), steps(2, 1, 19))
    (fact,) = steps_behind(job)
    assert (fact.ranks, fact.is_context) == ((2,), True)
    assert fact.text == "kb: last step printed: rank 2 step 19; ranks 0, 1 and 3 step 24"


def test_one_step_is_no_difference() -> None:
    assert not list(steps_behind(attempt(steps(0, 1, 24), steps(1, 1, 23))))
    assert not list(steps_behind(attempt(steps(0, 1, 24), ["[rank1]: hello"] * 5)))
