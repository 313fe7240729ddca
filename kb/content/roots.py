"""Content roots: directories with `entries/` and `probes/` side by side.

The built-in root ships with kb. A team adds its own with `KB_ROOTS` (paths joined by `:`), with `--root`, or with a
package that declares the entry-point group `kb.roots`; such a package is located, never imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from kb.errors import UsageError

VARIABLE = "KB_ROOTS"
GROUP = "kb.roots"
BUILT_IN = "built-in"


@dataclass(frozen=True, slots=True)
class Root:
    """One content root. `name` is the origin that every answer shows: `built-in`, a package or a path."""

    name: str
    entries: Path
    probes: Path
    verified: Path

    def entry_files(self) -> list[Path]:
        """The entry files, sorted so that every run sees the same order."""
        files = (path for path in self.entries.glob("*.md") if path.is_file())
        return sorted(files, key=attrgetter("name"))  # comparing paths takes ten times as long

    def healthy_logs(self) -> list[Path]:
        """Logs of jobs that ended well, which no signature may match."""
        return sorted((self.entries / "healthy").glob("*.log"))

    def verified_files(self) -> list[Path]:
        """The records of machines and releases: see `kb.records.hardware` and `kb.records.releases`."""
        return sorted(self.verified.glob("*.json"))

    def probe_file(self, stem: str) -> Path:
        return self.probes / f"{stem}.py"


def records(roots: Iterable[Root]) -> Iterator[tuple[Path, Any]]:
    """Yield the path and content of every record of the roots. Raises `UsageError` for a file that is not JSON."""
    for path in (path for root in roots for path in root.verified_files()):
        try:
            yield path, json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            hint = "`make gpu-check`, `make matrix` and `make wordings` write such files"
            raise UsageError(f"{path} is not a valid record: {error}", hint) from None


def builtin_root() -> Root:
    """The root that ships with kb: inside the package when installed, next to it in a checkout."""
    here = Path(__file__).resolve().parents[1]
    home = here if (here / "entries").is_dir() else here.parent
    verified = home / "verified" if home == here else home / "docs" / "verified"
    return Root(BUILT_IN, home / "entries", home / "probes", verified)


def root_at(path: Path, name: str | None = None) -> Root:
    """The root in a directory. Raises `UsageError` if the directory has no `entries/`."""
    path = path.expanduser().resolve()
    if not (path / "entries").is_dir():
        from shlex import quote  # only this error needs it

        raise UsageError(
            f"{path} is not a content root: it has no entries/ folder",
            f"it holds entries/ and probes/ side by side; `kb new ID --root {quote(str(path))}` makes one",
        )
    return Root(name or str(path), path / "entries", path / "probes", path / "verified")


def configured_roots(extra: tuple[Path, ...] = ()) -> tuple[Root, ...]:
    """The built-in root, then packages, then `KB_ROOTS`, then `extra`; a repeated directory counts once."""
    roots = [builtin_root(), *_packages()]
    roots += [root_at(Path(part)) for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    roots += [root_at(path) for path in extra]
    unique = {root.entries: root for root in reversed(roots)}
    return tuple(root for root in roots if unique.pop(root.entries, None))


def _packages() -> list[Root]:
    """Roots that installed packages declare. The slow metadata is read only if some file mentions the group."""
    if not any(GROUP.encode() in text for part in sys.path if part for text in _entry_points(part)):
        return []
    from importlib.metadata import entry_points

    roots = []
    for point in entry_points(group=GROUP):
        spec = importlib.util.find_spec(point.value)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            roots.append(root_at(Path(location), point.name))
    return roots


def _entry_points(folder: str) -> Iterator[bytes]:
    """The contents of the entry-point files of the packages in a folder. `Path` would take three times as long."""
    try:
        names = [name for name in os.listdir(folder) if name.endswith("-info")]
    except OSError:
        return
    for name in names:
        with suppress(OSError), open(f"{folder}/{name}/entry_points.txt", "rb", buffering=0) as file:
            yield file.read()
