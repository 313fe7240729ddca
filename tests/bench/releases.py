"""`make matrix`, first part: verify every entry with each release of torch in turn, and record the verdicts.

PyPI's builds for CUDA take 4 to 6 GB each and run without a GPU. `RELEASES="2.5.1 2.6.0"` selects releases and skips
the second part, unless `MONTHS` is given as well. The record of a release is `docs/verified/torch-<release>.json`.
Verdicts of entries with unchanged patterns and probe are kept, so remove the file to run everything again.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys

from kb.content.catalog import file_digest, load_catalog
from kb.content.roots import builtin_root
from kb.errors import UsageError
from kb.records.releases import file_name, patterns_digest, record, unchanged
from tests.bench.environments import VERIFIED, counts, environment, keep, record_names, reports

RELEASES = (
    "2.2.2", "2.4.1", "2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.11.0", "2.13.0", "2.14.1", "2.15.0",
)  # fmt: skip


def main() -> int:
    chosen = os.environ.get("RELEASES", "").split() or (() if os.environ.get("MONTHS") else RELEASES)
    failed = [release for release in chosen if not _is_recorded(release)]
    if failed:
        print(f"no record of {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _is_recorded(release: str) -> bool:
    """Verify everything with a release. Returns False if it could not be installed or verified."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    digests = _digests()
    path = VERIFIED / file_name(release)
    known = unchanged(json.loads(path.read_text()), digests) if path.exists() else {}
    changed = sorted(digests.keys() - known.keys())
    try:
        with environment(release) as python:
            record_names(python, day)
            if not changed:
                return True
            kept = record(
                reports(python, *changed), day, {entry_id: patterns for entry_id, (patterns, _) in digests.items()}
            )
    except (subprocess.CalledProcessError, json.JSONDecodeError, KeyError, UsageError) as error:
        print(f"torch {release}: {error}", file=sys.stderr)
        return False
    kept["verdicts"] = dict(sorted({**known, **kept["verdicts"]}.items()))
    keep(path.name, kept)
    verdicts = [row["verdict"] for row in kept["verdicts"].values()]
    print(f"torch {kept['build']}: {counts(verdicts)}  {path}", flush=True)
    return True


def _digests() -> dict[str, tuple[str, str]]:
    """The digests of each entry's patterns and of its probe."""
    catalog = load_catalog((builtin_root(),))
    return {
        entry.id: (patterns_digest(entry.failure_patterns), file_digest(probe))
        for entry in catalog
        if (probe := catalog.probe_file(entry))
    }


if __name__ == "__main__":
    sys.exit(main())
