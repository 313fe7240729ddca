"""Questions that tell candidates apart, made of the built-in entries."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kb.content.catalog import Catalog, load_catalog
from kb.content.roots import builtin_root
from kb.diagnose.questions import LINES, LONGEST, OBSERVATIONS, questions

HANGS = ("collective-shape-mismatch", "stale-cache-lock", "rank-divergent-collectives", "watchdog-heartbeat-stuck")


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog((builtin_root(),))


def test_lines_and_observations_are_those_of_the_entries(catalog: Catalog) -> None:
    lines, observations = questions([catalog.get(entry_id) for entry_id in HANGS])
    assert (lines.text, observations.text) == (LINES, OBSERVATIONS)
    assert [choice.id for choice in lines.choices] == list(HANGS[:3])
    for choice in lines.choices:
        signatures = catalog.get(choice.id).meta.signatures
        samples = [" ".join(signature.sample.split()) for signature in signatures]
        assert any(sample.startswith(choice.text.removesuffix(" …")) for sample in samples)
        assert choice.printed_by in [signature.source for signature in signatures]
    for choice in observations.choices:
        start = choice.text[:20]
        assert start in " ".join(catalog.get(choice.id).section("How to tell").split())
    assert all(len(choice.text) <= LONGEST for question in (lines, observations) for choice in question.choices)


def test_a_line_that_another_candidate_has_as_well_is_not_asked_for(catalog: Catalog) -> None:
    entry = catalog.get("nan-loss")
    assert [question.text for question in questions([entry, replace(entry)])] == [OBSERVATIONS]


def test_an_observation_that_names_another_candidate_comes_first(catalog: Catalog) -> None:
    pair = [catalog.get(entry_id) for entry_id in ("rank-divergent-collectives", "collective-shape-mismatch")]
    observations = questions(pair)[-1]
    assert all(
        f"`{other}`" in choice.text
        for choice, other in zip(observations.choices, [pair[1].id, pair[0].id], strict=True)
    )


def test_one_candidate_leaves_nothing_to_ask(catalog: Catalog) -> None:
    assert questions([catalog.get("nan-loss")]) == ()
    assert questions([]) == ()
