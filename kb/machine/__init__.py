"""What is to be known of this machine, one noun per module; `kb.machine.snapshot` puts it together."""
