"""Flight-recorder dumps: those that torch really writes after a real hang, damaged ones, hostile ones."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb.diagnose.inputs.sources import Stream
from kb.diagnose.readers.flight_recorder import FlightDump, compare_dumps, read_dump
from kb.diagnose.readers.safe_unpickler import Unreadable, load
from kb.diagnose.scan.scan import Limits, scan
from kb.diagnose.scan.signature_matcher import Matcher
from tests.support.console import GENEROUS_S

HANG = """
import datetime, os, sys
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

rank, folder = int(sys.argv[1]), sys.argv[2]
wait = datetime.timedelta(seconds=60 if rank else 2)
store = dist.FileStore(f"{folder}/store", 2)
store.set(f"imported{rank}", "1")  # rank 0 waits 2 s for everything from here on: they begin together
store.wait([f"imported{1 - rank}"], datetime.timedelta(seconds=170))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)

def step():
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        dist.all_reduce(torch.ones(8))  # rank 1 skips it

try:
    step()
except RuntimeError as error:
    assert "Timed out" in str(error), error
open(f"{folder}/nccl_trace_rank_{rank}", "wb").write(_dump_fr_trace())
open(f"{folder}/trace{rank}.json", "wb").write(_dump_fr_trace_json())
store.set(f"dumped{rank}", "1")
store.wait([f"dumped{1 - rank}"], datetime.timedelta(seconds=170))  # alive and silent while the other waits
os._exit(0)
"""


def read_file(path: Path) -> FlightDump:
    return read_dump(path.read_bytes(), str(path))


@pytest.fixture(scope="module")
def hang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dumps of two gloo ranks, of which rank 1 skipped the second all-reduce."""
    pytest.importorskip("torch._C._distributed_c10d", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("hang")
    script = folder / "hang.py"
    script.write_text(HANG)
    ranks = [subprocess.Popen([sys.executable, str(script), str(rank), str(folder)]) for rank in range(2)]
    try:
        assert [rank.wait(timeout=2 * GENEROUS_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return folder


def test_the_pickles_of_a_real_hang_name_the_rank_that_skipped_and_the_line_that_waits(hang: Path) -> None:
    dumps = [read_file(hang / f"nccl_trace_rank_{rank}") for rank in (1, 0)]
    line = HANG.splitlines().index("        dist.all_reduce(torch.ones(8))  # rank 1 skips it") + 1
    (output,) = compare_dumps(dumps)
    assert output.text == (
        f"rank 1 never issued collective 2 (all_reduce [8] Float), which rank 0 is in (hang.py:{line} step)"
    )
    assert (output.rank, output.number, output.source) == (1, 0, str(hang / "nccl_trace_rank_1"))
    assert output.time == pytest.approx((hang / "store").stat().st_mtime, abs=300)


def test_the_json_of_a_real_hang_says_the_same_without_the_line(hang: Path) -> None:
    (output,) = compare_dumps(read_file(hang / f"trace{rank}.json") for rank in (0, 1))
    assert output.text == "rank 1 never issued collective 2 (all_reduce [8] Float), which rank 0 is in"
    assert output.rank == 1


def test_pickle_and_json_of_one_rank_count_once_and_the_one_with_stacks_wins(hang: Path) -> None:
    paths = [hang / name for name in ("nccl_trace_rank_0", "trace0.json", "trace1.json", "nccl_trace_rank_1")]
    (output,) = compare_dumps(map(read_file, paths))
    assert output.text.endswith(" step)")


def test_a_real_dump_is_read_in_full(hang: Path) -> None:
    dump = read_file(hang / "nccl_trace_rank_0")
    assert (dump.rank, dump.version.split(".")[0], len(dump.records)) == (0, "2", 2)
    assert dump.status["0:default_pg"].enqueued == 2
    record = dump.records[0]
    assert (record["group"], record["seq"], record["op"]) == ("0:default_pg", 1, "gloo:all_reduce")
    assert (record["sizes"], record["outputs"], record["dtypes"]) == ([[4]], [[4]], ["Float"])
    assert record["frames"][0].endswith(" step")
    assert not record["p2p"]


def test_a_real_pickle_reads_as_the_standard_library_reads_it(hang: Path) -> None:
    data = (hang / "nccl_trace_rank_0").read_bytes()
    assert load(data) == pickle.loads(data)


def entry(seq: int, **more: Any) -> dict[str, Any]:
    return {
        "record_id": seq - 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "state": "completed",
        "retired": True,
        "time_created_ns": 1_700_000_000_000_000_000 + seq,
        **more,
    }


def dump_of(rank: int, entries: list[dict[str, Any]], **more: Any) -> FlightDump:
    content = {"version": "2.10", "entries": entries, **more}
    return read_dump(pickle.dumps(content), f"/dumps/nccl_trace_rank_{rank}")


def told(*dumps: FlightDump) -> list[str]:
    return [line.text for line in compare_dumps(dumps)]


def test_a_member_without_a_dump_is_mentioned() -> None:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    result = compare_dumps([dump_of(rank, [entry(1)], pg_config=config) for rank in (0, 1)])
    assert [(line.text, line.rank) for line in result] == [("no flight record from ranks 2 and 3", 2)]


def test_ranks_without_records_are_judged_by_the_status_of_the_group() -> None:
    waiting = [entry(5, state="started", retired=False)]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}

    def status(last: str) -> dict[str, dict[str, str]]:
        return {"0": {"last_enqueued_collective": last}}

    behind = dump_of(1, [], pg_config=config, pg_status=status("4"))
    assert told(dump_of(0, waiting, pg_config=config), behind)[0].startswith("rank 1 never issued collective 5 ")
    there = dump_of(1, [], pg_config=config, pg_status=status("5"))
    assert told(dump_of(0, waiting, pg_config=config), there) == []


def test_groups_that_a_split_gave_one_name_are_told_apart() -> None:
    def half(rank: int, ranks: str, size: int) -> FlightDump:
        config = {"3": {"name": "3", "desc": "tp", "ranks": ranks}}
        return dump_of(rank, [entry(1, process_group=("3", "tp"), input_sizes=[[size]])], pg_config=config)

    halves = [half(0, "[0, 1]", 4), half(1, "[0, 1]", 4), half(2, "[2, 3]", 5), half(3, "[2, 3]", 5)]
    assert told(*halves) == []
    halves[3] = half(3, "[2, 3]", 6)
    assert told(*halves)[0].startswith("collective 1 of group 3:tp (ranks 2 and 3) differs: rank 2 ")


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
        read_dump(data, "nccl_trace_rank_0")
    assert not marker.exists()
    pickle.loads(data)  # the bomb is live: read by the standard library it goes off
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
    ],
)
def test_every_instruction_that_is_not_plain_data_is_refused(code: bytes) -> None:
    with pytest.raises(Unreadable, match="which plain data does not need"):
        load(b"\x80\x04" + code + b".")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x80\x04",
        b"\x80\x04.",
        b"\x80\x04]",
        b"\x80\x04X\xff\xff\xff\x7fabc.",  # a string of two gigabytes that is not there
        b"\x80\x04\x8d" + b"\xff" * 8,
        b"\x80\x04N" + b"r\xff\xff\xff\xff" + b".a",  # a memo of four billion
        b"\x80\x04h\x05.",
        b"\x80\x04" + b"(" * 1000,
        b"\x80\x04}()Nu.",  # a key that is a tuple
        b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".",
        b"[" * 100_000,
        b'{"entries": ' + b"9" * 10_000 + b"}",
        b'{"entries": 3}',
        b'{"entries": [3]}',
        b'{"entries": [{}]}',
        b"[]",
        b"3",
        b"\xff\xfe",
    ],
)
def test_what_is_no_dump_is_unreadable_in_one_sentence(data: bytes) -> None:
    with pytest.raises(Unreadable) as failure:
        read_dump(data, "nccl_trace_rank_0")
    assert "\n" not in str(failure.value)


