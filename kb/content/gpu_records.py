"""What was proved on GPUs, machine by machine: the files in `docs/verified/`, and what they say of an entry.

A file holds the reports of one machine whose arms ran on its GPUs. Nothing about hardware is typed by hand: an
entry with GPU arms that no file speaks of says so wherever it is shown.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kb.content.roots import Root
from kb.errors import UsageError

SCHEMA = "kb.verified.v1"
GPU_ARMS = re.compile(r"\bon_gpus\(|\bgpus=[1-9]")  # how a probe file asks for GPUs; the linter holds it to that
NEVER = "GPU arms: never run on hardware"
KEPT = ("id", "verdict", "reason", "experiment", "fidelity", "entry_digest", "probe_digest", "started_at", "duration_s")


@dataclass(frozen=True, slots=True)
class Proof:
    """One verdict of GPU arms on one machine: `2 x NVIDIA H100`, its driver, its torch."""

    gpus: str
    driver: str
    torch: str
    verdict: str
    day: str
    entry_digest: str

    @property
    def machine(self) -> str:
        """In words: `2 x NVIDIA H100, driver 570.86.15, torch 2.13.0+cu130`."""
        return _words(self.gpus, self.driver, self.torch)


def has_gpu_arms(probe: Path | None) -> bool:
    """Whether the probe file asks for GPUs, read from its text: nothing is run."""
    try:
        return probe is not None and bool(GPU_ARMS.search(probe.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return False


def proofs(roots: Iterable[Root]) -> dict[str, tuple[Proof, ...]]:
    """By entry, newest first. Raises `UsageError` for a file that is none of ours."""
    found: dict[str, list[Proof]] = {}
    for path in (path for root in roots for path in root.verified_files()):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            where = _columns(document["machine"])
            for one in document["reports"]:
                proof = Proof(*where, one["verdict"], one["started_at"][:10], one["entry_digest"])
                found.setdefault(one["id"], []).append(proof)
        except (OSError, ValueError, KeyError, TypeError) as error:
            hint = "`make gpu-check` writes such files"
            raise UsageError(f"{path} is no record of a machine: {error}", hint) from None
    return {entry_id: tuple(sorted(some, key=lambda one: one.day, reverse=True)) for entry_id, some in found.items()}


def standing(probe: Path | None, known: tuple[Proof, ...], entry_digest: str = "") -> str:
    """What is known of an entry's GPU arms in one line; "" when it has none."""
    if not has_gpu_arms(probe):
        return ""
    if not known:
        return NEVER
    told = []
    for one in known:
        earlier = ", in an earlier wording" if entry_digest and one.entry_digest != entry_digest else ""
        told.append(f"{one.verdict} on {one.machine} ({one.day}{earlier})")
    return f"GPU arms: {'; '.join(told)}"


def add_standing(documents: Iterable[dict[str, Any]], roots: Iterable[Root]) -> None:
    """Put `hardware`, the line or None, into what the index stores of entries."""
    roots = tuple(roots)
    known, homes = proofs(roots), {root.name: root for root in roots}
    for document in documents:
        probe = homes[document["origin"]].probe_file(document["probe"]) if document["probe"] else None
        document["hardware"] = standing(probe, known.get(document["id"], ())) or None


def record(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The record of this machine from the JSON of its reports: only arms that ran on GPUs, nothing that names a host.

    Raises `UsageError` when there is none: a machine without GPUs has nothing to record.
    """
    proved = [report for report in reports if report["fidelity"] == "hardware"]
    if not proved:
        raise UsageError("no GPU arm ran here, so there is nothing to record", "`kb verify --all --plan` says why not")
    environment = proved[0]["environment"]
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
        "kb_version": proved[0]["kb_version"],
        "machine": machine,
        "reports": [{key: one[key] for key in KEPT} for one in sorted(proved, key=lambda one: str(one["id"]))],
    }


def describe(machine: Mapping[str, Any]) -> str:
    """The machine in words."""
    return _words(*_columns(machine))


def _words(gpus: str, driver: str, torch: str) -> str:
    return f"{gpus}, driver {driver}, torch {torch}"


def _columns(machine: Mapping[str, Any]) -> tuple[str, str, str]:
    gpus = ", ".join(f"{count} x {name}" for name, count in Counter(machine["gpus"]).items())
    return gpus, str(machine["driver"]), str(machine["torch"])


def file_name(machine: Mapping[str, Any]) -> str:
    """One file per kind of machine: a later run on the like of it takes the place of the earlier one."""
    return re.sub(r"[^a-z0-9.]+", "-", describe(machine).lower()).strip("-") + ".json"
