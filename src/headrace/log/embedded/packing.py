"""Rows on their way in: partitioned, ordered, serialized, outside of any lock.

An entry holds one Arrow batch per topic, its rows ordered by partition (stable, so the order within
a partition is the caller's). Split per partition instead, 1,000 rows over 1,000 partitions would
cost ten times the time and eight times the bytes. Where ordering would leave less than two rows in
a run it is not worth moving them: they stay as they came, each a run (decision 0012).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow.compute import TakeOptions, get_function

from headrace import errors
from headrace.interfaces import Part
from headrace.log.embedded import shortcut
from headrace.log.embedded.format import (
    WITH_HEADERS,
    WITH_TRANSACTION,
    Runs,
    SectionDraft,
    plain_section,
)
from headrace.model.arrow_message import ArrowMessage
from headrace.model.keys import partitions_of
from headrace.model.records import HEADERS, HEADERS_COLUMN, RUNS, TRANSACTION_COLUMN
from headrace.model.rows import Intake, opaque_rows
from headrace.model.topic import Topic

Headers = Mapping[str, bytes | str]
HeadersOfRows = Headers | Sequence[Headers | None]
_RUN = struct.Struct("<IIQ")
_take, _UNCHECKED = get_function("take"), TakeOptions(boundscheck=False)


def storage_schema(schema: pa.Schema, flags: int) -> pa.Schema:
    """The columns of a batch in the journal: those of the topic, then what the flags say."""
    if flags & WITH_HEADERS:
        schema = schema.append(pa.field(HEADERS_COLUMN, HEADERS))
    if flags & WITH_TRANSACTION:
        schema = schema.append(pa.field(TRANSACTION_COLUMN, pa.uint32(), nullable=False))
    return schema


class Packer:
    """Packs rows for one topic at its newest schema version."""

    def __init__(self, topic: Topic) -> None:
        """Prepare once, pack often."""
        self.topic = topic
        self.arrow: pa.Schema = topic.schema.arrow
        self.place = f"topic '{topic.name}'"
        self._version = topic.schema.version
        defaults = {"_weight": 1} if topic.kind == "changes" else {}
        self._intake = Intake(self.arrow, place=self.place, defaults=defaults, key=topic.key)
        self._keys = [self.arrow.get_field_index(name) for name in topic.key]
        self._spread = itertools.count()
        self.plain = b""
        """The section of a record batch that needs no more than to be serialized, if any does."""
        self.required = self._intake.required
        by_key = topic.partitions == 1 or bool(topic.key)  # else each append takes a turn
        whole = topic.value == "columns" and by_key and not topic.limited
        if whole and not self._intake.deep:
            self.plain = plain_section(topic)
        self._spread_by = shortcut.spread_by(self.arrow.types[i] for i in self._keys)

    def batch(self, rows: Any) -> pa.RecordBatch:
        """The rows as one batch of the topic's schema; raises what is wrong with them."""
        if self.topic.value == "columns":
            return self._intake(rows)
        return opaque_rows(self.topic.value, rows, place=self.place)

    def ready(self, part: Part) -> ArrowMessage | None:
        """The rows of a part, if they came in the form in which they are stored."""
        rows = part.rows
        if not isinstance(rows, ArrowMessage) or rows.schema is not self.arrow:
            return None
        plain = part.headers is None and part.transactions is None and part.partition is None
        return rows if plain and self.topic.partitions == 1 else None

    def pack(
        self,
        batch: pa.RecordBatch,
        sent_time: int,
        headers: pa.Array | None = None,
        transactions: npt.NDArray[np.uint32] | None = None,
        partition: int | None = None,
        *,
        ordered: bool = False,
    ) -> SectionDraft:
        """One section, serialized; with `ordered` by partition in any case."""
        rows, flags = batch.num_rows, 0
        if headers is not None:
            flags |= WITH_HEADERS
            batch = batch.append_column(pa.field(HEADERS_COLUMN, HEADERS), headers)
        if transactions is not None:
            flags |= WITH_TRANSACTION
            field = pa.field(TRANSACTION_COLUMN, pa.uint32(), nullable=False)
            batch = batch.append_column(field, pa.array(transactions))
        batch, runs, only = self._placed(batch, partition, ordered=ordered)
        return self.section(rows, sent_time, batch.serialize(), flags, runs, only)

    def section(
        self,
        rows: int,
        sent_time: int,
        body: pa.Buffer | bytes,
        flags: int = 0,
        runs: Runs | None = None,
        only: int = 0,
    ) -> SectionDraft:
        """Rows that are serialized."""
        return SectionDraft(self.topic, self._version, flags, rows, sent_time, runs, body, only)

    def _placed(
        self, batch: pa.RecordBatch, partition: int | None, *, ordered: bool
    ) -> tuple[pa.RecordBatch, Runs | None, int]:
        """The rows and their runs, numbered from 0; or, with None for runs, the only partition."""
        count = self.topic.partitions
        if partition is not None:
            return batch, None, self._chosen(partition)
        if count == 1:
            return batch, None, 0
        keys = self._key_columns(batch)
        if keys is None:  # no key: each append goes to the next partition, whole
            return batch, None, next(self._spread) % count
        rows = batch.num_rows
        if not rows:
            return batch, None, 0
        if self._spread_by is not None:
            found = self._spread_by(keys[0], count, ordered)
            if found is not None:
                return self._moved(batch, *found)
        of_row = partitions_of(keys, count).astype(np.uint16)  # sorted by radix
        order = of_row.argsort(kind="stable")
        by_partition = of_row.take(order)
        first = np.empty(rows, bool)
        first[0] = True
        np.not_equal(by_partition[1:], by_partition[:-1], first[1:])
        (starts,) = first.nonzero()
        if len(starts) == 1:
            return batch, None, int(of_row[0])
        if 2 * len(starts) > rows and not ordered:
            runs = np.empty(rows, RUNS)
            runs["partition"] = of_row
            runs["rows"] = 1
            before = np.arange(rows)
            runs["base"][order] = before - np.maximum.accumulate(before * first)
            return batch, runs, 0
        runs = np.zeros(len(starts), RUNS)
        runs["partition"] = by_partition.take(starts)
        counts = runs["rows"]
        counts[:-1] = starts[1:] - starts[:-1]
        counts[-1] = rows - starts[-1]
        indices = pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(order)])
        return _take.call([batch, indices], _UNCHECKED), runs, 0

    def _moved(
        self, batch: pa.RecordBatch, table: bytes, order: bytes | None
    ) -> tuple[pa.RecordBatch, Runs | None, int]:
        if len(table) == RUNS.itemsize:
            return batch, None, int.from_bytes(table[:4], "little")
        if order is not None:
            indices = pa.Array.from_buffers(pa.int64(), batch.num_rows, [None, pa.py_buffer(order)])
            batch = _take.call([batch, indices], _UNCHECKED)
        return batch, np.frombuffer(bytearray(table), RUNS), 0

    def spread(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, bytes]:
        """The rows as they are to be stored, and their runs."""
        batch, runs, only = self._placed(batch, None, ordered=False)
        if runs is None:
            return batch, _RUN.pack(only, batch.num_rows, 0)
        return batch, runs.tobytes()

    def _key_columns(self, batch: pa.RecordBatch) -> list[pa.Array] | None:
        if not self._keys:
            return None
        columns = [batch.column(index) for index in self._keys]
        if self.topic.value != "columns" and columns[0].null_count == len(columns[0]):
            return None  # opaque rows given without keys
        return columns

    def _chosen(self, partition: int) -> int:
        if self.topic.key and self.topic.value == "columns":
            raise errors.BadRows(
                f"{self.place} is partitioned by its key",
                place=self.place,
                fix="leave partition= out: equal keys must stay in one partition",
            )
        whole = isinstance(partition, int | np.integer)
        if not whole or not 0 <= partition < self.topic.partitions:
            raise errors.BadRows(
                f"partition {partition!r} is not one of 0 to {self.topic.partitions - 1}",
                place=self.place,
                fix=f"{self.place} has {self.topic.partitions} partitions",
            )
        return partition

    def headers(self, headers: HeadersOfRows | pa.Array | None, rows: int) -> pa.Array | None:
        """The headers column: one mapping for all rows, one (or None) per row, or as it is."""
        if headers is None:
            return None
        try:
            given: Any = [headers] * rows if isinstance(headers, Mapping) else headers
            if not isinstance(given, pa.Array):
                encoded = [None if one is None else _encoded(one) for one in given]
                given = pa.array(encoded, HEADERS)
            if len(given) != rows:
                raise errors.BadRows(
                    f"{len(given)} headers for {rows} rows",
                    place=self.place,
                    fix="give one mapping for all rows, or one per row",
                )
            return given.cast(HEADERS)
        except (pa.ArrowException, AttributeError, TypeError, ValueError) as error:
            raise errors.BadRows(
                f"headers do not fit: {error}",
                place=self.place,
                fix="a header is a name (str) and a value (bytes or str)",
            ) from error

    def transactions(
        self, counts: Sequence[int] | None, rows: int
    ) -> npt.NDArray[np.uint32] | None:
        """Which transaction each row belongs to, from the number of rows in each."""
        if counts is None:
            return None
        try:
            given = np.asarray(counts)
            if given.dtype.kind in "iu" and given.ndim == 1 and sum(given.tolist()) == rows:
                return np.repeat(np.arange(len(given), dtype=np.uint32), given.astype(np.int64))
        except ValueError:  # one is below 0, or a list of its own
            pass
        raise errors.BadRows(
            f"transactions of {counts!r} rows for {rows} rows",
            place=self.place,
            fix="give the number of rows of each transaction, in order",
        )


def _encoded(headers: Headers) -> list[tuple[str, bytes]]:
    return [
        (name, value.encode() if isinstance(value, str) else value)
        for name, value in headers.items()
    ]
