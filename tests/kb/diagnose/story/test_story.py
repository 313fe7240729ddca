"""Whole stories: of the recorded jobs, cut anywhere; of healthy jobs, which have no culprit; of jobs started again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kb.diagnose.evidence import DERIVED_PREFIX
from kb.diagnose.story.excerpt import Excerpt, Part
from kb.diagnose.story.story import MOST_FACTS, read_story
from kb.diagnose.story.summary import Story
from tests.support.console import CHECKOUT

RECORDS = sorted((CHECKOUT / "tests" / "stories" / "records").iterdir())
HEALTHY = sorted((CHECKOUT / "entries" / "healthy").glob("*.log"))
RECORDED_HEALTHY = [
    folder
    for folder in RECORDS
    if json.loads((folder / "truth.json").read_text(encoding="utf-8"))["class"] == "healthy"
]
TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
GAVE_UP = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 6000ms for send operation"
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
AGENT = "E1122 01:39:08.250000 77 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: 1) local_rank: 2 (pid: 71) of binary: /opt/venv/bin/python"


def story(log: bytes | Sequence[str]) -> Story:
    data = log if isinstance(log, bytes) else "".join(f"{line}\n" for line in log).encode()
    return read_story([Excerpt("job.log", None, None, (Part(1, data),))])


def raises(rank: int, error: str, call: str = "") -> list[str]:
    frames = ['  File "/work/t.py", line 44, in fit', "    x()"]
    if call:
        frames += [f'  File "{TORCH}/distributed/distributed_c10d.py", line 4287, in {call}', "    work.wait()"]
    return [f"[rank{rank}]: {line}" for line in ["Traceback (most recent call last):", *frames, error]]


def steps(rank: int, last: int) -> list[str]:
    return [f"[rank{rank}]: step {step} loss {2 - step / 100:.4f}" for step in range(1, last + 1)]


def check_facts(found: Story, log: bytes) -> None:
    lines = log.count(b"\n") + 1
    assert len(found.facts) <= MOST_FACTS
    for fact in found.facts:
        assert fact.text.startswith(DERIVED_PREFIX)
        assert len(fact.text.splitlines()) == 1
        assert fact.lines
        assert all(line.source == "job.log" and 1 <= line.number <= lines for line in fact.lines)
        assert len(fact.ranks) == len(set(fact.ranks))


@pytest.mark.parametrize("log", HEALTHY, ids=lambda log: log.stem)
def test_a_healthy_log_has_no_fact_but_context(log: Path) -> None:
    found = story(log.read_bytes())
    assert [fact.text for fact in found.facts if not fact.is_context] == []
    assert (found.culprit, found.absent) == (None, ())


@pytest.mark.parametrize("folder", RECORDED_HEALTHY, ids=lambda folder: folder.name)
def test_a_recorded_job_that_went_well_has_no_fact_but_context(folder: Path) -> None:
    found = story((folder / "job.log").read_bytes())
    assert [fact.text for fact in found.facts if not fact.is_context] == []


@pytest.mark.parametrize("folder", RECORDS[::6], ids=lambda folder: folder.name)
def test_facts_of_a_recorded_job_cite_lines_that_exist(folder: Path) -> None:
    log = (folder / "job.log").read_bytes()
    found = story(log)
    check_facts(found, log)
    numbered = log.decode("utf-8", "replace").split("\n")
    for fact in found.facts:
        for line in fact.lines:
            words = line.text.split("\\x")[0].split()[-1:]  # what is escaped in evidence is not compared
            assert all(word in numbered[line.number - 1] for word in words)


@given(st.sampled_from(RECORDS), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=120)
def test_a_log_cut_anywhere_is_read(folder: Path, start: float, end: float) -> None:
    log = (folder / "job.log").read_bytes()
    first, last = sorted((int(start * len(log)), int(end * len(log))))
    for part in (log[:last], log[first:last]):
        check_facts(story(part), part)


@given(st.sampled_from(HEALTHY), st.floats(0, 1))
@settings(max_examples=40)
def test_the_beginning_of_a_healthy_log_has_no_culprit(path: Path, end: float) -> None:
    log = path.read_bytes()
    assert story(log[: int(end * len(log))]).culprit is None


def test_nothing_has_no_story() -> None:
    for nothing in (story(b""), read_story([])):
        assert (nothing.facts, nothing.culprit, nothing.absent) == ((), None, ())


def test_causes_come_before_what_follows() -> None:
    waiting = [line for rank in (0, 1, 3) for line in raises(rank, LOST, "all_reduce")]
    ranks = [line for rank in range(4) for line in steps(rank, 19 if rank == 2 else 24)]
    found = story([*ranks, *raises(2, "KeyError: 'x'"), *waiting])
    assert [fact.kind for fact in found.facts] == ["own-failure", "same-place", "steps-behind"]
    assert found.culprit and found.culprit.ranks == (2,)
    assert found.waiting == {0, 1, 3}


def test_the_ranks_of_a_fact_are_sorted() -> None:
    (fact, *_) = story([line for rank in (3, 0, 2, 1) for line in raises(rank, "KeyError: 'x'")]).facts
    assert fact.ranks == (0, 1, 2, 3)


def test_what_explains_the_waiting_leaves_nobody_silent() -> None:
    waiting = [line for rank in (0, 1) for line in raises(rank, GAVE_UP, "all_reduce")]
    ranks = [line for rank in range(4) for line in steps(rank, 9)]
    assert story([*ranks, *raises(2, "KeyError: 'x'"), *waiting]).absent == ()


def test_of_several_attempts_the_first_has_the_cause() -> None:
    first = [*steps(0, 6), *steps(2, 6), *raises(2, "KeyError: 'x'"), AGENT]
    later = [*steps(0, 6), *steps(2, 6), *raises(0, LOST, "all_reduce"), AGENT]
    found = story([*first, *later])
    assert len(found.attempts) == 2
    assert found.culprit and "KeyError" in found.culprit.text
    assert found.facts[-1].text == (
        "kb: attempt 1 of 2 ended with KeyError on rank 2; later ones with ranks that waited or lost others"
    )
    assert story([*first, *first]).facts[-1].text.endswith("later ones with the same")


def test_a_job_whose_last_attempt_went_well_has_no_culprit() -> None:
    first = [*steps(0, 6), *raises(0, "KeyError: 'x'"), "Restarting worker group"]
    found = story([*first, *steps(0, 24)])
    assert (found.facts, found.culprit) == ((), None)


def test_json_has_attempts_and_facts() -> None:
    document = json.loads(json.dumps(story([*steps(0, 6), *raises(0, "KeyError: 'x'")]).to_json()))
    assert document["attempts"][0]["rows"][0]["mark"] == "X"
    assert document["facts"][0]["kind"] == "own-failure"
    assert document["facts"][0]["ranks"] == [0]
    assert document["facts"][0]["lines"] == [{"source": "job.log", "line": 10}]


@pytest.mark.parametrize(("has_all_marks", "kinds"), [(True, ["same-place", "silent"]), (False, ["same-place"])])
def test_silence_is_told_only_from_logs_that_were_read_whole(has_all_marks: bool, kinds: list[str]) -> None:
    lines = [
        *(line for rank in (0, 1, 2) for line in steps(rank, 6)),
        *raises(0, GAVE_UP, "all_reduce"),
        *raises(1, GAVE_UP, "all_reduce"),
    ]
    data = "".join(f"{line}\n" for line in lines).encode()
    found = read_story([Excerpt("job.log", None, None, (Part(1, data),), has_all_marks)])
    assert [fact.kind for fact in found.facts] == kinds
