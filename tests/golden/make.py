"""Makes the golden folder of this format: fixed content, fixed clock, fixed names.

`./run python -m tests.golden.make` writes `tests/golden/log-v1` and `log-v1.json`. It is run once
per format version; afterwards the folder only proves that later programs still read it. It holds
one of everything that the format knows: all types, both kinds of topics, opaque values, headers,
source transactions, several topics in an entry, offsets, values, counters and their runs, a
writer, staged pieces (one of them never published), every change of a schema, rolls, marks, a file
cut by a boot with void bytes behind its end, one cut by a failed sync with records carried over,
and a torn end.
"""

from __future__ import annotations

import datetime as dt
import errno
import hashlib
import json
import os
import re
import shutil
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.model.records import microseconds_of
from tests.log.kit import Machine, machine_log

HERE = Path(__file__).parent
FOLDER = HERE / "log-v1"
EXPECTED = HERE / "log-v1.json"
PAGE = HERE.parent.parent / "docs" / "log.md"
START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
TYPES = """
    boolean boolean, tinyint tinyint, smallint smallint, int int, bigint bigint not null,
    float float, double double, string string, binary binary, decimal decimal(20,4), date date,
    timestamp timestamp, timestamp_ntz timestamp_ntz, time time, span interval day to second,
    array array<int>, map map<string,bigint>,
    struct struct<x:int not null,y:array<struct<z:string>>>,
    `odd, ``name``` string
"""


