"""Records in `docs/verified/`: what machines have shown of entries, and what releases contain. Programs write them."""
