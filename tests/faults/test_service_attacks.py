"""What somebody sends to a real server to make it slow, large, talkative or forgetful of who may ask."""

from __future__ import annotations

import hashlib
import json
import random
import socket
import stat
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import quote

import pytest

from kb.store import keys
from kb.store.database import Database
from kb.store.keys import Scope
from tests.support.console import GENEROUS_S, wait_for
from tests.support.kb_serve import Serving, serving

pytestmark = pytest.mark.slow

SLOTS = 4  # logs that are read at the same time
FORGED = {"Cookie": f"kb_key=kb_aaaaaaaa_{'A' * 43}", "Sec-Fetch-Site": "same-origin"}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("database")
    folder.chmod(0o755)
    return folder / "service.db"


@pytest.fixture(scope="module")
def text(database: Path) -> str:
    """A key that may do everything."""
    with Database.open(database) as store:
        return keys.new(store, "admin", Scope.ADMIN)[1]


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, built_in_index: Path, database: Path, text: str
) -> Iterator[Serving]:
    assert text
    home = str(tmp_path_factory.mktemp("service"))
    where = {"HOME": home, "XDG_CACHE_HOME": str(built_in_index), "XDG_DATA_HOME": home, "KB_ROOTS": ""}
    with serving(KB_DATABASE_URL=str(database), KB_ANONYMOUS="nobody", **where) as started:
        yield started


@pytest.mark.parametrize("name", ["other", "kb_key"])
def test_cookies_that_take_minutes_to_read_are_not_read(server: Serving, name: str) -> None:
    """http.cookies of Python 3.11 needs 30 s for each of them (CVE-2024-7592), and the event loop is one thread."""
    bomb = f'Host: localhost\r\nAccept: text/html\r\nCookie: {name}="' + "\\1" * 60_000 + '"\r\n\r\n'
    with ExitStack() as held:
        for path in ("/healthz", "/sign-in", "/", "/static/none") * 10:
            client = held.enter_context(socket.create_connection((server.host, server.port), GENEROUS_S))
            client.sendall(f"GET {path} HTTP/1.1\r\n{bomb}".encode())
        assert server.get("/healthz")[0] == 200


@pytest.mark.parametrize("origin", ["http://[", "http://\u00e9", "//", "null", "http://", "http://[::1"])
def test_an_origin_that_is_none_is_another_site_and_no_fault_of_ours(server: Serving, origin: str) -> None:
    assert server.ask("POST", "/sign-in", b"", Origin=origin)[0] == 403


@pytest.mark.parametrize("place", ["", "abc", "1e9", "1_0", "-1", " 7"])
def test_a_forged_cursor_is_an_error_of_who_forged_it(server: Serving, text: str, place: str) -> None:
    for listing, path in (("reports", "/v1/reports"), ("audit", "/v1/admin/audit")):
        check = hashlib.sha256(f"{listing}\n{place}".encode()).digest()[:6]
        cursor = urlsafe_b64encode(check + place.encode()).decode().rstrip("=")
        assert server.get(f"{path}?cursor={cursor}", Authorization=f"Bearer {text}")[0] == 422


def test_bodies_that_stall_keep_no_place_from_those_that_arrive(server: Serving, text: str) -> None:
    message = f"Host: localhost\r\nAuthorization: Bearer {text}\r\nContent-Length: 30000000\r\nContent-Type:"
    log, form = b"the first line\n" * 10_000, b"--x\r\n"
    with ExitStack() as held:
        for path, kind, begun in (
            ("/v1/diagnose", "text/plain", log),
            ("/diagnose", "multipart/form-data; boundary=x", form),
        ):
            for _ in range(SLOTS):
                client = held.enter_context(socket.create_connection((server.host, server.port), GENEROUS_S))
                client.sendall(f"POST {path} HTTP/1.1\r\n{message} {kind}\r\n\r\n".encode() + begun)
        assert server.ask("POST", "/v1/diagnose", b"ValueError: x", Authorization=f"Bearer {text}")[0] == 200


def test_a_body_that_was_answered_unread_is_not_taken_for_ever(server: Serving) -> None:
    with socket.create_connection((server.host, server.port), GENEROUS_S) as client:
        client.sendall(b"POST /v1/reports HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50000\r\n\r\nx")
        assert client.recv(1 << 16).split()[1] == b"401"
        client.settimeout(0.2)

        def is_ended() -> bool:
            try:
                client.sendall(b"x")
                return client.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        wait_for(is_ended, "the connection to be ended", GENEROUS_S)


