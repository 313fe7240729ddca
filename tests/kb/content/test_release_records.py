"""What kb shows of releases comes from release records and from nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kb.content.catalog import load_catalog
from kb.content.gpu_records import proofs
from kb.content.release_records import file_name, record, release_summary, release_verdicts
from kb.content.roots import Root, builtin_root
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


def root_with(folder: Path, *records: dict[str, Any]) -> Root:
    for document in records:
        (folder / file_name(document["torch"])).write_text(json.dumps(document))
    return Root("a root", folder / "entries", folder / "probes", folder)


def test_the_releases_of_an_entry_are_listed_by_verdict_from_the_oldest(tmp_path: Path) -> None:
    builds = {"2.13.0+cpu": "verified", "2.9.1+cu128": "verified", "2.2.2+cu121": "not-applicable"}
    root = root_with(tmp_path, *(record([report("a", verdict, torch)], DAY) for torch, verdict in builds.items()))
    verdicts = release_verdicts([root])["a"]
    assert [verdict.torch for verdict in verdicts] == ["2.2.2", "2.9.1", "2.13.0"]
    assert release_summary(verdicts) == "Releases: verified on torch 2.9.1, 2.13.0; not-applicable on torch 2.2.2"
    assert release_summary(()) == ""
    assert not proofs([root]), "no hardware record"


def test_a_record_keeps_verdicts_and_names_no_host() -> None:
    document = record([report("b", "verified", "2.5.1"), report("a", "clear", "2.5.1")], DAY)
    assert list(document["verdicts"]) == ["a", "b"]
    assert document["verdicts"]["a"]["variants"] == [{"experiment": "in-flight", "verdict": "verified", "reason": ""}]
    assert "abcdef" not in json.dumps(document)
    with pytest.raises(UsageError, match="no torch answers"):
        record([{**report("a", "clear", "2.5.1"), "environment": {"python": None}}], DAY)


def test_a_broken_record_is_one_clear_error(tmp_path: Path) -> None:
    root = root_with(tmp_path, {"schema": "kb.releases.v1", "torch": "2.5.1"})
    with pytest.raises(UsageError, match=r"torch-2\.5\.1\.json is not a valid release record"):
        release_verdicts([root])


def test_records_of_the_built_in_entries_are_sound() -> None:
    roots = (builtin_root(),)
    assert release_verdicts(roots).keys() <= load_catalog(roots).entries.keys()
