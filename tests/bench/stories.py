"""`make bench-diagnose`: what `kb diagnose` concludes from the jobs of tests/stories, whose causes are known.

The half that was not used to tune kb is scored, but its misses are not shown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kb.content.roots import builtin_root
from kb.diagnose.diagnosis import Diagnosis, diagnose
from kb.diagnose.inputs.sources import find_sources
from kb.diagnose.scan.scan import scan
from kb.diagnose.scan.signature_matcher import Matcher
from kb.search.index_cache import open_index

RECORDS = Path(__file__).resolve().parents[1] / "stories" / "records"
HEALTHY = "healthy"
HALVES = ("tuned", "held")
CLASSES = {  # class of a job, by the kind of the first fact that says why it failed
    "own-failure": "error",
    "killed": "killed",
    "busy": "slow",
    "sizes-differ-in-call": "shape",
    "sizes-differ": "shape",
    "drifted": "diverge",
    "exit": "exit",
    "left-loop": "uneven",
    "done": "uneven",
    "places-differ": "diverge",
    "silent": "silent",
    "came-last": "silent",
    "all-lost": "exit",
    "not-finite": "nan",
    "zero": "zero",
    "constant": "stuck",
    "jump": "spike",
    "slower": "throughput",
    "resumed-above": "resume",
}
ALIKE = {"error-all": "error"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one record. `first` and `third`: the right entry is first, or among three. `is_wrong`: a wrong
    entry is first, and kb does not say so. For a job that no entry explains, the right result is to say so."""

    name: str
    half: str
    expected: str
    concluded: str
    first: bool
    third: bool
    is_wrong: bool
    is_right_rank: bool | None
    findings: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="records; all of them by default")
    parser.add_argument("--half", choices=HALVES)
    arguments = parser.parse_args()
    outcomes = [outcome for outcome in _outcomes(arguments.names) if arguments.half in (None, outcome.half)]
    for outcome in outcomes:
        if outcome.half == "tuned" or arguments.names:
            _print_miss(outcome)
    for half in HALVES:
        _print_half(half, [outcome for outcome in outcomes if outcome.half == half])
    return 0


def _outcomes(names: list[str]) -> Iterator[Outcome]:
    with open_index((builtin_root(),), lambda text: print(text, file=sys.stderr)) as index:
        matcher = Matcher(index.signatures)
        for path in sorted(RECORDS.glob("*/truth.json")):
            if names and path.parent.name not in names:
                continue
            sources = find_sources([str(log) for log in _logs(path.parent)])
            yield _outcome(json.loads(path.read_text()), diagnose(index, scan(sources.inputs, matcher)))


def _logs(folder: Path) -> Iterator[Path]:
    """The log of the job, and the tree with the logs of the ranks if there is one."""
    return (path for path in (folder / "job.log", folder / "ranks") if path.exists())


def _outcome(truth: dict[str, Any], diagnosis: Diagnosis) -> Outcome:
    ids = tuple(finding.id for finding in diagnosis.findings)
    is_silent = not ids and not diagnosis.unexplained
    right = set(truth["entries"])
    if truth["class"] == HEALTHY:
        first = third = is_silent
        is_wrong = not is_silent
    elif right:
        first = bool(ids) and ids[0] in right
        third = bool(right.intersection(ids[:3]))
        is_wrong = bool(ids) and not first and not diagnosis.unexplained
    else:
        first = third = diagnosis.unexplained or is_silent
        is_wrong = not first
    kinds = [fact.kind for fact in diagnosis.story.facts]
    concluded = next((CLASSES[kind] for kind in kinds if kind in CLASSES), "nothing")
    accused = {rank for fact in diagnosis.story.facts for rank in fact.ranks if fact.kind in CLASSES}
    is_right_rank = None if truth["culprit"] is None else truth["culprit"] in accused
    expected = ALIKE.get(truth["class"], truth["class"])
    return Outcome(truth["name"], truth["half"], expected, concluded, first, third, is_wrong, is_right_rank, ids[:3])


def _print_miss(outcome: Outcome) -> None:
    if not outcome.first or outcome.is_right_rank is False:
        rank = ", another rank" if outcome.is_right_rank is False else ""
        state = "right" if outcome.first else "wrong" if outcome.is_wrong else "admitted"
        print(
            f"{outcome.name}: {outcome.expected} as {outcome.concluded}{rank}, {state}: {', '.join(outcome.findings)}"
        )


def _print_half(half: str, outcomes: list[Outcome]) -> None:
    failed = [outcome for outcome in outcomes if outcome.expected != HEALTHY]
    healthy = [outcome for outcome in outcomes if outcome.expected == HEALTHY]
    if not failed:
        return
    ranks = [outcome.is_right_rank for outcome in failed if outcome.is_right_rank is not None]
    print(f"\n{half}: {len(failed)} jobs that failed, {len(healthy)} healthy ones")
    print(f"  right first              {_share(sum(outcome.first for outcome in failed), len(failed))}")
    print(f"  right in three           {_share(sum(outcome.third for outcome in failed), len(failed))}")
    print(f"  wrong and not admitted   {_share(sum(outcome.is_wrong for outcome in failed), len(failed))}")
    print(f"  rank right               {_share(sum(ranks), len(ranks))}")
    print(f"  healthy with a finding   {_share(sum(outcome.is_wrong for outcome in healthy), len(healthy))}")
    print("  classes, expected: concluded")
    for expected in sorted({outcome.expected for outcome in outcomes}):
        counts = Counter(outcome.concluded for outcome in outcomes if outcome.expected == expected)
        print(f"    {expected:12} {', '.join(f'{name} {count}' for name, count in counts.most_common())}")


def _share(count: int, total: int) -> str:
    return f"{count} of {total} ({count / total:.2f})" if total else "none"


if __name__ == "__main__":
    sys.exit(main())
