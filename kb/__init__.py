"""kb: distributed-training incidents, each linked to a probe that verifies its fix on the reader's machine.

The core. Text becomes a query, a query hits, hits an answer; an entry names a probe, a probe runs two
arms, arms give a verdict, a verdict a report. The folders `cli` and `api` are shells around it.
"""

__version__ = "0.1.0"
