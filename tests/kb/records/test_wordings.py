"""The text of a signature is looked up piece by piece, as a program has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kb.content.roots import Root
from kb.errors import UsageError
from kb.records.wordings import FILE, SCHEMA, is_worded, pieces, record, wordings

WATCHDOG = r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=\d+"
EITHER = r"Timed out waiting \d+ms|Application timeout caused pair closure"


def test_a_text_is_cut_where_values_are_put_in() -> None:
    assert pieces(WATCHDOG) == (("Watchdog caught collective operation timeout", "WorkNCCL", "SeqNum"),)
    assert pieces(EITHER) == (("Application timeout caused pair closure",), ("Timed out waiting",))
    assert pieces(r"can't open \S+") == (("can't open",),)
    assert pieces(r"a=\d+") == ()


def test_words_that_a_program_has_from_elsewhere_are_cut_out_where_its_own_say_enough() -> None:
    assert pieces(r"Call to ibv_alloc_pd failed with error Cannot allocate memory") == (
        ("Call to ibv_alloc_pd failed with error",),
    )
    assert pieces(r"Got async event: port error") == (("Got async event",),)
    assert pieces(r"Failed to open the port: No such device or address") == (("Failed to open the port",),)
    assert pieces(r"RuntimeError: Address already in use") == (("RuntimeError", "Address already in use"),)


def test_a_release_has_the_wording_when_it_has_all_pieces_of_one_text() -> None:
    assert is_worded(WATCHDOG, {"Watchdog caught collective operation timeout", "WorkNCCL", "SeqNum"})
    assert not is_worded(WATCHDOG, {"Watchdog caught collective operation timeout", "SeqNum"})
    assert is_worded(EITHER, {"Timed out waiting"})
    assert not is_worded(r"a=\d+", {"a="}), "too short to look for"


def test_a_record_names_the_releases_that_were_searched_and_those_that_have_a_text(tmp_path: Path) -> None:
    present = {
        ("torch", "2.10.0"): {"Timed out waiting"},
        ("torch", "2.9.1"): set(),
        ("peft", "0.20.0"): set(),
    }
    (tmp_path / FILE).write_text(json.dumps(record(present, [WATCHDOG, EITHER]).to_json(SCHEMA, "2026-11-22")))
    roots = [Root("a root", tmp_path, tmp_path, tmp_path), Root("another", tmp_path, tmp_path, tmp_path / "none")]
    known = wordings(roots)
    assert known.searched == {"peft": ["0.20.0"], "torch": ["2.9.1", "2.10.0"]}
    assert known.found == {EITHER: {"torch": ["2.10.0"]}}


def test_an_invalid_record_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(UsageError, match=r"wordings\.json is not a valid record"):
        wordings([Root("a root", tmp_path, tmp_path, tmp_path)])
