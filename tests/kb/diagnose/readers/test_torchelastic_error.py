"""torchrun's error files: the one that torch really writes, the other shape, and nonsense."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb.diagnose.evidence import LONGEST_EVIDENCE
from kb.diagnose.readers.structured import Unreadable
from kb.diagnose.readers.torchelastic_error import read_error_file

FAILS = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise RuntimeError("CUDA error: an illegal memory access\\nSecond line")

main()
"""


def document(message: Any, **more: Any) -> bytes:
    return json.dumps({"message": message, **more}).encode()


def test_the_file_of_a_real_failure_is_its_traceback_with_rank_and_time(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.elastic", exc_type=ImportError)
    path = tmp_path / "attempt_0" / "3" / "error.json"
    path.parent.mkdir(parents=True)
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    failed = subprocess.run([sys.executable, "-c", FAILS], env=environment, capture_output=True, timeout=120)
    assert failed.returncode == 1
    error_file = read_error_file(path.read_bytes(), str(path), 3)
    texts = [line.text for line in error_file]
    assert texts[0] == "Traceback (most recent call last):"
    assert texts[-2:] == ["RuntimeError: CUDA error: an illegal memory access", "Second line"]
    assert texts.count("Second line") == 1
    assert {(line.source, line.number, line.rank) for line in error_file} == {(str(path), 0, 3)}
    assert error_file[0].time == pytest.approx(path.stat().st_mtime, abs=5)


def test_the_agents_copy_tells_the_exit_code() -> None:
    inner = {"message": "SignalException: killed", "extraInfo": {"timestamp": "1700000000"}, "errorCode": -9}
    error_file = read_error_file(document(inner), "error.json")
    assert [line.text for line in error_file] == ["SignalException: killed", "torchrun recorded the exit code -9"]
    assert error_file[0].time == 1_700_000_000


def test_the_shape_with_text_has_its_time_beside_it() -> None:
    (line,) = read_error_file(document("RuntimeError: no", timestamp=1_700_000_000), "error.json", 2)
    assert (line.text, line.rank, line.time) == ("RuntimeError: no", 2, 1_700_000_000)


def test_the_placeholder_for_no_message_is_no_evidence() -> None:
    assert read_error_file(document("<NONE>"), "error.json") == []


def test_a_long_line_is_cut_and_of_many_the_last_count() -> None:
    callstack = "\n".join([*(f"frame {number}" for number in range(100_000)), "x" * 10_000])
    error_file = read_error_file(document({"message": "", "extraInfo": {"py_callstack": callstack}}), "error.json")
    assert len(error_file) == 2000
    assert error_file[-1].text == "x" * LONGEST_EVIDENCE


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        *((data, "not JSON: ") for data in (b"", b"{", b'{"message":"' + b"x" * 20)),
        *((data, "not a torchrun error file: it has no message") for data in (b"[]", b"{}", b'{"message": 3}')),
        (b"[" * 100_000, "its JSON is nested too deeply"),
    ],
)
def test_what_is_no_error_file_is_unreadable_for_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=f"^{reason}"):
        read_error_file(data, "error.json")


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["message", "extraInfo", "py_callstack", "timestamp", "errorCode"]), inner, max_size=5
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_text_or_object_is_a_message(message: Any) -> None:
    if isinstance(message, (str, dict)):
        lines = read_error_file(document(message), "error.json")
        assert all(line.text and line.text.splitlines() == [line.text] for line in lines)
    else:
        with pytest.raises(Unreadable, match="it has no message"):
            read_error_file(document(message), "error.json")


@given(st.binary(max_size=200), st.sampled_from([b"", b'{"message": ', b'{"message": {"extraInfo": ']))
def test_any_bytes_are_no_error_file(data: bytes, front: bytes) -> None:
    with pytest.raises(Unreadable, match=r"^(not JSON: |not a torchrun error file)"):
        read_error_file(front + data, "error.json")
