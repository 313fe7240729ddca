"""The command line: one file per command, each a thin shell around the core. Heavy imports stand inside commands."""

import gc

gc.set_threshold(100_000)  # collecting while modules load is a tenth of a search's time and frees nothing
