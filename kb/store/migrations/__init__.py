"""The migrations of the schema. A released migration is never changed, only followed by a new one."""
