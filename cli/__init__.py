"""The command line: one file per command, each a thin shell around the core. Heavy imports are inside functions."""

import gc

gc.set_threshold(100_000)  # garbage collection during imports takes a tenth of a search's time and frees nothing
