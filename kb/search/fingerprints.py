"""Shows whether an index is out of date: the state of the entry files, and of the code that indexes them."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kb import __version__
from kb.content.roots import Root

PACKAGE = Path(__file__).parents[1]
GLOSSARIES = tuple(Path(__file__).with_name(name) for name in ("cues.toml", "synonyms.toml"))
RECIPE = (  # the modules that decide what an index holds
    "content/entry.py",
    "content/facets.py",
    "content/parser.py",
    "patterns/automaton.py",
    "patterns/literals.py",
    "patterns/redos.py",
    "patterns/reserved_sets.py",
    "patterns/syntax.py",
    "search/document.py",
    "search/entry_record.py",
    "search/index_writer.py",
    "search/postings_pool.py",
    "search/tokenizer.py",
    "search/whoosh_codec.py",
)

MOST_READ = 1 << 20  # bytes; a larger file is not an entry

FileState = tuple[int, int, str]  # size, time of the last change in nanoseconds, sha256 ("" if too large or unreadable)


def stamp(roots: tuple[Root, ...]) -> str:
    """A digest that changes with the size or time of an entry file, a glossary or the recipe. Reads none of them."""
    lines = [__version__]
    lines += [_line(str(path), path.stat()) for path in (*GLOSSARIES, *_recipe_files())]
    for root in roots:
        lines += _entry_lines(root)
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def recipe() -> str:
    """A digest of the code that builds indexes; kb does not use an index with another recipe."""
    digest = hashlib.sha256(f"{__version__} {sys.byteorder}".encode())
    for path in _recipe_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def file_states(roots: tuple[Root, ...], known: Mapping[str, FileState]) -> dict[Path, FileState]:
    """The state of every entry file. A file whose size and time are `known` is not read again."""
    return {path: _file_state(path, known.get(str(path))) for root in roots for path in root.entry_files()}


def _file_state(path: Path, known: FileState | None) -> FileState:
    state = path.stat()
    if known and (known[0], known[1]) == (state.st_size, state.st_mtime_ns):
        return known
    digest = ""
    if state.st_size <= MOST_READ:
        with suppress(OSError):  # the parser says why the file cannot be read
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return state.st_size, state.st_mtime_ns, digest


def _recipe_files() -> Iterator[Path]:
    """The recipe files that exist: an installation may have only compiled files."""
    return (path for path in (PACKAGE / name for name in RECIPE) if path.is_file())


def _entry_lines(root: Root) -> list[str]:
    """The lines of the files that `entry_files` returns; its paths would take three times as long."""
    with suppress(FileNotFoundError), os.scandir(root.entries) as files:
        return sorted(_line(file.path, file.stat()) for file in files if file.name.endswith(".md") and file.is_file())
    return []


def _line(path: str, state: os.stat_result) -> str:
    return f"{path} {state.st_size} {state.st_mtime_ns}"
