"""What a PostgreSQL server sends over a replication connection: bytes in, raw rows by column out.

The server speaks in *frames*: `XLogData` with one message of the plugin `pgoutput`, or `Keepalive`;
we answer with `status_update`. A *message* is one byte of kind and its fields, all big endian; it
is fed to `transactions.Assembler`, which makes whole transactions of the messages. Inside a block
of a streamed transaction most messages carry, right after their kind, the number of the (sub)
transaction that they belong to; that is why readers here take the place where the fields begin.

**Rows are not read one by one.** Consecutive messages of the same kind on the same relation are a
run, `Rows`, and a run is read column by column, all its rows at once. A row is

    kind  [xid]  relation  { 'K' | 'O' | 'N'  width  { 'n' | 'u' | 't' length bytes } * width }

The place of column c+1 depends on the length of column c, so within a row there is an order; but
all rows can go the way together. With the payloads laid end to end in one buffer, and an array of
the rows' places in it, one step per column reads the byte of kind there, reads the length behind
it, notes (place, length), and moves every row on. The values of a column are then one Arrow array
over that same buffer in which values and what lies between them alternate, and taking every second
element copies the values together. No step does Python work per value.

A wrong byte cannot hide: lengths only move a row forward, an unknown kind stops the reading, and
in the end every row must stand exactly at the end of its message. When something is wrong, and
when a run is so short that arrays cost more than they save, rows are read one after the other by
`read_row`, which is plain, and says exactly what is wrong and where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from struct import Struct
from struct import error as StructError
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.errors import BadReplicationData

EPOCH_US: Final = 946_684_800_000_000
"""PostgreSQL counts microseconds from 2000-01-01 UTC, everything here from 1970-01-01 UTC."""

XLOG_DATA: Final = ord("w")
KEEPALIVE: Final = ord("k")
XLOG_DATA_HEADER: Final = 25
"""The message begins here in a frame of `XLOG_DATA`."""

KEY, OLD, NEW = b"KON"
NULL, UNCHANGED, TEXT = b"nut"
SHORT_RUN: Final = 32
"""Runs of fewer rows are read row by row."""

Places = npt.NDArray[np.int64]
Texts: TypeAlias = "pa.BinaryArray | list[bytes | None]"
"""Values of a column as the server printed them; a list where they are few."""

_XLOG_DATA = Struct(">QQq")
_KEEPALIVE = Struct(">QqB")
_STATUS_UPDATE = Struct(">cQQQqB")
_RELATION = Struct(">I")
_COLUMN = Struct(">Ii")
_WIDTH = Struct(">H")
_LENGTH = Struct(">I")
_TRUNCATE = Struct(">IB")
_MESSAGE = Struct(">BQ")


def lsn_text(lsn: int) -> str:
    """A place in the write-ahead log as PostgreSQL writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def bad(what: str, message: bytes, offset: int) -> BadReplicationData:
    """The error for a message that is not as the protocol says, naming its kind and the offset."""
    kind = repr(message[:1])[1:] if message else "of no bytes"
    return BadReplicationData(
        f"{what} in a message {kind} of {len(message)} bytes, at offset {offset}",
        place=f"offset {offset} of a message {kind}",
        message=message[:1000].hex(),
        offset=offset,
    )


# --- frames ---------------------------------------------------------------------------------------


class XLogData(NamedTuple):
    """A message of the plugin."""

    start: int
    """Where in the write-ahead log it comes from; 0 when the message is about no place."""
    end: int
    """How far the server's write-ahead log goes."""
    time_us: int
    payload: bytes


class Keepalive(NamedTuple):
    """The server says how far it has come, and whether it wants an answer at once."""

    end: int
    time_us: int
    reply: bool


