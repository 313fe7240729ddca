"""Exposure of an environment: its versions compared with the version ranges of every entry. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kb.content.applicability import State, Versions, applicability
from kb.content.entry import Entry, Severity

from ..schemas.content import ID, TITLE

ORDER = (State.APPLIES, State.UNKNOWN, State.DOES_NOT_APPLY)
SEVERITIES = tuple(Severity)  # the most costly first
EXAMPLE: dict[str, Any] = {
    "packages": {"torch": "2.4.0", "python": "3.11.9"},
    "gpu": "H100",
    "incidents": [
        {
            "id": ID,
            "title": TITLE,
            "status": "confirmed",
            "severity": "high",
            "state": "applies",
            "reason": "torch 2.4.0 is within >=1.12",
            "proved": "GPU arms: verified on 2 x NVIDIA H100, driver 550.54, torch 2.4.0 (2026-03-01)",
        }
    ],
    "any_version": ["too-many-open-files"],
    "checks": None,
}


class Incident(BaseModel):
    """Whether an incident can happen with these versions, and why.

    `state`: applies, does-not-apply (out of its range, or fixed), or unknown (a version that matters is not stated).
    `proved` is what was verified on a GPU like the stated one; null when nothing was.
    """

    id: str
    title: str
    status: str
    severity: str
    state: Literal["applies", "unknown", "does-not-apply"]
    reason: str
    proved: str | None


class CheckAnswer(BaseModel):
    """The result of the read-only check of an entry on this machine, as in `kb check --json`."""

    id: str
    title: str
    severity: str
    state: Literal["exposed", "clear"]
    evidence: tuple[str, ...]
    advice: str | None
    takes_given_file: bool


class EnvironmentDocument(BaseModel):
    """What an environment is exposed to.

    `incidents` are the entries with version ranges: those that apply first, then by severity. Entries of `any_version`
    have none. `checks` are the results of checks on this machine, without those that could not tell; null if none
    were run.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})
    packages: dict[str, str | None]
    gpu: str | None
    incidents: tuple[Incident, ...]
    any_version: tuple[str, ...]
    checks: tuple[CheckAnswer, ...] | None


def judge(
    entries: Iterable[Entry], packages: Versions, gpu: str = "", hardware: Mapping[str, str] | None = None
) -> EnvironmentDocument:
    """Judge every entry. `hardware` maps an entry to a summary of its GPU arms (`kb.records.hardware`)."""
    entries = tuple(entries)
    named = [entry for entry in entries if entry.meta.applies_to or entry.meta.fixed_in]
    incidents = [_incident(entry, packages, gpu, (hardware or {}).get(entry.id, "")) for entry in named]
    return EnvironmentDocument(
        packages=dict(packages),
        gpu=gpu or None,
        incidents=tuple(sorted(incidents, key=_urgency)),
        any_version=tuple(entry.id for entry in entries if entry not in named),
        checks=None,
    )


def _incident(entry: Entry, packages: Versions, gpu: str, proved: str) -> Incident:
    result = applicability(entry.meta.applies_to, entry.meta.fixed_in, packages)
    return Incident(
        id=entry.id,
        title=entry.meta.title,
        status=entry.meta.status,
        severity=entry.meta.severity,
        state=result.state.value,
        reason=result.reason,
        proved=proved if gpu and gpu.lower() in proved.lower() else None,
    )


def _urgency(incident: Incident) -> tuple[int, int, str]:
    return ORDER.index(State(incident.state)), SEVERITIES.index(Severity(incident.severity)), incident.id
