"""Whether an incident can happen with the versions at hand: the ranges of an entry against what is installed.

Pure: who asks an interpreter for its versions is `kb.machine.installed`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

Ranges = Mapping[str, str]  # package to PEP 440 specifier
Versions = Mapping[str, str | None]  # package to version; None for one that is there and cannot be read


class State(StrEnum):
    """What the versions say, in the order in which hits are shown."""

    APPLIES = "applies"
    UNKNOWN = "unknown"
    DOES_NOT_APPLY = "does-not-apply"


@dataclass(frozen=True, slots=True)
class Applicability:
    """The judgement on one entry, and what it rests on."""

    state: State
    reason: str


def applicability(applies_to: Ranges, fixed_in: Ranges, installed: Versions) -> Applicability:
    """Judge an entry by all its ranges.

    One version outside `applies_to`, or within `fixed_in`, excludes the incident. It applies when every package
    that is named has a version that fits. All else is unknown.
    """
    versions = {_normal(name): version for name, version in installed.items()}
    findings = [
        *(_affected(name, wanted, versions.get(_normal(name), "")) for name, wanted in applies_to.items()),
        *(_fixed(name, wanted, versions.get(_normal(name), "")) for name, wanted in fixed_in.items()),
    ]
    for state in (State.DOES_NOT_APPLY, State.UNKNOWN, State.APPLIES):
        reasons = [finding.reason for finding in findings if finding.state is state]
        if reasons:
            return Applicability(state, "; ".join(reasons))
    return Applicability(State.UNKNOWN, "nothing here says: the entry names no versions")


def _affected(name: str, wanted: str, version: str | None) -> Applicability:
    within = _is_within(version, wanted)
    if within is None:
        return Applicability(State.UNKNOWN, _doubt(name, wanted, version))
    if within:
        return Applicability(State.APPLIES, f"{name} {version} is within {wanted or 'any version'}")
    return Applicability(State.DOES_NOT_APPLY, f"it needs {name} {wanted}, here {version}")


def _fixed(name: str, wanted: str, version: str | None) -> Applicability:
    within = _is_within(version, wanted)
    if within is None:
        return Applicability(State.UNKNOWN, _doubt(name, wanted, version))
    if within:
        return Applicability(State.DOES_NOT_APPLY, f"fixed in {name} {wanted}, here {version}")
    return Applicability(State.APPLIES, f"{name} {version} is not {wanted}, where it is fixed")


def _normal(package: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", package).lower()


@lru_cache(4096)
def _is_within(version: str | None, wanted: str) -> bool | None:
    """PEP 440, where a local version counts as what it extends; None when there is no telling.

    A pre-release of the version that a range begins with, as nightly builds and vendors' containers have it
    (`2.6.0a0+git` against `>=2.6`), may have the change or not.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # a search that does not ask starts without
    from packaging.version import InvalidVersion, Version

    try:
        found, range_ = Version(version or ""), SpecifierSet(wanted)
    except (InvalidVersion, InvalidSpecifier):
        return None
    within = range_.contains(found, prereleases=True)
    return None if found.is_prerelease and within != range_.contains(found.base_version) else within


def _doubt(name: str, wanted: str, version: str | None) -> str:
    if version == "":
        return f"no version of {name} is known here"
    if version is None:
        return f"the version of {name} cannot be read here"
    return f"whether {name} {version} is {wanted or 'any version'} cannot be told"
