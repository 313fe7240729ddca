"""Release records: all verdicts with one release of torch, one file in `docs/verified/` per release.

`make matrix` writes them: `torch-2.5.1.json` and so on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from kb.content.roots import Root, records
from kb.errors import UsageError

SCHEMA = "kb.releases.v1"
REPORT_KEYS = ("verdict", "reason", "experiment", "fidelity", "probe_digest")
GOOD = ("verified", "clear")
VARIANT_KEYS = ("experiment", "fidelity", "verdict", "reason")


@dataclass(frozen=True, slots=True)
class ReleaseVerdict:
    """The verdict of one entry with one release of torch. `experiments` maps names to (fidelity, verdict)."""

    torch: str
    day: str
    verdict: str
    reason: str
    experiments: Mapping[str, tuple[str, str]]
    probe_digest: str


def release_verdicts(roots: Iterable[Root]) -> dict[str, tuple[ReleaseVerdict, ...]]:
    """The verdicts of each entry, oldest release first. Raises `UsageError` for an invalid record."""
    by_entry: dict[str, list[ReleaseVerdict]] = {}
    for path, document in records(roots):
        try:
            if document["schema"] == SCHEMA:
                for entry_id, row in document["verdicts"].items():
                    by_entry.setdefault(entry_id, []).append(_release_verdict(document, row))
        except (ValueError, KeyError, TypeError) as error:
            raise _invalid(path, error) from None
    return {
        entry_id: tuple(sorted(verdicts, key=lambda verdict: Version(verdict.torch)))
        for entry_id, verdicts in by_entry.items()
    }


def releases_by_verdict(verdicts: Iterable[ReleaseVerdict]) -> dict[str, list[str]]:
    """The releases of torch by verdict, as documents show them: `{"verified": ["2.5.1", "2.6.0"]}`."""
    releases: dict[str, list[str]] = {}
    for verdict in verdicts:
        releases.setdefault(verdict.verdict, []).append(verdict.torch)
    return releases


def not_verified(releases: Mapping[str, Sequence[str]]) -> str:
    """A line about releases with a verdict other than verified or clear; "" if there are none, or no others."""
    others = {verdict: torch for verdict, torch in releases.items() if verdict not in GOOD}
    return f"torch: {_listed(others)}" if others and len(others) < len(releases) else ""


def release_summary(verdicts: Sequence[ReleaseVerdict], probe_digest: str = "") -> str:
    """A line about the releases with which the entry was verified, and the others; "" without a record."""
    if not verdicts:
        return ""
    is_earlier = probe_digest and any(verdict.probe_digest != probe_digest for verdict in verdicts)
    last = max(verdict.day for verdict in verdicts)
    return f"torch: {_listed(releases_by_verdict(verdicts))} ({last}{', with an earlier probe' if is_earlier else ''})"


def experiment_summaries(verdicts: Iterable[ReleaseVerdict]) -> list[str]:
    """A line for each experiment that a release could run: its fidelity, and the releases by verdict."""
    return experiment_lines(
        (name, fidelity, outcome, verdict.torch)
        for verdict in verdicts
        for name, (fidelity, outcome) in verdict.experiments.items()
        if fidelity
    )


def experiment_lines(rows: Iterable[tuple[str, str, str, str]]) -> list[str]:
    """A line for each experiment, from rows of name, fidelity, verdict and release; repeated rows count once."""
    releases: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, fidelity, verdict, release in dict.fromkeys(rows):
        releases.setdefault((name, fidelity), {}).setdefault(verdict, []).append(release)
    return [f"{name} ({fidelity}): {_listed(by_verdict)}" for (name, fidelity), by_verdict in releases.items()]


def _listed(releases: Mapping[str, Sequence[str]]) -> str:
    """A list such as `verified with 2.5.1, 2.6.0; not-applicable with 2.2.2`."""
    return "; ".join(f"{verdict} with {', '.join(torch)}" for verdict, torch in releases.items())


def add_releases(documents: Iterable[dict[str, Any]], roots: Iterable[Root]) -> None:
    """Add `releases`, which maps verdicts to releases of torch, to the summaries of entries."""
    by_entry = release_verdicts(roots)
    for document in documents:
        document["releases"] = releases_by_verdict(by_entry.get(document["id"], ()))


def patterns_digest(patterns: Iterable[str]) -> str:
    """The sha256 of what a verdict depends on in an entry: its failure patterns. Prose may change without it."""
    return hashlib.sha256("\n".join(patterns).encode()).hexdigest()


def record(reports: Iterable[Mapping[str, Any]], day: str, patterns: Mapping[str, str]) -> dict[str, Any]:
    """The record of one release, from the reports of one environment as JSON.

    `patterns` has the digest of each entry's patterns. Raises `UsageError` without torch.
    """
    reports = sorted(reports, key=lambda report: str(report["id"]))
    python = next((report["environment"].get("python") or {} for report in reports), {})
    torch = (python.get("torch") or {}).get("version")
    if not torch:
        raise UsageError("no torch answers in this environment", "`kb verify --python` names its interpreter")
    return {
        "schema": SCHEMA,
        "kb_version": reports[0]["kb_version"],
        "torch": Version(torch).public,
        "build": torch,
        "python": python.get("version"),
        "day": day,
        "verdicts": {
            report["id"]: {
                **{key: report[key] for key in REPORT_KEYS},
                "patterns_digest": patterns[report["id"]],
                "variants": [{key: variant[key] for key in VARIANT_KEYS} for variant in report["variants"]],
            }
            for report in reports
        },
    }


def unchanged(document: Mapping[str, Any], digests: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """The rows of an earlier record whose patterns and probe still have the digests that were judged."""
    return {
        entry_id: row
        for entry_id, row in document["verdicts"].items()
        if digests.get(entry_id) == (row["patterns_digest"], row["probe_digest"])
    }


def _release_verdict(document: Mapping[str, Any], row: Mapping[str, Any]) -> ReleaseVerdict:
    rows = [row, *row["variants"]] if row["experiment"] else row["variants"]
    experiments = {each["experiment"]: (each.get("fidelity") or "", each["verdict"]) for each in rows}
    return ReleaseVerdict(
        document["torch"], document["day"], row["verdict"], row["reason"], experiments, row["probe_digest"]
    )


def _invalid(path: Path, error: Exception) -> UsageError:
    return UsageError(f"{path} is not a valid record of a release: {error}", "`make matrix` writes such files")


def file_name(torch: str) -> str:
    """The name of the record of a release; a later run with the same release replaces the file."""
    return f"torch-{torch}.json"
