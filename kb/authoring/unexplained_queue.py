"""The queue of logs that no entry explains: excerpts on this machine, one JSON file each, until an entry is written.

All text is redacted before it is written. Files are named by day and digest; saving an excerpt again increments the
count in its file. If two processes save the same excerpt at the same time, it may be counted once but is not lost.
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
MOST_FILES = 500  # the least recently saved are deleted


@dataclass(frozen=True, slots=True)
class Unexplained:
    """A queued excerpt. `first` and `last` are UTC times in ISO format; `seen` are observations, one sentence each."""

    id: str
    first: str
    last: str
    count: int
    sources: tuple[str, ...]
    seen: tuple[str, ...]
    excerpt: str


def folder() -> Path:
    """The folder of this user's queue."""
    return data_home() / "unexplained"


def save(excerpt: str, sources: Sequence[str], seen: Sequence[str]) -> Path:
    """Redact an excerpt and save its first `LONGEST` bytes. Returns the path of the file.

    Raises `StoreUnavailable`.
    """
    redactor = local_redactor()
    redacted = _cut(redactor.text(_cut(_clean(excerpt))))
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    digest = hashlib.sha256(redacted.encode()).hexdigest()[:12]
    places, sentences = (tuple(redactor.text(_clean(text)) for text in texts) for texts in (sources, seen))
    try:
        _make_folder()
        known = next((saved for path in folder().glob(f"*-{digest}.json") if (saved := _load_file(path))), None)
        if known:
            item = replace(known, last=now, count=known.count + 1, sources=places, seen=sentences)
        else:
            item = Unexplained(f"{now[:10]}-{digest}", now, now, 1, places, sentences, redacted)
        path = _write(item)
        _drop_oldest(keep=path)
    except OSError as error:
        message = f"the queue of unexplained logs {folder()} cannot be written: {error.strerror or error}"
        raise StoreUnavailable(message, "set XDG_DATA_HOME to a directory that you can write to") from error
    return path


def queued() -> list[Unexplained]:
    """The queue, most recently saved first, without files that are damaged or of another kind."""
    paths = (path for path in folder().glob("*.json") if ID.fullmatch(path.stem))
    items = (item for path in paths if (item := _load_file(path)))
    return sorted(items, key=lambda item: (item.last, item.id), reverse=True)


def load(entry_id: str) -> Unexplained:
    """The excerpt with an id. Raises `UsageError` if the queue does not contain it."""
    item = _load_file(folder() / f"{entry_id}.json") if ID.fullmatch(entry_id) else None
    if item is None:
        newest = ", ".join(queued_item.id for queued_item in queued()[:3])
        hint = f"the newest: {newest}" if newest else "`kb diagnose --save-unexplained` fills it"
        raise UsageError(f"the queue of unexplained logs has no {entry_id!r}", hint)
    return item


def _clean(text: str) -> str:
    """Replace the surrogates of invalid UTF-8, which JSON cannot hold."""
    return text.encode("utf-8", "replace").decode()


def _cut(text: str) -> str:
    """At most `LONGEST` bytes, in whole lines or else whole words, since redaction would miss half a secret."""
    data = text.encode()
    if len(data) <= LONGEST:
        return text
    head = data[:LONGEST].decode(errors="ignore")
    lines, _, _ = head.rpartition("\n")
    return lines + "\n" if lines else "".join(re.split(r"(\s)", head)[:-1])


def _make_folder() -> None:
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (folder().parent, folder()):
        path.chmod(0o700)


def _load_file(path: Path) -> Unexplained | None:
    """The excerpt in a file, or None if the file is unusable."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.pop("schema") != SCHEMA:
            return None
        lists = {name: tuple(map(str, document[name])) for name in ("sources", "seen")}
        return Unexplained(**{**document, **lists, "id": path.stem})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _write(item: Unexplained) -> Path:
    """Write a temporary file (mode 0600) and rename it, so that a reader sees the whole file or none."""
    path = folder() / f"{item.id}.json"
    handle, name = tempfile.mkstemp(prefix=".", dir=folder())
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump({"schema": SCHEMA, **asdict(item)}, file, ensure_ascii=False, indent=1)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    return path


def _drop_oldest(keep: Path) -> None:
    paths = [path for path in folder().glob("*.json") if ID.fullmatch(path.stem) and path != keep]
    for path in sorted(paths, key=_age, reverse=True)[MOST_FILES - 1 :]:
        path.unlink(missing_ok=True)


def _age(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except OSError:  # another process dropped it
        return 0.0, path.name
