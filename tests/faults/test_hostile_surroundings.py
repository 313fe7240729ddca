"""A user's directory with our names in it, and interpreters that cannot run a probe."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from kb import doctor
from tests.support.console import BREAKS, ContentRoot, Kb

POISON = "raise SystemExit('the file of the user was imported: ' + __file__)\n"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A project that has folders and files of our names, each of which ends the process that imports it."""
    project = tmp_path / "project"
    for folder in ("kb", "api", "cli", "probes", "entries", "torch"):
        (project / folder).mkdir(parents=True)
        (project / folder / "__init__.py").write_text(POISON)
    for file in ("queue.py", "kb/probe.py", "typing_extensions.py", "json.py", "probe.py", "whoosh.py"):
        (project / file).write_text(POISON)
    return project


def test_a_working_directory_with_our_names_changes_nothing(kb: Kb, content: ContentRoot, hostile: Path) -> None:
    content.incident("sound")
    assert kb("search", "ALLGATHER timeout save", "--json", cwd=hostile).json["hits"]
    assert kb("show", "sound", "--json", cwd=hostile).json["id"] == "sound"
    ended = kb("verify", "sound", "--json", cwd=hostile)
    assert ended.json["verdict"] == "verified", ended.json["reason"]


def test_neighbours_of_a_probe_file_do_not_shadow_the_standard_library(kb: Kb, content: ContentRoot) -> None:
    content.incident("sound", "import queue, json\n" + BREAKS)
    for name in ("queue.py", "json.py"):
        (content.path / "probes" / name).write_text(POISON)
    assert kb("verify", "sound", "--json").json["verdict"] == "verified"


def test_doctor_names_a_package_on_pythonpath_that_shadows_kb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other" / "kb").mkdir(parents=True)
    assert doctor.check_import_name().is_fine
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    finding = doctor.check_import_name()
    assert not finding.is_fine
    assert str(tmp_path / "other" / "kb") in finding.message
    assert "PYTHONPATH" in finding.hint


def test_an_interpreter_without_torch_is_not_applicable_and_names_the_way_out(kb: Kb, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    ended = kb("verify", "checkpoint-save-allgather-timeout", "--json", "--python", python)
    assert ended.code == 4
    assert ended.json["verdict"] == "not-applicable"
    assert f"torch is not installed in {python}" in ended.json["reason"]
    assert "--python" in ended.json["next_step"]


def test_a_probe_runs_in_an_interpreter_in_which_kb_is_not_installed(
    kb: Kb, content: ContentRoot, tmp_path: Path
) -> None:
    content.incident("sound", "import sys\nctx.note(prefix=sys.prefix)\n" + BREAKS)
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    assert subprocess.run([python, "-c", "import kb"], capture_output=True, cwd=tmp_path).returncode != 0
    ended = kb("verify", "sound", "--json", "--python", python)
    assert ended.json["verdict"] == "verified"
    assert ended.json["arms"]["treatment"]["ranks"][0]["facts"]["prefix"] == str(tmp_path / "bare")


@pytest.mark.parametrize("python", ["/does/not/exist", "/bin/true", "/etc/passwd"])
def test_no_interpreter_at_all_is_bad_input(kb: Kb, content: ContentRoot, python: str) -> None:
    content.incident("sound")
    ended = kb("verify", "sound", "--json", "--python", python)
    assert ended.code == 2
    assert ended.json["ok"] is False
    assert ended.json["error"]["type"] == "interpreter-error"
    assert python in ended.json["error"]["message"]


def test_under_a_launcher_it_refuses_to_run_once_per_rank(kb: Kb) -> None:
    ended = kb("verify", "--all", "--json", RANK="3")
    assert ended.code == 2
    assert "rank 3 of another launcher" in ended.json["error"]["message"]


def test_variables_of_the_users_job_do_not_reach_the_arms(kb: Kb, content: ContentRoot) -> None:
    content.incident(
        "sound",
        "ctx.note(leaked=sorted(k for k in os.environ if k.startswith(('NCCL_', 'SLURM_', 'MASTER_'))))\n" + BREAKS,
    )
    ended = kb("verify", "sound", "--json", NCCL_P2P_DISABLE="1", MASTER_ADDR="10.0.0.1", SLURM_JOB_ID="7")
    assert ended.json["arms"]["treatment"]["ranks"][0]["facts"]["leaked"] == []
    assert {"NCCL_P2P_DISABLE", "MASTER_ADDR", "SLURM_JOB_ID"} <= set(ended.json["environment"]["removed_variables"])


def test_python_is_the_one_that_runs_kb_unless_told_otherwise(kb: Kb, content: ContentRoot) -> None:
    content.incident("sound", "import sys\nctx.note(prefix=sys.prefix)\n" + BREAKS)
    facts = kb("verify", "sound", "--json").json["arms"]["treatment"]["ranks"][0]["facts"]
    assert facts["prefix"] == sys.prefix
