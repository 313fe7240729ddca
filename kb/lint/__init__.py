"""What `kb lint` requires of entries and probes: `linter` applies the rules, one module per subject holds them."""
