"""Which entry stands first: causes before what they cause, evidence before likeness, a flood counts once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kb.diagnose.evidence import Line, SignatureMatch
from kb.diagnose.ranking import Candidate, rank_candidates


def match(entry: str, role: str, number: int = 1, count: int = 1, ranks: Sequence[int] = ()) -> SignatureMatch:
    line = Line("job.log", number, f"{entry} {role}", ranks[0] if ranks else None)
    return SignatureMatch(entry, role, f"{role} {number}", "m", count, tuple(ranks), (line,))


def ranked(
    *matches: SignatureMatch,
    likeness: Mapping[str, float] | None = None,
    causes: Sequence[tuple[str, str]] = (),
    masks: Sequence[tuple[str, str]] = (),
) -> tuple[Candidate, ...]:
    return rank_candidates(matches, likeness or {}, causes, masks)


def ids(*matches: SignatureMatch, **given: object) -> list[str]:
    return [item.id for item in ranked(*matches, **given)]  # type: ignore[arg-type]


def test_a_root_stands_above_a_cascade_however_often_that_was_printed() -> None:
    flood = [match("timeout", "cascade", number, 4000, range(64)) for number in (1, 2, 3)]
    assert ids(*flood, match("oom", "root", 90, 1, [3])) == ["oom", "timeout"]


def test_an_entry_that_follows_from_a_root_is_a_cascade_of_it_and_below() -> None:
    both = match("oom", "root", 5), match("masked", "root", 5), match("masked", "cascade", 9)
    first, second = ranked(*both, likeness={"masked": 1.0}, causes=[("oom", "masked")])
    assert (first.id, first.role, first.caused_by) == ("oom", "root", ())
    assert (second.id, second.role, second.caused_by) == ("masked", "cascade", ("oom",))


def test_what_hides_a_seen_root_stands_below_it() -> None:
    seen = match("launcher", "root", 90), match("oom", "root", 5)
    assert ids(*seen, likeness={"launcher": 0.9}, masks=[("launcher", "oom")]) == ["oom", "launcher"]


def test_two_that_cause_each_other_accuse_nobody() -> None:
    findings = ranked(match("a", "root", 1), match("b", "root", 2), causes=[("a", "b"), ("b", "a")])
    assert [(item.role, item.caused_by) for item in findings] == [("root", ()), ("root", ())]


def test_a_line_that_many_entries_claim_says_less_of_each() -> None:
    shared = [match(entry, "cascade", 7) for entry in ("a", "b", "c", "d")]
    findings = ranked(*shared, match("own", "cascade", 8))
    assert findings[0].id == "own"
    assert findings[1].score < findings[0].score
    assert findings[1].shared_with == ("b", "c", "d")


def test_a_flood_is_one_piece_of_evidence() -> None:
    once, often = (ranked(match("a", "cascade", 1, count, range(min(count, 64))))[0] for count in (1, 64))
    assert once.score == often.score


def test_further_evidence_and_likeness_decide_between_equals() -> None:
    equal = match("a", "root", 1), match("b", "root", 2)
    assert ids(*equal, match("b", "context", 3))[0] == "b"
    assert ids(*equal, likeness={"b": 0.5})[0] == "b"
    assert ids(*equal)[0] == "a"


def test_context_alone_is_no_evidence() -> None:
    assert ranked(match("a", "context")) == ()


def test_wording_alone_is_said_to_be_wording() -> None:
    (result,) = ranked(likeness={"a": 1.0, "b": 0.1})
    assert (result.id, result.role, result.matches) == ("a", "similar", ())


def test_the_order_does_not_depend_on_the_order_of_reading() -> None:
    seen = [match(entry, "root", number) for number, entry in enumerate("dbca", 1)]
    assert ids(*seen) == ids(*reversed(seen))
