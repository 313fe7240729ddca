"""`make wordings`: look up the text of every signature in the releases of the packages that may print it.

Each wheel is unpacked without dependencies, searched and removed; torch takes 1 to 2 GB. `PACKAGES="torch peft"`
selects packages, and the record, `docs/verified/wordings.json`, keeps what it says about the others.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from kb.records.wordings import FILE, SCHEMA, pieces, record, wordings

RELEASES = {
    "torch": "2.1.2 2.2.2 2.3.1 2.4.1 2.5.1 2.6.0 2.7.1 2.8.0 2.9.1 2.10.0 2.11.0 2.12.1 2.14.1 2.15.0",
    "nccl": "2.14.3 2.18.1 2.19.3 2.20.5 2.21.5 2.22.3 2.23.4 2.25.1 2.26.2 2.27.5 2.28.9 2.29.7 2.30.7 2.32.3",
    "transformers": "4.41.2 4.46.3 4.51.3 4.57.1 5.3.0 5.5.4 5.23.0",
    "accelerate": "0.30.1 0.34.2 1.2.1 1.7.0 1.10.1 1.15.0",
    "deepspeed": "0.14.5 0.15.4 0.16.9 0.17.6 0.18.9 0.19.8",
    "trl": "0.9.6 0.14.0 0.19.1 0.28.0 1.16.0",
    "peft": "0.11.1 0.14.0 0.17.1 0.20.0 0.21.2",
    "safetensors": "0.4.5 0.5.3 0.6.2 0.8.0",
    "tokenizers": "0.19.1 0.21.4 0.23.3",
    "huggingface-hub": "0.24.7 0.36.0 1.33.0 2.4.0",
    "lightning": "2.2.5 2.4.0 2.6.6",
    "bitsandbytes": "0.42.0 0.43.3 0.46.1 0.50.2",
    "datasets": "2.21.0 3.6.0 5.2.0",
    "filelock": "3.16.1 4.2.11",
    "wandb": "0.16.6 0.19.11 0.23.1 0.26.1 0.28.2 0.31.0",
    "ray": "2.9.3 2.24.0 2.40.0 2.50.1 2.60.0",
}
LONG = 20
JOINED = re.compile(r"""["']\s*\\?\n\s*[rfbu]{0,2}["']""")  # the seam of a text on two lines of Python


def main() -> int:
    chosen = os.environ.get("PACKAGES", "").split() or list(RELEASES)
    root = builtin_root()
    patterns = {signature.pattern for entry in load_catalog((root,)) for signature in entry.meta.signatures}
    wanted = {piece for pattern in patterns for each in pieces(pattern) for piece in each}
    known = wordings((root,))
    present = {
        (package, release): {
            piece for pattern, by in known.found.items() if release in by.get(package, ()) for piece in _all(pattern)
        }
        for package, releases in known.searched.items()
        if package not in chosen
        for release in releases
    }
    failed = 0
    for package in chosen:
        for release in RELEASES[package].split():
            try:
                with tempfile.TemporaryDirectory(prefix="kb-wordings-") as folder:
                    _unpack(package, release, folder)
                    present[package, release] = set(_present(Path(folder), wanted))
            except subprocess.CalledProcessError as error:
                print(f"{package} {release}: {error}", file=sys.stderr)
                failed += 1
                continue
            print(f"{package} {release}: {len(present[package, release])} of {len(wanted)} pieces", flush=True)
    document = record(present, patterns).to_json(SCHEMA, datetime.datetime.now(datetime.UTC).date().isoformat())
    (root.verified / FILE).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return 1 if failed else 0


def _all(pattern: str) -> Iterator[str]:
    for each in pieces(pattern):
        yield from each


def _requirement(package: str, release: str) -> str:
    """The requirement for pip. NCCL has a wheel per version of CUDA; its older releases are for CUDA 11."""
    wheels = "nvidia-nccl-cu11" if Version(release) < Version("2.16") else "nvidia-nccl-cu12"
    return f"{wheels if package == 'nccl' else package}=={release}"


def _unpack(package: str, release: str, folder: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir", "--no-compile"]
    source = ["--no-build-isolation"] if package == "deepspeed" else []
    subprocess.run([*pip, *source, "--target", folder, _requirement(package, release)], check=True)


def _ends(piece: str) -> tuple[str, ...]:
    """The halves of a long text, which a compiler may build from overlapping blocks of 16 or 32 bytes."""
    half = len(piece) // 2
    return (piece[:half], piece[-half:]) if len(piece) >= LONG else ()


def _present(folder: Path, wanted: set[str]) -> Iterator[str]:
    """The pieces that the files contain, including Python texts that continue on the next line."""
    texts = wanted | {end for piece in wanted for end in _ends(piece)}
    whole = set(_matches(folder, texts))
    missing = [piece for piece in wanted - whole if not _ends(piece) or not whole.issuperset(_ends(piece))]
    python = "\n".join(
        line
        for path in folder.rglob("*.py")
        for line in _continued_lines(path.read_text(encoding="utf-8", errors="replace"))
    )
    return (piece for piece in wanted if piece not in missing or piece in python)


def _matches(folder: Path, texts: set[str]) -> Iterator[str]:
    """The texts that some file contains. A match hides others that overlap it, so missing texts are searched again."""
    while texts:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
            file.write("\n".join(texts) + "\n")
            file.flush()
            grep = ["grep", "--recursive", "--text", "--only-matching", "--no-filename", "--fixed-strings"]
            argv = [*grep, "-f", file.name, str(folder)]
            ended = subprocess.run(argv, stdout=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"})
        lines = set(ended.stdout.decode(errors="replace").splitlines())
        found = {text for text in texts if any(text in line for line in lines)}
        if not found:
            return
        yield from found
        texts = texts - found


def _continued_lines(source: str) -> Iterator[str]:
    """Texts that are written on several lines, joined, each with the rest of its first and last line."""
    first, *others = JOINED.split(source)
    line = first.rpartition("\n")[2]
    for number, part in enumerate(others, 1):
        head, newline, _ = part.partition("\n")
        line += head
        if newline or number == len(others):
            yield line
            line = part.rpartition("\n")[2]


if __name__ == "__main__":
    sys.exit(main())
