"""The records keep the contract of README.md; what kb says of them is tested where that is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.stories.jobs import CLASSES, ENDS, read_jobs

HERE = Path(__file__).resolve().parent
ENTRIES = {file.stem for file in (HERE.parents[1] / "entries").glob("*.md")}
RECORDS = sorted(folder for folder in (HERE / "records").iterdir() if folder.is_dir())
FIELDS = {
    *("name", "half", "program", "fault", "style", "launch", "world", "torch", "libraries"),
    *("exit", "class", "culprit", "entries", "also", "ranks"),
}


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_a_record_keeps_the_contract(folder: Path) -> None:
    told: dict[str, Any] = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
    assert set(told) - {"also_class"} == FIELDS
    assert told["name"] == folder.name
    assert told["half"] in ("tuned", "held")
    assert {told["class"], *told.get("also_class", ())} <= CLASSES
    assert {*told["entries"], *told["also"]} <= ENTRIES
    assert told["culprit"] is None or told["culprit"] in range(told["world"])
    assert {rank["end"] for rank in told["ranks"].values()} <= ENDS
    logs = [folder / "job.log", *folder.glob("ranks/**/*.log")]
    assert all(log.stat().st_size <= 100_000 for log in logs)


def test_every_record_is_of_a_job() -> None:
    jobs = read_jobs()
    for folder in RECORDS:
        told = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
        job = jobs[folder.name]
        culprit = None if job.kind == "healthy" else job.culprit
        assert (told["class"], told["culprit"], told["half"]) == (job.kind, culprit, job.half)
        assert (tuple(told["entries"]), tuple(told["also"])) == (job.entries, job.also)
