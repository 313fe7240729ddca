"""kb: distributed-training incidents, each linked to a probe that verifies its fix on the reader's machine.

This package is the core. A text becomes a query, a query gives hits, hits give an answer. An entry names a probe, a
probe runs two arms, arms give a verdict, a verdict gives a report. The folders `cli` and `api` are shells around it.
"""

__version__ = "0.1.0"
