"""Tables without a key: their rows are counted, not told apart, and read in one snapshot.

Rows that are wholly equal cannot be told apart, so the topic has no key, and what counts is how
often each row is there: the sum of its weights. With REPLICA IDENTITY FULL the stream says the
whole old row, so a live table needs nothing else.

**Why one snapshot.** Chunks by place (`ctid`) with a snapshot each would count a row twice, or
never, that an update moves to another block between them: the stream names no places, so nobody
could tell. So all blocks are read by one snapshot V, in pieces; if it breaks off, all begins again.

**The hand-off.** Each transaction counts once: if V sees it, its rows are in V, and what the stream
says of it is dropped; if V does not, what the stream says is taken. Before V is there everything is
dropped, and V must then see it all (`TableState.unseen`, kept in the log as a crash may come
between). The table is live when all of V is published and the stream has passed the place where V
was taken: nothing that V sees comes behind it.

**Never less than nothing.** A row may be deleted by the stream before V's piece with that row is
published. So while the table is read, old rows are not taken away at once: they are *owed*. A row
of V that is owed is not published; what is owed in the end is taken away then. Rows that the topic
had before (of an attempt that was killed, or of a snapshot that is repeated) are owed from the
beginning. With K for these, V as above, I and D for new and old rows of the stream::

    K + I + (V - (K + D))  =  V + I - D  =  the table

and what is there is at every entry at least 0. K is as large as the table (but empty when a table
is read for the first time), so what is owed lies in files, sorted by two hashes of the row.

Only where the server has rewritten the rows of a live table in silence (ALTER ... USING) the stream
takes rows away, as they are now, that the topic has as they were. That is seen soon, and the table
is read anew; what K has less often than never is then put back in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
from psycopg import sql

from headrace.model.hashing import hash64
from headrace.sources.complete import Numbers
from headrace.sources.postgres.scratch import Scratch
from headrace.sources.postgres.snapshot import (
    FORMAT,
    Chunk,
    Visible,
    Wanted,
    begin,
    chunk_of,
    copied,
)
from headrace.tables.runs import (
    consolidate,
    identity,
    state_batch,
    state_schema,
    take_rows,
    weights,
    with_weights,
)

PIECE_BYTES = 8 << 20
REST_ROWS = 1 << 14
MORE: list[str] = []
"""As the last key of a piece: there are more."""


class Owed:
    """Rows that are to be taken away, each as often as it is here; they lie in files."""

    def __init__(self, folder: str) -> None:
        """Where there is room for the files."""
        self._folder = folder
        self._rows: Scratch | None = None

    def add(self, rows: pa.RecordBatch, weight: Numbers | None = None) -> None:
        """Take these away too, each once, or as often as its weight says."""
        if rows.num_rows:
            count = np.ones(rows.num_rows, np.int64) if weight is None else weight
            schema = state_schema(rows.schema)
            self._rows = self._rows or Scratch(self._folder, schema)
            self._rows.add(_weighted(rows, schema, count))

    def pay(self, rows: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Which of these rows are left when what is owed is taken away."""
        left = np.ones(rows.num_rows, bool)
        if self._rows is None or not rows.num_rows:
            return left
        owed = self._rows.collection
        each = _weighted(rows, owed.schema, np.ones(rows.num_rows, np.int64))
        order = np.lexsort(identity(each)[::-1])  # equal rows side by side
        there = consolidate(each)
        count = weights(there)
        paid = np.minimum(owed.weights_of(there), count).clip(0)
        number = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
        left[order[number < np.repeat(paid, count)]] = False
        self._rows.add(with_weights(there, -paid).filter(pa.array(paid > 0)))
        return left

    def rest(self, sign: int = 1) -> Iterator[pa.RecordBatch]:
        """What is still owed; with a sign of -1, what is there less often than never."""
        for some in () if self._rows is None else self._rows.collection.scan():
            ends = np.cumsum((sign * weights(some)).clip(0))
            rows = some.select(some.schema.names[len(identity(some)) + 1 :])
            for at in range(0, int(ends[-1]), REST_ROWS):
                which = np.arange(at, min(at + REST_ROWS, ends[-1]))
                yield take_rows(rows, ends.searchsorted(which, "right"))


def _weighted(rows: pa.RecordBatch, schema: pa.Schema, weight: Numbers) -> pa.RecordBatch:
    first, second = (hash64(rows.columns, seed) for seed in (1, 2))
    return state_batch(rows.columns, schema, weight, k=first, h=second)


class Whole:
    """A table read by one snapshot, piece by piece, over a connection of its own."""

    def __init__(self, connection: psycopg.Connection, turn: int, wanted: Wanted) -> None:
        """`begin` takes the snapshot; `turn` is that of the table."""
        self._connection = connection
        self._wanted = wanted
        self.turn = turn
        self.visible: Visible
        self._lsn = 0
        self._pieces = self._read()
        self._lock = threading.Lock()
        self._ended = False

    def begin(self) -> bool:
        """Take the snapshot; False: not now, and the connection is closed."""
        connection = self._connection
        connection.autocommit = False
        try:
            with connection.cursor() as cursor:
                found = begin(cursor, self._wanted)
        except psycopg.errors.LockNotAvailable:
            found = None
        except psycopg.Error:
            self.close()
            raise
        if found is None:
            self.close()
            return False
        self.visible, self._lsn, _ = found
        return True

    def next(self) -> Chunk:
        """The next piece."""
        try:
            with self._lock:
                return next(self._pieces)
        finally:
            if self._ended:
                self.close()

    def close(self) -> None:
        """End it; while another thread reads, that one does."""
        self._ended = True
        if self._lock.acquire(blocking=False):
            self._connection.close()
            self._lock.release()

    def _read(self) -> Generator[Chunk, None, None]:
        wanted = self._wanted
        names = sql.SQL(", ").join(map(sql.Identifier, wanted.columns))
        query = sql.SQL("COPY (SELECT {} FROM {}) TO STDOUT {}").format(
            names, wanted.source, FORMAT
        )
        data: list[bytes] = []
        size = 0
        for rows in copied(self._connection, query):
            for row in rows:
                data.append(row)
                size += len(row)
                if size >= PIECE_BYTES or len(data) >= wanted.limit:
                    yield self._piece(data, 0, MORE)
                    data, size = [], 0
        self._connection.close()
        yield self._piece(data, self._lsn, None)

    def _piece(self, data: Sequence[bytes], lsn: int, last: list[str] | None) -> Chunk:
        return chunk_of(self._wanted, data, self.visible, lsn, last)
