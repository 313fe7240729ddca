"""What kb shows of GPU arms comes from hardware records and from nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from kb.errors import UsageError
from kb.records import hardware
from tests.support.console import ContentRoot, Kb

pytestmark = pytest.mark.usefixtures("few_entries")

GPU_PROBE = 'make(raised("the thing broke"), needs=Needs(gpus=2), backend="nccl")'
MACHINE = {
    "python": {"torch": {"version": "2.13.0+cu130", "cuda": "13.0"}, "packages": {"nvidia-nccl-cu13": "2.29.3"}},
    "gpus": [{"name": "NVIDIA H100 80GB HBM3", "driver_version": "580.65.06"}] * 2,
    "host": {"kernel": "6.8.0", "name_hash": "abcdef"},
}


def report(entry_id: str, fidelity: str = "hardware", digest: str = "0" * 64) -> dict[str, Any]:
    shared = {"reason": "", "experiment": "nccl", "entry_digest": digest, "probe_digest": "1" * 64, "duration_s": 9.5}
    return {
        "id": entry_id,
        "verdict": "verified",
        "fidelity": fidelity,
        "started_at": "2026-11-20T10:00:00+00:00",
        "environment": MACHINE,
        "kb_version": "1",
        **shared,
    }


def keep(content: ContentRoot, *reports: dict[str, Any]) -> None:
    document = hardware.record(reports)
    folder = content.path / "verified"
    folder.mkdir(exist_ok=True)
    (folder / hardware.file_name(document["machine"])).write_text(json.dumps(document))


def test_gpu_arms_that_never_ran_say_so_everywhere(kb: Kb, content: ContentRoot) -> None:
    content.incident("on-gpus", probe=GPU_PROBE)
    content.incident("on-cpu")
    listed = {item["id"]: item["hardware"] for item in kb("list", "--json").json["entries"]}
    assert (listed["on-gpus"], listed["on-cpu"]) == (hardware.NEVER, None)
    assert hardware.NEVER in kb("list").out
    assert hardware.NEVER in kb("show", "on-gpus").out
    assert "GPU arms" not in kb("show", "on-cpu").out


def test_a_hardware_record_changes_the_summary(kb: Kb, content: ContentRoot) -> None:
    content.incident("on-gpus", probe=GPU_PROBE)
    digest = kb("show", "on-gpus", "--json").json["digest"]
    keep(content, report("on-gpus", digest=digest))
    text = "GPU arms: verified on 2 x NVIDIA H100 80GB HBM3, driver 580.65.06, torch 2.13.0+cu130 (2026-11-20)"
    assert kb("show", "on-gpus", "--json").json["hardware"] == text
    with (content.path / "entries" / "on-gpus.md").open("a") as entry:
        entry.write("\n")
    assert "in an earlier wording" in kb("show", "on-gpus", "--json").json["hardware"]


def test_a_record_holds_hardware_only_and_names_no_host(content: ContentRoot) -> None:
    document = hardware.record([report("a"), report("b", fidelity="cpu")])
    assert [item["id"] for item in document["reports"]] == ["a"]
    assert document["machine"]["nccl"] == "2.29.3"
    assert "abcdef" not in json.dumps(document)
    with pytest.raises(UsageError, match="no GPU arm ran here"):
        hardware.record([report("b", fidelity="cpu")])


def test_a_broken_record_is_one_clear_error(kb: Kb, content: ContentRoot) -> None:
    (content.path / "verified").mkdir()
    (content.path / "verified" / "x.json").write_text("{}")
    ended = kb("list", "--json")
    assert (ended.code, "x.json is not a valid hardware record" in ended.json["error"]["message"]) == (2, True)


def test_records_of_the_built_in_entries_are_sound() -> None:
    roots = (builtin_root(),)
    assert hardware.proofs(roots).keys() <= load_catalog(roots).entries.keys()
