"""Which entry stands first: causes before what they cause, evidence before likeness, a flood counts once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kb.diagnose.evidence import Line, Sighting
from kb.diagnose.ranking import Candidate, rank


def sighting(entry: str, role: str, number: int = 1, count: int = 1, ranks: Sequence[int] = ()) -> Sighting:
    line = Line("job.log", number, f"{entry} {role}", ranks[0] if ranks else None)
    return Sighting(entry, role, f"{role} {number}", "m", count, tuple(ranks), (line,))


def ranked(
    *sightings: Sighting,
    likeness: Mapping[str, float] | None = None,
    causes: Sequence[tuple[str, str]] = (),
    masks: Sequence[tuple[str, str]] = (),
) -> tuple[Candidate, ...]:
    return rank(sightings, likeness or {}, causes, masks)


def ids(*sightings: Sighting, **given: object) -> list[str]:
    return [one.id for one in ranked(*sightings, **given)]  # type: ignore[arg-type]


def test_a_root_stands_above_a_cascade_however_often_that_was_printed() -> None:
    flood = [sighting("timeout", "cascade", number, 4000, range(64)) for number in (1, 2, 3)]
    assert ids(*flood, sighting("oom", "root", 90, 1, [3])) == ["oom", "timeout"]


def test_an_entry_that_follows_from_a_root_is_a_cascade_of_it_and_below() -> None:
    both = sighting("oom", "root", 5), sighting("masked", "root", 5), sighting("masked", "cascade", 9)
    first, second = ranked(*both, likeness={"masked": 1.0}, causes=[("oom", "masked")])
    assert (first.id, first.role, first.caused_by) == ("oom", "root", ())
    assert (second.id, second.role, second.caused_by) == ("masked", "cascade", ("oom",))


def test_what_hides_a_seen_root_stands_below_it() -> None:
    seen = sighting("launcher", "root", 90), sighting("oom", "root", 5)
    assert ids(*seen, likeness={"launcher": 0.9}, masks=[("launcher", "oom")]) == ["oom", "launcher"]


def test_two_that_cause_each_other_accuse_nobody() -> None:
    found = ranked(sighting("a", "root", 1), sighting("b", "root", 2), causes=[("a", "b"), ("b", "a")])
    assert [(one.role, one.caused_by) for one in found] == [("root", ()), ("root", ())]


def test_a_line_that_many_entries_claim_says_less_of_each() -> None:
    shared = [sighting(entry, "cascade", 7) for entry in ("a", "b", "c", "d")]
    found = ranked(*shared, sighting("own", "cascade", 8))
    assert found[0].id == "own"
    assert found[1].score < found[0].score
    assert found[1].shared_with == ("b", "c", "d")


def test_a_flood_is_one_piece_of_evidence() -> None:
    once, often = (ranked(sighting("a", "cascade", 1, count, range(min(count, 64))))[0] for count in (1, 64))
    assert once.score == often.score


def test_further_evidence_and_likeness_decide_between_equals() -> None:
    equal = sighting("a", "root", 1), sighting("b", "root", 2)
    assert ids(*equal, sighting("b", "context", 3))[0] == "b"
    assert ids(*equal, likeness={"b": 0.5})[0] == "b"
    assert ids(*equal)[0] == "a"


def test_context_alone_is_no_evidence() -> None:
    assert ranked(sighting("a", "context")) == ()


def test_wording_alone_is_said_to_be_wording() -> None:
    (found,) = ranked(likeness={"a": 1.0, "b": 0.1})
    assert (found.id, found.role, found.sightings) == ("a", "similar", ())


def test_the_order_does_not_depend_on_the_order_of_reading() -> None:
    seen = [sighting(entry, "root", number) for number, entry in enumerate("dbca", 1)]
    assert ids(*seen) == ids(*reversed(seen))
