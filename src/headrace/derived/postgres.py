"""A PostgreSQL schema as a target: one transaction a cut, COPY and one MERGE a table.

::

    begin
      select ... from _headrace where follower = me for update      epoch: fenced? which cut?
      copy (changes of a table, added up) -> temporary table; merge into the table      per table
      update _headrace set through, position, tables
    commit

**Killed anywhere** the transaction is there with its cut or it is not: who comes next reads the cut
and goes on from it. **Two followers**: a claim raises the epoch; whoever holds an older one finds
that out under the lock of the row, before it has changed anything (`Fenced`).

**Refused rows.** When a MERGE fails by the fault of a row (a constraint, a trigger, a value that
the type does not have), the tables go back to the savepoint and are taken in halves, each in its
savepoint, until the rows are known. Now keys are deleted and inserted instead of merged, so that
two rows may exchange a unique value; and rows that failed are tried once more after all others, for
they may have needed each other (foreign keys). What is left is refused, and its key is removed: a
table never shows a row that is no longer true.

**First load.** `wipe` begins `_new_TABLE`, `swap` renames it. Where the table is there already it
stays, with everybody's indexes and views, and is made equal by its differences, which is visible at
once and to all, also to transactions that are older; a renamed table would seem empty to these.

**Null keys.** A table has a primary key until the first key with a null in it: then the key becomes
`unique nulls not distinct`.

A multiset has two columns more, `_row` (what the row is known by) and `_copy`, its primary key.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, LiteralString
from uuid import UUID

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headrace import errors
from headrace.derived.postgres_copy import pieces
from headrace.derived.postgres_text import as_csv, from_csv, selected, type_of
from headrace.derived.rows import CHUNK_ROWS, WEIGHT, row_ids
from headrace.derived.shape import alterations, still_there
from headrace.interfaces import Changes, Cut, KeptTable, Key, Mark, Refuse, Refused
from headrace.model.json_values import json_values

OLDEST = 150_000
"""The first version with MERGE and NULLS NOT DISTINCT."""
SETTINGS: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "tcp_user_timeout": 30_000,
    "application_name": "headrace follower",
    "options": "-c DateStyle=ISO,MDY -c IntervalStyle=iso_8601 -c TimeZone=UTC "
    "-c extra_float_digits=1 -c bytea_output=hex -c client_encoding=UTF8 -c search_path=",
}
REFUSALS = ("22", "23", "44", "54", "P0")
"""Classes of SQLSTATE that are a row's fault: data, integrity, check option, limits, raise."""
PASSING = ("08", "25P03", "40", "53", "55", "57")
"""Connections, conflicts, resources, locks, operators: it may pass."""
CANNOT_CONNECT = ("does not exist", "authentication failed", "no pg_hba.conf entry")
Failed = tuple[KeptTable, pa.RecordBatch, psycopg.Error]


def described(dsn: str, schema: str) -> str:
    """Where a schema is, without the password."""
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return "a PostgreSQL address that is not understood"
    place = f"{parts.get('host') or ''}:{parts.get('port') or 5432}/{parts.get('dbname') or ''}"
    return f"PostgreSQL {place.removeprefix(':5432')}, schema {schema}"


def _raw(text: str) -> sql.SQL:
    return sql.SQL(text)


def _names(names: Sequence[str], before: str = "") -> sql.Composed:
    """Names in a list, each with `before` in front: `d."a", d."b"`."""
    return sql.SQL(", ").join(_raw(before) + sql.Identifier(name) for name in names)


def _each(form: LiteralString, names: Sequence[str], between: LiteralString) -> sql.Composed:
    """A form for each name, with `{n}` in it, joined."""
    return sql.SQL(between).join(sql.SQL(form).format(n=sql.Identifier(name)) for name in names)


