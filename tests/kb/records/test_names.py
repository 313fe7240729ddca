"""A record of names grows by one environment after the other, and shows where a name comes or goes."""

from __future__ import annotations

import pytest

from kb.records.names import Gap, extended, gaps, is_missing, package_of
from kb.records.occurrences import Occurrences

BARRIER, SAFE = "torch.distributed.barrier", "torch.serialization.safe_globals"


@pytest.mark.parametrize(
    ("name", "package"),
    [(BARRIER, "torch"), ("peft.LoraConfig(r", "peft"), ("deepspeed: zero_optimization.stage", "deepspeed")],
)
def test_the_package_of_a_name(name: str, package: str) -> None:
    assert package_of(name) == package


def test_each_environment_adds_its_releases_and_what_they_have() -> None:
    record = Occurrences()
    for release, present in (("2.10.0", [BARRIER, SAFE]), ("2.4.1", [BARRIER]), ("2.5.1", [BARRIER, SAFE])):
        record = extended(record, {"torch": release}, [BARRIER, SAFE, "peft.LoraConfig"], present)
    assert record.searched == {"torch": ["2.4.1", "2.5.1", "2.10.0"]}
    assert record.found == {
        BARRIER: {"torch": ["2.4.1", "2.5.1", "2.10.0"]},
        SAFE: {"torch": ["2.5.1", "2.10.0"]},
        "peft.LoraConfig": {},
    }
    assert gaps(SAFE, record) == [Gap("2.4.1", "2.5.1", is_in_newer=True)]
    assert gaps(BARRIER, record) == gaps("peft.LoraConfig", record) == gaps("torch.cuda.nobody_asked", record) == []


def test_a_second_run_with_a_release_replaces_what_was_known_of_it() -> None:
    first = extended(Occurrences(), {"torch": "2.5.1"}, [BARRIER, SAFE], [BARRIER, SAFE])
    again = extended(first, {"torch": "2.5.1"}, [SAFE], [])
    assert again.found == {SAFE: {}}, "what no entry uses any more is left out"
    assert is_missing(SAFE, again) and not is_missing(BARRIER, again), "nobody looked for the other"
    assert gaps(SAFE, again) == []
