"""Sealed files: rows of one topic as Parquet, with the place of every row in the log.

::

    row group   up to 65,536 rows or 8 MB, in the order of the log; zstd
    ...
    footer      Parquet's own, with two texts of ours:
                headrace        {"format": 1, "log": id, "topic": id, "schema": version, "flags":
                                 as in a section, "groups": [[byte, length, checksum, spans], ...]}
                headrace.spans  base64 of zstd of: number of spans (8 bytes), spans, runs

A **span** is what one section of an entry has in one row group: position, sent and received time,
rows, number of runs. A **run** is as in the journal: partition, rows, first offset. So a batch read
from here has all that one from the journal has, and readers do not notice the difference. Columns
are those of the topic's schema version, then `_headers` and `_transaction`, of which the flags say
whether they are worth reading. Any program that reads Parquet reads the rows.

**Damage.** Every byte is covered: a row group by the checksum in the footer, the footer by the one
in the entry that names the file. A group is read at once, verified, and only then taken apart; its
bytes are compressed, so that reading the columns nobody asked for costs little against decoding the
others. Checksums of pages, which Parquet has, would leave out the headers
of pages; a checksum of the whole file would have to be computed before its first row.

**Crash.** A file is written and synced, and its name synced, before an entry names it. What no
entry names is garbage.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet
from xxhash import xxh3_64

from headrace import errors
from headrace.log.embedded.format import WITH_HEADERS, WITH_TRANSACTION, Runs, checksum
from headrace.log.embedded.packing import storage_schema
from headrace.log.embedded.system import File, System
from headrace.model.records import HEADERS, RUNS, Span, offsets_of
from headrace.model.sealed import SealedFile
from headrace.model.topic import Topic

FORMAT = 1
GROUP_ROWS = 65_536
GROUP_BYTES = 8 << 20
WRITE_BYTES = 1 << 20
SPANS = np.dtype(
    [("position", "<u8"), ("sent", "<i8"), ("received", "<i8"), ("rows", "<u4"), ("runs", "<u4")]
)
EVERY_FLAG = WITH_HEADERS | WITH_TRANSACTION
_codec = pa.Codec("zstd", 1)


class Readable(Protocol):
    """What is asked of a file that is only read."""

    path: str

    def pread(self, length: int, offset: int) -> bytes:
        """See `File`."""

    def read(self, length: int, offset: int) -> pa.Buffer:
        """See `File`."""

    def size(self) -> int:
        """See `File`."""

    def close(self) -> None:
        """See `File`."""


class Rows(NamedTuple):
    """Rows of one section, in the columns of `storage_schema` with every flag."""

    data: pa.RecordBatch
    flags: int
    position: int
    sent: int
    received: int
    runs: Runs


class _Sink:
    """Where Parquet writes to: the file, and a checksum of what was written since the last look."""

    closed = False

    def __init__(self, file: File) -> None:
        self.file = file
        self.length = self._begun = self._written = 0
        self._sum = xxh3_64()
        self._waiting = bytearray()  # Parquet writes a few bytes at a time

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._waiting += view
        self._sum.update(view)
        self.length += len(view)
        if len(self._waiting) > WRITE_BYTES:
            self._write()
        return len(view)

    def _write(self) -> None:
        self.file.pwritev([self._waiting], self._written)
        self._written, self._waiting = self.length, bytearray()

    def since(self) -> list[int]:
        """Start, length and checksum of what was written since the last call."""
        self._write()
        found = [self._begun, self.length - self._begun, self._sum.intdigest()]
        self._begun = self.length
        self._sum.reset()
        return found

    def tell(self) -> int:
        return self.length

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


class SealWriter:
    """Writes one sealed file; rows come in the order of the log."""

    def __init__(
        self,
        system: System,
        folder: str,
        log_id: bytes,
        topic: Topic,
        schema: int,
        number: int,
        starts: Sequence[int],
    ) -> None:
        """`number`: among files written together; `starts`: of each partition before its rows."""
        self.topic = topic
        self.schema = schema
        self.starts = tuple(starts)
        self._system = system
        self._folder = folder
        self._log_id = log_id
        self._number = number
        self.stored = storage_schema(topic.schemas[schema - 1].arrow, EVERY_FLAG)
        self._pending: list[Rows] = []
        self.pending_bytes = self._pending_rows = 0
        self._flags = self.rows = 0
        self._spans: list[tuple[int, ...]] = []
        self._runs: list[Runs] = []
        self._groups: list[list[int]] = []
        self._first: Rows | None = None
        self._last: Rows | None = None

    @property
    def bytes(self) -> int:
        """Written so far."""
        return self._sink.length if self._first is not None else 0

    def _open(self, first: Rows) -> None:
        random = self._system.random(4).hex()
        self.name = f"{self.topic.id:06d}-{first.position:016d}-{self._number:04d}-{random}.parquet"
        self._file = self._system.create(f"{self._folder}/{self.name}", 0)
        self._sink = _Sink(self._file)
        self._writer = parquet.ParquetWriter(
            pa.PythonFile(self._sink, "w"), self.stored, compression="zstd", compression_level=1,
            use_dictionary=False, store_schema=True,
        )  # fmt: skip

    def add(self, rows: Rows) -> None:
        """Take the rows of a section; `flush` bounds what is kept in memory."""
        if self._first is None:
            self._open(rows)
            self._first = rows
        self._last = rows
        self._pending.append(rows)
        self._pending_rows += rows.data.num_rows
        self.pending_bytes += rows.data.get_total_buffer_size()
        if self._pending_rows >= GROUP_ROWS or self.pending_bytes >= GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write a row group of what has come."""
        if not self._pending:
            return
        table = pa.Table.from_batches([one.data for one in self._pending], self.stored)
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._groups.append([*self._sink.since(), len(self._pending)])
        for one in self._pending:
            self._flags |= one.flags
            self._spans.append(
                (one.position, one.sent, one.received, one.data.num_rows, len(one.runs))
            )
            self._runs.append(np.asarray(one.runs).copy())  # not a view of what was read
        self.rows += table.num_rows
        self._pending.clear()
        self.pending_bytes = self._pending_rows = 0

    def finish(self, *, compacted: bool = False) -> SealedFile:
        """Sync the file; the folder is the caller's to sync."""
        self.flush()
        assert self._first is not None
        assert self._last is not None
        spans = np.array(self._spans, SPANS)
        data = len(spans).to_bytes(8, "little") + spans.tobytes()
        data += np.concatenate(self._runs).tobytes()
        told = {
            "format": FORMAT, "log": self._log_id.hex(), "topic": self.topic.id,
            "schema": self.schema, "flags": self._flags, "groups": self._groups,
        }  # fmt: skip
        packed = len(data).to_bytes(8, "little") + _codec.compress(data, asbytes=True)
        self._writer.add_key_value_metadata(
            {"headrace": json.dumps(told), "headrace.spans": base64.b64encode(packed).decode()}
        )
        self._writer.close()
        _, length, footer = self._sink.since()
        assert length
        self._file.fdatasync()
        self._file.close()
        first, last = self._first, self._last
        return SealedFile(
            name=self.name,
            topic=self.topic.id,
            schema=self.schema,
            first=first.position,
            through=last.position,
            rows=self.rows,
            bytes=self._sink.length,
            checksum=footer,
            time_first=first.received,
            time_last=last.received,
            starts=self.starts,
            compacted=compacted,
        )

    def abandon(self) -> None:
        """Remove what was written."""
        if self._first is not None:
            self._file.close()
            self._system.unlink(f"{self._folder}/{self.name}")


