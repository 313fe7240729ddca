"""Every entry: what it prints, says and is called finds it first."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest
from typer.main import get_command

from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from kb.runtime.worker import load_probe
from kb.search.index import Index
from kb.search.index_cache import open_index
from kb.search.ranking import search

CATALOG = load_catalog((builtin_root(),))
IDS = list(CATALOG.entries)
COMMANDS = vars(get_command(resolve_name("kb.cli.main:app")()))["commands"]
LOGS = [(entry.id, number, log.text) for entry in CATALOG for number, log in enumerate(entry.logs, 1)]

# What people say of the cases that this knowledge base was founded on, in their own words.
FOUNDING = {
    "Gemma-2 ORPO 2xA40": {"collective-shape-mismatch", "nccl-p2p-hang"},
    "KTO Dropping Long Sequences 卡住": {"nccl-p2p-hang", "slow-rank-exceeds-timeout", "preprocess-num-proc-hang"},
    "Mixtral 保存 NCCL 超时": {"checkpoint-save-allgather-timeout"},
    "256 != 2 * 18 * 7": {"batch-size-invariant"},
    "Qwen-VL LoRA save_steps 200": {"oom-masked-as-nccl-timeout", "torchrun-root-cause-hidden"},
    "ALLGATHER timeout save": {"checkpoint-save-allgather-timeout"},
}


@pytest.fixture(scope="module")
def index(built_in_index: Path) -> Iterator[Index]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(built_in_index))
        with open_index((builtin_root(),)) as opened:
            yield opened


def test_no_entry_was_left_out() -> None:
    assert [problem.message for problem in CATALOG.problems] == []


@pytest.mark.parametrize("question, expected", FOUNDING.items(), ids=FOUNDING)
def test_the_founding_cases_are_found_by_their_own_words(index: Index, question: str, expected: set[str]) -> None:
    assert search(index, question).hits[0].id in expected


@pytest.mark.parametrize("entry_id, number, text", LOGS, ids=[f"{name}-{number}" for name, number, _ in LOGS])
def test_a_log_of_the_entry_finds_it_first(index: Index, entry_id: str, number: int, text: str) -> None:
    assert search(index, text).hits[0].id == entry_id


@pytest.mark.parametrize("entry_id", IDS)
def test_titles_and_aliases_find_their_entry_among_the_first(index: Index, entry_id: str) -> None:
    meta = CATALOG.get(entry_id).meta
    assert search(index, meta.title).hits[0].id == entry_id
    assert search(index, meta.title_zh).hits[0].id == entry_id
    for alias in meta.aliases:
        assert entry_id in [hit.id for hit in search(index, alias).hits[:3]], alias


@pytest.mark.parametrize("entry_id", IDS)
def test_the_commands_of_kb_that_an_entry_names_are_ones(entry_id: str) -> None:
    """Those with arguments: their options exist, their ids too, and what follows --set is taken by a probe of these."""
    for line in re.findall("`kb ([a-z][^`\n]* [^`\n]+)`", CATALOG.get(entry_id).path.read_text(encoding="utf-8")):
        name, *arguments = shlex.split(line)
        given = COMMANDS[name].make_context(name, arguments).params
        probes = [load_probe(str(CATALOG.probe_file(CATALOG.get(each)))) for each in given.get("ids") or ()]
        for setting in given.get("settings") or ():
            assert any(setting.partition("=")[0] in probe.params for probe in probes), line
