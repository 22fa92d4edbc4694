"""A connection to a PostgreSQL target: statements, transactions, errors of the catalogue."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headrace import errors
from headrace.derived.postgres_text import type_of
from headrace.interfaces import KeptTable

LONGEST = 63
"""So many bytes has a name at most."""
OLDEST = 150_000
"""The first version with MERGE and NULLS NOT DISTINCT."""
SETTINGS: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "tcp_user_timeout": 30_000,
    "application_name": "headrace follower",
    "options": "-c DateStyle=ISO,MDY -c IntervalStyle=iso_8601 -c TimeZone=UTC "
    "-c extra_float_digits=1 -c bytea_output=hex -c client_encoding=UTF8 -c search_path= "
    "-c lock_timeout=60s -c plan_cache_mode=force_custom_plan -c row_security=off",
}
REFUSALS = ("22", "23", "44", "54", "P0")
"""Classes of SQLSTATE that are a row's fault: data, integrity, check option, limits, raise."""
PASSING = ("08", "25P03", "40", "53", "55", "57")
"""Connections, conflicts, resources, locks, operators: it may pass."""
CANNOT_CONNECT = (
    "does not exist",
    "authentication failed",
    "no pg_hba.conf entry",
    "permission denied for database",
    "is not permitted to log in",
)
LACKS: LiteralString = """
with me as (select current_user u, current_database() d, s.n, to_regnamespace(quote_ident(s.n)) o
    from (select $2::text n) s),
kept as (select c.oid, c.oid::regclass::text t, relowner from pg_class c join me on relnamespace = o
    where relname = any($1)),
bad as (select (select min(t) from kept where not pg_has_role(relowner, 'usage')) other,
    (select min(t) from kept where row_security_active(oid)) hidden,
    (select min(t) from kept where not (has_table_privilege(oid, 'select')
        and has_table_privilege(oid, 'insert') and has_table_privilege(oid, 'update')
        and has_table_privilege(oid, 'delete'))) shut)
select what, fix from me, bad, lateral (values
    (1, pg_is_in_recovery() or current_setting('transaction_read_only')::bool,
        'it can only be read', 'keep it in a server that takes writes'),
    (2, not has_database_privilege(d, 'temp'), u || ' may not make temporary tables',
        format('grant temporary on database %I to %I', d, u)),
    (3, o is null and not has_database_privilege(d, 'create'), u || ' may not make schema ' || n,
        format('grant create on database %I to %I', d, u)),
    (4, not (has_schema_privilege(o, 'create') and has_schema_privilege(o, 'usage')),
        u || ' may not make tables in schema ' || n,
        format('grant usage, create on schema %I to %I', n, u)),
    (5, other is not null, format('table %s is not of %s', other, u),
        format('alter table %s owner to %I', other, u)),
    (6, hidden is not null, format('table %s has row level security for %s', hidden, u),
        format('alter table %s no force row level security', hidden)),
    (7, shut is not null, format('%s may not read and write table %s', u, shut),
        format('grant select, insert, update, delete on %s to %I', shut, u))
) x(place, wrong, what, fix) where wrong order by place limit 1"""

ALTERED: LiteralString = """
select format('drop table %I.%I', n.nspname, c.relname)
from {schema}._headrace h cross join jsonb_array_elements(h.tables) t
join pg_class c on c.relname = t->>'name' join pg_namespace n on n.oid = c.relnamespace
where h.follower = $1 and n.nspname = $2 and exists (
    select from jsonb_array_elements(t->'columns') k where not exists (
        select from pg_attribute a where a.attrelid = c.oid and a.attname = k->>'name'
        and not a.attisdropped and a.attgenerated = '' and a.attidentity <> 'a')) limit 1"""
"""A kept table in which somebody has dropped or renamed a column, or has it generated."""


def described(dsn: str, schema: str) -> str:
    """Where a schema is, without the password."""
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return "a PostgreSQL address that is not understood"
    place = f"{parts.get('host') or ''}:{parts.get('port') or 5432}/{parts.get('dbname') or ''}"
    return f"PostgreSQL {place.removeprefix(':5432')}, schema {schema}"


