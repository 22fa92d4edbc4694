"""What stands in the way of a capture, found before it is made, with the statement that helps.

A finding is an `error` (the capture would fail, or miss changes), a `warning` (it works, and may
hurt later) or `ok`. Statements are complete and can be copied. `fix` runs those of errors that
need no restart of the server; warnings are a matter of judgement, so theirs are only shown.

Nothing here needs a superuser: on managed servers nobody is one. What the role may not do itself
is found all the same, and the statement names the role, for the person who may.

**Poolers.** Logical replication needs the server itself. A pooler (PgBouncer, pgcat) answers a
connection before it has chosen a server process, so the process id that it announced is not the one
that the server names. That is compared, and a replication connection is tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psycopg
import pyarrow as pa

from headrace import errors
from headrace.model.ddl import duplicate
from headrace.sources.postgres import catalog
from headrace.sources.postgres.catalog import (
    Connection,
    Publication,
    TableInfo,
    identifier,
    quoted,
)
from headrace.sources.postgres.values import arrow_type, refuse_as_key

OLDEST = 14
KEEP_AT_LEAST_MB = 1024


@dataclass(frozen=True)
class Wanted:
    """What a capture is to be made of."""

    slot: str
    publication: str
    tables: tuple[str, ...]
    """Patterns, see `catalog.chosen`."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: Literal["error", "warning", "ok"]
    what: str
    """What is the case, in a few words."""
    where: str
    """A setting, a role, a table."""
    why: str = ""
    """Why it matters; empty if all is well."""
    statements: tuple[str, ...] = ()
    """What helps, in this order."""
    restart: bool = False
    """Whether it has its effect only after a restart of the server."""

    @property
    def statement(self) -> str | None:
        """All statements in one line; None if none would help."""
        return "; ".join(self.statements) or None


def findings(connection: Connection, wanted: Wanted) -> list[Finding]:
    """Look at everything a capture needs; `connection` is in autocommit mode."""
    return list(_all(connection, wanted))


def fix(connection: Connection, found: Iterable[Finding]) -> list[tuple[Finding, str]]:
    """Run the statements of errors that need no restart; each with why it was refused, or "".

    Look again afterwards: one thing may have hidden another.
    """
    chosen = [one for one in found if one.level == "error" and one.statements and not one.restart]
    return [(finding, _run(connection, finding.statements)) for finding in chosen]


def _run(connection: Connection, statements: Sequence[str]) -> str:
    refused: list[str] = []

    def notice(diagnostic: psycopg.errors.Diagnostic) -> None:
        """Some grants that are not ours to give end in a warning, and give nothing."""
        if diagnostic.sqlstate in ("01006", "01007"):
            refused.append(diagnostic.message_primary or "")

    connection.add_notice_handler(notice)
    try:
        for statement in statements:
            connection.execute(statement.encode())
    except psycopg.Error as error:
        refused.append(" ".join(str(error).split()))
    finally:
        connection.remove_notice_handler(notice)
    return "; ".join(refused)


def _all(connection: Connection, wanted: Wanted) -> Iterator[Finding]:
    version = connection.info.server_version
    if version < OLDEST * 10000:
        why = f"streaming of transactions in progress came with version {OLDEST}"
        yield Finding("error", f"PostgreSQL {version // 10000}", "version", why)
        return
    yield Finding("ok", f"PostgreSQL {version // 10000}.{version % 10000}", "version")
    if _value(connection, "select pg_is_in_recovery()"):
        why = "publications and slots are made on the primary; give its address"
        yield Finding("error", "the server is a standby", "server", why)
        return
    yield Finding("ok", f"timeline {catalog.identity(connection).timeline}", "server")
    encoding = _setting(connection, "server_encoding")
    if encoding == "SQL_ASCII":
        why = "it checks nothing: a text that is not UTF-8 stops its table when it is met"
        yield Finding("warning", encoding, "encoding of the database", why)
    yield from _server(connection, wanted)
    rights = list(_role(connection))
    yield from rights
    yield from _way(connection, able=all(finding.level == "ok" for finding in rights))
    yield from _slot(connection, wanted)
    tables = catalog.tables(connection, wanted.tables)
    yield from _chosen(tables, wanted)
    yield from _publication(connection, wanted, tables)
    for table in tables:
        yield from _table(connection, table)


