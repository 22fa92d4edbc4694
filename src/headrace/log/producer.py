"""A producer: rows and small batches in, large entries out, in the background, in bounded memory.

What is handed over waits in a list until the thread takes as many rows as fit into one entry. While
an entry is on its way to the disk the next rows gather, so entries grow with the load and a lone
row waits for nothing but the sync. Bounded in rows and bytes: `send` waits for room, and after
`timeout_seconds` raises `ProducerFull`.

A batch is taken in by `send`, in the caller's thread: what is wrong with it is raised there, and
what others have handed over goes on. A row is taken in by the thread, with all rows of its entry,
which is what makes single rows quick.

Over a writer (`log.producer(topic, writer="name")`) every entry is stored once, and a producer
whose name was claimed by another is fenced. An entry that failed is not dropped: the error is
raised by the next `send`, `flush` or `close`, and the rows it could not store are in `unsent`. A
program that ends without `close` stores what is waiting then, or says that it could not.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 (a first append at the end is too late for it)
import functools
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from itertools import chain, groupby
from numbers import Real
from operator import itemgetter
from types import TracebackType
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import numpy as np
import pyarrow as pa

from headrace import errors
from headrace.model.records import Receipt
from headrace.model.rows import is_columnar, is_one
from headrace.settings import seconds_of

Headers = Mapping[str, bytes | str]
ENTRY_BYTES_MAX = 2 << 20
"""Of what is joined: well below what a log keeps in its journal. One row, or batch, may be more."""
PARENT_BYTES_MAX = 64 << 10
"""A batch whose memory is above this, and for the most part not its own rows, is copied out."""
ARRAY_BYTES = 1_000
"""What each array of a batch takes beside its values, and the batch itself twice that: measured."""


_ARROW = (pa.RecordBatch, pa.Table)
_FLAT = frozenset((int, float, str, bytes, bool, type(None), date, datetime, time, Decimal, UUID))
"""Values that cannot change after they were sent: the usual ones."""


class Appender(Protocol):
    """A log or a writer."""

    def append(self, topic: str, rows: Any, *, headers: Any = None) -> Receipt:
        """Append rows as one entry."""

    def taken_in(self, topic: str, rows: Any, headers: Any = None) -> pa.RecordBatch:
        """The rows as one batch of the topic's schema; raises what is wrong with them."""


class _Waiting(NamedTuple):
    given: Any
    headers: Any
    rows: int
    bytes: int
    """Of its values, about: what an entry of it takes."""
    memory: int
    """While it waits."""
    batch: bool
    """Whether a record batch was given, and not a row."""


