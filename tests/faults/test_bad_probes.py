"""Probe files that break their contract: the report says how, the exit code is not success, the others still run."""

from __future__ import annotations

import pytest

from tests.support.console import ContentRoot, Kb, arm_directories

BROKEN = {
    "raises-at-import": ("raise ValueError('no luck')", "ValueError: no luck"),
    "is-not-python": ("def (:", "SyntaxError"),
    "defines-no-probe": ("x = 1", "it defines no `probe = Probe(...)`"),
    "defines-an-empty-probe": ("from kb.probe import Probe\nprobe = Probe()", "neither a check nor an experiment"),
    "calls-exit": ("import os\nos._exit(0)", "ended with exit code 0"),
    "kills-itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "died of SIGKILL"),
    "exits": ("raise SystemExit(0)", "SystemExit"),
    "expects-a-pattern-that-could-hang": (
        "from kb.probe import *\nfrom kb.probe import Arm, Experiment, Probe, completed, raised\n"
        "arm = dict(job=print, because='x', fidelity='cpu')\n"
        "probe = Probe((Experiment('x', Arm(expect=raised('(a+)+!'), **arm), Arm(expect=completed(), **arm)),))",
        "an unbounded repeat can match the same text in two ways",
    ),
    "writes-a-gigabyte": ("import os\nwhile True:\n    os.write(1, b'x' * (1 << 20))", "File too large"),
}


def test_probe_files_that_cannot_be_used_are_inconclusive_and_say_why(kb: Kb, content: ContentRoot) -> None:
    for name, (source, _) in BROKEN.items():
        content.raw_probe(name, source)
    ended = kb("verify", *BROKEN, "--json")
    assert ended.code == 3
    for (name, (_, says)), report in zip(BROKEN.items(), ended.json["reports"], strict=True):
        assert (report["id"], report["verdict"]) == (name, "inconclusive")
        assert says in report["reason"], name
        assert report["arms"] is None
    assert not arm_directories()


def test_a_probe_file_that_never_returns_is_cut(kb: Kb, content: ContentRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kb.verify.plan.DESCRIBE_S", 3.0)
    content.raw_probe("endless", "while True: pass")
    ended = kb("verify", "endless", "--json")
    assert ended.code == 3
    assert "did not end in time" in ended.json["reason"]


def test_a_missing_probe_file_is_named(kb: Kb, content: ContentRoot) -> None:
    content.entry("no-file")
    ended = kb("verify", "no-file", "--json")
    assert ended.code == 3
    assert "no_file.py does not exist" in ended.json["reason"]


def test_one_broken_probe_does_not_cost_the_others_their_reports(kb: Kb, content: ContentRoot) -> None:
    content.raw_probe("broken", "raise ValueError('no luck')")
    content.incident("sound")
    ended = kb("verify", "broken", "sound", "--json")
    verdicts = {report["id"]: report["verdict"] for report in ended.json["reports"]}
    assert verdicts == {"broken": "inconclusive", "sound": "verified"}
    assert ended.json["summary"] == {"inconclusive": 1, "verified": 1}
    assert ended.code == 3


def test_a_job_that_ends_before_its_mark_proves_nothing(kb: Kb, content: ContentRoot) -> None:
    content.raw_probe(
        "early",
        """
        from kb.probe import Arm, Context, Experiment, Needs, Probe, completed, raised

        def job(ctx: Context) -> None:
            raise RuntimeError("the thing broke: code 7")

        arm = {"job": job, "because": "it starts badly", "fidelity": "cpu"}
        probe = Probe(experiments=(Experiment(
            name="plain", control=Arm(expect=raised("the thing broke"), **arm),
            treatment=Arm(expect=completed(), **arm), world_size=1, needs=Needs(packages={}),
        ),))
        """,
    )
    ended = kb("verify", "early", "--json", "--repeat", "1")
    assert ended.json["verdict"] == "inconclusive"
    assert ended.json["arms"]["control"]["attempts"] == 3
    assert ended.code == 3


def test_checks_that_answer_something_else_are_unknown_never_clear(kb: Kb, content: ContentRoot) -> None:
    answers = ["None", "'clear'", "True", "clear", "Finding('fine', [])", "Finding('clear', None)"]
    names = [f"odd-check-{number}" for number, _ in enumerate(answers)]
    for name, answer in zip(names, answers, strict=True):
        content.raw_probe(
            name, f"from kb.probe import Finding, Probe, clear\nprobe = Probe(check=lambda params: {answer})"
        )
    ended = kb("verify", *names, "--json")
    assert ended.code == 4
    assert [report["check"]["state"] for report in ended.json["reports"]] == ["unknown"] * len(answers)


def test_a_check_that_fails_is_unknown_never_clear(kb: Kb, content: ContentRoot) -> None:
    content.raw_probe(
        "bad-check",
        """
        from kb.probe import Probe

        def check(params):
            raise OSError("cannot look")

        probe = Probe(check=check)
        """,
    )
    ended = kb("verify", "bad-check", "--json")
    assert ended.json["verdict"] == "not-applicable"
    assert ended.json["check"]["state"] == "unknown"
    assert "cannot look" in ended.json["check"]["evidence"][0]
    assert ended.code == 4


def test_a_pattern_that_would_take_minutes_on_a_long_line_is_given_up(kb: Kb, content: ContentRoot) -> None:
    long_line = 'if not is_fixed:\n    raise RuntimeError("the thing broke: " + "ab" * 1900)'
    content.incident("slow", f'print("ab" * 5000)\n{long_line}', 'make(raised("a.*b.*c"))')
    content.incident("breaks")
    ended = kb("verify", "slow", "breaks", "--json", "--repeat", "1")
    reports = {report["id"]: report for report in ended.json["reports"]}
    assert reports["slow"]["verdict"] == "inconclusive"
    assert "takes too long on this output: a.*b.*c" in reports["slow"]["reason"]
    assert reports["breaks"]["verdict"] == "verified"
