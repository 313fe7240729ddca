"""`kb verify` of probes that check this machine, with the numbers and files that the user names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.console import ContentRoot, Kb

CHECK = """
from kb.probe import Param, Probe, clear, exposed, unknown

def check(params):
    if params["size"] is None:
        return unknown("no size given", advice="say --set size=N")
    return clear("small") if params["size"] < 10 else exposed("%d is large" % params["size"], advice="make it smaller")

probe = Probe(check=check, params={"size": Param("int", "how large it is"), "file": Param("path", "where it is")})
"""


@pytest.mark.parametrize(
    "settings, verdict, code",
    [([], "not-applicable", 4), (["--set", "size=3"], "clear", 0), (["--set", "size=30"], "exposed", 1)],
)
def test_a_check_takes_the_users_numbers(
    kb: Kb, content: ContentRoot, settings: list[str], verdict: str, code: int
) -> None:
    content.raw_probe("sized", CHECK)
    ended = kb("verify", "sized", "--json", *settings)
    assert (ended.json["verdict"], ended.code) == (verdict, code)
    assert ended.json["fidelity"] == "check"
    assert ended.json["check"]["evidence"]


def test_an_exposed_machine_is_exit_1_even_when_the_mechanism_is_verified(kb: Kb, content: ContentRoot) -> None:
    content.incident("both")
    probe = content.path / "probes" / "both.py"
    probe.write_text(
        probe.read_text()
        + "\nfrom dataclasses import replace\nfrom kb.probe import exposed\n"
        + "probe = replace(probe, check=lambda params: exposed('it is here', advice='remove it'))\n"
    )
    ended = kb("verify", "both", "--json")
    assert ended.json["verdict"] == "verified"
    assert ended.json["check"]["state"] == "exposed"
    assert ended.json["next_step"] == "remove it"
    assert ended.code == 1


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["sized", "--set", "size"], "expected KEY=VALUE"),
        (["sized", "--set", "size=many"], "not a whole number"),
        (["sized", "--set", "file=no-such.pt"], "not the path of a file or folder that is there"),
        (["sized", "--set", "colour=red"], "no chosen probe takes 'colour'"),
        ([], "name the entries to verify"),
        (["sized", "--all"], "either ids or --all"),
        (["sized", "--repeat", "-1"], "repeat"),
        (["sized", "--keep-logs", "/dev/null/logs"], "--keep-logs /dev/null/logs"),
        (["sized", "--no-such-option"], "no-such-option"),
    ],
)
def test_bad_input_is_exit_2_with_one_document(kb: Kb, content: ContentRoot, arguments: list[str], says: str) -> None:
    content.raw_probe("sized", CHECK)
    ended = kb("verify", "--json", *arguments)
    assert ended.code == 2
    assert ended.json["ok"] is False
    assert says in ended.json["error"]["message"]


def test_a_relative_path_means_the_callers_directory(kb: Kb, content: ContentRoot, tmp_path: Path) -> None:
    content.raw_probe("sized", CHECK)
    (tmp_path / "a.pt").touch()
    assert kb("verify", "sized", "--json", "--set", "file=a.pt").json["params"]["file"] == str(tmp_path / "a.pt")


def test_several_ids_give_reports_and_a_summary(kb: Kb, content: ContentRoot) -> None:
    content.incident("breaks")
    content.raw_probe("sized", CHECK)
    ended = kb("verify", "breaks", "sized", "breaks", "--json")
    assert [report["id"] for report in ended.json["reports"]] == ["breaks", "sized"]
    assert ended.json["summary"] == {"not-applicable": 1, "verified": 1}
    assert ended.code == 0, "what does not apply here does not make a success a failure"


@pytest.mark.parametrize(
    "answer, code", [("unknown('cannot read it')", 3), ("exposed('torn')", 1), ("clear('whole')", 0)]
)
def test_what_is_said_of_a_named_file_comes_before_the_arms(
    kb: Kb, content: ContentRoot, tmp_path: Path, answer: str, code: int
) -> None:
    declared = (
        f'replace(make(raised("the thing broke")), check=lambda p: {answer}, params={{"file": Param("path", "it")}})'
    )
    content.incident("about-files", probe=declared)
    path = content.path / "probes" / "about_files.py"
    imports = "from dataclasses import replace\nfrom kb.probe import Param, clear, exposed, unknown\n"
    path.write_text(imports + path.read_text())
    (tmp_path / "x").touch()
    ended = kb("verify", "about-files", "--set", f"file={tmp_path / 'x'}")
    assert ended.code == code
    assert ended.out.splitlines()[1].startswith(f"  your file: {answer.partition('(')[0]}")
    assert kb("verify", "about-files").code == (code if code == 1 else 0), "without a file only the arms decide"


NEEDS_MORE = """make(raised("the thing broke"), needs=Needs(packages={"no-such-package": ""}))"""
CLEAR_NOW = f'replace({NEEDS_MORE}, check=lambda p: clear("free now"), params={{"port": Param("int", "a port", 1)}})'


def test_a_check_that_finds_nothing_now_is_no_pass_of_experiments_that_could_not_run(
    kb: Kb, content: ContentRoot
) -> None:
    """As after a clash of ports, in an environment without torch."""
    content.incident("clash", probe=CLEAR_NOW)
    path = content.path / "probes" / "clash.py"
    path.write_text("from dataclasses import replace\nfrom kb.probe import Param, clear\n" + path.read_text())
    ended = kb("verify", "clash", "--json")
    assert (ended.code, ended.json["verdict"], ended.json["check"]["state"]) == (4, "not-applicable", "clear")
    assert "verifies neither the incident nor its fix" in ended.json["reason"]
    assert "--python" in ended.json["next_step"]
    asked = kb("verify", "clash", "--json", "--set", "port=29500")
    assert (asked.code, asked.json["verdict"]) == (0, "clear")
    assert "kb diagnose" in asked.json["next_step"]
