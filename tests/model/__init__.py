"""Tests of the model: values and pure functions, without any log."""
