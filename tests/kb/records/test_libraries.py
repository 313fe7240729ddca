"""Records of libraries hold what ran in a real library, and the releases that it needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kb.content.roots import Root
from kb.errors import UsageError
from kb.records.libraries import file_name, libraries_needed, library_summaries, library_verdicts, record, unchanged

DAY = "2026-11-22"
PLAIN, DEEPSPEED, PEFT = {"torch": ">=2.1"}, {"torch": ">=2.1", "deepspeed": ">=0.14"}, {"peft": "", "accelerate": ""}


def plan(entry_id: str, **experiments: dict[str, str]) -> dict[str, Any]:
    needs = [{"name": name, "needs": {"packages": packages}} for name, packages in experiments.items()]
    return {"id": entry_id, "experiments": needs}


def report(entry_id: str, torch: str, packages: dict[str, str], **verdicts: str) -> dict[str, Any]:
    first, *variants = (
        {"experiment": name, "fidelity": "cpu", "verdict": verdict, "reason": "why", "evidence": "left out"}
        for name, verdict in verdicts.items()
    )
    python = {"version": "3.11.7", "torch": {"version": torch}, "packages": packages}
    environment = {"python": python, "host": {"name_hash": "abcdef"}}
    digest = {"probe_digest": "1" * 64}
    return {**first, **digest, "id": entry_id, "variants": variants, "environment": environment, "kb_version": "1"}


PLANS = [
    plan("a", gloo=PLAIN, deepspeed=DEEPSPEED),
    plan("b", peft=PEFT),
    plan("c", gloo=PLAIN, cuda={"nvidia-nccl": ""}),
]
OLD, NEW = {"deepspeed": "0.9.5", "peft": "0.9.0", "accelerate": "1.2"}, {"deepspeed": "0.10.0"}


def test_only_what_needs_a_library_is_run_and_kept(tmp_path: Path) -> None:
    needed = libraries_needed(PLANS)
    assert needed == {"a": {"deepspeed": ("deepspeed",)}, "b": {"peft": ("peft", "accelerate")}}
    both = [
        report("b", "2.4.1", OLD, peft="verified"),
        report("a", "2.4.1", OLD, gloo="verified", deepspeed="verified"),
    ]
    newer = [report("a", "2.10.0+cu128", NEW, gloo="verified", deepspeed="not-reproduced")]
    for month, reports in (("2026-11", newer), ("2024-08", both)):
        document = record(reports, needed, DAY)
        assert "abcdef" not in json.dumps(document)
        (tmp_path / file_name(month)).write_text(json.dumps(document))
    known = library_verdicts([Root("a root", tmp_path, tmp_path, tmp_path)])
    assert library_summaries(known["a"]) == [
        "deepspeed (cpu): verified with deepspeed 0.9.5; not-reproduced with deepspeed 0.10.0"
    ]
    assert library_summaries(known["b"]) == ["peft (cpu): verified with peft 0.9.0 + accelerate 1.2"]
    assert library_summaries(known["b"], "1" * 64) == library_summaries(known["b"])
    assert library_summaries(known["b"], "2" * 64) == [
        "peft (cpu): verified with peft 0.9.0 + accelerate 1.2 (with an earlier probe)"
    ]
    assert known["a"][1].to_json()["packages"] == {"torch": "2.10.0", "deepspeed": "0.10.0"}


def test_a_library_is_found_in_any_spelling_of_its_name() -> None:
    needed = libraries_needed([plan("a", hub={"huggingface_hub": ""})])
    document = record([report("a", "2.9.1", {"huggingface-hub": "1.2.0"}, hub="verified")], needed, DAY)
    assert document["verdicts"]["a"][0]["libraries"] == {"huggingface_hub": "1.2.0"}


def test_what_a_record_says_of_a_probe_that_changed_is_not_kept() -> None:
    needed = libraries_needed(PLANS)
    both = [report("a", "2.4.1", OLD, deepspeed="verified"), report("b", "2.4.1", OLD, peft="verified")]
    document = record(both, needed, DAY)
    assert unchanged(document, {"a": "1" * 64, "b": "2" * 64}).keys() == {"a"}


def test_an_invalid_record_is_named(tmp_path: Path) -> None:
    (tmp_path / file_name("2024-08")).write_text('{"schema": "kb.libraries.v1"}')
    with pytest.raises(UsageError, match=r"libraries-2024-08\.json is not a valid record of libraries"):
        library_verdicts([Root("a root", tmp_path, tmp_path, tmp_path)])
