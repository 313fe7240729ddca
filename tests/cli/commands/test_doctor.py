"""`kb doctor` as a reader meets it."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest

from kb import doctor
from kb.store.database import Database
from tests.support.console import Kb

pytest_plugins = ["tests.support.postgres_fixtures"]


def test_an_interpreter_is_found_as_every_other_command_finds_it(kb: Kb, home: Path) -> None:
    (home / "env").mkdir()
    python = home / "env" / "python"
    python.symlink_to(sys.executable)
    findings = kb("doctor", "--json", "--python", "~/env/python").json["findings"]
    (torch,) = (finding for finding in findings if finding["subject"] == "torch")
    assert str(python) in torch["message"]
    assert "is not an interpreter" not in torch["message"]


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which nothing is installed."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


def test_a_host_without_torch_is_sound_unless_its_interpreter_was_named_for_probes(without_torch: Path) -> None:
    own = doctor.check_torch(without_torch, is_named=False)
    assert (own.is_fine, "the service do not" in own.message, "--python" in own.hint) == (True, True, True)
    named = doctor.check_torch(without_torch, is_named=True)
    assert (named.is_fine, "No module named 'torch'" in named.message) == (False, True)


def test_the_database_of_a_service_is_looked_at_beside_the_own_store(kb: Kb, tmp_path: Path) -> None:
    where = tmp_path / "service" / "kb.db"
    ended = kb("doctor", "--json", KB_DATABASE_URL=f"sqlite:///{where}")
    result = {finding["subject"]: finding for finding in ended.json["findings"]}
    assert (ended.code, result["store"]["is_fine"]) == (1, True)
    assert result["database"]["message"] == f"nothing is stored in {where} yet"
    assert "kb key new" in result["database"]["mend"]
    assert not where.parent.exists(), "whoever looks does not begin it"


def test_a_database_that_is_in_use_is_fine(database_url: str) -> None:
    with Database.open(database_url) as opened:
        opened.prepare()
        assert doctor.check_database(database_url) == doctor.HealthCheck("database", True, f"writable, {opened.name}")


def test_an_empty_database_of_postgresql_stays_empty(empty_postgres_url: str) -> None:
    assert "nothing is stored" in doctor.check_database(empty_postgres_url).message
    with Database.open(empty_postgres_url) as opened, opened.reading() as session:
        assert session is None


@pytest.mark.parametrize(
    ("url", "mend"),
    [
        ("mysql://kb:geheim@localhost/kb", "postgresql://user:password@host/database"),
        ("postgresql://kb:geheim@127.0.0.1:1/kb", "is the server of KB_DATABASE_URL up"),
        ("postgresql://127.0.0.1:1/kb?user=kb&password=geheim", "is the server of KB_DATABASE_URL up"),
        ("postgresql://kb:a@geheim@127.0.0.1:1/kb", "%40"),
        ("postgresql://kb:a@geheim/geheim@127.0.0.1:1/kb", "%40"),
        ("postgresql://kb:geheim@[::1/kb", "sqlite:////absolute/path"),
    ],
)
def test_a_database_that_cannot_be_used_has_a_hint_and_its_password_is_not_shown(url: str, mend: str) -> None:
    result = doctor.check_database(url)
    assert not result.is_fine
    assert mend in result.hint
    assert "geheim" not in f"{result.message} {result.hint}"


def test_a_file_that_is_no_database_is_no_database_of_a_service(tmp_path: Path) -> None:
    (tmp_path / "kb.db").write_text("no database " * 100)
    assert not doctor.check_database(str(tmp_path / "kb.db")).is_fine