def test_an_entry_that_contains_itself_is_read() -> None:
    itself: dict[str, Any] = entry(1)
    itself["frames"] = itself["input_sizes"] = [itself]
    itself["input_sizes"].append(itself["input_sizes"])
    assert told(dump_of(0, [itself, entry(2)]), dump_of(1, [itself]))[0].startswith("rank 1 never issued collective 2 ")


def test_nesting_and_numbers_of_values_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kb.diagnose.readers.safe_unpickler.MOST", 1000)
    for data in (b"\x80\x04" + b"N" * 2000 + b".", b"[" + b"[]," * 2000 + b"[]]"):
        with pytest.raises(Unreadable, match="more than 1000"):
            load(data)
    monkeypatch.setattr("kb.diagnose.readers.safe_unpickler.LARGEST", 10)
    with pytest.raises(Unreadable, match="larger than"):
        load(b"\x80" * 11)


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def colliding(count: int) -> bytes:
    """A pickle whose dictionary has integers for keys that Python hashes to one number."""
    keys = b"".join(b"\x8a\x10" + (number * (2**61 - 1)).to_bytes(16, "little") + b"N" for number in range(1, count))
    return b"\x80\x04}(" + short("pg_config") + b"}(" + keys + b"u" + short("entries") + b"]u."


def repeated(**members: Any) -> bytes:
    """A pickle that names one record, or the ranks of one group, in fifty thousand places."""
    return pickle.dumps({"version": "2.4", **members}, 4)


