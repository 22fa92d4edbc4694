"""The bytes of the journal: records, sections, runs. Pure: bytes in, values out, no I/O.

A log is a folder::

    headrace.json          format version and log id; written last when a log is made
    journal/00000001.log   records, one after the other; the rest of the file is zeros
    pieces/....piece       rows of large entries, synced before the entry that names them
    counters/....run       counters as of a checkpoint, named by it
    live/, locks/          shared memory and locks: derived, never needed to read the log

A journal file is a chain of **records**, each starting at a multiple of 64 bytes. All integers are
little-endian. An **address** is ``file number << 40 | offset in the file``; addresses only grow.

::

    header, 128 bytes
      0   8  magic "HRlog" 00 00, format version (1)
      8  16  log id
     24   8  address of this record
     32   8  position: for an entry its own, else that of the last entry before it
     40   8  checksum of the record before it (the chain); of the first record of a log: 0
     48   8  synced end: everything below this address was on the disk when this was written
     56   8  address of the last record before this one that changed the control state, or 0
     64   8  received_time, microseconds since 1970 (never goes back)
     72   1  kind: 1 entry, 2 checkpoint, 3 mark, 4 roll
     73   1  flags: 1 changes the control state, 2 has conditions (expect, require)
     74   2  zero
     76   4  length of meta
     80   8  length of body
     88   4  number of sections
     92   4  length of control (the last part of meta)
     96  24  zero (room)
    120   8  checksum: xxh3-64 over header[0:120] + meta

    meta                    sections, then the runs of each section, then control (JSON, UTF-8)
      section, 64 bytes: rows of one topic
        0   4  topic id            4   4  schema version of the topic
        8   2  flags: 1 the batch has column _headers, 2 it has column _transaction
       10   1  codec (0: none)    11   1  zero
       12   4  number of runs     16   4  rows
       20   4  piece: 0 the rows are in this record's body, n: in the n-th of control["pieces"]
       24   4  slot: the topic's first place in the array of partition ends
       28   4  length of the section's extension (0; room for key ids of encrypted columns)
       32   8  sent_time, microseconds since 1970
       40   8  offset of the rows: in the body, or in the piece
       48   8  their length       56   8  their checksum, xxh3-64
      run, 16 bytes: consecutive rows of one partition, in the order of the batch
        0   4  partition           4   4  rows           8   8  offset of the first of them

    zeros up to a multiple of 64
    body                    per section one Arrow IPC record batch message (no schema message: the
                            schema is that of the topic's version), each at a multiple of 64
    zeros up to a multiple of 64

A checksum of the rows stands in the section, so whoever reads one topic checks just that one; the
header's checksum covers the sections, so the chain covers everything. The first record of a file is
a **checkpoint**: its control names the whole state, so nothing before it need be read to go on. A
**mark** has no rows and says, by its synced end, that all before it is on the disk. A **roll** ends
a file that is full. Checkpoint, mark and roll take no position.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from headrace.model import fold
from headrace.model.fold import Offsets
from headrace.model.records import RUNS
from headrace.model.topic import Topic

FORMAT_VERSION = 1
MAGIC = b"HRlog\0\0" + bytes([FORMAT_VERSION])
HEADER_BYTES = 128
ALIGNMENT = 64
OFFSET_BITS = 40
OFFSET_MASK = (1 << OFFSET_BITS) - 1
ENTRY, CHECKPOINT, MARK, ROLL = 1, 2, 3, 4
CHANGES_CONTROL, HAS_CONDITIONS = 1, 2
WITH_HEADERS, WITH_TRANSACTION = 1, 2

_HEADER = struct.Struct("<8s16sQQQQQqBBHIQII24xQ")
_HEADER_UNSIGNED = struct.Struct("<8s16sQQQQQqBBHIQII24x")
_SECTION = struct.Struct("<IIHBBIIIIIqQQQ")
_RUN = struct.Struct("<IIQ")
_CHECKSUM = struct.Struct("<Q")
SECTION_BYTES = _SECTION.size
RUN_BYTES = _RUN.size
PAD = [bytes(n) for n in range(ALIGNMENT)]

_JSON = json.JSONEncoder(separators=(",", ":"))

Runs = npt.NDArray[Any]
checksum = xxh3_64_intdigest


def address_of(file: int, offset: int) -> int:
    """The address of a place in a journal file."""
    return file << OFFSET_BITS | offset


def place_of(address: int) -> tuple[int, int]:
    """The journal file's number and the offset in it."""
    return address >> OFFSET_BITS, address & OFFSET_MASK


def file_name(number: int) -> str:
    """The name of a journal file; a plain listing sorts."""
    return f"{number:08d}.log"


