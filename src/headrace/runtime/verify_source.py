"""A captured topic against its database, online: every row at a known LSN (R-B7).

The database is read in the chunks of a snapshot (`sources.postgres.snapshot`): rows, the LSN, and
which transactions the chunk's snapshot sees. When the capture has passed that LSN the log has all
of these, and its newest position then is the chunk's. The log at that position has transactions too
that the snapshot does not see: those that were committed since, or between snapshot and LSN. They
are undone, key by key, which is exact and needs no second reading::

    what the log had of a key for that snapshot
        = the old row of the first change that an unseen transaction made to it
          (nothing, if that change was an insert);  else the key's row at the position

For one key that is so since transactions that change one row wait for each other: what comes after
an unseen one is unseen too. So writers go on, no lock is held, and no difference is false.

**A table without a key** is read by one snapshot, as its capture did. How often the log has a row
for that snapshot is the sum of its weights up to the position, less those of unseen transactions.

Rows that only the log has are found in the end: keys of the log that no chunk has shown are read
once more in the database, by key, and held against the log in the same way. A table in which rows
came behind its last key while it was read is decided so too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace import errors
from headrace.derived.verify import (
    CHANGED,
    EXTRA,
    MISSING,
    MULTISET,
    Comparison,
    Found,
    as_multiset,
    equal_rows,
)
from headrace.model.hashing import hash64
from headrace.runtime.tokens import position_of
from headrace.sources.postgres import catalog, settings
from headrace.sources.postgres.captured import PENDING_ROWS, Captured, key_texts
from headrace.sources.postgres.catalog import lsn_text
from headrace.sources.postgres.keyless import Whole
from headrace.sources.postgres.prepare import reached
from headrace.sources.postgres.seen import among
from headrace.sources.postgres.snapshot import CHUNK_ROWS, Chunk, Visible, Wanted, read_chunk
from headrace.sources.postgres.state import LIVE, TableState, table_of
from headrace.tables.runs import take_rows

if TYPE_CHECKING:
    import psycopg

    from headrace.log.embedded.log import EmbeddedLog

Words = npt.NDArray[np.uint64]
CHUNK_BYTES = 32 << 20
AHEAD = 4
"""Chunks that may be read and wait for the capture."""
LOOKED_BACK = 1_000_000
"""So many transactions of the log are asked whether a snapshot sees them."""
PATIENCE_SECONDS = 60.0


def topic_of_capture(log: EmbeddedLog, topic: str) -> tuple[str, str] | None:
    """The capture and the table that a topic is of; None if of none."""
    for name in settings.everything(log):
        state = settings.saved_state(log, name)
        for table, one in (state.tables if state is not None else {}).items():
            if one.topic == topic:
                return name, table
    return None


class SourceComparison:
    """`for found in comparison`: ours is the database, theirs the log's table."""

    def __init__(
        self,
        log: EmbeddedLog,
        capture: str,
        table: str,
        dsn: str | None = None,
        *,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        """The capture must run. `dsn`: with a password; by default as the log has it, without."""
        self._log, self._capture, self._chunk_rows = log, capture, chunk_rows
        self._settings = settings.get(log, capture)
        self._dsn = dsn or self._settings.dsn
        state = settings.saved_state(log, capture)
        found = None if state is None else state.tables.get(table)
        if found is None or found.status != LIVE:
            status = "not captured" if found is None else found.status
            raise errors.CannotVerify(
                f"table {table} of capture '{capture}' is {status}",
                place=f"{capture}.{table}",
                why="only a table that is live is wholly in its topic",
                fix="see 'headrace capture status'",
            )
        self._table, self._state = table, found
        self.topic = found.topic
        self.key = tuple(found.key)
        self.rows = 0
        """Rows of the database that are decided."""
        self.of = 0
        """The database's own estimate of how many there are."""
        self.position = 0
        """The newest chunk's position."""
        self.report: Callable[[], None] = lambda: None
        """Called after each chunk."""
        self._seen: list[tuple[Words, Words]] = []
        self._transactions = _Transactions(log, capture)

    def __iter__(self) -> Iterator[Found]:
        """The differences, chunk by chunk."""
        with reached(self._dsn) as connection:
            info = catalog.table(connection, table_of(self._table))
            if info is None:
                raise errors.CannotVerify(f"table {self._table} is gone", place=self._capture)
            self.of = info.rows
            own = TableState(self.topic, list(self.key), 0, self._state.columns)
            captured = Captured(
                self._log, info, own, catalog.types(connection), self._log.path,
                self._settings.numeric_as_text,
            )  # fmt: skip
            wanted = captured.wanted(self._chunk_rows, CHUNK_BYTES)
            if not self.key:
                yield from self._counted(connection, wanted)
                return
            for chunk in self._chunks(connection, wanted):
                self._seen.append(self._hashes(chunk.rows))
                yield from self._compared(chunk, None)
                self.report()
            for keys in self._unseen(captured):
                texts = [key_texts(keys.column(name)) for name in self.key]
                only = [list(one) for one in zip(*texts, strict=True)]
                chunk = _read(connection, replace(wanted, only=only))
                catalog.heartbeat(connection)
                yield from self._compared(chunk, keys)

    def _counted(self, connection: psycopg.Connection, wanted: Wanted) -> Iterator[Found]:
        """How often each row is there, in the database and in the log; all are held in memory."""
        pieces = [*self._pieces(wanted)]
        catalog.heartbeat(connection)
        rows = [piece.rows for piece in pieces]
        schema, visible = rows[-1].schema, pieces[-1].visible
        self._wait_for(pieces[-1].lsn)
        unseen, _ = self._transactions.unseen(visible, self.position)
        topic = self._log.topic(self.topic)
        names = [*schema.names, "_weight", "_xid"]
        held, weight = [], []
        for batch in self._log.read(self.topic, through=self.position, columns=names):
            if topic.schemas[batch.schema_version - 1].generation != topic.schema.generation:
                continue
            xid = batch.data.column("_xid").fill_null(-1).to_numpy(zero_copy_only=False)
            counts = batch.data.filter(pa.array(~np.isin(xid, unseen)))
            weight.append(counts.column("_weight").to_numpy())
            held.append(counts.select(schema.names).cast(schema))
        ours = as_multiset(rows, schema)
        theirs = as_multiset(held, schema, np.concatenate(weight) if weight else None)
        yield from Comparison(ours, theirs, MULTISET)

    def _pieces(self, wanted: Wanted) -> Iterator[Chunk]:
        """A table without a key, as one snapshot sees it."""
        while True:
            with reached(self._dsn) as own:
                whole = Whole(own, 0, wanted)
                if whole.begin():
                    while True:
                        piece = whole.next()
                        self.rows += piece.count
                        yield piece
                        self.report()
                        if piece.last is None:
                            return
            time.sleep(0.05)

    def _wait_for(self, lsn: int) -> int:
        """The newest position of the log when the capture has passed an LSN."""
        token = f"lsn:{self._capture}:{lsn_text(lsn)}"
        position_of(self._log, token, PATIENCE_SECONDS)
        self.position = self._log.position
        return self.position

    def _chunks(self, connection: psycopg.Connection, wanted: Wanted) -> Iterator[Chunk]:
        """The chunks of the table, a few read ahead of where the capture is."""
        waiting: list[Chunk] = []
        while True:
            chunk = _read(connection, wanted)
            catalog.heartbeat(connection)
            waiting.append(chunk)
            if len(waiting) >= AHEAD:
                yield waiting.pop(0)
            if chunk.last is None:
                yield from waiting
                return
            wanted = replace(wanted, after=chunk.last, upto=chunk.upto)

    def _compared(self, chunk: Chunk, keys: pa.RecordBatch | None) -> Iterator[Found]:
        """Hold a chunk against the log; with `keys`, also those of them that it does not have."""
        position = self._wait_for(chunk.lsn)
        self.rows += chunk.rows.num_rows if keys is None else 0
        schema = chunk.rows.schema
        asked = chunk.rows.select(list(self.key)) if keys is None else keys
        if not asked.num_rows:
            return
        table = self._log.table(self.topic)
        try:
            got = table.get(asked, at=position, columns=schema.names)
        except errors.BadPosition:  # nothing was captured of it yet
            got = schema.empty_table().append_column("_index", pa.array([], pa.int64()))
        index = got.column("_index").to_numpy()
        there = got.select(schema.names).cast(schema).combine_chunks().to_batches()
        log_rows = there[0] if there else pa.RecordBatch.from_pylist([], schema)
        log_rows, index = self._as_seen(chunk.visible, position, asked, log_rows, index)
        if keys is None:
            yield from _held(chunk.rows, log_rows, index)
            return
        hashes, read = self._hashes(asked)[0], self._hashes(chunk.rows)[0]
        order = np.argsort(read)
        place = np.searchsorted(read[order], hashes)
        found = np.zeros(len(hashes), bool)
        inside = place < len(read)
        found[inside] = read[order][place[inside]] == hashes[inside]
        rows = take_rows(chunk.rows, order[place[found]])
        number = np.full(len(hashes), -1)
        number[found] = np.arange(int(found.sum()))
        of_log = number[index]
        yield from _held(
            rows, take_rows(log_rows, np.flatnonzero(of_log >= 0)), of_log[of_log >= 0]
        )
        extra = np.flatnonzero(of_log < 0)
        if len(extra):
            yield Found(EXTRA, None, take_rows(log_rows, extra))

    def _as_seen(
        self,
        visible: Visible,
        position: int,
        asked: pa.RecordBatch,
        rows: pa.RecordBatch,
        index: npt.NDArray[np.int64],
    ) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
        """The rows of the log, less what transactions have done that the snapshot does not see."""
        unseen, first = self._transactions.unseen(visible, position)
        if not len(unseen):
            return rows, index
        names = [*rows.schema.names, "_weight", "_xid"]
        parts = []
        for batch in self._log.read(self.topic, after=first - 1, through=position, columns=names):
            xid = batch.data.column("_xid").fill_null(-1).to_numpy(zero_copy_only=False)
            parts.append(batch.data.filter(pa.array(np.isin(xid, unseen))))
        undone = pa.concat_batches(parts) if parts else None
        if undone is None or not undone.num_rows:
            return rows, index
        hashes = self._hashes(undone)[0]
        _, places = np.unique(hashes, return_index=True)  # the first change of each key
        of_asked = self._hashes(asked)[0]
        order = np.argsort(of_asked)
        at = np.minimum(np.searchsorted(of_asked[order], hashes[places]), len(order) - 1)
        ours = of_asked[order[at]] == hashes[places]
        places, numbers = places[ours], order[at[ours]]
        left = ~np.isin(index, numbers)
        was = undone.column("_weight").to_numpy()[places] < 0
        old = take_rows(undone, places[was]).select(rows.schema.names).cast(rows.schema)
        rows = pa.concat_batches([take_rows(rows, np.flatnonzero(left)), old])
        return rows, np.concatenate([index[left], numbers[was]])

    def _unseen(self, captured: Captured) -> Iterator[pa.RecordBatch]:
        """Keys of the log's table that no chunk has shown, some at a time."""
        seen = [np.sort(np.concatenate(words)) for words in zip(*self._seen, strict=True)]
        try:
            scan = self._log.table(self.topic).scan(columns=list(self.key))
        except errors.BadPosition:
            return
        for batch in scan:
            first, second = self._hashes(batch)
            there = among(first, seen[0]) & among(second, seen[1])
            keys = take_rows(batch, np.flatnonzero(~there)).select(list(self.key))
            for at in range(0, keys.num_rows, PENDING_ROWS):
                yield keys.slice(at, PENDING_ROWS)

    def _hashes(self, rows: pa.RecordBatch) -> tuple[Words, Words]:
        columns = [rows.column(name) for name in self.key]
        return hash64(columns, 1), hash64(columns, 2)


def _read(connection: psycopg.Connection, wanted: Wanted) -> Chunk:
    while (chunk := read_chunk(connection, wanted)) is None:
        time.sleep(0.05)
    return chunk


def _held(
    rows: pa.RecordBatch, log_rows: pa.RecordBatch, index: npt.NDArray[np.int64]
) -> Iterator[Found]:
    """Rows of the database against those of the log, each of which belongs to row `index`."""
    ours = take_rows(rows, index)
    differ = np.flatnonzero(~equal_rows(ours, log_rows))
    if len(differ):
        yield Found(CHANGED, take_rows(ours, differ), take_rows(log_rows, differ))
    missing = np.ones(rows.num_rows, bool)
    missing[index] = False
    if missing.any():
        yield Found(MISSING, take_rows(rows, np.flatnonzero(missing)), None)


class _Transactions:
    """The transactions that the log has: their numbers, and in which entry each is."""

    def __init__(self, log: EmbeddedLog, capture: str) -> None:
        self._log, self._topic = log, f"{capture}._transactions"
        self._next: int | None = None
        self._xids = self._positions = np.empty(0, np.int64)

    def unseen(self, visible: Visible, position: int) -> tuple[npt.NDArray[np.int64], int]:
        """Those up to a position that a snapshot does not see, and the entry of the first."""
        self._catch_up()
        count = int(np.searchsorted(self._positions, position, "right"))
        xids = self._xids[:count]
        word = np.int64(0xFFFF_FFFF)

        def before(bound: int) -> npt.NDArray[np.bool_]:
            distance = (np.int64(bound) - xids) & word
            return (distance > 0) & (distance < 1 << 31)

        running = np.isin(xids & word, np.array(sorted(visible.running), np.int64))
        places = np.flatnonzero(~(before(visible.xmin) | (before(visible.xmax) & ~running)))
        first = int(self._positions[places[0]]) if len(places) else position
        return xids[places], first

    def _catch_up(self) -> None:
        if self._next is None:
            if self._topic not in {one.name for one in self._log.topics()}:
                return
            (end,) = self._log.ends(self._topic)
            self._next = max(0, end - LOOKED_BACK)
        for batch in self._log.read(self._topic, self._next, columns=["xid"]):
            xids = batch.data.column("xid").to_numpy()
            self._xids = np.concatenate([self._xids, xids])
            self._positions = np.concatenate([self._positions, batch.positions.to_numpy()])
            self._next += len(batch)
