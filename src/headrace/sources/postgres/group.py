"""A group of transactions on its way into one entry: sorted by table, their numbers kept. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from headrace.model.arrow_message import ArrowMessage, Buffers, MessageForm
from headrace.sources.complete import Numbers
from headrace.sources.postgres.protocol import Message, Rows, Truncate
from headrace.sources.postgres.transactions import Transaction

INT64, TIMESTAMP = pa.int64(), pa.timestamp("us", tz="UTC")
_TOLD = pa.schema(
    {"xid": INT64, "lsn": INT64, "commit_time": TIMESTAMP, "rows": INT64}  # as its topic has them
)
Run = tuple[int, int, Rows]
"""The number of a transaction in the group, its xid, rows."""


def column(numbers: Numbers, kind: pa.DataType = INT64) -> pa.Array:
    """Numbers of 64 bits in Arrow, as they are; `pa.array` would ask pandas first."""
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def repeated(number: int, count: int = 1) -> Buffers:
    """The buffers of the same number for some rows."""
    return b"", number.to_bytes(8, "little", signed=True) * count


def told_of(one: Transaction, rows: int, form: MessageForm) -> ArrowMessage | None:
    """A lone transaction as a row of the topic of transactions."""
    numbers = one.xid, one.end_lsn, one.commit_time_us, rows
    return form.message(1, [repeated(number) for number in numbers])


class Group:
    """Transactions, and messages outside of them, in the order of the stream."""

    def __init__(self, items: Sequence[Transaction | Message]) -> None:
        """Nothing is read yet: rows are as they came."""
        self.transactions = [one for one in items if isinstance(one, Transaction)]
        self.messages: list[tuple[Message, int | None]] = []
        self.tables: dict[tuple[str, str], list[Run]] = {}
        self.end = 0
        """What is confirmed once the group is safe."""
        number = -1
        for one in items:
            if isinstance(one, Message):
                self.messages.append((one, None))
                # Its end, where the next record begins: that may be the commit it came from, which
                # the server would leave out if we went on any further.
                self.end = max(self.end, one.lsn)
                continue
            number += 1
            self.end = max(self.end, one.end_lsn)
            for change in one.changes:
                self._add(number, one.xid, change)
        self.lsn: Numbers = np.array([one.end_lsn for one in self.transactions], np.int64)
        self.xid: Numbers = np.array([one.xid for one in self.transactions], np.int64)
        self.time: Numbers = np.array([one.commit_time_us for one in self.transactions], np.int64)

    def _add(self, number: int, xid: int, change: Rows | Truncate | Message) -> None:
        if isinstance(change, Rows):
            name = (change.relation.schema, change.relation.table)
            self.tables.setdefault(name, []).append((number, xid, change))
        elif isinstance(change, Message):
            self.messages.append((change, xid))
        else:
            raise TypeError("a truncate is not for a group: see `large`")

    def told(self, counts: Numbers) -> pa.RecordBatch:
        """The transactions that have rows in the log, as rows of the topic of transactions."""
        some = slice(None) if counts.all() else np.flatnonzero(counts)
        columns = [
            column(self.xid[some]),
            column(self.lsn[some]),
            column(self.time[some], TIMESTAMP),
            column(counts[some]),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=_TOLD)