class PostgresTarget:
    """A schema, opened for one follower."""

    def __init__(self, dsn: str, schema: str, follower: str) -> None:
        """Connect; `TargetAway` if nobody answers, `BadTarget` if it cannot be used."""
        self._schema, self._follower = schema, follower
        self.place = described(dsn, schema)
        try:
            self._connection = psycopg.connect(
                make_conninfo(dsn, **SETTINGS), autocommit=True, prepare_threshold=None
            )
        except psycopg.OperationalError as error:
            text = _line(error)
            wrong = any(one in text for one in CANNOT_CONNECT)
            raise (errors.BadTarget if wrong else errors.TargetAway)(
                text, place=self.place
            ) from error
        except psycopg.ProgrammingError as error:
            raise errors.BadTarget(_line(error), place=self.place) from error
        version = self._connection.info.server_version
        if version < OLDEST:
            raise errors.BadTarget(
                f"the server is PostgreSQL {version // 10_000}",
                place=self.place,
                fix="use PostgreSQL 15 or newer: it needs MERGE and NULLS NOT DISTINCT",
            )
        self._temps: dict[str, KeptTable] = {}
        self._used: set[str] = set()
        self._nullable: set[str] = set()

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(psycopg.Error):
            self._connection.close()

    # -- statements -------------------------------------------------------------------------

    def _run(self, text: LiteralString, *values: Any, **parts: Any) -> psycopg.Cursor[Any]:
        """Run a statement; `{schema}` and further parts are put in."""
        made = sql.SQL(text).format(schema=sql.Identifier(self._schema), **parts)
        return self._execute(made, values)

    def _execute(self, made: sql.Composed, values: Sequence[Any]) -> psycopg.Cursor[Any]:
        return self._connection.execute(made, values or None)

    def _copy(self, into: sql.Composed, columns: Sequence[str], data: bytes) -> None:
        made = sql.SQL("copy {} ({}) from stdin (format csv)").format(into, _names(columns))
        with self._connection.cursor().copy(made) as copy:
            copy.write(data)

    @contextlib.contextmanager
    def _transaction(self, begin: LiteralString = "begin") -> Iterator[None]:
        """All or nothing; errors of the server become those of the catalogue."""
        try:
            self._run(begin)
            self._used.clear()
            try:
                yield
            except BaseException:
                self._temps.clear()
                self._nullable.clear()
                with contextlib.suppress(psycopg.Error):
                    self._run("rollback")
                raise
            self._run("commit")
        except psycopg.Error as error:
            raise self._translated(error) from error

    def _back_to(self, savepoint: str) -> None:
        """Undo what was done since a savepoint; a key that may be null since may no longer be."""
        self._run("rollback to savepoint {name}", name=sql.Identifier(savepoint))
        self._nullable.clear()

    def _translated(self, error: psycopg.Error) -> errors.HeadraceError:
        code = error.sqlstate or "08"
        if self._connection.closed or code.startswith(PASSING):
            return errors.TargetAway(_line(error), place=self.place)
        detail = " ".join(filter(None, [error.diag.message_detail, error.diag.message_hint]))
        return errors.TargetStopped(_line(error), place=self.place, why=detail, sqlstate=code)

    def _table(self, name: str) -> sql.Composed:
        return sql.SQL("{}.{}").format(sql.Identifier(self._schema), sql.Identifier(name))

    # -- the mark ---------------------------------------------------------------------------

    def mark(self, epoch: int | None = None, log: str = "") -> Mark:
        """See `Target`; a claim makes the schema and the table `_headrace`."""
        with self._transaction():
            if epoch is None:
                found = self._run("select to_regclass({name})", name=sql.Literal(self._headrace))
                if found.fetchone() == (None,):
                    return Mark(0, None, "", ())
                return self._read_mark()
            self._run("select pg_advisory_xact_lock(hashtext('headrace'))")
            self._run("create schema if not exists {schema}")
            self._run(
                "create table if not exists {schema}._headrace (follower text primary key, "
                "epoch bigint not null, log text not null, through bigint, position bigint, "
                "tables jsonb not null default '[]', loading jsonb not null default '[]', "
                "at timestamptz)"
            )
            claimed = self._run(
                "insert into {schema}._headrace as h (follower, epoch, log) values (%s, %s, %s) "
                "on conflict (follower) do update set epoch = excluded.epoch "
                "where h.epoch < excluded.epoch",
                *(self._follower, epoch, log),
            )
            mark = self._read_mark()
            if not claimed.rowcount:
                raise self._fenced(epoch, mark.epoch)
            return mark

    @property
    def _headrace(self) -> str:
        quoted = self._schema.replace('"', '""')
        return f'"{quoted}"._headrace'

    def _read_mark(self, *, lock: bool = False) -> Mark:
        row = self._run(
            "select epoch, through, position, log, (select coalesce(jsonb_agg(e order by o), '[]') "
            "from jsonb_array_elements(tables) with ordinality as x(e, o) where exists (select "
            "from pg_class c join pg_namespace n on n.oid = c.relnamespace "
            "where n.nspname = %s and c.relname = e->>'name')) "
            "from {schema}._headrace where follower = %s {lock}",
            *(self._schema, self._follower),
            lock=_raw("for update" if lock else ""),
        ).fetchone()
        if row is None:
            return Mark(0, None, "", ())
        epoch, through, position, log, tables = row
        there = tuple(KeptTable.from_json(one) for one in tables)
        return Mark(epoch, None if through is None else Cut(through, position), log, there)

    def _is_there(self, name: str) -> bool:
        row = self._run(
            "select 1 from pg_class c join pg_namespace n on n.oid = c.relnamespace "
            "where n.nspname = %s and c.relname = %s",
            *(self._schema, name),
        ).fetchone()
        return row is not None

    def _locked(self, epoch: int) -> Mark:
        mark = self._read_mark(lock=True)
        if mark.epoch != epoch:
            raise self._fenced(epoch, mark.epoch)
        return mark

    def _fenced(self, epoch: int, found: int) -> errors.Fenced:
        return errors.Fenced(
            f"follower '{self._follower}' was started anew: this one has epoch {epoch}, "
            f"the target {found}",
            place=self.place,
            found=found,
        )

    # -- changes ----------------------------------------------------------------------------

    def apply(
        self, epoch: int, cut: Cut | None, changes: Sequence[Changes], refuse: Refuse
    ) -> None:
        """See `Target`."""
        with self._transaction():
            mark = self._locked(epoch)
            if cut is not None and mark.cut is not None and cut < mark.cut:
                raise errors.CutPassed(f"the target is at {mark.cut.through}", place=self.place)
            if cut is None:
                refused = [self._as_refused(*one) for each in changes for one in self._load(each)]
            else:
                tables = {one.name: one for one in mark.tables}
                for one in changes:
                    old = still_there(tables, one.table.name, self.place)
                    tables[one.table.name] = self._reshaped(old, one.table)
                refused = self._merged(changes)
            refuse(refused)
            if cut is not None:
                self._now_at(cut, list(tables.values()))

    def _now_at(self, cut: Cut, tables: Sequence[KeptTable]) -> None:
        self._run(
            "update {schema}._headrace set through = %s, position = %s, tables = %s, at = now() "
            "where follower = %s",
            *(cut.through, cut.position, _json(tables), self._follower),
        )

    def _reshaped(self, old: KeptTable, new: KeptTable) -> KeptTable:
        """Give a table the columns of a newer schema version."""
        table = self._table(new.name)
        for what, column in alterations(old, new):
            name, kind = sql.Identifier(column.name), _raw(type_of(column))
            made = {
                "drop": sql.SQL("alter table {} drop column if exists {}").format(table, name),
                "add": sql.SQL("alter table {} add column if not exists {} {}").format(
                    table, name, kind
                ),
                "type": sql.SQL("alter table {} alter column {} type {}").format(table, name, kind),
            }[what]
            try:
                self._execute(made, ())
            except psycopg.Error as error:
                stopped = self._translated(error)
                if isinstance(stopped, errors.TargetStopped):
                    text = made.as_string(self._connection)
                    stopped.fix = f"drop what depends on it, then run: {text}"
                    if what == "drop":
                        stopped.fix = f"{text} cascade"
                raise stopped from error
        return new

    def _merged(self, changes: Sequence[Changes]) -> list[Refused]:
        for one in changes:
            self._temp(one.table)
        self._run("savepoint fast")
        try:
            for one in changes:
                for chunk in one.chunks():
                    self._merge(one.table, one.table.name, chunk)
            self._run("set constraints all immediate")
        except psycopg.Error as error:
            if not _is_refusal(error):
                raise
            self._back_to("fast")
        else:
            return []
        self._run("set constraints all immediate")
        failed: list[Failed] = []
        for one in changes:
            for chunk in one.chunks():
                failed = [f for f in failed if f[0] != one.table or not _has_key_of(chunk, *f[:2])]
                failed += self._halved(one.table, chunk)
        return self._settled(failed)

    def _halved(
        self, table: KeptTable, rows: pa.RecordBatch, *, loading: bool = False
    ) -> list[Failed]:
        """Take rows in halves; those that cannot be taken."""
        if not rows.num_rows:
            return []
        self._run("savepoint half")
        try:
            if not loading:
                self._merge(table, table.name, rows, replace=True)
            elif table.key:
                names = table.schema.names
                self._copy(self._table(f"_new_{table.name}"), names, as_csv(rows.select(names)))
            else:
                self._merge_multiset(table, f"_new_{table.name}", rows)
            self._run("release savepoint half")
        except psycopg.Error as error:
            if not _is_refusal(error):
                raise
            self._back_to("half")
            if rows.num_rows == 1:
                return [(table, rows, error)]
        else:
            return []
        middle = rows.num_rows // 2
        halves = rows.slice(0, middle), rows.slice(middle)
        return [one for half in halves for one in self._halved(table, half, loading=loading)]

    def _settled(self, failed: list[Failed]) -> list[Refused]:
        """Try again while it helps; what is left is refused, and gone from its table.

        Rows that fail are taken out first: they may have stood in each other's way.
        """
        for table, rows, _ in failed:
            if table.key:
                own = rows.schema.names
                blank = [
                    rows.column(n) if n in table.key else pa.nulls(1, rows.column(n).type)
                    for n in own[:-1]
                ]
                gone = [*blank, pa.array([-1], pa.int64())]
                self._halved(table, pa.RecordBatch.from_arrays(gone, schema=rows.schema))
        while failed:
            again = [one for table, rows, _ in failed for one in self._halved(table, rows)]
            if len(again) == len(failed):
                break
            failed = again
        return [self._as_refused(*one) for one in failed]

    def _as_refused(self, table: KeptTable, rows: pa.RecordBatch, error: psycopg.Error) -> Refused:
        own = rows.select(table.schema.names)
        row = {n: json_values(own.column(n))[0] for n in own.schema.names}
        if not table.key:
            row["_row"] = row_ids(own)[0].as_py().hex()
        reason = " ".join(filter(None, [_line(error), error.diag.message_detail]))
        return Refused(table, row, rows.column(WEIGHT)[0].as_py(), reason, error.sqlstate or "")

    # -- one table --------------------------------------------------------------------------

    def _temp(self, table: KeptTable) -> sql.Composed:
        """The temporary table for changes of a table, made once a session; empty."""
        name = f"_changes_{table.name}"[:60]
        full = sql.SQL("pg_temp.{}").format(sql.Identifier(name))
        if self._temps.get(name) != table:
            self._run("drop table if exists {t}", t=full)
            extra: sql.Composable = sql.SQL("_weight bigint")
            if not table.key:
                extra = sql.SQL("_row uuid, _weight bigint")
            self._run(
                "create temp table {t} ({columns}, {extra}) on commit delete rows",
                t=sql.Identifier(name),
                columns=_columns(table),
                extra=extra,
            )
            self._temps[name] = table
        elif name in self._used:
            self._run("truncate {t}", t=full)
        return full

    def _merge(
        self, table: KeptTable, name: str, chunk: pa.RecordBatch, *, replace: bool = False
    ) -> None:
        """Make changes to a table; `replace`: by deleting and inserting."""
        if not table.key:
            self._merge_multiset(table, name, chunk)
            return
        null = np.zeros(chunk.num_rows, bool)
        for key in table.key:
            if chunk.column(key).null_count:
                null |= chunk.column(key).is_null().to_numpy(zero_copy_only=False)
        if not null.any():
            self._merge_keyed(table, name, chunk, "t.{n} = d.{n}", replace=replace)
            return
        self._allow_nulls(table, name)
        self._merge_keyed(
            table, name, chunk.filter(pa.array(~null)), "t.{n} = d.{n}", replace=replace
        )
        same: LiteralString = "t.{n} is not distinct from d.{n}"
        self._merge_keyed(table, name, chunk.filter(pa.array(null)), same, replace=replace)

    def _merge_keyed(
        self,
        table: KeptTable,
        name: str,
        rows: pa.RecordBatch,
        same: LiteralString,
        *,
        replace: bool,
    ) -> None:
        if not rows.num_rows:
            return
        names = table.schema.names
        temp = self._fill(table, rows)
        parts = {
            "t": self._table(name),
            "d": temp,
            "same": _each(same, table.key, " and "),
            "names": _names(names),
            "values": _names(names, "d."),
        }
        if replace:
            self._run("delete from {t} t using {d} d where {same}", **parts)
            self._run(
                "insert into {t} ({names}) select {values} from {d} d where _weight > 0", **parts
            )
            return
        others = [one for one in names if one not in table.key]
        update: sql.Composable = sql.SQL("do nothing")
        if others:
            update = sql.SQL("update set ") + _each("{n} = d.{n}", others, ", ")
        self._run(
            "merge into {t} t using {d} d on {same} "
            "when matched and d._weight < 0 then delete when matched then {update} "
            "when not matched and d._weight > 0 then insert ({names}) values ({values})",
            **parts,
            update=update,
        )

    def _merge_multiset(self, table: KeptTable, name: str, rows: pa.RecordBatch) -> None:
        names = table.schema.names
        parts = {
            "t": self._table(name),
            "d": self._fill(table, rows),
            "names": _names(names),
            "values": _names(names, "d."),
        }
        # How many copies there are now: (_row, _copy) is dense.
        self._run(
            "delete from {t} t using {d} d where d._weight < 0 and t._row = d._row and t._copy > "
            "(select count(*) from {t} h where h._row = d._row) + d._weight",
            **parts,
        )
        self._run(
            "insert into {t} ({names}, _row, _copy) select {values}, d._row, "
            "(select count(*) from {t} h where h._row = d._row) + _c "
            "from {d} d cross join generate_series(1, d._weight) _c where d._weight > 0",
            **parts,
        )

    def _fill(self, table: KeptTable, rows: pa.RecordBatch) -> sql.Composed:
        """Changes into the temporary table."""
        temp = self._temp(table)
        self._used.add(f"_changes_{table.name}"[:60])
        names = table.schema.names
        if not table.key:
            ids = [str(UUID(bytes=one)) for one in row_ids(rows.select(names)).to_pylist()]
            rows = rows.append_column("_row", pa.array(ids))
            self._copy(temp, rows.schema.names, as_csv(rows))
            return temp
        there = pc.greater(rows.column(WEIGHT), 0)
        here, gone = rows.filter(there), rows.filter(pc.invert(there))
        if here.num_rows:
            self._copy(temp, here.schema.names, as_csv(here))
        if gone.num_rows:  # its key is enough, and all that the target must be able to take
            gone = gone.select([*table.key, WEIGHT])
            self._copy(temp, gone.schema.names, as_csv(gone))
        return temp

    def _allow_nulls(self, table: KeptTable, name: str) -> None:
        """Turn the primary key into one that may be null."""
        if name in self._nullable:
            return
        row = self._run(
            "select conname from pg_constraint where contype = 'p' and conrelid = "
            "(select c.oid from pg_class c join pg_namespace n on n.oid = c.relnamespace "
            "where n.nspname = %s and c.relname = %s)",
            *(self._schema, name),
        ).fetchone()
        if row is not None:
            self._run(
                "alter table {t} drop constraint {c}, {columns}, "
                "add unique nulls not distinct ({k})",
                t=self._table(name),
                c=sql.Identifier(row[0]),
                columns=_each("alter column {n} drop not null", table.key, ", "),
                k=_names(table.key),
            )
        self._nullable.add(name)

    # -- reading ----------------------------------------------------------------------------

    def read(
        self, table: KeptTable, *, after: Key | None = None, through: Key | None = None
    ) -> tuple[Mark, Iterator[pa.RecordBatch]]:
        """See `Target`. The transaction lasts until the last row was read."""
        scope = contextlib.ExitStack()
        scope.enter_context(self._transaction("begin isolation level repeatable read read only"))
        try:
            mark = self._read_mark()
        except BaseException as error:
            scope.__exit__(type(error), error, error.__traceback__)
            raise
        return mark, self._rows(scope, table, table.name, after, through)

    def _rows(
        self,
        scope: contextlib.ExitStack,
        table: KeptTable,
        name: str,
        after: Key | None,
        through: Key | None,
    ) -> Iterator[pa.RecordBatch]:
        with scope:
            made = self._copying(table, name, after, through)
            for piece in pieces(self._connection, made.as_bytes(self._connection)):
                yield from_csv(piece, table.schema)

    def _copying(
        self, table: KeptTable, name: str, after: Key | None, through: Key | None
    ) -> sql.Composed:
        keys = table.key or ("_row",)
        bounds = [_beyond(keys, after)] if after is not None else []
        if through is not None:
            bounds.append(sql.SQL("not ") + _beyond(keys, through))
        return sql.SQL("copy (select {} from {} {} order by {}) to stdout (format csv)").format(
            sql.SQL(", ").join(
                _raw(selected(sql.Identifier(one.name).as_string(self._connection), one.type))
                for one in table.columns
            ),
            self._table(name),
            sql.SQL("where ") + sql.SQL(" and ").join(bounds) if bounds else sql.SQL(""),
            sql.SQL(", ").join(_raw(one) for one in self._order(table, name)),
        )

    def _order(self, table: KeptTable, name: str) -> list[str]:
        """The key as the log orders it: what is text there as text, null first.

        Where no null can be it is not said: the index of a primary key has them last, and would
        not serve.
        """
        found = self._run(
            "select attname from pg_attribute where attrelid = {t}::regclass and attnotnull",
            t=sql.Literal(self._table(name).as_string(self._connection)),
        ).fetchall()
        types = {column.name: column for column in table.columns}
        order = []
        for key in table.key or ("_row", "_copy"):
            made = sql.Identifier(key).as_string(self._connection)
            if key in types and pt.is_string(types[key].type) and type_of(types[key]) != "text":
                made = f"format('%s', {made}) collate \"C\""  # as it is written: see `selected`
            order.append(made if (key,) in found else f"{made} nulls first")
        return order

    # -- the first load ---------------------------------------------------------------------

    def wipe(self, epoch: int, tables: Sequence[KeptTable]) -> None:
        """See `Target`."""
        with self._transaction():
            ours = {one.name for one in self._locked(epoch).tables}
            for table in tables:
                if len(table.name.encode()) > 58:
                    raise errors.BadTarget(f"'{table.name}' is too long a name", place=self.place)
                if table.name not in ours and self._is_there(table.name):
                    name = self._table(table.name).as_string(self._connection)
                    raise errors.TableNotOurs(
                        f"there is a table {name} that this follower has not made",
                        place=self.place,
                        fix="keep it in another schema (hr.Table(..., schema=...)), "
                        f"or remove it: drop table {name}",
                    )
                self._run("drop table if exists {t}", t=self._table(f"_new_{table.name}"))
                self._run(
                    "create table {t} ({columns}{more})",
                    t=self._table(f"_new_{table.name}"),
                    columns=_columns(table),
                    more=_raw(
                        "" if table.key else ", _row uuid, _copy bigint, primary key (_row, _copy)"
                    ),
                )
            self._run(
                "update {schema}._headrace set loading = %s where follower = %s",
                *(_json(tables), self._follower),
            )

    def _load(self, change: Changes) -> list[Failed]:
        """Rows into a table that nobody sees; those that cannot be taken."""
        table = change.table
        if not table.key:
            self._temp(table)
        chunks = change.chunks()
        return [one for rows in chunks for one in self._halved(table, rows, loading=True)]

    def swap(self, epoch: int, cut: Cut, refuse: Refuse) -> None:
        """See `Target`."""
        with self._transaction():
            mark = self._locked(epoch)
            row = self._run(
                "select loading from {schema}._headrace where follower = %s", self._follower
            ).fetchone()
            assert row is not None
            tables = [KeptTable.from_json(one) for one in row[0]]
            before = {one.name: one for one in mark.tables}
            refused: list[Refused] = []
            for table in tables:
                self._index(table)
                if table.name in before:
                    self._reshaped(before[table.name], table)
                    refused += self._made_equal(table)
                else:
                    self._run(
                        "alter table {t} rename to {n}",
                        t=self._table(f"_new_{table.name}"),
                        n=sql.Identifier(table.name),
                    )
                says = f"kept by Headrace, follower {self._follower}, which alone writes to it"
                self._run("comment on table {t} is {c}", t=self._table(table.name), c=says)
                self._run("analyze {t}", t=self._table(table.name))
            for name in before.keys() - {table.name for table in tables}:
                says = f"once kept by Headrace, follower {self._follower}, and no longer"
                self._run("comment on table {t} is {c}", t=self._table(name), c=says)
            refuse(refused)
            self._run(
                "update {schema}._headrace set loading = '[]' where follower = %s", self._follower
            )
            self._now_at(cut, tables)

    def _index(self, table: KeptTable) -> None:
        """The key of a loaded table, which was not there while it was loaded."""
        if not table.key:
            return
        new = self._table(f"_new_{table.name}")
        row = self._run(
            "select exists (select from {t} where {any})",
            t=new,
            any=_each("{n} is null", table.key, " or "),
        ).fetchone()
        key = sql.SQL("unique nulls not distinct" if row == (True,) else "primary key")
        self._run("alter table {t} add {key} ({k})", t=new, key=key, k=_names(table.key))

    def _made_equal(self, table: KeptTable) -> list[Refused]:
        """Make the table that is there equal to what was loaded, by what differs."""
        names = table.schema.names
        keys = table.key or ("_row", "_copy")
        new, live = self._table(f"_new_{table.name}"), self._table(table.name)
        same = "t.{n} is not distinct from d.{n}" if table.key else "t.{n} = d.{n}"
        row = self._run(
            "select attnotnull from pg_attribute where attrelid = {t}::regclass and attname = %s",
            keys[0],
            t=sql.Literal(live.as_string(self._connection)),
        ).fetchone()
        if row == (True,):
            same = "t.{n} = d.{n}"
        more = [] if table.key else ["_row", "_copy"]
        parts = {
            "t": live,
            "d": new,
            "same": _each(same, keys, " and "),
            "names": _names([*names, *more]),
            "values": _names([*names, *more], "d."),
        }
        self._run("delete from {t} t where not exists (select from {d} d where {same})", **parts)
        self._run("savepoint fast")
        try:
            others = [one for one in names if one not in table.key] if table.key else []
            update: sql.Composable = sql.SQL("")
            if others:
                update = sql.SQL(
                    "when matched and ({}) is distinct from ({}) then update set {} "
                ).format(
                    _names(others, "t."), _names(others, "d."), _each("{n} = d.{n}", others, ", ")
                )
            self._run(
                "merge into {t} t using {d} d on {same} {update}"
                "when not matched then insert ({names}) values ({values})",
                **parts,
                update=update,
            )
            self._run("set constraints all immediate")
            refused: list[Refused] = []
        except psycopg.Error as error:
            if not _is_refusal(error):
                raise
            self._back_to("fast")
            refused = self._settled(self._copied(table))
        self._run("drop table {d}", **parts)
        return refused

    def _copied(self, table: KeptTable) -> list[Failed]:
        """All rows of what was loaded into the table that is there, in halves."""
        self._run("set constraints all immediate")
        self._temp(table)
        failed: list[Failed] = []
        if not table.key:
            self._run("delete from {t}", t=self._table(table.name))
        rows = list(self._rows(contextlib.ExitStack(), table, f"_new_{table.name}", None, None))
        for batch in rows:
            for start in range(0, batch.num_rows, CHUNK_ROWS):
                chunk = batch.slice(start, CHUNK_ROWS)
                weight = pa.array(np.ones(chunk.num_rows, np.int64))
                failed += self._halved(table, chunk.append_column(WEIGHT, weight))
        return failed


