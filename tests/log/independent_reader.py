"""A reader of a log, written from docs/log.md alone: it imports nothing of Headrace.

`Log(folder)` reads the folder as it lies on the disk, without shared memory and without writing. It
has the topics, the rows as the newest schema of their generation shows them, the counters, the
offsets and the values. It stands here to show that the page is enough.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from xxhash import xxh3_64_intdigest

HEADER = struct.Struct("<8s16s6QBBHIQII24xQ")
SECTION = struct.Struct("<IIHBBIIIIIqQQQ")
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
        self.topics: dict[int, dict[str, Any]] = {}
        self.counters: dict[str, int] = {}
        self.offsets: dict[str, dict[str, dict[str, int]]] = {}
        self.values: dict[str, Any] = {}
        self.position = 0
        self._batches: list[tuple[dict[str, Any], dict[str, Any], bytes]] = []
        newest = max(int(path.stem) for path in (folder / "journal").glob("*.log"))
        data = self.file(newest)
        first = self.record(data, newest, 0)
        assert first is not None, "damage: the newest file has no checkpoint"
        previous = 0
        for closed in first["control"]["files"]:
            number, stop = closed["number"], closed["end"]
            end, previous = self._walk(self.file(number), number, stop, previous)
            assert end == stop, f"damage: file {number}, byte {end}"
        end, _ = self._walk(data, newest, len(data), previous)
        found = (self.record(data, newest, at) for at in range(0, len(data), 64))
        synced = max(self._witness(), *(record["synced"] for record in found if record))
        assert synced <= newest << 40 | end, f"damage: file {newest}, byte {end}"

    def file(self, number: int) -> bytes:
        return (self.folder / "journal" / f"{number:08d}.log").read_bytes()

    def _witness(self) -> int:
        path = self.folder / "witness"
        data = path.read_bytes() if path.exists() else b""
        if data[:24] != b"HRend\0\0\1" + self.id or len(data) != 40:
            return 0
        end, checksum = struct.unpack_from("<QQ", data, 24)
        return int(end) if xxh3_64_intdigest(data[:32]) == checksum else 0

    def record(self, data: bytes, number: int, at: int) -> dict[str, Any] | None:
        """The record at this byte, or None if there is no intact one."""
        if data[at : at + 24] != b"HRlog\0\0\1" + self.id or at + 128 > len(data):
            return None
        fields = HEADER.unpack_from(data, at)
        address, position, previous, synced, _, received, kind = fields[2:9]
        meta_length, body_length, sections, control_length, checksum = fields[11:]
        meta = data[at + 128 : at + 128 + meta_length]
        if (
            address != number << 40 | at
            or xxh3_64_intdigest(data[at : at + 120] + meta) != checksum
        ):
            return None
        body = (at + 128 + meta_length + 63) & -64
        return {
            "kind": kind, "position": position, "previous": previous, "synced": synced,
            "received": received, "checksum": checksum, "body": body, "end": body + body_length,
            "control": json.loads(meta[meta_length - control_length :] or b"{}"),
            "sections": list(_sections(meta, sections)),
        }  # fmt: skip

    def _walk(self, data: bytes, number: int, stop: int, previous: int) -> tuple[int, int]:
        """Take whole records in up to `stop`; where they end, and the last checksum."""
        at = 0
        while at < stop:
            record = self.record(data, number, at)
            if record is None or record["previous"] != previous or record["end"] > len(data):
                break
            bodies = [self._rows(record, section, data) for section in record["sections"]]
            if any(xxh3_64_intdigest(body) != s["checksum"] for body, s in bodies):
                break
            if record["kind"] == 1:
                self._take(record)
                self._batches += [(record, section, body) for body, section in bodies]
            at, previous = record["end"], record["checksum"]
        return at, previous

    def _rows(self, record: dict[str, Any], section: dict[str, Any], data: bytes) -> Any:
        start = section["offset"]
        if section["piece"]:
            name = record["control"]["pieces"][section["piece"] - 1]
            data = (self.folder / "pieces" / name).read_bytes()
        else:
            start += record["body"]
        return data[start : start + section["length"]], section

    def _take(self, record: dict[str, Any]) -> None:
        control = record["control"]
        self.position = record["position"]
        self.counters |= {name: value + 1 for name, value in control.get("expect", {}).items()}
        self.topics |= {topic["id"]: topic for topic in control.get("topics", ())}
        self.values |= control.get("values", {})
        for group, topics in control.get("offsets", {}).items():
            for topic, offsets in topics.items():
                self.offsets.setdefault(group, {}).setdefault(topic, {}).update(offsets)

    def read(self, topic: str) -> Iterator[tuple[Any, ...]]:
        """(position, partition, offset, sent, received, headers, transaction, row) of each row."""
        for record, section, body in self._batches:
            found = self.topics[section["topic"]]
            if found["name"] != topic:
                continue
            written, flags = found["schemas"][section["schema"] - 1], section["flags"]
            fields = [_field(column) for column in _live(written)]
            if flags & 1:
                fields.append(pa.field("_headers", pa.map_(pa.string(), pa.binary())))
            if flags & 2:
                fields.append(pa.field("_transaction", pa.uint32(), nullable=False))
            batch = pa.ipc.read_record_batch(pa.py_buffer(body), pa.schema(fields))
            names = batch.schema.names
            absent: dict[str, list[Any]] = {
                "_headers": [None] * section["rows"],
                "_transaction": [0] * section["rows"],
            }
            extra = [batch[n].to_pylist() if n in names else absent[n] for n in absent]
            places = [(p, base + i) for p, rows, base in section["runs"] for i in range(rows)]
            shown = _upgraded(batch, written, found["schemas"])
            for place, *rest in zip(places, *extra, shown, strict=True):
                yield (record["position"], *place, section["sent"], record["received"], *rest)


def _sections(meta: bytes, count: int) -> Iterator[dict[str, Any]]:
    at = count * 64
    for index in range(count):
        fields = SECTION.unpack_from(meta, index * 64)
        assert fields[3] == fields[9] == 0, "a codec or an extension that this reader does not know"
        runs = meta[at : at + 16 * fields[5]]
        at += len(runs)
        yield {
            "topic": fields[0], "schema": fields[1], "flags": fields[2], "rows": fields[6],
            "piece": fields[7], "sent": fields[10], "offset": fields[11], "length": fields[12],
            "checksum": fields[13], "runs": list(struct.iter_unpack("<IIQ", runs)),
        }  # fmt: skip


def _live(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [column for column in schema["columns"] if not column.get("retired")]


def _upgraded(batch: pa.RecordBatch, written: dict[str, Any], schemas: list[Any]) -> list[Any]:
    """The rows as the newest version of their generation has them, column by column id."""
    target = [s for s in schemas if s["generation"] == written["generation"]][-1]
    there = {column["id"]: batch.column(index) for index, column in enumerate(_live(written))}
    lists: dict[str, list[Any]] = {}
    for column in _live(target):
        wanted, array = _field(column).type, there.get(column["id"])
        nothing = pa.nulls(batch.num_rows, wanted)
        lists[column["name"]] = (nothing if array is None else array.cast(wanted)).to_pylist()
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _field(column: dict[str, Any]) -> pa.Field:
    arrow = _type(TOKEN.findall(column["type"]))
    return pa.field(column["name"], arrow, nullable=column.get("nullable", True))


def _type(tokens: list[str]) -> pa.DataType:
    """The Arrow type that these tokens of DDL spell; they are used up."""
    word = tokens.pop(0)
    if word in SIMPLE:
        return SIMPLE[word]
    fields: list[pa.Field] = []
    tokens.pop(0)  # ( or <
    if word == "decimal":
        found = pa.decimal128(int(tokens.pop(0)), int(tokens.pop(1)))
        del tokens[0]  # ,
    elif word == "array":
        found = pa.list_(_type(tokens))
    elif word == "map":
        key, _, value = _type(tokens), tokens.pop(0), _type(tokens)
        found = pa.map_(key, value)
    else:
        while not fields or (tokens[0] == "," and tokens.pop(0)):
            name, _, arrow = tokens.pop(0), tokens.pop(0), _type(tokens)
            required = tokens[0] == "not null" and bool(tokens.pop(0))
            name = name[1:-1].replace("``", "`") if name.startswith("`") else name
            fields.append(pa.field(name, arrow, nullable=not required))
        found = pa.struct(fields)
    tokens.pop(0)  # ) or >
    return found
