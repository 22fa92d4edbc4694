"""The snapshots of a capture: which chunk is read next, by whom, and when one is published.

::

    capture's thread   stream . . . . . . . . publish 1 . . stream . . publish 2 . . .
                         |  want 1           ^   want 3                ^
    readers' threads     +--> read 1, decode +   read 2, decode -------+    (a few connections)

Readers have a connection of their own, and touch nothing that the capture's thread touches: they
get what is `Wanted`, with the schema as it was then, and give a `Chunk`. So the stream goes on
while several tables are read; each table has one reader at a time, which reads ahead of what is
published. All that is said in `snapshot` of a chunk holds wherever behind its place the stream is
when it is published, so only three things are to be seen to:

- *Order.* Chunks of a table are published in the order of their keys; each was read when the one
  before it had been. So a transaction that a chunk sees is seen by the next one too, and what the
  stream has touched may be forgotten up to the chunk that was published last.
- *Turns.* A chunk whose table has meanwhile got other columns, was emptied, or is read from its
  start again, is thrown away: `Captured.turn` is then another one than when it was asked for.
- *What nobody has noted.* Keys are noted from the moment on that a table is being read. What the
  stream has said before must be seen by every chunk. Mostly it is; but a transaction is streamed
  when its commit is on the server's disk, and others see it a moment later: much later, if it waits
  for a synchronous standby. So a snapshot is used only if it sees what the stream has said lately
  (`Captured.must_see`; after a restart this is read from the topic of transactions). And what has
  changed a table before it was published is not in the stream at all: all transactions that had
  begun by then must have ended (`TableState.fence`).

Keys that are read once more (`pending`) are read by the capture's thread: as it takes nothing from
the stream meanwhile, a row that changes all the time is not missed for ever.

**To be passed.** A chunk waits for the stream to pass its place, so behind it a message is written
to the WAL, in a transaction with a number, whose commit makes the server flush it at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from headrace import errors
from headrace.model.hashing import hash64
from headrace.sources.complete import Numbers
from headrace.sources.postgres import waits
from headrace.sources.postgres.captured import OF_A_TABLE, Captured
from headrace.sources.postgres.keyless import Whole
from headrace.sources.postgres.session import connected
from headrace.sources.postgres.snapshot import Chunk, Wanted, read_chunk

CHUNKS = "table string, lsn bigint, rows bigint, published bigint, hash bigint, last string"
CHUNK_BYTES = 8 << 20
"""A chunk of wide rows has fewer of them."""
READERS = 4
AHEAD = 2
"""Chunks of a table that may wait, read, to be published; and of all tables, so many more than
there are readers."""
RETRY_SECONDS, LOCKED_SECONDS = 0.05, 1.0
"""A snapshot that does not see what it must is taken again so much later; so much at most."""


@dataclass(frozen=True)
class Progress:
    """How far a snapshot is."""

    table: str
    rows: int
    of: int
    """By the planner's estimate; -1: nobody knows."""
    rate: float
    """Rows a second."""
    waits: str = ""
    """For whom it waits, if it does."""

    @property
    def seconds_left(self) -> float | None:
        """By the estimate and the rate; None: nobody knows."""
        return (self.of - self.rows) / self.rate if self.rate and self.of >= self.rows else None


Report = Callable[[Progress], None]
Entry = Callable[[], AbstractContextManager[Any]]
"""An entry that leaves the resume point where it is."""
Read = Chunk | Exception | str
"""A text says why nothing could be read yet."""


