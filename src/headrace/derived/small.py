"""The five methods of a target, for a store that has transactions, named texts and tables of rows.

A target of this kind says only how its store does these, as `derived/sqlite.py` does; what a
follower relies on is here, once. Beside the rows stands one text for each follower, its mark, and
until the swap that of a load, whose tables have other names. Each method is one transaction that
has the store for itself and reads the mark first: so the epoch and the cut that it finds cannot
change under it, and it happens whole or not at all. Rows are changed one by one, and numbers, texts
and bytes are all that the store must know (`plain.stored`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pyarrow as pa

from headrace import errors
from headrace.derived import plain
from headrace.derived.rows import WEIGHT
from headrace.derived.shape import alterations, still_there
from headrace.interfaces import Changes, Cut, KeptTable, Key, Mark, Refuse, Refused
from headrace.model.json_values import json_values
from headrace.model.schema import Column

NEW = "_new_"
"""Tables that are being loaded have this before their names."""


class SmallTarget(ABC):
    """A target on a small store, opened for one follower; all rows of a table fit into memory."""

    def __init__(self, place: str, follower: str) -> None:
        """`place`: where the store is, for people."""
        self.place, self._follower, self._loading = place, follower, f"{follower} loading"

    # -- what a store does ------------------------------------------------------------------

    @abstractmethod
    def transaction(self) -> AbstractContextManager[object]:
        """All that is done within happens, or nothing; nobody else's is under way meanwhile.

        A store that cannot be reached is `TargetAway`.
        """

    @abstractmethod
    def text(self, name: str) -> str | None:
        """The text that is kept under a name."""

    @abstractmethod
    def keep(self, name: str, text: str) -> None:
        """Keep a text, instead of what was there; an empty one is forgotten."""

    @abstractmethod
    def is_there(self, name: str) -> bool:
        """Whether there is a table of this name."""

    @abstractmethod
    def create(self, name: str, table: KeptTable) -> None:
        """Make an empty table."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Drop a table, if it is there."""

    @abstractmethod
    def rename(self, name: str, new: str) -> None:
        """Give a table another name."""

    @abstractmethod
    def alter(self, name: str, what: str, column: Column) -> None:
        """Drop or add a column, or let it have another type: `drop`, `add`, `type`."""

    @abstractmethod
    def rows(self, name: str, columns: Sequence[str]) -> Iterable[Sequence[Any]]:
        """All rows of a table, in any order."""

    @abstractmethod
    def delete(self, name: str, values: Mapping[str, Any], copies: int | None) -> None:
        """Delete the rows with these values (null is null): all, or so many of them."""

    @abstractmethod
    def insert(self, name: str, values: Mapping[str, Any]) -> tuple[str, str] | None:
        """Insert a row; if the store refuses it, its reason and what it calls it."""

    @abstractmethod
    def close(self) -> None:
        """Let it go."""

    # -- the five methods, see `Target` -----------------------------------------------------

    def mark(self, epoch: int | None = None, log: str = "") -> Mark:
        """See `Target`."""
        with self.transaction():
            mark = self._mark()
            if epoch is not None:
                if mark.epoch >= epoch:
                    raise errors.Fenced(f"the target has epoch {mark.epoch}", place=self.place)
                mark = replace(mark, epoch=epoch, log=log or mark.log)
                self.keep(self._follower, plain.mark_text(mark))
            return mark

    def apply(
        self, epoch: int, cut: Cut | None, changes: Sequence[Changes], refuse: Refuse
    ) -> None:
        """See `Target`."""
        with self.transaction():
            mark = self._mark(epoch)
            if cut is not None and mark.cut is not None and cut < mark.cut:
                raise errors.CutPassed(f"the target is at {mark.cut.through}", place=self.place)
            tables = {one.name: one for one in mark.tables}
            refuse(self._made(changes, tables, NEW if cut is None else ""))
            if cut is not None:
                tables |= {one.table.name: one.table for one in changes}
                self._stay(replace(mark, cut=cut, tables=tuple(tables.values())))

    def read(
        self, table: KeptTable, *, after: Key | None = None, through: Key | None = None
    ) -> tuple[Mark, Iterator[pa.RecordBatch]]:
        """See `Target`."""
        with self.transaction():
            mark, found = self._mark(), [*self.rows(table.name, table.schema.names)]
        columns = list(zip(*found, strict=True)) or [()] * len(table.columns)
        arrays = [*map(plain.restored, columns, table.schema.types)]
        rows = pa.Table.from_arrays(arrays, schema=table.schema)
        return mark, iter(plain.between(table, rows, after, through).to_batches())

    def wipe(self, epoch: int, tables: Sequence[KeptTable]) -> None:
        """See `Target`."""
        with self.transaction():
            mark = self._mark(epoch)
            ours = {one.name for one in mark.tables}
            for table in tables:
                if table.name not in ours and self.is_there(table.name):
                    raise errors.TableNotOurs(
                        f"there is a table {table.name} that this follower has not made",
                        place=self.place,
                    )
                self.drop(NEW + table.name)
                self.create(NEW + table.name, table)
            self.keep(self._loading, plain.mark_text(replace(mark, tables=tuple(tables))))

    def swap(self, epoch: int, cut: Cut, changes: Sequence[Changes], refuse: Refuse) -> None:
        """See `Target`."""
        with self.transaction():
            mark, tables = self._mark(epoch), self._kept(self._loading).tables
            for table in tables:
                self.drop(table.name)
                self.rename(NEW + table.name, table.name)
            refuse(self._made(changes, {one.name: one for one in mark.tables}))
            self.keep(self._loading, "")
            tables += tuple(one.table for one in changes)
            self._stay(replace(mark, cut=cut, tables=tables))

    # -- within a transaction ---------------------------------------------------------------

    def _mark(self, epoch: int | None = None) -> Mark:
        mark = self._kept(self._follower)
        if epoch not in (None, mark.epoch):
            raise errors.Fenced(f"epoch {epoch}, the target has {mark.epoch}", place=self.place)
        there = tuple(table for table in mark.tables if self.is_there(table.name))
        return replace(mark, tables=there)

    def _kept(self, name: str) -> Mark:
        text = self.text(name)
        return plain.mark_of(text) if text else Mark(0, None, "", ())

    def _stay(self, mark: Mark) -> None:
        self.keep(self._follower, plain.mark_text(mark))

    def _made(
        self, changes: Sequence[Changes], tables: Mapping[str, KeptTable], before: str = ""
    ) -> list[Refused]:
        """Make changes, to tables with `before` their names; the rows that are refused."""
        refused: list[Refused] = []
        for one in changes:
            name = one.table.name
            if not before:
                for what, column in alterations(still_there(tables, name, self.place), one.table):
                    self.alter(name, what, column)
            for chunk in one.chunks():
                refused += self._take(before + name, one.table, chunk)
        return refused

    def _take(self, name: str, table: KeptTable, chunk: pa.RecordBatch) -> Iterator[Refused]:
        """Change the rows one by one: with a key what is there goes, else as many copies."""
        names = table.schema.names
        rows = zip(*(plain.stored(chunk.column(one)) for one in names), strict=True)
        weights = chunk.column(WEIGHT).to_pylist()
        for number, (weight, values) in enumerate(zip(weights, rows, strict=True)):
            row = dict(zip(names, values, strict=True))
            if table.key or weight < 0:
                same = {one: row[one] for one in table.key or names}
                self.delete(name, same, None if table.key else -weight)
            for _ in range(weight):
                why = self.insert(name, row)
                if why is not None:
                    own = {one: json_values(chunk.column(one).slice(number, 1))[0] for one in names}
                    yield Refused(table, own, weight, *why)
                    break
