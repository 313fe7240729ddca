"""Release records: what every verdict was with one release of torch, one file in `docs/verified/` per release.

`make matrix` writes them, `torch-2.5.1.json` and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from packaging.version import Version

from kb.errors import UsageError

SCHEMA = "kb.releases.v1"
REPORT_KEYS = ("verdict", "reason", "experiment", "fidelity", "entry_digest", "probe_digest")
VARIANT_KEYS = ("experiment", "verdict", "reason")


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
