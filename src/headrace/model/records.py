"""What a log gives and takes: receipts, batches, staged pieces. Values; nothing here does I/O."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace import errors

if TYPE_CHECKING:
    from headrace.model.topic import Topic

TIME = pa.timestamp("us", tz="UTC")
HEADERS = pa.map_(pa.string(), pa.binary())
HEADERS_COLUMN = "_headers"
TRANSACTION_COLUMN = "_transaction"
PLACE_FIELDS = [
    pa.field("_position", pa.int64(), nullable=False),
    pa.field("_partition", pa.uint32(), nullable=False),
    pa.field("_offset", pa.uint64(), nullable=False),
    pa.field("_sent_time", TIME, nullable=False),
    pa.field("_received_time", TIME, nullable=False),
    pa.field(HEADERS_COLUMN, HEADERS),
]
"""Where a row stands and when it came, as columns after those of its topic."""
RUNS = np.dtype([("partition", "<u4"), ("rows", "<u4"), ("base", "<u8")])
_RUN = struct.Struct("<IIQ")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def time_of(microseconds: int) -> datetime:
    """A time of the log as a `datetime` with its zone."""
    return _EPOCH + timedelta(microseconds=microseconds)


def microseconds_of(time: datetime) -> int:
    """The inverse of `time_of`; a time without a zone is taken as UTC."""
    if time != time:  # noqa: PLR0124 (NaT of pandas, which is a datetime)
        raise errors.BadSetting(f"{time!r} is no time", place="time", fix="give a datetime")
    aware = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    return (aware - _EPOCH) // timedelta(microseconds=1)


class Receipt(NamedTuple):
    """An entry was taken, and under the default durability it is on the disk."""

    position: int
    """Its place in the log: the read-your-writes token."""
    rows: int
    received_us: int
    runs: Sequence[tuple[str, bytes]] = ()
    """For each part its topic, and partition, rows and first offset of each run, packed."""
    duplicate: bool = False
    """True if a writer had stored this version before: nothing was written now."""
    dropped: int = 0
    """Rows that found no room in a topic whose flow is `drop`: not appended, and counted."""

    def __repr__(self) -> str:
        """What matters, without the packed runs."""
        more = ", duplicate=True" if self.duplicate else ""
        more += f", dropped={self.dropped}" if self.dropped else ""
        return f"Receipt(position={self.position}, rows={self.rows}{more})"

    @property
    def offsets(self) -> dict[str, dict[int, int]]:
        """Topic -> partition -> the offset of its first row there."""
        found: dict[str, dict[int, int]] = {}
        for topic, runs in self.runs:
            of_topic = found.setdefault(topic, {})
            for partition, _, base in _RUN.iter_unpack(runs):
                of_topic.setdefault(partition, base)
        return found

    @property
    def received_time(self) -> datetime:
        """When the log took it, by the log's clock."""
        return time_of(self.received_us)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a piece that is read at once."""

    rows: int
    flags: int
    offset: int
    length: int
    checksum: int
    partitions: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows staged for a topic: written and synced, and part of the log once an entry names them.

    It can be pickled, so that many processes stage and one publishes.
    """

    name: str
    topic: str
    schema: int
    rows: int
    bytes: int
    sent_time: int
    chunks: tuple[Chunk, ...]


class Span(NamedTuple):
    """Consecutive rows of a batch that came from one entry."""

    rows: int
    position: int
    sent: int
    received: int
    table: npt.NDArray[Any] | bytes | memoryview
    """The runs, or their bytes: most readers do not ask, and numpy is slow to wake up."""

    @property
    def runs(self) -> npt.NDArray[Any]:
        """Structured: partition, rows and base (the first offset) of each run of rows."""
        table = self.table
        return table if isinstance(table, np.ndarray) else np.frombuffer(table, RUNS)


