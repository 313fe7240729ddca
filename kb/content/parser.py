"""Parses the bytes of an entry file into an `Entry`, or raises a `ContentError` with file, line and rule.

markdown-it-py with the front-matter plugin finds the parts, PyYAML's safe loader reads the front matter, and the
pydantic model in `kb.content.entry` validates it. Whether an entry is *good* is for `kb.lint` to decide.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.front_matter import front_matter_plugin
from pydantic import ValidationError

from kb.content.entry import Entry, FrontMatter, Section
from kb.errors import ContentError

MAYBE_ANCHOR = re.compile(r"(?<![^\s\[\]{},:?-])[&*]\S")  # if nothing matches, the slow, exact check is not needed
LARGEST = 1 << 20  # bytes
DEEPEST = 50  # levels of the front matter
NESTING = "[{-?:"  # each level needs one of these; with fewer than MAYBE_DEEP, the exact check is not needed
MAYBE_DEEP = 2000
Lines = dict[tuple[str | int, ...], int]


def read_entry(path: Path, origin: str) -> Entry:
    """Read and parse an entry file. Raises `ContentError`; the rule names are those of `kb lint`."""
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise ContentError(path, 1, "too-large", f"{size} bytes; the limit is {LARGEST}")
        data = path.read_bytes()
    except OSError as error:
        raise ContentError(path, 1, "unreadable", error.strerror or str(error)) from error
    return parse_entry(data, path, origin)


def parse_entry(data: bytes, path: Path, origin: str) -> Entry:
    """Parse `data`; `path` is used in messages and to check that the id equals the file stem."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ContentError(path, line, "not-utf8", f"byte {data[error.start]:#04x} is not UTF-8") from None
    tokens = _blocks().parse(text)
    if not tokens or tokens[0].type != "front_matter":
        raise ContentError(path, 1, "no-front-matter", "an entry starts with a YAML block between two `---` lines")
    values, lines = _load_yaml(tokens[0].content, path)
    meta = _validate(values, lines, path)
    if meta.id != path.stem:
        raise ContentError(path, lines.get(("id",), 1), "id-is-not-file-name", f"id {meta.id!r}, file {path.name!r}")
    return Entry(
        meta=meta,
        sections=_sections(tokens, text.splitlines(), path),
        logs=_fenced(tokens, "log"),
        look_alikes=_fenced(tokens, "log look-alike"),
        path=path,
        origin=origin,
        digest=hashlib.sha256(data).hexdigest(),
        lines=lines,
    )


def front_matter_problems(data: bytes, path: Path) -> tuple[ContentError, ...]:
    """All problems of the front matter; `parse_entry` raises only the first."""
    tokens = _blocks().parse(data.decode("utf-8", errors="replace"))
    if not tokens or tokens[0].type != "front_matter":
        return ()
    try:
        values, lines = _load_yaml(tokens[0].content, path)
        FrontMatter.model_validate(values)
    except ContentError as problem:
        return (problem,)
    except ValidationError as error:
        return _problems(error, lines, path)
    return ()


def markdown_parser() -> MarkdownIt:
    """CommonMark with tables and front matter; raw HTML stays text."""
    return MarkdownIt("commonmark", {"html": False}).enable("table").use(front_matter_plugin)


@cache
def _blocks() -> MarkdownIt:
    """The same parser without inline parsing, which halves the time to read an entry."""
    return markdown_parser().disable("inline")


def text_blocks(text: str) -> Iterator[tuple[int, int, str | None]]:
    """The first line and end of each block of a section, and the info string of code; each list item is a block."""
    for token in _blocks().parse(text):
        is_list = token.type in ("bullet_list_open", "ordered_list_open")
        if token.map and ((token.level == 0 and not is_list) or (token.level == 1 and token.type == "list_item_open")):
            yield token.map[0], token.map[1], token.info if token.type in ("fence", "code_block") else None


def _line(token: Token) -> int:
    return (token.map[0] if token.map else 0) + 1


def _fenced(tokens: list[Token], info: str) -> tuple[Section, ...]:
    """The fenced blocks with this info string."""
    fences = (token for token in tokens if token.type == "fence" and " ".join(token.info.split()) == info)
    return tuple(Section(token.content, _line(token) + 1) for token in fences)


def _sections(tokens: list[Token], lines: list[str], path: Path) -> dict[str, Section]:
    """The source of the text under each level-two heading, without the heading."""
    heads: list[tuple[str, int]] = []
    for token, inline in pairwise(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            heads.append((inline.content.strip(), _line(token)))
    sections: dict[str, Section] = {}
    for (heading, start), (_, end) in pairwise([*heads, ("", len(lines) + 1)]):
        if heading in sections:
            raise ContentError(path, start, "duplicate-section", f"two sections are called {heading!r}")
        text = "\n".join(lines[start : end - 1])
        blank = len(text) - len(text.lstrip("\n"))
        sections[heading] = Section(text.strip(), start + 1 + blank)
    return sections


def _validate(values: Any, lines: Lines, path: Path) -> FrontMatter:
    try:
        return FrontMatter.model_validate(values)
    except ValidationError as error:
        raise _problems(error, lines, path)[0] from None


def _problems(error: ValidationError, lines: Lines, path: Path) -> tuple[ContentError, ...]:
    return tuple(_problem(detail["loc"], detail["msg"], lines, path) for detail in error.errors(include_url=False))


def _problem(where: tuple[int | str, ...], message: str, lines: Lines, path: Path) -> ContentError:
    line = next((lines[where[:n]] for n in range(len(where), 0, -1) if where[:n] in lines), 1)
    name = ".".join(str(part) for part in where)
    return ContentError(path, line, "front-matter", f"{name}: {message.removeprefix('Value error, ')}")


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast, if PyYAML has it


def _load_yaml(text: str, path: Path) -> tuple[Any, Lines]:
    """The front matter as plain values, and the line in the file of every key and list item."""
    try:
        _refuse_bombs(text)
        loader = _LOADER(text)
        try:
            node = loader.get_single_node()
            lines = dict(_positions(node, (), path))
            return (loader.construct_document(node) if node else {}), lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ContentError(path, mark.line + 2 if mark else 1, "yaml", error.problem or str(error)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ContentError(path, 1, "yaml", str(error).splitlines()[0]) from None


def _refuse_bombs(text: str) -> None:
    """Refuse anchors, which allow alias bombs, and deep nesting, on which libyaml would overflow the C stack."""
    if not MAYBE_ANCHOR.search(text) and sum(map(text.count, NESTING)) < MAYBE_DEEP:
        return
    depth = 0
    events: Any = yaml.parse(text, Loader=_LOADER)
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"more than {DEEPEST} levels", problem_mark=event.start_mark)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases are not allowed here", problem_mark=event.start_mark
            )


def _positions(node: Any, at: tuple[str | int, ...], path: Path) -> Iterator[tuple[tuple[str | int, ...], int]]:
    """Yield (path of keys, line in the file) for every value; +2 because the YAML starts after the `---` line."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            line = key.start_mark.line + 2
            if not isinstance(key, yaml.ScalarNode):
                raise ContentError(path, line, "yaml", "a key must be a scalar")
            if key.value in seen:
                raise ContentError(path, line, "duplicate-key", f"{key.value!r} appears twice")
            seen.add(key.value)
            yield (*at, key.value), line
            yield from _positions(value, (*at, key.value), path)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield (*at, number), item.start_mark.line + 2
            yield from _positions(item, (*at, number), path)
