"""`make matrix`, first part: verify every entry with one release of torch after the other, and keep the verdicts.

PyPI's builds for CUDA take 4 to 6 GB each and run without a GPU. `RELEASES="2.5.1 2.6.0"` chooses some and
leaves out the second part, unless `MONTHS` is given as well. A record is `docs/verified/torch-<release>.json`.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys

from kb.errors import UsageError
from kb.records.releases import file_name, record
from tests.bench.environments import answer, counts, environment, keep, record_names

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
    """Verify everything with a release; False when it could not be installed or verified."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        with environment(release) as python:
            kept = record(answer(python, "--all")["reports"], day)
            record_names(python, day)
    except (subprocess.CalledProcessError, json.JSONDecodeError, KeyError, UsageError) as error:
        print(f"torch {release}: {error}", file=sys.stderr)
        return False
    path = keep(file_name(kept["torch"]), kept)
    verdicts = [row["verdict"] for row in kept["verdicts"].values()]
    print(f"torch {kept['build']}: {counts(verdicts)}  {path}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
