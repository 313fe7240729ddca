"""Whether a pattern may take for ever, decided on its automaton, without running it."""

from __future__ import annotations

from functools import cache
from itertools import product

from kb.patterns.automaton import Automaton, build

MOST_CHAINED = 2


@cache
def backtracking_risk(pattern: str) -> str:
    """Why a pattern may take exponential or high polynomial time on some text, "" when it cannot.

    Exponential is a repeat that can match one text in two ways, `(a+)+` or `(a|ab|b)*`. Polynomial are unbounded
    repeats that can hand the same text on to one another, `.*x.*y.*`: two of them are accepted, as a log line
    is short, more are not. `(?:\\w+\\.)+` and `\\d+, OpType=(\\w+).*` are neither. Back references and numbers of
    a bounded repeat are beyond this; `kb.patterns.redos_timing` tries those.
    """
    automaton = build(pattern)
    if any(_is_ambiguous(automaton, loop) for loop in automaton.loops):
        return "an unbounded repeat can match the same text in two ways"
    if _longest_chain(automaton) > MOST_CHAINED:
        return f"more than {MOST_CHAINED} unbounded repeats can match the same text"
    return ""


def _is_ambiguous(automaton: Automaton, loop: range) -> bool:
    """Whether two walks over one text part from a position of the loop and meet again."""
    inside = {start: {end: n for end, n in automaton.after.get(start, {}).items() if end in loop} for start in loop}
    if any(ways > 1 for ends in inside.values() for ways in ends.values()):
        return True
    seen = {(position, position) for position in loop}
    left = list(seen)
    while left:
        one, other = left.pop()
        for pair in product(inside[one], inside[other]):
            if one != other and pair[0] == pair[1]:
                return True
            if pair not in seen and automaton.classes[pair[0]] & automaton.classes[pair[1]]:
                seen.add(pair)
                left.append(pair)
    return False


def _longest_chain(automaton: Automaton) -> int:
    """How many unbounded repeats hand one text on from each to the next: the degree of the time it takes."""

    @cache
    def length(loop: range) -> int:
        later = (other for other in automaton.loops if other != loop and _hands_on(automaton, loop, other))
        return 1 + max(map(length, later), default=0)

    return max(map(length, automaton.loops), default=0)


def _hands_on(automaton: Automaton, loop: range, later: range) -> bool:
    """Whether some text that both repeats match leads from the one to the other."""
    common = _matched(automaton, loop) & _matched(automaton, later)
    seen, left = set(loop), list(loop)
    while left and common:
        for after in automaton.after.get(left.pop(), ()):
            if after not in seen and automaton.classes[after] & common:
                seen.add(after)
                left.append(after)
    return not seen.isdisjoint(later)


def _matched(automaton: Automaton, loop: range) -> frozenset[str]:
    return frozenset[str]().union(*(automaton.classes[position] for position in loop))
