"""`make matrix`: verify every entry with one release of torch after the other, and keep the verdicts.

Each release gets an environment of its own, which is removed afterwards: PyPI's builds for CUDA take 4 to 6 GB and run
without a GPU. `RELEASES="2.5.1 2.6.0"` chooses some. A record is `docs/verified/torch-<release>.json`.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from kb.content.release_records import file_name, record
from kb.errors import UsageError

KB = str(Path(sys.executable).with_name("kb"))
VERIFIED = Path(__file__).resolve().parents[2] / "docs" / "verified"
RELEASES = (
    "2.2.2", "2.4.1", "2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.11.0", "2.13.0", "2.14.1", "2.15.0",
)  # fmt: skip
NUMPY_1 = Version("2.3")  # releases before it were built for numpy 1


def main() -> int:
    chosen = os.environ.get("RELEASES", "").split() or RELEASES
    failed = [release for release in chosen if not _recorded(release)]
    if failed:
        print(f"no record of {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _recorded(release: str) -> bool:
    """Verify everything with a release; False when it could not be installed or verified."""
    with tempfile.TemporaryDirectory(prefix=f"kb-torch-{release}-") as directory:
        python = Path(directory) / "bin" / "python"
        try:
            _install(Path(directory), release)
            ended = subprocess.run(
                [KB, "verify", "--all", "--json", "--python", str(python)], stdout=subprocess.PIPE, text=True
            )
            document = json.loads(ended.stdout.replace(str(python), "python"))
            kept = record(document["reports"], datetime.datetime.now(datetime.UTC).date().isoformat())
        except (subprocess.CalledProcessError, json.JSONDecodeError, KeyError, UsageError) as error:
            print(f"torch {release}: {error}", file=sys.stderr)
            return False
    path = VERIFIED / file_name(kept["torch"])
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    print(f"torch {kept['build']}: {_counts(kept)}  {path}", flush=True)
    return True


def _install(directory: Path, release: str) -> None:
    # setuptools: `torch.utils.cpp_extension`, which some arms build with, imports it and not every release requires it.
    requirements = [f"torch=={release}", "numpy<2" if Version(release) < NUMPY_1 else "numpy", "setuptools"]
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*pip, *requirements], check=True)


def _counts(kept: Mapping[str, Any]) -> str:
    verdicts = [row["verdict"] for row in kept["verdicts"].values()]
    return ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted(set(verdicts)))


if __name__ == "__main__":
    sys.exit(main())
