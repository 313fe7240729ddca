"""Pickles of plain data are read as the standard library reads them; everything else is refused, at no cost."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb.diagnose.readers.safe_unpickler import load_pickle
from kb.diagnose.readers.structured import Unreadable
from tests.support.strategies import PLAIN_DATA


@given(PLAIN_DATA, st.integers(2, 5))
def test_plain_data_survives_every_protocol(value: Any, protocol: int) -> None:
    assert load_pickle(pickle.dumps(value, protocol)) == value


def test_shared_parts_stay_shared_and_cycles_stay_cycles() -> None:
    itself: list[Any] = [[1]]
    itself += [itself[0], itself]
    copy = load_pickle(pickle.dumps(itself))
    assert copy[0] is copy[1]
    assert copy[2] is copy


def test_integers_as_keys_become_text() -> None:
    assert load_pickle(pickle.dumps({3: {"4": 5}})) == {"3": {"4": 5}}


class Bomb:
    """Writes a marker file when it is unpickled by the standard library."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_that_executes_is_refused_and_executes_nothing(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "executed"
    data = pickle.dumps({"version": "2.10", "pg_config": {}, "entries": [Bomb(marker)]}, protocol)
    with pytest.raises(Unreadable, match="which plain data does not need"):
        load_pickle(data)
    assert not marker.exists()
    pickle.loads(data)  # the bomb is live: the standard library executes it
    assert marker.exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n",  # GLOBAL
        b"ios\nsystem\n",  # INST
        b"\x8c\x02os\x8c\x06system\x93",  # STACK_GLOBAL
        b"N)R",  # REDUCE
        b"}}b",  # BUILD
        b"N)\x81",  # NEWOBJ
        b"\x82\x01",  # EXT1
        b"P1\n",  # PERSID
        b"NQ",  # BINPERSID
        b"\x97",  # NEXT_BUFFER
        b"I1\n",  # INT, in decimal digits
        b"\x8b\x01\x00\x00\x00\x01",  # LONG4, of up to two gigabytes
        b"\x8f",  # EMPTY_SET, whose integers would collide
    ],
)
def test_every_instruction_that_is_not_plain_data_is_refused(code: bytes) -> None:
    with pytest.raises(Unreadable, match="which plain data does not need"):
        load_pickle(b"\x80\x04" + code + b".")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80",
        b"\x80\x04",
        b"\x80\x04.",
        b"\x80\x04]",
        b"\x80\x09N.",  # a protocol that does not exist
        b"\x80\x04X\xff\xff\xff\x7fabc.",  # a string of two gigabytes that is not there
        b"\x80\x04\x8d" + b"\xff" * 8,
        b"\x80\x04\x95" + b"\xff" * 8,  # a frame of as many bytes
        b"\x80\x04\x8c\x02\xff\xfe.",  # a string that is not UTF-8
        b"\x80\x04h\x05.",  # a memo that was never written
        b"\x80\x04" + b"(" * 100_000,
        b"\x80\x04Na.",
        b"\x80\x04}()Nu.",  # a key that is a tuple: the writer chooses how tuples of integers collide
        b"\x80\x04}(K\x01u.",  # a key without a value
        b"\x80\x04]K\x00Ns.",  # an item of a list that is set by its number
    ],
)
def test_a_damaged_pickle_is_called_damaged(data: bytes) -> None:
    with pytest.raises(Unreadable, match=r"^its pickle is damaged(, or has keys that are not text)?$"):
        load_pickle(data)


def test_bytes_and_instructions_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_pickle(b"\x80\x04(" + b"N" * 900 + b"\x8c\xff" + b"x" * 255 + b"l.", 1000)[:900] == [None] * 900
    with pytest.raises(Unreadable, match="more than 1,000 instructions"):
        load_pickle(b"\x80\x04" + b"N" * 2000 + b".", 1000)
    monkeypatch.setattr("kb.diagnose.readers.safe_unpickler.LARGEST", 10)
    with pytest.raises(Unreadable, match="larger than"):
        load_pickle(b"\x80" * 11)


def test_a_memo_with_a_large_number_takes_no_memory_for_the_numbers_below() -> None:
    """The unpickler written in C allocates them all: 9 bytes cost it 64 GB."""
    assert load_pickle(b"\x80\x04Nr\xff\xff\xff\xff.") is None


def test_integers_that_collide_as_keys_cost_no_more_than_others() -> None:
    """Python gives multiples of 2**61 - 1 the same hash: a dictionary of these takes the unpickler in C 11 s."""
    keys = b"".join(b"\x8a\x10" + (number * (2**61 - 1)).to_bytes(16, "little") + b"N" for number in range(20_000))
    began = time.thread_time()
    assert len(load_pickle(b"\x80\x04}(" + keys + b"u.")) == 20_000
    assert time.thread_time() - began < 5


@given(st.binary(max_size=100))
def test_any_bytes_are_plain_data_or_unreadable(data: bytes) -> None:
    _assert_plain_or_unreadable(b"\x80\x04" + data)


@given(st.data())
def test_a_pickle_with_wrong_bytes_is_plain_data_or_unreadable(data: st.DataObject) -> None:
    content = {"version": "2.10", "entries": [{"frames": [{"line": 3}], "sizes": [[4]], "group": ("0", "tp")}] * 2}
    damaged = bytearray(pickle.dumps(content, data.draw(st.integers(2, 5))))
    for at in data.draw(st.lists(st.integers(2, len(damaged) - 1), max_size=5)):
        damaged[at] = data.draw(st.integers(0, 255))
    _assert_plain_or_unreadable(bytes(damaged))


def _assert_plain_or_unreadable(data: bytes) -> None:
    try:
        value = load_pickle(data)
    except Unreadable as error:
        assert str(error).startswith("its pickle ")
        assert "\n" not in str(error)
    else:
        assert _types(value) <= {dict, list, tuple, str, int, float, bool, type(None)}


def _types(value: Any) -> set[type]:
    """Those of a value and of everything in it, which may be itself."""
    types, pending, seen = set[type](), [value], set[int]()
    while pending:
        part = pending.pop()
        types.add(type(part))
        if id(part) not in seen and isinstance(part, (dict, list, tuple)):
            seen.add(id(part))
            pending += [*part, *part.values()] if isinstance(part, dict) else part
    return types
