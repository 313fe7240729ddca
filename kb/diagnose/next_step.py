"""The one thing to do next: what separates the candidates that are left, or proves the one that is, or has to be read.

Entries say how they are told from those they are mistaken for, under `How to tell`; an item there that names the
other candidate is the observation that is wanted.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kb.content.grades import without_marks
from kb.diagnose.finding import Finding
from kb.diagnose.first_failure import Culprits
from kb.harness.collective import name_ranks

CERTAIN = 0.8  # from here on a finding is to be proved, not told apart
LIKELY = 0.35  # below, an entry is no candidate
MOST_CANDIDATES = 3
STREAMS = ("", "-", "body", "pasted text")  # what the command and the service call a log that is in no file
PACKED = (".gz", ".zst")


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
    """Those between which it is still to be decided: the first alone where it is certain, none that only follows.

    Where a cause was printed, what waiting ranks print is no rival of it.
    """
    likely = [finding for finding in findings if not finding.caused_by and finding.confidence >= LIKELY]
    if any(one.role == "root" for one in likely):
        likely = [one for one in likely if one.role != "cascade"]
    return likely[: 1 if likely and likely[0].confidence >= CERTAIN else MOST_CANDIDATES]


def next_step(
    findings: Sequence[Finding], documents: Mapping[str, Mapping[str, Any]], who: Culprits
) -> NextStep | None:
    """None when nothing was found to go on with."""
    rivals = candidates(findings)
    if who.absent and not any(rival.role == "root" for rival in rivals):
        return _ask(who.absent, rivals)
    if not rivals:
        return None
    if len(rivals) == 1 and (rivals[0].confidence >= CERTAIN or rivals[0].role == "root"):
        return _proof(rivals[0], documents)
    return _difference(rivals, documents) or _first_test(rivals[0], documents) or _proof(rivals[0], documents)


def read_first(who: Culprits) -> NextStep | None:
    """Where no finding explains what failed first: it has to be read."""
    if who.first is None:
        return None
    where = f"`{who.first.place.replace('`', '')}`"  # any name of a file, in Markdown
    if who.failed is None:
        return NextStep(f"Read {where} and the lines around it: that failed first, and no finding explains it.")
    text = f"Read what rank {who.failed} printed at {where} and around it: it failed first, and no finding explains it."
    return NextStep(f"{text} What the other ranks printed followed.")


def _ask(absent: Sequence[int], rivals: Sequence[Finding]) -> NextStep:
    who = name_ranks(absent)
    text = f"Read what {who} did: the others waited. The log of {who}, or `py-spy dump` there while the job hangs."
    return NextStep(text, separates=tuple(rival.id for rival in rivals))


def _difference(rivals: Sequence[Finding], documents: Mapping[str, Mapping[str, Any]]) -> NextStep | None:
    """What the best entry says of one of the others, or that of it."""
    first = rivals[0]
    for second in rivals[1:]:
        for one, other in ((first, second), (second, first)):
            told = next((item for item in documents[one.id]["tells"] if f"`{other.id}`" in item), "")
            if told:
                return NextStep(_plain(told), one.id, (first.id, second.id), _command(first, documents))
    return None


def _first_test(one: Finding, documents: Mapping[str, Mapping[str, Any]]) -> NextStep | None:
    told = next(iter(documents[one.id]["tells"]), "")
    return NextStep(_plain(told), one.id, (one.id,), _command(one, documents)) if told else None


def _plain(told: str) -> str:
    """Without the marks of how well it is known: they number the references of the entry."""
    return without_marks(told)


def _proof(one: Finding, documents: Mapping[str, Mapping[str, Any]]) -> NextStep:
    command = _command(one, documents)
    if one.probe:
        text = f"Prove it on this machine, then apply the fix: `kb show {one.id}`."
        return NextStep(text, one.id, (one.id,), command)
    return NextStep("Read its fix.", one.id, (one.id,), command)


def _command(one: Finding, documents: Mapping[str, Mapping[str, Any]]) -> str:
    """With the log that it was seen in, where the entry says that its probe reads one."""
    if not one.probe:
        return f"kb show {one.id}"
    command = f"kb verify {one.id}"
    log = one.evidence[0].source if one.evidence else ""
    reads_log = any(f"{command} --set log=" in told for told in documents[one.id]["tells"])
    return f"{command} --set log={shlex.quote(log)}" if reads_log and _is_plain_file(log) else command


def _is_plain_file(source: str) -> bool:
    """Whether a probe can read it as it is, as far as the name tells."""
    return source not in STREAMS and not source.endswith(PACKED)
