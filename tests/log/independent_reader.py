"""A reader of a log, written from docs/log.md alone: it imports nothing of Headrace.

`Log(folder)` reads the folder as it lies on the disk, without shared memory and without writing. It
has the topics, the rows as the newest schema of their generation shows them, the counters, the
offsets and the values. It stands here to show that the page is enough.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_64_intdigest as checksum_of

HEADER = struct.Struct("<8s16s6QBBHIQII24xQ")
Header = namedtuple(
    "Header",
    "magic log address position previous synced changed received kind flags zero meta body sections"
    " control checksum",
)
SECTION = struct.Struct("<IIHBBIIIIIqQQQ")
Section = namedtuple(
    "Section",
    "topic schema flags codec zero runs rows piece slot extension sent offset length checksum",
)
SIMPLE = {
    "boolean": pa.bool_(), "tinyint": pa.int8(), "smallint": pa.int16(), "int": pa.int32(),
    "bigint": pa.int64(), "float": pa.float32(), "double": pa.float64(), "string": pa.string(),
    "binary": pa.binary(), "date": pa.date32(), "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"), "time": pa.time64("us"),
    "interval day to second": pa.duration("us"),
}  # fmt: skip
TOKEN = re.compile(r"`(?:[^`]|``)*`|interval day to second|not null|\w+|[<>(),:]")


class Log:
    """All that a folder holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = bytes.fromhex(json.loads((folder / "headrace.json").read_text())["log"])
        self.topics: dict[int, Any] = {}
        self.counters: dict[str, int] = {}
        self.offsets: dict[str, dict[str, dict[str, int]]] = {}
        self.values: dict[str, Any] = {}
        self.sealed: dict[str, Any] = {}
        self.sealed_through = self.position = 0
        self._parts: list[tuple[Any, ...]] = []
        newest = max(int(path.stem) for path in (folder / "journal").glob("*.log"))
        data = self._file(newest)
        first = self.record(data, newest, 0)
        assert first, "damage: the newest file has no checkpoint"
        numbers = [*(closed["number"] for closed in first[1]["files"]), newest]
        oldest = self.record(self._file(numbers[0]), numbers[0], 0)
        assert oldest, f"damage: file {numbers[0]} has no checkpoint"
        previous = oldest[0].previous  # what lies before it is sealed, or gone
        self._take(oldest[0], oldest[1]["control"])
        for closed in first[1]["files"]:
            number, stop = closed["number"], closed["end"]
            end, previous = self._walk(self._file(number)[:stop], number, previous)
            assert end == stop, f"damage: file {number}, byte {end}"
        end, _ = self._walk(data, newest, previous)
        found = (self.record(data, newest, at) for at in range(0, len(data), 64))
        synced = max(self._witness(), *(record[0].synced for record in found if record))
        assert synced <= newest << 40 | end, f"damage: file {newest}, byte {end}"

    def _file(self, number: int) -> bytes:
        return (self.folder / "journal" / f"{number:08d}.log").read_bytes()

    def _witness(self) -> int:
        path = self.folder / "witness"
        data = path.read_bytes() if path.exists() else bytes(40)
        magic, end, checksum = struct.unpack("<24sQQ", data)
        return end if (magic, checksum) == (b"HRend\0\0\1" + self.id, checksum_of(data[:32])) else 0

    def record(self, data: bytes, number: int, at: int) -> tuple[Any, Any, Any, int] | None:
        """Header, control, sections with their runs, and place of the body, if it is intact."""
        if data[at : at + 24] != b"HRlog\0\0\1" + self.id or at + 128 > len(data):
            return None
        header = Header(*HEADER.unpack_from(data, at))
        meta = data[at + 128 : at + 128 + header.meta]
        right = header.checksum == checksum_of(data[at : at + 120] + meta)
        if not right or header.address != number << 40 | at:
            return None
        sections, runs_at = [], 64 * header.sections
        for index in range(header.sections):
            section = Section(*SECTION.unpack_from(meta, 64 * index))
            assert section.codec == section.extension == 0, "this reader does not know these"
            runs = struct.iter_unpack("<IIQ", meta[runs_at : runs_at + 16 * section.runs])
            sections.append((section, list(runs)))
            runs_at += 16 * section.runs
        control = json.loads(meta[header.meta - header.control :] or b"{}")
        return header, control, sections, (at + 128 + header.meta + 63) & -64

    def _walk(self, data: bytes, number: int, previous: int) -> tuple[int, int]:
        """Take whole records in as long as they come; where they end, and the last checksum."""
        at = 0
        while record := self.record(data, number, at):
            header, control, sections, body = record
            parts = []
            for section, runs in sections:
                start, source = body + section.offset, data
                if section.piece:
                    piece = self.folder / "pieces" / control["pieces"][section.piece - 1]
                    start, source = section.offset, piece.read_bytes()
                parts.append((header, section, runs, source[start : start + section.length]))
            whole = all(checksum_of(rows) == section.checksum for _, section, _, rows in parts)
            if not whole or header.previous != previous or body + header.body > len(data):
                break
            if header.kind == 1:
                self._parts += parts
                self._take(header, control)
            at, previous = body + header.body, header.checksum
        return at, previous

    def _take(self, header: Any, control: dict[str, Any]) -> None:
        self.position = header.position
        self.counters |= {name: value + 1 for name, value in control.get("expect", {}).items()}
        for topic in control.get("topics", ()):
            for committed in self.offsets.values() if topic["id"] not in self.topics else ():
                committed.pop(topic["name"], None)
            self.topics[topic["id"]] = topic
        self.values |= control.get("values", {})
        sealed = control.get("sealed", {})
        self.sealed_through = max(self.sealed_through, sealed.get("through", 0))
        for name in sealed.get("drop", ()):
            self.sealed.pop(name, None)
        self.sealed |= {file["name"]: file for file in sealed.get("add", ())}
        for group, topics in control.get("offsets", {}).items():
            if topics is None:
                self.offsets.pop(group, None)
            for topic, offsets in (topics or {}).items():
                self.offsets.setdefault(group, {}).setdefault(topic, {}).update(offsets)

    def read(self, topic: str) -> Iterator[tuple[Any, ...]]:
        """(position, partition, offset, sent, received, headers, transaction, row) of each row."""
        (found,) = (one for one in self.topics.values() if one["name"] == topic)
        files = [file for file in self.sealed.values() if file["topic"] == found["id"]]
        for file in sorted(files, key=lambda file: (file["first"], file["through"], file["name"])):
            written = found["schemas"][file["schema"] - 1]
            for batch, flags, told, runs in self._groups(file):
                yield from _rows(batch, flags, told, runs, written, found["schemas"])
        for header, section, runs, rows in self._parts:
            if section.topic != found["id"] or header.position <= self.sealed_through:
                continue
            written = found["schemas"][section.schema - 1]
            fields = [_field(column) for column in _live(written)]
            if section.flags & 1:
                fields.append(pa.field("_headers", pa.map_(pa.string(), pa.binary())))
            if section.flags & 2:
                fields.append(pa.field("_transaction", pa.uint32(), nullable=False))
            batch = pa.ipc.read_record_batch(pa.py_buffer(rows), pa.schema(fields))
            told = [(header.position, section.sent, header.received)] * section.rows
            yield from _rows(batch, section.flags, told, runs, written, found["schemas"])

    def _groups(self, file: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
        """The row groups of a sealed file, with where each of their rows stood."""
        data = (Path(file["archive"] or self.folder / "sealed") / file["name"]).read_bytes()
        footer = data[len(data) - 8 - int.from_bytes(data[-8:-4], "little") :]
        assert checksum_of(footer) == file["checksum"], f"damage: {file['name']}"
        parquet = pq.ParquetFile(pa.BufferReader(data))
        texts = parquet.metadata.metadata
        head, packed = json.loads(texts[b"headrace"]), base64.b64decode(texts[b"headrace.spans"])
        size = int.from_bytes(packed[:8], "little")
        raw = pa.Codec("zstd").decompress(packed[8:], size, asbytes=True)
        count = int.from_bytes(raw[:8], "little")
        spans = struct.iter_unpack("<QqqII", raw[8 : 8 + 32 * count])
        runs = struct.iter_unpack("<IIQ", raw[8 + 32 * count :])
        for group, (at, length, checksum, number) in enumerate(head["groups"]):
            assert checksum_of(data[at : at + length]) == checksum, f"damage: {file['name']}, {at}"
            own = [next(spans) for _ in range(number)]
            told = [span[:3] for span in own for _ in range(span[3])]
            placed = [next(runs) for span in own for _ in range(span[4])]
            batch = parquet.read_row_group(group).combine_chunks().to_batches()[0]
            yield batch, head["flags"], told, placed


def _rows(
    batch: pa.RecordBatch, flags: int, told: Any, runs: Any, written: Any, schemas: Any
) -> Iterator[tuple[Any, ...]]:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    headers = columns["_headers"].to_pylist() if flags & 1 else [None] * len(batch)
    transactions = columns["_transaction"].to_pylist() if flags & 2 else [0] * len(batch)
    places = [(p, base + i) for p, count, base in runs for i in range(count)]
    shown = _upgraded(batch, written, schemas)
    for (position, sent, received), place, *rest in zip(
        told, places, headers, transactions, shown, strict=True
    ):
        yield (position, *place, sent, received, *rest)


def _live(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [column for column in schema["columns"] if not column.get("retired")]


def _upgraded(batch: pa.RecordBatch, written: dict[str, Any], schemas: list[Any]) -> Any:
    """The rows as the newest version of their generation has them, column by column id."""
    newest = [schema for schema in schemas if schema["generation"] == written["generation"]][-1]
    there = {column["id"]: batch.column(index) for index, column in enumerate(_live(written))}
    fields = {column["id"]: _field(column) for column in _live(newest)}
    arrays = [there.get(i, pa.nulls(len(batch))).cast(field.type) for i, field in fields.items()]
    return pa.RecordBatch.from_arrays(arrays, [field.name for field in fields.values()]).to_pylist()


def _field(column: dict[str, Any]) -> pa.Field:
    arrow = _type(TOKEN.findall(column["type"]))
    return pa.field(column["name"], arrow, nullable=column.get("nullable", True))


def _type(tokens: list[str]) -> Any:
    """The Arrow type, or the number, that these tokens of DDL spell; they are used up."""
    word = tokens.pop(0)
    if word in SIMPLE:
        return SIMPLE[word]
    if word.isdigit():
        return int(word)
    inner: list[Any] = []
    while tokens.pop(0) not in (")", ">"):  # else it was ( or < or , and a part follows
        if word != "struct":
            inner.append(_type(tokens))
            continue
        name, _, arrow = tokens.pop(0), tokens.pop(0), _type(tokens)
        name = name[1:-1].replace("``", "`") if name.startswith("`") else name
        required = tokens[0] == "not null" and bool(tokens.pop(0))
        inner.append(pa.field(name, arrow, nullable=not required))
    if word == "struct":
        return pa.struct(inner)
    return {"decimal": pa.decimal128, "array": pa.list_, "map": pa.map_}[word](*inner)
