"""Whether an incident can happen with the installed versions: compares them with the ranges of an entry.

Pure: `kb.machine.installed` asks an interpreter for its versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

Ranges = Mapping[str, str]  # package to PEP 440 specifier
Versions = Mapping[str, str | None]  # package to version; None where it is installed but its version cannot be read


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

    The incident does not apply if one version is outside `applies_to` or within `fixed_in`. It applies if the version
    of every named package fits. Everything else is unknown.
    """
    versions = {_normal(name): version for name, version in installed.items()}
    judgements = [
        *(_affected(name, specifier, versions.get(_normal(name), "")) for name, specifier in applies_to.items()),
        *(_fixed(name, specifier, versions.get(_normal(name), "")) for name, specifier in fixed_in.items()),
    ]
    for state in (State.DOES_NOT_APPLY, State.UNKNOWN, State.APPLIES):
        reasons = [judgement.reason for judgement in judgements if judgement.state is state]
        if reasons:
            return Applicability(state, "; ".join(reasons))
    return Applicability(State.UNKNOWN, "the entry names no versions")


def _affected(name: str, specifier: str, version: str | None) -> Applicability:
    within = _is_within(version, specifier)
    if within is None:
        return Applicability(State.UNKNOWN, _doubt(name, specifier, version))
    if within:
        return Applicability(State.APPLIES, f"{name} {version} is within {specifier or 'any version'}")
    return Applicability(State.DOES_NOT_APPLY, f"it needs {name} {specifier}, here {version}")


def _fixed(name: str, specifier: str, version: str | None) -> Applicability:
    within = _is_within(version, specifier)
    if within is None:
        return Applicability(State.UNKNOWN, _doubt(name, specifier, version))
    if within:
        return Applicability(State.DOES_NOT_APPLY, f"fixed in {name} {specifier}, here {version}")
    return Applicability(State.APPLIES, f"{name} {version} is not {specifier}, where it is fixed")


def _normal(package: str) -> str:
    """The package name, normalized as PEP 503 says."""
    return re.sub(r"[-_.]+", "-", package).lower()


@lru_cache(4096)
def _is_within(version: str | None, specifier: str) -> bool | None:
    """Whether a version is within a PEP 440 specifier; None if this cannot be decided.

    A local version counts as the version that it extends. A pre-release of the first version of a range (`2.6.0a0+git`
    for `>=2.6`), as in nightly builds and vendors' containers, may or may not contain the change.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # imported only by the searches that need it
    from packaging.version import InvalidVersion, Version

    try:
        parsed, versions = Version(version or ""), SpecifierSet(specifier)
    except (InvalidVersion, InvalidSpecifier):
        return None
    within = versions.contains(parsed, prereleases=True)
    return None if parsed.is_prerelease and within != versions.contains(parsed.base_version) else within


def _doubt(name: str, specifier: str, version: str | None) -> str:
    if version == "":
        return f"no version of {name} is known here"
    if version is None:
        return f"the version of {name} cannot be read here"
    return f"cannot tell whether {name} {version} is {specifier or 'any version'}"
