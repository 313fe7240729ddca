"""`kb show`: what one needs beside a dead job, everything with --all, and code that can be copied at any width."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pkgutil import resolve_name
from statistics import median

import pytest

from kb.content.catalog import Catalog, load_catalog
from kb.content.entry import Entry
from kb.content.parser import markdown_parser
from kb.content.roots import builtin_root
from tests.support.console import ContentRoot, Kb

ENTRY = "checkpoint-save-allgather-timeout"
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})[^\n]*\n(?P<code>.*?)^ *(?P=fence) *$", re.MULTILINE | re.DOTALL)
ESCAPE = re.compile(r"\x1b\[[\d;]*m")
# Where a table does not fit, each row repeats its headings: words of tables are not compared.
FENCE_OR_TABLE = re.compile(rf"{FENCE.pattern}|(?:^ *\|.*\n?)+", FENCE.flags)
WORD = re.compile(r"[\w./][\w./:-]*", re.ASCII)
WIDTHS = (40, 80, 120)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog([builtin_root()])


def pages(entry: Entry, catalog: Catalog) -> Iterator[str]:
    """What `kb show` renders of an entry: short and whole, in English and in Chinese."""
    short, whole = (resolve_name(f"kb.cli.terminal.entry_page:{name}_page") for name in ("short", "whole"))
    for lang in ("en", "zh"):
        yield short(entry, lang, (), catalog.entries)
        yield whole(entry, lang, ())


def rendered(source: str, width: int, *, has_color: bool = False) -> str:
    text: str = resolve_name("kb.cli.terminal.markdown:Renderer")(width, has_color).render(source)
    return ESCAPE.sub("", text)


@pytest.fixture
def parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source is parsed once for all widths."""
    parser = markdown_parser()
    monkeypatch.setattr(parser, "parse", lru_cache(1)(parser.parse))
    monkeypatch.setattr(resolve_name("kb.cli.terminal.markdown"), "_parser", lambda: parser)


def code_lines(markdown: str) -> list[str]:
    """The lines of all blocks of code, without the indentation of the list that they are in."""
    return [
        re.sub(f"^ {{0,{len(block['indent'])}}}", "", line)
        for block in FENCE.finditer(markdown)
        for line in block["code"].splitlines()
    ]


def missing(code: list[str], text: str) -> list[str]:
    """Lines of code that are no lines of the text, in their order: each search goes on where the last one ended."""
    lines = iter(text.splitlines())
    return [line for line in code if line not in lines]


