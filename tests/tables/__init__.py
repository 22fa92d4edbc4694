"""Tests of tables and of the views' state."""
