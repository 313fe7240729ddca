"""Queries that are not questions: an answer or a clear error, never a crash, never a wait."""

from __future__ import annotations

import pytest

from tests.support.console import Kb

QUERIES = {
    "operators": "*a*~5 OR (((((",
    "a regular expression bomb": "(a+)+$ aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!",
    "control characters": "\x01\x02\x1b[31m\x7f timeout \x1f4.0\x1f save",
    "an unbalanced quote": 'ALLGATHER "timeout',
    "a range": "[a TO z] timeout",
    "lone surrogates and emoji": "超时 \U0001f525 timeout",
    "a very long word": "a" * 100_000,
    "a hundred thousand parentheses": "(" * 100_000 + "timeout",
}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES.keys())
def test_any_text_is_answered(kb: Kb, query: str) -> None:
    ended = kb("search", "-", "--json", stdin=query.encode("utf-8", "surrogateescape"))
    assert ended.code in (0, 1)
    assert ended.json["ok"] is True


def test_a_megabyte_of_log_is_answered_with_its_entry(kb: Kb) -> None:
    line = (
        "[rank3]:[E ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=7, OpType=_ALLGATHER_BASE, Timeout(ms)=1800000) while saving the checkpoint\n"
    )
    ended = kb("search", "-", "--json", stdin=(line * (1 + (1 << 20) // len(line))).encode())
    assert ended.json["hits"][0]["id"] == "checkpoint-save-allgather-timeout"
    assert len(ended.json["query"]) <= 1000


def test_random_bytes_are_answered(kb: Kb) -> None:
    ended = kb("search", "-", "--json", stdin=bytes(range(256)) * 100)
    assert ended.code in (0, 1)
    assert ended.json["ok"] is True


@pytest.mark.parametrize("query", ["", "   ", "\n\t"])
def test_an_empty_query_is_a_usage_error(kb: Kb, query: str) -> None:
    ended = kb("search", "--json", query)
    assert ended.code == 2
    assert ended.json["error"]["type"] == "usage-error"


def test_nothing_found_is_exit_1_and_still_a_document(kb: Kb) -> None:
    ended = kb("search", "qqqzzz xxyyzz", "--json")
    assert ended.code == 1
    assert ended.json["ok"] is True
    assert ended.json["hits"] == []
