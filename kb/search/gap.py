"""What kb says if it has no answer: that it does not know, what the question is about, and what to look at next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kb.content.facets import Subject
from kb.content.triage import Observation, Triage, first_observations
from kb.search.results import Answer

SUBJECTS = "subjects:"  # how such values in `kb.content.facets.VALUES` begin


def subjects(answer: Answer) -> tuple[Subject, ...]:
    """The subjects of the question that kb is not about."""
    return tuple(subject for subject in Subject if f"{SUBJECTS}{subject}" in answer.facets)


def observations(answer: Answer, triage: Triage) -> Sequence[Observation]:
    """What to look at next; nothing for an answer, nor for a subject that kb is not about."""
    return () if answer.answered or subjects(answer) else first_observations(triage, answer.facets)


def gap(answer: Answer, triage: Triage) -> dict[str, Any]:
    """The members of a document that only a question without an answer fills."""
    return {
        "out_of_scope": [{"subject": subject.value, "see": subject.meaning} for subject in subjects(answer)],
        "triage": [each.to_json(in_chinese=answer.in_chinese) for each in observations(answer, triage)],
    }
