"""A client that a generator makes of the description: it asks a running service and gets typed answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.console import CHECKOUT, GENEROUS_S
from tests.support.programs import missing
from tests.support.replicas import Place, started

pytestmark = pytest.mark.slow

LOG = "[rank1]: RuntimeError: The server socket has failed to listen on any local network address. EADDRINUSE\n"

GENERATOR = "openapi-python-client==0.29.1"
HOME = CHECKOUT / "build" / "client-venv"  # an environment of its own: the generator needs another typer than kb
USED = """\
import datetime, importlib, io, json, pathlib, sys
from kb_client import AuthenticatedClient
from kb_client.api.context import get_context
from kb_client.api.diagnose import diagnose
from kb_client.api.entries import get_entry, list_entries
from kb_client.api.feedback import post_feedback
from kb_client.api.reports import get_report, post_report
from kb_client.api.search import search, search_text
from kb_client.models import DiagnoseJsonBody, FeedbackDocument, Problem, SearchText, SharedReport
from kb_client.types import File

url, key, document, log = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
modules = sorted(
    ".".join(path.with_suffix("").parts)
    for path in pathlib.Path("kb_client/api").glob("*/*.py")
    if path.stem != "__init__"
)
operations = [importlib.import_module(module) for module in modules]
with AuthenticatedClient(url, token=key, raise_on_unexpected_status=True, httpx_args={"trust_env": False}) as client:
    found = search.sync(client=client, q="ALLGATHER timeout save", limit=3)
    same = search_text.sync(client=client, body=SearchText(q="ALLGATHER timeout save", limit=3))
    entry = get_entry.sync(found.hits[0].id, client=client)
    report = SharedReport.from_dict(document)
    receipts = [post_report.sync_detailed(client=client, body=report, idempotency_key="key-of-a-test") for _ in "12"]
    kept = get_report.sync(receipts[0].parsed.number, client=client)
    counts = post_feedback.sync(client=client, body=FeedbackDocument(entry=entry.id, helped=True))
    unknown = get_entry.sync("no-such-entry", client=client)
    page = list_entries.sync(client=client, limit=2)
    rest = list_entries.sync(client=client, limit=2, cursor=page.next_)
    assert isinstance(unknown, Problem)
    as_bytes = diagnose.sync(client=client, body=File(io.BytesIO(log.encode())), limit=1)
    as_json = diagnose.sync(client=client, body=DiagnoseJsonBody.from_dict({"message": log}))
    context = get_context.sync(client=client, q="ALLGATHER timeout save", max_chars=1500)
    print(json.dumps({
        "hit": found.hits[0].id,
        "same": same.hits[0].id,
        "entry": [entry.id, entry.severity.value, "Fix" in entry.sections.to_dict()],
        "statuses": [receipt.status_code for receipt in receipts],
        "numbers": [receipt.parsed.number for receipt in receipts],
        "kept": [kept.verdict.value, kept.machine.gpus, kept.started_at.isoformat()],
        "helped": counts.helped,
        "operations": len([operation for operation in operations if operation.sync_detailed]),
        "diagnoses": [
            [finding.id, bool(finding.fix.text), finding.fix.citation.partition(",")[0], finding.url.partition("/entries/")[2]]
            for finding in (as_bytes.findings[0], as_json.findings[0])
        ],
        "omitted": as_bytes.omitted.findings > 0 and len(as_bytes.findings) == 1,
        "cited": context.claims[0].entry,
        "unknown": unknown.type_,
        "pages": sorted({receipt.id for receipt in page.entries + rest.entries}) == [
            receipt.id for receipt in page.entries + rest.entries
        ],
    }))
"""


@pytest.fixture
def python() -> Path:
    """The interpreter of an environment that holds the generator, made once."""
    result, mark = HOME / "bin" / "python", HOME / GENERATOR
    if not mark.exists():
        shutil.rmtree(HOME, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", HOME], check=True, timeout=GENEROUS_S)
        install = [str(result), "-m", "pip", "install", "--quiet", "--only-binary=:all:", GENERATOR]
        ended = subprocess.run(install, capture_output=True, text=True, timeout=GENEROUS_S)
        if ended.returncode:
            missing(f"{GENERATOR} cannot be installed: {ended.stderr.strip()[-300:]}")
        mark.touch()
    return result


@pytest.fixture
def place(tmp_path: Path, built_in_index: Path) -> Place:
    return Place(tmp_path, built_in_index)


def generate(python: Path, description: object, folder: Path) -> list[str]:
    """Make the package `kb_client`; what the generator left out."""
    (folder / "openapi.json").write_text(json.dumps(description))
    command = [str(python), "-m", "openapi_python_client", "generate", "--path", "openapi.json", "--meta", "none"]
    made = subprocess.run(
        [*command, "--output-path", "kb_client"], cwd=folder, capture_output=True, text=True, timeout=GENEROUS_S
    )
    assert made.returncode == 0, made.stderr
    return [line for line in f"{made.stdout}{made.stderr}".splitlines() if line.startswith(("WARNING", "ERROR"))]


def use(python: Path, folder: Path, *args: str) -> Any:
    (folder / "used.py").write_text(USED)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)}
    command = [str(python), "used.py", *args]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=GENEROUS_S)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_generated_client_searches_reads_and_reports(python: Path, place: Place, tmp_path: Path) -> None:
    key = place.key("report")
    with started(place) as replica:
        _, description = replica.get("/openapi.json")
        left_out = generate(python, description, tmp_path)
        report = description["paths"]["/v1/reports"]["post"]["requestBody"]["content"]["application/json"]["example"]
        result = use(python, tmp_path, replica.url, key, json.dumps(report), LOG)
    # It sends a body as octet-stream or JSON, and knows no other media type.
    assert set(left_out) == {"WARNING parsing POST /v1/diagnose within diagnose."}
    operations = [operation for item in description["paths"].values() for operation in item.values()]
    assert result == {
        "hit": "checkpoint-save-allgather-timeout",
        "same": "checkpoint-save-allgather-timeout",
        "entry": ["checkpoint-save-allgather-timeout", "high", True],
        "statuses": [201, 200],
        "numbers": [1, 1],
        "kept": ["verified", report["machine"]["gpus"], "2026-03-01T08:30:00+00:00"],
        "helped": True,
        "operations": len(operations),
        "diagnoses": [["address-in-use", True, "[address-in-use § Fix", "address-in-use"]] * 2,
        "omitted": True,
        "cited": "checkpoint-save-allgather-timeout",
        "unknown": "urn:kb:problem:unknown-entry",
        "pages": True,
    }
