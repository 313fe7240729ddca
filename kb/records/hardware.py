"""Hardware records: which entries were verified on GPUs, one file in `docs/verified/` per kind of machine.

A record holds the reports of one machine whose arms ran on its GPUs. Nothing about hardware is typed by hand. An entry
that has GPU arms but no record says so wherever it is shown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kb.content.roots import Root, records
from kb.errors import UsageError

SCHEMA = "kb.verified.v1"
GPU_ARMS = re.compile(r"\bon_gpus\(|\bgpus=[1-9]")  # how a probe file requests GPUs; the linter enforces it
NEVER = "GPU arms: never run on hardware"
REPORT_KEYS = (
    "id",
    "verdict",
    "reason",
    "experiment",
    "fidelity",
    "entry_digest",
    "probe_digest",
    "started_at",
    "duration_s",
)


@dataclass(frozen=True, slots=True)
class Proof:
    """One verdict of GPU arms on one machine: its GPUs (`2 x NVIDIA H100`), driver and torch."""

    gpus: str
    driver: str
    torch: str
    verdict: str
    day: str
    entry_digest: str

    @property
    def machine(self) -> str:
        """The machine in words: `2 x NVIDIA H100, driver 570.86.15, torch 2.13.0+cu130`."""
        return _description(self.gpus, self.driver, self.torch)


def has_gpu_arms(probe: Path | None) -> bool:
    """Whether the text of the probe file requests GPUs; nothing is executed."""
    try:
        return probe is not None and bool(GPU_ARMS.search(probe.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return False


def proofs(roots: Iterable[Root]) -> dict[str, tuple[Proof, ...]]:
    """The proofs of each entry, newest first. Raises `UsageError` for an invalid record."""
    by_entry: dict[str, list[Proof]] = {}
    for path, document in records(roots):
        try:
            if document["schema"] != SCHEMA:
                continue
            machine = _columns(document["machine"])
            for report in document["reports"]:
                proof = Proof(*machine, report["verdict"], report["started_at"][:10], report["entry_digest"])
                by_entry.setdefault(report["id"], []).append(proof)
        except (KeyError, TypeError) as error:
            hint = "`make gpu-check` writes such files"
            raise UsageError(f"{path} is not a valid hardware record: {error}", hint) from None
    return {
        entry_id: tuple(sorted(unsorted, key=lambda proof: proof.day, reverse=True))
        for entry_id, unsorted in by_entry.items()
    }


def gpu_summary(probe: Path | None, proofs: tuple[Proof, ...], entry_digest: str = "") -> str:
    """A line about an entry's GPU arms; "" if it has none."""
    if not has_gpu_arms(probe):
        return ""
    if not proofs:
        return NEVER
    verdicts = []
    for proof in proofs:
        earlier = ", in an earlier wording" if entry_digest and proof.entry_digest != entry_digest else ""
        verdicts.append(f"{proof.verdict} on {proof.machine} ({proof.day}{earlier})")
    return f"GPU arms: {'; '.join(verdicts)}"


def add_gpu_summaries(documents: Iterable[dict[str, Any]], roots: Iterable[Root]) -> None:
    """Add `hardware`, the line of `gpu_summary` or None, to the summaries of entries."""
    roots = tuple(roots)
    by_entry, roots_by_name = proofs(roots), {root.name: root for root in roots}
    for document in documents:
        probe = roots_by_name[document["origin"]].probe_file(document["probe"]) if document["probe"] else None
        document["hardware"] = gpu_summary(probe, by_entry.get(document["id"], ())) or None


def record(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The record of this machine, from its reports as JSON: only arms that ran on GPUs, and nothing that names a host.

    Raises `UsageError` if no GPU arm ran.
    """
    on_gpus = [report for report in reports if report["fidelity"] == "hardware"]
    if not on_gpus:
        raise UsageError("no GPU arm ran here, so there is nothing to record", "`kb verify --all --plan` says why not")
    environment = on_gpus[0]["environment"]
    python = environment.get("python") or {}
    torch, packages = python.get("torch") or {}, python.get("packages") or {}
    machine = {
        "gpus": [gpu["name"] for gpu in environment["gpus"] or ()],
        "driver": next((gpu["driver_version"] for gpu in environment["gpus"] or ()), None),
        "torch": torch.get("version"),
        "cuda": torch.get("cuda"),
        "nccl": next((version for name, version in sorted(packages.items()) if name.startswith("nvidia-nccl")), None),
        "kernel": (environment.get("host") or {}).get("kernel"),
    }
    return {
        "schema": SCHEMA,
        "kb_version": on_gpus[0]["kb_version"],
        "machine": machine,
        "reports": [
            {key: report[key] for key in REPORT_KEYS}
            for report in sorted(on_gpus, key=lambda report: str(report["id"]))
        ],
    }


def _description(gpus: str, driver: str, torch: str) -> str:
    return f"{gpus}, driver {driver}, torch {torch}"


def _columns(machine: Mapping[str, Any]) -> tuple[str, str, str]:
    gpus = ", ".join(f"{count} x {name}" for name, count in Counter(machine["gpus"]).items())
    return gpus, str(machine["driver"]), str(machine["torch"])


def file_name(machine: Mapping[str, Any]) -> str:
    """The name of the record of this kind of machine; a later run on the same kind replaces the file."""
    return re.sub(r"[^a-z0-9.]+", "-", _description(*_columns(machine)).lower()).strip("-") + ".json"
