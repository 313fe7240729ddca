"""`make bench-diagnose`: how often a diagnosis is right, how fast a log is read, and what hostile texts cost.

Exit code 1 if a bar is missed. `--cases FILE` adds cases in the format of `questions.jsonl`; `--megabytes` sets the
size of the log for measuring speed; `--quick` reads a tenth of the 2 GB log and of the repeats of signatures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kb.authoring.signature_tests import healthy_logs
from kb.content.catalog import load_catalog
from kb.content.roots import configured_roots
from kb.diagnose.scan.signature_matcher import Matcher
from kb.search.index_cache import open_index
from tests.bench import diagnosed, scanning


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=Path, action="append", default=[])
    parser.add_argument("--megabytes", type=int, default=scanning.SPEED_BYTES >> 20)
    parser.add_argument("--quick", action="store_true")
    failed: list[str] = []
    for line in _report(parser.parse_args(), failed):
        print(line, flush=True)
    for miss in failed:
        print(f"missed: {miss}", file=sys.stderr)
    return 1 if failed else 0


def _report(options: argparse.Namespace, failed: list[str]) -> Iterator[str]:
    roots = configured_roots(())
    healthy = healthy_logs(roots)
    with tempfile.TemporaryDirectory() as name, open_index(roots, lambda _: None) as index:
        matcher = Matcher(index.signatures)
        samples = {
            signature.pattern: signature.sample for entry in load_catalog(roots) for signature in entry.meta.signatures
        }
        files = [diagnosed.QUESTIONS, *options.cases]
        yield from diagnosed.accuracy(index, matcher, roots, files, failed)
        yield ""
        yield from diagnosed.healthy(index, matcher, healthy, failed)
        yield ""
        yield from scanning.speed(Path(name), matcher, healthy, options.megabytes << 20, failed)
        share = 10 if options.quick else 1
        yield from scanning.memory(Path(name), healthy, scanning.MEMORY_BYTES // share, failed)
        yield ""
        yield from scanning.hostile(matcher, healthy, samples, scanning.HOSTILE_BYTES // share)


if __name__ == "__main__":
    sys.exit(main())
