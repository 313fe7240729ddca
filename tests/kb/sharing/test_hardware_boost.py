"""Of the good hits those come first whose fix was verified on hardware like the reader's, and they say so."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from kb.search.results import Hit
from kb.sharing.hardware_boost import Hardware, gpu_model, prefer, release
from kb.store.reports import VerdictCount

DIGESTS = {"first": "d1", "second": "d2", "third": "d3"}


def hit(entry_id: str, score: float) -> Hit:
    words: dict[str, Any] = dict.fromkeys(
        ("title", "title_zh", "cause", "cause_zh", "area", "status", "severity", "origin", "signature", "snippet"), ""
    )
    return Hit(id=entry_id, score=score, tags=(), frameworks=(), probe=None, matched=(), **words)


HITS = (hit("first", 10.0), hit("second", 8.0), hit("third", 4.9))


def standing(entry_id: str, **members: Any) -> VerdictCount:
    given = {
        "gpu": "NVIDIA H100 80GB HBM3",
        "driver": "570",
        "torch": "2.7.1+cu126",
        "verdict": "verified",
        "fidelity": "hardware",
        "entry_digest": DIGESTS[entry_id],
        "count": 1,
        "last": datetime.datetime(2026, 3, 1),
    }
    return VerdictCount(entry_id=entry_id, **{**given, **members})


def ids(verdict_counts: list[VerdictCount], gpu: str = "", torch: str = "") -> list[str]:
    return [item.id for item in prefer(HITS, verdict_counts, DIGESTS, Hardware(gpu, torch))]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("8 x h100", "H100"),
        ("8xA100", "A100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("A100 80 GB", "A100"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("MI250X 128GB", "MI250X"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("a GPU", ""),
        ("", ""),
    ],
)
def test_the_model_is_the_word_that_tells_gpus_apart(name: str, model: str) -> None:
    assert gpu_model(name) == model


@pytest.mark.parametrize(
    ("version", "expected"), [("2.7.1+cu126", "2.7"), ("v2.10", "2.10"), (" 2.7", "2.7"), ("2", ""), ("new", "")]
)
def test_a_release_is_the_first_two_numbers_of_a_version(version: str, expected: str) -> None:
    assert release(version) == expected


def test_a_fix_verified_on_the_same_gpu_comes_first_and_says_so() -> None:
    hits = prefer(HITS, [standing("second", count=3)], DIGESTS, Hardware("h100"))
    assert [item.id for item in hits] == ["second", "first", "third"]
    message = hits[0].verified_on
    assert message is not None
    assert (message.gpu, message.torch, message.reports) == ("NVIDIA H100 80GB HBM3", "2.7.1+cu126", 3)
    assert "H100" in message.reason
    assert "torch" not in message.reason
    assert [item.verified_on for item in hits[1:]] == [None, None]


def test_of_the_same_gpu_the_same_release_of_torch_comes_first() -> None:
    both = [standing("first", torch="2.4.0"), standing("second")]
    assert ids(both, "H100") == ["first", "second", "third"]
    assert ids(both, "H100", "2.7.0") == ["second", "first", "third"]
    best = prefer(HITS, both, DIGESTS, Hardware("H100", "2.7.0"))[0].verified_on
    assert best is not None
    assert "2.7" in best.reason


def test_without_a_gpu_torch_alone_counts() -> None:
    assert ids([standing("second")], torch="2.7.9") == ["second", "first", "third"]
    assert ids([standing("second")], torch="2.8.0") == ["first", "second", "third"]


@pytest.mark.parametrize(
    "other",
    [
        {"gpu": "NVIDIA A100-SXM4-80GB"},
        {"gpu": ""},
        {"fidelity": "cpu"},
        {"entry_digest": "an earlier wording"},
        {"verdict": "not-reproduced"},
        {"verdict": "fix-ineffective"},
    ],
)
def test_what_was_not_verified_like_here_changes_nothing(other: dict[str, Any]) -> None:
    assert prefer(HITS, [standing("second", **other)], DIGESTS, Hardware("H100", "2.7")) == HITS


def test_a_hit_that_is_no_good_answer_stays_where_it_is() -> None:
    hits = prefer(HITS, [standing("third")], DIGESTS, Hardware("H100"))
    assert hits == HITS


def test_as_many_reports_that_contradict_speak_against_it() -> None:
    good, bad = standing("second", count=2), standing("second", verdict="fix-ineffective", driver="550", count=2)
    assert ids([good, bad], "H100") == ["first", "second", "third"]
    elsewhere = standing("second", verdict="fix-ineffective", gpu="NVIDIA A100-SXM4-80GB", count=9)
    assert ids([good, elsewhere], "H100") == ["second", "first", "third"]


def test_nothing_is_preferred_for_hardware_that_nobody_named() -> None:
    assert not Hardware("a GPU", "the new one")
    assert ids([standing("second")], "a GPU", "the new one") == ["first", "second", "third"]


def test_no_hits_are_no_hits() -> None:
    assert prefer((), [standing("second")], DIGESTS, Hardware("H100")) == ()
