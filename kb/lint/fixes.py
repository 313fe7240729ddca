"""Rules for advice: a fix is proved or says why not, code can be pasted, and "does not help" was tried."""

from __future__ import annotations

import ast
import configparser
import json
import re
import tomllib
from collections.abc import Callable, Iterator

import yaml

from kb.content.actions import action
from kb.content.grades import MARK
from kb.diagnose.chinese_step import chinese_items
from kb.lint.body import Block, Kind
from kb.lint.rule import EntryFile, EntryRule, EntryText, Remark, TextRule
from kb.search.document import tells

ADVISING = ("How to tell", "Fix")
NUMBERED = re.compile(r"\s*\d+[.)] ")
UNPROVED = re.compile(r"\bNot proved here: \w")
NEGATIVE = re.compile(
    r"\b(never|always|(do|does) not help|do(es)? nothing|no effect|in vain|useless"
    r"|(is|are) (not|no) (a |the )?(fix|cause|cure|remedy))\b",
    re.IGNORECASE,
)
LANGUAGES = ("bash", "sh", "python", "json", "yaml", "toml", "ini", "cpp", "text", "log", "log look-alike")


def unproved_fix(file: EntryText) -> Iterator[Remark]:
    """Each numbered item of Fix has a mark `[probe NAME]`, or says "Not proved here: " and why."""
    for line, prose, _ in _fixes(file):
        names_arm = any(mark["experiment"] for mark in MARK.finditer(prose))
        if not names_arm and not UNPROVED.search(prose):
            yield line, 'name the experiment that shows this, `[probe NAME]`, or say "Not proved here: " and why'


def untried_code(file: EntryFile) -> Iterator[Remark]:
    """Python code in an item of Fix is in the probe, statement by statement, or the item says "Not proved here: "."""
    if file.probe is None:
        return
    tried = _statements(file.probe.source)
    for _, prose, codes in _fixes(file):
        if UNPROVED.search(prose):
            continue
        for code in codes:
            for statement in _parsed(code.text) if code.tag == "python" else ():
                if not isinstance(statement, ast.Import | ast.ImportFrom) and ast.dump(statement) not in tried:
                    text = ast.unparse(statement).partition("\n")[0]
                    yield (
                        code.line + statement.lineno,
                        f'the probe does not run {text!r}; if it cannot, say "Not proved here: "',
                    )


def code_language(file: EntryText) -> Iterator[Remark]:
    """Code in How to tell and Fix names its language."""
    for block in file.blocks(Kind.CODE, *ADVISING):
        if block.tag not in LANGUAGES:
            yield block.line, f"{block.tag or 'nothing'!r} is not one of {', '.join(LANGUAGES)}"


def broken_code(file: EntryText) -> Iterator[Remark]:
    """Code in How to tell and Fix is valid in its language: Python, JSON, YAML, TOML, INI."""
    for block in file.blocks(Kind.CODE, *ADVISING):
        try:
            PARSERS.get(block.tag, str)(block.text)
        except (SyntaxError, ValueError, yaml.YAMLError, configparser.Error) as error:
            number = getattr(error, "lineno", None) or 1
            yield block.line + number, f"this is not {block.tag}: {error}"


def no_action(file: EntryFile) -> Iterator[Remark]:
    """An item of How to tell, and of 判断, says what to do, because kb diagnose quotes it; or the entry has a probe."""
    line = next((block.line for block in file.blocks(Kind.HEADING, "How to tell")), 1)
    for items in (tells(file.entry), chinese_items(file.entry)):
        if items and not file.meta.probe and not any(map(action, items)):
            yield line, f"no item says what to do, such as to run or compare something: {items[0][:60]!r}"
            return


def inferred_negative(file: EntryText) -> Iterator[Remark]:
    """A sentence that something never happens or does not help is not merely inferred: somebody tried or read it."""
    for block in file.blocks(Kind.PROSE, "Root cause", *ADVISING):
        start = 0
        for marks in re.finditer(rf"(?:\s*{MARK.pattern})+", block.text):
            text, start = block.text[start : marks.start()], marks.end()
            words = {mark["probe"] or mark["word"] for mark in MARK.finditer(marks[0])}
            if (negative := NEGATIVE.search(text)) and words == {None}:
                line = block.line + block.text.count("\n", 0, marks.start())
                yield line, f"{negative[0]!r} is inferred: find who tried it, try it in the probe, or say less"


def _fixes(file: EntryText) -> Iterator[tuple[int, str, tuple[Block, ...]]]:
    """The line, prose and code of each numbered item of Fix; of the whole section if it has no items."""
    lines = file.source.splitlines()
    parts = [block for block in file.body if block.section == "Fix" and block.kind is not Kind.HEADING]
    items = sorted({block.item for block in parts if block.item and NUMBERED.match(lines[block.item - 1])})
    for start in items or sorted({block.line for block in parts})[:1]:
        members = [block for block in parts if block.item == start or not items]
        codes = tuple(block for block in members if block.kind is Kind.CODE)
        yield start, " ".join(block.text for block in members if block.kind is not Kind.CODE), codes


def _statements(source: str) -> frozenset[str]:
    """Every statement of a file, without positions, for comparison."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return frozenset()  # `broken_probe` reports it
    return frozenset(ast.dump(node) for node in ast.walk(tree) if isinstance(node, ast.stmt))


def _parsed(code: str) -> list[ast.stmt]:
    try:
        return ast.parse(code).body
    except (SyntaxError, ValueError):
        return []  # `broken_code` reports it


def _read_ini(text: str) -> None:
    configparser.ConfigParser(interpolation=None, strict=False).read_string(text)


def _read_yaml(text: str) -> None:
    list(yaml.safe_load_all(text))


PARSERS: dict[str, Callable[[str], object]] = {
    "python": ast.parse,
    "json": json.loads,
    "yaml": _read_yaml,
    "toml": tomllib.loads,
    "ini": _read_ini,
}
TEXT_RULES: tuple[TextRule, ...] = (unproved_fix, code_language, broken_code, inferred_negative)
RULES: tuple[EntryRule, ...] = (*TEXT_RULES, untried_code, no_action)
