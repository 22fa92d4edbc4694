"""Changes of tables in a PostgreSQL target, by COPY and MERGE; in halves where a row is refused.

**Refused rows.** When a MERGE fails by the fault of a row (a constraint, a trigger, a value that
the type does not have), the tables go back to the savepoint and are taken in halves, each in its
savepoint, until the rows are known. Now keys are deleted and inserted instead of merged, so that
two rows may exchange a unique value, but not where a foreign key points at the table: the delete
would be refused, or take along what points there. Rows that failed are tried once more after all
others, for they may have needed each other. What is left is refused, and its key is removed: a
table never shows a row that is no longer true.

**Null keys.** A table has a primary key until the first key with a null in it: then the key becomes
`unique nulls not distinct`.

A multiset has two columns more, `_row` (what the row is known by) and `_copy`, its primary key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import LiteralString
from uuid import UUID

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from headrace.derived.postgres_reading import Reading
from headrace.derived.postgres_session import columns_of, each, is_refusal, line_of, names_of
from headrace.derived.postgres_text import as_csv
from headrace.derived.rows import WEIGHT, row_ids
from headrace.interfaces import Changes, KeptTable, Refused
from headrace.model.json_values import json_values

Failed = tuple[KeptTable, pa.RecordBatch, psycopg.Error]


class Merging(Reading):
    """Makes changes to tables, within a transaction."""

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
            if not is_refusal(error):
                raise
            self._back_to("fast")
        else:
            return []
        self._row_by_row()
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
            "pg_namespace n on n.oid = c.relnamespace where f.contype = 'f' and n.nspname = %s",
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
                self._copy(self._table(f"_new_{table.name}"), names, as_csv(rows.select(names)))
            else:
                self._merge_multiset(table, f"_new_{table.name}", rows)
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

        Rows that still fail are taken out first: they may have stood in each other's way.
        """
        failed = self._again(failed, least=2)
        for table, rows, _ in failed:
            if table.key:
                own = rows.schema.names
                blank = [
                    rows.column(n) if n in table.key else pa.nulls(1, rows.column(n).type)
                    for n in own[:-1]
                ]
                gone = [*blank, pa.array([-1], pa.int64())]
                self._halved(table, pa.RecordBatch.from_arrays(gone, schema=rows.schema))
        failed = self._again(failed)
        return [self._as_refused(*one) for one in failed]

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
        temp = self._fill(table, rows)
        parts = {
            "t": self._table(name),
            "d": temp,
            "same": each(same, table.key, " and "),
            "names": names_of(names),
            "values": names_of(names, "d."),
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
            update = sql.SQL("update set ") + each("{n} = d.{n}", others, ", ")
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
            "names": names_of(names),
            "values": names_of(names, "d."),
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
