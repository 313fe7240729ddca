"""Library records: how the experiments in real libraries ended, one file in `docs/verified/` per set of releases.

`make matrix` writes them: `libraries-2024-12.json` is about the releases of DeepSpeed, transformers and others that
were current in December 2024, with the torch of that time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from kb.content.roots import Root, records
from kb.errors import UsageError
from kb.records.releases import experiment_lines

SCHEMA = "kb.libraries.v1"
NO_LIBRARY = re.compile(r"torch|numpy|setuptools|nvidia-.*")  # torch has its own records; the rest comes with it
ROW_KEYS = ("experiment", "fidelity", "verdict", "reason")


@dataclass(frozen=True, slots=True)
class LibraryVerdict:
    """The verdict of one experiment, and the releases of torch and of the libraries that it needs."""

    experiment: str
    fidelity: str
    verdict: str
    reason: str
    libraries: Mapping[str, str]
    torch: str
    day: str
    probe_digest: str

    @property
    def releases(self) -> str:
        """The libraries in words: `safetensors 0.8.0 + transformers 5.23.0`."""
        return " + ".join(f"{name} {release}" for name, release in self.libraries.items())

    def to_json(self) -> dict[str, Any]:
        packages = {"torch": self.torch, **self.libraries}
        return {"experiment": self.experiment, "verdict": self.verdict, "packages": packages, "day": self.day}


def library_verdicts(roots: Iterable[Root]) -> dict[str, tuple[LibraryVerdict, ...]]:
    """The verdicts of each entry, oldest torch first. Raises `UsageError` for an invalid record."""
    by_entry: dict[str, list[LibraryVerdict]] = {}
    for path, document in records(roots):
        try:
            if document["schema"] == SCHEMA:
                for entry_id, rows in document["verdicts"].items():
                    by_entry.setdefault(entry_id, []).extend(_verdict(document, row) for row in rows)
        except (ValueError, KeyError, TypeError) as error:
            hint = "`make matrix` writes such files"
            raise UsageError(f"{path} is not a valid record of libraries: {error}", hint) from None
    return {
        entry_id: tuple(sorted(verdicts, key=lambda verdict: Version(verdict.torch)))
        for entry_id, verdicts in by_entry.items()
    }


def library_summaries(verdicts: Iterable[LibraryVerdict], probe_digest: str = "") -> list[str]:
    """A line for each experiment: its fidelity, and the releases by verdict, with a note if the probe has changed."""
    return experiment_lines(
        (each.experiment, each.fidelity, each.verdict, f"{each.releases}{_note(each, probe_digest)}")
        for each in verdicts
    )


def _note(verdict: LibraryVerdict, probe_digest: str) -> str:
    return " (with an earlier probe)" if probe_digest and verdict.probe_digest != probe_digest else ""


def libraries_needed(plans: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, tuple[str, ...]]]:
    """The libraries that each experiment of each entry needs, from plans as JSON; without those that need none."""
    needed: dict[str, dict[str, tuple[str, ...]]] = {}
    for plan in plans:
        for experiment in plan["experiments"]:
            libraries = tuple(name for name in experiment["needs"]["packages"] if not NO_LIBRARY.fullmatch(name))
            if libraries:
                needed.setdefault(plan["id"], {})[experiment["name"]] = libraries
    return needed


def record(
    reports: Iterable[Mapping[str, Any]], needed: Mapping[str, Mapping[str, tuple[str, ...]]], day: str
) -> dict[str, Any]:
    """The record of one environment, from its reports as JSON and the result of `libraries_needed`."""
    reports = sorted(reports, key=lambda report: str(report["id"]))
    python = reports[0]["environment"]["python"]
    installed = {canonicalize_name(name): release for name, release in python["packages"].items()}
    return {
        "schema": SCHEMA,
        "kb_version": reports[0]["kb_version"],
        "torch": Version(python["torch"]["version"]).public,
        "python": python["version"],
        "day": day,
        "verdicts": {
            report["id"]: [
                {
                    **{key: row[key] for key in ROW_KEYS},
                    "probe_digest": report["probe_digest"],
                    "libraries": {
                        name: installed[canonicalize_name(name)] for name in needed[report["id"]][row["experiment"]]
                    },
                }
                for row in (report, *report["variants"])
                if row["experiment"] in needed[report["id"]]
            ]
            for report in reports
        },
    }


def unchanged(document: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, Any]:
    """The rows of an earlier record, by entry, whose probe still has the digest that was judged."""
    return {
        entry_id: rows
        for entry_id, rows in document["verdicts"].items()
        if rows and all(row["probe_digest"] == digests.get(entry_id) for row in rows)
    }


def _verdict(document: Mapping[str, Any], row: Mapping[str, Any]) -> LibraryVerdict:
    experiment, fidelity, verdict, reason = (row[key] for key in ROW_KEYS)
    judged = row["libraries"], document["torch"], document["day"], row["probe_digest"]
    return LibraryVerdict(experiment, fidelity, verdict, reason, *judged)


def file_name(month: str) -> str:
    """The name of the record for the releases of a month, such as `2024-12`; a later run replaces the file."""
    return f"libraries-{month}.json"