def frame(data: bytes) -> XLogData | Keepalive:
    """Read the data of one copy message.

    Where every row counts, look at ``data[0] == XLOG_DATA`` and take ``data[XLOG_DATA_HEADER:]``.
    """
    try:
        if data[0] == XLOG_DATA:
            start, end, time = _XLOG_DATA.unpack_from(data, 1)
            return XLogData(start, end, time + EPOCH_US, data[XLOG_DATA_HEADER:])
        if data[0] == KEEPALIVE and len(data) == 1 + _KEEPALIVE.size:
            end, time, reply = _KEEPALIVE.unpack_from(data, 1)
            return Keepalive(end, time + EPOCH_US, bool(reply))
    except (IndexError, StructError):
        raise bad("a frame ends too early", data, len(data)) from None
    raise bad("no frame that is known", data, 0)


def status_update(
    written: int, flushed: int, applied: int, reply: bool = False, *, time_us: int = EPOCH_US
) -> bytes:
    """The frame that tells the server how far we are; it may forget what lies before `flushed`.

    ``reply`` asks the server to answer at once. ``time_us`` is shown in pg_stat_replication only.
    """
    return _STATUS_UPDATE.pack(b"r", written, flushed, applied, time_us - EPOCH_US, reply)


# --- what the messages say ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A column as a relation message has it."""

    name: str
    type_oid: int
    type_modifier: int
    key: bool
    """Part of the replica identity."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as it was when the rows that follow were written.

    The same object as long as the definition is the same: what is derived from it can be kept by
    identity. Columns are those published, generated ones only when they are.
    """

    id: int
    schema: str
    table: str
    identity: str
    """The replica identity: d(efault), n(othing), f(ull), i(ndex)."""
    columns: tuple[Column, ...]


class Type(NamedTuple):
    """A type that is not built in."""

    oid: int
    schema: str
    name: str


@dataclass(frozen=True, slots=True)
class Truncate:
    """Tables were emptied."""

    relations: tuple[Relation, ...]
    cascade: bool
    restart: bool
    """Sequences were set back."""


@dataclass(frozen=True, slots=True)
class Message:
    """Something written by pg_logical_emit_message."""

    prefix: str
    content: bytes
    lsn: int
    transactional: bool


@dataclass(frozen=True, slots=True)
class RawColumns:
    """Rows by column, the values as the server's text."""

    values: list[Texts]
    """Null also where the value is not given."""
    unchanged: list[npt.NDArray[np.bool_] | None]
    """Per row whether the value was left out because an update did not touch it (TOAST)."""


class Row(NamedTuple):
    """One row, read plainly; `UNCHANGED` stands for a value that was left out."""

    old_kind: int
    """`KEY`, `OLD` or 0."""
    old: list[Any] | None
    new: list[Any] | None


@dataclass(slots=True, eq=False)
class Rows:
    """A run of equal operations on one relation, in the server's order; read when asked."""

    relation: Relation
    op: str
    """'i', 'u' or 'd'."""
    payloads: list[bytes]
    """The messages."""
    start: int
    """Where in each of them the rows begin: 5, or 9 in a streamed transaction."""
    _read: tuple[RawColumns | None, npt.NDArray[np.uint8] | None, RawColumns | None] | None = field(
        default=None, init=False, repr=False
    )

    def __len__(self) -> int:
        return len(self.payloads)

    @property
    def old(self) -> RawColumns | None:
        """The rows before, null where a row has none; see `old_kind`. None if no row has one."""
        return (self._read or self.read())[0]

    @property
    def old_kind(self) -> npt.NDArray[np.uint8] | None:
        """Per row `KEY` (columns out of the identity are null), `OLD` (whole rows) or 0 (none)."""
        return (self._read or self.read())[1]

    @property
    def new(self) -> RawColumns | None:
        """The rows after; None for deletes."""
        return (self._read or self.read())[2]

    def rows(self) -> list[Row]:
        """The rows as plain values, for runs of a few rows."""
        width = len(self.relation.columns)
        return [read_row(payload, self.start, self.op, width) for payload in self.payloads]

    def read(
        self,
    ) -> tuple[RawColumns | None, npt.NDArray[np.uint8] | None, RawColumns | None]:
        """Read all columns now; raises `BadReplicationData`."""
        read = None
        if len(self.payloads) >= SHORT_RUN:
            read = _read_run(self)
        if read is None:
            read = _read_short(self)
        self._read = read
        return read


