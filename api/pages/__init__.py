"""Pages for browsers, rendered on the server and usable without scripts."""
