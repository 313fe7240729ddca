"""The next step in Chinese, from the entries that kb ships: the same command, and something to do."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kb.content.actions import action
from kb.content.catalog import Catalog, load_catalog
from kb.content.roots import builtin_root
from kb.diagnose.chinese_step import chinese_items, chinese_step
from kb.diagnose.diagnosis import Diagnosis
from kb.diagnose.first_failure import RankSummary
from kb.diagnose.next_step import NextStep, next_step
from kb.search.document import tells
from tests.kb.diagnose.test_next_step import NOBODY, finding

CHINESE = re.compile(r"[\u4e00-\u9fff]")
SAVE, LATE = "checkpoint-save-allgather-timeout", "slow-rank-exceeds-timeout"
PROOF = "Verify it on this machine"


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog((builtin_root(),))


def diagnosis(catalog: Catalog, *ids: str, ranks: RankSummary = NOBODY) -> Diagnosis:
    findings = tuple(finding(entry, 0.6) for entry in ids)
    step = next_step(findings, {entry: {"tells": tells(catalog.get(entry))} for entry in ids}, ranks)
    return Diagnosis(findings, False, False, ranks, (), (), step, (), 1, 1, 1, ())


def chinese(catalog: Catalog, given: Diagnosis) -> NextStep:
    step = chinese_step(given, catalog.get)
    assert step is not None
    return step


def test_it_is_the_item_of_the_chinese_text(catalog: Catalog) -> None:
    given = diagnosis(catalog, SAVE, LATE)
    step = chinese(catalog, given)
    assert step.text.startswith("比较各 rank 停在哪一次集合通信。")
    assert (step.source, step.command) == (SAVE, f"kb verify {SAVE}")


def test_what_kb_composes_is_in_chinese_too(catalog: Catalog) -> None:
    absent = diagnosis(catalog, SAVE, ranks=RankSummary(None, None, (2, 5), (0, 1, 2, 5)))
    assert chinese(catalog, absent).text.startswith("看 rank 2、5 做了什么：其他 rank 在等它。")


def test_an_entry_without_chinese_is_quoted_in_english(catalog: Catalog) -> None:
    entry = catalog.get(SAVE)
    english = replace(entry, sections={name: text for name, text in entry.sections.items() if name != "中文"})
    assert chinese_items(english) == tells(entry)


def test_no_step_of_any_entry_only_states_something(catalog: Catalog) -> None:
    for entry in catalog.current():
        for other in [entry.id, *(word for word in re.findall(r"`([a-z0-9-]+)`", " ".join(tells(entry))))]:
            if other in catalog.entries:
                given = diagnosis(catalog, *dict.fromkeys((entry.id, other)))
                assert given.next_step
                english, translated = given.next_step.text, chinese(catalog, given).text
                assert action(english) or english.startswith(PROOF), english
                assert action(translated) or translated.startswith("在这台机器上验证"), translated
                assert CHINESE.search(translated), translated