class Batch:
    """Rows of one topic, read together: of one entry, of several small ones, or a part of a large.

    `position` says through which entry it reads, and `last` that it ends that entry (for all topics
    that are read): progress may be noted only at a batch that is `last`.
    """

    __slots__ = ("_extra", "data", "definition", "last", "position", "schema_version", "spans")

    def __init__(
        self,
        definition: Topic,
        data: pa.RecordBatch,
        spans: Sequence[Span],
        *,
        position: int,
        last: bool,
        schema_version: int,
        extra: Mapping[str, pa.Array],
    ) -> None:
        """Made by readers only; `definition` is the topic, with the schema of these rows."""
        self.definition = definition
        self.data = data
        self.position = position
        self.last = last
        self.schema_version = schema_version
        self.spans = spans
        self._extra = extra

    def __len__(self) -> int:
        """Rows."""
        return int(self.data.num_rows)

    def __repr__(self) -> str:
        """Topic, rows and position."""
        return f"<Batch of {self.topic}: {len(self)} rows, position {self.position}>"

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self.definition.name

    @property
    def partition(self) -> pa.Array:
        """The partition of each row."""
        runs = np.concatenate([span.runs for span in self.spans])
        return pa.array(np.repeat(runs["partition"], runs["rows"]))

    @property
    def offset(self) -> pa.Array:
        """The offset of each row in its partition."""
        return pa.array(np.concatenate([offsets_of(span.runs) for span in self.spans]))

    @property
    def positions(self) -> pa.Array:
        """The position of the entry that each row came in."""
        return self._repeated([span.position for span in self.spans], pa.int64())

    @property
    def sent_time(self) -> pa.Array:
        """When each row was sent, by its producer's clock."""
        return self._repeated([span.sent for span in self.spans], TIME)

    @property
    def received_time(self) -> pa.Array:
        """When the log took each row, by the log's clock; never goes back."""
        return self._repeated([span.received for span in self.spans], TIME)

    @property
    def headers(self) -> pa.Array:
        """The headers of each row: map of string to bytes, or null."""
        found = self._extra.get(HEADERS_COLUMN)
        return found if found is not None else pa.nulls(len(self), HEADERS)

    @property
    def transaction(self) -> pa.Array:
        """Which transaction of its entry each row belongs to, counted from 0."""
        found = self._extra.get(TRANSACTION_COLUMN)
        return found if found is not None else pa.array(np.zeros(len(self), np.uint32))

    @property
    def ends(self) -> dict[int, int]:
        """The offset behind the last row of each partition: what to commit after this batch."""
        found: dict[int, int] = {}
        for span in self.spans:
            runs = span.runs
            found.update(
                zip(runs["partition"].tolist(), (runs["base"] + runs["rows"]).tolist(), strict=True)
            )
        return found

    def slice(self, start: int, rows: int) -> Batch:
        """Some of its rows; it is `last` if it ends where this one does."""
        stop = min(start + rows, len(self))
        spans = []
        first = 0
        for span in self.spans:
            low, high = max(start - first, 0), min(stop - first, span.rows)
            first += span.rows
            if low < high:
                spans.append(span._replace(rows=high - low, table=_cut(span.runs, low, high)))
        extra = {name: column.slice(start, stop - start) for name, column in self._extra.items()}
        return Batch(
            self.definition,
            self.data.slice(start, stop - start),
            spans,
            position=self.position,
            last=self.last and stop == len(self),
            schema_version=self.schema_version,
            extra=extra,
        )

    def place(self, name: str) -> pa.Array:
        """One of `PLACE_FIELDS`, by its name."""
        found: pa.Array = getattr(self, "positions" if name == "_position" else name[1:])
        return found

    def to_pylist(self) -> list[dict[str, Any]]:
        """The rows as dicts."""
        result: list[dict[str, Any]] = self.data.to_pylist()
        return result

    def _repeated(self, values: list[int], kind: pa.DataType) -> pa.Array:
        counts = [span.rows for span in self.spans]
        return pa.array(np.repeat(np.array(values, np.int64), counts)).cast(kind)


def offsets_of(runs: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """The offset of each row of these runs."""
    counts = runs["rows"]
    starts = np.cumsum(counts, dtype=np.uint64) - counts
    result: npt.NDArray[np.uint64] = np.repeat(runs["base"] - starts, counts)
    result += np.arange(len(result), dtype=np.uint64)
    return result


def _cut(runs: npt.NDArray[Any], low: int, high: int) -> npt.NDArray[Any]:
    """Runs of the rows from `low` to `high`, counted over all of them."""
    ends = np.cumsum(runs["rows"], dtype=np.int64)
    starts = ends - runs["rows"]
    before = np.clip(low - starts, 0, runs["rows"])
    kept = runs.copy()
    kept["base"] += before.astype(np.uint64)
    kept["rows"] = np.clip(np.minimum(ends, high) - starts - before, 0, None)
    return kept[kept["rows"] > 0]