@pytest.mark.slow
@pytest.mark.usefixtures("parsed_once")
def test_at_every_width_code_is_as_it_was_written_and_prose_fits_with_no_word_broken(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line of code is one line, from its first column: what is copied is what was written."""
    for entry in catalog:
        source = FENCE_OR_TABLE.sub(
            lambda block: block[0] if block["fence"] else "", "\n\n".join(pages(entry, catalog))
        )
        code = code_lines(source)
        words = WORD.findall(FENCE.sub("", rendered(source, 10_000)))
        for width in WIDTHS:
            text = rendered(source, width)
            assert not missing(code, text), (entry.id, width)
            prose = FENCE.sub("", text)
            assert WORD.findall(prose) == words, (entry.id, width)
            long = [line for line in prose.splitlines() if len(line) > width and line.strip() not in source]
            assert not long or width == min(WIDTHS), (entry.id, width, long)
        with monkeypatch.context() as environment:
            environment.delenv("NO_COLOR")
            environment.setenv("FORCE_COLOR", "1")
            assert not missing(code, rendered(source, 80, has_color=True)), (entry.id, "in colour")


def test_words_behind_code_that_is_wider_than_half_a_line_fill_their_line() -> None:
    code = "`python -m torch.distributed.run --nproc-per-node 1 train.py`"
    text = f"Lightning works with both. In a debugger give it {code}. With torch before 1.9 `torch.distributed.launch` does."
    lines = rendered(text, 80).splitlines()
    assert lines[1] == "torch.distributed.run --nproc-per-node 1 train.py`. With torch before 1.9", lines


def test_the_page_beside_a_dead_job_is_short(catalog: Catalog) -> None:
    short = resolve_name("kb.cli.terminal.entry_page:short_page")
    sources = [short(entry, "en", ["GPU arms: never run on hardware"], catalog.entries) for entry in catalog]
    for width, usual, most in ((100, 75, 105), (80, 85, 120)):
        lengths = [len(rendered(source, width).splitlines()) for source in sources]
        assert median(lengths) <= usual
        assert max(lengths) <= most


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_of_many_fixes_the_first_are_whole_and_the_rarer_ones_named(kb: Kb, catalog: Catalog, lang: str) -> None:
    entry = catalog.get("container-without-gpu")
    page, section = (
        kb("show", entry.id, "--lang", lang).out,
        kb("show", entry.id, "--section", "fix", "--lang", lang).out,
    )
    numbers = re.findall(r"^(\d+)\. ", section, re.MULTILINE)
    fixes = re.split(r"^## (?:Fix|修复)\n|^## ", page, flags=re.MULTILINE)
    named = re.findall(r"^(\d+)\. ", next(part for part in fixes if "docker run --gpus all" in part), re.MULTILINE)
    assert named == numbers, "each fix is named"
    assert "docker run --gpus all" in page, "the first is whole"
    assert "SELinux" in page and "1.18.2" not in page, "a detail of a later one is not there"
    rest = re.search(r"(?:Fix|修复) (\d+)-(\d+) .*`kb (show [^`]*)`", page.replace("\n", " "))
    assert rest and rest[2] == numbers[-1]
    assert kb(*rest[3].split()).out == section


def test_the_name_of_a_fix_ends_neither_in_code_nor_in_bold_type(catalog: Catalog) -> None:
    name = resolve_name("kb.cli.terminal.entry_page:FIX")
    for entry in catalog:
        for text in (entry.section("Fix"), entry.translation().get("修复", "")):
            for match in filter(None, map(name.match, re.split(r"\n(?=\d+\. )", text))):
                prose = re.sub(r"`[^`]*`", "", match[0])
                assert "`" not in prose and prose.count("**") % 2 == 0, (entry.id, match[0])


def test_the_short_page_has_cause_how_to_tell_fix_and_the_command_that_verifies_it(kb: Kb) -> None:
    page = kb("show", ENTRY)
    assert page.code == 0
    assert re.findall(r"^## (.+)", page.out, re.MULTILINE) == ["Cause", "How to tell", "Fix", "Verify on this machine"]
    assert f"`kb verify {ENTRY}`\n" in page.out
    assert page.out.splitlines()[-1].startswith("`--all` adds ")
    others = "Not this: `checkpoint-save-race`, `slow-rank-exceeds-timeout`, `fsdp-save-host-oom`."
    assert others in " ".join(page.out.split())
    assert not re.search(r"\[(probe|source|thread)", page.out), "no mark without the reference that it points to"
    assert "[inferred]" in page.out, "and what nobody checked is marked"
    assert all(line == line.rstrip() for line in page.out.splitlines())


def test_all_shows_every_section_and_every_reference(kb: Kb, catalog: Catalog) -> None:
    page = kb("show", ENTRY, "--all").out
    sections = [heading for heading in catalog.get(ENTRY).sections if heading != "中文"]
    assert re.findall(r"^## (.+)", page, re.MULTILINE) == [*sections, "References", "Verify on this machine"]
    assert all(page.count(f"{reference.url}\n") == 1 for reference in catalog.get(ENTRY).meta.references)
    assert "--all" not in page


def test_chinese_is_shown_for_who_asks(kb: Kb) -> None:
    short, whole = kb("show", ENTRY, "--lang", "zh").out, kb("show", ENTRY, "--lang", "zh", "--all").out
    assert re.findall(r"^## (.+)", short, re.MULTILINE) == ["症状", "原因", "修复", "判断", "在本机验证"]
    assert re.findall(r"^## (.+)", whole, re.MULTILINE) == [
        "症状",
        "环境",
        "原因",
        "修复",
        "判断",
        "参考",
        "在本机验证",
    ]
    assert "中文" not in kb("show", ENTRY, "--all").out


def test_the_file_and_the_document_are_whole(kb: Kb, catalog: Catalog) -> None:
    entry = catalog.get(ENTRY)
    assert kb("show", ENTRY, "--markdown").out == entry.path.read_text()
    document = kb("show", ENTRY, "--json").json
    assert document["schema"] == "kb.show.v1"
    assert document["sections"] == {heading: section.text for heading, section in entry.sections.items()}
    assert document["probe"] == ENTRY.replace("-", "_")


def test_one_section_is_shown_with_code_that_can_be_copied(kb: Kb) -> None:
    shown = kb("show", "host-oom-killed", "--section", "FIX").out
    assert shown.startswith("## Fix\n")
    assert "\nstate = torch.load(path, map_location=" in shown
    assert "Symptom" not in shown
    ended = kb("show", "host-oom-killed", "--section", "cure")
    assert ended.code == 2
    assert "Root cause" in ended.err


def test_a_part_of_an_id_leads_to_the_family(kb: Kb, catalog: Catalog) -> None:
    ended = kb("show", "oom", "--json")
    assert ended.code == 2
    hint = ended.json["error"]["hint"]
    assert [entry_id for entry_id in catalog.entries if entry_id.startswith("oom-") and entry_id not in hint] == []
    assert "host-oom-killed" in hint


def test_what_is_about_other_entries_is_left_out_of_the_short_page(kb: Kb, content: ContentRoot) -> None:
    """Their ids stay; a look-alike log goes with the words that introduce it."""
    content.entry("other-thing")
    path = content.entry("some-thing")
    text = "It says so.\n\n- Code 7: this.\n- Code 8: see `other-thing`.\n- It looks like this:\n\n```log look-alike"
    path.write_text(path.read_text().replace("It says so.\n\n```log look-alike", text))
    page = kb("show", "some-thing").out
    assert "It says so." in page
    assert "- Code 7: this.\n" in page
    assert "Not this: `other-thing`." in page
    assert not any(words in page for words in ("Code 8", "looks like", "another thing broke"))
    assert "another thing broke: code 42" in kb("show", "some-thing", "--all").out