class Readers:
    """A few threads, each with a connection; what they have read is in `done`."""

    def __init__(self, dsn: str, count: int) -> None:
        """Connections are made when they are needed."""
        self._dsn = dsn
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="headrace-snapshot")
        self._idle: list[psycopg.Connection] = []
        self._busy: set[psycopg.Connection] = set()
        self._lock = threading.Lock()
        self._ended = False
        self.done: SimpleQueue[tuple[tuple[str, str], int, Read]] = SimpleQueue()

    def start(self, turn: int, wanted: Wanted, whole: Whole | None = None) -> None:
        """Read a chunk; the answer has the name of the table, and the turn."""
        self._pool.submit(self._read, turn, wanted, whole)

    def _read(self, turn: int, wanted: Wanted, whole: Whole | None) -> None:
        read = None
        try:
            if whole is not None:
                read = whole.next()
                self.done.put((wanted.table, turn, read))
            else:
                with self._connection() as connection:
                    read = read_chunk(connection, wanted)
                    told: Read = read or why(connection, wanted)
                    self.done.put((wanted.table, turn, told))
                    if read is not None:
                        flushed(connection)
        except Exception as error:  # noqa: BLE001 - raised where it is taken
            self.done.put((wanted.table, turn, error))
        if read is not None:
            with contextlib.suppress(errors.HeadraceError):  # raised where they are published
                _ = read.rows  # decoded, while the next ones are being read

    @contextlib.contextmanager
    def _connection(self) -> Iterator[psycopg.Connection]:
        with self._lock:
            own = self._idle.pop() if self._idle else None
        if own is None:
            own = connected(self._dsn)
        with self._lock:
            self._busy.add(own)
            if self._ended:
                own.close()
        try:
            yield own
        finally:
            with self._lock:
                self._busy.discard(own)
                if self._ended or own.closed:
                    own.close()
                else:
                    self._idle.append(own)

    def end(self) -> None:
        """Nothing more is read; what is being read comes to nothing."""
        with self._lock:
            self._ended = True
            for one in self._idle:
                one.close()
            busy = [*self._busy]
        for one in busy:  # it may wait for a lock, and the process for it
            with contextlib.suppress(psycopg.Error):
                one.cancel_safe(timeout=1.0)
        self._pool.shutdown(wait=False, cancel_futures=True)


def why(connection: psycopg.Connection, wanted: Wanted) -> str:
    """Why nothing could be read."""
    return f"waits for {waits.for_table(connection, wanted.table, wanted.fence)}"


def flushed(connection: psycopg.Connection) -> None:
    """Make the stream move on, at once."""
    connection.execute(
        "SELECT pg_logical_emit_message(false, 'headrace', ''), pg_current_xact_id()"
    )


