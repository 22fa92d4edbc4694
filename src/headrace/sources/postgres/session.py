"""How a capture connects: under its own settings, whatever a role or a database has set.

A connection that is to a pooler perhaps (`prepare`) is given them by statements: a pooler refuses
them in the address. All others have them in the address, so that no time limit comes before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

SETTINGS = (
    "DateStyle=ISO,MDY", "IntervalStyle=iso_8601", "bytea_output=hex", "extra_float_digits=1",
    "TimeZone=UTC", "statement_timeout=0", "idle_in_transaction_session_timeout=0",
    "idle_session_timeout=0", "lock_timeout=0", "default_transaction_read_only=off",
    "row_security=off", "synchronous_commit=local",
)  # fmt: skip
"""How values are printed, and no limits. Where row security hides rows, a query is refused. Our own
commits wait for no standby."""


def in_session(dsn: str, **more: str) -> str:
    """An address under whose settings values are printed; its own options are kept."""
    own = conninfo_to_dict(dsn).get("options") or ""
    ours = " ".join(f"-c {one}" for one in SETTINGS)
    return make_conninfo(dsn, options=f"{own} {ours}", **more)


def connected(dsn: str, settings: Sequence[str] = (), **more: Any) -> psycopg.Connection[Any]:
    """A connection in autocommit mode. `settings`: those that are not in the address."""
    connection = psycopg.connect(dsn, autocommit=True, **more)
    if connection.info.server_version >= 170000:  # before, it is no setting
        settings = [*settings, "transaction_timeout=0"]
    if settings:
        connection.execute("; ".join(f"SET {one}" for one in settings).encode())
    return connection
