"""The one thing to do next: what separates the candidates that are left, or proves the one that is.

Entries say how they are told from those they are mistaken for, under `How to tell`; an item there that names the
other candidate is the observation that is wanted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kb.collective import name_ranks
from kb.diagnose.culprit import Culprits
from kb.diagnose.finding import Finding

CERTAIN = 0.8  # from here on a finding is to be proved, not told apart
LIKELY = 0.35  # below, an entry is no candidate
MOST_CANDIDATES = 3
GRADES = re.compile(r" ?\[(?:probe|inferred|(?:source|thread|claimed) \d{1,3})\]")


@dataclass(frozen=True, slots=True)
class NextStep:
    """`text` is Markdown of one paragraph, `source` the entry it is from ("" when it is from none).

    `separates` are the candidates it tells apart; `command` what to run, "" where there is nothing to run.
    """

    text: str
    source: str = ""
    separates: tuple[str, ...] = ()
    command: str = ""


def candidates(findings: Sequence[Finding]) -> list[Finding]:
    """Those between which it is still to be decided: the first alone where it is certain, none that only follows."""
    likely = [one for one in findings if not one.caused_by and one.confidence >= LIKELY]
    return likely[: 1 if likely and likely[0].confidence >= CERTAIN else MOST_CANDIDATES]


def next_step(
    findings: Sequence[Finding], documents: Mapping[str, Mapping[str, Any]], who: Culprits
) -> NextStep | None:
    """None when nothing was found to go on with."""
    rivals = candidates(findings)
    if who.absent and not any(one.role == "root" for one in rivals):
        return _question(who.absent, rivals)
    if not rivals:
        return None
    if len(rivals) == 1 and (rivals[0].confidence >= CERTAIN or rivals[0].role == "root"):
        return _proof(rivals[0])
    return _difference(rivals, documents) or _first_test(rivals[0], documents) or _proof(rivals[0])


def _question(absent: Sequence[int], rivals: Sequence[Finding]) -> NextStep:
    who = name_ranks(absent)
    text = f"Read what {who} did: the others waited. The log of {who}, or `py-spy dump` there while the job hangs."
    return NextStep(text, separates=tuple(one.id for one in rivals))


def _difference(rivals: Sequence[Finding], documents: Mapping[str, Mapping[str, Any]]) -> NextStep | None:
    """What the best entry says of one of the others, or that of it."""
    first = rivals[0]
    for second in rivals[1:]:
        for one, other in ((first, second), (second, first)):
            told = next((item for item in documents[one.id]["tells"] if f"`{other.id}`" in item), "")
            if told:
                return NextStep(_plain(told), one.id, (first.id, second.id), _command(first))
    return None


def _first_test(one: Finding, documents: Mapping[str, Mapping[str, Any]]) -> NextStep | None:
    told = next(iter(documents[one.id]["tells"]), "")
    return NextStep(_plain(told), one.id, (one.id,), _command(one)) if told else None


def _plain(told: str) -> str:
    """Without the marks of how well it is known: they number the references of the entry."""
    return GRADES.sub("", told)


def _proof(one: Finding) -> NextStep:
    if one.probe:
        return NextStep(
            f"Prove it on this machine, then apply the fix: `kb show {one.id}`.", one.id, (one.id,), _command(one)
        )
    return NextStep("Read its fix.", one.id, (one.id,), f"kb show {one.id}")


def _command(one: Finding) -> str:
    return f"kb verify {one.id}" if one.probe else f"kb show {one.id}"