def aligned(length: int) -> int:
    """The next multiple of 64."""
    return (length + ALIGNMENT - 1) & -ALIGNMENT


@dataclass(slots=True)
class SectionDraft:
    """Rows of one topic on their way into an entry; bases are filled in under the append lock."""

    topic: Topic
    schema: int
    flags: int
    rows: int
    sent_time: int
    runs: Runs | None
    """Structured array RUNS, each base counted from the entry's first row of the partition until
    the entry is numbered; None: one run only."""
    body: pa.Buffer | bytes | None
    """The Arrow message, or None when the rows are in a piece."""
    partition: int = 0
    base: int = 0
    """Of the only run. One run is the common case of small entries, so it is kept out of numpy."""
    piece: int = 0
    offset: int = 0
    length: int = 0
    checksum: int = 0

    @property
    def slot_end(self) -> int:
        """How long the array of partition ends must be for these rows."""
        return self.topic.slot + self.topic.partitions

    def number(self, ends: Offsets | memoryview) -> None:
        """Give the rows the next offsets; `ends` has the topic's partitions from its slot on."""
        if self.runs is None:
            self.base = int(ends[self.topic.slot + self.partition])
        else:
            fold.number(np.asarray(ends), self.runs, self.topic.slot)

    def advance(self, ends: Offsets | memoryview) -> None:
        """Move the partition ends past these rows."""
        if self.runs is None:
            ends[self.topic.slot + self.partition] = self.base + self.rows
        else:
            fold.advance(np.asarray(ends), self.runs, self.topic.slot)

    def place(self, table: bytes) -> None:
        """Take the runs as they stand in the record by now."""
        if self.runs is None:
            _, _, self.base = _RUN.unpack(table)
        else:
            self.runs = np.frombuffer(table, RUNS)

    def table(self) -> bytes:
        """The runs as they stand in the record."""
        if self.runs is None:
            return _RUN.pack(self.partition, self.rows, self.base)
        return self.runs.tobytes()


def plain_section(topic: Topic) -> bytes:
    """What the sections of all entries have in common that are one batch of partition 0."""
    return _SECTION.pack(topic.id, len(topic.schemas), 0, 0, 0, 1, 0, 0, topic.slot, 0, 0, 0, 0, 0)


@dataclass(slots=True)
class Draft:
    """What an entry will hold, before it has a place."""

    sections: Sequence[SectionDraft] = ()
    control: Mapping[str, Any] = field(default_factory=dict)
    flags: int = 0
    kind: int = ENTRY
    section_bytes: bytes = b""
    run_bytes: bytes = b""
    """The runs before they are numbered."""
    control_bytes: bytes = b""
    bodies: Sequence[Any] = ()
    meta_length: int = 0
    body_length: int = 0
    length: int = 0

    def seal(self) -> Draft:
        """Pack all that needs no place; nothing may change afterwards but the bases of runs."""
        if self.control:
            self.control_bytes = _JSON.encode(self.control).encode()
        packed: list[bytes] = []
        tables: list[bytes] = []
        bodies: list[Any] = []
        at = 0
        for s in self.sections:
            body = s.body
            if body is not None:
                s.offset, s.length, s.checksum = at, len(body), checksum(body)
                at += (s.length + 63) & -64
                bodies += body, PAD[-s.length & 63]
            tables.append(s.table())
            count = len(tables[-1]) // RUN_BYTES
            more = (s.piece, s.topic.slot, 0, s.sent_time, s.offset, s.length, s.checksum)
            packed.append(_SECTION.pack(s.topic.id, s.schema, s.flags, 0, 0, count, s.rows, *more))
        self.section_bytes, self.run_bytes = b"".join(packed), b"".join(tables)
        self.bodies, self.body_length = bodies, at
        meta = len(self.section_bytes) + len(self.run_bytes) + len(self.control_bytes)
        self.meta_length, self.length = meta, aligned(HEADER_BYTES + meta) + at
        return self

    def place(self, runs: bytes) -> None:
        """Take all runs as they stand in the record by now."""
        at = 0
        for section in self.sections:
            end = at + RUN_BYTES * (1 if section.runs is None else len(section.runs))
            section.place(runs[at:end])
            at = end


def encode(
    draft: Draft,
    *,
    log_id: bytes,
    address: int,
    position: int,
    previous: int,
    synced: int,
    previous_control: int,
    received: int,
) -> tuple[list[Any], int]:
    """The buffers of a record, in order, and its checksum. The bases of the runs must be set."""
    tables = [section.table() for section in draft.sections]
    meta = b"".join((draft.section_bytes, *tables, draft.control_bytes))
    header = _HEADER_UNSIGNED.pack(
        MAGIC,
        log_id,
        address,
        position,
        previous,
        synced,
        previous_control,
        received,
        draft.kind,
        draft.flags,
        0,
        len(meta),
        draft.body_length,
        len(draft.sections),
        len(draft.control_bytes),
    )
    own = checksum(header + meta)
    pad = PAD[-(HEADER_BYTES + len(meta)) & 63]
    return [b"".join((header, _CHECKSUM.pack(own), meta, pad)), *draft.bodies], own


