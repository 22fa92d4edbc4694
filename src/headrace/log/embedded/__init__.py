"""The log as a folder: an atomic journal that many processes share."""
