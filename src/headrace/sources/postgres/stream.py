"""The stream of changes of one replication slot: the connection, and nothing else.

`receive` gives whole transactions as the assembler makes them, as many as are there without
waiting, up to a number of rows. `confirm` tells the server how far the log has everything on disk;
the server may then forget what is before. Nothing is confirmed by itself: a keepalive is answered
with what was confirmed last.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from types import TracebackType

import psycopg
from psycopg import pq

from headrace.sources.postgres.protocol import (
    XLOG_DATA,
    XLOG_DATA_HEADER,
    Keepalive,
    Message,
    frame,
    lsn_text,
    status_update,
)
from headrace.sources.postgres.transactions import Assembler, Transaction
from headrace.clock import SystemClock

STATUS_SECONDS = 5.0
"""The server is told how far we are at least so often."""


class Stream:
    """A replication connection that streams."""

    def __init__(self, dsn: str, slot: str, publication: str, start: int) -> None:
        """Start to stream the slot from a commit boundary."""
        self._connection = psycopg.connect(dsn, autocommit=True, replication="database")
        self._pg = self._connection.pgconn
        self._assembler = Assembler()
        self._confirmed = start
        self._told = time.monotonic()
        self.received = start
        """The server has sent everything below this position."""
        command = (
            f'START_REPLICATION SLOT "{slot}" LOGICAL {lsn_text(start)}'
            f" (proto_version '2', publication_names '\"{publication}\"',"
            " messages 'true', streaming 'on')"
        )
        result = self._pg.exec_(command.encode())
        if result.status != pq.ExecStatus.COPY_BOTH:
            message = result.error_message.decode(errors="replace").strip()
            self._connection.close()
            raise psycopg.OperationalError(message)

    def __enter__(self) -> Stream:
        """For `with`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def receive(self, seconds: float) -> Iterator[Transaction | Message]:
        """What has come, waiting at most so long for the first of it.

        Ends when nothing more is there at once. `received` moves on.
        """
        deadline = time.monotonic() + seconds
        pg, feed = self._pg, self._assembler.feed
        some = False
        while True:
            size, data = pg.get_copy_data(1)
            if size > 0:
                if data[0] == XLOG_DATA:
                    made = feed(bytes(data[XLOG_DATA_HEADER:]))
                    if made is not None:
                        some = True
                        end = made.lsn if isinstance(made, Message) else made.end_lsn
                        self.received = max(self.received, end)
                        yield made
                    continue
                alive = frame(bytes(data))
                assert isinstance(alive, Keepalive)
                if not self._assembler.busy:
                    self.received = max(self.received, alive.end)
                if alive.reply:
                    self._tell()
                continue
            if size < 0:
                ended = pg.get_result()
                said = b"" if ended is None else ended.error_message
                raise psycopg.OperationalError(
                    said.decode(errors="replace").strip() or "the server ended the stream"
                )
            now = time.monotonic()
            if now - self._told >= STATUS_SECONDS:
                self._tell()
            left = deadline - now
            if some or left <= 0:
                if select.select([pg.socket], [], [], 0)[0]:
                    pg.consume_input()
                    if not some and left <= 0:
                        return
                    continue
                return
            select.select([pg.socket], [], [], min(left, STATUS_SECONDS))
            pg.consume_input()

    def confirm(self, position: int) -> None:
        """Everything below this position is on disk: the server may forget it."""
        if position > self._confirmed:
            self._confirmed = position
            self._tell()

    def _tell(self) -> None:
        at = self._confirmed
        self._pg.put_copy_data(status_update(at, at, at, time_us=SystemClock().now_us()))
        self._pg.flush()
        self._told = time.monotonic()
