"""How the schema became what it is. A released migration is never changed; the next number adds to it."""
