"""kb: distributed-training incidents, each linked to a probe that verifies its fix on the reader's machine.

This package is the core. A text becomes a query, a query gives hits, and hits give an answer. An entry names a probe, a
probe runs two arms, the arms give a verdict, and the verdict a report. The folders `cli` and `api` are shells around
it.
"""

__version__ = "0.1.0"