def _columns(table: KeptTable) -> sql.Composed:
    """The columns of a table; texts of a key are compared byte by byte, as everywhere in a log."""
    made = []
    for column in table.columns:
        kind = type_of(column)
        collation = ' collate "C"' if column.name in table.key and kind == "text" else ""
        made.append(sql.Identifier(column.name) + _raw(f" {kind}{collation}"))
    return sql.SQL(", ").join(made)


def _beyond(keys: Sequence[str], bound: Key) -> sql.Composed:
    """Keys above a bound, in the order of columns, null below all else."""
    made: list[sql.Composed] = []
    for at, value in enumerate(bound):
        name = sql.Identifier(keys[at])
        given = sql.Literal(UUID(bytes=value) if keys[at] == "_row" else value)
        before = [
            sql.SQL("{} is not distinct from {}").format(sql.Identifier(k), sql.Literal(v))
            for k, v in zip(keys[:at], bound, strict=False)
        ]
        above = sql.SQL("{} is not null" if value is None else "coalesce({} > {}, false)")
        made.append(sql.SQL(" and ").join([*before, above.format(name, given)]))
    return sql.SQL("((") + sql.SQL(") or (").join(made) + sql.SQL("))")


def _has_key_of(chunk: pa.RecordBatch, table: KeptTable, row: pa.RecordBatch) -> bool:
    if not table.key:
        return False
    found = np.ones(chunk.num_rows, bool)
    for name in table.key:
        value = row.column(name)[0]
        column = chunk.column(name)
        same = pc.equal(column, value).fill_null(False) if value.is_valid else column.is_null()
        found &= same.to_numpy(zero_copy_only=False)
    return bool(found.any())


def _is_refusal(error: psycopg.Error) -> bool:
    return (error.sqlstate or "").startswith(REFUSALS)


def _line(error: psycopg.Error) -> str:
    return " ".join((error.diag.message_primary or str(error)).split())


def _json(tables: Sequence[KeptTable]) -> str:
    return json.dumps([table.to_json() for table in tables])
