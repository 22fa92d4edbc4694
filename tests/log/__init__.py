"""Tests of the embedded log, on the real filesystem, one promise each."""
