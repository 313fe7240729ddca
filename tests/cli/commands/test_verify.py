"""`kb verify` as a reader meets it: plans, settings, exit codes, documents, and what it prints."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.console import BREAKS, KB, ContentRoot, Kb, arm_directories

CHECK = """
from kb.probe import Param, Probe, clear, exposed, unknown

def check(params):
    if params["size"] is None:
        return unknown("no size given", advice="say --set size=N")
    return clear("small") if params["size"] < 10 else exposed("%d is large" % params["size"], advice="make it smaller")

probe = Probe(check=check, params={"size": Param("int", "how large it is"), "file": Param("path", "where it is")})
"""


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


def test_a_plan_shows_what_would_run_and_runs_nothing(kb: Kb, content: ContentRoot, tmp_path: Path) -> None:
    content.incident("breaks", f"Path({str(tmp_path)!r}, 'ran').touch()")
    plan = kb("verify", "breaks", "--plan", "--json").json
    assert plan["schema"] == "kb.verify-plan.v1"
    assert plan["plans"][0]["experiments"][0]["arms"]["control"]["because"] == "it is broken"
    shown = kb("verify", "breaks", "--plan").out
    assert "treatment it is whole" in shown
    assert not (tmp_path / "ran").exists()
    assert kb("history", "breaks", "--json").code == 1


def test_repeats_are_counted_with_an_interval(kb: Kb, content: ContentRoot) -> None:
    content.incident("breaks")
    repeats = kb("verify", "breaks", "--json", "--repeat", "4").json["repeats"]
    assert (repeats["pairs"], repeats["control_failures"], repeats["treatment_failures"]) == (4, 4, 0)
    assert repeats["p"] == pytest.approx(1 / 70, abs=1e-4)


def test_a_stochastic_experiment_is_repeated_until_it_is_clear(kb: Kb, content: ContentRoot) -> None:
    content.incident("sometimes", probe='make(raised("the thing broke"), stochastic=True)')
    report = kb("verify", "sometimes", "--json").json
    assert report["verdict"] == "verified"
    assert report["repeats"]["pairs"] == 4


def test_logs_are_kept_where_told(kb: Kb, content: ContentRoot, tmp_path: Path) -> None:
    content.incident("breaks", "print('hello from rank', ctx.rank)\n" + BREAKS)
    kb("verify", "breaks", "--keep-logs", tmp_path / "logs")
    kept = tmp_path / "logs" / "breaks-plain-control"
    printed, *_, raised = (kept / "rank0.log").read_text().splitlines()
    assert (printed, raised) == ("hello from rank 0", "RuntimeError: the thing broke: code 7")
    assert json.loads((kept / "rank0.json").read_text())["outcome"] == "raised"


def test_several_ids_give_reports_and_a_summary(kb: Kb, content: ContentRoot) -> None:
    content.incident("breaks")
    content.raw_probe("sized", CHECK)
    ended = kb("verify", "breaks", "sized", "breaks", "--json")
    assert [report["id"] for report in ended.json["reports"]] == ["breaks", "sized"]
    assert ended.json["summary"] == {"not-applicable": 1, "verified": 1}
    assert ended.code == 0, "what does not apply here does not make a success a failure"


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


@pytest.mark.parametrize("arguments, code", [("list --json", 0), ("show stochastic-nonsense", 2), ("verify fails", 1)])
def test_a_reader_that_leaves_early_changes_neither_exit_code_nor_stderr(
    content: ContentRoot, arguments: str, code: int
) -> None:
    content.incident("fails", "if is_fixed:\n    raise RuntimeError('the thing broke: code 7')")
    command = f"set -o pipefail; {KB} {arguments} | true"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    assert "BrokenPipe" not in ended.stderr


COMMANDS = ["search", "show", "verify", "list", "env", "history", "serve", "lint", "index", "doctor"]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_says_what_it_is_for(kb: Kb, command: str) -> None:
    ended = kb(command, "--help")
    assert ended.code == 0
    assert len(ended.out.splitlines()) > 5
    assert f"{command} " in kb("--help").out


def test_an_unknown_command_is_a_usage_error(kb: Kb) -> None:
    ended = kb("serach", "timeout", "--json")
    assert ended.code == 2
    assert ended.json["error"]["type"] == "usage-error"


VARIANT = """replace(make(raised("the thing broke")), variants=(replace(
    make(raised("the thing broke")).experiments[0], name="library", {change}),))"""


def with_variant(content: ContentRoot, change: str) -> None:
    content.incident("both", probe=VARIANT.format(change=change))
    path = content.path / "probes" / "both.py"
    path.write_text("from dataclasses import replace\n" + path.read_text())


def test_a_variant_runs_besides_the_experiment(kb: Kb, content: ContentRoot) -> None:
    with_variant(content, "expected_s=(1, 1)")
    report = kb("verify", "both", "--json").json
    assert (report["verdict"], report["experiment"]) == ("verified", "plain")
    assert [(item["experiment"], item["verdict"]) for item in report["variants"]] == [("library", "verified")]


def test_a_variant_whose_library_is_missing_says_so(kb: Kb, content: ContentRoot) -> None:
    with_variant(content, 'needs=Needs(packages={"no-such-library": ""})')
    report = kb("verify", "both", "--json").json
    assert (report["verdict"], report["variants"]) == ("verified", [])
    assert "no-such-library is not installed" in report["skipped"][0]["reason"]


def test_a_variant_that_contradicts_takes_the_verdict(kb: Kb, content: ContentRoot) -> None:
    with_variant(
        content,
        'treatment=make(raised("the thing broke")).experiments[0].treatment.__class__('
        'partial(job, is_fixed=False), expect=completed(), because="not fixed", fidelity="cpu")',
    )
    ended = kb("verify", "both", "--json")
    report = ended.json
    assert ended.code == 1
    assert report["verdict"] == "fix-ineffective"
    assert report["reason"].startswith("variant library: ")


REFUSED = """replace(make(raised("the thing broke")), experiments=(
    replace(make(raised("the thing broke")).experiments[0], name="strong", control=Arm(
        refuse, expect=raised("the thing broke"), because="it cannot run", fidelity="cpu"),
        treatment=Arm(refuse, expect=completed(), because="it cannot run", fidelity="cpu")),
    make(raised("the thing broke")).experiments[0]))"""


def test_an_experiment_that_the_machine_refuses_gives_way_to_the_next(kb: Kb, content: ContentRoot) -> None:
    content.incident("fragile", probe=REFUSED)
    path = content.path / "probes" / "fragile.py"
    refuse = "def refuse(ctx):\n    raise Unavailable('no namespaces here')\n\n\n"
    source = "from dataclasses import replace\nfrom kb.probe import Unavailable\n" + path.read_text()
    path.write_text(source.replace("def make(", refuse + "def make("))
    report = kb("verify", "fragile", "--json").json
    assert (report["verdict"], report["experiment"]) == ("verified", "plain")
    assert report["skipped"] == [{"experiment": "strong", "reason": "no namespaces here"}]


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
        "and then this ended the job: rank 0: ValueError: rates differ",
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
