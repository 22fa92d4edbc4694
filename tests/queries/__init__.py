"""Tests of SQL over the log."""
