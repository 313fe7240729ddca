"""Whether an entry stands for what only followed: by the order of lines, by ranks, and never against a known cause."""

from __future__ import annotations

from kb.diagnose.evidence import Line, SignatureMatch
from kb.diagnose.first_failure import RankSummary
from kb.diagnose.ranking import Candidate
from kb.diagnose.unknown_cause import is_before, is_cause_unknown, objection

DAY = 1_795_230_000.0  # seconds since the epoch
RAISED = "ShardError: s3://corpus/shard-00118.tar: 403 SlowDown"
WAITED = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE"


def line(text: str, number: int, rank: int | None = None, time: float | None = None, source: str = "a.log") -> Line:
    return Line(source, number, text, rank, time)


def candidate(role: str, *lines: Line, caused_by: tuple[str, ...] = ()) -> Candidate:
    ranks = tuple(sorted({item.rank for item in lines if item.rank is not None}))
    return Candidate(
        role, role, 1.0, 0.0, (SignatureMatch(role, role, "p", "m", len(lines), ranks, lines),), caused_by=caused_by
    )


def summary(first: Line | None, *absent: int) -> RankSummary:
    return RankSummary(first, first.rank if first else None, absent, ())


FIRST = line(RAISED, 71, 17)


def test_the_tolerance_for_a_traceback_holds_for_lines_of_its_own_rank() -> None:
    assert is_before(line(WAITED, 72, 17), FIRST)
    assert not is_before(line(WAITED, 72, 0), FIRST)
    assert not is_before(line(WAITED, 112, 17), FIRST)
    assert is_before(line(WAITED, 71, 0), FIRST)


def test_of_two_logs_times_decide_and_without_them_nothing_is_claimed() -> None:
    first = line(RAISED, 9, 3, DAY)
    assert not is_before(line(WAITED, 1, 0, DAY + 600, "b.log"), first)
    assert is_before(line(WAITED, 1, 0, DAY - 600, "b.log"), first)
    assert is_before(line(WAITED, 1, 0, None, "b.log"), first)


def test_what_was_printed_before_is_not_what_followed() -> None:
    waiting = candidate("cascade", line(WAITED, 72, 0))
    assert is_cause_unknown([waiting], summary(FIRST))
    assert not is_cause_unknown([candidate("cascade", line(WAITED, 70, 0))], summary(FIRST))
    assert not is_cause_unknown([candidate("cascade", line(WAITED, 72, 0, None, "b.log"))], summary(line(RAISED, 71)))


def test_a_rank_that_waits_as_well_is_not_the_one_that_failed() -> None:
    assert not is_cause_unknown([candidate("cascade", line(WAITED, 900, 0), line(WAITED, 901, 17))], summary(FIRST))


def test_a_sentence_of_kb_names_a_rank_that_printed_nothing_of_it() -> None:
    concluded = line("kb: rank 17 reported no timeout while 63 others waited in SeqNum=812 ALLREDUCE", 72, 17)
    assert is_cause_unknown([candidate("cascade", concluded)], summary(FIRST, 17))


def test_another_rank_that_did_not_come_speaks_against_it() -> None:
    waiting = candidate("cascade", line(WAITED, 72, 0))
    assert is_cause_unknown([waiting], summary(FIRST, 4, 17))
    assert not is_cause_unknown([waiting], summary(FIRST, 4))


def test_a_known_cause_is_never_elsewhere() -> None:
    waiting = line(WAITED, 900, 0)
    assert not is_cause_unknown([candidate("root", waiting)], summary(FIRST))
    assert not is_cause_unknown([candidate("cascade", waiting, caused_by=("root",))], summary(FIRST))
    assert not is_cause_unknown([candidate("cascade", waiting), candidate("root", FIRST)], summary(FIRST))
    assert not is_cause_unknown([], summary(FIRST))
    assert not is_cause_unknown([candidate("cascade", waiting)], summary(None))


def test_what_the_launcher_said_of_the_end_is_no_cause_beside_an_exception() -> None:
    launched = candidate("root", line("exitcode  : -6 (pid: 71300)", 3))
    assert is_cause_unknown([launched], summary(line(RAISED, 71)))
    assert not is_cause_unknown([launched], summary(line("terminate called after throwing an instance", 71)))


def test_the_objection_names_the_first_failure_or_says_that_there_is_none() -> None:
    waiting = candidate("cascade", line(WAITED, 900, 0))
    assert objection(waiting, summary(FIRST)) == f"the cause is not this; rank 17 failed first: a.log:71 {RAISED}"
    assert objection(waiting, summary(line(RAISED, 71))).endswith(f"; something else failed first: a.log:71 {RAISED}")
    objections = [objection(waiting, summary(first)) for first in (None, line("exitcode  : 1 (pid: 7)", 71))]
    assert all(item.endswith("; the cause itself is not in these logs") for item in objections)
