"""Tests of the capture, against a real PostgreSQL where one is needed."""
