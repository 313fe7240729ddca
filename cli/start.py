"""The entry point of the console script: nothing but the standard library, until signals can be answered."""

import signal

ENDING = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Hold back Ctrl-C and SIGTERM while the modules are imported, which takes some tenths of a second.

    Without it they end kb there with a traceback, or with no document under `--json`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    from .main import main

    main(before)
