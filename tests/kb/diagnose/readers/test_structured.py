"""JSON from anybody, within bounds."""

from __future__ import annotations

import json
import sys
import time
from threading import Thread
from typing import Any

import pytest
from hypothesis import given

from kb.diagnose.readers.structured import Unreadable, as_integer, as_text, load_json
from tests.support.flight_dumps import entry
from tests.support.strategies import PLAIN_DATA


@given(PLAIN_DATA)
def test_json_is_read_as_it_was_written(value: Any) -> None:
    assert load_json(json.dumps(value)) == value
    assert load_json(b"\xef\xbb\xbf" + json.dumps(value, ensure_ascii=False).encode()) == value


def test_bytes_that_are_not_utf_8_are_replaced() -> None:
    assert load_json(b'["\xe9t\xe9"]') == ["\ufffdt\ufffd"]


@pytest.mark.parametrize("digits", ["9" * 4300, f"9007199254740993.{'0' * 700}1"])
def test_a_number_of_many_digits_is_refused(digits: str) -> None:
    with pytest.raises(Unreadable, match="more than 40 digits"):
        load_json(f'{{"version": "2.4", "entries": [{digits}]}}')


def test_bytes_values_and_nesting_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unreadable, match="nested too deeply"):
        load_json('{"a":' * 100_000)
    with pytest.raises(Unreadable, match="more than 1,000 values"):
        load_json("[" + "[]," * 2000 + "[]]", most_values=1000)
    monkeypatch.setattr("kb.diagnose.readers.structured.LARGEST", 10)
    with pytest.raises(Unreadable, match="larger than"):
        load_json(" " * 11)


def test_while_a_large_document_is_read_other_threads_run() -> None:
    """A thread that waits has its turn after the interval, unless C code runs on until it is done."""
    data, usual = json.dumps([entry(number) for number in range(10_000)]), sys.getswitchinterval()
    reading, turns = Thread(target=load_json, args=(data,)), 0
    sys.setswitchinterval(0.0001)
    try:
        reading.start()
        while reading.is_alive():
            turns += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(usual)
    assert turns > 10


@pytest.mark.parametrize(
    ("value", "integer"),
    [
        (7, 7),
        ("7", 7),
        ("-7", -7),
        (0, 0),
        (2**63 - 1, 2**63 - 1),
        *((value, None) for value in (2**63, "9" * 20, "seven", "", "--7", "7.0", 7.0, True, None, [7])),
    ],
)
def test_integers_are_numbers_or_their_digits(value: Any, integer: int | None) -> None:
    assert as_integer(value) == integer


def test_text_is_one_line_of_limited_length() -> None:
    assert as_text(" a\r\n b\tc ") == "a b c"
    assert as_text("a" * 300) == "a" * 200
    assert as_text(3) == as_text(None) == as_text(["a"]) == ""
