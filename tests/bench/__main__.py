"""`make bench`: check what the documentation claims about speed, as ratios within a single run."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from tests.bench import arms, rest, search


def main() -> None:
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in cpus if line.startswith("model name")), "unknown")
    kernel = f"{platform.system()} {platform.release()}"
    print(f"Machine: {os.cpu_count()} cores ({model}), {kernel}, Python {sys.version.split()[0]}\n")
    for part in (search, arms, rest):
        for line in part.measure():
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
