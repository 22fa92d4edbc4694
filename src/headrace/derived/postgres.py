"""A PostgreSQL schema as a target: one transaction a cut, COPY and one MERGE a table.

::

    begin
      select ... from _headrace where follower = me for update      epoch: fenced? which cut?
      copy (changes of a table, added up) -> temporary table; merge into the table      per table
      update _headrace set through, position, tables
    commit

Where all is as this session left it, the update comes first, under that condition, and reading the
mark is left out (`_quick`).

**Killed anywhere** the transaction is there with its cut or it is not: who comes next reads the cut
and goes on from it. **Two followers**: a claim raises the epoch; whoever holds an older one finds
that out under the lock of the row, before it has changed anything (`Fenced`).

**Loading.** `wipe` begins `_new_TABLE`, `swap` renames it. Where the table is there already it
stays, with everybody's indexes and views, and is made equal by its differences, which is visible at
once and to all, also to transactions that are older; a renamed table would seem empty to these.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql

from headrace import errors
from headrace.derived.postgres_merging import Failed, Merging
from headrace.derived.postgres_session import (
    LONGEST,
    beside,
    columns_of,
    each,
    is_refusal,
    names_of,
    raw,
)
from headrace.derived.postgres_text import type_of
from headrace.derived.rows import CHUNK_ROWS, WEIGHT
from headrace.derived.shape import alterations, still_there
from headrace.interfaces import Changes, Cut, KeptTable, Mark, Refuse, Refused


class PostgresTarget(Merging):
    """A schema, opened for one follower."""

    _left: tuple[int, Cut, dict[str, KeptTable]] | None = None
    """Epoch, cut and tables, as this session left them: what `_quick` goes by."""

    # -- the mark ---------------------------------------------------------------------------

    def mark(self, epoch: int | None = None, log: str = "") -> Mark:
        """See `Target`; a claim makes the schema and the table `_headrace`."""
        self._left = None
        with self._transaction():
            if epoch is None:
                found = self._run(
                    "select to_regclass({name})",
                    name=sql.Literal(self._table("_headrace").as_string()),
                )
                if found.fetchone() == (None,):
                    return Mark(0, None, "", ())
                return self._read_mark()
            self._run("select pg_advisory_xact_lock(hashtext('headrace'))")
            there = "select to_regnamespace(quote_ident($1)) is not null"
            if self._run(there, self._schema).fetchone() == (False,):
                # `if not exists` asks for the right to make one even where it is there.
                self._run("create schema {schema}")
            self._run(
                "create table if not exists {schema}._headrace (follower text primary key, "
                "epoch bigint not null, log text not null, through bigint, position bigint, "
                "tables jsonb not null default '[]', loading jsonb not null default '[]', "
                "at timestamptz)"
            )
            claimed = self._run(
                "insert into {schema}._headrace as h (follower, epoch, log) values ($1, $2, $3) "
                "on conflict (follower) do update set epoch = excluded.epoch, "
                "log = coalesce(nullif(excluded.log, ''), h.log) where h.epoch < excluded.epoch",
                *(self._follower, epoch, log),
            )
            mark = self._read_mark()
            if not claimed.rowcount:
                raise self._fenced(epoch, mark.epoch)
            return mark

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
        if cut is not None and self._quick(epoch, cut, changes, refuse):
            return
        with self._transaction(pipeline=cut is not None):
            mark = self._locked(epoch)
            if cut is not None and mark.cut is not None and cut < mark.cut:
                raise errors.CutPassed(f"the target is at {mark.cut.through}", place=self.place)
            if cut is None:
                refused = [self._as_refused(*one) for each in changes for one in self._load(each)]
            else:
                tables = {one.name: one for one in mark.tables}
                tables |= self._reshaped(tables, changes)
                refused = self._merged(changes)
            refuse(refused)
            if cut is not None:
                self._now_at(cut, list(tables.values()))
        self._left = (epoch, cut, tables) if cut is not None else None

    def _quick(self, epoch: int, cut: Cut, changes: Sequence[Changes], refuse: Refuse) -> bool:
        """Apply where all is as this session left it, in two answers; else False, nothing is done.

        The mark moves first, under the condition that nobody has touched it since, which locks it
        as reading it would. Whatever goes wrong is found out, and told, on the long way.
        """
        if self._left is None or cut < self._left[1]:
            return False
        was, tables = self._left[1], self._left[2]
        self._left = None
        given = {one.table.name: one.table for one in changes}
        if any(tables.get(name) != table for name, table in given.items()):
            return False
        try:
            with self._transaction(pipeline=True):
                moved = self._run(
                    "update {schema}._headrace set through = $1, position = $2, at = now() where "
                    "follower = $3 and epoch = $4 and through = $5 and position = $6",
                    *(cut.through, cut.position, self._follower, epoch, was.through, was.position),
                )
                for one in changes:
                    for chunk in one.chunks():
                        self._merge(one.table, one.table.name, chunk)
                self._run("set constraints all immediate")
                self._done()
                if moved.rowcount != 1:
                    raise _LongWay
                refuse([])
        except (_LongWay, errors.TargetStopped):
            return False
        except errors.TargetAway:
            if self._connection.closed:
                raise
            return False
        self._left = (epoch, cut, tables)
        return True

    def _now_at(self, cut: Cut, tables: Sequence[KeptTable]) -> None:
        self._run(
            "update {schema}._headrace set through = $1, position = $2, tables = $3, at = now() "
            "where follower = $4",
            *(cut.through, cut.position, _json(tables), self._follower),
        )

    def _reshaped(
        self, tables: Mapping[str, KeptTable], changes: Sequence[Changes]
    ) -> dict[str, KeptTable]:
        """Give tables the columns that changes come with; the tables as they are then."""
        for one in changes:
            self._reshape(still_there(tables, one.table.name, self.place), one.table)
        return {one.table.name: one.table for one in changes}

    def _reshape(self, old: KeptTable, new: KeptTable) -> None:
        table = self._table(new.name)
        if steps := alterations(old, new):
            self._one_by_one()
            self._hurry()
        for what, column in steps:
            name, kind = sql.Identifier(column.name), raw(type_of(column))
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
                text = made.as_string(self._connection)
                if isinstance(error, psycopg.errors.LockNotAvailable):
                    stopped.fact += f": {text}"
                if isinstance(stopped, errors.TargetStopped):
                    stopped.fix = f"drop what depends on it, then run: {text}"
                    if what == "drop":
                        stopped.fix = f"{text} cascade"
                raise stopped from error

    # -- the first load ---------------------------------------------------------------------

    def wipe(self, epoch: int, tables: Sequence[KeptTable]) -> None:
        """See `Target`."""
        with self._transaction():
            ours = {one.name for one in self._locked(epoch).tables}
            for table in tables:
                names = table.schema.names
                if too_long := [n for n in (table.name, *names) if len(n.encode()) > LONGEST]:
                    raise errors.BadTarget(
                        f"'{too_long[0]}' is too long a name for PostgreSQL",
                        place=f"{self.place}, table {table.name}",
                        why=f"it would be cut after {LONGEST} bytes",
                        fix="leave the table out of keep(...), or rename view or column",
                    )
                if table.name not in ours and (kind := self._is_there(table.name)):
                    name = self._table(table.name).as_string(self._connection)
                    raise errors.TableNotOurs(
                        f"there is a {kind} {name} that this follower has not made",
                        place=self.place,
                        fix="keep it in another schema (hr.Table(..., schema=...)), "
                        f"or remove it: drop {kind} {name}",
                    )
                self._run("drop table if exists {t}", t=self._table(beside("_new_", table.name)))
                self._run(
                    "create table {t} ({columns}{more})",
                    t=self._table(beside("_new_", table.name)),
                    columns=columns_of(table),
                    more=raw(
                        "" if table.key else ", _row uuid, _copy bigint, primary key (_row, _copy)"
                    ),
                )
            self._run(
                "update {schema}._headrace set loading = $1 where follower = $2",
                *(_json(tables), self._follower),
            )

    def _load(self, change: Changes) -> list[Failed]:
        """Rows into a table that nobody sees; those that cannot be taken."""
        table = change.table
        if not table.key:
            self._temp(table)
        chunks = change.chunks()
        return [one for rows in chunks for one in self._halved(table, rows, loading=True)]

    def swap(self, epoch: int, cut: Cut, changes: Sequence[Changes], refuse: Refuse) -> None:
        """See `Target`."""
        self._left = None
        with self._transaction():
            mark = self._locked(epoch)
            row = self._run(
                "select loading from {schema}._headrace where follower = $1", self._follower
            ).fetchone()
            assert row is not None
            tables = [KeptTable.from_json(one) for one in row[0]]
            before = {one.name: one for one in mark.tables}
            stay = self._reshaped(before, changes)
            refused = self._merged(changes)
            for table in tables:
                self._index(table)
                if table.name in before:
                    self._reshape(before[table.name], table)
                    refused += self._made_equal(table)
                else:
                    self._run(
                        "alter table {t} rename to {n}",
                        t=self._table(beside("_new_", table.name)),
                        n=sql.Identifier(table.name),
                    )
                says = f"kept by Headrace, follower {self._follower}, which alone writes to it"
                self._run("comment on table {t} is {c}", t=self._table(table.name), c=says)
                self._run("analyze {t}", t=self._table(table.name))
            tables += stay.values()
            for name in before.keys() - {table.name for table in tables}:
                says = f"once kept by Headrace, follower {self._follower}, and no longer"
                self._run("comment on table {t} is {c}", t=self._table(name), c=says)
            refuse(refused)
            self._run(
                "update {schema}._headrace set loading = '[]' where follower = $1", self._follower
            )
            self._now_at(cut, tables)

    def _index(self, table: KeptTable) -> None:
        """The key of a loaded table, which was not there while it was loaded."""
        if not table.key:
            return
        new = self._table(beside("_new_", table.name))
        row = self._run(
            "select exists (select from {t} where {any})",
            t=new,
            any=each("{n} is null", table.key, " or "),
        ).fetchone()
        key = sql.SQL("unique nulls not distinct" if row == (True,) else "primary key")
        self._run("alter table {t} add {key} ({k})", t=new, key=key, k=names_of(table.key))

    def _made_equal(self, table: KeptTable) -> list[Refused]:
        """Make the table that is there equal to what was loaded, by what differs."""
        names = table.schema.names
        keys = table.key or ("_row", "_copy")
        new, live = self._table(beside("_new_", table.name)), self._table(table.name)
        same = "t.{n} is not distinct from d.{n}" if table.key else "t.{n} = d.{n}"
        row = self._run(
            "select attnotnull from pg_attribute where attrelid = {t}::regclass and attname = $1",
            keys[0],
            t=sql.Literal(live.as_string(self._connection)),
        ).fetchone()
        if row == (True,):
            same = "t.{n} = d.{n}"
        more = [] if table.key else ["_row", "_copy"]
        parts = {
            "t": live,
            "d": new,
            "same": each(same, keys, " and "),
            "names": names_of([*names, *more]),
            "values": names_of([*names, *more], "d."),
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
                    names_of(others, "t."),
                    names_of(others, "d."),
                    each("{n} = d.{n}", others, ", "),
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
            if not is_refusal(error):
                raise
            self._back_to("fast")
            refused = self._settled(self._copied(table))
        self._run("drop table {d}", **parts)
        return refused

    def _copied(self, table: KeptTable) -> list[Failed]:
        """All rows of what was loaded into the table that is there, in halves."""
        self._row_by_row()
        self._temp(table)
        failed: list[Failed] = []
        if not table.key:
            self._run("delete from {t}", t=self._table(table.name))
        rows = list(
            self._rows(contextlib.ExitStack(), table, beside("_new_", table.name), None, None)
        )
        for batch in rows:
            for start in range(0, batch.num_rows, CHUNK_ROWS):
                chunk = batch.slice(start, CHUNK_ROWS)
                weight = pa.array(np.ones(chunk.num_rows, np.int64))
                failed += self._halved(table, chunk.append_column(WEIGHT, weight))
        return failed


class _LongWay(Exception):
    """The mark is not as it was left."""


def _json(tables: Sequence[KeptTable]) -> str:
    return json.dumps([table.to_json() for table in tables])
