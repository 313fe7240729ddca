"""The pages: search, entry, diagnosis and gaps for people with a browser. Rendered here, readable without scripts."""
