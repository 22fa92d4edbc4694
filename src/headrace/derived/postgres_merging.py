"""Changes of tables in a PostgreSQL target, by COPY and MERGE; in halves where a row is refused.

**Few rows** are values of the MERGE itself: all statements of a cut can then be sent at once, and
the server knows how few they are. Of a temporary table it would guess a thousand, and would read a
table of some ten thousand rows from end to end to find three of them.

**Refused rows.** When a MERGE fails by the fault of a row (a constraint, a trigger, a value that
the type does not have), the tables go back to the savepoint and are taken in halves, each in its
savepoint, until the rows are known. Now keys are deleted and inserted instead of merged, so that
two rows may exchange a unique value, but not where a foreign key points at the table: the delete
would be refused, or take along what points there. Rows that failed are tried once more after all
others, for they may have needed each other. What is left is refused, and its key is removed: a
table never shows a row that is no longer true. Where a foreign key holds it, its key stays, and
nothing else of it.

**Keys that PostgreSQL takes for one.** 1.0 and 1.00 are one numeric, P1D and PT24H one interval,
and in the log, where they are texts, two keys. When one becomes the other, the old one goes and the
new one comes in one cut: what goes is left out then, the key is updated too, and only the row that
is written in the same way is ever deleted.

**Null keys.** A table has a primary key until the first key with a null in it: then the key becomes
`unique nulls not distinct`.

A multiset has two columns more, `_row` (what the row is known by) and `_copy`, its primary key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import LiteralString
from uuid import UUID

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from headrace.derived.postgres_reading import Reading
from headrace.derived.postgres_session import (
    beside,
    columns_of,
    each,
    is_refusal,
    line_of,
    names_of,
    quoted,
    raw,
)
from headrace.derived.postgres_text import as_array, as_csv, is_loose, type_of
from headrace.derived.rows import MANY, WEIGHT, row_ids
from headrace.interfaces import Changes, KeptTable, Refused
from headrace.model.json_values import json_values

FEW = 1000
"""So many rows at most are values of a statement."""
Failed = tuple[KeptTable, pa.RecordBatch, psycopg.Error]


class Merging(Reading):
    """Makes changes to tables, within a transaction."""

    def _merged(self, changes: Sequence[Changes]) -> list[Refused]:
        self._run("savepoint fast")
        try:
            for one in changes:
                for chunk in one.chunks():
                    self._merge(one.table, one.table.name, chunk)
            self._run("set constraints all immediate")
            self._done()
        except psycopg.Error as error:
            if not is_refusal(error):
                raise
            with contextlib.suppress(psycopg.errors.PipelineAborted):  # what was sent behind it
                self._one_by_one()
            self._back_to("fast")
        else:
            return []
        self._row_by_row()
        self._temps.clear()  # those that were made since are gone
        for one in changes:
            self._temp(one.table)
        failed: list[Failed] = []
        for one in changes:
            for chunk in one.chunks():
                failed = [f for f in failed if f[0] != one.table or not _has_key_of(chunk, *f[:2])]
                failed += self._halved(one.table, chunk)
        return self._settled(failed)

    def _row_by_row(self) -> None:
        """Each statement is right by itself, or refused; which tables do foreign keys point at."""
        self._run("set constraints all immediate")
        found = self._run(
            "select c.relname from pg_constraint f join pg_class c on c.oid = f.confrelid join "
            "pg_namespace n on n.oid = c.relnamespace where f.contype = 'f' and n.nspname = $1",
            self._schema,
        )
        self._pointed_at = {name for (name,) in found.fetchall()}

    def _halved(
        self, table: KeptTable, rows: pa.RecordBatch, *, loading: bool = False
    ) -> list[Failed]:
        """Take rows in halves; those that cannot be taken."""
        if not rows.num_rows:
            return []
        self._run("savepoint half")
        try:
            if not loading:
                replace = table.name not in self._pointed_at
                self._merge(table, table.name, rows, replace=replace)
            elif table.key:
                names = table.schema.names
                self._copy(
                    self._table(beside("_new_", table.name)), names, as_csv(rows.select(names))
                )
            else:
                self._merge_multiset(table, beside("_new_", table.name), rows)
            self._run("release savepoint half")
        except psycopg.Error as error:
            if not is_refusal(error):
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

        Rows that still fail are taken out first: they may have stood in each other's way. Those
        that foreign keys may point at are only emptied for it.
        """
        failed = self._again(failed, least=2)
        for table, rows, _ in failed:
            self._emptied(table, rows, 1 if table.name in self._pointed_at else -1)
        failed = self._again(failed)
        for table, rows, _ in failed:
            self._emptied(table, rows, -1)
        return [self._as_refused(*one) for one in failed]

    def _emptied(self, table: KeptTable, row: pa.RecordBatch, weight: int) -> None:
        """Leave nothing of a row but its key, or (a negative weight) not even that."""
        if table.key:
            columns = [
                row.column(n) if n in table.key else pa.nulls(1, row.column(n).type)
                for n in row.schema.names[:-1]
            ]
            columns.append(pa.array([weight], pa.int64()))
            self._halved(table, pa.RecordBatch.from_arrays(columns, schema=row.schema))

    def _again(self, failed: list[Failed], least: float = 1) -> list[Failed]:
        """Try again as long as that leaves so many times fewer; what still fails."""
        helps = bool(failed)
        while helps:
            again = [one for table, rows, _ in failed for one in self._halved(table, rows)]
            helps = len(again) * least <= len(failed) and 0 < len(again) < len(failed)
            failed = again
        return failed

    def _as_refused(self, table: KeptTable, rows: pa.RecordBatch, error: psycopg.Error) -> Refused:
        own = rows.select(table.schema.names)
        row = {n: json_values(own.column(n))[0] for n in own.schema.names}
        if not table.key:
            row["_row"] = row_ids(own)[0].as_py().hex()
        reason = " ".join(filter(None, [line_of(error), error.diag.message_detail]))
        code = error.sqlstate or "22021"  # a NUL in a text, which psycopg does not send
        return Refused(table, row, rows.column(WEIGHT)[0].as_py(), reason, code)

    # -- one table --------------------------------------------------------------------------

    def _temp(self, table: KeptTable) -> sql.Composed:
        """The temporary table for changes of a table, made once a session; empty."""
        name = beside("_changes_", table.name)
        full = sql.SQL("pg_temp.{}").format(sql.Identifier(name))
        if self._temps.get(name) != table:
            self._run("drop table if exists {t}", t=full)
            extra: sql.Composable = sql.SQL("_weight bigint")
            if not table.key:
                extra = sql.SQL("_row uuid, _weight bigint")
            self._run(
                "create temp table {t} ({columns}, {extra}) on commit delete rows",
                t=sql.Identifier(name),
                columns=columns_of(table),
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
        source, values = self._source(table, rows)
        loose = [one.name for one in table.columns if one.name in table.key and is_loose(one)]
        written: sql.Composable = sql.SQL("")
        if loose and not replace:
            others_of_key: LiteralString = same.replace("t.", "e.")
            source = sql.SQL(
                "(select * from {d} d where _weight > 0 or not exists "
                "(select from {d} e where e._weight > 0 and {same}))"
            ).format(d=source, same=each(others_of_key, table.key, " and "))
            form: LiteralString = " and format('%s', t.{n}) = format('%s', d.{n})"
            written = each(form, loose, "")
        parts = {
            "t": self._table(name),
            "d": source,
            "same": each(same, table.key, " and "),
            "names": names_of(names),
            "values": names_of(names, "d."),
        }
        if replace:
            self._run("delete from {t} t using {d} d where {same}", *values, **parts)
            insert: LiteralString = (
                "insert into {t} ({names}) select {values} from {d} d where _weight > 0"
            )
            self._run(insert, *values, **parts)
            return
        others = [one for one in names if one not in table.key or one in loose]
        update: sql.Composable = sql.SQL("do nothing")
        if others:
            update = sql.SQL("update set ") + each("{n} = d.{n}", others, ", ")
        self._run(
            "merge into {t} t using {d} d on {same} "
            "when matched and d._weight < 0{written} then delete "
            "when matched and d._weight > 0 then {update} "
            "when not matched and d._weight > 0 then insert ({names}) values ({values})",
            *values,
            **parts,
            written=written,
            update=update,
        )

    def _merge_multiset(self, table: KeptTable, name: str, rows: pa.RecordBatch) -> None:
        names = table.schema.names
        ids = [str(UUID(bytes=one)) for one in row_ids(rows.select(names)).to_pylist()]
        source, values = self._source(table, rows.append_column("_row", pa.array(ids)))
        parts = {
            "t": self._table(name),
            "d": source,
            "names": names_of(names),
            "values": names_of(names, "d."),
        }
        if -MANY in rows.column(WEIGHT).to_pylist():  # also those that somebody else put there
            self._run(
                "delete from {t} t using {d} d where d._weight = {all} "
                "and row({ours})::text = row({values})::text",
                *values,
                **parts,
                ours=names_of(names, "t."),
                all=sql.Literal(-MANY),
            )
        # Copies may be missing in between, where somebody has deleted some: the last ones count.
        self._run(
            "delete from {t} t using {d} d cross join lateral (select h._copy from {t} h "
            "where h._row = d._row order by h._copy desc limit greatest(-d._weight, 0)) x "
            "where t._row = d._row and t._copy = x._copy",
            *values,
            **parts,
        )
        self._run(
            "insert into {t} ({names}, _row, _copy) select {values}, d._row, "
            "coalesce((select max(_copy) from {t} h where h._row = d._row), 0) + _c "
            "from {d} d cross join generate_series(1, d._weight) _c where d._weight > 0",
            *values,
            **parts,
        )

    def _source(self, table: KeptTable, rows: pa.RecordBatch) -> tuple[sql.Composable, list[str]]:
        """Where a statement finds changes: few are its values, more are in the temporary table.

        Of a row that is gone the key is enough, and all that the target must be able to take.
        """
        there = pc.greater(rows.column(WEIGHT), 0)
        needed = {*table.key, WEIGHT} if table.key else {*rows.schema.names}
        if rows.num_rows <= FEW:
            kinds = {one.name: type_of(one) for one in table.columns}
            kinds |= {"_row": "uuid", WEIGHT: "bigint"}
            values, arrays, names = [], [], []
            for at, (name, column) in enumerate(zip(rows.schema.names, rows.columns, strict=True)):
                if name not in needed:
                    column = pc.if_else(there, column, pa.scalar(None, column.type))  # noqa: PLW2901
                values.append(as_array(column))
                arrays.append(f"${at + 1}::text[]")
                names.append(f"_{at}::{kinds[name]} as {quoted(name)}")
            numbers = ", ".join(f"_{at}" for at in range(len(names)))
            made = f"select {', '.join(names)} from unnest({', '.join(arrays)}) x({numbers})"  # noqa: S608
            return raw(f"({made})"), values
        temp = self._temp(table)
        self._used.add(beside("_changes_", table.name))
        if not table.key:
            self._copy(temp, rows.schema.names, as_csv(rows))
            return temp, []
        here, gone = rows.filter(there), rows.filter(pc.invert(there)).select([*table.key, WEIGHT])
        for some in (here, gone):
            if some.num_rows:
                self._copy(temp, some.schema.names, as_csv(some))
        return temp, []

    def _allow_nulls(self, table: KeptTable, name: str) -> None:
        """Turn the primary key into one that may be null."""
        if name in self._nullable:
            return
        row = self._run(
            "select conname from pg_constraint where contype = 'p' and conrelid = "
            "(select c.oid from pg_class c join pg_namespace n on n.oid = c.relnamespace "
            "where n.nspname = $1 and c.relname = $2)",
            *(self._schema, name),
        ).fetchone()
        if row is not None:
            self._hurry()
            self._run(
                "alter table {t} drop constraint {c}, {columns}, "
                "add unique nulls not distinct ({k})",
                t=self._table(name),
                c=sql.Identifier(row[0]),
                columns=each("alter column {n} drop not null", table.key, ", "),
                k=names_of(table.key),
            )
        self._nullable.add(name)


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
