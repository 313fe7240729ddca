"""Which probes have already passed, by a digest of everything that the result depends on: tests/proven.json.

That is the probe, the patterns of its entry, the code that runs and judges arms, torch and Python. If none has changed
since `make test-all`, which writes the file, another run shows the same. `make test` runs the others and a sample.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kb.content.catalog import Catalog, load_catalog
from kb.content.roots import builtin_root

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "proven.json"
ENGINE = ("kb/*.py", "kb/harness/*.py", "kb/verify/*.py")
SAMPLE = 8  # one in this many proven probes runs anyway


def to_run(catalog: Catalog) -> list[str]:
    """The ids of the entries whose probes `make test` runs."""
    digests = _digests(catalog)
    if os.environ.get("KB_ALL_PROBES") or not FILE.is_file():
        return list(digests)
    proven = json.loads(FILE.read_text())
    return [name for name, digest in digests.items() if proven.get(name) != digest or int(digest[:8], 16) % SAMPLE == 0]


def _digests(catalog: Catalog) -> dict[str, str]:
    return {entry.id: _digest(catalog, entry.id) for entry in catalog if entry.meta.probe}


def _digest(catalog: Catalog, entry_id: str) -> str:
    entry = catalog.get(entry_id)
    probe = catalog.probe_file(entry)
    patterns = [f"{signature.role} {signature.pattern}" for signature in entry.meta.signatures]
    content = "\n".join([_engine(), probe.read_text() if probe else "", *patterns])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


@cache
def _engine() -> str:
    digest = hashlib.sha256()
    for pattern in ENGINE:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return f"{digest.hexdigest()} torch {torch} Python {sys.version_info[:2]}"


if __name__ == "__main__":
    FILE.write_text(json.dumps(_digests(load_catalog((builtin_root(),))), indent=1) + "\n")
