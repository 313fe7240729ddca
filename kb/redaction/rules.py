"""All rules, in the order in which they run, and the selection of those that may match a line."""

from __future__ import annotations

from ahocorasick_rs import BytesAhoCorasick

from kb.redaction.machine_rules import MACHINES
from kb.redaction.person_rules import PEOPLE
from kb.redaction.rule import Rule
from kb.redaction.secret_rules import SECRETS

RULES = (*SECRETS, *PEOPLE, *MACHINES)

_HINTS = sorted({hint for rule in RULES for hint in rule.hints})
_HINTED_RULES = [[number for number, rule in enumerate(RULES) if hint in rule.hints] for hint in _HINTS]
_REPEATED = [(number, rule.repeated) for number, rule in enumerate(RULES) if rule.repeated]
_AUTOMATON = BytesAhoCorasick([hint.encode() for hint in _HINTS])


def candidate_rules(line: str) -> list[Rule]:
    """The rules that may match a line, by its hints. One pass searches for all hints, since most lines have none."""
    text = line.lower().encode("utf-8", "surrogatepass")
    matches = _AUTOMATON.find_matches_as_indexes(text, overlapping=True)
    numbers = {number for hint, _, _ in matches for number in _HINTED_RULES[hint]}
    numbers.update(number for number, repeated in _REPEATED if line.count(repeated[0]) >= len(repeated))
    return [RULES[number] for number in sorted(numbers)]
