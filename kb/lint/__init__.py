"""What `kb lint` requires of entries and probes: `linter` applies the rules, which are in one module per subject."""
