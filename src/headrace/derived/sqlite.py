"""A SQLite file as a target: the example of how little the interface asks for.

Numbers, texts and bytes are kept as they are; all else as the text that Arrow makes of it, nested
values as JSON. A transaction that begins with `begin immediate` has the file for itself, so the
epoch that it reads first cannot change under it. Rows are put in order by Arrow when they are read,
which takes them all into memory: a target for large tables lets its index do that.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from headrace import errors
from headrace.derived.postgres_text import from_json
from headrace.derived.rows import WEIGHT, row_ids
from headrace.derived.shape import alterations, still_there
from headrace.interfaces import Changes, Cut, KeptTable, Key, Mark, Refuse, Refused
from headrace.model.json_values import json_values


class SQLiteTarget:
    """A file, opened for one follower."""

    def __init__(self, path: str, follower: str) -> None:
        """Open it; made if it is not there."""
        self._follower, self.place = follower, path
        with self._talking():
            self._db = sqlite3.connect(
                path, isolation_level=None, timeout=30, check_same_thread=False
            )
        with self._transaction():
            self._run(
                "create table if not exists _headrace (follower primary key, epoch, log, through, "
                "position, tables, loading)"
            )

    def close(self) -> None:
        """Close it."""
        self._db.close()

    def mark(self, epoch: int | None = None, log: str = "") -> Mark:
        """See `Target`."""
        with self._transaction():
            mark = self._mark()
            if epoch is not None and mark.epoch >= epoch:
                raise errors.Fenced(f"the target has epoch {mark.epoch}", place=self.place)
            if epoch is not None:
                self._run(
                    "insert into _headrace values (?, ?, ?, null, null, '[]', '[]') "
                    "on conflict do update set epoch = excluded.epoch",
                    *(self._follower, epoch, log),
                )
            return self._mark()

    def apply(
        self, epoch: int, cut: Cut | None, changes: Sequence[Changes], refuse: Refuse
    ) -> None:
        """See `Target`."""
        with self._transaction():
            mark = self._mark(epoch)
            if cut is not None and mark.cut is not None and cut < mark.cut:
                raise errors.CutPassed(f"the target is at {mark.cut.through}", place=self.place)
            tables = {one.name: one for one in mark.tables}
            refused: list[Refused] = []
            for one in changes:
                if cut is not None:
                    self._reshape(still_there(tables, one.table.name, self.place), one.table)
                    tables[one.table.name] = one.table
                for chunk in one.chunks():
                    name = one.table.name if cut is not None else f"_new_{one.table.name}"
                    refused += self._take(one.table, name, chunk)
            refuse(refused)
            if cut is not None:
                self._now_at(cut, list(tables.values()))

    def read(
        self, table: KeptTable, *, after: Key | None = None, through: Key | None = None
    ) -> tuple[Mark, Iterator[pa.RecordBatch]]:
        """See `Target`."""
        with self._transaction("begin"):
            mark = self._mark()
            names = ", ".join(_q(one) for one in table.schema.names)
            found = self._run(f"select {names} from {_q(table.name)}").fetchall()  # noqa: S608
        columns = list(zip(*found, strict=True)) or [() for _ in table.columns]
        arrays = [_back(c, one.type) for c, one in zip(columns, table.schema, strict=True)]
        rows = pa.Table.from_arrays(arrays, schema=table.schema)
        keys: list[str] = list(table.key)
        if not keys:
            ids = row_ids(rows.combine_chunks().to_batches()[0]) if found else pa.nulls(0)
            rows, keys = rows.append_column("_row", ids), ["_row"]
        order = [(key, "ascending", "at_start") for key in keys]
        rows = rows.take(pc.sort_indices(rows, order)).select(
            table.schema.names + keys[len(table.key) :]
        )
        low = [one for one in _keys(rows, keys) if after is not None and not _above(one, after)]
        high = [one for one in _keys(rows, keys) if through is None or not _above(one, through)]
        some = rows.slice(len(low), max(len(high) - len(low), 0)).select(table.schema.names)
        return mark, iter(some.to_batches())

    def wipe(self, epoch: int, tables: Sequence[KeptTable]) -> None:
        """See `Target`."""
        with self._transaction():
            ours = {one.name for one in self._mark(epoch).tables}
            for table in tables:
                if table.name not in ours and self._is_there(table.name):
                    raise errors.TableNotOurs(
                        f"there is a table {table.name} that this follower has not made",
                        place=self.place,
                    )
                self._run(f"drop table if exists {_q('_new_' + table.name)}")
                columns = ", ".join(_q(one) for one in table.schema.names)
                key = f", unique ({', '.join(map(_q, table.key))})" if table.key else ""
                self._run(f"create table {_q('_new_' + table.name)} ({columns}{key})")
            self._set("loading", _json(tables))

    def swap(self, epoch: int, cut: Cut, refuse: Refuse) -> None:
        """See `Target`."""
        with self._transaction():
            self._mark(epoch)
            (loading,) = self._run(
                "select loading from _headrace where follower = ?", self._follower
            ).fetchone()
            tables = [KeptTable.from_json(one) for one in json.loads(loading)]
            for table in tables:
                self._run(f"drop table if exists {_q(table.name)}")
                self._run(f"alter table {_q('_new_' + table.name)} rename to {_q(table.name)}")
            refuse([])
            self._set("loading", "[]")
            self._now_at(cut, tables)

    # -- within a transaction ---------------------------------------------------------------

    def _run(self, text: str, *values: Any) -> sqlite3.Cursor:
        return self._db.execute(text, values)

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise errors.TargetAway(str(error), place=self.place) from error

    @contextlib.contextmanager
    def _transaction(self, begin: str = "begin immediate") -> Iterator[None]:
        with self._talking():
            self._run(begin)
            try:
                yield
                self._run("commit")
            finally:
                if self._db.in_transaction:
                    self._run("rollback")

    def _mark(self, epoch: int | None = None) -> Mark:
        row: tuple[Any, ...] = self._run(
            "select epoch, log, through, position, tables from _headrace where follower = ?",
            self._follower,
        ).fetchone() or (0, "", None, None, "[]")
        if epoch not in (None, row[0]):
            raise errors.Fenced(f"epoch {epoch}, the target has {row[0]}", place=self.place)
        tables = tuple(KeptTable.from_json(one) for one in json.loads(row[4]))
        there = tuple(one for one in tables if self._is_there(one.name))
        return Mark(row[0], None if row[2] is None else Cut(row[2], row[3]), row[1], there)

    def _is_there(self, name: str) -> bool:
        found = self._run("select 1 from sqlite_master where name = ?", name)
        return found.fetchone() is not None

    def _set(self, column: str, value: Any) -> None:
        self._run(f"update _headrace set {column} = ? where follower = ?", value, self._follower)  # noqa: S608

    def _now_at(self, cut: Cut, tables: Sequence[KeptTable]) -> None:
        self._set("through", cut.through)
        self._set("position", cut.position)
        self._set("tables", _json(tables))

    def _reshape(self, old: KeptTable, new: KeptTable) -> None:
        for what, column in alterations(old, new):
            if what != "type":  # SQLite's columns have no type
                self._run(f"alter table {_q(new.name)} {what} column {_q(column.name)}")

    def _take(self, table: KeptTable, name: str, chunk: pa.RecordBatch) -> list[Refused]:
        names = table.schema.names
        same = " and ".join(f"{_q(one)} is ?" for one in table.key or names)
        limit = f"rowid in (select rowid from {_q(name)} where {same} limit ?)"  # noqa: S608
        delete = f"delete from {_q(name)} where {limit}"  # noqa: S608
        insert = f"insert into {_q(name)} values ({', '.join('?' * len(names))})"  # noqa: S608
        refused = []
        columns = [_values(chunk.column(one)) for one in names]
        at_key = [names.index(one) for one in table.key or names]
        weights = chunk.column(WEIGHT).to_pylist()
        for place, (weight, row) in enumerate(
            zip(weights, zip(*columns, strict=True), strict=True)
        ):
            if table.key or weight < 0:
                self._run(delete, *(row[at] for at in at_key), -1 if table.key else -weight)
            try:
                for _ in range(weight):
                    self._run(insert, *row)
            except sqlite3.IntegrityError as error:
                own = {one: json_values(chunk.column(one).slice(place, 1))[0] for one in names}
                refused.append(Refused(table, own, weight, str(error), error.sqlite_errorname))
        return refused


def _q(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _json(tables: Sequence[KeptTable]) -> str:
    return json.dumps([table.to_json() for table in tables])


def _values(column: pa.Array) -> list[Any]:
    """What is stored of a column; SQLite has no NaN."""
    kind = column.type
    if pt.is_nested(kind):
        return [None if one is None else json.dumps(one) for one in json_values(column)]
    if pt.is_floating(kind):
        return ["nan" if one != one else one for one in column.to_pylist()]  # noqa: PLR0124
    if pt.is_integer(kind) or pt.is_string(kind) or pt.is_binary(kind):
        return column.to_pylist()  # type: ignore[no-any-return]
    if pt.is_duration(kind) or pt.is_time(kind) or pt.is_temporal(kind):
        return column.view(pa.int32() if pt.is_date(kind) else pa.int64()).to_pylist()  # type: ignore[no-any-return]
    return column.cast(pa.string()).to_pylist()  # type: ignore[no-any-return]


def _back(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pt.is_nested(kind):
        return pa.array(
            [None if v is None else from_json(json.loads(v), kind) for v in values], kind
        )
    if pt.is_floating(kind):
        return pa.array([None if v is None else float(v) for v in values], kind)
    if pt.is_temporal(kind):
        return pa.array(values, pa.int32() if pt.is_date(kind) else pa.int64()).view(kind)
    if pt.is_decimal(kind) or pt.is_boolean(kind):
        return pa.array(values, pa.string()).cast(kind)
    return pa.array(values, kind)


def _keys(rows: pa.Table, keys: Sequence[str]) -> list[Key]:
    return list(zip(*(rows.column(key).to_pylist() for key in keys), strict=True))


def _above(key: Key, bound: Key) -> bool:
    """Whether a key is above a bound; null is below all else."""
    for one, other in zip(key, bound, strict=True):
        if one != other:
            return other is None or (one is not None and one > other)
    return False
