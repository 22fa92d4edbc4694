"""Tests of views; those that need Spark share one session in one worker."""
