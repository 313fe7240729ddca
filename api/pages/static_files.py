"""The stylesheet, the script and the icon, each at a URL that changes with its content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("static")
MEDIA_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file in memory. `address` is the last part of its URL, for instance `kb.3f2a9c81d0.css`."""

    name: str
    address: str
    media_type: str
    data: bytes

    @classmethod
    def read(cls, path: Path) -> StaticFile:
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()[:10]
        return cls(path.name, f"{path.stem}.{digest}{path.suffix}", MEDIA_TYPES[path.suffix], data)


FILES = [StaticFile.read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES]
BY_ADDRESS = {file.address: file for file in FILES}
URLS = {file.name: f"/static/{file.address}" for file in FILES}
