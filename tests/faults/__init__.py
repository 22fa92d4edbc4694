"""The machine that breaks the log, itself tested, and the log broken by it."""
