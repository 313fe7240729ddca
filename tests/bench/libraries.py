"""`make matrix`, second part: verify what runs in real libraries, with the releases of each month in turn.

`MONTHS="2024-12 2025-06"` selects months and skips the first part, unless `RELEASES` is given as well. The record of a
month is `docs/verified/libraries-<month>.json`; what it says about unchanged probes is kept.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys

from kb.content.catalog import file_digest, load_catalog
from kb.content.roots import builtin_root
from kb.records.libraries import file_name, libraries_needed, record, unchanged
from tests.bench.environments import VERIFIED, answer, counts, environment, keep, record_names, reports

MONTHS = {  # the releases that were current then
    "2024-08": ("2.4.1", "transformers==4.44.2 accelerate==0.34.2 deepspeed==0.14.5 peft==0.12.0"),
    "2024-12": ("2.5.1", "transformers==4.47.1 accelerate==1.2.1 deepspeed==0.16.2 peft==0.14.0"),
    "2025-06": ("2.7.1", "transformers==4.52.4 accelerate==1.8.1 deepspeed==0.17.1 peft==0.15.2"),
    "2025-11": ("2.9.1", "transformers==4.57.3 accelerate==1.12.0 deepspeed==0.18.2 peft==0.18.0"),
    "2026-05": ("2.11.0", "transformers==5.10.4 accelerate==1.13.0 deepspeed==0.19.1 peft==0.19.1"),
    "2026-11": ("2.15.0", "transformers==5.23.0 accelerate==1.15.0 deepspeed==0.19.8 peft==0.21.2"),
}


def main() -> int:
    chosen = os.environ.get("MONTHS", "").split() or (() if os.environ.get("RELEASES") else MONTHS)
    failed = [month for month in chosen if not _is_recorded(month)]
    if failed:
        print(f"no record of {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _is_recorded(month: str) -> bool:
    """Verify what needs a library with the releases of a month. Returns False if that was not possible."""
    torch, requirements = MONTHS[month]
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    path = VERIFIED / file_name(month)
    catalog = load_catalog((builtin_root(),))
    digests = {entry.id: file_digest(probe) for entry in catalog if (probe := catalog.probe_file(entry))}
    known = unchanged(json.loads(path.read_text()), digests) if path.exists() else {}
    try:
        with environment(torch, *requirements.split()) as python:
            needed = libraries_needed(answer(python, "--all", "--plan")["plans"])
            record_names(python, day)
            changed = sorted(needed.keys() - known.keys())
            if not changed:
                return True
            kept = record(reports(python, *changed), needed, day)
    except (subprocess.CalledProcessError, json.JSONDecodeError, KeyError) as error:
        print(f"libraries of {month}: {error}", file=sys.stderr)
        return False
    kept["verdicts"] = dict(sorted({**known, **kept["verdicts"]}.items()))
    keep(path.name, kept)
    verdicts = [row["verdict"] for rows in kept["verdicts"].values() for row in rows]
    print(f"libraries of {month}: {counts(verdicts)}  {path}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