class _Source:
    """What Parquet reads from: the row group that was read and verified last."""

    closed = False

    def __init__(self, size: int) -> None:
        self.size = size
        self.at = self.start = 0
        self.data = pa.py_buffer(b"")

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, length: int = -1) -> pa.Buffer:
        at = self.at - self.start
        if not 0 <= at <= at + length <= self.data.size:
            raise OSError(f"bytes {self.at} to {self.at + length} were not verified")
        self.at += length
        return self.data.slice(at, length)

    def close(self) -> None:
        pass

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return True


class Group(NamedTuple):
    """A row group, not read yet."""

    number: int
    spans: npt.NDArray[Any]
    runs: Runs


class SealedReader:
    """An open sealed file."""

    def __init__(self, file: Readable, described: SealedFile) -> None:
        """Read and verify the footer."""
        self._file = file
        self.described = described
        size = file.size()
        if size != described.bytes:
            raise self._damage(0, f"{described.bytes} bytes", f"{size}")
        start = max(0, size - 8 - int.from_bytes(file.pread(4, size - 8), "little"))
        footer = file.pread(size - start, start)
        if checksum(footer) != described.checksum:
            raise self._damage(start, f"{described.checksum:016x}", f"{checksum(footer):016x}")
        self._source = _Source(size)
        metadata = parquet.read_metadata(pa.BufferReader(b"PAR1" + footer))
        self._parquet = parquet.ParquetFile(self._source, metadata=metadata, pre_buffer=False)
        texts = self._parquet.metadata.metadata
        told = json.loads(texts[b"headrace"])
        if told["format"] > FORMAT:
            raise errors.NewerFormat(
                f"this sealed file has format {told['format']}, this program reads up to {FORMAT}",
                place=file.path,
            )
        self.flags: int = told["flags"]
        self._groups: list[list[int]] = told["groups"]
        packed = base64.b64decode(texts[b"headrace.spans"])
        raw = _codec.decompress(packed[8:], int.from_bytes(packed[:8], "little"), asbytes=True)
        count = int.from_bytes(raw[:8], "little")
        self._spans = np.frombuffer(raw, SPANS, count, 8)
        self._runs = np.frombuffer(raw, RUNS, offset=8 + count * SPANS.itemsize)
        names = self._parquet.schema_arrow.names
        leaves = [_leaves(field.type) for field in self._parquet.schema_arrow]
        ends = np.cumsum(leaves).tolist()
        self._leaves = {
            name: range(end - count, end)
            for name, end, count in zip(names, ends, leaves, strict=True)
        }

    def groups(self) -> list[Group]:
        """All row groups, in order."""
        found, span, run = [], 0, 0
        for index, (_, _, _, count) in enumerate(self._groups):
            spans = self._spans[span : span + count]
            runs = int(spans["runs"].sum())
            found.append(Group(index, spans, self._runs[run : run + runs]))
            span, run = span + count, run + runs
        return found

    def verify(self, group: Group) -> pa.Buffer:
        """The bytes of a row group, or the damage that is found in them."""
        start, length, expected, _ = self._groups[group.number]
        data = self._file.read(length, start)
        if checksum(data) != expected:
            through = int(group.spans["position"][-1])
            raise self._damage(start, f"{expected:016x}", f"{checksum(data):016x}", through)
        return data

    def read(self, group: Group, names: Sequence[str]) -> pa.RecordBatch:
        """These columns of a row group."""
        self._source.data = self.verify(group)
        self._source.start = self._groups[group.number][0]
        leaves = [leaf for name in names for leaf in self._leaves[name]]
        table = self._parquet.reader.read_row_group(
            group.number, column_indices=leaves or [0], use_threads=False
        )
        self._source.data = pa.py_buffer(b"")
        batch: pa.RecordBatch = table.combine_chunks().to_batches()[0]
        return batch.select(list(names)).replace_schema_metadata(None)

    def close(self) -> None:
        """Close the file."""
        self._parquet.close()
        self._file.close()

    def _damage(
        self, offset: int, expected: str, found: str, resume: int | None = None
    ) -> errors.LogDamaged:
        path = self._file.path
        on = self.described.through if resume is None else resume
        return errors.LogDamaged(
            f"sealed file {self.described.name}, byte {offset}: expected {expected}, found {found}",
            place=f"{path}, byte {offset}",
            fix=f"read on behind it with after={on}; put the file back from a backup to get the"
            " rest",
            file=path,
            offset=offset,
            expected=expected,
            found=found,
            resume_after=on,
        )


