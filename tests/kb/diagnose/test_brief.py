"""The answer at a glance: the entry, the line that decides and its fix; and what it does not claim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kb.diagnose.brief import Brief, brief
from kb.diagnose.diagnosis import Diagnosis
from kb.diagnose.evidence import Line
from kb.diagnose.finding import Finding
from kb.diagnose.first_failure import RankSummary
from kb.diagnose.story.fact import Fact, FactKind
from tests.support.job_logs import HEALTHY, SHM

PRINTED = Line("job.log", 7, "RuntimeError: Connection closed by peer", 1)
OTHER = Line("job.log", 9, "RuntimeError: Connection closed by peer", 2)
DERIVED = Line("job.log", 12, "kb: ranks ended in different calls: rank 3 in barrier; ranks 0-2 in all_reduce")
DOCUMENTS: dict[str, dict[str, Any]] = {
    "first": {"fixes": ["Call it on all ranks.", "Write with one rank."], "fixes_zh": ["所有进程都要调用。"]},
    "second": {"fixes": ["Raise the timeout."], "fixes_zh": [""]},
}
NOBODY = RankSummary(None, None, (), ())


def finding(id_: str, *evidence: Line) -> Finding:
    return Finding(id_, f"title of {id_}", f"标题 {id_}", "cause", "原因", "confirmed", "kb", None, "root", 0.9, 1, (), evidence, (), (), 1)  # fmt: skip


def test_it_is_that_of_the_first_finding() -> None:
    answer = brief([finding("first", PRINTED), finding("second", OTHER)], DOCUMENTS, NOBODY, (), is_explained=True)
    assert answer == Brief(
        "first", "title of first", "标题 first", PRINTED, "Call it on all ranks.", "所有进程都要调用。"
    )


def test_its_fix_is_the_one_that_the_finding_names_in_the_languages_that_have_it() -> None:
    answer = brief([replace(finding("first", PRINTED), fix_number=2)], DOCUMENTS, NOBODY, (), is_explained=True)
    assert (answer.fix_number, answer.fix, answer.fix_zh) == (2, "Write with one rank.", "")


def test_a_comparison_of_ranks_decides_before_a_line_that_one_printed() -> None:
    answer = brief([finding("first", PRINTED, OTHER, DERIVED)], DOCUMENTS, NOBODY, (), is_explained=True)
    assert answer.decisive == DERIVED


def test_a_finding_without_evidence_has_no_decisive_line() -> None:
    assert brief([finding("first")], DOCUMENTS, NOBODY, (), is_explained=True).decisive is None


def test_what_is_not_explained_has_no_entry_and_no_fix_but_the_first_failure() -> None:
    ranks = RankSummary(PRINTED, 1, (), (0, 1))
    answer = brief([finding("first", OTHER)], DOCUMENTS, ranks, (), is_explained=False)
    assert answer == Brief(decisive=PRINTED)


def test_without_a_failure_a_fact_decides_that_is_no_context() -> None:
    slower = Fact.of(FactKind.SLOWER, "tok_s falls to 28% at step 9 and stays there", (), OTHER)
    zero = Fact.of(FactKind.ZERO, "loss is exactly 0 from step 5 to the end", (), OTHER)
    assert brief([], DOCUMENTS, NOBODY, (slower, zero), is_explained=False) == Brief(decisive=zero.evidence)
    assert brief([], DOCUMENTS, NOBODY, (slower,), is_explained=False) == Brief()


def test_the_culprit_of_the_story_decides_before_the_first_line() -> None:
    culprit = Fact.of(FactKind.OWN_FAILURE, "rank 2 raised KeyError: 'x' in t.py:3 f", (2,), OTHER)
    answer = brief([], DOCUMENTS, RankSummary(PRINTED, 1, (), (0, 1), culprit), (), is_explained=False)
    assert answer.decisive == Line("job.log", 9, "kb: rank 2 raised KeyError: 'x' in t.py:3 f", 2)


def test_where_nothing_failed_it_is_empty() -> None:
    assert brief([], DOCUMENTS, NOBODY, (), is_explained=False) == Brief()
    assert brief([], DOCUMENTS, NOBODY, (), is_explained=True) == Brief()


def test_json_cites_the_line() -> None:
    assert brief([finding("second", PRINTED)], DOCUMENTS, NOBODY, (), is_explained=True).to_json() == {
        "entry": "second",
        "title": "title of second",
        "title_zh": "标题 second",
        "decisive": {
            "source": "job.log",
            "line": 7,
            "rank": 1,
            "time": None,
            "text": "RuntimeError: Connection closed by peer",
        },
        "fix": "Raise the timeout.",
        "fix_zh": "",
        "fix_number": 1,
    }
    assert Brief().to_json()["decisive"] is None


def test_of_a_log_that_an_entry_explains_all_fields_are_there(answer: Callable[..., Diagnosis]) -> None:
    told = answer(HEALTHY + f"[rank1]: {SHM.format(rank=1)}\n").brief
    assert told.entry == "shm-too-small"
    assert told.decisive and "shared memory" in told.decisive.text
    assert told.title and told.fix and told.fix_zh
    assert "\n" not in told.fix


def test_of_an_unknown_failure_the_sentence_on_the_rank_is_there(answer: Callable[..., Diagnosis]) -> None:
    frames = ["Traceback (most recent call last):", '  File "/work/t.py", line 3, in f', "    g()", "FluxError: off"]
    log = "".join(f"[rank0]: step {step}\n[rank1]: step {step}\n" for step in range(5))
    told = answer(log + "".join(f"[rank1]: {line}\n" for line in frames)).brief
    assert told.entry is None
    assert told.decisive and told.decisive.text == "kb: rank 1 raised FluxError: off in t.py:3 f"


def test_of_a_healthy_log_it_is_empty(answer: Callable[..., Diagnosis]) -> None:
    assert answer("".join(f"[rank0]: step {step} loss 1.{step}\n" for step in range(9))).brief == Brief()
