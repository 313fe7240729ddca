"""Searches texts with patterns on a budget of CPU time; the kernel ends this process when one pattern exceeds it.

Started by path by `kb.patterns.redos_timing`, on the standard library alone: pairs of pattern and texts as JSON on
standard input, one line out for every pattern that was done in time. Nothing inside could stop a search of `re`.
"""

import json
import re
import signal
import sys


def main(limit_s: float) -> None:
    for pattern, texts in json.load(sys.stdin):
        signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)  # SIGVTALRM has no handler: it ends the process
        compiled = re.compile(pattern, re.MULTILINE)  # as kb.signature does
        for text in texts:
            compiled.search(text)
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
