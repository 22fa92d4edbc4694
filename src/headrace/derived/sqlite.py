"""A SQLite file as a target: the example of how little the interface asks for.

Beside the rows stands one line for each follower: its mark, and that of a load until its swap. A
transaction that begins with `begin immediate` has the file for itself, so the epoch that it reads
first cannot change under it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from headrace import errors
from headrace.derived import plain
from headrace.derived.rows import WEIGHT
from headrace.derived.shape import alterations, still_there
from headrace.interfaces import Changes, Cut, KeptTable, Key, Mark, Refuse, Refused
from headrace.model.json_values import json_values


class SQLiteTarget:
    """A file, opened for one follower."""

    def __init__(self, path: str, follower: str) -> None:
        """Open it; made if it is not there."""
        self._follower, self._loading, self.place = follower, f"{follower} loading", path
        with self._talking():
            self._db = sqlite3.connect(
                path, timeout=30, isolation_level=None, check_same_thread=False
            )
        with self._transaction():
            self._run("create table if not exists _headrace (name primary key, mark)")

    def close(self) -> None:
        """Close it."""
        self._db.close()

    def mark(self, epoch: int | None = None, log: str = "") -> Mark:
        """See `Target`."""
        with self._transaction():
            mark = self._mark()
            if epoch is not None:
                if mark.epoch >= epoch:
                    raise errors.Fenced(f"the target has epoch {mark.epoch}", place=self.place)
                mark = replace(mark, epoch=epoch, log=log or mark.log)
                self._keep(self._follower, mark)
            return mark

    def apply(
        self, epoch: int, cut: Cut | None, changes: Sequence[Changes], refuse: Refuse
    ) -> None:
        """See `Target`."""
        with self._transaction():
            mark = self._mark(epoch)
            if cut is not None and mark.cut is not None and cut < mark.cut:
                raise errors.CutPassed(f"the target is at {mark.cut.through}", place=self.place)
            tables = {one.name: one for one in mark.tables}
            refuse(self._made(changes, tables, "_new_" if cut is None else ""))
            if cut is not None:
                tables |= {one.table.name: one.table for one in changes}
                now = replace(mark, cut=cut, tables=tuple(tables.values()))
                self._keep(self._follower, now)

    def read(
        self, table: KeptTable, *, after: Key | None = None, through: Key | None = None
    ) -> tuple[Mark, Iterator[pa.RecordBatch]]:
        """See `Target`."""
        with self._transaction("begin"):
            mark = self._mark()
            names = ", ".join(map(_q, table.schema.names))
            found = self._run(f"select {names} from {_q(table.name)}").fetchall()  # noqa: S608
        columns = list(zip(*found, strict=True)) or [()] * len(table.columns)
        kinds = table.schema.types
        arrays = [plain.restored(one, kind) for one, kind in zip(columns, kinds, strict=True)]
        rows = pa.Table.from_arrays(arrays, schema=table.schema)
        return mark, iter(plain.between(table, rows, after, through).to_batches())

    def wipe(self, epoch: int, tables: Sequence[KeptTable]) -> None:
        """See `Target`."""
        with self._transaction():
            mark = self._mark(epoch)
            ours = {one.name for one in mark.tables}
            for table in tables:
                if table.name not in ours and self._is_there(table.name):
                    raise errors.TableNotOurs(
                        f"there is a table {table.name} that this follower has not made",
                        place=self.place,
                    )
                self._run(f"drop table if exists {_q('_new_' + table.name)}")
                key = f", unique ({', '.join(map(_q, table.key))})" if table.key else ""
                columns = ", ".join(map(_q, table.schema.names)) + key
                self._run(f"create table {_q('_new_' + table.name)} ({columns})")
            self._keep(self._loading, replace(mark, tables=tuple(tables)))

    def swap(self, epoch: int, cut: Cut, changes: Sequence[Changes], refuse: Refuse) -> None:
        """See `Target`."""
        with self._transaction():
            mark, tables = self._mark(epoch), self._kept(self._loading).tables
            for table in tables:
                self._run(f"drop table if exists {_q(table.name)}")
                self._run(f"alter table {_q('_new_' + table.name)} rename to {_q(table.name)}")
            refuse(self._made(changes, {one.name: one for one in mark.tables}))
            self._run("delete from _headrace where name = ?", self._loading)
            tables += tuple(one.table for one in changes)
            self._keep(self._follower, replace(mark, cut=cut, tables=tables))

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
        mark = self._kept(self._follower)
        if epoch not in (None, mark.epoch):
            raise errors.Fenced(f"epoch {epoch}, the target has {mark.epoch}", place=self.place)
        there = tuple(table for table in mark.tables if self._is_there(table.name))
        return replace(mark, tables=there)

    def _kept(self, name: str) -> Mark:
        found = self._run("select mark from _headrace where name = ?", name).fetchone()
        return plain.mark_of(found[0]) if found else Mark(0, None, "", ())

    def _keep(self, name: str, mark: Mark) -> None:
        self._run("insert or replace into _headrace values (?, ?)", name, plain.mark_text(mark))

    def _is_there(self, name: str) -> bool:
        found = self._run("select 1 from sqlite_master where name = ?", name)
        return found.fetchone() is not None

    def _reshape(self, old: KeptTable, new: KeptTable) -> None:
        for what, column in alterations(old, new):
            if what != "type":  # SQLite's columns have no type
                self._run(f"alter table {_q(new.name)} {what} column {_q(column.name)}")

    def _made(
        self, changes: Sequence[Changes], tables: Mapping[str, KeptTable], before: str = ""
    ) -> list[Refused]:
        """Make changes, to tables with `before` their names; the rows that are refused."""
        refused = []
        for one in changes:
            if not before:
                self._reshape(still_there(tables, one.table.name, self.place), one.table)
            for chunk in one.chunks():
                refused += self._take(one.table, before + one.table.name, chunk)
        return refused

    def _take(self, table: KeptTable, name: str, chunk: pa.RecordBatch) -> list[Refused]:
        """Change the rows one by one: with a key what is there goes, else as many copies."""
        names = table.schema.names
        same = " and ".join(f"{_q(one)} is ?" for one in table.key or names)
        copies = f"select rowid from {_q(name)} where {same} limit ?"  # noqa: S608
        delete = f"delete from {_q(name)} where rowid in ({copies})"  # noqa: S608
        into = f"{_q(name)} ({', '.join(map(_q, names))})"
        insert = f"insert into {into} values ({', '.join('?' * len(names))})"  # noqa: S608
        refused = []
        rows = list(zip(*(plain.stored(chunk.column(one)) for one in names), strict=True))
        at_key = [names.index(one) for one in table.key or names]
        for place, (weight, row) in enumerate(
            zip(chunk.column(WEIGHT).to_pylist(), rows, strict=True)
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
