"""What was verified where: reports and the records of machines, as the rows of one table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kb.content.gpu_records import Proof
from kb.store.reports import VerdictCount

MARKS = {"verified": "good", "fix-ineffective": "bad", "inverted": "bad", "other-failure": "bad"}


@dataclass(frozen=True, slots=True)
class Row:
    """Reports of one kind of machine that say the same. `day` is that of the last; `count` says how many there are."""

    gpu: str
    driver: str
    torch: str
    verdict: str
    fidelity: str
    count: int
    day: str
    is_earlier: bool  # another wording of the entry was judged

    @property
    def mark(self) -> str:
        """How the verdict is coloured: good, bad, or neither."""
        return MARKS.get(self.verdict, "neutral")


def rows(entry_id: str, digest: str, verdict_counts: Iterable[VerdictCount], proofs: Iterable[Proof]) -> list[Row]:
    """Of one entry: the current wording first, then by GPU, driver and torch, newest first."""
    found = [
        Row(
            standing.gpu,
            standing.driver,
            standing.torch,
            standing.verdict,
            standing.fidelity,
            standing.count,
            str(standing.last)[:10],
            standing.entry_digest != digest,
        )
        for standing in verdict_counts
        if standing.entry_id == entry_id
    ]
    found += [
        Row(
            proof.gpus, proof.driver, proof.torch, proof.verdict, "hardware", 1, proof.day, proof.entry_digest != digest
        )
        for proof in proofs
    ]
    found.sort(key=lambda row: row.day, reverse=True)
    return sorted(found, key=lambda row: (row.is_earlier, row.gpu == "", row.gpu, row.driver, row.torch))
