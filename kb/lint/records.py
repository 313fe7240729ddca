"""Rules for records: an entry holds with every release of torch that it is about."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kb.content.applicability import State, applicability
from kb.lint.rule import EntryFile, EntryRule, Remark

BROKEN = ("fix-ineffective", "not-reproduced", "inconclusive", "inverted", "other-failure")


def release_verdict(file: EntryFile) -> Iterator[Remark]:
    """No record of a release within applies_to has a verdict against the entry, or a need for another release."""
    for release in file.releases:
        judgement = applicability(file.meta.applies_to, file.meta.fixed_in, {"torch": release.torch})
        if judgement.state is State.DOES_NOT_APPLY:
            continue
        needs_other = re.search(rf"\btorch {re.escape(release.torch)}\S* in \S+ is not ", release.reason)
        if release.verdict in BROKEN or (release.verdict == "not-applicable" and needs_other):
            line = file.line("applies_to") if file.meta.applies_to else file.line("probe")
            yield line, f"{release.verdict} with torch {release.torch}: {release.reason}"


RULES: tuple[EntryRule, ...] = (release_verdict,)
