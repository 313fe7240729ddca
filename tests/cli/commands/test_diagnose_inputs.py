"""`kb diagnose`: files, folders and standard input, and what cannot be read."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.support.console import Ended, Kb
from tests.support.job_logs import HEALTHY, SHM, diagnosed, ids


def test_standard_input_and_packed_files_are_read_as_plain_ones_are(kb: Kb, tmp_path: Path) -> None:
    log = (HEALTHY + "[rank1]: " + SHM.format(rank=1) + "\n").encode()
    (tmp_path / "train.log").write_bytes(log)
    (tmp_path / "packed").write_bytes(gzip.compress(log))
    plain, packed, piped = diagnosed(kb, "train.log"), diagnosed(kb, "packed"), diagnosed(kb, "-", stdin=log)
    places = [item["findings"][0]["evidence"][0] for item in (plain, packed, piped)]
    assert [place.pop("source") for place in places] == ["train.log", "packed", "-"]
    assert places[0] == places[1] == places[2]


def test_an_empty_file_is_said_to_be_empty(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").touch()
    ended = kb("diagnose", "train.log")
    assert (ended.code, ended.out) == (1, "there is nothing to read: 1 file of 0 bytes\n")


@pytest.mark.parametrize(
    "args", [["missing.log"], ["train.log", "missing.log"], ["empty"], ["train.log", "--python", "python3"]]
)
def test_bad_input_is_exit_2_with_one_document(kb: Kb, tmp_path: Path, args: list[str]) -> None:
    (tmp_path / "train.log").write_text(HEALTHY)
    (tmp_path / "empty").mkdir()
    ended: Ended = kb("diagnose", *args, "--json")
    assert ended.code == 2
    assert ended.json["ok"] is False
    assert ended.json["error"]["message"]
    plain = kb("diagnose", *args)
    assert (plain.code, plain.out) == (2, "")
    assert "error:" in plain.err


@pytest.mark.parametrize("args", [[], ["train.log", "--limit", "0"]])
def test_a_wrong_call_is_exit_2(kb: Kb, tmp_path: Path, args: list[str]) -> None:
    (tmp_path / "train.log").write_text(HEALTHY)
    assert kb("diagnose", *args).code == 2


def test_what_could_not_be_read_is_said_and_the_rest_is_answered(kb: Kb, tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    (job / "model.bin").write_bytes(b"PK\x03\x04" + b"\0" * 99)
    (job / "train.log.gz").write_bytes(gzip.compress(SHM.format(rank=0).encode() + b"\n" + b"x" * 9999)[:-9])
    answer = diagnosed(kb, job)
    assert ids(answer)[0] == "shm-too-small"
    assert any("binary" in item for item in answer["problems"])
    assert any("ends too early" in item for item in answer["problems"])
    assert "kb: " in kb("diagnose", job).err
