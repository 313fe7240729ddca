"""`make bench`: what the documentation claims about speed, measured as ratios within this one run."""

from __future__ import annotations

import os
import platform
import sys

import arms
import rest
import search


def main() -> None:
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    print(f"Machine: {os.cpu_count()} cores ({model}), {platform.system()} {platform.release()}, Python {sys.version.split()[0]}\n")
    for part in (search, arms, rest):
        for line in part.measure():
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
