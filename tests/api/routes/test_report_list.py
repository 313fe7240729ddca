"""GET /v1/reports: the list by entry, GPU, torch and verdict, in pages, and one report by its number."""

from __future__ import annotations

import httpx
import pytest

from tests.support.shared_reports import Post, report

pytest_plugins = ["tests.support.report_fixtures"]
pytestmark = pytest.mark.usefixtures("bearers")


def test_markup_is_data(client: httpx.Client, post_report: Post) -> None:
    evil = "<script>alert(1)</script> {{7*7}} ${7*7} '; DROP TABLE report; --"
    post_report(report(reason=evil, machine={"gpus": [evil[:40]], "torch": "2.7.1' OR '1'='1"}))
    response = client.get("/v1/reports", params={"gpu": "' OR 1=1 --"})
    assert response.json()["reports"] == []
    response = client.get("/v1/reports")
    assert response.headers["content-type"] == "application/json"
    assert response.json()["reports"][0]["reason"] == evil


@pytest.mark.parametrize(
    ("filters", "numbers"),
    [
        ({}, [4, 3, 2, 1]),
        ({"entry": "slow-disk"}, [3, 2, 1]),
        ({"entry": "gone-thing"}, [4]),
        ({"entry": "unheard-of"}, []),
        ({"gpu": "h100"}, [4, 1]),
        ({"gpu": "100"}, [4, 2, 1]),
        ({"gpu": "%"}, []),
        ({"torch": "2.7"}, [4, 1]),
        ({"torch": "2.7.1+cu126"}, [4, 1]),
        ({"torch": "2"}, [4, 2, 1]),
        ({"verdict": "inverted"}, [2]),
        ({"verdict": "verified", "gpu": "H100", "entry": "slow-disk"}, [1]),
    ],
    ids=str,
)
def test_filters_narrow_the_list(
    client: httpx.Client, post_report: Post, filters: dict[str, str], numbers: list[int]
) -> None:
    post_report(report(), "key-number-1")
    post_report(report(verdict="inverted", machine={"gpus": ["NVIDIA A100"], "torch": "2.6.0"}), "key-number-2")
    post_report(report(machine={}), "key-number-3")
    post_report(report(id="gone-thing"), "key-number-4")
    document = client.get("/v1/reports", params=filters).json()["reports"]
    assert [item["number"] for item in document] == numbers


def test_a_list_comes_in_pages_and_a_new_report_moves_none(client: httpx.Client, post_report: Post) -> None:
    for number in range(5):
        post_report(report(), f"key-number-{number}")
    first = client.get("/v1/reports", params={"limit": 2}).json()
    post_report(report(), "key-number-5")
    second = client.get("/v1/reports", params={"limit": 2, "cursor": first["next"]}).json()
    third = client.get("/v1/reports", params={"limit": 2, "cursor": second["next"]}).json()
    pages = [[item["number"] for item in result["reports"]] for result in (first, second, third)]
    assert pages == [[5, 4], [3, 2], [1]]
    assert third["next"] is None


def test_a_cursor_of_another_list_is_refused(client: httpx.Client) -> None:
    cursor = client.get("/v1/entries", params={"limit": 1}).json()["next"]
    assert client.get("/v1/reports", params={"cursor": cursor}).status_code == 422


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=101", "verdict=confirmed", "entry=%00", "gpu=%00", "torch=%0a", f"gpu={'x' * 65}", "cursor=1"],
)
def test_a_question_that_makes_no_sense_is_refused(client: httpx.Client, query: str) -> None:
    assert client.get(f"/v1/reports?{query}").status_code == 422


@pytest.mark.parametrize(("number", "status"), [("1", 404), ("0", 422), ("9" * 30, 422), ("x", 422), ("-1", 422)])
def test_a_report_that_is_not_there_is_not_found(client: httpx.Client, number: str, status: int) -> None:
    assert client.get(f"/v1/reports/{number}").status_code == status


def test_reports_say_whether_entry_and_probe_have_changed_since(client: httpx.Client, post_report: Post) -> None:
    digest = client.get("/v1/entries/slow-disk").json()["digest"]
    post_report(report(), "key-number-1")
    post_report(report(id="gone-thing"), "key-number-2")
    post_report(report(entry_digest=digest, probe_digest=""), "key-number-3")  # these entries have no probe
    document = client.get("/v1/reports").json()["reports"]
    assert {item["number"]: (item["earlier_wording"], item["earlier_probe"]) for item in document} == {
        1: (True, True),
        2: (None, None),
        3: (False, False),
    }
