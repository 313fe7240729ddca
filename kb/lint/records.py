"""Rules for records: an entry agrees with what releases of torch and libraries have shown and contain."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kb.content.applicability import State, applicability
from kb.content.entry import Role
from kb.lint.body import Kind
from kb.lint.rule import EntryFile, EntryRule, Remark
from kb.lint.snippets import names
from kb.records.names import gaps, is_missing, package_of
from kb.records.releases import ReleaseVerdict

NOT_SHOWN = re.compile(r"Not shown with ([\w-]+) `([^`]+)`: ")
VERSION = re.compile(r"(?<![\d.])\d+\.\d+(?:\.\d+)?(?![\d.]*\d)")
OWN = re.compile(r"kb diagnose|the (?:probe|check) of ")
BROKEN = ("fix-ineffective", "not-reproduced", "inconclusive", "inverted", "other-failure")


def release_verdict(file: EntryFile) -> Iterator[Remark]:
    """No record within applies_to has a verdict against the entry, or needs a release that the entry does not name."""
    # The entry names it as "Not shown with torch `<2.3`: " and why. An experiment that also needs GPUs does not count.
    unshown = _unshown(file, "torch")
    for release in file.on_record.releases:
        judgement = applicability(file.meta.applies_to, file.meta.fixed_in, {"torch": release.torch})
        if judgement.state is State.DOES_NOT_APPLY:
            continue
        is_named = any(specifier.contains(release.torch) for specifier in unshown)
        if release.verdict in BROKEN or (_lacks_release(release) and not is_named):
            line = file.line("applies_to") if file.meta.applies_to else file.line("probe")
            yield line, f"{release.verdict} with torch {release.torch}: {release.reason}"


def library_verdict(file: EntryFile) -> Iterator[Remark]:
    """No experiment contradicts the entry with releases of libraries, unless the entry names them as not shown."""
    # The entry names them as "Not shown with deepspeed `<0.16`: " and why.
    for verdict in file.on_record.libraries:
        packages = {"torch": verdict.torch, **verdict.libraries}
        is_named = any(
            specifier.contains(release) for name, release in packages.items() for specifier in _unshown(file, name)
        )
        if verdict.verdict in BROKEN and not is_named:
            place = f"{verdict.experiment} with {verdict.releases} and torch {verdict.torch}"
            yield file.line("probe"), f"{verdict.verdict}: {place}: {verdict.reason}"


def _unshown(file: EntryFile, package: str) -> list[SpecifierSet]:
    return [SpecifierSet(specifier) for name, specifier in NOT_SHOWN.findall(file.source) if name == package]


def unstated_release(file: EntryFile) -> Iterator[Remark]:
    """If some releases lack a name that the code uses, the entry says which release added or removed it."""
    stated = {Version(version) for version in VERSION.findall(file.source)}
    for block in file.blocks(Kind.CODE):
        for name in sorted(names(block)):
            package = package_of(name)
            if is_missing(name, file.on_record.names):
                newest = file.on_record.names.searched[package][-1]
                yield block.line, f"`{name}` is in no release of {package} up to {newest}"
            for gap in gaps(name, file.on_record.names):
                if not any(gap.spans(release) for release in stated):
                    yield block.line, f"`{name}` of {package} {gap}: say with which release that changed"


def _lacks_release(release: ReleaseVerdict) -> bool:
    """Whether an experiment could have run there with another release."""
    parts = re.split(r"; (?=[a-z0-9-]+: )", release.reason)  # one part for each experiment, after the part of the check
    needs = [part for part in parts if re.search(rf"\btorch {re.escape(release.torch)}\S* in \S+ is not ", part)]
    return release.verdict == "not-applicable" and any("GPU" not in part for part in needs)


def untraced_wording(file: EntryFile) -> Iterator[Remark]:
    """Every release in printed_by contains the text; printed_by is given if a package that the source names has it."""
    searched, found = file.on_record.wordings.searched, file.on_record.wordings.found
    for number, signature in enumerate(file.meta.signatures):
        line = file.line("signatures", number, "pattern")
        by_package = found.get(signature.pattern, {})
        for package, specifier in signature.printed_by.items():
            known = searched.get(package, ())  # empty for what is not a wheel: python, the driver
            stated = [release for release in known if SpecifierSet(specifier).contains(release)]
            without = [release for release in stated if release not in by_package.get(package, ())]
            if without or (known and not stated):
                yield line, f"{package} {', '.join(without) or specifier} was searched and does not contain this text"
        # Any package may contain a few common words: only the packages that the source names are required.
        named = {package: by_package[package] for package in by_package if _names(signature.source, package)}
        if named and not signature.printed_by and signature.role is not Role.CONTEXT:
            places = "; ".join(f"{package} {', '.join(releases)}" for package, releases in named.items())
            yield line, f"say in printed_by which of these print it: {places}"


def _names(source: str, package: str) -> bool:
    """Whether a source such as `torch FSDP1, on rank 0` names the package; never for what kb itself prints."""
    return not OWN.match(source) and re.search(rf"\b{re.escape(package)}\b", source, re.IGNORECASE) is not None


RULES: tuple[EntryRule, ...] = (release_verdict, library_verdict, unstated_release, untraced_wording)