RANKS = list(range(1 << 16))
FRAMES = [{"name": f"step_{depth}", "filename": f"/job/{depth}.py", "line": depth} for depth in range(200)]
SMALL_AND_HOSTILE = {
    "keys": colliding(200_000),
    "groups": repeated(entries=[{**entry(1), "process_group": [str(group), ""]} for group in range(20_000)]),
    "records": repeated(entries=[{**entry(1), "frames": FRAMES, "input_sizes": [[1] * 16] * 64}] * 50_000),
    "ranks": repeated(entries=[entry(1)], pg_config={str(group): {"ranks": RANKS} for group in range(50_000)}),
}


@pytest.mark.parametrize("kind", SMALL_AND_HOSTILE)
@pytest.mark.timeout(300)
def test_a_small_dump_costs_no_more_than_it_is_large(kind: str) -> None:
    """Each took minutes, or a hundred gigabytes."""
    data = SMALL_AND_HOSTILE[kind]
    assert len(data) < 5_000_000
    compare_dumps([read_dump(data, "nccl_trace_rank_0"), read_dump(data, "nccl_trace_rank_1")])


@pytest.mark.parametrize("digits", ["9" * 4300, f"9007199254740993.{'0' * 700}1"])
def test_a_number_of_many_digits_is_none_of_a_dump(digits: str) -> None:
    with pytest.raises(Unreadable, match="more than 40 digits"):
        load(f'{{"version": "2.4", "entries": [{digits}]}}'.encode())


def test_what_dumps_may_make_of_memory_is_limited() -> None:
    data = json.dumps({"version": "2.4", "entries": [entry(number) for number in range(5000)]}).encode()

    def problems(count: int, limits: Limits) -> tuple[str, ...]:
        streams = [Stream(f"nccl_trace_rank_{rank}", iter([data])) for rank in range(count)]
        return scan(streams, Matcher([]), limits=limits).problems

    assert problems(2, Limits(structured=len(data), records=5000)) == ()
    (large,) = problems(1, Limits(structured=len(data) - 1))
    assert "nccl_trace_rank_0" in large and "larger than" in large
    (many,) = problems(3, Limits(records=9999))
    assert "nccl_trace_rank_2" in many and "more than 9,999 collectives" in many
    failed = Stream("error.json", iter([b'{"message": {"message": "ValueError: 7", "extraInfo": {"timestamp": "1"}}}']))
    dump = Stream("nccl_trace_rank_0", iter([data]))
    assert scan([dump, failed], Matcher([]), limits=Limits(records=10)).problems == ()


def test_while_a_large_dump_is_read_other_threads_run() -> None:
    """A thread that waits has its turn after the interval, unless C code runs on until it is done."""
    data, usual = json.dumps([entry(number) for number in range(10_000)]).encode(), sys.getswitchinterval()
    reading, turns = Thread(target=load, args=(data,)), 0
    sys.setswitchinterval(0.0001)
    try:
        reading.start()
        while reading.is_alive():
            turns += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(usual)
    assert turns > 10


PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=20,
)
KEYS = ["entries", "pg_config", "pg_status", "version", "rank", "0", "ranks", "desc", "last_enqueued_collective"]
FIELDS = [*entry(1), "is_p2p", "frames", "seq_id", "filename", "line", "name"]


@given(PLAIN, st.integers(2, 5))
def test_plain_data_survives_every_protocol(value: Any, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol)) == value


@given(
    st.dictionaries(st.sampled_from(KEYS), PLAIN, max_size=5),
    st.lists(st.dictionaries(st.sampled_from(FIELDS), PLAIN, max_size=12), max_size=4),
    st.booleans(),
)
def test_a_dump_of_nonsense_is_unreadable_or_says_little(
    content: dict[str, Any], entries: list[dict[str, Any]], is_pickle: bool
) -> None:
    content = {"entries": [{"collective_seq_id": 1, **item} for item in entries], **content}
    data = pickle.dumps(content) if is_pickle else json.dumps(content).encode()
    with suppress(Unreadable):
        compare_dumps([read_dump(data, "trace0"), read_dump(data, "trace1"), dump_of(2, [entry(1), entry(2)])])


@given(st.binary(max_size=300), st.sampled_from([b"", b"\x80\x04", b"\x80\x02}(", b'{"entries":', b"[{"]))
def test_any_bytes_are_read_or_unreadable(data: bytes, front: bytes) -> None:
    with suppress(Unreadable):
        read_dump(front + data, "trace0")


@given(st.data())
def test_a_damaged_pickle_is_read_or_unreadable(data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps({"version": "2.10", "pg_config": {}, "entries": [entry(1), entry(2)]}, 2))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=5)):
        whole[at] = data.draw(st.integers(0, 255))
    with suppress(Unreadable):
        compare_dumps([read_dump(bytes(whole), "trace0"), read_dump(bytes(whole), "trace1")])
