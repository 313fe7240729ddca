"""Names: which releases have what the code of entries names, in `docs/verified/names.json`.

The names are those of `kb.lint.snippets`; `make matrix` looks for them in each of its environments.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping

from packaging.version import Version

from kb.content.roots import Root
from kb.records.occurrences import Occurrences, occurrences

SCHEMA = "kb.names.v1"
FILE = "names.json"


def name_record(roots: Iterable[Root]) -> Occurrences:
    """The releases that were searched for names, and those that have them. Raises `UsageError`."""
    return occurrences(roots, FILE, "make matrix")


def package_of(name: str) -> str:
    """`torch` of `torch.distributed.barrier`, `deepspeed` of `deepspeed: zero_optimization`."""
    return re.split(r"[.(:]", name)[0]


def gaps(name: str, record: Occurrences) -> list[tuple[str, str]]:
    """Pairs of successive releases of which one alone has the name; `("", newest)` for a name that none has.

    Nothing for a name that nobody has looked for yet.
    """
    searched = record.searched.get(package_of(name), ())
    if name not in record.found or not searched:
        return []
    present = record.found[name].get(package_of(name), ())
    if not present:
        return [("", searched[-1])]
    pairs = itertools.pairwise(searched)
    return [pair for pair in pairs if (pair[0] in present) != (pair[1] in present)]


def extended(
    record: Occurrences, packages: Mapping[str, str], names: Collection[str], present: Collection[str]
) -> Occurrences:
    """The record with what one environment has: its releases, the names that were looked for, and those that are there.

    Names that no entry uses any more, which nobody looks for, are left out.
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
