"""Fuzzes the readers of `kb diagnose`, by hand: any input ends in a scan, none in an exception.

pip install atheris   # into an environment of its own, with what kb needs
python tests/fuzz/fuzz_logs.py -max_total_time=300 CORPUS
"""

from __future__ import annotations

import sys

import atheris  # type: ignore[import-untyped, unused-ignore]  # not in the development environment: it has few wheels

with atheris.instrument_imports(include=["kb.diagnose", "kb.patterns.literals"]):
    from kb.diagnose.inputs.sources import Stream
    from kb.diagnose.scan.scan import scan
    from kb.diagnose.scan.signature_matcher import Matcher

from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from kb.patterns.literals import literals

NAMES = ("train.log", "rank_1.log", "nccl_trace_rank_0", "error.json", "1.stacks")
MATCHER = Matcher(
    {
        "id": entry.id,
        "role": signature.role.value,
        "pattern": signature.pattern,
        "literals": sorted(literals(signature.pattern)),
    }
    for entry in load_catalog((builtin_root(),))
    for signature in entry.meta.signatures
)


def scan_input(data: bytes) -> None:
    """The first byte selects the name, the second the size of the pieces of the rest."""
    name, size, rest = NAMES[data[0] % len(NAMES)] if data else "", 1 + (data[1] if data[1:] else 0), data[2:]
    scan([Stream(name, (rest[at : at + size] for at in range(0, len(rest), size)))], MATCHER)


if __name__ == "__main__":
    atheris.Setup(sys.argv, scan_input)
    atheris.Fuzz()