def _server(connection: Connection, wanted: Wanted) -> Iterator[Finding]:
    level = _setting(connection, "wal_level")
    if level == "logical":
        yield Finding("ok", "logical", "wal_level")
    else:
        managed = _setting(connection, "rds.logical_replication")
        why = "the WAL has no changes of rows that could be decoded"
        if managed is not None:
            why += "; here it is set by the parameter group: rds.logical_replication = 1"
        statements = () if managed is not None else ("ALTER SYSTEM SET wal_level = logical",)
        yield Finding("error", level or "", "wal_level", why, statements, restart=True)
    query = "select count(*) from pg_replication_slots where slot_name <> %s"
    slots = _value(connection, query, wanted.slot)
    yield _room(connection, "max_replication_slots", slots, "a capture needs a slot of its own")
    senders = _value(connection, "select count(*) from pg_stat_replication")
    yield _room(connection, "max_wal_senders", senders, "a capture needs a sender while it runs")
    yield _kept(int(_setting(connection, "max_slot_wal_keep_size") or -1))
    idle = _setting(connection, "idle_replication_slot_timeout")
    if idle not in (None, "0"):
        yield Finding(
            "warning",
            f"{idle} s",
            "idle_replication_slot_timeout",
            "the slot is given up when the capture stands still for that long",
            ("ALTER SYSTEM SET idle_replication_slot_timeout = 0", "SELECT pg_reload_conf()"),
        )
    yield _timeout(connection, int(_setting(connection, "wal_sender_timeout") or 0))


def _room(connection: Connection, setting: str, used: int, why: str) -> Finding:
    most = int(_setting(connection, setting) or 0)
    if used < most:
        return Finding("ok", f"{most - used} of {most} free", setting)
    statement = f"ALTER SYSTEM SET {setting} = {max(10, most + 5)}"
    return Finding("error", f"all {most} in use", setting, why, (statement,), restart=True)


def _kept(megabytes: int) -> Finding:
    where = "max_slot_wal_keep_size"
    if megabytes < 0:
        why = "while the capture stands still, WAL is kept for it until the server's disk is full"
        return Finding("warning", "no limit", where, why)
    if megabytes < KEEP_AT_LEAST_MB:
        why = "the slot is given up as soon as the capture is behind by that much"
        return Finding("warning", f"{megabytes} MB", where, why)
    return Finding("ok", f"{megabytes} MB", where)


def _timeout(connection: Connection, milliseconds: int) -> Finding:
    where = "wal_sender_timeout"
    if milliseconds >= 10_000:
        return Finding("ok", f"{milliseconds} ms", where)
    why = "a connection that takes longer to answer is cut"
    if not milliseconds:
        why = "the server never notices that a capture is gone, and holds its slot"
    role = identifier(_value(connection, "select current_user"))
    statement = f"ALTER ROLE {role} SET wal_sender_timeout = '60s'"
    return Finding("warning", f"{milliseconds} ms", where, why, (statement,))


def _role(connection: Connection) -> Iterator[Finding]:
    name, statement = catalog.replicates(connection)
    where = f"role {name}"
    if not statement:
        yield Finding("ok", "may replicate", where)
        return
    why = "slots are made and read by roles with REPLICATION only"
    yield Finding("error", "may not replicate", where, why, (statement,))


def _way(connection: Connection, *, able: bool) -> Iterator[Finding]:
    """Whether the server itself is at the other end, and speaks replication."""
    where = f"{connection.info.host}:{connection.info.port}"
    why = "replication needs a connection to the server itself: give its own address and port"
    if connection.info.backend_pid != _value(connection, "select pg_backend_pid()"):
        yield Finding("error", "a pooler is in between", where, why)
        return
    if not able:
        return
    parameters: dict[str, Any] = dict(connection.info.get_parameters())
    parameters |= {"password": connection.info.password, "replication": "database"}
    try:
        with psycopg.connect(autocommit=True, **parameters) as other:
            other.execute("IDENTIFY_SYSTEM")
    except psycopg.Error as error:
        what = f"no replication connection: {' '.join(str(error).split())}"
        yield Finding("error", what, where, f"{why}, and allow it in pg_hba.conf")
    else:
        yield Finding("ok", "replication connections are taken", where)


def _slot(connection: Connection, wanted: Wanted) -> Iterator[Finding]:
    slot = catalog.slot(connection, wanted.slot)
    where = f"replication slot {wanted.slot}"
    if slot is None:
        yield Finding("ok", "not made yet", where)
    elif slot.plugin != "pgoutput" or slot.database != connection.info.dbname:
        what = f"is of {slot.plugin or 'physical replication'}, database {slot.database or 'any'}"
        yield Finding("error", what, where, "the name is taken: choose another one")
    elif slot.invalidation_reason:
        statement = f"SELECT pg_drop_replication_slot({_literal(slot.name)})"
        why = "the changes that it kept are lost; the tables must be read anew"
        yield Finding("warning", f"given up: {slot.invalidation_reason}", where, why, (statement,))
    else:
        yield Finding("ok", "there" + (", in use" if slot.active else ""), where)


