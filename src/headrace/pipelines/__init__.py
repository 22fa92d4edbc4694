"""Views over the log, kept right by Spark."""
