"""The migrations of the schema. A released one is never changed; a new one follows it."""
