"""The command line: one file per command, each a thin shell around the core. Heavy imports stand inside commands."""
