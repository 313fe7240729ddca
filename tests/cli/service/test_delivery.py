"""`kb verify --report URL`: the verdict is the machine's, whatever becomes of the report."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kb.sharing.shared_report import SharedReport
from tests.support.console import GENEROUS_S, ContentRoot, Ended, Kb, end, wait_for
from tests.support.fake_service import FakeService, hang, listening, says
from tests.support.replicas import Place, started
from tests.support.warm_start import PIPE, start_warm

IMPORTS = ("kb.cli.main", "kb.cli.commands.verify", "kb.content.catalog")
SECRET = "kb_abcdefgh_" + "s" * 43
NAMES_THINGS = """
if not is_fixed:
    raise RuntimeError("the thing broke: code 7 for alice@example.org at 10.1.2.3, password=hunter2")
"""


@pytest.fixture
def service(content: ContentRoot, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    content.incident("breaks")
    monkeypatch.setenv("KB_API_KEY", SECRET)
    with listening() as service:
        yield service


@pytest.fixture
def away() -> Iterator[str]:
    """An address of this machine at which nobody answers."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}"


def outbox() -> Path:
    return Path(os.environ["XDG_DATA_HOME"]) / "kb" / "outbox"


def waiting() -> list[Path]:
    return list(outbox().glob("*.json"))


def is_verified(ended: Ended) -> bool:
    return ended.code == 0 and "verified" in ended.out and "internal error" not in ended.err


def test_the_report_arrives_in_its_shared_form_with_the_key(kb: Kb, service: FakeService) -> None:
    ended = kb("verify", "breaks", "--report", service.url)
    assert is_verified(ended)
    assert f"kb: 1 report sent to {service.url}\n" in ended.err
    (request,) = service.requests
    sent = SharedReport.model_validate_json(request.body)
    assert (sent.id, sent.verdict, sent.fidelity) == ("breaks", "verified", "cpu")
    assert request.headers["Authorization"] == f"Bearer {SECRET}"
    assert not waiting()


def test_a_service_of_the_team_has_it_and_shows_it(kb: Kb, content: ContentRoot, tmp_path: Path, home: Path) -> None:
    content.incident("breaks")
    (tmp_path / "service").mkdir()
    place = Place(tmp_path / "service", home / "cache", {"KB_ROOTS": str(content.path)})
    key = place.key("report")
    with started(place) as replica:
        ended = kb("verify", "breaks", "--json", "--report", replica.url, KB_API_KEY=key)
        assert ended.json["reported"]["sent"] == 1, ended.err
        status, result = replica.get("/v1/entries/breaks/reports")
    assert status == 200
    (shown,) = result["reports"]
    assert (shown["verdict"], shown["earlier_wording"]) == ("verified", False)
    assert shown["entry_digest"] == ended.json["entry_digest"]
    assert shown["machine"]["python"] == ended.json["environment"]["python"]["version"]


def test_what_names_people_and_machines_stays_here(kb: Kb, content: ContentRoot, service: FakeService) -> None:
    content.incident("names-things", NAMES_THINGS)
    assert is_verified(kb("verify", "names-things", "--report", service.url))
    body = service.requests[0].body.decode()
    assert "the thing broke: code 7" in body
    for name in ("alice", "10.1.2.3", "hunter2", socket.gethostname(), os.environ["HOME"], str(content.path), SECRET):
        assert name not in body


def test_json_says_what_became_of_the_report(kb: Kb, service: FakeService) -> None:
    ended = kb("verify", "breaks", "--json", KB_REPORT_URL=f"{service.url}/")
    assert (ended.code, ended.json["verdict"]) == (0, "verified")
    assert ended.json["reported"] == {"url": service.url, "sent": 1, "queued": 0, "refused": 0, "problem": None}


def test_several_reports_are_one_each(kb: Kb, content: ContentRoot, service: FakeService) -> None:
    content.incident("breaks-too")
    ended = kb("verify", "breaks", "breaks-too", "--json", "--report", service.url)
    assert ended.json["reported"]["sent"] == 2
    assert {json.loads(body)["id"] for body in service.kept.values()} == {"breaks", "breaks-too"}


def test_nothing_is_sent_or_queued_unless_asked_for(kb: Kb, service: FakeService) -> None:
    ended = kb("verify", "breaks", "--json", KB_REPORT_URL="")
    assert "reported" not in ended.json
    assert not service.requests
    assert not outbox().exists()


def test_a_service_that_is_away_leaves_the_verdict_and_gets_the_report_later(
    kb: Kb, service: FakeService, away: str
) -> None:
    ended = kb("verify", "breaks", "--report", away)
    assert is_verified(ended)
    assert f"{away} cannot be reached: Connection refused" in ended.err
    assert f"1 report waiting: `kb verify --report {away}` tries again" in ended.err
    (path,) = waiting()
    path.write_text(path.read_text().replace(away, service.url))  # it comes up there
    ended = kb("verify", "breaks", "--report", service.url, "--json")
    assert ended.json["reported"]["sent"] == 2
    assert path.stem in service.kept