def readdressed(data: bytes, *, address: int, previous: int, previous_control: int) -> bytes:
    """A whole record moved to another place in the chain: same content, new header."""
    record = Record(data)
    moved = bytearray(data)
    struct.pack_into("<Q", moved, 24, address)
    struct.pack_into("<QQQ", moved, 40, previous, min(record.synced, address), previous_control)
    meta = moved[HEADER_BYTES : HEADER_BYTES + record.meta_length]
    own = checksum(bytes(moved[: HEADER_BYTES - 8] + meta))
    _CHECKSUM.pack_into(moved, HEADER_BYTES - 8, own)
    return bytes(moved)


class Section:
    """Rows of one topic in a record."""

    __slots__ = (
        "checksum",
        "flags",
        "length",
        "offset",
        "piece",
        "rows",
        "schema",
        "sent_time",
        "slot",
        "table",
        "topic",
    )

    def __init__(self, fields: tuple[int, ...], table: bytes | memoryview) -> None:
        """From the fields of the section and the bytes of its runs."""
        (
            self.topic,
            self.schema,
            self.flags,
            _codec,
            _zero,
            _runs,
            self.rows,
            self.piece,
            self.slot,
            _extension,
            self.sent_time,
            self.offset,
            self.length,
            self.checksum,
        ) = fields
        self.table = table

    @property
    def runs(self) -> Runs:
        """Partition, rows and base of each run."""
        return np.frombuffer(self.table, RUNS)


class Record:
    """A decoded header; `meta` is taken apart on demand."""

    __slots__ = (
        "address",
        "body_length",
        "body_offset",
        "checksum",
        "control_length",
        "flags",
        "kind",
        "length",
        "log_id",
        "magic",
        "meta",
        "meta_length",
        "position",
        "previous",
        "previous_control",
        "received",
        "section_count",
        "synced",
    )
    magic: bytes
    log_id: bytes
    address: int
    position: int
    previous: int
    synced: int
    previous_control: int
    received: int
    kind: int
    flags: int
    meta_length: int
    body_length: int
    section_count: int
    control_length: int
    checksum: int
    body_offset: int
    """Where the body starts, from the start of the record."""

    def __init__(self, head: bytes | memoryview, offset: int = 0) -> None:
        """Decode the header at `offset`; `fits` and `take_meta` say whether it is one."""
        (
            self.magic,
            self.log_id,
            self.address,
            self.position,
            self.previous,
            self.synced,
            self.previous_control,
            self.received,
            self.kind,
            self.flags,
            _zero,
            self.meta_length,
            self.body_length,
            self.section_count,
            self.control_length,
            self.checksum,
        ) = _HEADER.unpack_from(head, offset)
        self.body_offset = (HEADER_BYTES + self.meta_length + 63) & -64
        self.length = self.body_offset + self.body_length
        self.meta: bytes | memoryview = b""

    @property
    def end(self) -> int:
        """The address after this record."""
        return self.address + self.length

    @property
    def behind(self) -> int:
        """The position of the last entry before it."""
        return self.position - (self.kind == ENTRY)

    def fits(self, address: int, log_id: bytes, limit: int) -> bool:
        """Whether this can be a record of log `log_id` at `address` in a file of `limit` bytes."""
        return (
            self.magic == MAGIC
            and self.log_id == log_id
            and self.address == address
            and (address & OFFSET_MASK) + self.length <= limit
        )

    def take_meta(self, data: memoryview) -> bool:
        """Attach meta; `data` is header and meta. False if they are not what the checksum says."""
        self.meta = meta = data[HEADER_BYTES:]
        return checksum(b"".join((data[: HEADER_BYTES - 8], meta))) == self.checksum

    def sections(self) -> list[Section]:
        """The sections with their runs."""
        count = self.section_count
        if not count:
            return []
        at = count * SECTION_BYTES
        result = []
        for index in range(count):
            fields = _SECTION.unpack_from(self.meta, index * SECTION_BYTES)
            end = at + fields[5] * RUN_BYTES
            result.append(Section(fields, self.meta[at:end]))
            at = end
        return result

    def control(self) -> dict[str, Any]:
        """The control part."""
        if not self.control_length:
            return {}
        raw = bytes(self.meta[self.meta_length - self.control_length :])
        result: dict[str, Any] = json.loads(raw)
        return result