def test_a_flood_of_costly_questions_keeps_no_other_key_from_an_answer(
    server: Serving, database: Path, text: str
) -> None:
    """Ideographs at random, each pair of which is looked up, from one key that does not even read the answers."""
    with Database.open(database) as store:
        other = keys.new(store, "flood", Scope.READ)[1]
    wait_for(lambda: server.ask("GET", "/v1/tags", Authorization=f"Bearer {other}")[0] != 401, "the key to be known")
    numbers = random.Random(1)
    head = f"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {other}\r\n"
    with ExitStack() as held:
        clients = []
        for _ in range(100):
            question = "".join(chr(numbers.randrange(0x4E00, 0x9FFF)) for _ in range(4000))
            body = json.dumps({"q": question}).encode()
            client = held.enter_context(socket.create_connection((server.host, server.port), GENEROUS_S))
            length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(f"{head}{length}".encode() + body)
            clients.append(client)
        assert server.ask("GET", "/v1/search?q=NCCL+hang+unseen", Authorization=f"Bearer {text}")[0] == 200
        answers = [client.makefile("rb").read() for client in clients]
    statuses = [int(answer.split()[1]) for answer in answers]
    assert set(statuses) == {200, 503}
    assert all(b"retry-after: 1" in answer for answer in answers if answer.split()[1] == b"503")


def test_a_head_of_many_fields_is_refused_before_it_is_parsed(server: Serving) -> None:
    with socket.create_connection((server.host, server.port), GENEROUS_S) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 300 + b"\r\n")
        assert client.recv(1 << 16).split()[1] == b"431"
    for _ in range(2):  # the fields of one request after the other do not add up
        assert server.ask("GET", "/healthz", **{f"x-{number}": "y" for number in range(150)})[0] == 200


@pytest.mark.parametrize("megabytes", [1, 5])
def test_who_sends_too_large_a_body_reads_why_it_was_refused(server: Serving, text: str, megabytes: int) -> None:
    """A connection that is closed with unread bytes is reset, and the answer is lost with it."""
    for _ in range(5):
        body = b"x" * (megabytes << 20)
        assert server.ask("POST", "/v1/search", body, Authorization=f"Bearer {text}")[0] == 413


def test_what_a_page_of_another_site_asks_is_no_gap_and_no_gap_hides_text(server: Serving, text: str) -> None:
    header = {"Authorization": f"Bearer {text}"}
    asked = {"forged": {"Sec-Fetch-Site": "cross-site"}, "genuine\u202e\x9b\U000e0041\u200b": {}}
    for word, site in asked.items():
        assert server.ask("GET", f"/v1/search?q={quote(word + ' qwzx')}", **header, **site)[0] == 200

    def gaps() -> list[str]:
        return [gap["text"] for gap in server.get("/v1/gaps?limit=500", **header)[1]["gaps"] if "qwzx" in gap["text"]]

    wait_for(gaps, "the gap to be counted")
    assert gaps() == ["genuine qwzx"]


def test_who_asks_for_a_websocket_gets_an_answer_and_writes_nothing_into_the_log(server: Serving) -> None:
    assert server.ask("GET", "/healthz", Connection="Upgrade", Upgrade="websocket")[0] == 200
    assert "pgrade" not in server.output


def test_a_key_that_ended_can_still_be_forgotten_by_its_browser(server: Serving) -> None:
    status, headers, _ = server.ask("POST", "/sign-out", b"", **FORGED)
    assert (status, headers["location"]) == (303, "/sign-in")
    assert 'kb_key=""' in headers["set-cookie"]


def test_no_other_site_signs_anybody_out(server: Serving) -> None:
    status, headers, _ = server.ask("POST", "/sign-out", b"", **{**FORGED, "Sec-Fetch-Site": "cross-site"})
    assert (status, "set-cookie" in headers) == (403, False)
    assert server.ask("GET", "/sign-out")[0] == 405


def test_the_database_is_for_its_owner_wherever_it_lies(server: Serving, database: Path) -> None:
    assert server.get("/healthz")[0] == 200
    modes = set()
    for path in database.parent.iterdir():
        with suppress(FileNotFoundError):  # a journal goes with the last connection
            modes.add(stat.S_IMODE(path.stat().st_mode))
    assert modes == {0o600}


def test_nothing_of_this_was_a_fault_of_the_server(server: Serving) -> None:
    assert not [item for item in server.logged if item["level"] == "ERROR"]
