"""A producer: single rows in, batched entries out, in the background, with bounded memory.

Rows wait in a list until the thread takes as many as fit into one entry. While an entry is on its
way to the disk the next rows gather, so batches grow with the load and a lone row waits for nothing
but the sync. Bounded in rows and bytes: `send` waits for room, and after `timeout_seconds` raises
`ProducerFull`.

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
from collections.abc import Mapping
from copy import copy
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from headrace import errors
from headrace.model.records import Receipt


class Appender(Protocol):
    """A log or a writer."""

    def append(self, topic: str, rows: Any, *, headers: Any = None) -> Receipt:
        """Append rows as one entry."""


class _Waiting(NamedTuple):
    row: Mapping[str, Any]
    headers: Mapping[str, bytes | str] | None
    bytes: int


class Producer:
    """Batches rows for one topic. Threads may share it."""

    def __init__(
        self,
        appender: Appender,
        topic: str,
        *,
        rows_max: int = 10_000,
        bytes_max: int = 64 << 20,
        batch_rows_max: int = 1_000,
        timeout_seconds: float = 30.0,
    ) -> None:
        """At most `rows_max` rows of about `bytes_max` bytes wait or are on their way.

        An entry holds up to `batch_rows_max` of them. A single row above `bytes_max` goes alone.
        """
        if not 0 < batch_rows_max <= rows_max:
            raise errors.BadSetting(
                "batch_rows_max must be above 0 and not above rows_max", place="batch_rows_max"
            )
        self._appender = appender
        self._topic = topic
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._batch_rows_max = batch_rows_max
        self._timeout = timeout_seconds
        self._change = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._sending: list[_Waiting] = []
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
        self, row: Mapping[str, Any], *, headers: Mapping[str, bytes | str] | None = None
    ) -> None:
        """Hand a row over; waits while the buffer is full."""
        self._refuse_if_forked()
        size = _size(row) + _size(headers)
        with self._change:
            self._raise_problem()
            if self._closed:
                raise errors.LogClosed("the producer is closed", place=f"topic '{self._topic}'")
            room = self._change.wait_for(
                lambda: self._problem is not None or self._has_room(size), self._timeout
            )
            self._raise_problem()
            if not room:
                raise errors.ProducerFull(
                    f"{self._held()} rows of {self._bytes} bytes wait, and none was stored"
                    f" within {self._timeout:g} s",
                    place=f"topic '{self._topic}'",
                )
            self._waiting.append(_Waiting(copy(row), copy(headers), size))  # theirs may change
            self._bytes += size
            self._change.notify_all()

    def flush(self, timeout: float | None = None) -> Receipt | None:
        """Return when every row handed over is stored; the last receipt."""
        self._refuse_if_forked()
        with self._change:
            done = self._change.wait_for(
                lambda: self._problem is not None or not self._held(), timeout
            )
            self._raise_problem()
            if not done:
                raise errors.WaitTimeout(
                    f"{self._held()} rows are not stored yet", place=f"topic '{self._topic}'"
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
    def unsent(self) -> list[Mapping[str, Any]]:
        """Rows handed over and not stored (after an `Unknown`, the first may be stored)."""
        with self._change:
            return [waiting.row for waiting in (*self._sending, *self._waiting)]

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

    def _held(self) -> int:
        return len(self._waiting) + len(self._sending)

    def _has_room(self, size: int) -> bool:
        if not self._held():
            return True
        return self._held() < self._rows_max and self._bytes + size <= self._bytes_max

    def _raise_problem(self) -> None:
        if self._problem is not None:
            _open.discard(self)  # the caller knows
            raise self._problem

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                self._sending = self._waiting[: self._batch_rows_max]
                del self._waiting[: self._batch_rows_max]
            try:
                receipt = self._append(self._sending)
            except Exception as problem:  # noqa: BLE001 (raised again in the caller's thread)
                with self._change:
                    self._problem = problem
                    self._change.notify_all()
                return
            with self._change:
                self.receipt = receipt
                self.sent_total += len(self._sending) - receipt.dropped
                self.dropped_total += receipt.dropped
                self._bytes -= sum(waiting.bytes for waiting in self._sending)
                self._sending = []
                self._change.notify_all()

    def _append(self, sending: list[_Waiting]) -> Receipt:
        rows = [waiting.row for waiting in sending]
        if all(waiting.headers is None for waiting in sending):
            return self._appender.append(self._topic, rows)
        headers = [waiting.headers for waiting in sending]
        return self._appender.append(self._topic, rows, headers=headers)


_open: set[Producer] = set()


@functools.cache
def _watch_the_end() -> None:
    atexit.register(_close_forgotten)  # later than the log did: the last one comes first


def _close_forgotten() -> None:
    for producer in [one for one in _open if not one.forked]:
        try:
            producer.close()
        except Exception:  # noqa: BLE001 (nobody is left to raise it to)
            sys.stderr.write(f"{len(producer.unsent)} rows of a producer were not stored:\n")
            traceback.print_exc()


def _size(value: object) -> int:
    """About how much memory a row takes."""
    if isinstance(value, str | bytes | bytearray):
        return 50 + len(value)
    if isinstance(value, Mapping):
        return 100 + sum(_size(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return 60 + sum(_size(inner) for inner in value)
    return 32
