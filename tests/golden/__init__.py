"""Folders written by each version of the format, which every later program must read."""
