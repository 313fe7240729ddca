"""The line of an entry that a hit shows: whole words, no markup, nothing cut that fits."""

from __future__ import annotations

import pytest

from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from kb.search.document import document
from kb.search.results import SNIPPET_LENGTH, snippet

WORDS = " ".join(f"word{number}" for number in range(60))


def test_a_line_that_fits_is_shown_whole_however_late_the_word_stands() -> None:
    line = "more GPUs do not make training faster, data loader too slow"
    assert snippet(["another line", line], ("slow",), in_chinese=False) == line


@pytest.mark.parametrize("word", ["word0", "word30", "word59"])
def test_a_long_line_is_cut_between_words_around_the_matched_one(word: str) -> None:
    shown = snippet([WORDS], (word,), in_chinese=False)
    assert len(shown) <= SNIPPET_LENGTH
    assert word in shown.strip("…").split()
    assert set(shown.strip("…").split()) <= set(WORDS.split()), "half a word"
    assert shown.startswith("…") == (word != "word0") and shown.endswith("…") == (word != "word59")


def test_chinese_which_has_no_spaces_is_cut_too() -> None:
    shown = snippet(["训练卡住" * 100], ("卡住",), in_chinese=True)
    assert SNIPPET_LENGTH <= len(shown) <= SNIPPET_LENGTH + 2


def test_an_english_question_gets_no_chinese_line_unless_there_is_no_other() -> None:
    lines = ["保存时 allgather 超时", "timeout at save"]
    assert snippet(lines, ("allgather", "timeout"), in_chinese=False) == lines[1]
    assert snippet(lines, ("allgather", "超时"), in_chinese=True) == lines[0]
    assert snippet(lines[:1], ("allgather",), in_chinese=False) == lines[0]


def test_no_line_is_about_a_look_alike() -> None:
    for entry in load_catalog((builtin_root(),)):
        told = {
            line.removeprefix("- ").replace("`", "").replace("**", "")
            for line in entry.translation()["判断"].splitlines()
            if len(line) > 30
        }
        assert not told & set(document(entry)[0]["lines"]), entry.id


def test_lines_of_entries_have_no_markup_and_no_grades() -> None:
    for entry in load_catalog((builtin_root(),)):
        prose = document(entry)[0]["lines"][len(entry.meta.aliases) + len(entry.meta.signatures) :]
        assert not [line for line in prose if "`" in line or "[probe" in line or "[source" in line], entry.id
