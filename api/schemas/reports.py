"""Shared reports, and how they relate to the served content, described for OpenAPI."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from kb.sharing.shared_report import EntryId, SharedReport
from kb.verify.verdict import Verdict

from .content import ID, TITLE

SHARED: dict[str, Any] = {
    "id": ID,
    "title": TITLE,
    "verdict": "verified",
    "reason": "the control arm failed as the entry says, the treatment completed",
    "evidence": "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6, OpType=ALLGATHER)",
    "experiment": "nccl",
    "fidelity": "hardware",
    "entry_digest": "c101044d0808b87f17be9b007f11a4c1bebdc679ae2ad77f01b44b9f11a007c9",
    "probe_digest": "b1424e9a0598986eecc90507717f308795604e819d393e08adc90403673e8262",
    "started_at": "2026-03-01T08:30:00Z",
    "duration_s": 9.4,
    "kb_version": "0.1.0",
    "check": None,
    "arms": {
        "control": {
            "outcome": "raised",
            "expected": "raised",
            "because": "only rank 0 enters the all-gather of the state dict",
            "first_failing_rank": 0,
            "duration_s": 6.4,
        },
        "treatment": {
            "outcome": "completed",
            "expected": "completed",
            "because": "every rank enters it, rank 0 alone writes",
            "first_failing_rank": None,
            "duration_s": 2.1,
        },
    },
    "variants": [],
    "machine": {
        "gpus": ["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"],
        "driver": "570.86.15",
        "torch": "2.7.0+cu126",
        "cuda": "12.6",
        "nccl": "2.26.2",
        "kernel": "6.8.0-45-generic",
        "os": "Ubuntu 22.04.4 LTS",
        "python": "3.12.3",
    },
    "next_step": f"apply the fix: `kb show {ID} --section fix`",
}
REPORT: dict[str, Any] = {
    **SHARED,
    "number": 17,
    "received_at": "2026-03-01T08:30:11.204000Z",
    "earlier_wording": False,
    "earlier_probe": False,
}
RECEIPT: dict[str, Any] = {"number": 17, "id": ID, "verdict": "verified"}


class ReportDocument(SharedReport):
    """A report as it was shared, compared with the entry that is served here."""

    model_config = ConfigDict(json_schema_extra={"examples": [REPORT]})
    number: int | None = Field(description="Of a shared report; null for a report of this machine that was not sent.")
    received_at: AwareDatetime | None = Field(description="When it arrived; null when it was not sent.")
    earlier_wording: bool | None = Field(
        description="Whether the verdict is about another wording of the entry than the served one; null if not served."
    )
    earlier_probe: bool | None = Field(description="The same for its probe.")

    @classmethod
    def of(
        cls,
        report: SharedReport,
        digests: Mapping[str, str],
        probe_digests: Mapping[str, str],
        number: int | None = None,
        received_at: datetime.datetime | None = None,
    ) -> Self:
        """The document of a report.

        `digests` and `probe_digests` are those of the served entries, by id; `received_at` is naive UTC.
        """
        return cls(
            **{name: getattr(report, name) for name in SharedReport.model_fields},
            number=number,
            received_at=received_at and received_at.replace(tzinfo=datetime.UTC),
            earlier_wording=_is_earlier(report.entry_digest, digests.get(report.id)),
            earlier_probe=_is_earlier(report.probe_digest, probe_digests.get(report.id)),
        )


class ReportPage(BaseModel):
    """Reports, newest first; `next` is the cursor to older ones, null at the end."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"reports": [REPORT], "next": None}]})
    reports: tuple[ReportDocument, ...]
    next: str | None


class ReportList(BaseModel):
    """Reports of one entry, newest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": ID, "reports": [REPORT]}]})
    id: str
    reports: tuple[ReportDocument, ...]


class Receipt(BaseModel):
    """The number under which a report is stored. `id` is the id of its entry."""

    model_config = ConfigDict(json_schema_extra={"examples": [RECEIPT]})
    number: int
    id: EntryId
    verdict: Verdict


def _is_earlier(digest: str, current: str | None) -> bool | None:
    return None if current is None else digest != current
