"""Writes a bundle: a tar compressed with zstd, with the manifest first, readable only by its owner."""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kb import __version__
from kb.capture.bundle import File
from kb.diagnose.inputs.bundle import MANIFEST, MANIFEST_SCHEMA
from kb.errors import CaptureFailed, UsageError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SUFFIX = ".tar.zst"
PROBE_S = 3.0
PROBE = (
    "import os, sys; os.stat(sys.argv[1]); os.statvfs(sys.argv[1]); sys.exit(0 if os.path.isdir(sys.argv[1]) else 3)"
)


def pack(files: Sequence[File], about: Mapping[str, Any], taken: float) -> bytes:
    """The bytes of the bundle. `about` goes into the manifest; `taken` is seconds since the epoch."""
    listed = {
        file.name: {
            "kind": file.kind,
            "rank": file.rank,
            "bytes": len(file.content),
            "sha256": hashlib.sha256(file.content).hexdigest(),
        }
        for file in files
    }
    time = datetime.fromtimestamp(taken, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    manifest = {"schema": MANIFEST_SCHEMA, "kb": __version__, "taken": time, **about, "files": listed}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in [
            (MANIFEST, json.dumps(manifest, indent=1).encode()),
            *((file.name, file.content) for file in files),
        ]:
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = len(content), int(taken), 0o600
            tar.addfile(info, io.BytesIO(content))
    return zstd.compress(buffer.getvalue())


def check_folder(folder: Path) -> None:
    """Raise `UsageError` if the folder does not answer: the job may hang with its file system, and kb would too."""
    command = [sys.executable, "-I", "-S", "-c", PROBE, str(folder)]
    try:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as probe:
            try:
                code = probe.wait(PROBE_S)
            except subprocess.TimeoutExpired:
                probe.kill()
                probe.returncode = -9  # do not wait: it may be in uninterruptible sleep
                raise UsageError(
                    f"{folder} did not answer in {PROBE_S:.0f} s", "its file system may hang: --out with a local folder"
                ) from None
    except OSError as error:
        raise CaptureFailed(f"no process could be started: {error.strerror}") from error
    if code:
        raise UsageError(f"{folder} is no folder that can be read", "--out names the folder for the bundle")


def write(folder: Path, name: str, data: bytes) -> Path:
    """Write the bundle to a temporary file with mode 0600, then rename it. Raises `CaptureFailed` and cleans up."""
    target = folder / f"{name}{SUFFIX}"
    partial = folder / f".{name}.{secrets.token_hex(4)}"
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, target)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise CaptureFailed(
            f"the bundle cannot be written to {folder}: {error.strerror}",
            f"it needs {len(data):,} bytes: --out with another folder, as long as the job is there",
        ) from error
    return target