def raw(text: str) -> sql.SQL:
    """A text that is SQL."""
    return sql.SQL(text)


def quoted(name: str) -> str:
    """A name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


def beside(prefix: str, name: str) -> str:
    """A name for something beside a table; PostgreSQL would cut what is longer, silently."""
    made = prefix + name
    if len(made) <= LONGEST:
        return made
    return f"{made[: LONGEST - 17]}_{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def names_of(names: Sequence[str], before: str = "") -> sql.SQL:
    """Names in a list, each with `before` in front: `d."a", d."b"`."""
    return raw(", ".join(before + quoted(name) for name in names))


def each(form: LiteralString, names: Sequence[str], between: LiteralString) -> sql.SQL:
    """A form for each name, with `{n}` in it, joined."""
    return raw(between.join(form.replace("{n}", quoted(name)) for name in names))


def columns_of(table: KeptTable) -> sql.SQL:
    """The columns of a table; texts of a key are compared byte by byte, as everywhere in a log."""
    made = []
    for column in table.columns:
        kind = type_of(column)
        collation = ' collate "C"' if column.name in table.key and kind == "text" else ""
        made.append(f"{quoted(column.name)} {kind}{collation}")
    return raw(", ".join(made))


def line_of(error: psycopg.Error) -> str:
    """What an error says, in one line."""
    return " ".join((error.diag.message_primary or str(error)).split())


def _nothing() -> None:
    pass


def is_refusal(error: psycopg.Error) -> bool:
    """Whether it is the fault of a row; psycopg itself does not send a text with a NUL in it."""
    return isinstance(error, psycopg.DataError) or (error.sqlstate or "").startswith(REFUSALS)


class Session:
    """A schema, opened for one follower."""

    def __init__(self, dsn: str, schema: str, follower: str) -> None:
        """Connect; `TargetAway` if nobody answers, `BadTarget` if it cannot be used."""
        self._schema, self._follower = schema, follower
        self.place = described(dsn, schema)
        try:
            self._connection = psycopg.connect(
                make_conninfo(dsn, **SETTINGS), autocommit=True, cursor_factory=psycopg.RawCursor
            )
        except psycopg.OperationalError as error:
            text = line_of(error)
            wrong = any(one in text for one in CANNOT_CONNECT)
            raise (errors.BadTarget if wrong else errors.TargetAway)(
                text, place=self.place
            ) from error
        except psycopg.ProgrammingError as error:
            raise errors.BadTarget(line_of(error), place=self.place) from error
        version = self._connection.info.server_version
        if version < OLDEST:
            raise errors.BadTarget(
                f"the server is PostgreSQL {version // 10_000}",
                place=self.place,
                fix="use PostgreSQL 15 or newer: it needs MERGE and NULLS NOT DISTINCT",
            )
        self._pipeline = contextlib.ExitStack()
        self._done: Callable[[], None] = _nothing
        """Wait until all that was sent in a pipeline is done; raises what went wrong in it."""
        self._temps: dict[str, KeptTable] = {}
        self._used: set[str] = set()
        self._nullable: set[str] = set()
        self._pointed_at: set[str] = set()

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(psycopg.Error):
            self._connection.close()

    # -- statements -------------------------------------------------------------------------

    def _run(self, text: LiteralString, *values: Any, **parts: Any) -> psycopg.Cursor[Any]:
        """Run a statement with values `$1`, ...; `{schema}` and further parts are put in.

        In a pipeline it is only sent, and what it gives waits for `fetch...` or `_done`.
        """
        made = sql.SQL(text).format(schema=sql.Identifier(self._schema), **parts)
        return self._execute(made, values)

    def _execute(self, made: sql.Composed, values: Sequence[Any]) -> psycopg.Cursor[Any]:
        return self._connection.execute(made, values or None)

    def _copy(self, into: sql.Composable, columns: Sequence[str], data: bytes) -> None:
        self._one_by_one()
        made = sql.SQL("copy {} ({}) from stdin (format csv)").format(into, names_of(columns))
        with self._connection.cursor().copy(made) as copy:
            copy.write(data)

    @contextlib.contextmanager
    def _transaction(
        self, begin: LiteralString = "begin", *, pipeline: bool = False
    ) -> Iterator[None]:
        """All or nothing; errors of the server become those of the catalogue.

        `pipeline`: statements are sent one after the other without waiting for each, up to `_done`.
        """
        try:
            if pipeline:
                self._done = self._pipeline.enter_context(self._connection.pipeline()).sync
            self._run(begin)
            self._used.clear()
            try:
                yield
            except BaseException:
                self._prepare_no_more()
                self._temps.clear()
                self._nullable.clear()
                with contextlib.suppress(psycopg.Error):
                    self._one_by_one()
                with contextlib.suppress(psycopg.Error):
                    self._run("rollback")
                raise
            self._run("commit")
            self._one_by_one()
        except psycopg.Error as error:
            raise self._translated(error) from error

    def _one_by_one(self) -> None:
        """End the pipeline, if there is one: wait as `_done` does."""
        self._done = _nothing
        self._pipeline.close()

    def _hurry(self) -> None:
        """What follows changes tables, not rows: who waits for that lets all others wait behind.

        So it waits for a short time, and everything is tried again later.
        """
        self._run("set local lock_timeout = '2s'")

    def _back_to(self, savepoint: str) -> None:
        """Undo what was done since a savepoint; a key that may be null since may no longer be."""
        self._prepare_no_more()
        self._run("rollback to savepoint {name}", name=sql.Identifier(savepoint))
        self._nullable.clear()

    def _prepare_no_more(self) -> None:
        """Of what was sent behind an error psycopg thinks that the server has prepared it."""
        self._connection.prepare_threshold = None

    def _translated(self, error: psycopg.Error) -> errors.HeadraceError:
        code = error.sqlstate or "08"
        if isinstance(error, psycopg.errors.LockNotAvailable):
            return errors.TargetAway(
                " ".join(filter(None, [line_of(error), error.diag.context])),
                place=self.place,
                why="somebody holds a lock on a table that is kept here, perhaps by a transaction "
                "that was left open",
                fix="end it: pg_locks and pg_stat_activity say who it is",
            )
        if self._connection.closed or code.startswith(PASSING):
            return errors.TargetAway(line_of(error), place=self.place)
        detail = " ".join(filter(None, [error.diag.message_detail, error.diag.message_hint]))
        stopped = errors.TargetStopped(line_of(error), place=self.place, why=detail, sqlstate=code)
        stopped.fix = "take away what is in its way, or drop the kept table: it is loaded anew"
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            with contextlib.suppress(psycopg.Error, errors.HeadraceError):
                if lacking := self.lacks(self._kept()):
                    stopped.fact, stopped.fix = f"{stopped.fact}: {lacking[0]}", lacking[1]
            return stopped
        with contextlib.suppress(psycopg.Error):
            if altered := self._run(ALTERED, self._follower, self._schema).fetchone():
                stopped.why = "somebody has changed a table that is kept here"
                stopped.fix = altered[0]
        return stopped

    def _kept(self) -> list[str]:
        """The names of the tables that the mark has, as far as it can be read."""
        with contextlib.suppress(psycopg.Error):
            found = self._run(
                "select t->>'name' from {schema}._headrace, jsonb_array_elements(tables) t "
                "where follower = $1",
                self._follower,
            )
            return [name for (name,) in found.fetchall()]
        return []

    def _table(self, name: str) -> sql.SQL:
        return raw(f"{quoted(self._schema)}.{quoted(name)}")

    def lacks(self, tables: Sequence[str]) -> tuple[str, str] | None:
        """What keeps a follower from writing here, and what to run about it; nothing is tried."""
        with self._transaction():
            found = self._run(LACKS, ["_headrace", *tables], self._schema)
            return next(iter(found.fetchall()), None)
