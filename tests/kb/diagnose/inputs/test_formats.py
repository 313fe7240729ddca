"""What an input is, by its first bytes."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb.diagnose.inputs.formats import Kind, detect_kind

ENTRY = {"record_id": 1, "collective_seq_id": 1, "profiling_name": "nccl:all_reduce", "frames": [], "state": "started"}
DUMP = {"version": "2.10", "pg_config": {"0": {"ranks": "[0, 1]"}}, "comm_lib_version": "", "entries": [ENTRY] * 50}
FAILURE = {
    "message": {"message": "RuntimeError: no", "extraInfo": {"py_callstack": "Traceback", "timestamp": "1795230245"}}
}
RAS = """{
  "nccl_version": "2.28.7",
  "cuda_runtime_version": 13000,
  "cuda_driver_version": 13000,
  "timestamp": "2026-11-21 03:04:05",
  "communicators_count": 1,
  "communicators": [
    {
      "hash": "0x1f", "size": 4, "ranks_count": 3, "missing_ranks_count": 1, "ranks": []
"""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Traceback (most recent call last):\n",
        "训练失败: CUDA out of memory\n",
        "\ufeffwith a mark\n",
        '{"message": "step 1", "level": "info"}\n{"message": "step 2", "level": "info"}\n',
        '{"message": "step 1", "timestamp": 1}\n{"message": "step 2", "timestamp": 2}\n',
        '{"record_id": 1, "pg_config": 2}\n{"record_id": 2, "pg_config": 2}\n',
        '{"learning_rate": 0.1}',
        "{'loss': 1.2, 'epoch': 0.1}\n",
        "{" * 5000,
        "[12345.678901] NVRM: Xid (PCI:0000:1b:00): 79\n",
    ],
)
def test_lines_of_any_sort_are_text(text: str) -> None:
    assert detect_kind(text.encode()) is Kind.TEXT


def test_latin_1_and_broken_utf_8_are_text() -> None:
    assert detect_kind(b"\xe9t\xe9 \xff\xfe\n") is Kind.TEXT


def test_nuls_around_a_log_are_what_a_cut_or_a_crash_leaves() -> None:
    assert detect_kind(b"\0" * 5000 + b"Traceback\n") is Kind.TEXT
    assert detect_kind(b"Traceback\n" + b"\0" * 5000) is Kind.TEXT
    assert detect_kind(b"\0" * 5000) is Kind.BINARY
    assert detect_kind(b"Trace\0back\n") is Kind.BINARY


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickled_flight_dump_is_known_in_every_protocol(protocol: int) -> None:
    assert detect_kind(pickle.dumps(DUMP, protocol)[: 1 << 16], "anything") is Kind.FLIGHT_PICKLE


def test_other_pickles_are_no_dumps() -> None:
    assert detect_kind(pickle.dumps({"weights": [1.0] * 100})) is Kind.BINARY
    assert detect_kind(pickle.dumps(0x1950A86A20F9469CFC6C, 2), "nccl_trace_rank_0") is Kind.BINARY  # old torch.save


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_a_flight_dump_in_json_is_known_although_its_version_may_come_last(indent: int | None, is_sorted: bool) -> None:
    dump = DUMP | {"entries": [ENTRY] * 5000}
    assert detect_kind(json.dumps(dump, indent=indent, sort_keys=is_sorted).encode()[: 1 << 16]) is Kind.FLIGHT_JSON


def test_what_the_installed_torch_dumps_is_known() -> None:
    c10d = pytest.importorskip("torch._C._distributed_c10d", exc_type=ImportError)
    assert detect_kind(c10d._dump_fr_trace()) is Kind.FLIGHT_PICKLE
    assert detect_kind(c10d._dump_fr_trace_json()) is Kind.FLIGHT_JSON


def test_error_files_of_both_shapes_are_known() -> None:
    assert detect_kind(json.dumps(FAILURE).encode()) is Kind.ERROR_FILE
    assert detect_kind(json.dumps(FAILURE, indent=2).encode()) is Kind.ERROR_FILE
    assert detect_kind(json.dumps({"message": "RuntimeError: no", "timestamp": 1795230245}).encode()) is Kind.ERROR_FILE
    assert detect_kind(b'{"message": "RuntimeError: no"}', "attempt_0/3/error.json") is Kind.ERROR_FILE
    assert detect_kind(b'{"message": "hello"}', "train.log") is Kind.TEXT


def test_a_ras_report_is_known() -> None:
    assert detect_kind(RAS.encode()) is Kind.RAS_JSON


def test_what_holds_no_log_is_binary() -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("archive/data.pkl", "x")
    header = b'{"__metadata__":{"format":"pt"}}'
    for head in (archive.getvalue(), struct.pack("<Q", len(header)) + header, b"\x7fELF\x02", b"\x89PNG\r\n"):
        assert detect_kind(head, "train.log") is Kind.BINARY


@given(st.binary(max_size=400), st.sampled_from([b"", b"\x80\x04", b'{"message": ', b'{"message": {"', b"\0", b"{"]))
def test_any_bytes_are_of_some_kind(data: bytes, front: bytes) -> None:
    assert isinstance(detect_kind(front + data, "x.json"), Kind)


def test_deep_nesting_in_an_error_file_is_text() -> None:
    assert detect_kind(b'{"message": ' + b"[" * 60_000) is Kind.TEXT


def test_what_kb_verify_files_beside_the_logs_is_known_and_a_users_json_is_not_taken_for_it() -> None:
    assert detect_kind(b'{"outcome": "raised", "type": "ValueError", "max_rss_mib": 239}', "rank0.json") is Kind.OWN
    assert detect_kind(b'{"ending": "settled", "exits": []}') is Kind.OWN
    assert detect_kind(b'{"arm_id": "2a6c", "dir": "/tmp/a", "memory_cap_bytes": 1}') is Kind.OWN
    assert detect_kind(b'[{"group": "default_pg", "seq": 1, "op": "gloo:all_reduce", "retired": true}]') is Kind.OWN
    assert detect_kind(b'{"outcome": "raised", "reward": 0.1}') is Kind.TEXT
