"""A transaction too large for memory, on its way into one entry: part by part.

::

    changes (spill) --> part --> rows, completed --> pieces, staged -----+
                                     |   ^                               +--> one entry names them
                                     v   | old rows, values left out     |
                                  overlay, then the topic's table -------+

A part is as many changes as are read at once (PART_BYTES). Its rows are completed as those of any
group are, but for one thing: what a part looks up may have been written by an earlier part, which
is in no entry yet. So each table of the transaction has an **overlay**: a table of its own
(`tables`), in which the number of the part stands for the position. A key is looked up there first;
what no part has touched is as the topic's table has it. Tables into which the transaction only
inserts, and live ones whose old rows the database gives (REPLICA IDENTITY FULL), need none.

**A truncate** takes away every row that is there: those of the topic's table that no part has
touched, and those of the overlay. Then the overlay is empty, and the table below it is not asked
any more. A truncate goes this way whatever the size of its transaction: the table may be large.

**Memory** is a part on its way (a few times its bytes), rows that wait to be staged (two
parts' worth for all tables together; what is left in the end goes into the entry itself), and what
the overlay maps.

**Crash.** Pieces count when the entry is there that names them, which holds the resume point too;
overlays lie in a temporary folder that is emptied at start. A table with a value that cannot be
carried is stopped: its pieces are dropped, the others go on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.model.records import Piece
from headrace.sources.complete import Numbers
from headrace.sources.postgres.captured import OF_A_TABLE, Captured, Changes
from headrace.sources.postgres.catalog import emptied
from headrace.sources.postgres.group import Run
from headrace.sources.postgres.protocol import Message, Rows, Truncate
from headrace.sources.postgres.scratch import Scratch
from headrace.sources.postgres.spill import size_of
from headrace.sources.postgres.state import STOPPED
from headrace.sources.postgres.transactions import Transaction
from headrace.tables.keyed import GONE, key_words, probed, table_schema, versions
from headrace.tables.table import ordered
from headrace.tables.upkeep import State

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog

Name = tuple[str, str]

PART_BYTES = 4 << 20
"""So much of a transaction is read at once; one with more is large."""
STAGED_PARTS = 2
"""So many parts' worth of rows may wait to be staged."""


class Overlay:
    """What a transaction has made of a table so far, by key."""

    def __init__(self, captured: Captured, folder: str) -> None:
        """The folder is made when there is much to keep."""
        self.captured = captured
        self._folder = folder
        self._key = captured.state.key
        self._own = captured.own
        self._rows = pa.schema([*self._own, pa.field("_weight", pa.int64())])
        self._schema = table_schema([self._own.field(name).type for name in self._key], self._rows)
        self._topic = captured.log.topic(captured.state.topic)
        self._below = True
        """Whether the topic's table counts where the overlay says nothing."""
        self._part = 1
        self._scratch = Scratch(folder, self._schema)

    def add(self, rows: pa.RecordBatch, weight: Numbers) -> None:
        """Take in the changes of the next part."""
        both = pa.RecordBatch.from_arrays([*rows.columns, pa.array(weight)], schema=self._rows)
        part = versions(
            both, self._key, np.full(rows.num_rows, self._part), 0,
            changes=True, seed=0, schema=self._schema,
        )  # fmt: skip
        self._scratch.add(part)
        self._part += 1

    def _state(self) -> State:
        return State(self._topic, b"", 0, 0, 0, self._scratch.collection)

    def _touched(self, keys: list[pa.Array]) -> tuple[Numbers, pa.RecordBatch]:
        """Which of the keys it knows, and their rows; those that are gone too."""
        collection = self._scratch.collection
        if not collection.rows or not len(keys[0]):
            return np.empty(0, np.int64), collection.empty()
        return probed(collection, key_words(keys, 0), self._part)

    def lookup(self, keys: list[pa.Array]) -> tuple[Numbers, pa.RecordBatch]:
        """As `Captured.lookup`, with what the transaction has done."""
        known, found = self._touched(keys)
        there = np.flatnonzero(~found.column(GONE).to_numpy(zero_copy_only=False))
        rows = found.select(self._own.names).take(pa.array(there)).cast(self._own)
        if not self._below or len(known) == len(keys[0]):
            return known[there], rows
        other = np.delete(np.arange(len(keys[0])), known)
        below, rows_below = self.captured.lookup([key.take(pa.array(other)) for key in keys])
        return (
            np.concatenate([known[there], other[below]]),
            pa.concat_batches([rows, rows_below]),
        )

    def empty(self) -> Iterator[pa.RecordBatch]:
        """Take all rows away, and hand them out."""
        for rows in self.captured.scan() if self._below else ():
            known, _ = self._touched([rows.column(name) for name in self._key])
            yield rows.take(pa.array(np.delete(np.arange(rows.num_rows), known)))
        for rows, _ in ordered(self._state(), self._part, (0,)):
            yield rows.select(self._own.names).cast(self._own)
        self._below = False
        self._scratch = Scratch(self._folder, self._schema)


@dataclass
class OfTable:
    """The rows of one topic that are done."""

    topic: str
    pieces: list[Piece] = field(default_factory=list)
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    bytes: int = 0
    """Of what is waiting."""
    rows: int = 0


