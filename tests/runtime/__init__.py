"""Tests of headrace.runtime."""
