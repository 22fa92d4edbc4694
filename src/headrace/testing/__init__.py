"""The shipped test kit: conformance suites, oracles, and the machine that breaks the log."""
