"""One flight-recorder dump: those of other versions, damaged ones, hostile ones."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb.diagnose.inputs.sources import Stream
from kb.diagnose.readers.flight_comparison import compare_dumps
from kb.diagnose.readers.flight_recorder import read_dump
from kb.diagnose.readers.structured import Unreadable, as_integer
from kb.diagnose.scan.scan import Limits, scan
from kb.diagnose.scan.signature_matcher import Matcher
from tests.support.flight_dumps import dump_of, entry
from tests.support.strategies import PLAIN_DATA

NO_DUMP = "not a flight-recorder dump: it has neither entries nor process groups"


def test_frames_of_libraries_are_not_the_users() -> None:
    frames = [
        {"name": "all_reduce", "filename": "/env/lib/python3.11/site-packages/torch/distributed/x.py", "line": 1},
        {"name": "backward", "filename": "/env/lib/python3.11/site-packages/accelerate/accelerator.py", "line": 2},
        {"name": "step", "filename": "/home/me/train.py", "line": 42},
    ]
    assert dump_of(0, [entry(1, frames=frames)]).records[0]["frames"] == ["train.py:42 step"]
    assert dump_of(0, [entry(1, frames=frames[:2])]).records[0]["frames"] == ["accelerator.py:2 backward"]


@pytest.mark.parametrize(
    ("name", "rank"),
    [("nccl_trace_rank_3", 3), ("a/trace12.json.gz", 12), ("/x/rank7.pkl", 7), ("dump.json", None), ("9/dump", None)],
)
def test_the_rank_is_in_the_name_of_the_file(name: str, rank: int | None) -> None:
    assert read_dump(b'{"entries": []}', name).rank == rank


def test_dumps_of_the_first_versions_are_read() -> None:
    old = {"version": "1.0", "entries": [{"seq_id": 4, "pg_id": 2, "profiling_name": "nccl:barrier"}]}
    record = read_dump(json.dumps(old).encode(), "x1").records[0]
    assert (record["seq"], record["group"], record["sizes"], record["state"]) == (4, "2", [], "scheduled")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"\xff\xfe", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"[" * 100_000, "its JSON is nested too deeply"),
        (b'{"entries": ' + b"9" * 10_000 + b"}", "not JSON: a number has more than 40 digits"),
        (b"\x80\x04", "its pickle is damaged"),
        (b"\x80\x04cos\nsystem\n.", "its pickle has the instruction 0x63, which plain data does not need"),
        (b"[]", NO_DUMP),
        (b"3", NO_DUMP),
        (b'{"version": "2.4"}', NO_DUMP),
        (b"\x80\x04N.", NO_DUMP),
        (b'{"entries": 3}', "its entries are not a list"),
        (b'{"entries": [3]}', "its entry 0 has no sequence number"),
        (b'{"entries": [{"collective_seq_id": 1}, {}]}', "its entry 1 has no sequence number"),
    ],
)
def test_what_is_no_dump_is_unreadable_for_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(Unreadable) as failure:
        read_dump(data, "nccl_trace_rank_0")
    assert str(failure.value) == reason


FRAMES = [{"name": f"step_{depth}", "filename": f"/job/{depth}.py", "line": depth} for depth in range(200)]


def test_a_part_that_a_pickle_names_in_many_places_is_read_once() -> None:
    """Read once for each place, the parts of a dump of 1.5 kB took 692 MB."""
    entries = [{**entry(1), "frames": FRAMES, "input_sizes": [[1] * 16] * 64}] * 5_000
    ranks = list(range(1 << 16))
    dump = dump_of(0, entries, pg_config={str(group): {"ranks": ranks} for group in range(5_000)})
    assert len(dump.records) == 5_000
    assert dump.records[0]["frames"] == [f"{depth}.py:{depth} step_{depth}" for depth in range(200)]
    assert dump.records[0]["sizes"] == [[1] * 16] * 64
    assert len(dump.members) == 5_000
    assert dump.members["7"] == frozenset(ranks)
    for parts in (
        [record["frames"] for record in dump.records],
        [record["sizes"] for record in dump.records],
        list(dump.members.values()),
    ):
        assert len(set(map(id, parts))) == 1


def test_what_dumps_may_make_of_memory_is_limited() -> None:
    data = json.dumps({"version": "2.4", "entries": [entry(number) for number in range(500)]}).encode()

    def problems(count: int, limits: Limits) -> tuple[str, ...]:
        streams = [Stream(f"nccl_trace_rank_{rank}", iter([data])) for rank in range(count)]
        return scan(streams, Matcher([]), limits=limits).problems

    assert problems(2, Limits(structured=len(data), records=1000)) == ()
    assert problems(1, Limits(structured=len(data) - 1)) == ("nccl_trace_rank_0: it is larger than 0 MiB",)
    assert problems(3, Limits(records=999)) == (
        "nccl_trace_rank_0: 3 dumps have more than 999 collectives; the last 250 of each are compared",
    )
    failed = Stream("error.json", iter([b'{"message": {"message": "ValueError: 7", "extraInfo": {"timestamp": "1"}}}']))
    dump = Stream("nccl_trace_rank_0", iter([data]))
    assert scan([dump, failed], Matcher([]), limits=Limits(records=500)).problems == ()


KEYS = ["entries", "pg_config", "pg_status", "version", "rank", "0", "ranks", "desc", "last_enqueued_collective"]
FIELDS = [*entry(1), "is_p2p", "frames", "seq_id", "filename", "line", "name"]


@given(
    st.dictionaries(st.sampled_from(KEYS), PLAIN_DATA, max_size=5),
    st.lists(st.dictionaries(st.sampled_from(FIELDS), PLAIN_DATA, max_size=12), max_size=4),
    st.booleans(),
)
def test_a_dump_of_nonsense_is_read_where_its_entries_have_numbers(
    content: dict[str, Any], entries: list[dict[str, Any]], is_pickle: bool
) -> None:
    content = {"entries": [{"collective_seq_id": 1, **fields} for fields in entries], **content}
    data = pickle.dumps(content) if is_pickle else json.dumps(content).encode()
    numbers = _sequence_numbers(content["entries"] or [])
    if numbers is None:
        with pytest.raises(Unreadable, match=r"^its (entries are not a list|entry \d has no sequence number)$"):
            read_dump(data, "trace0")
        return
    dumps = [read_dump(data, "trace0"), read_dump(data, "trace1"), dump_of(2, [entry(1), entry(2)])]
    assert [record["seq"] for record in dumps[0].records] == numbers
    for line in compare_dumps(dumps):
        assert line.text
        assert "\n" not in line.text
        assert line.source in {dump.source for dump in dumps}


def _sequence_numbers(entries: Any) -> list[int] | None:
    """None where not all entries have one."""
    if not isinstance(entries, list) or not all(isinstance(fields, dict) for fields in entries):
        return None
    numbers = [as_integer(fields.get("collective_seq_id", fields.get("seq_id"))) for fields in entries]
    return [number for number in numbers if number is not None] if None not in numbers else None
