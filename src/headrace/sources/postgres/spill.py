"""Changes of transactions that have not ended: in memory, and above a bound in files.

::

    transaction 7:  [ file: record, record, ...      ][ memory: change, change, ... ]  gone {12, 15}
    transaction 9:                                    [ memory: change, ... ]

All transactions together hold at most `bytes_max` in memory: when there is more, the one that holds
most is written to its file. A record is a run of rows as the server sent it (head, the length of
each message, the messages), or another change, pickled. Rolling back a subtransaction only notes
its number, however much it wrote: what it did is passed over when the changes are read, which is
once, at the commit, one record at a time.

**After a crash** nothing of it counts: the server sends every transaction again that was not
confirmed. So nothing is synced, and the files have no names (`TemporaryFile`): they are gone with
the process. Rejected: one file for all (a rolled-back transaction of 100 GB would keep its place
until all others end), an index of the records in memory (10 M runs of one row are 1 GB of it).
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from struct import Struct
from tempfile import TemporaryFile
from typing import IO

from headrace.log.embedded.system import os_errors
from headrace.sources.postgres.protocol import Message, Relation, Rows, Truncate

Change = Rows | Truncate | Message

SPILL_BYTES = 32 << 20
"""Transactions that have not ended hold so much memory, altogether."""
ROW_BYTES = 64
"""What a message costs in memory beside its own bytes; a run of them costs CHANGE_BYTES more."""
CHANGE_BYTES = 400
_PICKLED = ord("p")
_RECORD = Struct("<IBIBIQ")
"""Subtransaction, operation, relation, where rows begin, their number, bytes that follow."""


def size_of(change: Change) -> int:
    """About how much memory a change takes."""
    if type(change) is Rows:
        payloads = change.payloads
        return sum(map(len, payloads)) + ROW_BYTES * len(payloads) + CHANGE_BYTES
    return CHANGE_BYTES + (len(change.content) if isinstance(change, Message) else 0)


def relations_of(change: Change) -> Sequence[Relation]:
    """The tables that it changes."""
    if isinstance(change, Rows):
        return (change.relation,)
    return change.relations if isinstance(change, Truncate) else ()


def read_by(changes: Iterable[Change], *, full: bool) -> set[tuple[str, str]]:
    """The tables of which these changes may look up rows; `full`: whole old rows do so too."""
    found = set()
    for change in changes:
        if isinstance(change, Truncate):
            found |= {(one.schema, one.table) for one in change.relations}
        elif isinstance(change, Rows):
            given = change.relation.identity == "f" and not full
            if change.op != "i" and not given:
                found.add((change.relation.schema, change.relation.table))
    return found


class Kept:
    """The changes of one transaction: to be iterated over, in order, any number of times."""

    def __init__(self) -> None:
        self.held = self.size = 0
        """Bytes in memory; bytes in all."""
        self.gone: set[int] = set()
        """Subtransactions that were rolled back."""
        self._changes: list[tuple[int, Change]] = []
        self._file: IO[bytes] | None = None
        self._relations: list[Relation] = []
        self._numbers: dict[int, int] = {}
        self._read_by: dict[bool, set[tuple[str, str]]] = {False: set(), True: set()}

    @property
    def in_memory(self) -> bool:
        """Whether nothing of it was written."""
        return self._file is None

    def add(self, changes: Sequence[tuple[int, Change]]) -> int:
        """Keep changes; how many bytes they have."""
        size = sum(size_of(change) for _, change in changes)
        self._changes += changes
        self.held += size
        self.size += size
        for full in self._read_by:
            self._read_by[full] |= read_by((change for _, change in changes), full=full)
        return size

    def write(self, folder: str) -> None:
        """Move what is in memory to the file."""
        with os_errors("writing a large transaction", folder):
            if self._file is None:
                self._file = TemporaryFile(dir=folder)  # noqa: SIM115 - see `close`
            for subxid, change in self._changes:
                if subxid not in self.gone:
                    self._write(self._file, subxid, change)
        self._changes, self.held = [], 0

    def _write(self, file: IO[bytes], subxid: int, change: Change) -> None:
        if isinstance(change, Rows):
            number = self._numbers.get(id(change.relation))
            if number is None:
                number = self._numbers[id(change.relation)] = len(self._relations)
                self._relations.append(change.relation)
            lengths = array("I", map(len, change.payloads))
            size, count = 4 * len(lengths) + sum(lengths), len(lengths)
            file.write(_RECORD.pack(subxid, ord(change.op), number, change.start, count, size))
            file.write(lengths)
            file.write(b"".join(change.payloads))
        else:
            data = pickle.dumps(change)
            file.write(_RECORD.pack(subxid, _PICKLED, 0, 0, 0, len(data)))
            file.write(data)

    def __iter__(self) -> Iterator[Change]:
        """What was not rolled back."""
        for kind, number, start, count, size in self._records():
            assert self._file is not None
            data = self._file.read(size)
            if kind == _PICKLED:
                yield pickle.loads(data)  # noqa: S301 - our own file, which nobody else can open
                continue
            lengths = array("I", data[: 4 * count])
            edges = pairwise(accumulate(lengths, initial=4 * count))
            yield Rows(self._relations[number], chr(kind), [data[a:b] for a, b in edges], start)
        yield from (change for subxid, change in self._changes if subxid not in self.gone)

    def relations(self) -> Iterator[Relation]:
        """The tables of each change, in order."""
        for kind, number, _, _, size in self._records():
            assert self._file is not None
            if kind == _PICKLED:
                yield from relations_of(pickle.loads(self._file.read(size)))  # noqa: S301 - as above
            else:
                self._file.seek(size, 1)
                yield self._relations[number]
        for subxid, change in self._changes:
            yield from relations_of(change) if subxid not in self.gone else ()

    def _records(self) -> Iterator[tuple[int, int, int, int, int]]:
        """The heads in the file; whoever gets one reads or passes over what follows it."""
        if self._file is None:
            return
        with os_errors("reading a large transaction", "a temporary file"):
            self._file.seek(0)
            while head := self._file.read(_RECORD.size):
                subxid, *rest = _RECORD.unpack(head)
                if subxid in self.gone:
                    self._file.seek(rest[-1], 1)
                else:
                    yield tuple(rest)

    def read_by(self, *, full: bool) -> set[tuple[str, str]]:
        """As the function, of all changes, those that were rolled back too."""
        return self._read_by[full]

    def close(self) -> None:
        """Forget everything."""
        self._changes = []
        if self._file is not None:
            self._file.close()

    def __del__(self) -> None:
        """As when a connection was lost."""
        self.close()


class Spill:
    """Where the changes of transactions are kept until these end."""

    def __init__(self, folder: str | None = None, bytes_max: int = SPILL_BYTES) -> None:
        """Without a folder everything stays in memory."""
        self._folder = folder
        self._bytes_max = bytes_max if folder is not None else 1 << 62
        self._kept: dict[int, Kept] = {}
        self._held = 0

    @property
    def room(self) -> int:
        """How many bytes may be held before something is written."""
        return self._bytes_max - self._held

    def __contains__(self, xid: int) -> bool:
        """Whether there are changes of a transaction."""
        return xid in self._kept

    def add(self, xid: int, changes: Sequence[tuple[int, Change]]) -> None:
        """Keep changes, each with its subtransaction (or the transaction's own number)."""
        self._held += self._kept.setdefault(xid, Kept()).add(changes)
        while self._held > self._bytes_max and self._folder is not None:
            largest = max(self._kept.values(), key=attrgetter("held"))
            self._held -= largest.held
            largest.write(self._folder)

    def roll_back(self, xid: int, subxid: int) -> None:
        """Forget the changes of a subtransaction, if any, or all if it is the transaction."""
        kept = self._kept.get(xid)
        if kept is not None and xid == subxid:
            self._take(xid).close()
        elif kept is not None:
            kept.gone.add(subxid)

    def take(self, xid: int) -> tuple[Sequence[Change] | Kept, int]:
        """Hand out what is left, in the order of `add`, and about how many bytes it has."""
        if xid not in self._kept:
            return [], 0
        kept = self._take(xid)
        return (list(kept) if kept.in_memory else kept), kept.size

    def _take(self, xid: int) -> Kept:
        kept = self._kept.pop(xid)
        self._held -= kept.held
        return kept


def cut(rows: Rows, bytes_max: int) -> list[Rows]:
    """A run in parts of at most so many bytes, and at least one row."""
    parts: list[Rows] = []
    first = size = 0
    for place, payload in enumerate(rows.payloads):
        if size and size + len(payload) > bytes_max:
            parts.append(Rows(rows.relation, rows.op, rows.payloads[first:place], rows.start))
            first, size = place, 0
        size += len(payload)
    parts.append(Rows(rows.relation, rows.op, rows.payloads[first:], rows.start))
    return parts
