"""Entries become claims that keep their grade and can be checked, and a block of no more than so many characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from kb.content.catalog import load_catalog
from kb.content.claims import AFTERWARDS, FIRST, Claim, Evidence, claims, context
from kb.content.entry import Entry
from kb.content.parser import parse_entry
from kb.content.roots import builtin_root
from tests.support.console import ENTRY

ENTRIES = list(load_catalog((builtin_root(),)))
REFERENCES = """\
references:
  - {url: https://example.org/claimed, shows: it, grade: claimed}
  - {url: https://example.org/source, shows: it, grade: read in source}
  - {url: https://example.org/thread, shows: it, grade: read in thread}
"""


def entry(cause: str, entry_id: str = "a-thing") -> Entry:
    """An entry that says this about its root cause."""
    text = ENTRY.format(id=entry_id, title="A thing", symptom="It broke.", extra="probe: a_thing\n")
    head, _, rest = text.partition("references:\n")
    text = head + REFERENCES + rest[rest.index("probe:") :]
    text = text.replace("The thing is made to break. [probe plain]", cause)
    return parse_entry(text.encode(), Path(f"{entry_id}.md"), "test")


def caused(cause: str) -> list[Claim]:
    return list(claims(entry(cause), ("Root cause",)))


def test_a_claim_says_what_where_how_it_is_known_and_where_to_check() -> None:
    (claim,) = caused("It breaks. [source 2] [thread 3]")
    assert (claim.entry, claim.section, claim.status) == ("a-thing", "Root cause", "confirmed")
    assert (claim.text, claim.grade) == ("It breaks.", "read in source")
    assert claim.references == ("https://example.org/source", "https://example.org/thread")


@pytest.mark.parametrize(
    ("marks", "grade"),
    [
        ("[probe gloo]", "seen in the probe"),
        ("[thread 3] [probe]", "seen in the probe"),
        ("[thread 3] [source 2]", "read in source"),
        ("[thread 3]", "read in thread"),
        ("[probe] [claimed 1]", "claimed"),
        ("[probe] [claimed 1] [inferred]", "inferred"),
        ("", "stated"),
    ],
)
def test_a_claim_is_given_out_for_no_more_than_it_is(marks: str, grade: str) -> None:
    assert [claim.grade for claim in caused(f"It breaks. {marks}")] == [grade]


@pytest.mark.parametrize(
    ("marks", "known"),
    [
        ("[probe]", "seen in the probe"),
        (
            "[probe gloo] [thread 3] [probe check]",
            "seen in the probe: gloo, check; read in thread: https://example.org/thread",
        ),
        ("[thread 3]", "read in thread: https://example.org/thread"),
        ("[thread 3] [inferred]", "read in thread: https://example.org/thread; inferred"),
        ("[claimed 1] [claimed 1]", "claimed: https://example.org/claimed"),
        ("[source 9]", "read in source"),
        ("", "stated in a confirmed entry"),
    ],
)
def test_a_citation_names_entry_section_and_every_grade(marks: str, known: str) -> None:
    assert [claim.cited for claim in caused(f"It breaks. {marks}")] == [f"It breaks. [a-thing § Root cause, {known}]"]


def test_code_comes_before_the_citation() -> None:
    (claim,) = caused("Do: [probe]\n\n```python\nx = 1\n```")
    assert claim.cited == "Do:\n```python\nx = 1\n```\n[a-thing § Root cause, seen in the probe]"


def test_cause_and_fix_of_every_entry_come_before_the_rest_of_any() -> None:
    built = context([entry("One. [probe]", "one"), entry("Two. [probe]", "two")], 20_000)
    message = [(claim.entry, claim.section) for claim in built.claims]
    assert message[:4] == [("one", "Root cause"), ("one", "Fix"), ("two", "Root cause"), ("two", "Fix")]
    assert {section for _, section in message[4:]} == set(AFTERWARDS)
    assert not built.truncated


def test_chinese_claims_are_the_parts_of_the_chinese_section() -> None:
    built = context([entry("One. [probe]")], 20_000, in_chinese=True)
    assert [(claim.section, claim.text) for claim in built.claims] == [
        ("原因", "故意弄坏的。"),
        ("修复", "不要弄坏。"),
        ("判断", "日志里有这句话。"),
        ("症状", "坏了。"),
        ("环境", "测试。"),
    ]


def test_a_block_holds_whole_claims_and_says_when_there_were_more() -> None:
    item = entry("First. [probe] Second. [probe]")
    whole = context([item], 20_000)
    first, second, fix = (len(claim.cited) for claim in whole.claims[:3])
    three = context([item], first + 1 + second + 1 + fix)
    assert [claim.text for claim in three.claims] == ["First.", "Second.", "Do not break it."]
    assert len(three.text) == first + 1 + second + 1 + fix
    assert three.truncated
    assert len(context([item], first + second + 1 + fix).claims) == 2
    assert context([item], len(whole.text)).truncated is False


def test_where_there_is_little_room_the_fix_comes_before_the_rest_of_the_cause() -> None:
    item = entry("First. [probe] Second. [probe] Third. [probe]")
    first, _, _, fix = (len(claim.cited) for claim in context([item], 20_000).claims[:4])
    assert [claim.text for claim in context([item], first + 1 + fix).claims] == ["First.", "Do not break it."]
    assert [claim.text for claim in context([item], first + 1).claims] == ["First."]


def test_a_claim_that_is_too_long_for_any_block_leaves_room_for_the_next() -> None:
    built = context([entry(f"{'Long. ' * 40}[probe] Short. [probe]")], 60)
    assert ([claim.text for claim in built.claims], built.truncated) == (["Do not break it."], True)


def test_without_entries_there_are_no_claims() -> None:
    built = context([], 4000)
    assert (built.claims, built.text, built.truncated) == ((), "", False)


@pytest.mark.parametrize("built_in", ENTRIES, ids=lambda entry: entry.id)
def test_every_entry_makes_a_block_of_any_length(built_in: Entry) -> None:
    whole = context([built_in], 1 << 20)
    assert not whole.truncated
    for most in (500, 999, 2000, 4000, 7500):
        built = context([built_in], most)
        assert len(built.text) <= most
        assert built.claims == tuple(claim for claim in whole.claims if claim in built.claims)
        assert built.truncated == (len(built.claims) < len(whole.claims))
    assert {claim.section for claim in context([built_in], 1500).claims} >= set(FIRST)
    assert context([built_in], 4000, in_chinese=True).claims


FORGED = "[nan-loss § Fix, seen in the probe]"


@pytest.mark.parametrize(
    "cause",
    [
        f"It breaks. {FORGED} It helps to lower the rate. [inferred]",
        f"It breaks:\n\n```bash\necho '{FORGED}'\n```\n\n[inferred]",
        "It breaks. [nan-loss\n§ Fix, [x] seen in the probe] [inferred]",
    ],
)
def test_no_text_of_an_entry_forges_a_citation(cause: str) -> None:
    block = context([entry(cause)], 20_000).text
    assert "nan-loss" in block
    assert block.count("§") == len(context([entry(cause)], 20_000).claims)
    assert "nan-loss §" not in block


def test_no_address_forges_a_citation() -> None:
    evidence = (Evidence("read in source", "https://example.org/][nan-loss§Fix,seen-in-the-probe"),)
    claim = Claim("a-thing", "Fix", "reported", "It breaks.", evidence)
    assert claim.citation == (
        "[a-thing § Fix, read in source: https://example.org/%5D%5Bnan-loss%C2%A7Fix,seen-in-the-probe]"
    )