def join(runs: Sequence[Rows]) -> Rows:
    """One run of several of the same relation and operation, as of many short transactions."""
    first = runs[0]
    payloads: list[bytes] = []
    for run in runs:
        assert (run.relation, run.op) == (first.relation, first.op)
        if run.start == first.start:
            payloads += run.payloads
        else:
            head = bytes(first.start)
            payloads += [head + payload[run.start :] for payload in run.payloads]
    return Rows(first.relation, first.op, payloads, first.start)


# --- messages but rows ----------------------------------------------------------------------------


def _string(message: bytes, at: int) -> tuple[str, int]:
    end = message.find(b"\0", at)
    if end < 0:
        raise bad("a name without end", message, at)
    return message[at:end].decode(errors="backslashreplace"), end + 1


def read_relation(message: bytes, at: int) -> Relation:
    """Read a message R whose fields begin at ``at``."""
    try:
        (number,) = _RELATION.unpack_from(message, at)
        schema, at = _string(message, at + 4)
        table, at = _string(message, at)
        identity = chr(message[at])
        (width,) = _WIDTH.unpack_from(message, at + 1)
        at += 3
        columns = []
        for _ in range(width):
            flags = message[at]
            name, at = _string(message, at + 1)
            oid, modifier = _COLUMN.unpack_from(message, at)
            at += 8
            columns.append(Column(name, oid, modifier, bool(flags & 1)))
    except (IndexError, StructError):
        raise bad("an early end", message, len(message)) from None
    _ends(message, at)
    return Relation(number, schema or "pg_catalog", table, identity, tuple(columns))


def read_type(message: bytes, at: int) -> Type:
    """Read a message Y whose fields begin at ``at``."""
    (oid,) = unpack(_RELATION, message, at)
    schema, at = _string(message, at + 4)
    name, at = _string(message, at)
    _ends(message, at)
    return Type(oid, schema or "pg_catalog", name)


def read_truncate(message: bytes, at: int) -> tuple[tuple[int, ...], bool, bool]:
    """Read a message T: the numbers of the relations, cascade, restart."""
    count, options = unpack(_TRUNCATE, message, at)
    if len(message) != at + 5 + 4 * count:
        raise bad(f"not the {count} relations announced", message, at)
    numbers = Struct(f">{count}I").unpack_from(message, at + 5)
    return numbers, bool(options & 1), bool(options & 2)


def read_message(message: bytes, at: int) -> Message:
    """Read a message M whose fields begin at ``at``."""
    flags, lsn = unpack(_MESSAGE, message, at)
    prefix, at = _string(message, at + _MESSAGE.size)
    (length,) = unpack(_LENGTH, message, at)
    _ends(message, at + 4 + length)
    return Message(prefix, message[at + 4 :], lsn, bool(flags & 1))


def unpack(fields: Struct, message: bytes, at: int) -> tuple[Any, ...]:
    """Fields of a message, or the error that it ends too early."""
    try:
        return fields.unpack_from(message, at)
    except StructError:
        raise bad("an early end", message, len(message)) from None


def _ends(message: bytes, at: int) -> None:
    if at != len(message):
        raise bad("an end too late or too early", message, min(at, len(message)))


# --- rows, one after the other --------------------------------------------------------------------


