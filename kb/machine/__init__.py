"""Reads the state of this machine, one subject per module; `kb.machine.snapshot` combines them."""
