"""Tests of the HTTP interface, the feeds and the page."""
