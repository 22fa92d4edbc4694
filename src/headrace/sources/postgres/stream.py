"""The stream of changes of one replication slot: the connection, and nothing else.

`receive` gives whole transactions as the assembler makes them, as many as are there without
waiting, up to a number of rows. `confirm` tells the server how far the log has everything on disk;
the server may then forget what is before. Nothing is confirmed by itself: a keepalive is answered
with what was confirmed last.

**A server that hears nothing ends the connection** (wal_sender_timeout), also while we are busy
with a large transaction, or with the index of a large table. So a thread says every few seconds how
far we are whenever nobody receives; a lock keeps the two apart.

**Who sleeps until there is something costs the server.** It sends each row by itself, and to wake
the receiver for it, or only to send it as a packet of its own, takes it longer than to make it. So
while large transactions come in we look at times, take all that is there at once, and do not look
again for as long as they have come in so far, up to `PAUSE_SECONDS`, whatever we do meanwhile. From
a server on this machine we accept no more than `WINDOW_BYTES` before we look: what is above that
its system keeps, end to end, and sends in large pieces when we take it. (With a window that grows,
as it does otherwise, each row is a packet. It is so, too, while the window is open and nothing
waits: behind each look, for some hundred rows, or as long as we read what is there row by row.)
Where we do not know how much the other end keeps, nobody sleeps while something is there: it might
stand still. Numbers are in decision 0009.

What one look has brought is what `receive` gives: the whole transactions in it are written while
the next ones come in.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Generator
from ipaddress import ip_address
from types import TracebackType

import psycopg
from psycopg import pq

from headrace.clock import SystemClock
from headrace.sources.postgres.protocol import (
    XLOG_DATA,
    XLOG_DATA_HEADER,
    Keepalive,
    Message,
    frame,
    lsn_text,
    status_update,
)
from headrace.sources.postgres.session import connected
from headrace.sources.postgres.spill import Spill
from headrace.sources.postgres.transactions import Assembler, Transaction, Unclear

STATUS_SECONDS = 5.0
"""The server is told how far we are at least so often."""
PAUSE_SECONDS = 0.01
"""So long we do not look, at most, while large transactions come in."""
MANY = 100
"""Messages that make a transaction large."""
TAKES = 8
"""Reads of one look, at most. libpq takes 16 KiB, and twice as much when it is asked again before
that is read, and so on; the systems keep less than it takes in the end."""
WINDOW_BYTES = 64 << 10
"""What a server on this machine may send before we read. Not less: the server makes pieces of half
of what a new connection is offered, which is 64 KiB, and sends none that does not fit."""


class Stream:
    """A replication connection that streams."""

    def __init__(
        self,
        dsn: str,
        slot: str,
        publication: str,
        start: int,
        spill: Spill | None = None,
        *,
        in_progress: bool = True,
    ) -> None:
        """Start to stream the slot from a commit boundary.

        `in_progress`: large transactions come while they still run. The server (18.1 at least)
        cannot do that with one that rolls back an ALTER TABLE to a savepoint and rewrites the
        table behind: "could not map filenumber to relation OID". Once it has ended, it can.
        """
        self._connection = connected(dsn, replication="database")
        self._pg = self._connection.pgconn
        if self._pg.parameter_status(b"server_encoding") == b"SQL_ASCII":
            # Texts as they are: else one that is not UTF-8 would end the stream, for all tables.
            self._connection.execute("SET client_encoding = 'SQL_ASCII'")
        self._kept = _bound_window(self._pg.socket)
        self._assembler = Assembler(spill)
        self._confirmed = start
        self._told = self._looked = time.monotonic()
        self._began = self._looked
        """Since when it comes without a break."""
        self._messages = 0
        """Those of the transaction that comes in."""
        self._large = False
        """Whether the one before was."""
        self._using = threading.RLock()
        self._ended = threading.Event()
        self.received = start
        """The server has sent everything below this position."""
        command = (
            f'START_REPLICATION SLOT "{slot}" LOGICAL {lsn_text(start)}'
            f" (proto_version '2', publication_names '\"{publication}\"',"
            f" messages 'true', streaming '{'on' if in_progress else 'off'}')"
        )
        result = self._pg.exec_(command.encode())
        if result.status != pq.ExecStatus.COPY_BOTH:
            self._connection.close()
            raise _ended(result)
        threading.Thread(target=self._beat, name=f"headrace-{slot}", daemon=True).start()

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
        self._ended.set()
        with self._using:
            self._connection.close()

    def _beat(self) -> None:
        """Say how far we are when nobody else does."""
        while not self._ended.wait(STATUS_SECONDS):
            with self._using, contextlib.suppress(psycopg.Error):  # who receives next is told
                if not self._ended.is_set() and self._due():
                    self._tell()

    def receive(self, seconds: float) -> Generator[Transaction | Message, None, None]:
        """What has come, waiting at most so long for the first of it; to be closed.

        Ends when nothing more is there at once. `received` moves on.
        """
        with self._using:
            try:
                yield from self._receive(seconds)
            except Unclear as error:
                raise _failed(str(error), "XX000") from error  # so that it is asked for whole

    def _receive(self, seconds: float) -> Generator[Transaction | Message, None, None]:
        deadline = time.monotonic() + seconds
        while not (yield from self._read()) and self._more(deadline):
            pass

    def _read(self) -> Generator[Transaction | Message, None, bool]:
        """Read what was taken; whether something was complete."""
        pg, feed = self._pg, self._assembler.feed
        some = False
        while (taken := pg.get_copy_data(1))[0] > 0:
            message = taken[1].tobytes()  # half the time of a slice made bytes
            if message[0] == XLOG_DATA:
                self._messages += 1
                made = feed(message[XLOG_DATA_HEADER:])
                if made is None:
                    continue
                some = True
                if isinstance(made, Message):
                    self._messages -= 1
                    end = made.lsn
                else:
                    self._large, self._messages = self._messages > MANY, 0
                    end = made.end_lsn
                self.received = max(self.received, end)
                yield made
            else:
                alive = frame(message)
                assert isinstance(alive, Keepalive)
                if not self._assembler.busy:
                    self.received = max(self.received, alive.end)
                if alive.reply:
                    self._tell()
        if taken[0] < 0:
            raise _ended(pg.get_result())
        return some

    def _more(self, deadline: float) -> bool:
        """Wait for more and take it; whether there is time to read it."""
        if self._due():
            self._tell()
        left = deadline - time.monotonic()
        pause = self._pause()
        if left <= 0:
            if pause <= 0 and _readable(self._pg.socket):
                self._look()
            return False
        if pause > 0:
            time.sleep(min(pause, left))
        else:
            self._wait(min(left, STATUS_SECONDS))
        if pause <= left:
            self._look()
        return True

    def _pause(self) -> float:
        """How long not to look; none if no large transaction comes in."""
        if not (self._assembler.busy and (self._large or self._messages > MANY)):
            return 0.0
        if not self._kept and _readable(self._pg.socket):
            return 0.0
        now = time.monotonic()
        return min(now - self._began, PAUSE_SECONDS) - (now - self._looked)

    def _wait(self, seconds: float) -> None:
        """Sleep until something comes."""
        before = time.monotonic()
        select.select([self._pg.socket], [], [], seconds)
        now = time.monotonic()
        if now - before > PAUSE_SECONDS:
            self._large = False
        if not self._large and self._messages <= MANY:
            self._began = now

    def _look(self) -> None:
        """Take all that has come."""
        self._pg.consume_input()
        for _ in range(TAKES - 1):
            if not _readable(self._pg.socket):
                break
            self._pg.consume_input()
        self._looked = time.monotonic()

    def confirm(self, position: int) -> None:
        """Everything below this position is on disk: the server may forget it."""
        if position > self._confirmed:
            self._confirmed = position
            with self._using:
                self._tell()

    def _due(self) -> bool:
        return time.monotonic() - self._told >= STATUS_SECONDS

    def _tell(self) -> None:
        at = self._confirmed
        self._pg.put_copy_data(status_update(at, at, at, time_us=SystemClock().now_us()))
        self._pg.flush()
        self._told = time.monotonic()


def _ended(result: pq.abc.PGresult | None) -> psycopg.OperationalError:
    """What the server says of the end of the stream, with its code if it has one."""
    said = b"" if result is None else result.error_message
    code = result and result.error_field(pq.DiagnosticField.SQLSTATE)
    return _failed(
        said.decode(errors="replace").strip() or "the server ended the stream",
        code.decode() if code else None,
    )


def _failed(said: str, code: str | None) -> psycopg.OperationalError:
    error = psycopg.OperationalError(said)
    error.sqlstate = code
    return error


def _readable(number: int) -> bool:
    return bool(select.select([number], [], [], 0)[0])


def _bound_window(number: int) -> bool:
    """Whether what we do not take is kept; a window that is bounded by a buffer's size stays so."""
    with (
        socket.socket(fileno=os.dup(number)) as same,
        contextlib.suppress(OSError),  # the connection is lost: who uses it next is told
    ):
        if same.family != socket.AF_UNIX and ip_address(same.getpeername()[0]).is_loopback:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES)  # twice, for both
            return sys.platform == "linux"
    return False
