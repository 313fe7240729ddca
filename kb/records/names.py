"""Names: which releases have the names that the code of entries uses, in `docs/verified/names.json`.

`kb.lint.snippets` finds the names; `make matrix` looks for them in each of its environments.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from packaging.version import Version

from kb.content.roots import Root
from kb.records.occurrences import Occurrences, occurrences

SCHEMA = "kb.names.v1"
FILE = "names.json"


def name_record(roots: Iterable[Root]) -> Occurrences:
    """The releases that were searched for names, and those that have them. Raises `UsageError`."""
    return occurrences(roots, FILE, "make matrix")


def package_of(name: str) -> str:
    """The package of a name: `torch` for `torch.distributed.barrier`, `deepspeed` for `deepspeed: bf16`."""
    return re.split(r"[.(:]", name)[0]


@dataclass(frozen=True, slots=True)
class Gap:
    """Two successive searched releases of which only the `newer`, or only the `older`, has a name."""

    older: str
    newer: str
    is_in_newer: bool

    def __str__(self) -> str:
        there, gone = (self.newer, self.older) if self.is_in_newer else (self.older, self.newer)
        return f"is in {there}, not in {gone}"

    def spans(self, release: Version) -> bool:
        """Whether the name may have come or gone with this release; releases in between were not searched."""
        return Version(self.older) < release <= Version(self.newer)


def is_missing(name: str, record: Occurrences) -> bool:
    """Whether the name was searched for, and no release has it."""
    return name in record.found and not record.found[name] and package_of(name) in record.searched


def gaps(name: str, record: Occurrences) -> list[Gap]:
    """Where a name appears or disappears; empty if all releases have it, none has it, or it was never searched for."""
    present = record.found.get(name, {}).get(package_of(name), ())
    pairs = itertools.pairwise(record.searched.get(package_of(name), ()) if present else ())
    return [Gap(older, newer, newer in present) for older, newer in pairs if (older in present) != (newer in present)]


def extended(
    record: Occurrences, packages: Mapping[str, str], names: Collection[str], present: Collection[str]
) -> Occurrences:
    """The record plus the result of one environment: its releases, the names searched for, and those that are there.

    Names that no entry uses any more, and that nobody looks for, are left out.
    """
    searched = {name: set(releases) for name, releases in record.searched.items()}
    for name, release in packages.items():
        searched.setdefault(name, set()).add(release)
    found = {}
    for name in sorted(names):
        releases = set(record.found.get(name, {}).get(package_of(name), ()))
        if package_of(name) in packages:
            release = packages[package_of(name)]
            releases = releases | {release} if name in present else releases - {release}
        found[name] = {package_of(name): _sorted(releases)} if releases else {}
    return Occurrences({name: _sorted(searched[name]) for name in sorted(searched)}, found)


def _sorted(releases: Iterable[str]) -> list[str]:
    return sorted(releases, key=Version)
