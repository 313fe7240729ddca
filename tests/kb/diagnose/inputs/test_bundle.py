"""Bundles of `kb capture` as inputs: what reaches which reader, and bundles that somebody changed."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kb.capture.archive import pack
from kb.capture.bundle import File
from kb.diagnose.inputs.bundle import MANIFEST, read_members
from kb.diagnose.inputs.formats import Kind, detect_kind
from kb.diagnose.inputs.sources import Stream, find_sources
from kb.diagnose.scan.result import Scan
from kb.diagnose.scan.scan import scan
from kb.diagnose.scan.signature_matcher import Matcher
from tests.support.capture_records import SLEEPS, encoded, node, record

LIMITS = "Max realtime timeout      unlimited\nMax processes   96365"
FAILURE = b"[rank1]: RuntimeError: CUDA error: out of memory\n"


def files() -> list[File]:
    ranks = [record(0), record(1, SLEEPS), record(2)]
    records = [{**rank, "facts": {"limits": LIMITS}, "environment": {"NCCL_TIMEOUT": "1 error"}} for rank in ranks]
    return [
        *(File(f"node-0/rank-{rank['rank']}/process.json", "process", encoded(rank), rank["rank"]) for rank in records),
        File("node-0/node.json", "node", encoded(node(tools={"sockets": "connection error\n"}))),
        File("node-0/rank-1/stacks.txt", "stacks", b"kb capture: stacks of rank-1\nThread 1 (idle)\n", 1),
        File("node-0/rank-1/stderr.log", "log", FAILURE, 1),
    ]


def read(data: bytes) -> Scan:
    return scan([Stream("b.tar.zst", iter([data]))], Matcher([]))


def test_each_file_goes_to_its_reader_and_nothing_of_proc_to_the_lines() -> None:
    result = read(pack(files(), {}, 1.0))
    assert [line.rank for line in result.observations[:1]] == [1]
    assert [(failure.line.source, failure.line.rank) for failure in result.failures] == [
        ("b.tar.zst/node-0/rank-1/stderr.log", 1)
    ]
    assert result.problems == ()


def test_an_unpacked_bundle_says_the_same(tmp_path: Path) -> None:
    members = {
        MANIFEST: b'{\n "schema": "kb.capture.manifest.v1",\n "files": {}}',
        **{file.name: file.content for file in files()},
    }
    for name, content in members.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    packed, unpacked = read(pack(files(), {}, 1.0)), scan(find_sources([str(tmp_path)]).inputs, Matcher([]))
    assert [line.text for line in unpacked.observations] == [line.text for line in packed.observations]
    assert len(unpacked.failures) == 1


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b'{"schema": "kb.capture.process.v1", "rank": 1}', Kind.CAPTURE_RECORD),
        (b'{"schema": "kb.capture.node.v1"}', Kind.CAPTURE_RECORD),
        (b'{\n "schema": "kb.capture.manifest.v1"', Kind.OWN),
        (b'{"schema": "kb.capture.v1", "ok": true', Kind.TEXT),
        (b"kb capture: stacks of rank-1; kb reads", Kind.OWN),
        (b'{"schema": "other.v1"}', Kind.TEXT),
    ],
)
def test_a_file_of_an_unpacked_bundle_is_known_by_its_content(head: bytes, kind: Kind) -> None:
    assert detect_kind(head) is kind


def tar(*members: tuple[str, bytes], manifest: Any = None, kind: bytes = tarfile.REGTYPE) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        about = {"schema": "kb.capture.manifest.v1", "files": {}} if manifest is None else manifest
        for name, content in ((MANIFEST, json.dumps(about).encode()), *members):
            info = tarfile.TarInfo(name)
            info.size, info.type = len(content), tarfile.REGTYPE if name == MANIFEST else kind
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def problems(data: bytes) -> Iterable[str]:
    found: list[str] = []
    assert list(read_members(io.BufferedReader(io.BytesIO(data)), "b", 1 << 20, found.append)) == []
    return found


def test_a_file_that_was_changed_or_added_is_not_read() -> None:
    wrong = {"schema": "kb.capture.manifest.v1", "files": {"a.log": {"sha256": "0" * 64}}}
    assert problems(tar(("a.log", b"x"), manifest=wrong)) == ["b: a.log was changed after the capture"]
    assert problems(tar(("b.log", b"x"))) == ["b: b.log is not in the manifest and was not read"]


@pytest.mark.parametrize("manifest", [{}, [], {"files": 3}, {"files": {"a.log": None}}, "text"])
def test_a_manifest_of_another_form_lists_nothing(manifest: Any) -> None:
    assert problems(tar(("a.log", b"x"), manifest=manifest)) == ["b: a.log is not in the manifest and was not read"]


def test_links_and_huge_members_end_the_reading() -> None:
    assert "is no file of a capture" in next(iter(problems(tar(("a.log", b""), kind=tarfile.SYMTYPE))))
    data = bytearray(tar(("a.log", b"x")))
    info = tarfile.TarInfo("a.log")
    info.size = 1 << 40
    data[1024:1536] = info.tobuf(tarfile.GNU_FORMAT)
    assert "too large" in next(iter(problems(bytes(data))))


def test_a_bundle_in_a_bundle_is_not_unpacked() -> None:
    inner = tar()
    listed = {"schema": "kb.capture.manifest.v1", "files": {"b.tar": {"sha256": sha256(inner).hexdigest()}}}
    assert problems(tar(("b.tar", inner), manifest=listed)) == ["b: b.tar is a bundle in a bundle and was not read"]


def test_what_came_before_the_cut_is_read() -> None:
    whole = pack(files(), {}, 1.0)
    result = read(whole[: len(whole) // 2])
    assert any("ends too early" in problem or "damaged" in problem for problem in result.problems)
    flat = tar(("a.log", b"x" * 5000))
    assert problems(flat[:3000]) == ["b: a.log is cut off"]


@pytest.mark.parametrize(("margin", "expected"), [(0.5, 60.0), (90.0, 0.0)])
def test_times_of_a_node_are_corrected_where_its_clock_was_certainly_wrong(margin: float, expected: float) -> None:
    line = "2026-07-01 10:00:00,000 RuntimeError: CUDA error: out of memory\n"
    logs = [File(f"node-{rank}/rank-{rank}/stderr.log", "log", line.encode(), rank) for rank in range(2)]
    clocks = [{"name": "node-0", "skew": None}, {"name": "node-1", "skew": {"ahead_s": 60.0, "margin_s": margin}}]
    times = {failure.line.rank: failure.line.time for failure in read(pack([logs[0]], {"nodes": clocks}, 1.0)).failures}
    times |= {
        failure.line.rank: failure.line.time for failure in read(pack([logs[1]], {"nodes": clocks}, 1.0)).failures
    }
    assert times[0] is not None
    assert times[1] is not None
    assert times[0] - times[1] == expected
