"""`kb search` with filters, `--applies-here` and `--why`, as a reader meets them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.console import ContentRoot, Kb

QUESTION = "zirconium spline broke while the flange rotated"


@pytest.fixture
def ranges(content: ContentRoot, few_entries: None) -> None:
    """Three entries that answer: one for this Python, one that it fixed, one that says nothing."""
    content.entry("for-this", has_probe=False, symptom=QUESTION, extra='applies_to: {python: ">=3.9"}\n')
    content.entry("long-fixed", has_probe=False, symptom=QUESTION, extra='fixed_in: {python: ">=3.9"}\n')
    content.entry("says-nothing", has_probe=False, symptom=QUESTION)


@pytest.mark.usefixtures("ranges")
def test_what_fits_this_environment_comes_first_with_the_reason(kb: Kb) -> None:
    here = sys.version.split()[0]
    hits = kb("search", QUESTION, "--tag", "test", "--applies-here", "--json", "--python", sys.executable).json["hits"]
    judged = [(hit["id"], hit["applicability"]["state"]) for hit in hits]
    assert judged == [("for-this", "applies"), ("says-nothing", "unknown"), ("long-fixed", "does-not-apply")]
    printed = kb("search", QUESTION, "--tag", "test", "--applies-here").out
    assert f"here     applies: python {here} is within >=3.9" in printed
    assert "here     unknown: the entry names no versions" in printed
    assert f"here     does not apply: fixed in python >=3.9, here {here}" in printed


@pytest.mark.usefixtures("ranges")
def test_filters_repeat(kb: Kb) -> None:
    def ids(*options: str) -> set[str]:
        return {hit["id"] for hit in kb("search", QUESTION, "--json", *options).json["hits"]}

    assert ids("--framework", "python") == {"for-this", "long-fixed"}
    assert ids("--tag", "test", "--framework", "python", "--status", "confirmed") == {"for-this", "long-fixed"}
    assert ids("--tag", "test", "--tag", "fsdp") == set()


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--tag", "checkpont"], "checkpoint"),
        (["--framework", "transfomers"], "transformers"),
        (["--status", "confirm"], "confirmed, disputed, reported"),
        (["--area", "disks"], "one of checkpoint, collectives, data"),
        (["--python", sys.executable], "--applies-here"),
        (["--python", "/no/such/python", "--applies-here"], "--python takes the path"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error_with_a_hint(kb: Kb, options: list[str], hint: str) -> None:
    ended = kb("search", "timeout", "--json", *options)
    assert ended.code == 2
    assert ended.json["ok"] is False
    assert hint in ended.json["error"]["hint"]


def test_a_filter_that_leaves_nothing_ends_as_nothing_found(kb: Kb) -> None:
    ended = kb("search", "timeout", "--status", "disputed")
    assert ended.code == 1
    assert "fewer filters" in ended.out


def test_why_shows_a_sum_that_is_the_score(kb: Kb) -> None:
    line = (
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=11, OpType=_ALLGATHER_BASE, Timeout(ms)=600000)"
    )
    (hit,) = kb("search", line, "--why", "--json", "--limit", "1").json["hits"]
    why = hit["why"]
    words = sum(item["score"] for item in why["concepts"])
    assert words * why["coverage"] * why["agreement"] + why["signature"] == pytest.approx(hit["score"], abs=0.001)
    assert why["signature"] > 0
    assert {"word", "term", "idf", "weight", "bm25", "score"} == why["concepts"][0].keys()
    printed = kb("search", line, "--why", "--limit", "1").out
    assert f"score    {hit['score']:.3f} = {words:.3f} words x {why['coverage']:.3f} coverage" in printed
    rows = re.findall(r"^ +([\d.]+)  (\S.*?) +([\d.]+) bm25 x ([\d.]+) of '(.+)', idf ([\d.]+)$", printed, re.MULTILINE)
    assert len(rows) == len(why["concepts"])


def test_without_asking_nothing_is_explained(kb: Kb) -> None:
    hit = kb("search", "ALLGATHER timeout save", "--json").json["hits"][0]
    assert not {"why", "applicability"} & hit.keys()
    printed = kb("search", "ALLGATHER timeout save").out
    assert "score " not in printed
    assert "here " not in printed.split("matched")[0]


def test_standard_input_is_filtered_too(kb: Kb, tmp_path: Path) -> None:
    result = kb("search", "-", "--tag", "checkpoint", "--json", stdin=b"NCCL timeout").json["hits"]
    assert result
    assert all("checkpoint" in hit["tags"] for hit in result)
