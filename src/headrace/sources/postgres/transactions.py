"""Whole transactions from the messages of a replication connection.

A transaction comes in one of two ways. As a whole, when the server has read its commit: Begin,
changes, Commit. Or, when it is large, *streamed* while it still runs: blocks from Stream Start to
Stream Stop, with blocks and whole transactions of others between them, and in the end a Stream
Commit or a Stream Abort. What holds:

- A transaction is handed out at its commit, so in the order of commits, and only once committed.
- The changes of a transaction keep the server's order. Consecutive rows of the same operation on
  the same relation are one `Rows`, unless they are too many bytes for one.
- In a streamed transaction every change belongs to a subtransaction (or to the transaction itself).
  Rolling back to a savepoint is a Stream Abort of each subtransaction since then, those inside
  others included; it takes away exactly their changes.
- Of a logical message in a block the server (18 at least) does not say the subtransaction. So if
  one is rolled back in a transaction that has messages, `Unclear` is raised: whole, it is clear.
- What a relation message inside a streamed block says is true for this transaction alone until it
  commits, since it may have altered the table. Then it is true for all, unless a later message has
  said something else meanwhile.

What has come of a transaction is held in memory up to a bound, then in a file (`spill`); so its
changes are a list, or something that reads them one after the other.

After a connection was lost the server begins again with all transactions whose commit was not
confirmed, streamed or not, and with all relations: use a new `Assembler` for a new connection.

`Assembler.feed` is called for every row of the source. It compares the beginning of the message
with that of the run at hand and appends it; nothing else is done, and rows are read when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct

from headrace.errors import BadReplicationData
from headrace.sources.postgres.protocol import (
    EPOCH_US,
    Message,
    Relation,
    Rows,
    Truncate,
    Type,
    bad,
    lsn_text,
    read_message,
    read_relation,
    read_truncate,
    read_type,
    unpack,
)
from headrace.sources.postgres.spill import (
    CHANGE_BYTES,
    ROW_BYTES,
    Change,
    Kept,
    Spill,
    cut,
    read_by,
    relations_of,
)

RUN_BYTES_MAX = 4 << 20
"""A run is cut before it has more bytes than this, unless a single row has."""

_BEGIN = Struct(">QqI")
_COMMIT = Struct(">BQQq")
_NUMBER = Struct(">I")
_STREAM_START = Struct(">IB")
_STREAM_COMMIT = Struct(">IBQQq")
_STREAM_ABORT = Struct(">II")

_OPERATIONS = {ord("I"): "i", ord("U"): "u", ord("D"): "d"}


class Unclear(Exception):
    """A streamed transaction has messages, and which of them were rolled back is not said."""


@dataclass(slots=True, eq=False)
class Transaction:
    """A committed transaction."""

    xid: int
    final_lsn: int
    """Where its commit is in the write-ahead log."""
    end_lsn: int
    """What is confirmed once the transaction is safe."""
    commit_time_us: int
    """Since 1970-01-01 UTC, by the server's clock."""
    changes: Sequence[Change] | Kept
    streamed: bool = False
    size: int = 0
    """About how many bytes of memory its changes take, or took."""

    def relations(self) -> Iterator[Relation]:
        """The tables of each change, in order."""
        if isinstance(self.changes, Kept):
            return self.changes.relations()
        return (one for change in self.changes for one in relations_of(change))

    def read_by(self, *, full: bool) -> set[tuple[str, str]]:
        """The tables of which its changes may look up rows; see `spill`."""
        if isinstance(self.changes, Kept):
            return self.changes.read_by(full=full)
        return read_by(self.changes, full=full)

    def close(self) -> None:
        """Its changes are not needed any more."""
        if isinstance(self.changes, Kept):
            self.changes.close()


@dataclass(slots=True)
class _Defined:
    """A relation, and the number of the message that said so."""

    relation: Relation
    message: int


