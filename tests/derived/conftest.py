"""The server and the log of the tests of captures, for those of targets too."""

from tests.capture.conftest import database, log, postgres

__all__ = ["database", "log", "postgres"]
