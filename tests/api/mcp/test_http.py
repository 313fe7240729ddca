"""/mcp of real `kb serve` processes, asked by the SDK's own client and by hand."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp.client.session import ClientRequestContext
from mcp_types import ElicitRequestParams, ElicitResult

from tests.support.console import CHECKOUT, wait_for
from tests.support.mcp_client import Model, document, over_http
from tests.support.replicas import Place, Replica, started

ENTRY = "checkpoint-save-allgather-timeout"
LOG = "RuntimeError: The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE\n"
HELLO: dict[str, Any] = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "a test", "version": "1"},
}
HEADERS = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-11-25"}
TOOLS = ["search_incidents", "get_incident", "diagnose_log", "check_environment"]


@pytest.fixture(scope="module")
def place(built_in_index: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("service"), built_in_index)


@pytest.fixture(scope="module")
def replica(place: Place) -> Iterator[Replica]:
    """It answers to programs on this machine."""
    with started(place) as replica:
        yield replica


@pytest.fixture(scope="module")
def closed(place: Place) -> Iterator[Replica]:
    """It answers to keys only, over the same database."""
    with started(Place(place.path, place.cache, {"KB_ANONYMOUS": "nobody"})) as replica:
        yield replica


@pytest.fixture(scope="module", params=["auto", "legacy"], ids=["2026", "2025"])
def model(request: pytest.FixtureRequest, replica: Replica) -> Iterator[Model]:
    with over_http(replica.url, mode=request.param) as model:
        yield model


def post(replica: Replica, method: str, key: str = "", /, **params: Any) -> httpx.Response:
    """One message, sent by hand, without any before it."""
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    headers = {**HEADERS, "Authorization": f"Bearer {key}"} if key else HEADERS
    return httpx.post(f"{replica.url}/mcp", json=message, headers=headers, timeout=60, trust_env=False)


def test_it_offers_what_stdio_offers(model: Model) -> None:
    assert [tool.name for tool in model.do("list_tools").tools] == TOOLS
    assert len(model.do("list_resources").resources) > 50
    assert [prompt.name for prompt in model.do("list_prompts").prompts] == ["triage"]


def test_every_tool_answers(model: Model) -> None:
    assert model.answer("search_incidents", query="ALLGATHER timeout save")["hits"][0]["id"] == ENTRY
    assert model.answer("get_incident", id=ENTRY)["id"] == ENTRY
    assert model.answer("diagnose_log", text=LOG)["findings"][0]["id"] == "address-in-use"
    assert model.answer("check_environment", packages={"torch": "2.1.0"})["incidents"]


def test_resources_and_the_prompt_are_there(model: Model) -> None:
    [content] = model.do("read_resource", f"kb://entries/{ENTRY}").contents
    assert content.text.startswith(f"---\nid: {ENTRY}\n")
    [message] = model.do("get_prompt", "triage", {"symptom": "it hangs"}).messages
    assert "it hangs" in message.content.text


def test_a_fix_that_reports_verified_on_the_readers_gpu_says_so(replica: Replica, place: Place) -> None:
    report = {
        "id": ENTRY,
        "verdict": "verified",
        "fidelity": "hardware",
        "started_at": "2026-03-01T08:30:00Z",
        "duration_s": 1.0,
        "entry_digest": replica.get(f"/v1/entries/{ENTRY}")[1]["digest"],
        "kb_version": "0.1.0",
        "machine": {"gpus": ["NVIDIA H100 80GB HBM3"], "driver": "570", "torch": "2.7.1+cu126"},
    }
    headers = {"Authorization": f"Bearer {place.key('report')}", "Idempotency-Key": "a-report-of-an-h100"}
    sent = httpx.post(f"{replica.url}/v1/reports", json=report, headers=headers, timeout=60, trust_env=False)
    assert sent.status_code == 201, sent.text
    with over_http(replica.url) as model:

        def verified_on(gpu: str) -> Any:
            result = model.answer("search_incidents", query="ALLGATHER timeout save", gpu=gpu, torch="2.7.0")
            assert result["hits"][0]["id"] == ENTRY
            return result["hits"][0].get("verified_on")

        wait_for(lambda: verified_on("8 x H100"), "the report to count")
        assert "torch release, 2.7" in verified_on("H100")["reason"]
        assert verified_on("A100") is None


def test_it_does_not_look_at_the_machine_of_the_server(model: Model) -> None:
    assert "send packages, for instance" in model.refused("check_environment")


def test_it_never_verifies_whatever_the_client_consents_to(replica: Replica) -> None:
    async def always(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        return ElicitResult(action="accept", content={"run": True})

    with over_http(replica.url, consent=always) as model:
        assert "Unknown tool: verify_fix" in model.refused("verify_fix", id=ENTRY)


def test_errors_are_for_the_reader(model: Model) -> None:
    assert f"nearest: {ENTRY}" in model.refused("get_incident", id="checkpoint-save-allgather")
    assert "2 MB is the limit" in model.refused("diagnose_log", text="step 1 loss 2.0\n" * 150_000)
    assert "limit: Input should be" in model.refused("search_incidents", query="x", limit="many")


def test_calls_at_the_same_time_get_their_own_answers(model: Model) -> None:
    ids = [path.stem for path in sorted((CHECKOUT / "entries").glob("*.md"))][:20]
    searches = [("get_incident", {"id": entry_id, "language": "zh"}) for entry_id in ids]
    logs = [("diagnose_log", {"text": LOG * 10 * number}) for number in range(1, 9)]
    contents = [document(answer) for answer in model.at_once([*searches, *logs])]
    assert [item["id"] for item in contents[:20]] == ids
    assert [item["lines_read"] for item in contents[20:]] == [10 * number for number in range(1, 9)]


def test_without_a_key_it_is_closed_when_nobody_is_let_in(closed: Replica) -> None:
    answer = post(closed, "tools/list")
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_key_opens_it(closed: Replica, place: Place) -> None:
    key = place.key("read")
    wait_for(lambda: post(closed, "tools/list", key).status_code == 200, "the key to be known")
    with over_http(closed.url, key) as model:
        assert model.answer("get_incident", id=ENTRY)["id"] == ENTRY
    assert post(closed, "tools/list", f"{key[:-1]}_").status_code == 401


def test_a_page_of_another_site_gets_nothing(replica: Replica) -> None:
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        answer = httpx.post(
            f"{replica.url}/mcp", json=message, headers={**HEADERS, **headers}, timeout=60, trust_env=False
        )
        assert answer.status_code in (401, 403), headers


def test_any_replica_answers_any_message(replica: Replica, closed: Replica, place: Place) -> None:
    key = place.key("read")
    wait_for(lambda: post(closed, "tools/list", key).status_code == 200, "the key to be known")
    hello = post(replica, "initialize", "", **HELLO)
    assert hello.json()["result"]["serverInfo"]["name"] == "kb"
    assert "mcp-session-id" not in hello.headers
    question: dict[str, Any] = {"name": "search_incidents", "arguments": {"query": "ALLGATHER timeout save"}}
    answers = [post(item, "tools/call", key, **question) for item in (replica, closed)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert json.loads(answers[0].json()["result"]["content"][0]["text"])["hits"]
    assert answers[0].json() == answers[1].json()


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_there_is_no_stream_and_no_session(replica: Replica, method: str) -> None:
    answer = httpx.request(method, f"{replica.url}/mcp", headers=HEADERS, timeout=60, trust_env=False)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"[" * 100_000,
        b'{"jsonrpc": "2.0"}',
        b'{"jsonrpc": "2.0", "id": 1.5, "method": "ping"}',
    ],
)
def test_a_body_that_is_no_message_is_refused(replica: Replica, body: bytes) -> None:
    for version in ("2025-11-25", "2026-07-28"):
        headers = {**HEADERS, "MCP-Protocol-Version": version, "Content-Type": "application/json"}
        answer = httpx.post(f"{replica.url}/mcp", content=body, headers=headers, timeout=60, trust_env=False)
        assert 400 <= answer.status_code < 500 or answer.status_code == 202, answer.content
        assert b"Traceback" not in answer.content
        assert b"pydantic" not in answer.content
        assert not body or answer.json()["error"]["code"] in (-32700, -32600)


def test_a_message_that_is_too_large_is_refused(replica: Replica) -> None:
    answer = post(replica, "tools/call", name="diagnose_log", arguments={"text": "x" * (5 << 20)})
    assert answer.status_code == 413


def test_a_client_that_vanishes_in_a_call_disturbs_nobody(replica: Replica) -> None:
    message = {"name": "diagnose_log", "arguments": {"text": LOG * 15_000}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": message}).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in {**HEADERS, "Content-Type": "application/json"}.items())
    start = f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode()
    for sent in (body, body[: len(body) // 2]):
        with socket.create_connection(("127.0.0.1", replica.port), timeout=60) as client:
            client.sendall(start + sent)
    with over_http(replica.url) as model:
        assert model.answer("diagnose_log", text=LOG)["lines_read"] == 1
    assert "Traceback" not in replica.output


def test_a_question_without_an_answer_is_counted_as_a_gap(replica: Replica, place: Place) -> None:
    key = place.key("admin")
    with over_http(replica.url) as model:
        result = model.answer("search_incidents", query="the zeppelin of the quartermaster is purple")
    assert not result["answered"]

    def is_counted() -> bool:
        _, page = replica.get("/v1/gaps?limit=100", Authorization=f"Bearer {key}")
        return any("zeppelin" in item["text"] for item in page["gaps"])

    wait_for(is_counted, "the gap to be counted")
