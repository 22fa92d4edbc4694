"""Capture: the changes of databases, written to the log."""
