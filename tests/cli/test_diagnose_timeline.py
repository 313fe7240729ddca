"""`kb diagnose --timeline` and `--html`: what is drawn and written, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.console import Kb

STEPS = "".join(f"[rank{rank}]: step {step} loss 1.25\n" for step in range(1, 201) for rank in range(4))
TRACEBACK = """\
[rank2]: Traceback (most recent call last):
[rank2]:   File "/work/t.py", line 44, in save
[rank2]:     f()
[rank2]: FluxError: the capacitor is off
"""
AXIS = "-" * 40
CODE_OF_USAGE = 2


@pytest.fixture
def log(tmp_path: Path) -> str:
    (tmp_path / "job.log").write_text(STEPS + TRACEBACK)
    return "job.log"


def test_the_timeline_is_below_the_answer(kb: Kb, log: str) -> None:
    ended = kb("diagnose", log, "--timeline")
    assert ended.code == 1, "no entry explains it"
    lines = ended.out.splitlines()
    axis = next(number for number, line in enumerate(lines) if AXIS in line)
    assert axis > next(number for number, line in enumerate(lines) if "FluxError" in line)
    assert [line.split("|")[0].strip() for line in lines[axis + 1 : axis + 4]] == ["ranks 0-1", "rank 2", "rank 3"]
    assert "X| t.py:44" in ended.out


def test_without_the_option_there_is_none(kb: Kb, log: str) -> None:
    assert AXIS not in kb("diagnose", log).out


def test_a_healthy_log_has_a_timeline_too(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "healthy.log").write_text(STEPS)
    ended = kb("diagnose", "healthy.log", "--timeline")
    assert "ranks 0-3" in ended.out
    assert AXIS in ended.out


def test_attempts_are_numbered_in_both_languages(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(STEPS + "Restarting worker group\n" + STEPS + TRACEBACK)
    english, chinese = kb("diagnose", "job.log", "--timeline"), kb("diagnose", "job.log", "--timeline", "--lang", "zh")
    assert "attempt 1 of 2" in english.out
    assert "attempt 2 of 2" in english.out
    assert "attempt 1 of 2" not in chinese.out
    assert english.out.count(AXIS) == chinese.out.count(AXIS) == 2


def test_the_timeline_executes_nothing_on_a_terminal(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(STEPS + TRACEBACK.replace("t.py", "t\x1b]0;owned\x07\x9b31m.py"))
    out = kb("diagnose", "job.log", "--timeline").out
    assert not {"\x1b", "\x07", "\x9b"} & set(out)


def test_timeline_and_json_exclude_each_other(kb: Kb, log: str) -> None:
    ended = kb("diagnose", log, "--timeline", "--json")
    assert ended.code == CODE_OF_USAGE
    assert ended.json["error"]["message"] == "--timeline and --json exclude each other"
    assert "`story`" in ended.json["error"]["hint"]


def test_json_has_the_timeline_under_story(kb: Kb, log: str) -> None:
    (attempt,) = kb("diagnose", log, "--json").json["story"]["attempts"]
    assert [row["rank"] for row in attempt["rows"]] == [0, 1, 2, 3]
    assert [row["mark"] for row in attempt["rows"]] == ["", "", "X", ""]


def test_html_is_written_and_named(kb: Kb, log: str, tmp_path: Path) -> None:
    ended = kb("diagnose", log, "--html", "answer.html")
    assert ended.code == 1
    assert "written: answer.html" in ended.err
    page = (tmp_path / "answer.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "FluxError: the capacitor is off" in page


def test_html_goes_with_json_and_with_timeline(kb: Kb, log: str, tmp_path: Path) -> None:
    assert kb("diagnose", log, "--html", "one.html", "--json").json["unexplained"]
    assert AXIS in kb("diagnose", log, "--html", "two.html", "--timeline").out
    assert (tmp_path / "one.html").read_text() == (tmp_path / "two.html").read_text()


def test_html_replaces_an_earlier_answer(kb: Kb, log: str, tmp_path: Path) -> None:
    (tmp_path / "answer.html").write_text("earlier" * 100_000)
    kb("diagnose", log, "--html", "answer.html")
    assert "earlier" not in (tmp_path / "answer.html").read_text()


@pytest.mark.parametrize(
    ("name", "reason"), [("no-folder/answer.html", "No such file or directory"), (".", "Is a directory")]
)
def test_a_file_that_cannot_be_written_is_a_usage_error(kb: Kb, log: str, name: str, reason: str) -> None:
    ended = kb("diagnose", log, "--html", name)
    assert ended.code == CODE_OF_USAGE
    assert f"cannot write {name}: {reason}" in ended.err
    assert "name another file with --html" in ended.err
    assert "Traceback" not in ended.err


def test_a_log_of_the_bytes_of_no_character_is_written(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_bytes((STEPS + TRACEBACK).encode() + b"[rank2]: ERROR \xff\xfe\xed\xa0\x80\n")
    assert kb("diagnose", "job.log", "--html", "answer.html", "--timeline").code == 1
    assert (tmp_path / "answer.html").exists()


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_job_that_goes_well_and_slows_down_says_since_which_step(kb: Kb, tmp_path: Path, lang: str) -> None:
    rates = "".join(f"step {step} tokens/s {9000 if step < 30 else 3000}\n" for step in range(1, 60))
    (tmp_path / "slow.log").write_text(rates + "training finished\n")
    ended = kb("diagnose", "slow.log", "--lang", lang)
    assert "tokens_s falls to 33% at step 30 and stays there" in ended.out
    assert ended.code == 1, "no entry explains it"
    assert kb("diagnose", "slow.log", "--json").json["findings"] == []


def test_a_loss_that_begins_again_behind_a_resume_is_the_decisive_line(kb: Kb, tmp_path: Path) -> None:
    before = "".join(f"step {step} loss {4 - step / 10:.2f}\n" for step in range(1, 31))
    (tmp_path / "job.log").write_text(f"{before}resuming from ckpt-30\nstep 31 loss 3.9\nstep 32 loss 3.8\n")
    document = kb("diagnose", "job.log", "--json").json
    assert "as high as at the start of the run" in document["brief"]["decisive"]["text"]
    assert document["brief"]["entry"] == "state-dict-prefix-mismatch"
