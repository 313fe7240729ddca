"""Whether the best hit is an answer, is near, or is not, and what a question without an answer gets instead."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

import pytest

from kb.content.catalog import load_catalog
from kb.content.facets import FACETS, NAMED, VALUES, Subject, Symptom, bits, values_of
from kb.content.roots import builtin_root
from kb.content.triage import first_observations, load_triage
from kb.search import cues
from kb.search.decision import Kind, Observations, lead
from kb.search.gap import gap, observations, subjects
from kb.search.index import Index
from kb.search.index_cache import open_index
from kb.search.query import units_of
from kb.search.ranking import search
from kb.search.synonyms import key_of

TRIAGE = load_triage((builtin_root(),))
NO_ENTRY = (
    pytest.param(
        "the scheduler puts both halves of my pipeline on the same rack and bubbles grow",
        marks=pytest.mark.xfail(
            reason="scheduler and schedule are one term, and pipeline-deadlock has both", strict=True
        ),
    ),
    "the gpu util is low, a profiler shows gaps between kernels, how do I overlap host work",
    "two jobs share a node and one of them gets all the PCIe bandwidth",
    "梯度压缩之后吞吐没有提升，是不是带宽的问题",
)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with open_index((builtin_root(),)) as opened:
            yield opened


def named(text: str) -> list[str]:
    return values_of(cues.named(units_of(text), cues.cues()))


def test_a_set_of_facets_is_a_number_and_back() -> None:
    assert values_of(bits(VALUES)) == list(VALUES)
    assert values_of(bits(["phases:save", "symptoms:hang"])) == ["symptoms:hang", "phases:save"]


def test_every_value_has_words_and_no_others_have() -> None:
    assert {name: set(values) for name, values in cues.read().items()} == {
        name: {value.value for value in facet} for name, facet in NAMED.items()
    }
    assert all(map(key_of, (word for values in cues.read().values() for each in values.values() for word in each)))


def test_no_word_names_two_symptoms() -> None:
    words = [word for each in tomllib.loads(cues.FILE.read_text("utf-8"))["symptoms"].values() for word in each]
    assert len(words) == len(set(words))


@pytest.mark.parametrize(
    "text, values",
    [
        ("it hangs in the save", {"symptoms:hang", "phases:save"}),
        ("保存的时候卡住了", {"symptoms:hang", "phases:save"}),
        ("throughput is poor with FSDP", {"symptoms:slow", "components:fsdp"}),
        ("HCCL timeout on the NPU", {"symptoms:hang", "subjects:ascend"}),
    ],
)
def test_words_name_facets(text: str, values: set[str]) -> None:
    assert values <= set(named(text))


def test_agreement_counts_what_both_name_less_what_the_entry_does_not() -> None:
    hang, save, slow = bits(["symptoms:hang"]), bits(["phases:save"]), bits(["symptoms:slow"])
    assert cues.agreement(hang | save, hang | save) == 2
    assert cues.agreement(hang | slow, hang) == 0
    assert cues.agreement(slow, hang) == -1
    assert cues.agreement(slow, 0) == 0, "an entry without facets is not judged by them"


def test_a_lead_is_large_without_rivals() -> None:
    assert lead([3.0]) == 1
    assert lead([3.0] * 6) == 0
    assert lead([3.0, 3.0]) == pytest.approx(0.8)


def test_each_observation_speaks_for_an_answer() -> None:
    base = Observations(0.3, 0.3, 1).probability
    assert Observations(0.5, 0.3, 1).probability > base
    assert Observations(0.3, 0.6, 1).probability > base
    assert Observations(0.3, 0.3, 3).probability > base


def test_an_error_that_an_entry_shows_is_answered(index: Index) -> None:
    answer = search(index, "RuntimeError: Expected to mark a variable ready only once, DDP with LoRA")
    assert (answer.kind, answer.best) == (Kind.ANSWER, "ddp-marked-ready-twice")
    assert answer.probability > 0.8
    assert gap(answer, TRIAGE) == {"out_of_scope": [], "triage": []}
    assert all(hit.difference is None for hit in answer.hits)


@pytest.mark.parametrize("text", NO_ENTRY)
def test_what_no_entry_is_about_is_no_answer(index: Index, text: str) -> None:
    answer = search(index, text)
    assert answer.kind is not Kind.ANSWER
    assert observations(answer, TRIAGE)
    assert all(hit.difference for hit in answer.hits)


def test_a_hit_says_how_it_differs(index: Index) -> None:
    """Whichever entries are nearest: the facets of the question that they do not declare."""
    answer = search(index, "CUPTI profiler slows the save of the checkpoint of every rank down, throughput halves")
    assert {"symptoms:slow", "phases:save"} <= set(answer.facets)
    catalog = load_catalog((builtin_root(),))
    for hit in answer.hits:
        assert hit.difference
        assert "CUPTI" in hit.difference.lacks
        assert [*hit.difference.facets] == [facet for facet in answer.facets if facet not in catalog.get(hit.id).facets]
    assert any(hit.difference and hit.difference.facets for hit in answer.hits)


def test_one_word_that_is_far_ahead_is_not_an_answer(index: Index) -> None:
    answer = search(index, "bananas and rice")
    assert answer.kind is Kind.UNKNOWN
    assert answer.probability <= 0.1
    assert observations(answer, TRIAGE) == (), "nothing says that it is a failure"


def test_another_subject_is_said_by_name(index: Index) -> None:
    answer = search(index, "昇腾 910B 上 HCCL 报错 EI0006")
    assert subjects(answer) == (Subject.ASCEND,)
    assert observations(answer, TRIAGE) == ()


@pytest.mark.parametrize("stack", ["with HCCL on an Ascend NPU", "in paddle.distributed", "on Gaudi with habana"])
def test_the_words_of_an_entry_are_no_answer_about_another_stack(index: Index, stack: str) -> None:
    question = "ALLGATHER timeout in the save of a checkpoint on rank 0"
    assert search(index, question).kind is Kind.ANSWER
    answer = search(index, f"{question} {stack}")
    assert answer.kind is Kind.UNKNOWN
    assert answer.probability <= 0.1
    assert subjects(answer)


def test_a_root_of_an_entry_is_one_in_a_log_that_names_another_stack(index: Index) -> None:
    log = "RuntimeError: Expected to mark a variable ready only once.\nthe API server of the rollout had ended before"
    answer = search(index, log)
    assert (answer.kind, answer.best) == (Kind.ANSWER, "ddp-marked-ready-twice")


def test_every_symptom_has_observations() -> None:
    assert set(TRIAGE) == set(Symptom)


def test_the_symptom_chooses_and_a_crash_comes_last() -> None:
    hang = first_observations(TRIAGE, ["symptoms:crash", "symptoms:hang", "phases:save"])
    assert hang == TRIAGE["hang"][: len(hang)]
    assert first_observations(TRIAGE, ["components:nccl"])[0] == TRIAGE["crash"][0]
    assert first_observations(TRIAGE, []) == ()


def test_entries_declare_known_values(index: Index) -> None:
    assert all(values_of(declared) for declared in index.declared.values())
    assert set(FACETS) == {"symptoms", "phases", "components"}
