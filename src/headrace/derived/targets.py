"""Where a target is, as a pipeline file says it: `keep(..., in_=hr.Table("postgresql://..."))`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from headrace.errors import NoPsycopg
from headrace.interfaces import Target


@dataclass(frozen=True)
class Table:
    """Tables in a schema of a PostgreSQL database, which is made if it is not there."""

    dsn: str = field(repr=False)
    schema: str = "public"

    def open(self, follower: str) -> Target:
        """Connect for a follower."""
        try:
            from headrace.derived.postgres import PostgresTarget
        except ImportError as error:
            raise NoPsycopg("psycopg cannot be loaded", place=sys.executable) from error
        return PostgresTarget(self.dsn, self.schema, follower)

    def describe(self) -> str:
        """Host, port, database and schema."""
        from headrace.derived.postgres_session import described

        return described(self.dsn, self.schema)


@dataclass(frozen=True)
class SQLite:
    """Tables in a SQLite file, which is made if it is not there."""

    path: str

    def open(self, follower: str) -> Target:
        """Open the file for a follower."""
        from headrace.derived.sqlite import SQLiteTarget

        return SQLiteTarget(self.path, follower)

    def describe(self) -> str:
        """The file."""
        return f"SQLite {self.path}"
