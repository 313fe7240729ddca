"""`kb verify` as a reader meets it: plans, exit codes, documents, and what it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.console import BREAKS, ContentRoot, Kb, arm_directories


def test_a_verified_entry_is_exit_0_with_the_whole_record(kb: Kb, content: ContentRoot) -> None:
    content.incident("breaks")
    ended = kb("verify", "breaks", "--json")
    report = ended.json
    assert ended.code == 0
    assert report["schema"] == "kb.verify.v1"
    assert (report["id"], report["verdict"], report["fidelity"]) == ("breaks", "verified", "cpu")
    assert report["arms"]["control"]["outcome"] == "raised"
    assert report["arms"]["control"]["first_failing_rank"] == 0
    assert report["arms"]["treatment"]["outcome"] == "completed"
    assert report["leftovers"] == []
    assert report["environment"]
    assert len(report["entry_digest"]) == len(report["probe_digest"]) == 64
    assert not arm_directories()


def test_a_person_sees_verdict_arms_and_next_step(kb: Kb, content: ContentRoot) -> None:
    content.incident("breaks")
    out = kb("verify", "breaks").out
    assert out.startswith("verified")
    assert "control   raised" in out
    assert "first failing rank: 0 RuntimeError the thing broke: code 7" in out
    assert "treatment completed" in out
    assert "next: apply the fix" in out


VERDICTS = {
    "not-reproduced": ("pass", 3),
    "fix-ineffective": ("raise RuntimeError('the thing broke: code 7')", 1),
    "other-failure": ("if not is_fixed:\n    raise ImportError('something else')", 1),
    "inverted": ("if is_fixed:\n    raise RuntimeError('the thing broke: code 7')", 1),
}


@pytest.mark.parametrize("verdict, case", VERDICTS.items(), ids=VERDICTS)
def test_each_verdict_has_its_exit_code(kb: Kb, content: ContentRoot, verdict: str, case: tuple[str, int]) -> None:
    body, code = case
    content.incident("case", body)
    ended = kb("verify", "case", "--json", "--repeat", "1")
    assert ended.json["verdict"] == verdict
    assert ended.code == code


def test_a_failure_without_a_signature_of_the_entry_is_not_verified(kb: Kb, content: ContentRoot) -> None:
    content.incident(
        "drifted", "if not is_fixed:\n    raise RuntimeError('worded anew')", 'make(raised("worded anew"))'
    )
    ended = kb("verify", "drifted", "--json", "--repeat", "1")
    assert ended.json["verdict"] == "other-failure"
    assert "not with a signature of the entry" in ended.json["reason"]


OTHER_FAILURES = {
    "no signature": (
        "if not is_fixed:\n    raise RuntimeError('worded anew')",
        'make(raised("worded anew"))',
        "add a signature that matches it to the entry: RuntimeError: worded anew",
    ),
    "control": (
        "if not is_fixed:\n    raise ImportError('no module x')",
        'make(raised("the thing broke"))',
        "find out what broke here: rank 0: ImportError: no module x. If this is your incident",
    ),
    "treatment": (
        "raise ValueError('rates differ') if is_fixed else RuntimeError('the thing broke: code 7')",
        'make(raised("the thing broke"))',
        "but then something else ended the job: rank 0: ValueError: rates differ",
    ),
}


@pytest.mark.parametrize("body, probe, says", OTHER_FAILURES.values(), ids=OTHER_FAILURES)
def test_another_failure_is_shown_with_what_to_do_about_it(
    kb: Kb, content: ContentRoot, body: str, probe: str, says: str
) -> None:
    content.incident("case", body, probe)
    ended = kb("verify", "case", "--repeat", "1")
    assert ended.code == 1
    assert says in ended.out.split("next: ")[1]


def test_a_plan_shows_what_would_run_and_runs_nothing(kb: Kb, content: ContentRoot, tmp_path: Path) -> None:
    content.incident("breaks", f"Path({str(tmp_path)!r}, 'ran').touch()")
    plan = kb("verify", "breaks", "--plan", "--json").json
    assert plan["schema"] == "kb.verify-plan.v1"
    assert plan["plans"][0]["experiments"][0]["arms"]["control"]["because"] == "it is broken"
    shown = kb("verify", "breaks", "--plan").out
    assert "treatment it is whole" in shown
    assert not (tmp_path / "ran").exists()
    assert kb("history", "breaks", "--json").code == 1


def test_logs_are_kept_where_told(kb: Kb, content: ContentRoot, tmp_path: Path) -> None:
    content.incident("breaks", "print('hello from rank', ctx.rank)\n" + BREAKS)
    kb("verify", "breaks", "--keep-logs", tmp_path / "logs")
    kept = tmp_path / "logs" / "breaks-plain-control"
    printed, *_, raised = (kept / "rank0.log").read_text().splitlines()
    assert (printed, raised) == ("hello from rank 0", "RuntimeError: the thing broke: code 7")
    assert json.loads((kept / "rank0.json").read_text())["outcome"] == "raised"


def test_a_report_that_cannot_be_kept_costs_a_warning_not_the_verdict(
    kb: Kb, content: ContentRoot, tmp_path: Path
) -> None:
    content.incident("breaks")
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    ended = kb("verify", "breaks", "--json", XDG_DATA_HOME=str(blocked / "data"))
    assert ended.json["verdict"] == "verified"
    assert ended.code == 0
    assert "reports are not saved" in ended.err


def test_in_a_list_the_interpreter_and_what_it_lacks_are_named_once(kb: Kb, content: ContentRoot) -> None:
    lacking = 'make(raised("the thing broke"), needs=Needs(packages={"no-such-package": ""}))'
    for entry_id in ("one", "other"):
        content.incident(entry_id, probe=lacking)
    ended = kb("verify", "one", "other")
    assert ended.code == 4
    assert ended.out.count("no-such-package is not installed") == 2
    assert ended.out.count(f"what is not installed in {sys.executable}") == ended.out.count(sys.executable) == 1
    alone = kb("verify", "one").out
    assert alone.count(f"no-such-package is not installed in {sys.executable}") == 1
    assert "`kb verify one --python " in alone