def _chosen(tables: Sequence[TableInfo], wanted: Wanted) -> Iterator[Finding]:
    for pattern in wanted.tables:
        if pattern.startswith("!"):
            continue
        if not any(catalog.fits((table.schema, table.name), pattern) for table in tables):
            why = "no table of the database has such a name and is not left out by another pattern"
            yield Finding("error", "chooses nothing", f"pattern {pattern}", why)


def _publication(
    connection: Connection, wanted: Wanted, tables: Sequence[TableInfo]
) -> Iterator[Finding]:
    found = catalog.publication(connection, wanted.publication)
    where = f"publication {wanted.publication}"
    name = identifier(wanted.publication)
    if found is not None:
        yield from _published(connection, found, tables)
        return
    if not _value(connection, "select has_database_privilege(current_database(), 'create')"):
        database = _value(connection, "select current_database()")
        role = identifier(_value(connection, "select current_user"))
        statement = f"GRANT CREATE ON DATABASE {identifier(database)} TO {role}"
        why = "a publication is made by a role that may create in the database"
        yield Finding("error", "may not create", f"database {database}", why, (statement,))
    if tables:
        names = ", ".join(f"ONLY {quoted((table.schema, table.name))}" for table in tables)
        statement = f"CREATE PUBLICATION {name} FOR TABLE {names}"
        statement += " WITH (publish_via_partition_root = true)"
        why = "the server sends the changes of published tables only; made by the tables' owner"
        yield Finding("error", "not there", where, why, (statement,))


def _published(
    connection: Connection, found: Publication, tables: Sequence[TableInfo]
) -> Iterator[Finding]:
    where = f"publication {found.name}"
    name = identifier(found.name)
    before = "changes made before do not come"
    if not (found.insert and found.update and found.delete and found.truncate):
        statement = f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate')"
        yield Finding("error", "does not publish all changes", where, before, (statement,))
    if not found.via_root and any(table.partitioned for table in tables):
        statement = f"ALTER PUBLICATION {name} SET (publish_via_partition_root = true)"
        why = "the changes of a partitioned table would come under the names of its partitions"
        yield Finding("error", "publishes partitions", where, why, (statement,))
        return
    names = [(table.schema, table.name) for table in tables]
    missing = [quoted(table) for table in names if table not in found.tables]
    if missing:
        listed = ", ".join(f"ONLY {one}" for one in missing)
        statement = f"ALTER PUBLICATION {name} ADD TABLE {listed}"
        what = f"does not have {', '.join(missing)}"
        yield Finding("error", what, where, before, (statement,))
    for table in sorted(found.filtered.intersection(names)):
        why = "what these hold back would be missing"
        what = f"has a row filter or a list of columns in {where}"
        again = [
            f"ALTER PUBLICATION {name} {do} TABLE ONLY {quoted(table)}" for do in ("DROP", "ADD")
        ]
        yield Finding("error", what, f"table {'.'.join(table)}", why, tuple(again))
    query = "select pg_has_role(pubowner, 'usage') from pg_publication where pubname = %s"
    if not _value(connection, query, found.name):
        role = identifier(_value(connection, "select current_user"))
        statement = f"ALTER PUBLICATION {name} OWNER TO {role}"
        why = "the capture cannot leave its note there, by which a restored log is recognised"
        yield Finding("warning", f"belongs to {found.owner}", where, why, (statement,))
    yield Finding("ok", f"{len(found.tables)} tables", where)


