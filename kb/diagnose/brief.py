"""A diagnosis in brief: the entry, the decisive line and the fix to begin with. `NextStep` is what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kb.diagnose.evidence import DERIVED_PREFIX, Line
from kb.diagnose.finding import Finding
from kb.diagnose.first_failure import RankSummary
from kb.diagnose.next_step import Documents
from kb.diagnose.story.fact import Fact


@dataclass(frozen=True, slots=True)
class Brief:
    """`entry` is the first finding, None if the cause is unknown; `fix` is the first sentence of item
    `fix_number` of its `Fix`, as plain text.

    `decisive` is the sentence or line that the diagnosis rests on most, None if nothing failed.
    """

    entry: str | None = None
    title: str = ""
    title_zh: str = ""
    decisive: Line | None = None
    fix: str = ""
    fix_zh: str = ""
    fix_number: int = 1

    def to_json(self) -> dict[str, Any]:
        """The brief as `kb diagnose --json` prints it."""
        return {**asdict(self), "decisive": self.decisive.to_json() if self.decisive else None}


def brief(
    findings: Sequence[Finding], documents: Documents, ranks: RankSummary, facts: Sequence[Fact], *, is_explained: bool
) -> Brief:
    """The brief of the first finding if it explains the inputs, else of the first failure or a fact of the story."""
    if not is_explained or not findings:
        telling = next((fact.evidence for fact in facts if not fact.is_context), None)
        return Brief(decisive=ranks.culprit.evidence if ranks.culprit else ranks.first_failure or telling)
    first = findings[0]
    fix, fix_zh = (_item(documents[first.id][fixes], first.fix_number) for fixes in ("fixes", "fixes_zh"))
    return Brief(first.id, first.title, first.title_zh, _decisive(first), fix, fix_zh, first.fix_number)


def _item(fixes: Sequence[str], number: int) -> str:
    return fixes[number - 1] if number <= len(fixes) else ""


def _decisive(finding: Finding) -> Line | None:
    """The line to cite: a comparison of ranks if there is one, else the first line of the evidence."""
    derived = (line for line in finding.evidence if line.text.startswith(DERIVED_PREFIX))
    return next(derived, finding.evidence[0] if finding.evidence else None)
