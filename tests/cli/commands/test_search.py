"""`kb search`, `kb list`, `kb index` as a reader meets them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.console import ContentRoot, Kb

ENTRY = "checkpoint-save-allgather-timeout"


def test_a_search_shows_title_cause_reason_and_the_command_that_proves_it(kb: Kb) -> None:
    ended = kb("search", "ALLGATHER timeout save")
    assert ended.code == 0
    first = ended.out.split("\n\n")[0]
    assert "1. All-gather times out while a sharded model is saved" in first
    assert "cause    Saving a sharded model is a collective" in first
    assert "matched  " in first
    assert f"kb verify {ENTRY}" in first
    assert "\x1b" not in ended.out, "no colour where there is no terminal"


def test_words_need_no_quotes(kb: Kb) -> None:
    quoted = kb("search", "ALLGATHER timeout save", "--json").json
    plain = kb("search", "ALLGATHER", "timeout", "save", "--json").json
    assert [hit["id"] for hit in quoted["hits"]] == [hit["id"] for hit in plain["hits"]]


def test_a_typo_is_corrected_and_said(kb: Kb) -> None:
    document = kb("search", "NCLL timout chekpoint save", "--json").json
    assert document["hits"][0]["id"] == ENTRY
    assert document["did_you_mean"] == "nccl timeout checkpoint save"


def test_a_pasted_log_line_says_that_a_signature_matched(kb: Kb) -> None:
    line = (
        "Saving model checkpoint\n[Rank 5] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=11, OpType=_ALLGATHER_BASE, Timeout(ms)=600000)"
    )
    hit = kb("search", line, "--json").json["hits"][0]
    assert hit["id"] == ENTRY
    assert hit["signature"]
    assert "a signature of this entry matches" in kb("search", line).out


def test_a_question_that_no_entry_answers_is_said_to_have_none(kb: Kb) -> None:
    for question, kind, said, code in (
        ("ALLGATHER timeout save", "answer", "1. All-gather", 0),
        ("nccl timeout multi node training", "related", "No entry is clearly about this.", 0),
        ("my job hangs", "unknown", "Many entries fit these words", 1),
        ("bread rises too slowly in the oven", "unknown", "kb does not know this.", 1),
        ("HCCL error on the NPU", "unknown", "kb is not about this.", 1),
    ):
        document = kb("search", question, "--json")
        assert (document.json["kind"], document.code) == (kind, code)
        assert document.json["answered"] is (kind == "answer")
        printed = kb("search", question)
        assert said in printed.out
        assert printed.code == code


def test_a_gap_has_what_to_look_at_in_the_language_of_the_question(kb: Kb) -> None:
    (first, *_) = kb("search", "训练卡住了，换了机器也一样", "--json").json["triage"]
    assert "rank" in first["ask"]
    assert any("\u4e00" <= character <= "\u9fff" for character in first["ask"])
    assert kb("search", "ALLGATHER timeout save", "--json").json["triage"] == []


def test_an_outcome_shows_few_of_the_entries_it_points_to_and_counts_the_others(kb: Kb) -> None:
    """A list of sixteen names is not read; the document has all of them."""
    pointed = [
        outcome["points_to"]
        for observation in kb("search", "training crashed", "--json").json["triage"]
        for outcome in observation["outcomes"]
    ]
    longest = max(pointed, key=len)
    shown = " ".join(kb("search", "training crashed").out.split())
    assert len(longest) > 5
    assert f"{', '.join(longest[:4])}, and {len(longest) - 4} more" in shown


def test_a_question_may_begin_with_dashes(kb: Kb) -> None:
    assert kb("search", "--master_port=29500: address already in use").out.startswith("1. EADDRINUSE")
    assert kb("search", "--no-such-option").code == 2


def test_hits_keep_their_contract(kb: Kb) -> None:
    document = kb("search", "ALLGATHER timeout save", "--json", "--limit", "1").json
    assert document["schema"] == "kb.search.v1"
    assert document["ok"] is True
    (hit,) = document["hits"]
    assert {"id", "title", "score", "origin", "matched", "snippet"} <= hit.keys()


@pytest.mark.usefixtures("few_entries")
def test_the_first_search_builds_its_index_and_says_no_more_than_that(kb: Kb, home: Path) -> None:
    shutil.rmtree(home / "cache")
    output = kb("search", "ALLGATHER timeout save").err
    assert all(line.startswith("kb: building the search index of") for line in output.splitlines()), output
    (directory,) = (home / "cache" / "kb" / "index").iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700


def test_list_filters_by_tag_framework_and_status(kb: Kb) -> None:
    def ids(*options: str) -> set[str]:
        return {entry["id"] for entry in kb("list", "--json", *options).json["entries"]}

    everything = ids()
    assert len(everything) >= 14
    assert ENTRY in ids("--tag", "checkpoint")
    assert ids("--tag", "checkpoint") < everything
    assert ids("--tag", "checkpoint", "--tag", "fsdp") <= ids("--tag", "fsdp")
    assert ENTRY in ids("--framework", "fsdp")
    assert ENTRY in ids("--status", "confirmed")
    assert ids("--framework", "fsdp", "--framework", "deepspeed") > ids("--framework", "fsdp")
    assert ids("--tag", "FSDP") == ids("--tag", "fsdp"), "as a search takes it"
    assert kb("list", "--tag", "fsdp", "--status", "withdrawn").code == 1


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--tag", "checkpont"], "nearest: checkpoint"),
        (["--framework", "transfomers"], "nearest: transformers"),
        (["--status", "confrmed"], "confirmed, disputed, reported, withdrawn"),
    ],
)
def test_a_list_of_what_no_entry_has_is_a_usage_error_with_the_nearest(kb: Kb, options: list[str], hint: str) -> None:
    ended = kb("list", "--json", *options)
    assert ended.code == 2
    assert hint in ended.json["error"]["hint"]


@pytest.mark.usefixtures("few_entries")
def test_a_withdrawn_entry_answers_nothing_and_is_still_listed_when_asked(kb: Kb, content: ContentRoot) -> None:
    path = content.entry("old-story", has_probe=False, symptom="The zirconium broke.")
    path.write_text(path.read_text().replace("status: confirmed", "status: withdrawn"))
    assert kb("search", "zirconium", "--json").json["hits"] == []
    assert [entry["id"] for entry in kb("list", "--status", "withdrawn", "--json").json["entries"]] == ["old-story"]
    assert kb("show", "old-story", "--json").json["status"] == "withdrawn"


@pytest.mark.usefixtures("few_entries")
def test_a_private_root_is_searched_and_named_as_origin(kb: Kb, tmp_path: Path) -> None:
    content = ContentRoot(tmp_path / "team")
    content.entry("team-incident", has_probe=False, symptom="The zirconium broke.")
    hit = kb("search", "zirconium", "--json", "--root", content.path).json["hits"][0]
    assert hit["id"] == "team-incident"
    assert hit["origin"] == str(content.path)
    assert f"from {content.path}" in kb("search", "zirconium", "--root", content.path).out


@pytest.mark.parametrize("path", ["/does/not/exist", "/tmp"])
def test_a_folder_that_is_no_content_root_is_bad_input(kb: Kb, path: str) -> None:
    ended = kb("search", "timeout", "--json", "--root", path)
    assert ended.code == 2
    assert "not a content root" in ended.json["error"]["message"]


@pytest.mark.usefixtures("few_entries")
def test_index_can_be_built_by_hand(kb: Kb, home: Path) -> None:
    built = kb("index", "--json").json
    assert built["entries"] == 3
    assert built["path"].startswith(str(home))
    assert kb("index", "--force").code == 0
