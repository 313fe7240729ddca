"""POST /v1/diagnose answers as the command does, for bodies of any kind, and keeps nothing."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

pytest_plugins = ["tests.support.app_fixtures"]

scanning: Any = resolve_name("kb.api.state.scanning")

LOG = b"step 1\n[rank1]: RuntimeError: the thing broke: code 7\nstep 2\n"


def test_a_log_is_explained_with_the_lines_that_say_so(client: httpx.Client) -> None:
    answer = client.post("/v1/diagnose", content=LOG)
    assert answer.status_code == 200
    document = answer.json()
    assert [item["id"] for item in document["findings"]][:1] == ["broken-thing"]
    assert document["findings"][0]["role"] == "root"
    cited = document["findings"][0]["evidence"][0]
    assert (cited["source"], cited["line"], cited["rank"]) == ("body", 2, 1)
    assert document["ranks"]["failed_first"] == 1
    assert not document["unexplained"]
    assert document["read"] == {"sources": 1, "lines": 3, "bytes": len(LOG)}


def test_a_packed_log_is_read_as_it_is(client: httpx.Client) -> None:
    plain, packed = (client.post("/v1/diagnose", content=body).json() for body in (LOG, gzip.compress(LOG)))
    assert packed["findings"] == plain["findings"]


def test_a_packed_log_that_grows_without_end_is_read_to_the_limit_and_that_is_said(client: httpx.Client) -> None:
    bomb = zstd.compress(LOG) + zstd.compress(b"step 3\n" * (1 << 18)) * 10_000
    assert len(bomb) < 4 << 20
    document = client.post("/v1/diagnose", content=bomb).json()
    assert document["findings"][0]["id"] == "broken-thing"
    assert document["read"]["bytes"] == 512 << 20
    assert "larger than 536,870,912 bytes" in document["problems"][0]


def test_a_body_that_arrives_in_pieces_is_one_log(client: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for at in range(0, len(LOG), 5):
            yield LOG[at : at + 5]

    assert client.post("/v1/diagnose", content=pieces()).json()["findings"][0]["evidence"][0]["line"] == 2


def test_what_nobody_knows_is_said_to_be_unexplained(client: httpx.Client) -> None:
    document = client.post("/v1/diagnose", content=b"[rank0]: zork: Error: the frobnicator is out of quux\n").json()
    assert document["unexplained"]
    assert document["seen"][0]["text"] == "zork: Error: the frobnicator is out of quux"
    assert document["triage"][0]["outcomes"]


def test_an_empty_body_is_refused_with_a_hint(client: httpx.Client) -> None:
    answer = client.post("/v1/diagnose", content=b"")
    assert answer.status_code == 422
    assert "curl" in answer.json()["hint"]


def test_a_form_is_no_log(client: httpx.Client) -> None:
    """Its head would be read as lines of the log, and every line that is cited be counted from there."""
    answer = client.post("/v1/diagnose", files={"file": ("train.log", b"the thing broke: code 42\n")})
    assert answer.status_code == 415
    assert "--data-binary" in answer.json()["detail"]


def test_a_log_that_would_keep_others_waiting_is_given_up(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that unpacks to half a gigabyte of errors takes minutes."""
    packed = gzip.compress(b"RuntimeError: the thing broke: code 1\n" * 100_000)
    assert client.post("/v1/diagnose", content=packed).status_code == 200
    monkeypatch.setattr(scanning, "MOST_S", 0.001)
    answer = client.post("/v1/diagnose", content=packed)
    assert (answer.status_code, answer.json()["detail"]) == (422, "this takes too long to read here")
    assert "this takes too long" in client.post("/diagnose", files={"log": ("a.gz", packed)}).text


def test_a_body_that_is_too_large_is_refused(client: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * (1 << 20)

    announced = client.post("/v1/diagnose", content=b"", headers={"content-length": str(33 << 20)})
    assert announced.status_code == 413
    assert announced.json()["detail"].endswith("reads files of any size")
    large = b"step\n" * (33 << 18)
    assert client.post("/v1/diagnose", content=large).status_code == 413


def test_nothing_of_a_body_touches_the_disk(client: httpx.Client, written: list[str], tmp_path: Path) -> None:
    written.clear()
    document = client.post("/v1/diagnose", content=LOG + b"step\n" * (4 << 20)).json()
    assert document["findings"][0]["id"] == "broken-thing"
    assert written == []
    (tmp_path / "seen").write_text("")
    assert written == [str(tmp_path / "seen")]


def test_a_body_that_is_no_text_is_answered_and_keeps_no_reader_busy(client: httpx.Client) -> None:
    """More of them, one after the other, than there are readers, each longer than what may wait to be read."""
    picture = b"\x89PNG\r\n\x1a\n" + bytes(3 << 20)
    for _ in range(6):
        answer = client.post("/v1/diagnose", content=(picture[at : at + 4096] for at in range(0, len(picture), 4096)))
        assert answer.status_code == 200
        assert answer.json()["findings"] == []
        assert answer.json()["problems"] == ["body: is binary and was not read"]
    assert client.post("/v1/diagnose", content=LOG).json()["findings"][0]["id"] == "broken-thing"


def test_an_answer_is_short_and_says_what_was_left_out(client: httpx.Client) -> None:
    log = b"".join(
        b"2026-03-01 08:30:%02d [rank%d]: RuntimeError: the thing broke: code %d\n" % (rank, rank, rank)
        for rank in range(8)
    )
    short = client.post("/v1/diagnose", content=log).json()
    whole = client.post("/v1/diagnose?limit=10&lines=20", content=log).json()
    evidence, every = (document["findings"][0]["evidence"] for document in (short, whole))
    assert (len(evidence), evidence) == (3, every[:3])
    assert [line["time"] for line in evidence] == [f"2026-03-01T08:30:0{second}Z" for second in range(3)]
    assert len(every) > 3
    assert whole["omitted"] == {"findings": 0, "lines": 0}
    assert short["omitted"]["lines"] >= len(every) - 3
    assert client.post("/v1/diagnose?limit=0", content=log).status_code == 422


def test_a_finding_has_its_fix_the_citation_and_the_page_of_the_entry(client: httpx.Client) -> None:
    finding = client.post("/v1/diagnose", content=LOG).json()["findings"][0]
    assert finding["fix"]["citation"].startswith("[broken-thing § Fix")
    assert finding["fix"]["text"]
    assert client.get(finding["url"], headers={"Accept": "text/html"}).status_code == 200
