"""A service as one that reports to it sees it: which addresses are one, and what each answer means."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kb.errors import UsageError
from kb.sharing.client import Service
from kb.sharing.response import DeliveryStatus, Response
from tests.support.fake_service import (
    Behaviour,
    FakeService,
    drop,
    drop_unread,
    garbage,
    hang,
    listening,
    says,
    take,
    torn,
)


@pytest.fixture
def service() -> Iterator[FakeService]:
    with listening() as service:
        yield service


def post(service: FakeService, *behaviours: Behaviour, api_key: str = "", timeout_s: float = 60) -> Response:
    service.behaviours += behaviours
    return Service.at(service.url, api_key).post("key-1", b'{"id": "the-entry"}', timeout_s)


@pytest.mark.parametrize(
    "url",
    ["", "kb.example.org", "ftp://kb.example.org", "file:///etc/passwd", "https://", "https://kb.example.org:x",
     "https://kb.example.org:0", "https://kb example.org", "https://kb.example.org/\r\nX: y", "https://[::1"],
)  # fmt: skip
def test_what_is_no_address_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(UsageError, match="is not the URL of a kb service"):
        Service.at(url)


@pytest.mark.parametrize("url", ["https://me:secret@kb.example", "https://me:secret@kb:x", "https://kb?key=secret"])
def test_secrets_in_an_address_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        Service.at(url)
    assert "secret" not in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("api_key", ["kb_a b", "kb_\n", "kb_ä"])
def test_what_can_be_no_key_is_refused_and_not_repeated(api_key: str) -> None:
    with pytest.raises(UsageError) as caught:
        Service.at("https://kb.example.org", api_key)
    assert api_key not in f"{caught.value.message} {caught.value.hint}"


def test_a_key_is_shown_nowhere() -> None:
    assert "kb_secret" not in repr(Service.at("https://kb.example.org", "kb_secret"))


@pytest.mark.parametrize(
    ("url", "is_exposed"),
    [
        ("https://kb.example.org", False),
        ("http://kb.example.org", True),
        ("http://10.0.0.1:8000", True),
        ("http://127.0.0.1:8000", False),
        ("http://[::1]:8000", False),
        ("http://localhost", False),
    ],
)
def test_plain_http_beyond_this_machine_is_exposed(url: str, is_exposed: bool) -> None:
    assert Service.at(url).is_exposed is is_exposed


def test_a_try_carries_key_body_and_a_path_below_the_address(service: FakeService) -> None:
    assert Service.at(f"{service.url}/team/", "kb_secret").post("key-1", b"{}", 60).status is DeliveryStatus.ACCEPTED
    (request,) = service.requests
    assert (request.path, request.body, request.key) == ("/team/v1/reports", b"{}", "key-1")
    assert request.headers["Authorization"] == "Bearer kb_secret"
    assert request.headers["Content-Type"] == "application/json"


def test_without_a_key_none_is_sent(service: FakeService) -> None:
    post(service)
    assert service.requests[0].headers["Authorization"] is None


def test_a_new_report_and_a_repeated_one_are_taken(service: FakeService) -> None:
    assert post(service) == post(service) == Response(DeliveryStatus.ACCEPTED)
    assert len(service.kept) == 1


ANSWERS = {
    "a report of the wrong shape": (says(422, "no verdict"), DeliveryStatus.REFUSED, "422 Unprocessable", "no verdict"),
    "a report that is too large": (says(413, "too long"), DeliveryStatus.REFUSED, "413", "too long"),
    "a problem of the service": (says(500, "oops"), DeliveryStatus.FAILED, "500", "oops"),
    "a proxy without a service": (
        says(502, "<h1>Bad</h1>", "text/html"),
        DeliveryStatus.FAILED,
        "502",
        "not the response",
    ),
    "a proxy that finds it too large": (
        says(413, "<h1>", "text/html"),
        DeliveryStatus.FAILED,
        "413",
        "not the response",
    ),
    "a request that took too long": (says(408, "slow"), DeliveryStatus.FAILED, "408", "slow"),
    "a page that asks to log in": (
        says(200, "<h1>Welcome</h1>", "text/html"),
        DeliveryStatus.FAILED,
        "200",
        "not the response",
    ),
    "a list": (says(201, "[1]", "text/plain"), DeliveryStatus.FAILED, "201", "not the response"),
    "nested brackets": (says(201, "[" * 60_000, "text/plain"), DeliveryStatus.FAILED, "201", "not the response"),
    "an unknown status": (says(299, "?"), DeliveryStatus.FAILED, "299", "?"),
    "another service": (says(404, "<h1>", "text/html"), DeliveryStatus.UNAVAILABLE, "accepts reports", "404 Not Found"),
    "an older service": (says(405, "GET only"), DeliveryStatus.UNAVAILABLE, "accepts reports", "405"),
    "a proxy that wants a password": (says(407), DeliveryStatus.UNAVAILABLE, "accepts reports", "407"),
    "a missing key": (
        says(401),
        DeliveryStatus.UNAVAILABLE,
        "requires an API key, and none was sent",
        "set KB_API_KEY",
    ),
    "nothing at all": (drop_unread, DeliveryStatus.FAILED, "sent no response", ""),
    "a lost answer": (drop, DeliveryStatus.FAILED, "sent no response", ""),
    "half an answer": (torn, DeliveryStatus.FAILED, "201 Created", "not the response"),
    "no http": (garbage, DeliveryStatus.FAILED, "sent no response", "SSH"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_each_answer_has_its_meaning(service: FakeService, name: str) -> None:
    behaviour, status, *words = ANSWERS[name]
    answer = post(service, behaviour)
    assert answer.status is status
    assert all(word in answer.problem for word in words), answer.problem
    assert service.url in answer.problem


def test_a_wrong_key_is_told_apart_from_a_missing_one(service: FakeService) -> None:
    answer = post(service, says(401), api_key="kb_secret")
    assert "does not accept the API key in KB_API_KEY" in answer.problem
    assert "set KB_API_KEY" not in answer.problem


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_not_accepted_is_named_by_its_variable_only(service: FakeService, status: int) -> None:
    answer = post(service, says(status), api_key="kb_secret")
    assert answer.status is DeliveryStatus.UNAVAILABLE
    assert "KB_API_KEY" in answer.problem
    assert "kb_secret" not in answer.problem


@pytest.mark.parametrize(("given", "seconds"), [("7", 7), ("0", 0), ("soon", 1), ("-5", 1), ("9" * 30, 1), ("", 1)])
@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_service_is_given_the_time_it_asks_for(
    service: FakeService, status: int, given: str, seconds: int
) -> None:
    answer = post(service, says(status, "later", Retry_After=given))
    assert (answer.status, answer.wait_s) == (DeliveryStatus.BUSY, seconds)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_key_follows_no_redirect(service: FakeService, status: int) -> None:
    with listening() as elsewhere:
        answer = post(service, says(status, Location=f"{elsewhere.url}/v1/reports"), api_key="kb_secret")
        assert not elsewhere.requests
    assert answer.status is DeliveryStatus.UNAVAILABLE
    assert elsewhere.url in answer.problem


def test_a_service_that_is_away_is_closed() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        answer = Service.at(f"http://127.0.0.1:{unused.getsockname()[1]}").post("key-1", b"{}", 60)
    assert answer.status is DeliveryStatus.UNAVAILABLE
    assert answer.problem.endswith("cannot be reached: Connection refused")


def test_a_name_that_nobody_knows_is_closed() -> None:
    answer = Service.at("https://nowhere.invalid").post("key-1", b"{}", 60)
    assert answer.status is DeliveryStatus.UNAVAILABLE
    assert "https://nowhere.invalid cannot be reached" in answer.problem


def test_an_answer_that_never_comes_times_out(service: FakeService) -> None:
    answer = post(service, hang, timeout_s=0.2)
    assert answer == Response(DeliveryStatus.FAILED, f"{service.url} sent no response: timed out")


def test_what_a_service_says_cannot_move_the_terminal(service: FakeService) -> None:
    answer = post(service, says(422, "\x1b[2J\r\nkb: all is well\u202e" + "x" * 9999))
    assert answer.problem.isprintable()
    assert len(answer.problem) < 500


def test_an_environments_proxy_is_asked_for_others_and_not_for_this_machine(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with listening() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert post(service).status is DeliveryStatus.ACCEPTED
        assert not proxy.requests
        assert Service.at("http://kb.example.org").post("key-2", b"{}", 60).status is DeliveryStatus.ACCEPTED
        assert [request.path for request in proxy.requests] == ["http://kb.example.org/v1/reports"]


def test_take_is_what_a_service_does(service: FakeService) -> None:
    """The same key with the same body is one report."""
    service.behaviours += [drop, take]
    assert post(service).status is DeliveryStatus.FAILED
    assert post(service).status is DeliveryStatus.ACCEPTED
    assert len(service.kept) == 1