class Producer:
    """Gathers rows and batches for one topic. Threads may share it."""

    def __init__(
        self,
        appender: Appender,
        topic: str,
        *,
        rows_max: int = 50_000,
        bytes_max: int = 64 << 20,
        batch_rows_max: int | None = None,
        timeout_seconds: float = 30.0,
    ) -> None:
        """At most `rows_max` rows of about `bytes_max` bytes wait or are on their way.

        An entry holds up to `batch_rows_max` of them, 10,000 unless told. A batch above that is an
        entry of its own; a row or batch above `rows_max` or `bytes_max` goes alone.
        """
        for number in (rows_max, bytes_max, batch_rows_max):
            if not isinstance(number, Real | None):
                raise errors.BadSetting(f"{number!r} is not a number of rows or bytes", place=topic)
        if batch_rows_max is None:
            batch_rows_max = min(10_000, rows_max)
        if not 0 < batch_rows_max <= rows_max:
            raise errors.BadSetting(
                "batch_rows_max must be above 0 and not above rows_max", place="batch_rows_max"
            )
        self._appender = appender
        self._topic = topic
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._batch_rows_max = batch_rows_max
        self._timeout = seconds_of(timeout_seconds, "timeout_seconds")
        self._change = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._sending: list[_Waiting] = []
        self._rows = self._bytes = 0  # of both
        self._counted = pa.schema([]), 0
        self._idle = False
        self._closed = False
        self._problem: BaseException | None = None
        self.receipt: Receipt | None = None
        """Of the last entry stored."""
        self.sent_total = self.dropped_total = 0
        """Rows stored, and rows for which a topic that drops had no room."""
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"producer-{topic}", daemon=True)
        self._thread.start()
        _open.add(self)
        _watch_the_end()

    def send(
        self,
        rows: Any,
        *,
        headers: Headers | Sequence[Headers | None] | None = None,
    ) -> None:
        """Hand a row over, or a batch of rows; waits while the buffer is full.

        A batch is what `log.append` takes as rows: Arrow, pandas, Polars, a list or an iterator; a
        dict is one row, and so is a single value, or a tuple of key and value, of an opaque topic.
        A wrong batch is refused here, and nothing else is touched. Arrow's memory is not copied: do
        not write to it before `flush`. `headers`: one mapping for all rows, or one for each row of
        a batch.
        """
        self._refuse_if_forked()
        if type(rows) is dict or _is_row(rows):  # theirs may change
            size = _size(rows) if headers is None else _size(rows) + _size(headers)
            flat = type(rows) is dict and _FLAT.issuperset(map(type, rows.values()))
            kept = rows.copy() if flat else _kept(rows)
            one = _Waiting(kept, _kept(headers), 1, size, size, False)
        else:
            one = self._taken_in(rows, headers)
            if not one.rows:
                return
        with self._change:
            if self._problem is not None or self._closed or not self._has_room(one):
                self._wait_for_room(one)
            self._waiting.append(one)
            self._rows += one.rows
            self._bytes += one.memory
            if self._idle:
                self._change.notify_all()

    def _taken_in(self, rows: Any, headers: Any) -> _Waiting:
        if isinstance(headers, Iterator | pa.Array):  # they are read twice, as mappings
            headers = list(headers)
        batch = self._appender.taken_in(self._topic, rows, headers)
        size = batch.get_total_buffer_size()
        if not isinstance(rows, _ARROW) or (  # pandas writes to its memory
            size > PARENT_BYTES_MAX and size > 4 * pa.ipc.get_record_batch_size(batch)
        ):
            batch = pa.concat_batches([batch])
            size = batch.get_total_buffer_size()
        if headers is not None:
            headers = _kept(headers if isinstance(headers, Mapping) else list(headers))
            size += _size(headers)
        memory = size + self._beside_values(batch.schema)
        return _Waiting(batch, headers, batch.num_rows, size, memory, True)

    def _beside_values(self, schema: pa.Schema) -> int:
        """Much more than the values, where a batch has one row and many columns."""
        if not schema.equals(self._counted[0]):
            self._counted = schema, ARRAY_BYTES * (2 + sum(map(_arrays, schema.types)))
        return self._counted[1]

    def _wait_for_room(self, one: _Waiting) -> None:
        done = self._change.wait_for(
            lambda: self._problem is not None or self._closed or self._has_room(one), self._timeout
        )
        self._raise_problem()
        if self._closed:  # its thread may have ended: nobody would store it
            raise errors.LogClosed("the producer is closed", place=f"topic '{self._topic}'")
        if not done:
            raise errors.ProducerFull(
                f"{self._rows} rows of {self._bytes} bytes wait, and none was stored"
                f" within {self._timeout:g} s",
                place=f"topic '{self._topic}'",
            )

    def flush(self, timeout: float | None = None) -> Receipt | None:
        """Return when every row handed over is stored; the last receipt."""
        self._refuse_if_forked()
        timeout = seconds_of(timeout)
        with self._change:
            self._change.notify_all()  # an interrupt (^C) may have kept `send` from it
            done = self._change.wait_for(
                lambda: self._problem is not None or not (self._waiting or self._sending), timeout
            )
            self._raise_problem()
            if not done:
                raise errors.WaitTimeout(
                    f"{self._rows} rows are not stored yet", place=f"topic '{self._topic}'"
                )
            return self.receipt

    def close(self) -> None:
        """Store what is waiting, then end."""
        self._refuse_if_forked()
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join()
        _open.discard(self)
        with self._change:
            self._raise_problem()

    @property
    def unsent(self) -> list[Any]:
        """Rows and record batches handed over and not stored, in their order.

        After an `Unknown`, the first ones may be stored.
        """
        with self._change:
            return [waiting.given for waiting in (*self._sending, *self._waiting)]

    def __enter__(self) -> Producer:
        """For `with`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    @property
    def forked(self) -> bool:
        """Whether it was made by a parent of this process, where its thread and its rows are."""
        return os.getpid() != self._process

    def _refuse_if_forked(self) -> None:
        if self.forked:
            raise errors.LogClosed(
                "the producer was made before this process was forked",
                place=f"topic '{self._topic}'",
                why="what it holds is stored by a thread, and threads stay with the parent",
                fix="make a producer in the child: log.producer(...)",
            )

    def _has_room(self, one: _Waiting) -> bool:
        return not self._rows or (
            self._rows + one.rows <= self._rows_max and self._bytes + one.memory <= self._bytes_max
        )

    def _raise_problem(self) -> None:
        if self._problem is not None:
            _open.discard(self)  # the caller knows
            raise self._problem

    def _run(self) -> None:
        while True:
            with self._change:
                self._idle = True
                self._change.wait_for(lambda: self._waiting or self._closed)
                self._idle = False
                if not self._waiting:
                    return
                self._sending = self._taken()
            try:
                receipt = self._append(self._sending)
            except Exception as problem:  # noqa: BLE001 (raised again in the caller's thread)
                with self._change:
                    if isinstance(problem, errors.BatchTooLarge) and len(self._sending) > 1:
                        self._go_smaller()
                        continue
                    self._problem = problem
                    self._change.notify_all()
                return
            with self._change:
                _, _, rows, _, memory, _ = zip(*self._sending, strict=True)
                self.receipt = receipt
                self.sent_total += sum(rows) - receipt.dropped
                self.dropped_total += receipt.dropped
                self._rows -= sum(rows)
                self._bytes -= sum(memory)
                self._sending = []
                self._change.notify_all()

    def _taken(self) -> list[_Waiting]:
        """The next ones, as many as one entry holds, and at least one."""
        rows, size, count = self._rows, self._bytes, len(self._waiting)
        if rows > self._batch_rows_max or size > ENTRY_BYTES_MAX:
            rows = size = count = 0
            for waiting in self._waiting:
                rows += waiting.rows
                size += waiting.bytes
                if count and (rows > self._batch_rows_max or size > ENTRY_BYTES_MAX):
                    break
                count += 1
        taken = self._waiting[:count]
        del self._waiting[:count]
        return taken

    def _go_smaller(self) -> None:
        """What is refused together may have room in parts: the limit is the topic's, or the log's.

        An entry never holds so much again.
        """
        self._batch_rows_max = max(1, sum(waiting.rows for waiting in self._sending) // 2)
        self._waiting[:0] = self._sending
        self._sending = []

    def _append(self, sending: list[_Waiting]) -> Receipt:
        given, headers, rows, _, _, are_batches = zip(*sending, strict=True)
        joined = self._joined(given, are_batches) if any(are_batches) else list(given)
        if headers.count(None) == len(headers):
            return self._appender.append(self._topic, joined)
        of_rows = list(chain.from_iterable(map(_of_rows, headers, rows, are_batches)))
        return self._appender.append(self._topic, joined, headers=of_rows)

    def _joined(self, given: Sequence[Any], are_batches: Sequence[bool]) -> pa.RecordBatch:
        """Batches, and rows between them, as one batch."""
        if len(given) == 1:
            return given[0]
        take_in = functools.partial(self._appender.taken_in, self._topic)
        batches = given
        if not all(are_batches):
            batches = []
            for is_batch, run in groupby(zip(given, are_batches, strict=True), itemgetter(1)):
                some = [one for one, _ in run]
                batches += some if is_batch else [take_in(some)]
        try:
            return pa.concat_batches(batches)
        except pa.ArrowInvalid:  # the topic was altered between two of them
            return pa.concat_batches([take_in(batch) for batch in batches])


def _is_row(rows: Any) -> bool:
    if isinstance(rows, tuple):  # of key and value, or of rows
        return bool(rows) and not isinstance(rows[0], Mapping)
    return is_one(rows) and not is_columnar(rows)


def _kept(value: Any) -> Any:
    """A copy, of what is in it too: the caller may fill it anew."""
    if isinstance(value, Mapping):
        return {name: _kept(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_kept(inner) for inner in value]
    if isinstance(value, tuple):
        return tuple(map(_kept, value))
    if isinstance(value, memoryview):
        return value.tobytes()
    return value.copy() if isinstance(value, bytearray | np.ndarray) else value


def _of_rows(headers: Any, rows: int, is_batch: bool) -> Sequence[Headers | None]:
    if is_batch and isinstance(headers, list):
        return headers
    return [headers] * rows


_open: set[Producer] = set()


@functools.cache
def _watch_the_end() -> None:
    atexit.register(_close_forgotten)  # later than the log did: the last one comes first


def _close_forgotten() -> None:
    for producer in [one for one in _open if not one.forked]:
        try:
            producer.close()
        except Exception:  # noqa: BLE001 (nobody is left to raise it to)
            sys.stderr.write(f"{producer._rows} rows of a producer were not stored:\n")
            traceback.print_exc()


def _arrays(arrow: pa.DataType) -> int:
    """How many arrays a column of this type is made of."""
    return 1 + sum(_arrays(arrow.field(index).type) for index in range(arrow.num_fields))


def _size(value: object) -> int:
    """About how much memory a row takes."""
    if isinstance(value, str | bytes | bytearray):
        return 50 + len(value)
    if isinstance(value, Mapping):
        return 100 + sum(_size(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return 60 + sum(_size(inner) for inner in value)
    return 32
