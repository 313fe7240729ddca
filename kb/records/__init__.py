"""Records in `docs/verified/`, written by programs: what machines have shown of entries, and what releases contain."""