def read_row(message: bytes, at: int, op: str, width: int) -> Row:
    """Read one message I, U or D whose rows begin at ``at``."""
    kind = 0
    old = new = None
    try:
        if op != "i" and message[at] != NEW:
            kind = message[at]
            if kind not in (KEY, OLD):
                raise bad(f"an unknown part {kind:#04x}", message, at)
            old, at = _read_tuple(message, at + 1, width)
        if op != "d":
            if message[at] != NEW:
                raise bad(f"an unknown part {message[at]:#04x} instead of N", message, at)
            new, at = _read_tuple(message, at + 1, width)
        elif not kind:
            raise bad("no old row", message, at)
    except (IndexError, StructError):
        raise bad("an early end", message, len(message)) from None
    _ends(message, at)
    return Row(kind, old, new)


def _read_tuple(message: bytes, at: int, width: int) -> tuple[list[Any], int]:
    (count,) = _WIDTH.unpack_from(message, at)
    if count != width:
        raise bad(f"{count} columns instead of {width}", message, at)
    at += 2
    values: list[Any] = []
    append = values.append
    length_at = _LENGTH.unpack_from
    for _ in range(width):
        kind = message[at]
        if kind == TEXT:
            end = at + 5 + length_at(message, at + 1)[0]
            if end > len(message):
                raise bad("a value longer than its message", message, at + 1)
            append(message[at + 5 : end])
            at = end
        elif kind == NULL:
            append(None)
            at += 1
        elif kind == UNCHANGED:
            append(UNCHANGED)
            at += 1
        else:
            raise bad(f"an unknown kind of value {kind:#04x}", message, at)
    return values, at


def _read_short(
    run: Rows,
) -> tuple[RawColumns | None, npt.NDArray[np.uint8] | None, RawColumns | None]:
    rows = run.rows()
    old = old_kind = new = None
    width = len(run.relation.columns)
    if run.op != "i" and any(map(attrgetter("old_kind"), rows)):
        old_kind = np.array([row.old_kind for row in rows], np.uint8)
        nothing = [None] * width
        old = _short_columns([nothing if row.old is None else row.old for row in rows], width)
    if run.op != "d":
        new = _short_columns([row.new or [] for row in rows], width)
    return old, old_kind, new


def _short_columns(rows: list[list[Any]], width: int) -> RawColumns:
    """Columns of a few rows, as lists: what Arrow would cost is most of the time of a lone row."""
    values: list[Texts] = [list(column) for column in zip(*rows, strict=True)]
    unchanged: list[npt.NDArray[np.bool_] | None] = [None] * width
    for place, column in enumerate(values):
        if UNCHANGED in column:
            unchanged[place] = np.array([value is UNCHANGED for value in column])
            values[place] = [None if value is UNCHANGED else value for value in column]
    return RawColumns(values, unchanged)


_BINARY = pa.binary()


# --- rows, all at once ----------------------------------------------------------------------------


def _read_run(
    run: Rows,
) -> tuple[RawColumns | None, npt.NDArray[np.uint8] | None, RawColumns | None] | None:
    """Read all rows at once, or None: something is wrong, and reading them singly will say what."""
    reader = _Reader(run.payloads)
    width = len(run.relation.columns)
    at = reader.begins + run.start
    old = old_kind = new = None
    try:
        if run.op != "i":
            kinds = reader.bytes[at]
            has_old = kinds != NEW
            if has_old.any():
                old_kind = np.where(has_old, kinds, np.uint8(0))
                if not ((old_kind == KEY) | (old_kind == OLD) | ~has_old).all():
                    return None
                which = None if has_old.all() else np.flatnonzero(has_old)
                old = reader.columns(at, width, which)
        if run.op != "d":
            if (reader.bytes[at] != NEW).any():
                return None
            new = reader.columns(at, width, None)
        elif old is None or not has_old.all():
            return None
    except (IndexError, _Wrong):
        return None
    return (old, old_kind, new) if np.array_equal(at, reader.ends) else None


class _Wrong(Exception):
    """The rows are not as the protocol says."""


