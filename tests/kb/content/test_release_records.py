"""Records of releases hold verdicts, and nothing about the machine but Python and torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kb.content.gpu_records import proofs
from kb.content.release_records import file_name, record
from kb.content.roots import Root
from kb.errors import UsageError

DAY = "2026-11-22"


def report(entry_id: str, verdict: str, torch: str) -> dict[str, Any]:
    variant = {"experiment": "in-flight", "verdict": "verified", "reason": "", "evidence": "left out"}
    return {
        "id": entry_id,
        "verdict": verdict,
        "reason": "why",
        "experiment": "gloo",
        "fidelity": "cpu",
        "entry_digest": "0" * 64,
        "probe_digest": "1" * 64,
        "variants": [variant],
        "environment": {"python": {"version": "3.11.7", "torch": {"version": torch}}, "host": {"name_hash": "abcdef"}},
        "kb_version": "1",
    }


def test_no_record_of_a_release_is_one_of_hardware(tmp_path: Path) -> None:
    document = record([report("a", "verified", "2.13.0+cpu")], DAY)
    (tmp_path / file_name(document["torch"])).write_text(json.dumps(document))
    assert (tmp_path / "torch-2.13.0.json").exists()
    assert not proofs([Root("a root", tmp_path / "entries", tmp_path / "probes", tmp_path)])


def test_a_record_keeps_verdicts_and_names_no_host() -> None:
    document = record([report("b", "verified", "2.5.1"), report("a", "clear", "2.5.1")], DAY)
    assert list(document["verdicts"]) == ["a", "b"]
    assert document["verdicts"]["a"]["variants"] == [{"experiment": "in-flight", "verdict": "verified", "reason": ""}]
    assert "abcdef" not in json.dumps(document)
    with pytest.raises(UsageError, match="no torch answers"):
        record([{**report("a", "clear", "2.5.1"), "environment": {"python": None}}], DAY)
