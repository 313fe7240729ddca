"""The one thing to do next: what separates the candidates that are left, or proves the one that is.

Entries say how they are told from those they are mistaken for, under `How to tell`; an item there that names the
other candidate is the observation that is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kb.diagnose.culprit import Culprits

if TYPE_CHECKING:
    from kb.diagnose.diagnosis import Finding

CERTAIN = 0.8  # from here on a finding is to be proved, not told apart


@dataclass(frozen=True, slots=True)
class NextStep:
    """`text` is Markdown of one paragraph, `source` the entry it is from ("" when it is from none).

    `separates` are the candidates it tells apart; `command` what to run, "" where there is nothing to run.
    """

    text: str
    source: str = ""
    separates: tuple[str, ...] = ()
    command: str = ""


def next_step(
    findings: Sequence[Finding], documents: Mapping[str, Mapping[str, Any]], who: Culprits
) -> NextStep | None:
    """None when nothing was found to go on with."""
    rivals = [one for one in findings if not one.caused_by][:3]
    if rivals and rivals[0].confidence >= CERTAIN:
        return _proof(rivals[0])
    if who.absent and not any(one.role == "root" for one in rivals):
        ranks = ", ".join(map(str, who.absent))
        text = f"Read what rank {ranks} did: the others waited for it. Its own log, or `py-spy dump` while it hangs."
        return NextStep(text, separates=tuple(one.id for one in rivals))
    for first, second in _pairs(rivals):
        for one, other in ((first, second), (second, first)):
            told = next((item for item in documents[one.id]["tells"] if f"`{other.id}`" in item), "")
            if told:
                return NextStep(told, one.id, (first.id, second.id), _command(first))
    if rivals:
        told = next(iter(documents[rivals[0].id]["tells"]), "")
        return NextStep(told, rivals[0].id, (rivals[0].id,), _command(rivals[0])) if told else _proof(rivals[0])
    return None


def _pairs(rivals: Sequence[Finding]) -> Iterator[tuple[Finding, Finding]]:
    for other in rivals[1:]:
        yield rivals[0], other


def _proof(one: Finding) -> NextStep:
    if one.probe:
        return NextStep("Prove it on this machine, then apply the fix.", one.id, (one.id,), _command(one))
    return NextStep("Read its fix.", one.id, (one.id,), f"kb show {one.id}")


def _command(one: Finding) -> str:
    return f"kb verify {one.id}" if one.probe else f"kb show {one.id}"
