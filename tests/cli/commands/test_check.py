"""`kb check`: every check is asked, none can stop it, and the exit code says what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.console import ContentRoot, Kb

pytestmark = pytest.mark.usefixtures("few_entries")

READS_CONFIG = """
import json
from kb.probe import Param, Probe, clear, exposed, unknown

def check(params):
    if params["config"] is None:
        return unknown("no configuration was named")
    stage = json.loads(params["config"].read_text()).get("stage")
    if stage is None:
        return unknown("it says no stage")
    return exposed("stage %d" % stage, advice="lower it") if stage > 2 else clear("stage %d" % stage)

probe = Probe(check=check, params={"config": Param("path", "the configuration")})
"""


def always(answer: str) -> str:
    return f"from kb.probe import *\nprobe = Probe(check=lambda params: {answer})"


def answer_of(document: Any, entry_id: str) -> Any:
    (result,) = [item for item in document["answers"] if item["id"] == entry_id]
    return result


@pytest.mark.parametrize("stage, state, code", [("3", "exposed", 1), ("1", "clear", 0), ("null", "unknown", 3)])
def test_a_configuration_is_handed_to_the_checks_that_read_one(
    kb: Kb, content: ContentRoot, tmp_path: Path, stage: str, state: str, code: int
) -> None:
    content.raw_probe("staged", READS_CONFIG)
    (tmp_path / "ds.json").write_text(f'{{"stage": {stage}}}')
    ended = kb("check", "--config", "ds.json", "--json")
    answer = answer_of(ended.json, "staged")
    assert (answer["state"], answer["takes_given_file"]) == (state, True)
    if state == "exposed":
        assert ended.code == code
    others = {item["state"] for item in ended.json["answers"] if item["takes_given_file"]}
    assert ended.code == (1 if ended.json["counts"]["exposed"] else 0 if "clear" in others else 3)


def test_what_is_exposed_comes_first_with_what_to_do(kb: Kb, content: ContentRoot) -> None:
    content.raw_probe("bare", always('exposed("too small", advice="make it larger")'))
    ended = kb("check")
    assert ended.code == 1
    first = ended.out[ended.out.index("bare") :].splitlines()
    assert first[1:4] == ["  too small", "  do: make it larger", "  read: kb show bare"]


def test_a_setting_that_a_check_asks_for_is_part_of_a_command(kb: Kb, content: ContentRoot) -> None:
    content.raw_probe("asks", always('unknown("no file", advice="--set data=a.json --set key=x, or the folder")'))
    advised = "`kb verify asks --set data=a.json --set key=x`, or the folder"
    assert f"next: {advised}\n" in kb("verify", "asks").out


def test_the_check_of_a_named_entry_answers_whatever_it_found(kb: Kb, content: ContentRoot) -> None:
    content.raw_probe("fine", always('clear("large enough")'))
    content.raw_probe("bare", always('exposed("too small")'))
    ended = kb("check", "fine")
    assert (ended.code, "clear    fine" in ended.out, "  large enough" in ended.out) == (0, True, True)
    assert "bare" not in ended.out
    assert [answer["id"] for answer in kb("check", "bare", "fine", "bare", "--json").json["answers"]] == [
        "bare",
        "fine",
    ]


def test_a_named_entry_without_a_check_is_bad_input(kb: Kb, content: ContentRoot) -> None:
    content.incident("armed", "pass")
    ended = kb("check", "armed", "--json")
    assert (ended.code, ended.json["error"]["message"]) == (2, "armed has no check")
    assert kb("check", "no-such-entry").code == 2


def test_nagios_gets_one_line_and_its_own_exit_codes(kb: Kb, content: ContentRoot) -> None:
    content.raw_probe("bare", always('exposed("a | b")'))
    ended = kb("check", "--format", "nagios")
    (line,) = ended.out.splitlines()
    assert ended.code == (2 if "CRITICAL" in line else 1)
    message, _, data = line.partition(" | ")
    assert "bare (a / b)" in message
    assert data.startswith("exposed=")


@pytest.mark.parametrize(
    "answer", ["1 / 0", "__import__('time').sleep(60)", "__import__('os').kill(0, 9)", "None", "exposed(1) if 0 else 3"]
)
def test_a_broken_check_is_an_answer_and_the_others_go_on(
    kb: Kb, content: ContentRoot, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr("kb.verify.checks.CHECK_S", 3.0)
    content.raw_probe("broken", always(answer))
    content.raw_probe("whole", always('clear("fine")'))
    document = kb("check", "--json").json
    assert answer_of(document, "broken")["state"] == "unknown"
    assert answer_of(document, "broken")["evidence"][0].startswith("the check failed: ")
    assert answer_of(document, "whole")["state"] == "clear"


def test_a_missing_configuration_is_bad_input(kb: Kb) -> None:
    ended = kb("check", "--config", "none.json", "--json")
    assert (ended.code, ended.json["ok"], ended.json["error"]["type"]) == (2, False, "usage-error")


def test_no_arm_runs(kb: Kb, content: ContentRoot, tmp_path: Path) -> None:
    content.incident("armed", f"Path({str(tmp_path)!r}, 'ran').touch()")
    kb("check")
    assert not (tmp_path / "ran").exists()


def test_every_built_in_check_answers_about_this_machine(kb_process: Kb) -> None:
    answers = kb_process("check", "--json").json["answers"]
    assert len(answers) >= 14
    assert not [answer for answer in answers if "the check failed" in " ".join(answer["evidence"])], json.dumps(answers)
