"""The PostgreSQL server of the tests of captures, for those of targets too."""

from tests.capture.conftest import database, postgres

__all__ = ["database", "postgres"]