def missing(described: SealedFile, path: str) -> errors.LogDamaged:
    """The error for a sealed file that is not there."""
    kind, back = "sealed", "from a backup"
    if described.archive:
        kind, back = "archived", f"to {described.archive}, or restore the log with its new address"
    return errors.LogDamaged(
        f"the {kind} file {described.name} is missing",
        place=path,
        fix=f"read on behind it with after={described.through}; put the file back {back} to get"
        " the rest",
        file=path,
        offset=0,
        expected="a sealed file",
        found="no file",
        resume_after=described.through,
    )


def spans_of(group: Group) -> list[Span]:
    """The spans of a row group, as readers hand them out."""
    found, at = [], 0
    for position, sent, received, rows, count in group.spans.tolist():
        found.append(Span(rows, position, sent, received, group.runs[at : at + count]))
        at += count
    return found


def filtered(group: Group, keep: npt.NDArray[np.bool_]) -> Group:
    """Spans and runs of the rows that are kept; a run ends where offsets have a gap."""
    spans, runs = group.spans, group.runs
    run = np.repeat(np.arange(len(runs)), runs["rows"])[keep]
    offset = offsets_of(runs)[keep]
    new = np.ones(len(run), bool)
    new[1:] = (run[1:] != run[:-1]) | (offset[1:] != offset[:-1] + np.uint64(1))
    starts = np.flatnonzero(new)
    left = np.zeros(len(starts), RUNS)
    left["partition"] = runs["partition"][run[starts]]
    left["base"] = offset[starts]
    left["rows"] = np.diff(np.append(starts, len(run)))
    span = np.repeat(np.arange(len(spans)), spans["runs"])[run[starts]]
    which, first, count = np.unique(span, return_index=True, return_counts=True)
    kept = spans[which].copy()
    kept["runs"] = count
    kept["rows"] = np.add.reduceat(left["rows"], first) if len(first) else 0
    return Group(group.number, kept, left)


def with_flags(data: pa.RecordBatch, flags: int, schema: pa.Schema) -> pa.RecordBatch:
    """Rows of a section in the columns of a sealed file, which has all that flags may say."""
    columns = list(data.columns)
    width = len(schema) - 2
    headers = columns[width] if flags & WITH_HEADERS else pa.nulls(data.num_rows, HEADERS)
    if flags & WITH_TRANSACTION:
        transaction = columns[-1]
    else:
        transaction = pa.array(np.zeros(data.num_rows, np.uint32))
    return pa.RecordBatch.from_arrays([*columns[:width], headers, transaction], schema=schema)


def _leaves(kind: pa.DataType) -> int:
    """How many columns Parquet makes of one of this type."""
    if pa.types.is_struct(kind) or pa.types.is_map(kind) or pa.types.is_list(kind):
        return sum(_leaves(kind.field(at).type) for at in range(kind.num_fields))
    return 1
