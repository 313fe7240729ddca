"""Records of releases hold verdicts, and nothing about the machine but Python and torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kb.content.roots import Root
from kb.errors import UsageError
from kb.records.hardware import proofs
from kb.records.releases import (
    add_releases,
    experiment_summaries,
    file_name,
    not_verified,
    record,
    release_summary,
    release_verdicts,
    releases_by_verdict,
    unchanged,
)

DAY = "2026-11-22"
PATTERNS = dict.fromkeys("abc", "0" * 64)


def report(entry_id: str, verdict: str, torch: str) -> dict[str, Any]:
    variant = {
        "experiment": "in-flight",
        "fidelity": "cpu",
        "verdict": "verified",
        "reason": "",
        "evidence": "left out",
    }
    return {
        "id": entry_id,
        "verdict": verdict,
        "reason": "why",
        "experiment": "gloo",
        "fidelity": "cpu",
        "probe_digest": "1" * 64,
        "variants": [variant],
        "environment": {"python": {"version": "3.11.7", "torch": {"version": torch}}, "host": {"name_hash": "abcdef"}},
        "kb_version": "1",
    }


def test_no_record_of_a_release_is_one_of_hardware(tmp_path: Path) -> None:
    document = record([report("a", "verified", "2.13.0+cpu")], DAY, PATTERNS)
    (tmp_path / file_name(document["torch"])).write_text(json.dumps(document))
    assert (tmp_path / "torch-2.13.0.json").exists()
    assert not proofs([Root("a root", tmp_path / "entries", tmp_path / "probes", tmp_path)])


def test_a_record_keeps_verdicts_and_names_no_host() -> None:
    document = record([report("b", "verified", "2.5.1"), report("a", "clear", "2.5.1")], DAY, PATTERNS)
    assert list(document["verdicts"]) == ["a", "b"]
    assert document["verdicts"]["a"]["variants"] == [
        {"experiment": "in-flight", "fidelity": "cpu", "verdict": "verified", "reason": ""}
    ]
    assert "abcdef" not in json.dumps(document)
    with pytest.raises(UsageError, match="no torch answers"):
        record([{**report("a", "clear", "2.5.1"), "environment": {"python": None}}], DAY, PATTERNS)


def recorded(folder: Path, *verdicts: tuple[str, str]) -> list[Root]:
    """A root with a record for each torch and verdict of the entry `a`."""
    for torch, verdict in verdicts:
        (folder / file_name(torch)).write_text(json.dumps(record([report("a", verdict, torch)], DAY, PATTERNS)))
    return [Root("a root", folder / "entries", folder / "probes", folder)]


def test_releases_are_in_the_order_of_their_versions_and_by_verdict(tmp_path: Path) -> None:
    roots = recorded(tmp_path, ("2.13.0", "verified"), ("2.9.1", "verified"), ("2.2.2", "not-applicable"))
    verdicts = release_verdicts(roots)["a"]
    assert releases_by_verdict(verdicts) == {"not-applicable": ["2.2.2"], "verified": ["2.9.1", "2.13.0"]}
    assert (
        release_summary(verdicts, "1" * 64) == f"torch: not-applicable with 2.2.2; verified with 2.9.1, 2.13.0 ({DAY})"
    )
    assert release_summary(verdicts, "2" * 64).endswith(f"({DAY}, with an earlier probe)")
    assert release_summary(()) == ""
    assert experiment_summaries(verdicts) == [
        "gloo (cpu): not-applicable with 2.2.2; verified with 2.9.1, 2.13.0",
        "in-flight (cpu): verified with 2.2.2, 2.9.1, 2.13.0",
    ]


def test_a_list_names_the_releases_that_differ_and_no_others(tmp_path: Path) -> None:
    documents: list[dict[str, Any]] = [{"id": "a"}, {"id": "b"}]
    add_releases(documents, recorded(tmp_path, ("2.13.0", "clear"), ("2.2.2", "not-applicable")))
    assert [not_verified(document["releases"]) for document in documents] == ["torch: not-applicable with 2.2.2", ""]
    assert not_verified({"not-applicable": ["2.2.2"]}) == "", "on no release: the reason is not the release"


def test_an_invalid_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch-1.json").write_text(json.dumps({"schema": "kb.releases.v1"}))
    with pytest.raises(UsageError, match=r"torch-1\.json is not a valid record of a release"):
        release_verdicts([Root("a root", tmp_path / "entries", tmp_path / "probes", tmp_path)])


def test_a_verdict_about_earlier_patterns_or_an_earlier_probe_is_given_anew() -> None:
    document = record([report(entry_id, "verified", "2.5.1") for entry_id in ("a", "b", "c")], DAY, PATTERNS)
    digests = {"a": ("0" * 64, "1" * 64), "b": ("0" * 64, "2" * 64), "c": ("2" * 64, "1" * 64), "new": ("", "")}
    assert list(unchanged(document, digests)) == ["a"]