class Snapshots:
    """Reads the tables of a capture that are to be read, and publishes what it has read."""

    def __init__(
        self,
        dsn: str,
        tables: Mapping[tuple[str, str], Captured],
        entry: Entry,
        topic: Callable[[str, str], str],
        *,
        chunk_rows: int,
        readers: int = READERS,
        report: Report | None = None,
    ) -> None:
        """`readers`: connections; with 0 the capture's own one reads, and the stream waits."""
        self._dsn = dsn
        self._tables = tables
        self._entry = entry
        self._topic = topic
        self._chunk_rows = chunk_rows
        self._count = readers
        self._report = report
        self._readers: Readers | None = None
        self._wholes: dict[tuple[str, str], Whole] = {}
        self._reading: dict[tuple[str, str], int] = {}
        """Tables that a reader has in hand, and the turn."""
        self._later: dict[tuple[str, str], float] = {}
        """When a table may be tried again."""
        self._waited: dict[tuple[str, str], float] = {}
        """Since when it has been."""
        self._began: dict[str, tuple[float, int]] = {}
        """When a table was first read, and how many rows had been by then."""

    def under_way(self) -> bool:
        """Whether a table is being read."""
        return any(one.snapshotting for one in self._tables.values())

    def limit(self) -> int:
        """Where the next chunk is to be published: the stream need not be taken further."""
        waiting = [one.chunks[0].lsn for one in self._tables.values() if one.chunks]
        return min(waiting, default=1 << 64)

    def advance(self, control: psycopg.Connection, received: int) -> None:
        """Publish the chunks that the stream has passed; have the next ones read."""
        self._collect()
        for name, whole in [*self._wholes.items()]:
            if not self._tables[name].snapshotting or self._tables[name].turn != whole.turn:
                self._close(name)
        for name, captured in self._tables.items():
            if captured.snapshotting and captured.chunks:
                self._read(name, captured, control)  # while what was read before is published
            while captured.snapshotting and captured.chunks:
                if received < captured.chunks[0].lsn:
                    break
                self._publish(captured)
            if captured.snapshotting:
                self._read(name, captured, control)

    def end(self) -> None:
        """Forget what is being read."""
        for name in [*self._wholes]:
            self._close(name)
        if self._readers is not None:
            self._readers.end()
        self._readers, self._reading = None, {}

    # -- reading ----------------------------------------------------------------------------

    def _read(self, name: tuple[str, str], captured: Captured, control: psycopg.Connection) -> None:
        state, chunks = captured.state, captured.chunks
        if (
            not captured.published
            or captured.differs_at is not None
            or self._reading.get(name) == captured.turn
            or len(chunks) >= (AHEAD if self._count else 1)
            or self._in_flight() >= self._count + AHEAD
            or (chunks and (chunks[-1].last is None or state.read_through))
            or time.monotonic() < self._later.get(name, 0.0)
        ):
            return
        self._began.setdefault(captured.name, (time.monotonic(), state.rows))
        if state.fence < 0:
            row = control.execute("SELECT pg_current_xact_id()::text").fetchone()
            state.fence = int(row[0]) if row else 0
        wanted = captured.wanted(self._chunk_rows, CHUNK_BYTES)
        self._reading[name] = captured.turn
        read: Read
        try:
            whole = None if state.key else self._whole(name, captured, wanted)
            if whole is None and not state.key:
                read = why(control, wanted)
            elif self._count and not state.read_through:
                if self._readers is None:
                    self._readers = Readers(self._dsn, self._count)
                self._readers.start(captured.turn, wanted, whole)
                return
            else:
                chunk = read_chunk(control, wanted) if whole is None else whole.next()
                read = chunk or why(control, wanted)
                flushed(control)
        except Exception as error:  # noqa: BLE001 - judged there
            read = error
        self._arrived(name, captured.turn, read)

    def _in_flight(self) -> int:
        """Chunks in memory, or soon there."""
        return len(self._reading) + sum(len(one.chunks) for one in self._tables.values())

    def _whole(self, name: tuple[str, str], captured: Captured, wanted: Wanted) -> Whole | None:
        """The reading of a table without a key; begun by the capture's thread.

        So nothing comes from the stream between its snapshot and what is done with it.
        """
        if name in self._wholes:
            return self._wholes[name]
        whole = Whole(connected(self._dsn), captured.turn, wanted)
        if not whole.begin():
            return None
        captured.watch(whole.visible)
        self._wholes[name] = whole
        return whole

    def _close(self, name: tuple[str, str]) -> None:
        """End the reading of a table without a key."""
        self._wholes.pop(name).close()

    def _collect(self) -> None:
        if self._readers is not None:
            with contextlib.suppress(Empty):
                while True:
                    self._arrived(*self._readers.done.get_nowait())

    def _arrived(self, name: tuple[str, str], turn: int, read: Read) -> None:
        captured = self._tables.get(name)
        if self._reading.get(name) == turn:
            del self._reading[name]
        if isinstance(read, psycopg.OperationalError):
            raise read
        if captured is None or captured.turn != turn or not captured.snapshotting:
            return
        if isinstance(read, psycopg.errors.UndefinedColumn | psycopg.errors.UndefinedTable):
            read = "the table has changed"  # the capture looks for that
        if isinstance(read, psycopg.errors.CharacterNotInRepertoire):
            fact = f"a text is not UTF-8: {read}"
            self._stop(captured, errors.ValueNotCarried(fact, place=captured.name))
        elif isinstance(read, psycopg.Error):
            self._stop(captured, read)
        elif isinstance(read, Exception):
            raise read
        elif isinstance(read, str) or not all(map(read.visible.sees, captured.emptied)):
            self._wait(name, captured, read if isinstance(read, str) else "")
        else:
            captured.state.reason = ""
            self._waited.pop(name, None)
            captured.must_see.clear()
            captured.chunks.append(read)
            if read.count:
                captured.width = read.bytes / read.count

    def _wait(self, name: tuple[str, str], captured: Captured, why: str) -> None:
        """Try again soon; say why, if it takes longer."""
        now, state = time.monotonic(), captured.state
        began = self._waited.setdefault(name, now)
        self._later[name] = now + min(LOCKED_SECONDS, max(RETRY_SECONDS, (now - began) / 4))
        if now - began >= LOCKED_SECONDS and why != state.reason:
            state.reason = why
            with self._entry():
                pass
            if self._report is not None:
                self._report(Progress(captured.name, state.rows, state.of, state.rate, why))

    # -- publishing -------------------------------------------------------------------------

    def _stop(self, captured: Captured, error: Exception) -> None:
        captured.state.stop(error)
        captured.drop()
        with self._entry():
            pass

    def _publish(self, captured: Captured) -> None:
        state, chunk = captured.state, captured.chunks.popleft()
        try:
            rows, weight = captured.publish(chunk)
        except OF_A_TABLE as error:
            self._stop(captured, error)
            return
        state.rows += chunk.count
        if chunk.only is not None:
            captured.settle_pending(chunk.only)
        elif chunk.last is None:
            state.read_through = True
        else:
            state.after, state.upto = chunk.last, chunk.upto
        if state.read_through and not state.pending:
            gone, lacking = self._take_away(captured, chunk), [*captured.lacking()]
            signs = [np.full(one.num_rows, -1) for one in gone]
            signs += [np.full(one.num_rows, 1) for one in lacking]
            rows = pa.concat_batches([rows, *gone, *lacking])
            weight = np.concatenate([weight, *signs])
            captured.finish()
        batch = _batch(captured, rows, weight, chunk)
        began, before = self._began[captured.name]
        seconds = time.monotonic() - began
        state.of, state.rate = captured.info.rows, (state.rows - before) / max(seconds, 1e-3)
        with self._entry() as entry:
            if batch.num_rows:
                entry.append(state.topic, batch)
            entry.append(self._topic("_snapshots", CHUNKS), [_proof(captured, chunk, rows)])
        if not captured.snapshotting:
            del self._began[captured.name]
        if self._report is not None:
            self._report(Progress(captured.name, state.rows, state.of, state.rate))

    def _take_away(self, captured: Captured, chunk: Chunk) -> list[pa.RecordBatch]:
        """Rows that are gone: many are entries of their own, the last of them are given back."""
        some: list[pa.RecordBatch] = []
        for rows in captured.gone():
            some += [rows] if rows.num_rows else []
            if sum(one.nbytes for one in some) >= CHUNK_BYTES:
                away = pa.concat_batches(some)
                weight = np.full(away.num_rows, -1)
                with self._entry() as entry:
                    entry.append(captured.state.topic, _batch(captured, away, weight, chunk))
                some = []
        return some


def _batch(
    captured: Captured, rows: pa.RecordBatch, weight: Numbers, chunk: Chunk
) -> pa.RecordBatch:
    """Rows as the topic has them."""
    count = rows.num_rows
    return captured.with_meta(rows, weight, pa.repeat("r", count), np.full(count, chunk.lsn))


def _proof(captured: Captured, chunk: Chunk, rows: pa.RecordBatch) -> dict[str, Any]:
    """What a chunk was, to be held against the database later."""
    found = hash64(rows.columns, 0) if rows.num_rows else np.zeros(0, np.uint64)
    return {
        "table": captured.name,
        "lsn": chunk.lsn,
        "rows": chunk.count,
        "published": rows.num_rows,
        "hash": int(np.bitwise_xor.reduce(found, initial=0).view(np.int64)),
        "last": None if chunk.last is None else "\t".join(chunk.last),
    }
