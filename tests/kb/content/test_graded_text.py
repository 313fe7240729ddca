"""The Markdown of a section becomes texts that end where their marks do; nothing is lost and nothing cut."""

from __future__ import annotations

import re
from textwrap import dedent

import pytest

from kb.content.catalog import load_catalog
from kb.content.entry import CHINESE_PARTS, Entry
from kb.content.graded_text import GradedText, Mark, graded_texts
from kb.content.grades import MARK
from kb.content.roots import builtin_root

PART = re.compile(rf"^### ({'|'.join(CHINESE_PARTS)})$", re.MULTILINE)
PROBE, SOURCE, THREAD = Mark("probe", 0), Mark("source", 2), Mark("thread", 3)
ENTRIES = list(load_catalog((builtin_root(),)))


def texts(markdown: str) -> list[str]:
    return [item.text for item in graded_texts(dedent(markdown))]


def test_a_text_reaches_up_to_its_marks_over_several_sentences_and_lines() -> None:
    assert graded_texts("It breaks. So does\nthat. [probe] [source 2]\nThat holds, too. [thread 3]") == [
        GradedText("It breaks. So does that.", (PROBE, SOURCE)),
        GradedText("That holds, too.", (THREAD,)),
    ]


def test_what_no_mark_ends_is_a_text_of_its_own() -> None:
    assert graded_texts("Known. [probe] Only stated.\n\nAnother paragraph.") == [
        GradedText("Known.", (PROBE,)),
        GradedText("Only stated.", ()),
        GradedText("Another paragraph.", ()),
    ]


@pytest.mark.parametrize(
    "sentence",
    [
        "It is shown [probe], and then {}",
        "It converts; [probe] fatal when {}",
        "(3) it holds the lock [probe]；(4) {}",
        "Either [probe]: {}",
    ],
)
def test_marks_within_a_sentence_do_not_end_its_text(sentence: str) -> None:
    (item,) = graded_texts(sentence.format("it goes on. [source 2]"))
    assert item.text == " ".join(sentence.replace(" [probe]", "").format("it goes on.").split())
    assert item.marks == (PROBE, SOURCE)


def test_a_sentence_that_begins_with_a_small_name_is_a_sentence() -> None:
    assert texts("Apex refuses. [source 2] trl does not. [thread 3]") == ["Apex refuses.", "trl does not."]


def test_what_looks_like_a_mark_in_code_is_code() -> None:
    assert graded_texts("The line `[probe] ok` and ``a ` [thread 3]`` are printed. [source 2]") == [
        GradedText("The line `[probe] ok` and ``a ` [thread 3]`` are printed.", (SOURCE,))
    ]
    assert texts("```log\nfound [probe] here\n```") == ["```log\nfound [probe] here\n```"]


def test_items_keep_their_numbers_and_a_lead_in_goes_with_the_first() -> None:
    assert texts(
        """\
        Three ways:

        1. **One.** [probe]
        2. Two, of which there are:
           - this [source 2]
           - that
        3. Three. [thread 3]
        """
    ) == ["Three ways: 1. **One.**", "2. Two, of which there are: this", "that", "3. Three."]


def test_code_stays_whole_with_the_text_before_it() -> None:
    code = "```python\nx = 1\n\n# [a] # [b]\n```"
    item = (
        "1. Do this. [probe]\n\n"
        + "\n".join(f"   {line}" for line in code.splitlines())
        + "\n\n   And that. [source 2]"
    )
    assert graded_texts(item) == [GradedText(f"1. Do this.\n{code}", (PROBE,)), GradedText("And that.", (SOURCE,))]
    assert texts(f"Like this:\n\n{code}\n\nOr not. [probe]") == [f"Like this:\n{code}", "Or not."]


def test_a_paragraph_of_an_item_has_the_marks_at_the_end_of_the_item() -> None:
    assert graded_texts("- First part.\n\n  Second part. [probe]") == [GradedText("First part. Second part.", (PROBE,))]


def test_a_row_is_understood_without_its_table() -> None:
    assert graded_texts("| trainer | fixed in |\n|---|---|\n| ORPO | 0.17 [source 2] |\n| SFT | |\n") == [
        GradedText("trainer: ORPO; fixed in: 0.17", (SOURCE,)),
        GradedText("trainer: SFT", ()),
    ]


def words(markdown: str) -> list[str]:
    return re.findall(r"\w+", markdown)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_nothing_of_an_entry_is_lost_or_added_but_its_marks(entry: Entry) -> None:
    for section in entry.sections.values():
        if not re.search(r"^ *\|", section.text, re.MULTILINE):  # rows repeat the head of their table
            message = " ".join(item.text for item in graded_texts(section.text))
            assert words(message) == words(PART.sub("", MARK.sub("", section.text)))
