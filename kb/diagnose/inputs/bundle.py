"""Reads bundles of `kb capture`: a tar file whose first member is the manifest. Each other member is one input.

The content of a member decides how it is read, as for other inputs; the folder in its name says the rank. A bundle is
untrusted: only plain files with short names are read, which is what kb writes, and each is compared with its checksum.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MANIFEST_SCHEMA = "kb.capture.manifest.v1"
PROCESS_SCHEMA = "kb.capture.process.v1"
NODE_SCHEMA = "kb.capture.node.v1"
MANIFEST = "manifest.json"
BLOCK = tarfile.BLOCKSIZE
MOST_MEMBERS = 20_000
LARGEST_MANIFEST = 16 << 20  # bytes
LARGEST_SKEW = 1e9  # seconds; more means that a clock began at 1970
STACKS = b"kb capture: stacks of "  # first bytes of the stacks for people, which repeat those in the records
PROCESS_HEAD, NODE_HEAD = (f'{{"schema": "{schema}"'.encode() for schema in (PROCESS_SCHEMA, NODE_SCHEMA))
MANIFEST_HEAD = re.compile(rb'\{\s*"schema":\s*"' + re.escape(MANIFEST_SCHEMA.encode()) + b'"')


@dataclass(frozen=True, slots=True)
class Member:
    """A file of a bundle as an input, in memory."""

    name: str
    content: bytes
    modified: float | None = None
    ahead_s: float = 0.0  # how far the clock of its node was ahead of kb's, if that is certain

    def open(self, _: Callable[[str], None] = print) -> io.BufferedReader:
        """The content as a stream. Nothing is ever reported, since it is in memory."""
        return io.BufferedReader(io.BytesIO(self.content), max(1, len(self.content)))


def is_bundle(head: bytes) -> bool:
    """Whether these are the first bytes of a bundle, decompressed."""
    return (
        head.startswith(MANIFEST.encode() + b"\0")
        and head[257:262] == b"ustar"
        and MANIFEST_HEAD.match(head, BLOCK) is not None
    )


def is_record(head: bytes) -> bool:
    """Whether this is the record of a process or node from a capture, unpacked or not; it is never a log."""
    return head.startswith((PROCESS_HEAD, NODE_HEAD))


def is_own(head: bytes) -> bool:
    """Whether this is a file of an unpacked bundle that repeats other files: the manifest or the stacks for people."""
    return head.startswith(STACKS) or MANIFEST_HEAD.match(head) is not None


def read_members(stream: io.BufferedReader, source: str, most: int, report: Callable[[str], None]) -> Iterator[Member]:
    """The members to read, each of at most `most` bytes. Damage is reported as a sentence."""
    checksums: dict[str, Any] = {}
    ahead: dict[str, float] = {}
    count = 0
    while header := stream.read(BLOCK):
        if header == b"\0" * BLOCK:
            break
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "replace")
        except tarfile.TarError as error:
            report(f"{source}: the archive is damaged ({error}); what came before is read")
            return
        count += 1
        if not info.isreg() or info.size > most or count > MOST_MEMBERS:
            report(f"{source}: {info.name[:100]} is no file of a capture, or too large; what came before is read")
            return
        content = stream.read(info.size)
        stream.read(-info.size % BLOCK)
        if len(content) < info.size:
            report(f"{source}: {info.name} is cut off")
            return
        if info.name == MANIFEST and not checksums:
            checksums, ahead = _checksums(content), _clocks(content)
        elif info.name not in checksums:
            report(f"{source}: {info.name} is not in the manifest and was not read")
        elif checksums[info.name] != hashlib.sha256(content).hexdigest():
            report(f"{source}: {info.name} was changed after the capture")
        elif is_bundle(content[: 2 * BLOCK]):
            report(f"{source}: {info.name} is a bundle in a bundle and was not read")
        elif not content.startswith(STACKS):
            yield Member(f"{source}/{info.name}", content, info.mtime, ahead.get(info.name.partition("/")[0], 0.0))


def _checksums(manifest: bytes) -> dict[str, Any]:
    try:
        files = json.loads(manifest[:LARGEST_MANIFEST])["files"]
        return {name: about.get("sha256") for name, about in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _clocks(manifest: bytes) -> dict[str, float]:
    """How many seconds the clock of each node was ahead, for the nodes whose clock certainly was."""
    try:
        nodes = json.loads(manifest[:LARGEST_MANIFEST])["nodes"]
        skews = {node["name"]: node["skew"] for node in nodes if node.get("skew")}
        known = {name: (float(skew["ahead_s"]), float(skew["margin_s"])) for name, skew in skews.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}
    return {name: ahead for name, (ahead, margin) in known.items() if margin < abs(ahead) < LARGEST_SKEW}
