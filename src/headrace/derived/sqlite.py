"""A SQLite file as a target: the example of how little it takes to write one.

`begin immediate` has the file for itself, and columns without types take whatever they are given.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from headrace import errors
from headrace.derived.small import SmallTarget
from headrace.interfaces import KeptTable
from headrace.model.schema import Column


class SQLiteTarget(SmallTarget):
    """A file, made if it is not there."""

    def __init__(self, path: str, follower: str) -> None:
        super().__init__(path, follower)
        with self._talking():
            self._db = sqlite3.connect(
                path, timeout=30, isolation_level=None, check_same_thread=False
            )
        with self.transaction():
            self._run("create table if not exists _headrace (name primary key, mark)")

    def close(self) -> None:
        self._db.close()

    def _run(self, text: str, *values: Any) -> sqlite3.Cursor:
        return self._db.execute(text, values)

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise errors.TargetAway(str(error), place=self.place) from error

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        with self._talking():
            self._run("begin immediate")
            try:
                yield
                self._run("commit")
            finally:
                if self._db.in_transaction:
                    self._run("rollback")

    def text(self, name: str) -> str | None:
        found = self._run("select mark from _headrace where name = ?", name).fetchone()
        return str(found[0]) if found else None

    def keep(self, name: str, text: str) -> None:
        self._run("insert or replace into _headrace values (?, ?)", name, text)

    def is_there(self, name: str) -> bool:
        return bool(self._run("select 1 from sqlite_master where name = ?", name).fetchone())

    def create(self, name: str, table: KeptTable) -> None:
        key = f", unique ({_names(table.key)})" if table.key else ""
        self._run(f"create table {_q(name)} ({_names(table.schema.names)}{key})")

    def drop(self, name: str) -> None:
        self._run(f"drop table if exists {_q(name)}")

    def rename(self, name: str, new: str) -> None:
        self._run(f"alter table {_q(name)} rename to {_q(new)}")

    def alter(self, name: str, what: str, column: Column) -> None:
        if what != "type":
            self._run(f"alter table {_q(name)} {what} column {_q(column.name)}")

    def rows(self, name: str, columns: Sequence[str]) -> Iterable[Sequence[Any]]:
        return self._run(f"select {_names(columns)} from {_q(name)}").fetchall()

    def delete(self, name: str, values: Mapping[str, Any], copies: int | None) -> None:
        same = " and ".join(f"{_q(one)} is ?" for one in values)
        found = f"select rowid from {_q(name)} where {same} limit ?"
        limit = -1 if copies is None else copies
        self._run(f"delete from {_q(name)} where rowid in ({found})", *values.values(), limit)

    def insert(self, name: str, values: Mapping[str, Any]) -> tuple[str, str] | None:
        holes = ", ".join("?" * len(values))
        try:
            self._run(
                f"insert into {_q(name)} ({_names(values)}) values ({holes})", *values.values()
            )
        except sqlite3.IntegrityError as error:
            return str(error), error.sqlite_errorname
        return None


def _q(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(_q, names))
