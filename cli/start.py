"""The entry point of the console script. Imports only the standard library until signals can be handled."""

import signal

ENDING = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Block Ctrl-C and SIGTERM while modules are imported, which takes some tenths of a second, then run `kb`.

    Otherwise a signal during the imports ends kb with a traceback, or without a document under `--json`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    from .main import main

    main(before)