def _table(connection: Connection, table: TableInfo) -> Iterator[Finding]:
    where = f"table {table.schema}.{table.name}"
    before = list(_readable(connection, table))
    if table.unlogged:
        why = "it writes no WAL, so no change of it is seen; ALTER TABLE ... SET LOGGED rewrites it"
        what = "has a partition that is unlogged or foreign" if table.partitioned else "is unlogged"
        before.append(Finding("error", what, where, why))
    if not table.streamed:
        before.append(Finding("error", "has no columns", where, "so there is nothing to capture"))
    elif not table.identity and not table.unlogged:
        why = "updates and deletes would not say which row they change, and are refused"
        statements = tuple(_identity(connection, table))
        if not statements:
            why += "; its key must have no generated column, which is not in the stream"
        before.append(Finding("error", "has no replica identity", where, why, statements))
    elif not table.key and table.replica_identity == "f":
        why = (
            "its rows are counted, not told apart: its topic has no key, cannot be read by one, and"
            " is read from the start when a snapshot breaks off"
        )
        before.append(Finding("warning", "has no primary key", where, why))
    twice = duplicate(column.name for column in table.streamed)
    if twice:
        what, why = (
            f"column {identifier(twice)} is there twice",
            "in a topic case makes no other name",
        )
        before.append(Finding("warning", what, where, f"{why}: the table will be stopped"))
    for column in table.columns:
        if column.name.startswith("_") and not column.generated:
            what, why = f"column {identifier(column.name)}", "a topic's own columns are named so"
            before.append(Finding("warning", what, where, f"{why}: the table will be stopped"))
        try:
            kind = arrow_type(column.type, column.modifier)
            if column.name in (table.key or table.identity):
                refuse_as_key(column.type, column.name)
            if isinstance(kind, pa.ListType) and column.name in table.key:
                what = f"column {identifier(column.name)} of its key is an array"
                why = "no topic has such a key: the table will be stopped"
                before.append(Finding("warning", what, where, why))
        except errors.TypeNotCarried as error:
            what = f"column {identifier(column.name)} is of type {column.type.name}"
            before.append(Finding("warning", what, where, f"{error.why}; {error.fix}"))
    yield from before
    if not before:
        yield Finding("ok", f"known by {', '.join(table.identity)}", where)


def _readable(connection: Connection, table: TableInfo) -> Iterator[Finding]:
    where = f"table {table.schema}.{table.name}"
    query = """
        select current_user, has_schema_privilege(%s, 'usage'), row_security_active(%s::oid)
        """
    row = connection.execute(query, [table.schema, table.oid]).fetchone()
    role, usable, secured = row or ("", True, False)
    to = identifier(role)
    statements = []
    if not usable:
        statements.append(f"GRANT USAGE ON SCHEMA {identifier(table.schema)} TO {to}")
    if not table.selectable:
        statements.append(f"GRANT SELECT ON {quoted((table.schema, table.name))} TO {to}")
    if statements:
        why = "the rows that are there already are read by a query"
        yield Finding("error", f"role {role} may not read it", where, why, tuple(statements))
    if secured:
        why = "its row security hides rows from the query, but not from the stream of changes"
        yield Finding("error", "not all rows are seen", where, why, (f"ALTER ROLE {to} BYPASSRLS",))


def _identity(connection: Connection, table: TableInfo) -> Iterator[str]:
    """Give a table, or each poor partition of it, the best identity that it can have."""
    query = """
        select nspname, relname, relreplident::text
        from pg_class c join pg_namespace n on n.oid = relnamespace
        where c.oid = %(table)s or c.oid in (select relid from pg_partition_tree(%(table)s))
        order by 1, 2
        """
    key = table.key and table.replica_identity != "d"  # which would do, were it not deferrable
    index = None if key or table.partitioned else _best_index(connection, table)
    best = "DEFAULT" if key else f"USING INDEX {identifier(index)}" if index else "FULL"
    full = catalog.takes_full(table.columns, connection.info.server_version)
    if best == "FULL" and not full:
        return
    poor = ("ni" if key else "nid") + ("" if full else "f")
    for schema, name, has in connection.execute(query, {"table": table.oid}).fetchall():
        if has in poor:
            yield f"ALTER TABLE {quoted((schema, name))} REPLICA IDENTITY {best}"


def _best_index(connection: Connection, table: TableInfo) -> str | None:
    """The shortest unique index that can be a replica identity."""
    query = """
        select x.relname from pg_index i join pg_class x on x.oid = i.indexrelid
        where i.indrelid = %s and i.indisunique and i.indimmediate and i.indisvalid
          and i.indpred is null and i.indexprs is null
          and not exists (select from pg_attribute a where a.attrelid = i.indrelid
            and a.attnum = any((i.indkey::int2[])[:i.indnkeyatts - 1])
            and (not a.attnotnull or a.attgenerated <> ''))
        order by i.indnatts, x.relname limit 1
        """
    name: str | None = _value(connection, query, table.oid)
    return name


def _setting(connection: Connection, name: str) -> str | None:
    """A setting in its base unit; None if this server does not have it, or hides it."""
    value = _value(connection, "select setting from pg_settings where name = %s", name)
    return None if value is None else str(value)


def _value(connection: Connection, query: str, *values: object) -> Any:
    row = connection.execute(query.encode(), values or None).fetchone()
    return row[0] if row else None


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
