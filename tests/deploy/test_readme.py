"""deploy/README.md and docs/security.md: their commands do what is said of them, on real databases and a real server."""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from kb.store import feedback, keys, reports
from kb.store.database import Database
from kb.store.keys import Scope
from tests.support.console import CHECKOUT
from tests.support.kb_serve import listening_cold
from tests.support.postgres_server import free_port

pytest_plugins = ["tests.support.postgres_fixtures"]

DEPLOY = CHECKOUT / "deploy"
README = (DEPLOY / "README.md").read_text(encoding="utf-8")
SECURITY = (CHECKOUT / "docs" / "security.md").read_text(encoding="utf-8")
REPORT: dict[str, Any] = {
    "id": "nan-loss",
    "verdict": "verified",
    "fidelity": "cpu",
    "started_at": "2026-03-01T08:30:00Z",
    "duration_s": 1.0,
    "entry_digest": "",
    "probe_digest": "",
    "kb_version": "0.1.0",
}


def command(start: str) -> list[str]:
    """The words of the one command that begins so, with the lines that it goes on in."""
    (result,) = re.findall(rf"^ *({re.escape(start)}(?:[^\n]*\\\n)*[^\n]*)$", README, re.MULTILINE)
    return shlex.split(result)


def execute(store: Database, *statements: str) -> None:
    with store.writing() as session:
        for statement in statements:
            session.connection().exec_driver_sql(statement)


def test_it_installs_what_the_image_installs() -> None:
    install = command("python3 -m venv")
    assert install[install.index("-c") :] == ["-c", "constraints.txt", ".[server]"]
    assert "-c constraints.txt '.[server]'" in (DEPLOY / "Containerfile").read_text()


def test_who_asks_at_once_waits_until_it_is_ready() -> None:
    port = str(free_port())
    curl = [word.replace("8000", port) for word in command("curl")]
    asking = subprocess.Popen(curl, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with asking, listening_cold("--port", port):
        output, _ = asking.communicate(timeout=120)
    assert (asking.returncode, json.loads(output)["status"]) == (0, "ready")


def test_the_first_key_is_made_with_the_image_and_the_database_of_the_manifest() -> None:
    objects = {item["kind"]: item for item in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    words = command("kubectl run")
    options = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
    (changed,) = json.loads(options["--overrides"])["spec"]["containers"]
    assert changed["name"] == words[2]
    assert options["--image"] == container["image"]
    assert changed["envFrom"] == [{"secretRef": {"name": objects["Secret"]["metadata"]["name"]}}]
    assert words[words.index("--") + 1 :][:2] == ["key", "new"]


def test_a_backup_from_the_container_is_a_store_for_its_owner_alone(tmp_path: Path) -> None:
    *_, program, code = command("docker exec")
    where, copy = tmp_path / "service.db", tmp_path / "FILE"
    with Database.open(where) as store:
        keys.new(store, "test", Scope.READ)
        subprocess.run([sys.executable, program, code.replace("/var/lib/kb", str(tmp_path))], check=True, timeout=60)
        keys.new(store, "later", Scope.READ)
    assert copy.stat().st_mode & 0o777 == 0o600
    with Database.open(copy) as store:
        store.prepare()
        assert [item.key.name for item in keys.list_all(store)] == ["test"]
    with closing(sqlite3.connect(copy)) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_the_rows_of_one_key_are_deleted_and_what_they_kept_may_come_again(database: Database) -> None:
    leaked = re.findall(r"^  (DELETE FROM .*);$", SECURITY, re.MULTILINE)
    (bad,) = {re.findall(r"'(.*)'", statement)[0] for statement in leaked}
    for sender in (bad, "k0000000"):
        reports.add_shared(database, REPORT, sender, f"number-{sender}", "digest")
        feedback.add(database, "nan-loss", True, "", "", "", sender)
    reports.save(database, [REPORT])
    execute(database, *leaked)
    assert (reports.count(database), len(reports.history(database))) == (1, 1)
    assert [(helped, no) for *_, helped, no in feedback.counts(database)] == [(1, 0)]
    assert reports.add_shared(database, REPORT, bad, f"number-{bad}", "digest").is_new


@pytest.mark.parametrize(("before", "left"), [("2025-01-01", 1), ("2999-01-01", 0)])
def test_old_reports_are_deleted_and_those_of_this_user_are_not(database: Database, before: str, left: int) -> None:
    (statement,) = re.findall(r"`(DELETE FROM report WHERE received_at [^`]*)`", README)
    reports.add_shared(database, REPORT, "k0000000", "number-1", "digest")
    reports.save(database, [REPORT])
    text = statement.replace("2025-01-01", before)
    execute(database, text, text.replace("report", "feedback"), f"DELETE FROM audit WHERE at < '{before}'")
    assert (reports.count(database), len(reports.history(database))) == (left, 1)
