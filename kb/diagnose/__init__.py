"""Logs and dumps of a failed job to the entries that explain it."""
