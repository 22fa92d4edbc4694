"""For whom a capture waits: a locked table, transactions that must end first. Only looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from headrace.sources.postgres.catalog import quoted

READING = ("AccessExclusiveLock",)
"""The locks that a reading of a table waits for."""
PUBLISHING = tuple(
    f"{one}Lock"
    for one in (
        "ShareUpdateExclusive",
        "Share",
        "ShareRowExclusive",
        "Exclusive",
        "AccessExclusive",
    )
)
"""Those that its publication waits for."""

UNKNOWN = "transactions that began before, or that others do not see yet"
"""To a role that may not see what others do, the server does not say more."""

_WHO = r"""
    'process ' || s.pid || coalesce(', ' || s.state, '') as who,
    coalesce(s.xact_start, s.backend_start, now()) at time zone 'UTC' as since,
    coalesce(left(regexp_replace(s.query, '\s+', ' ', 'g'), 60), '') as query
"""
_TABLE = f"""
    with recursive tree(oid) as (
      select to_regclass(%(table)s)::oid
      union all select inhrelid from tree join pg_inherits on inhparent = tree.oid
    ), locks as (select l.* from pg_locks l join tree on relation = tree.oid
      where mode = any(%(modes)s))
    select {_WHO} from pg_stat_activity s
    where pid <> pg_backend_pid() and (pid in (select pid from locks)
      or ((%(fence)s - backend_xid::text::bigint) & 4294967295) between 1 and 2147483647)
    union all select 'prepared transaction ' || gid, prepared at time zone 'UTC', ''
    from pg_prepared_xacts
    where database = current_database() and (
      ((%(fence)s - transaction::text::bigint) & 4294967295) between 1 and 2147483647
      or '-1/' || transaction::text in (select virtualtransaction from locks))
    order by since limit 3
"""  # noqa: S608 - of what is above
_SESSION = f"""
    select distinct {_WHO} from pg_stat_activity a
    join pg_stat_activity s on s.pid = any(pg_blocking_pids(a.pid))
    where %(session)s in (a.pid::text, a.application_name)
    union all select 'prepared transaction ' || gid, prepared at time zone 'UTC', ''
    from pg_prepared_xacts where transaction::text in (
      select transactionid::text from pg_locks join pg_stat_activity a using (pid)
      where not granted and %(session)s in (a.pid::text, a.application_name))
    order by since limit 3
"""  # noqa: S608 - as above


def for_table(
    connection: psycopg.Connection[Any],
    table: tuple[str, str],
    fence: int = 0,
    modes: Sequence[str] = READING,
) -> str:
    """Who has locked a table, and which transactions before a number have not ended."""
    given = {"table": quoted(table), "fence": fence, "modes": list(modes)}
    return _told(connection.execute(_TABLE, given).fetchall()) or UNKNOWN


def for_session(connection: psycopg.Connection[Any], session: int | str) -> str:
    """For whom a process, or all of an application, wait; nothing if they do not."""
    return _told(connection.execute(_SESSION, {"session": str(session)}).fetchall())


def _told(rows: Sequence[tuple[Any, ...]]) -> str:
    """Not how long it has been, but since when: so the text stays the same."""
    return "; ".join(
        f"{who} since {since:%Y-%m-%d %H:%M:%S} UTC{what and f': {what}'}"
        for who, since, what in rows
    )
