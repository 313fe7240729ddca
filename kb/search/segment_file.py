"""The file of a segment, read piece by piece. Whoosh would map it and then copy all of it for each search."""

from __future__ import annotations

import os
from typing import Any

from whoosh.filedb.compound import SubFile
from whoosh.filedb.filestore import FileStorage
from whoosh.filedb.structfile import StructFile


class SegmentStorage(FileStorage):  # type: ignore[misc]
    """A directory with one segment. Closing it closes its files."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory, supports_mmap=False)
        self._opened: list[_SegmentFile] = []

    def open_file(self, name: str, **_: object) -> _SegmentFile:
        file = _SegmentFile(open(os.path.join(self.folder, name), "rb"), name)  # noqa: SIM115  # closed by close
        self._opened.append(file)
        return file

    def close(self) -> None:
        for file in self._opened:
            file.raw_file().close()


class _SegmentFile(StructFile):  # type: ignore[misc]
    """The whole file; Whoosh opens parts of it."""

    def subset(self, offset: int, length: int, name: str | None = None) -> _Part:
        return _Part(self.raw_file(), offset, length, name)


class _Part(StructFile):  # type: ignore[misc]
    """A part of the file."""

    def __init__(self, whole: Any, offset: int, length: int, name: str | None) -> None:
        super().__init__(SubFile(whole, offset, length), name)
        self._whole = whole
        self._offset = offset

    def get(self, position: int, length: int) -> bytes:
        """Read bytes without moving a cursor, so that any thread can. Most reads are like this."""
        return os.pread(self._whole.fileno(), length, self._offset + position)
