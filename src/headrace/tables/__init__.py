"""Keyed data in immutable sorted runs: the state of the views, and the tables of the log."""
