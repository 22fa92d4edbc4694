"""Tests of derived systems: targets, followers, verification."""