class Large:
    """One transaction, being staged."""

    def __init__(
        self,
        log: EmbeddedLog,
        tables: Mapping[Name, Captured],
        one: Transaction,
        *,
        folder: str,
        messages: Callable[[], str],
        part_bytes: int = PART_BYTES,
        changes: Callable[..., Changes] = Captured.changes,
        staged: Callable[[Piece], None] = lambda _: None,
    ) -> None:
        """`messages` gives the topic of messages; `staged` is told of each piece."""
        self.log = log
        self._tables = tables
        self._one = one
        self._folder = folder
        self._messages = messages
        self._part_bytes = part_bytes
        self._changes = changes
        self._staged = staged
        self._done: dict[Name, OfTable] = {}
        self._overlays: dict[Name, Overlay] = {}
        self._said = OfTable("")
        self._read_by = {full: one.read_by(full=full) for full in (False, True)}

    @property
    def rows(self) -> int:
        """How many rows of tables there are."""
        return sum(done.rows for done in self._done.values())

    def stage(self) -> None:
        """Do everything but the entry."""
        try:
            self._stage()
        except BaseException:
            for done in (*self._done.values(), self._said):
                self.log.unstage(done.pieces)
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def append_to(self, entry: Any) -> None:
        """Put the pieces, and what is left, into an entry."""
        for done in (*self._done.values(), self._said):
            if done.pieces:
                entry.append(done.topic, done.pieces)
            if done.waiting:
                entry.append(done.topic, pa.concat_batches(done.waiting))

    def _stage(self) -> None:
        runs: dict[Name, list[Run]] = {}
        said: list[Message] = []
        size = 0
        for change in self._one.changes:
            if isinstance(change, Truncate):
                self._part(runs, said)
                runs, said, size = {}, [], 0
                for relation in change.relations:
                    self._truncate((relation.schema, relation.table))
                continue
            if isinstance(change, Rows):
                name = (change.relation.schema, change.relation.table)
                runs.setdefault(name, []).append((0, self._one.xid, change))
            else:
                said.append(change)
            size += size_of(change)
            if size > self._part_bytes:
                self._part(runs, said)
                runs, said, size = {}, [], 0
        self._part(runs, said)

    def _captured(self, name: Name) -> Captured | None:
        found = self._tables.get(name)
        return None if found is None or found.state.status == STOPPED else found

    def _overlay(self, name: Name, captured: Captured) -> Overlay | None:
        """The overlay of a table, if the transaction may look into it."""
        found = self._overlays.get(name)
        looks = captured.snapshotting or captured.info.partitioned
        if found is None and captured.state.key and name in self._read_by[looks]:
            folder = f"{self._folder}/{len(self._overlays)}"
            found = self._overlays[name] = Overlay(captured, folder)
        return found

    def _part(self, runs: Mapping[Name, list[Run]], said: list[Message]) -> None:
        for name, of_table in runs.items():
            captured = self._captured(name)
            if captured is None:
                continue
            overlay = self._overlay(name, captured)
            try:
                rows, weight, _, op = self._changes(
                    captured, of_table, None if overlay is None else overlay.lookup
                )
            except OF_A_TABLE as error:
                captured.state.stop(error)
                self.log.unstage(self._done.pop(name, OfTable("")).pieces)
                continue
            if rows.num_rows:
                if overlay is not None:
                    overlay.add(rows, weight)
                self._put(name, captured, rows, weight, op)
        if said:
            self._said.topic = self._messages()
            xid = self._one.xid
            told = [
                {"prefix": one.prefix, "content": one.content, "lsn": one.lsn, "xid": xid}
                for one in said
            ]
            self._wait(self._said, pa.RecordBatch.from_pylist(told))
        pa.default_memory_pool().release_unused()

    def _truncate(self, name: Name) -> None:
        captured = self._captured(name)
        if captured is None:
            return
        overlay = self._overlay(name, captured)
        if overlay is None:  # without a key: what the transaction did before is as if it was not
            self.log.unstage(self._done.pop(name, OfTable("")).pieces)
        there = ((rows, -1) for rows in (overlay.empty() if overlay else ()))
        if overlay is None and not captured.snapshotting:
            added_up = captured.added_up()
            there = ((rows, -sign) for sign in (1, -1) for rows in added_up.rest(sign))
        for rows, weight in there:
            op = pa.array(["t"] * rows.num_rows, pa.string())
            self._put(name, captured, rows, np.full(rows.num_rows, weight), op)
        captured.overtaken(self._one.xid)
        captured.state.storage = emptied(captured.state.storage)

    def _put(
        self, name: Name, captured: Captured, rows: pa.RecordBatch, weight: Numbers, op: pa.Array
    ) -> None:
        done = self._done.get(name)
        if done is None:
            done = self._done[name] = OfTable(captured.state.topic)
        one, same = self._one, np.ones(rows.num_rows, np.int64)
        batch = captured.with_meta(
            rows, weight, op, same * one.end_lsn, same * one.xid, same * one.commit_time_us
        )
        done.rows += rows.num_rows
        self._wait(done, batch)

    def _wait(self, done: OfTable, batch: pa.RecordBatch) -> None:
        """Rows wait, and those of the largest topics are staged when they are too many."""
        done.waiting.append(batch)
        done.bytes += batch.nbytes
        topics = [*self._done.values(), self._said]
        while sum(one.bytes for one in topics) > STAGED_PARTS * self._part_bytes:
            most = max(topics, key=lambda one: one.bytes)
            reader = pa.RecordBatchReader.from_batches(most.waiting[0].schema, most.waiting)
            most.pieces.append(self.log.stage(most.topic, reader))
            self._staged(most.pieces[-1])
            most.waiting, most.bytes = [], 0