class FixedMachine(Machine):
    """A machine on which each entry comes a second after the last, and chance is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.clock_us = microseconds_of(START)
        self.boot = b"boot 1".ljust(16)
        self._drawn = 0

    def now_us(self) -> int:
        assert self.clock_us is not None
        self.clock_us += 250_000
        return self.clock_us

    def random(self, count: int) -> bytes:
        self._drawn += 1
        return hashlib.blake2b(b"golden %d" % self._drawn, digest_size=count).digest()


def make(folder: Path) -> None:
    """Write the log, as a machine that lost power leaves it."""
    shutil.rmtree(folder, ignore_errors=True)
    machine = FixedMachine()
    log = opened(folder, machine)
    log.create_topic("types", TYPES, key=["bigint", "string"], event_time="timestamp", partitions=3)
    log.append("types", [full(number) for number in range(4)])
    log.append("types", [{"bigint": -1, "string": None}], sent_time=START - dt.timedelta(days=1))
    log.create_topic(
        "orders",
        "id int not null, city string, total float",
        key="id",
        kind="changes",
        partitions=2,
    )
    log.create_topic("notes", "json", partitions=2)
    log.create_topic("blobs", "bytes")
    log.create_topic("lines", "text")
    log.create_topic("empty", "a bigint")
    log.append("notes", [{"n": 1, "text": "Grüße"}, ("key", [1, 2.5, None]), (None, "plain")])
    log.append("blobs", [(b"\0key", b"\xff\x00"), b"", None])
    log.append("lines", ["one line"], headers={"trace": "4bf92f", "raw": b"\x00\x01"})
    log.append(
        "orders",
        [{"id": i, "city": "Kiel", "total": i / 2} for i in range(6)],
        transactions=[2, 3, 1],
        headers=[{"n": str(i)} if i % 2 else None for i in range(6)],
    )
    several(log)
    changes(log)
    pieces(log)
    log.close()  # writes a mark

    machine.boot = b"boot 2".ljust(16)
    log = opened(folder, machine)
    for number in range(60):
        log.append("lines", [f"line {number} " + "." * 150], expect={f"counter/{number}": 0})
    log.append("lines", ["survives the boot"], durability="os")
    end = log.journal.live.tail().end & ((1 << 40) - 1)
    log.append("lines", ["is torn, and cut off"], durability="os")
    path = log.journal.files.path(log.journal.files.numbers()[-1])
    abandon(log)
    with open(path, "r+b") as file:
        file.seek(end + 100)
        file.write(b"torn")

    machine.boot = b"boot 3".ljust(16)
    log = opened(folder, machine)
    log.append("lines", ["before the failed sync"])
    log.append("lines", ["only in the page cache"], durability="os")
    error = OSError(errno.EIO, "Input/output error")
    machine.fails = lambda call, path: error if call == "fdatasync" else None
    try:
        log.append("lines", ["whose sync fails"], expect={"counter/0": 1})
    except errors.Unknown:
        machine.fails = lambda call, path: None
    abandon(log)

    log = opened(folder, machine)
    log.append("lines", ["after the failed sync"])
    writer = log.writer("golden/writer")
    writer.append("lines", ["by a writer"], state={"lsn": "0/16B3748"})
    log.tick()
    log.append("lines", ["after the last mark"])
    tail = log.journal.live.tail().end & ((1 << 40) - 1)
    path = log.journal.files.path(log.journal.files.numbers()[-1])
    abandon(log)
    with open(path, "r+b") as file:
        file.seek(tail)
        file.write(b"HRlog\0\0\1 and what a power cut left of it")
    for name in ("live", "locks"):
        shutil.rmtree(folder / name)


def opened(folder: Path, machine: Machine) -> EmbeddedLog:
    return machine_log(
        str(folder),
        machine,
        background=False,
        journal_bytes_first=16 << 10,
        journal_bytes_max=16 << 10,
        inline_bytes_max=4 << 10,
        chunk_bytes=4 << 10,
    )


def abandon(log: EmbeddedLog) -> None:
    """Let go of a log as a power cut does: without a mark."""
    log._finalizer.detach()
    log.journal.close()
    log._journal, log._closed = None, True


def full(number: int) -> dict[str, Any]:
    """A row with a value in every column."""
    return {
        "boolean": number % 2 == 0,
        "tinyint": -128 + number,
        "smallint": 32767 - number,
        "int": -(2**31) + number,
        "bigint": 2**63 - 1 - number,
        "float": 0.5,
        "double": 1e308,
        "string": "Grüße\0\U0001f30a",
        "binary": bytes(range(0, 256, 51)),
        "decimal": Decimal("-1234567890123456.0123"),
        "date": dt.date(1, 1, 1),
        "timestamp": dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC),
        "timestamp_ntz": dt.datetime(1969, 12, 31, 23, 59, 59, 1),
        "time": dt.time(23, 59, 59, 999999),
        "span": dt.timedelta(days=-3, microseconds=1),
        "array": [1, None, 3],
        "map": [("a", 1), ("b", None)],
        "struct": {"x": 7, "y": [{"z": "deep"}, None]},
        "odd, `name`": "",
    }


def several(log: EmbeddedLog) -> None:
    """One entry over several topics, with offsets, values and conditions."""
    log.append(
        "orders",
        [{"id": 1, "_weight": -1, "_op": "u"}, {"id": 1, "city": "Ulm"}],
        expect={"orders/1": 0},
    )
    with log.transaction() as transaction:
        transaction.append("orders", [{"id": 7, "city": "Hof", "total": 1.25}])
        transaction.append("notes", [("key", {"audit": True})])
        transaction.append("orders", [{"id": 8}])
        transaction.commit_offsets("billing", {"orders": {0: 3, 1: 4}, "notes": {1: 1}})
        transaction.put("manifest", {"files": ["ä", 1, None]})
        transaction.expect("orders/1", 1)
        transaction.require("never moved", 0)


def changes(log: EmbeddedLog) -> None:
    """Every change of a schema, with a row after each."""
    log.alter_topic("orders", add="note string, paid boolean")
    log.append("orders", [{"id": 9, "note": "added", "paid": True}])
    log.alter_topic("orders", widen={"id": "bigint", "total": "double"})
    log.append("orders", [{"id": 2**40, "total": 0.1}])
    log.alter_topic("orders", retire=["paid"], rename={"city": "place"})
    log.append("orders", [{"id": 10, "place": "Bonn"}])
    log.alter_topic("orders", retype={"total": "string"})
    log.append("orders", [{"id": 11, "total": "a text by now"}])


def pieces(log: EmbeddedLog) -> None:
    """Entries by reference: a large append, a staged piece in a transaction, one left over."""
    table = pa.table({"id": range(200), "note": [f"note {i}" for i in range(200)]})
    log.append("orders", table, headers={"large": "yes"})
    piece = log.stage("orders", table.slice(0, 5))
    log.stage("lines", ["never published"])
    with log.transaction() as transaction:
        transaction.append("lines", ["with a piece"])
        transaction.append("orders", piece)


def described(log: EmbeddedLog) -> dict[str, Any]:
    """All that the log says, in plain JSON."""
    found: list[dict[str, Any]] = []
    for topic in log.topics():
        for batch in log.read(topic.name):
            columns = zip(
                batch.positions.to_pylist(),
                batch.partition.to_pylist(),
                batch.offset.to_pylist(),
                batch.sent_time.to_pylist(),
                batch.received_time.to_pylist(),
                batch.headers.to_pylist(),
                batch.transaction.to_pylist(),
                batch.to_pylist(),
                strict=True,
            )
            for position, partition, offset, sent, received, headers, transaction, row in columns:
                found.append(
                    {
                        "topic": topic.name,
                        "position": position,
                        "partition": partition,
                        "offset": offset,
                        "sent_time": plain(sent),
                        "received_time": plain(received),
                        "headers": plain(headers),
                        "transaction": transaction,
                        "row": plain(row),
                    }
                )
    counters = ["orders/1", "never moved", *(f"counter/{number}" for number in range(60))]
    return {
        "position": log.position,
        "topics": [
            {
                "name": topic.name,
                "kind": topic.kind,
                "key": list(topic.key),
                "event_time": topic.event_time,
                "partitions": topic.partitions,
                "versions": len(topic.schemas),
                "ends": log.ends(topic.name),
            }
            for topic in log.topics()
        ],
        "counters": {name: log.counter(name) for name in counters},
        "offsets": {"billing": plain(log.offsets("billing"))},
        "values": {"manifest": log.value("manifest")},
        "rows": found,
    }


def plain(value: Any) -> Any:
    """A value as JSON that keeps what it is."""
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, Decimal | dt.timedelta | dt.date | dt.time):
        return str(value)
    return value


def lines(described: dict[str, Any]) -> str:
    """JSON with one row a line, which a diff can show."""
    rows = described["rows"]
    rest = {name: value for name, value in described.items() if name != "rows"}
    head = json.dumps(rest, indent=1, ensure_ascii=False)
    body = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return f'{head[:-2]},\n "rows": [\n{body}\n ]\n}}\n'


def example(folder: Path) -> str:
    """One entry with a condition, taken apart: header, section, run, control, start of the body."""
    for path in sorted((folder / "journal").glob("*.log")):
        data = path.read_bytes()
        at = data.find(b'{"expect":{"counter/')
        if at >= 0:
            break
    start = data.rindex(b"HRlog", 0, at)
    (control,) = struct.unpack_from("<I", data, start + 92)
    (body,) = struct.unpack_from("<Q", data, start + 80)
    number = int.from_bytes(data[start + 24 : start + 32], "little")
    shown = [
        (8, "magic: HRlog, format version 1"),
        (16, "log id"),
        (8, "address {:#x}: " + f"file {number >> 40}, byte {number & ((1 << 40) - 1)}"),
        (8, "position {}"),
        (8, "checksum of the record before"),
        (8, "synced end {:#x}: the entry before this one was synced"),
        (8, "last record that changed the control state: {:#x}"),
        (8, "received_time {} µs"),
        (1, "kind {}: an entry"),
        (1, "flags {}: has conditions"),
        (2, ""),
        (4, "length of meta: {}"),
        (8, "length of body: {}"),
        (4, "sections: {}"),
        (4, "length of control: {}"),
        (24, ""),
        (8, "checksum of the 120 bytes above and of meta"),
        (4, "section: topic {}"),
        (4, "schema version {}"),
        (2, "flags {}"),
        (1, "codec {}"),
        (1, ""),
        (4, "runs: {}"),
        (4, "rows: {}"),
        (4, "piece {}: the rows are in the body"),
        (4, "slot {}"),
        (4, "extension: {} bytes"),
        (8, "sent_time {} µs"),
        (8, "offset in the body: {}"),
        (8, "length: {}"),
        (8, "checksum of the rows"),
        (4, "run: partition {}"),
        (4, "rows: {}"),
        (8, "offset of the first: {}"),
        (control, "control"),
        (-(208 + control) % 64, "zeros up to a multiple of 64"),
        (8, f"body, {body} bytes: an Arrow IPC message ..."),
    ]
    lines = [f"# {path.relative_to(folder)}, from byte {start}"]
    at = start
    for length, meaning in shown:
        number = int.from_bytes(data[at : at + length], "little")
        for part in range(0, length, 16):
            chunk = data[at + part : at + min(length, part + 16)]
            text = meaning.format(number) if part == 0 else ""
            if meaning == "control":
                text = chunk.decode()
            lines.append(f"{at + part - start:03x}  {chunk.hex(' '):<47}  {text}".rstrip())
        at += length
    return "\n".join(lines)


def put_example() -> None:
    """Put the example into the page that explains the format."""
    block = re.compile(r"(?<=```hexdump\n).*?(?=\n```)", re.DOTALL)
    PAGE.write_text(block.sub(lambda _: example(FOLDER), PAGE.read_text(), count=1))


def main() -> None:
    make(FOLDER)
    put_example()
    copy = HERE / "copy"
    shutil.copytree(FOLDER, copy)
    try:
        with opened(copy, FixedMachine()) as log:
            EXPECTED.write_text(lines(described(log)))
    finally:
        shutil.rmtree(copy)
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 300 << 10, os.listdir(FOLDER)


if __name__ == "__main__":
    main()
