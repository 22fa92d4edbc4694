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

and what is there is at every entry at least 0. Two hashes and the row are kept in memory for all
that is owed: K is as large as the table, but empty when a table is read for the first time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
from psycopg import sql

from headrace.sources.postgres.snapshot import (
    FORMAT,
    Chunk,
    Visible,
    Wanted,
    begin,
    chunk_of,
    copied,
)
from headrace.tables.hashing import hash64

Hashes = list[tuple[int, int]]
PIECE_BYTES = 8 << 20
REST_ROWS = 1 << 14
MORE: list[str] = []
"""As the last key of a piece: there are more."""


class Owed:
    """Rows that are to be taken away, each as often as it is here."""

    def __init__(self, rows: Sequence[pa.RecordBatch] = ()) -> None:
        """Those to begin with."""
        self._rows: list[pa.RecordBatch] = []
        self._count: Counter[tuple[int, int]] = Counter()
        self._total = 0
        for one in rows:
            self.add(one)

    def add(self, rows: pa.RecordBatch) -> None:
        """Take these away too."""
        if rows.num_rows:
            self._rows.append(rows)
            self._count.update(_hashes(rows))
            self._total += rows.num_rows

    def pay(self, rows: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Which of these rows are left when what is owed is taken away."""
        left = np.ones(rows.num_rows, bool)
        if self._total:
            for at, one in enumerate(_hashes(rows)):
                if self._count[one] > 0:
                    self._count[one] -= 1
                    left[at] = False
            self._total -= int(np.count_nonzero(~left))
        return left

    def rest(self) -> Iterator[pa.RecordBatch]:
        """What is still owed."""
        for rows in self._rows:
            for at in range(0, rows.num_rows if self._total else 0, REST_ROWS):
                some = rows.slice(at, REST_ROWS)
                yield some.filter(pa.array(~self.pay(some)))


def _hashes(rows: pa.RecordBatch) -> Hashes:
    first, second = (hash64(rows.columns, seed).tolist() for seed in (1, 2))
    return list(zip(first, second, strict=True))


def summed(rows: pa.RecordBatch, weight: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """The rows that are there when all weights are added up, each as often as it is."""
    count: Counter[tuple[int, int]] = Counter()
    at: dict[tuple[int, int], int] = {}
    for place, (one, by) in enumerate(zip(_hashes(rows), weight.tolist(), strict=True)):
        count[one] += by
        at.setdefault(one, place)
    places = [at[one] for one, often in count.items() for _ in range(often)]
    return rows.take(pa.array(places, pa.int64()))


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
        self.visible, self._lsn = found
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