class Assembler:
    """Makes transactions of the messages of one connection."""

    def __init__(self, spill: Spill | None = None, *, run_bytes_max: int = RUN_BYTES_MAX) -> None:
        self.types: dict[int, Type] = {}
        """Types that are not built in, as far as relations have columns of them."""
        self.spill = Spill() if spill is None else spill
        self._run_bytes_max = run_bytes_max
        self._relations: dict[int, _Defined] = {}
        self._relations_of_streams: dict[int, dict[int, _Defined]] = {}
        self._relation_messages = 0
        self._begun: tuple[int, int, int] | None = None
        """final_lsn, commit time and xid of the transaction that is coming in as a whole."""
        self._with_messages: set[int] = set()
        """The streamed transactions that have logical messages."""
        self._stream: int | None = None
        """The transaction whose block is coming in."""
        self._changes: list[tuple[int, Change]] = []
        """What has come in of it, with the subtransaction (0 when not streamed)."""
        self._head: bytes | tuple[()] = ()
        """How a message begins that belongs to the run at hand; nothing begins with ()."""
        self._size = 0
        """The bytes of what has come in of it, and above which they go to the spill."""
        self._size_max = self.spill.room
        self._append: Callable[[bytes], None]
        self._readers: dict[int, Callable[[bytes], Transaction | Message | None]] = {
            ord("I"): self._row,
            ord("U"): self._row,
            ord("D"): self._row,
            ord("B"): self._begin,
            ord("C"): self._commit,
            ord("R"): self._relation,
            ord("T"): self._truncate,
            ord("M"): self._message,
            ord("Y"): self._type,
            ord("O"): self._origin,
            ord("S"): self._stream_start,
            ord("E"): self._stream_stop,
            ord("c"): self._stream_commit,
            ord("A"): self._stream_abort,
        }

    def feed(self, payload: bytes, start_lsn: int = 0) -> Transaction | Message | None:
        """Take one message; gives what it completes: a transaction, or a message outside of any.

        ``start_lsn`` is named in the error when the message is not as it must be.
        """
        if payload.startswith(self._head):
            self._append(payload)
            self._size += len(payload) + ROW_BYTES
            if self._size > self._size_max:
                self._put_away()
            return None
        try:
            reader = self._readers.get(payload[0]) if payload else None
            if reader is None:
                raise bad("an unknown kind of message", payload, 0)
            made = reader(payload)
        except BadReplicationData as error:
            if start_lsn:
                error.place += f", from {lsn_text(start_lsn)}"
            raise
        if self._size > self._size_max:
            self._put_away()
        return made

    @property
    def busy(self) -> bool:
        """Whether a transaction or a block has begun and not ended."""
        return self._begun is not None or self._stream is not None

    # --- changes ----------------------------------------------------------------------------------

    def _row(self, payload: bytes) -> None:
        start, subxid = self._fields(payload)
        (number,) = unpack(_NUMBER, payload, start)
        run: list[bytes] = [payload]
        rows = Rows(self._known(payload, start, number), _OPERATIONS[payload[0]], run, start + 4)
        self._changes.append((subxid, rows))
        self._head = payload[: start + 4]
        self._append = run.append
        self._size += len(payload) + ROW_BYTES + CHANGE_BYTES

    def _truncate(self, payload: bytes) -> None:
        start, subxid = self._fields(payload)
        numbers, cascade, restart = read_truncate(payload, start)
        relations = tuple(self._known(payload, start + 5, number) for number in numbers)
        self._changes.append((subxid, Truncate(relations, cascade, restart)))
        self._head = ()
        self._size += CHANGE_BYTES

    def _message(self, payload: bytes) -> Message | None:
        if not self.busy:
            message = read_message(payload, 1)
            if message.transactional:
                raise bad("a transactional message outside of a transaction", payload, 1)
            return message
        start, subxid = self._fields(payload)
        message = read_message(payload, start)
        if not message.transactional:
            return message
        if self._stream is not None:
            self._with_messages.add(self._stream)
        self._changes.append((subxid, message))
        self._head = ()
        self._size += len(payload) + CHANGE_BYTES
        return None

    def _fields(self, payload: bytes) -> tuple[int, int]:
        """Where the fields begin, behind the number of the subtransaction in a block."""
        if self._stream is not None:
            return 5, unpack(_NUMBER, payload, 1)[0]
        if self._begun is None:
            raise bad("a change outside of a transaction", payload, 0)
        return 1, 0

    # --- what changes are about -------------------------------------------------------------------

    def _known(self, payload: bytes, at: int, number: int) -> Relation:
        defined = None
        if self._stream is not None:
            defined = self._relations_of_streams[self._stream].get(number)
        defined = defined or self._relations.get(number)
        if defined is None:
            raise bad(f"relation {number}, which was not described,", payload, at)
        return defined.relation

    def _relation(self, payload: bytes) -> None:
        relation = read_relation(payload, 1 if self._stream is None else 5)
        self._relation_messages += 1
        before = self._relations.get(relation.id)
        if before is not None and before.relation == relation:
            relation = before.relation
        if self._stream is None:
            relations = self._relations
        else:
            relations = self._relations_of_streams[self._stream]
        relations[relation.id] = _Defined(relation, self._relation_messages)
        self._head = ()

    def _type(self, payload: bytes) -> None:
        described = read_type(payload, 1 if self._stream is None else 5)
        self.types[described.oid] = described

    def _origin(self, payload: bytes) -> None:
        """Where changes came from first: what is in the database counts, whoever brought it."""

    # --- transactions as a whole ------------------------------------------------------------------

    def _begin(self, payload: bytes) -> None:
        if self.busy:
            raise bad("a transaction inside of another", payload, 0)
        final_lsn, time, xid = unpack(_BEGIN, payload, 1)
        self._begun = final_lsn, time, xid

    def _commit(self, payload: bytes) -> Transaction:
        if self._begun is None:
            raise bad("a commit without a transaction", payload, 0)
        _, lsn, end_lsn, time = unpack(_COMMIT, payload, 1)
        final_lsn, _, xid = self._begun
        if lsn != final_lsn:
            raise bad(f"a commit at {lsn_text(lsn)} instead of {lsn_text(final_lsn)}", payload, 2)
        if xid not in self.spill:
            size = self._size
            changes = [change for _, change in self._closed()]
            self._begun = None
            return Transaction(xid, lsn, end_lsn, time + EPOCH_US, changes, size=size)
        self._put_away()
        self._begun = None
        return self._taken(xid, lsn, end_lsn, time)

    def _taken(
        self, xid: int, lsn: int, end_lsn: int, time: int, *, streamed: bool = False
    ) -> Transaction:
        changes, size = self.spill.take(xid)
        self._size_max = self.spill.room
        return Transaction(xid, lsn, end_lsn, time + EPOCH_US, changes, streamed, size)

    def _put_away(self) -> None:
        """Give what has come in to the spill."""
        if self._stream is not None:
            self.spill.add(self._stream, self._closed())
        elif self._begun is not None:
            self.spill.add(self._begun[2], self._closed())
        self._size_max = self.spill.room

    def _closed(self) -> list[tuple[int, Change]]:
        """The changes that have come in, runs that became too large cut, and no run at hand."""
        changes, self._changes = self._changes, []
        size, self._size = self._size, 0
        self._head = ()
        if size <= self._run_bytes_max:
            return changes
        return [
            (subxid, part)
            for subxid, change in changes
            for part in (cut(change, self._run_bytes_max) if type(change) is Rows else [change])
        ]

    # --- streamed transactions --------------------------------------------------------------------

    def _stream_start(self, payload: bytes) -> None:
        if self.busy:
            raise bad("a block inside of a transaction", payload, 0)
        xid, _ = unpack(_STREAM_START, payload, 1)
        self._stream = xid
        self._relations_of_streams.setdefault(xid, {})

    def _stream_stop(self, payload: bytes) -> None:
        if self._stream is None:
            raise bad("the end of a block that did not begin", payload, 0)
        self._put_away()
        self._stream = None

    def _stream_commit(self, payload: bytes) -> Transaction:
        if self.busy:
            raise bad("a commit inside of a block", payload, 0)
        xid, _, lsn, end_lsn, time = unpack(_STREAM_COMMIT, payload, 1)
        self._with_messages.discard(xid)
        for number, defined in self._relations_of_streams.pop(xid, {}).items():
            known = self._relations.get(number)
            if known is None or known.message < defined.message:
                self._relations[number] = defined
        return self._taken(xid, lsn, end_lsn, time, streamed=True)

    def _stream_abort(self, payload: bytes) -> None:
        """The end of a (sub)transaction; where and when may follow (streaming 'parallel')."""
        if self.busy:
            raise bad("a rollback inside of a block", payload, 0)
        xid, subxid = unpack(_STREAM_ABORT, payload, 1)
        if xid == subxid:
            self._relations_of_streams.pop(xid, None)
            self._with_messages.discard(xid)
        elif xid in self._with_messages:
            raise Unclear("a savepoint was rolled back in a transaction with logical messages")
        self.spill.roll_back(xid, subxid)
        self._size_max = self.spill.room
