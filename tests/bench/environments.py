"""Environments for `make matrix`: each is created with its own releases, used once and removed."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packaging.version import Version

from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from kb.lint.body import blocks
from kb.lint.snippets import names
from kb.records.names import FILE, SCHEMA, extended, name_record, package_of

KB = str(Path(sys.executable).with_name("kb"))
VERIFIED = Path(__file__).resolve().parents[2] / "docs" / "verified"
PRESENT_NAMES = Path(__file__).with_name("present_names.py")
NUMPY_1 = Version("2.3")  # earlier releases of torch were built for numpy 1


@contextmanager
def environment(torch: str, *requirements: str) -> Iterator[Path]:
    """The interpreter of a new environment with these releases. Raises `subprocess.CalledProcessError`."""
    with tempfile.TemporaryDirectory(prefix=f"kb-torch-{torch}-") as directory:
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        python = Path(directory) / "bin" / "python"
        # setuptools: some arms use `torch.utils.cpp_extension`, which imports it, and not every torch requires it.
        base = [f"torch=={torch}", "numpy<2" if Version(torch) < NUMPY_1 else "numpy", "setuptools"]
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
        subprocess.run([*pip, *base, *requirements], check=True)
        yield python


def reports(python: Path, *entries: str) -> list[dict[str, Any]]:
    """The reports about these entries. `kb verify` of a single entry prints just its report."""
    document = answer(python, *entries)
    return document["reports"] if len(entries) > 1 else [document]


def answer(python: Path, *arguments: str) -> Any:
    """The document that `kb verify --json` prints for this interpreter, with its path removed."""
    command = [KB, "verify", *arguments, "--json", "--python", str(python)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return json.loads(ended.stdout.replace(str(python), "python"))


def record_names(python: Path, day: str) -> None:
    """Record which of the names in the code of all entries exist in this environment."""
    roots = (builtin_root(),)
    wanted = sorted(
        {name for entry in load_catalog(roots) for block in blocks(entry.path.read_text()) for name in names(block)}
    )
    by_package = {package: list(group) for package, group in itertools.groupby(wanted, package_of)}
    command = [str(python), str(PRESENT_NAMES)]
    ended = subprocess.run(command, input=json.dumps(by_package), stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(ended.stdout)
    keep(FILE, extended(name_record(roots), found["packages"], wanted, found["present"]).to_json(SCHEMA, day))


def keep(file_name: str, document: dict[str, Any]) -> Path:
    path = VERIFIED / file_name
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return path


def counts(verdicts: Sequence[str]) -> str:
    """The number of each verdict, for instance `70 verified, 1 clear`."""
    return ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted(set(verdicts)))