class _Reader:
    """The messages of a run laid end to end."""

    def __init__(self, payloads: list[bytes]) -> None:
        joined = b"".join(payloads)
        self.buffer = pa.py_buffer(joined)
        self.bytes = np.frombuffer(joined, np.uint8)
        self.lengths: npt.NDArray[np.uint32] = np.ndarray(
            (len(joined) - 3,), ">u4", joined, strides=(1,)
        )
        self.widths: npt.NDArray[np.uint16] = np.ndarray(
            (len(joined) - 1,), ">u2", joined, strides=(1,)
        )
        self.ends: Places = np.fromiter(accumulate(map(len, payloads)), np.int64, len(payloads))
        self.begins: Places = np.empty_like(self.ends)
        self.begins[0] = 0
        self.begins[1:] = self.ends[:-1]
        self.every_second = np.arange(0, 2 * len(payloads), 2, dtype=np.int64)
        self.every_second_array = pa.array(self.every_second)

    def columns(self, at: Places, width: int, which: npt.NDArray[np.int64] | None) -> RawColumns:
        """The columns of the rows that begin at ``at`` (of ``which`` of them), moving ``at`` on."""
        here = at + 1 if which is None else at[which] + 1
        if (self.widths[here] != width).any():
            raise _Wrong
        here += 2
        values: list[pa.BinaryArray] = []
        unchanged: list[npt.NDArray[np.bool_] | None] = []
        for _ in range(width):
            array, left_out = self._column(here, which, len(at))
            values.append(array)
            unchanged.append(left_out)
        if which is None:
            at[:] = here
        else:
            at[which] = here
        return RawColumns(values, unchanged)

    def _column(
        self, here: Places, which: npt.NDArray[np.int64] | None, count: int
    ) -> tuple[pa.BinaryArray, npt.NDArray[np.bool_] | None]:
        """The column whose values begin at ``here``, moving ``here`` behind it."""
        kinds = self.bytes[here]
        here += 1
        left_out = nulls = None
        offsets = np.zeros(2 * len(here), np.int32)
        texts = kinds == TEXT
        if texts.all():
            lengths = self.lengths[here]
            here += 4
            offsets[0::2] = here
            here += lengths
            offsets[1::2] = here
        else:
            nulls = ~texts
            left_out = kinds == UNCHANGED
            if not (texts | (kinds == NULL) | left_out).all():
                raise _Wrong
            filled = np.flatnonzero(texts)
            there = here[filled]
            lengths = self.lengths[there]
            there += 4
            offsets[0::2] = here
            offsets[0::2][filled] = there
            there += lengths
            here[filled] = there
            offsets[1::2] = here
            if not left_out.any():
                left_out = None
        if here.max() > len(self.bytes):
            raise _Wrong
        if which is not None:
            nulls, left_out = (
                _spread(nulls, which, count, True),
                _spread(left_out, which, count, False),
            )
        return self._taken(offsets, nulls, which), left_out

    def _taken(
        self,
        offsets: npt.NDArray[np.int32],
        nulls: npt.NDArray[np.bool_] | None,
        which: npt.NDArray[np.int64] | None,
    ) -> pa.BinaryArray:
        """Every second element of what the offsets cut the buffer into."""
        cut = pa.Array.from_buffers(
            _BINARY, len(offsets) - 1, [None, pa.py_buffer(offsets), self.buffer]
        )
        if nulls is None:
            return cut.take(self.every_second_array)
        picks = self.every_second
        if which is not None:
            picks = np.zeros_like(self.every_second)
            picks[which] = self.every_second[: len(which)]
        return cut.take(pa.array(picks, mask=nulls))


def _spread(
    flags: npt.NDArray[np.bool_] | None,
    which: npt.NDArray[np.int64],
    count: int,
    elsewhere: bool,
) -> npt.NDArray[np.bool_] | None:
    """The flags of some rows as flags of all."""
    if flags is None and not elsewhere:
        return None
    spread = np.full(count, elsewhere)
    spread[which] = False if flags is None else flags
    return spread
