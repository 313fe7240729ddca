"""What a capture says of the odd rank, as it is really said, against the entries' signatures."""

from __future__ import annotations

import pytest

from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from kb.diagnose.readers.capture_comparison import CaptureRecords
from kb.patterns.literals import find
from tests.support.capture_records import GATHERS, SLEEPS, encoded, record

ENTRIES = load_catalog((builtin_root(),)).current()


@pytest.mark.parametrize(
    ("frames", "entry_id"), [(SLEEPS, "slow-rank-exceeds-timeout"), (GATHERS, "rank-divergent-collectives")]
)
def test_the_odd_rank_points_to_an_entry(frames: tuple[str, ...], entry_id: str) -> None:
    records = CaptureRecords()
    for document in (record(0), record(1, frames), record(2)):
        records.add(encoded(document), "bundle", 100_000)
    sentence = records.compare()[0].text
    assert entry_id in {
        entry.id for entry in ENTRIES for signature in entry.meta.signatures if find(signature.pattern, sentence)
    }
