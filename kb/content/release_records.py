"""Release records: what every verdict was with one release of torch, one file in `docs/verified/` per release.

`make matrix` writes them, `torch-2.5.1.json` and so on. They say what an entry was shown on, and on what not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from kb.content.roots import Root
from kb.errors import UsageError

SCHEMA = "kb.releases.v1"
SHOWN = "verified"
REPORT_KEYS = ("verdict", "reason", "experiment", "fidelity", "entry_digest", "probe_digest")
VARIANT_KEYS = ("experiment", "verdict", "reason")


@dataclass(frozen=True, slots=True)
class ReleaseVerdict:
    """One verdict of an entry with one release of torch."""

    torch: str
    verdict: str
    reason: str
    day: str
    entry_digest: str


def release_verdicts(roots: Iterable[Root]) -> dict[str, tuple[ReleaseVerdict, ...]]:
    """By entry, the oldest release first. Raises `UsageError` for an invalid record."""
    by_entry: dict[str, list[ReleaseVerdict]] = {}
    for path in (path for root in roots for path in root.verified_files()):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["schema"] != SCHEMA:
                continue
            torch, day = document["torch"], document["day"]
            for entry_id, row in document["verdicts"].items():
                verdict = ReleaseVerdict(torch, row["verdict"], row["reason"], day, row["entry_digest"])
                by_entry.setdefault(entry_id, []).append(verdict)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is not a valid release record: {error}", "`make matrix` writes them") from None
    return {
        entry_id: tuple(sorted(verdicts, key=lambda verdict: Version(verdict.torch)))
        for entry_id, verdicts in by_entry.items()
    }


def release_summary(verdicts: Iterable[ReleaseVerdict]) -> str:
    """One line: `Releases: verified on torch 2.4.1, 2.5.1; not-applicable on 2.2.2`; "" without verdicts."""
    by_verdict: dict[str, list[str]] = {}
    for verdict in verdicts:
        by_verdict.setdefault(verdict.verdict, []).append(verdict.torch)
    ordered = sorted(by_verdict, key=lambda name: (name != SHOWN, name))
    parts = [f"{name} on torch {', '.join(by_verdict[name])}" for name in ordered]
    return f"Releases: {'; '.join(parts)}" if parts else ""


def record(reports: Iterable[Mapping[str, Any]], day: str) -> dict[str, Any]:
    """The record of one release, from the reports of one environment as JSON. Raises `UsageError` without torch."""
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
                "variants": [{key: variant[key] for key in VARIANT_KEYS} for variant in report["variants"]],
            }
            for report in reports
        },
    }


def file_name(torch: str) -> str:
    """A later run with the same release replaces the file."""
    return f"torch-{torch}.json"