def test_what_waits_is_sent_without_a_verification(kb: Kb, service: FakeService) -> None:
    service.behaviours = [says(500)]
    assert kb("verify", "breaks", "--report", service.url, "--json").json["reported"]["queued"] == 1
    ended = kb("verify", "--report", service.url)
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == f"kb: 1 report sent to {service.url}\n"
    ended = kb("verify", "--report", service.url)
    assert (ended.code, ended.err) == (0, f"kb: no report waits for {service.url}\n")


def test_without_a_verification_a_report_that_still_waits_is_exit_1(kb: Kb, service: FakeService) -> None:
    service.behaviours = [says(500), says(500)]
    kb("verify", "breaks", "--report", service.url)
    ended = kb("verify", "--report", service.url, "--json")
    assert ended.code == 1
    assert (ended.json["reports"], ended.json["reported"]["queued"]) == ([], 1)


@pytest.mark.parametrize(("status", "word"), [(401, "does not accept the API key"), (403, "may report")])
def test_a_key_that_is_not_accepted_keeps_the_report_and_names_the_variable(
    kb: Kb, service: FakeService, status: int, word: str
) -> None:
    service.behaviours = [says(status)]
    ended = kb("verify", "breaks", "--report", service.url)
    assert is_verified(ended)
    assert word in ended.err
    assert "KB_API_KEY" in ended.err
    assert SECRET not in ended.err + ended.out
    assert len(waiting()) == 1


def test_a_refused_report_is_said_and_put_aside(kb: Kb, service: FakeService) -> None:
    service.behaviours = [says(422, "the entry is not one of ours")]
    ended = kb("verify", "breaks", "--report", service.url, "--json")
    assert (ended.code, ended.json["reported"]["refused"]) == (0, 1)
    assert "the entry is not one of ours" in ended.json["reported"]["problem"]
    assert not waiting()
    assert len(list((outbox() / "refused").iterdir())) == 1


def test_a_verdict_that_is_no_success_keeps_its_exit_code(kb: Kb, content: ContentRoot, service: FakeService) -> None:
    content.incident("passes", "pass")
    ended = kb("verify", "passes", "--report", service.url, "--json")
    assert (ended.code, ended.json["verdict"]) == (3, "not-reproduced")
    assert json.loads(service.requests[0].body)["verdict"] == "not-reproduced"


def test_an_outbox_that_cannot_be_written_leaves_the_verdict(kb: Kb, service: FakeService) -> None:
    outbox().parent.mkdir(parents=True)
    outbox().write_text("mine")
    ended = kb("verify", "breaks", "--report", service.url, "--json")
    assert (ended.code, ended.json["verdict"]) == (0, "verified")
    assert "not queued" in ended.json["reported"]["problem"]
    assert "XDG_DATA_HOME" in ended.err
    assert not service.requests


@pytest.mark.parametrize("url", ["kb.example.org", "ftp://kb.example.org", "https://me:pass@kb.example.org"])
def test_what_is_no_address_is_said_before_anything_runs(kb: Kb, content: ContentRoot, url: str) -> None:
    content.incident("breaks")
    ended = kb("verify", "breaks", "--json", "--report", url)
    assert (ended.code, ended.json["error"]["type"]) == (2, "usage-error")
    assert not outbox().exists()


def test_a_key_on_its_way_over_plain_http_is_warned_of(kb: Kb, service: FakeService) -> None:
    ended = kb("verify", "breaks", "--report", "http://kb.example.org", http_proxy=service.url, no_proxy="")
    assert is_verified(ended)
    assert "KB_API_KEY and the reports travel unencrypted to http://kb.example.org" in ended.err


def test_a_plan_says_what_would_be_sent_and_sends_nothing(kb: Kb, service: FakeService) -> None:
    service.behaviours = [says(500)]
    kb("verify", "breaks", "--report", service.url)
    ended = kb("verify", "breaks", "--plan", "--report", service.url)
    assert f"\nreport       to {service.url}: verdict, evidence" in ended.out
    assert "1 report waiting already" in ended.out
    planned = kb("verify", "breaks", "--plan", "--report", service.url, "--json").json
    assert planned["report"] == {"url": service.url, "queued": 1}
    assert len(service.requests) == 1


def test_ctrl_c_ends_the_sending_and_leaves_the_verdict(service: FakeService, tmp_path: Path) -> None:
    service.behaviours = [hang]
    process = start_warm(
        "verify", "breaks", "--json", "--report", service.url, imports=IMPORTS, cwd=tmp_path, stdout=PIPE, stderr=PIPE
    )
    try:
        wait_for(lambda: service.requests, "the report to be sent")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(GENEROUS_S)
    finally:
        end(process)
    document = json.loads(out)
    assert (process.returncode, document["verdict"]) == (0, "verified"), err
    assert (document["reported"]["queued"], document["reported"]["problem"]) == (1, "interrupted")


def test_a_verdict_is_shown_before_a_service_is_waited_for(service: FakeService, tmp_path: Path) -> None:
    service.behaviours = [hang]
    process = start_warm("verify", "breaks", "--report", service.url, imports=IMPORTS, cwd=tmp_path, stdout=PIPE)
    try:
        assert process.stdout
        assert process.stdout.readline().startswith(b"verified")
        wait_for(lambda: service.requests, "the report to be sent")
    finally:
        end(process)
        if process.stdout:
            process.stdout.close()
    assert len(waiting()) == 1
