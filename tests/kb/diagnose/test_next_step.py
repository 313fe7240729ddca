"""The next step proves what is certain, tells apart what is not, and asks for what is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kb.diagnose.evidence import Line
from kb.diagnose.finding import Finding
from kb.diagnose.first_failure import RankSummary
from kb.diagnose.next_step import (
    CERTAIN,
    LIKELY,
    MOST_CANDIDATES,
    NextStep,
    ask_more,
    candidates,
    next_step,
    read_first_failure,
)

NOBODY = RankSummary(None, None, (), ())


def finding(entry: str, confidence: float, role: str = "cascade", **given: Any) -> Finding:
    texts: dict[str, Any] = {
        "title": "",
        "title_zh": "",
        "cause": "",
        "cause_zh": "",
        "status": "confirmed",
        "origin": "built-in",
    }
    rest = {"probe": entry, "count": 1, "ranks": (), "evidence": (), "caused_by": (), "against": (), "fix_number": 1}
    return Finding(id=entry, role=role, confidence=confidence, **texts, **{**rest, **given})


def step(*findings: Finding, ranks: RankSummary = NOBODY, **tells: list[str]) -> NextStep | None:
    return next_step(findings, {item.id: {"tells": tells.get(item.id, [])} for item in findings}, ranks)


def present(step: NextStep | None) -> NextStep:
    assert step is not None
    return step


def test_what_is_certain_is_proved() -> None:
    result = present(step(finding("a", CERTAIN), finding("b", LIKELY), a=["Not `b`, when x."]))
    assert (result.command, result.separates) == ("kb verify a", ("a",))
    assert "kb show a" in result.text


def test_an_entry_without_a_probe_is_read() -> None:
    assert present(step(finding("a", CERTAIN, probe=None))).command == "kb show a"


def test_two_candidates_are_told_apart_by_what_the_better_says_to_do_about_the_other() -> None:
    tells = ["Print x.", "`py-spy dump` on rank 0: in a save, `b-hang`. [thread 4] [inferred]"]
    result = present(step(finding("a", 0.6), finding("b-hang", 0.5), a=tells))
    assert (result.text, result.source) == ("`py-spy dump` on rank 0: in a save, `b-hang`.", "a")
    assert result.separates == ("a", "b-hang")


def test_or_by_what_the_other_says_to_do_about_it() -> None:
    result = present(step(finding("a-hang", 0.6), finding("b", 0.5), b=["Compare the sizes: equal, `a-hang`."]))
    assert (result.text, result.source) == ("Compare the sizes: equal, `a-hang`.", "b")


def test_a_statement_about_the_other_is_no_step() -> None:
    statements = ["The same in mid-epoch is not this entry: see `b-hang`.", "Not this: `b-hang`."]
    rivals = finding("a", 0.6), finding("b-hang", 0.5)
    looked = present(step(*rivals, a=[*statements, "Look at the first line. [source 1]"]))
    assert (looked.text, looked.source, looked.separates) == ("Look at the first line.", "a", ("a",))
    assert present(step(*rivals, a=statements)).text.startswith("Verify it on this machine")


def test_what_only_follows_is_no_rival() -> None:
    result = present(step(finding("a", 0.6, "root"), finding("b", 0.5, caused_by=("a",)), a=["Not `b`, when x."]))
    assert (result.separates, result.command) == (("a",), "kb verify a")
    assert result.text.startswith("Verify it")


def test_an_unlikely_candidate_asks_for_nothing() -> None:
    assert step(finding("a", LIKELY - 0.01, "similar"), a=["Look at x."]) is None
    assert step() is None


def test_a_rank_that_never_came_is_asked_for_before_anything_else() -> None:
    summary = RankSummary(None, None, (2, 5), (0, 1, 2, 5))
    result = present(step(finding("a", 0.6), ranks=summary, a=["Look at x."]))
    assert "ranks 2 and 5" in result.text
    assert present(step(ranks=summary)).separates == ()


def test_unless_the_cause_itself_was_printed() -> None:
    summary = RankSummary(None, 3, (3,), (0, 1, 2, 3))
    assert present(step(finding("a", CERTAIN, "root"), ranks=summary)).command == "kb verify a"


def test_candidates_are_what_is_likely_and_follows_from_nothing_seen() -> None:
    result = [finding("a", 0.6), finding("b", 0.5, caused_by=("a",)), finding("c", 0.5), finding("d", LIKELY - 0.01)]
    assert [candidate.id for candidate in candidates(result)] == ["a", "c"]
    assert [candidate.id for candidate in candidates([finding("x", CERTAIN), *result])] == ["x"]
    assert len(candidates([finding("a", 0.6)] * 9)) == MOST_CANDIDATES
    assert candidates([]) == []


def test_where_a_cause_was_printed_what_waiting_ranks_print_is_no_candidate() -> None:
    result = [finding("a", 0.6, "root"), finding("b", 0.5), finding("c", 0.45, "root"), finding("d", 0.4, "last")]
    assert [candidate.id for candidate in candidates(result)] == ["a", "c", "d"]


@pytest.mark.parametrize(
    ("source", "command"),
    [
        ("train.log", "kb verify a --set log=train.log"),
        ("my logs/rank 3.log", "kb verify a --set log='my logs/rank 3.log'"),
        *((unread, "kb verify a") for unread in ("-", "body", "pasted text", "train.log.gz", "train.log.zst")),
    ],
)
def test_a_probe_that_reads_a_log_is_given_the_one_it_was_seen_in(source: str, command: str) -> None:
    seen = finding("a", CERTAIN, "root", evidence=(Line(source, 7, "out of memory"),))
    tells = ["Three numbers of one line: `kb verify a --set log=old.log` compares them."]
    assert present(step(seen, a=tells)).command == command
    observed = present(step(replace(seen, confidence=LIKELY, role="cascade"), a=tells))
    named = command if " --set " in command else "kb verify a --set log=old.log"
    assert observed.text == f"Three numbers of one line: `{named}` compares them."
    assert present(step(seen, a=["Not `kb verify b --set log=train.log`."])).command == "kb verify a"


def test_what_no_entry_knows_is_to_be_read_where_it_stands() -> None:
    failed = Line("a`b.log", 71, "ShardError: odd", 17)
    named = present(read_first_failure(RankSummary(failed, 17, (), (17,))))
    assert "what rank 17 printed at `ab.log:71`" in named.text
    assert (named.command, named.separates) == ("", ())
    assert "Read `ab.log:71`" in present(read_first_failure(RankSummary(failed, None, (), ()))).text
    assert read_first_failure(NOBODY) is None


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("ncclSystemError: System call or external library call failed", "NCCL_DEBUG=INFO"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "not of what"),
    ],
)
def test_an_error_that_names_no_reason_asks_for_it(failure: str, reason: str) -> None:
    assert reason in present(ask_more(["Traceback (most recent call last):", failure])).text
    assert ask_more(["ValueError: NCCL is not built", "dmesg: Out of memory: Killed process 7 (python)"]) is None
