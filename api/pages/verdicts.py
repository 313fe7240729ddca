"""The table of verdicts of an entry: shared reports and hardware records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kb.records.hardware import Proof
from kb.store.reports import VerdictCount

MARKS = {"verified": "good", "fix-ineffective": "bad", "inverted": "bad", "other-failure": "bad"}


@dataclass(frozen=True, slots=True)
class Row:
    """Equal verdicts of one kind of machine, with their `count` and the `day` of the last one."""

    gpu: str
    driver: str
    torch: str
    verdict: str
    fidelity: str
    count: int
    day: str
    is_earlier: bool  # about another wording of the entry

    @property
    def mark(self) -> str:
        """The colour of the verdict: good, bad or neutral."""
        return MARKS.get(self.verdict, "neutral")


def rows(entry_id: str, digest: str, verdict_counts: Iterable[VerdictCount], proofs: Iterable[Proof]) -> list[Row]:
    """The rows of one entry, the current wording first, then by GPU, driver and torch, newest first."""
    table = [
        Row(
            count.gpu,
            count.driver,
            count.torch,
            count.verdict,
            count.fidelity,
            count.count,
            str(count.last)[:10],
            count.entry_digest != digest,
        )
        for count in verdict_counts
        if count.entry_id == entry_id
    ]
    table += [
        Row(
            proof.gpus, proof.driver, proof.torch, proof.verdict, "hardware", 1, proof.day, proof.entry_digest != digest
        )
        for proof in proofs
    ]
    table.sort(key=lambda row: row.day, reverse=True)
    return sorted(table, key=lambda row: (row.is_earlier, row.gpu == "", row.gpu, row.driver, row.torch))
