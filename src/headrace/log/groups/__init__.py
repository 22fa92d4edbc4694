"""Consumer groups of the embedded log: see `members` for who is in one, `consumer` for reading."""
