"""`make confusion`: check that the logs of every control arm, run on this machine, are diagnosed as its entry.

Runs each control arm that this machine can run, as `kb verify` does, and diagnoses the folder that it leaves. Prints
the table of docs/benchmarks.md and draws docs/confusion.svg. Exits with 1 if an arm is diagnosed as an entry that the
graph of causes does not link to the arm's own entry.

    confusion.py [ID]...     these entries only, and no picture
    --keep DIR               save the folders there
    --logs DIR               diagnose folders that were saved earlier, without running anything
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from kb.content.catalog import Catalog, load_catalog
from kb.content.causes import Graph, graph
from kb.content.entry import Entry
from kb.content.roots import configured_roots
from kb.diagnose.diagnosis import Diagnosis, diagnose
from kb.diagnose.inputs.sources import find_sources
from kb.diagnose.scan.result import Scan
from kb.diagnose.scan.scan import scan
from kb.diagnose.scan.signature_matcher import Matcher
from kb.harness.launcher import Launcher
from kb.machine import snapshot
from kb.search.index import Index
from kb.search.index_cache import open_index
from kb.verify.plan import make_plan
from kb.verify.runner import JOBS
from tests.bench.matrix import Cell, picture

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "confusion.svg"
OWN, BY_PROBE, LINKED, WRONG, NONE = "its own", "its own by its probe's sentence", "linked", "wrong", "none"
LEGEND = {
    OWN: "its own entry",
    BY_PROBE: "its own, by a sentence that only its probe prints",
    LINKED: "an entry linked with it as cause, consequence or mask",
    WRONG: "another",
}


@dataclass(frozen=True)
class Row:
    """A control arm and the diagnosis of its logs."""

    id: str
    diagnosis: Diagnosis
    links: frozenset[str]
    is_by_probe: bool  # found only by a sentence of the probe, in place of software that is not installed

    @property
    def verdict(self) -> str:
        return self.kind(self.diagnosis.findings[0].id) if self.diagnosis.findings else NONE

    def kind(self, finding: str) -> str:
        if finding == self.id:
            return BY_PROBE if self.is_by_probe else OWN
        return LINKED if finding in self.links else WRONG

    @property
    def place(self) -> int | None:
        """The place of the right entry among the findings, counted from 1."""
        ids = [finding.id for finding in self.diagnosis.findings]
        return ids.index(self.id) + 1 if self.id in ids else None


def main() -> int:
    arguments = parse_arguments()
    roots = configured_roots(())
    catalog = load_catalog(roots)
    entries = [catalog.get(id_) for id_ in arguments.ids] if arguments.ids else catalog.current()
    with tempfile.TemporaryDirectory(prefix="kb-confusion-") as temporary:
        folder = arguments.logs or arguments.keep or Path(temporary)
        skipped = [] if arguments.logs else run_control_arms(catalog, entries, folder)
        index = open_index(roots, print)
        rows = list(diagnosed(entries, folder, index, graph(catalog.current())))
    print("\n".join(table(rows, skipped)))
    if not arguments.ids:
        PICTURE.write_text(picture(cells(rows), LEGEND), encoding="utf-8")
    return 1 if any(row.verdict in (WRONG, NONE) for row in rows) else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="ID")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--keep", type=Path, metavar="DIR")
    where.add_argument("--logs", type=Path, metavar="DIR")
    return parser.parse_args()


def run_control_arms(catalog: Catalog, entries: Sequence[Entry], folder: Path) -> list[tuple[str, str]]:
    """Leave a folder per arm, as `kb verify --keep-logs` does. Returns entries whose arm did not run, with reasons."""
    with (
        tempfile.TemporaryDirectory() as copies,
        Launcher(Path(sys.executable), folder) as launcher,
        ThreadPoolExecutor(JOBS) as pool,
    ):
        launcher.preload()
        machine = snapshot.capture(launcher.python)

        def run(entry: Entry) -> tuple[str, str]:
            if not entry.meta.probe:
                return entry.id, "no probe"
            plan = make_plan(entry, catalog.probe_file(entry), launcher, machine, {})
            refused = [f"{name}: {reason}" for name, reason in plan.skipped]
            for experiment in plan.runnable:
                label = f"{entry.id}-{experiment.name}-control"
                task = replace(plan.task(experiment, "control"), probe=renamed(plan.probe_file, Path(copies)))
                outcome = launcher.run(task, label)
                if outcome.kind != "unavailable":
                    return entry.id, ""
                refused.append(f"{experiment.name}: this machine refuses it")
            return entry.id, "; ".join(refused) or "its probe is a check"

        return [(entry_id, reason) for entry_id, reason in pool.map(run, entries) if reason]


def renamed(probe: Path | None, folder: Path) -> Path:
    """A copy of the probe called `train.py`, because its own name in a traceback would give the answer away."""
    assert probe is not None
    copy = Path(tempfile.mkdtemp(dir=folder)) / "train.py"
    shutil.copy(probe, copy)
    return copy


def diagnosed(entries: Iterable[Entry], folder: Path, index: Index, links: Graph) -> Iterator[Row]:
    matcher = Matcher(index.signatures)
    longest_first = sorted(entries, key=lambda entry: -len(entry.id))
    for logs in sorted(folder.glob("*-control")):
        owner = next((entry for entry in longest_first if logs.name.startswith(f"{entry.id}-")), None)
        if owner:
            evidence = scan(find_sources([str(logs)]).inputs, matcher)
            by_probe = is_by_probe(owner.id, evidence, logs)
            yield Row(owner.id, diagnose(index, evidence), linked(links, owner.id), by_probe)


def is_by_probe(entry_id: str, evidence: Scan, folder: Path) -> bool:
    """Whether all lines that match the entry come from the sentence that its probe raised as a symptom."""
    results = [json.loads(path.read_text()) for path in folder.glob("rank*[0-9].json")]
    measured = [result["message"] for result in results if result["outcome"] == "symptom"]
    evident = [match.lines[0].text for match in evidence.matches if match.id == entry_id and match.role != "context"]
    return bool(evident) and all(any(line in sentence for sentence in measured) for line in evident)


def linked(links: Graph, entry_id: str) -> frozenset[str]:
    beside = (links.causes_of, links.consequences_of, links.masked_by, links.hides)
    return frozenset(neighbour for neighbours in beside for neighbour in neighbours(entry_id))


def cells(rows: Iterable[Row]) -> Iterator[Cell]:
    for row in rows:
        for place, finding in enumerate(row.diagnosis.findings[:3], start=1):
            yield Cell(row.id, finding.id, row.kind(finding.id), place, finding.confidence)


def table(rows: Sequence[Row], skipped: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield "| control arm of | first finding | role | confidence | its own entry stands |"
    yield "|---|---|---|---|---|"
    for row in rows:
        first = next(iter(row.diagnosis.findings), None)
        name = "nothing" if first is None else "the same" if first.id == row.id else first.id
        role = f"{first.role} | {first.confidence:.2f}" if first else "|"
        yield f"| {row.id} | {name} ({row.verdict}) | {role} | {row.place or ''} |"
    yield ""
    counts = {kind: sum(row.verdict == kind for row in rows) for kind in (OWN, BY_PROBE, LINKED, WRONG, NONE)}
    yield f"{len(rows)} control arms: {', '.join(f'{count} {kind}' for kind, count in counts.items())}."
    for entry_id, reason in skipped:
        yield f"- not run here: {entry_id} ({reason})"


if __name__ == "__main__":
    sys.exit(main())
