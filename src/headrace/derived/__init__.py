"""Derived systems: targets that follow the log, and the proof that they equal it."""
