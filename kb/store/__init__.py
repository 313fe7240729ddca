"""The store: reports, keys, feedback, gaps and the audit log, in one SQLite file or in PostgreSQL."""
