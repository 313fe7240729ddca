"""Excerpts of logs that no entry explained, kept on this machine until somebody writes the entry: one JSON file each.

Everything is redacted before it is written. Files are named by day and digest: an excerpt that comes again counts up
and keeps its file. Two processes that save the same excerpt at once may count one time too few; neither loses it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kb.errors import StoreUnavailable, UsageError
from kb.paths import data_home
from kb.redaction.redactor import local_redactor

SCHEMA = "kb.unexplained.v1"
ID = re.compile(r"\d{4}-\d\d-\d\d-[0-9a-f]{12}")
LONGEST = 64 * 1024  # bytes of an excerpt
MOST = 500  # files; the ones that were seen longest ago go


@dataclass(frozen=True, slots=True)
class Unexplained:
    """One excerpt. `first` and `last` are UTC times in ISO form; `seen` are sentences about what was recognised."""

    id: str
    first: str
    last: str
    count: int
    sources: tuple[str, ...]
    seen: tuple[str, ...]
    excerpt: str


def folder() -> Path:
    """Where the queue of this user lies."""
    return data_home() / "unexplained"


def save(excerpt: str, sources: Sequence[str], seen: Sequence[str]) -> Path:
    """Redact an excerpt and keep it; the file. Of one that is longer than `LONGEST` the first lines are kept.

    Raises `StoreUnavailable`.
    """
    redactor = local_redactor()
    text = _cut(redactor.text(_cut(_clean(excerpt))))
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    places, sentences = (tuple(redactor.text(_clean(one)) for one in many) for many in (sources, seen))
    try:
        _make_folder()
        known = next((one for path in folder().glob(f"*-{digest}.json") if (one := _read(path))), None)
        if known:
            kept = replace(known, last=now, count=known.count + 1, sources=places, seen=sentences)
        else:
            kept = Unexplained(f"{now[:10]}-{digest}", now, now, 1, places, sentences, text)
        path = _write(kept)
        _drop_oldest(keep=path)
    except OSError as error:
        message = f"the queue of unexplained logs {folder()} cannot be written: {error.strerror or error}"
        raise StoreUnavailable(message, "set XDG_DATA_HOME to a directory that you can write to") from error
    return path


def queued() -> list[Unexplained]:
    """The queue, last seen first. Files that are damaged or not ours are left out."""
    found = (one for path in folder().glob("*.json") if ID.fullmatch(path.stem) and (one := _read(path)))
    return sorted(found, key=lambda one: (one.last, one.id), reverse=True)


def load(entry_id: str) -> Unexplained:
    """One of the queue by its id. Raises `UsageError` when there is none."""
    found = _read(folder() / f"{entry_id}.json") if ID.fullmatch(entry_id) else None
    if found is None:
        newest = ", ".join(one.id for one in queued()[:3])
        hint = f"the newest: {newest}" if newest else "`kb diagnose --save-unexplained` fills it"
        raise UsageError(f"the queue of unexplained logs has no {entry_id!r}", hint)
    return found


def _clean(text: str) -> str:
    """Without the surrogates that stand for bytes that were no UTF-8: JSON has no place for them."""
    return text.encode("utf-8", "replace").decode()


def _cut(text: str) -> str:
    """At most `LONGEST` bytes, whole lines, else whole words: half a secret would not be known as one."""
    data = text.encode()
    if len(data) <= LONGEST:
        return text
    head = data[:LONGEST].decode(errors="ignore")
    lines, _, _ = head.rpartition("\n")
    return lines + "\n" if lines else "".join(re.split(r"(\s)", head)[:-1])


def _make_folder() -> None:
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    for one in (folder().parent, folder()):
        one.chmod(0o700)


def _read(path: Path) -> Unexplained | None:
    """What a file holds, None when it cannot be used."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.pop("schema") != SCHEMA:
            return None
        lists = {name: tuple(map(str, document[name])) for name in ("sources", "seen")}
        return Unexplained(**{**document, **lists, "id": path.stem})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _write(one: Unexplained) -> Path:
    """Into a file of its own first (mkstemp makes it 0600), so that a reader sees all of it or nothing."""
    path = folder() / f"{one.id}.json"
    handle, name = tempfile.mkstemp(prefix=".", dir=folder())
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump({"schema": SCHEMA, **asdict(one)}, file, ensure_ascii=False, indent=1)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    return path


def _drop_oldest(keep: Path) -> None:
    paths = [path for path in folder().glob("*.json") if ID.fullmatch(path.stem) and path != keep]
    for path in sorted(paths, key=_age, reverse=True)[MOST - 1 :]:
        path.unlink(missing_ok=True)


def _age(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except OSError:  # another process dropped it
        return 0.0, path.name
