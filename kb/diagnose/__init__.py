"""Diagnosis: finds the entries that explain the logs and dumps of a failed job."""
