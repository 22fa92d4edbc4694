"""A producer: single rows in, batched entries out, in the background, with bounded memory.

Rows wait in a list until the thread takes all of them as one entry. While an entry is on its way to
the disk the next ones gather, so batches grow with the load and a lone row waits for nothing but
the sync. Bounded: `send` waits for room, and after `timeout_seconds` raises `ProducerFull`.

With a writer's name every entry is stored once, and a producer whose name was claimed by another is
fenced. An entry that failed is not dropped: the error is raised by the next `send`, `flush` or
`close`, and the rows it could not store are in `unsent`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from headrace import errors
from headrace.model.records import Receipt


class Appender(Protocol):
    """A log or a writer."""

    def append(self, topic: str, rows: Any) -> Receipt:
        """Append rows as one entry."""


class Producer:
    """Batches rows for one topic. Threads may share it."""

    def __init__(
        self,
        appender: Appender,
        topic: str,
        *,
        rows_max: int = 10_000,
        batch_rows_max: int = 1_000,
        timeout_seconds: float = 30.0,
    ) -> None:
        """`rows_max` rows wait at the most; an entry holds up to `batch_rows_max`."""
        if not 0 < batch_rows_max <= rows_max:
            raise errors.BadSetting(
                "batch_rows_max must be above 0 and not above rows_max", place="batch_rows_max"
            )
        self._appender = appender
        self._topic = topic
        self._rows_max = rows_max
        self._batch_rows_max = batch_rows_max
        self._timeout = timeout_seconds
        self._change = threading.Condition()
        self._waiting: list[Mapping[str, Any]] = []
        self._sending: list[Mapping[str, Any]] = []
        self._closed = False
        self._problem: BaseException | None = None
        self.receipt: Receipt | None = None
        """Of the last entry stored."""
        self.sent_total = 0
        self._thread = threading.Thread(target=self._run, name=f"producer-{topic}", daemon=True)
        self._thread.start()

    def send(self, row: Mapping[str, Any]) -> None:
        """Hand a row over; waits while the buffer is full."""
        with self._change:
            self._raise_problem()
            if self._closed:
                raise errors.LogClosed("the producer is closed", place=f"topic '{self._topic}'")
            room = self._change.wait_for(
                lambda: self._problem is not None or self._held() < self._rows_max, self._timeout
            )
            self._raise_problem()
            if not room:
                raise errors.ProducerFull(
                    f"{self._rows_max} rows wait, and none was stored within {self._timeout:g} s",
                    place=f"topic '{self._topic}'",
                )
            self._waiting.append(row)
            self._change.notify_all()

    def flush(self, timeout: float | None = None) -> Receipt | None:
        """Return when every row handed over is stored; the last receipt."""
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
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join()
        with self._change:
            self._raise_problem()

    @property
    def unsent(self) -> list[Mapping[str, Any]]:
        """Rows handed over and not stored (after an `Unknown`, the first may be stored)."""
        with self._change:
            return [*self._sending, *self._waiting]

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

    def _held(self) -> int:
        return len(self._waiting) + len(self._sending)

    def _raise_problem(self) -> None:
        if self._problem is not None:
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
                receipt = self._appender.append(self._topic, self._sending)
            except Exception as problem:  # noqa: BLE001 (raised again in the caller's thread)
                with self._change:
                    self._problem = problem
                    self._change.notify_all()
                return
            with self._change:
                self.receipt = receipt
                self.sent_total += len(self._sending)
                self._sending = []
                self._change.notify_all()
