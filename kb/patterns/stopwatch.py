"""Searches texts with patterns under a limit of CPU time; the kernel ends the process if a pattern exceeds it.

A process of its own is needed because nothing inside a process can stop `re.search`. `kb.patterns.redos_timing` starts
this file by its path, so it uses only the standard library. Input: JSON pairs of pattern and texts. Output: a line for
every pattern that finished in time.
"""

import json
import re
import signal
import sys


def main(limit_s: float) -> None:
    for pattern, texts in json.load(sys.stdin):
        signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)  # SIGVTALRM has no handler, so it ends the process
        compiled = re.compile(pattern, re.MULTILINE)  # as kb.patterns.literals.find does
        for text in texts:
            compiled.search(text)
        sys.stdout.write("finished\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
