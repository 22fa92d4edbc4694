"""A few inserted rows go a shorter way into an entry: it gives the same rows. R-B3, R-B5

Caught: another value, type, order of columns or mark of the transaction than on the long way, for
values of the usual and the unusual kind. Not caught: what both ways do wrong (see test_values).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import headrace as hr
from headrace.model.arrow_message import MessageForm
from headrace.sources.postgres.captured import META, Captured
from headrace.sources.postgres.catalog import ColumnInfo, TableInfo
from headrace.sources.postgres.group import Group, told_of
from headrace.sources.postgres.protocol import Column, Relation, Rows
from headrace.sources.postgres.state import LIVE, SNAPSHOTTING, TableState
from headrace.sources.postgres.transactions import Transaction
from headrace.sources.postgres.values import FEW, PgType, arrow_type

TYPES = {
    "id": (PgType(20, "int8", "b"), -1),
    "amount": (PgType(1700, "numeric", "b"), ((12 << 16) | 2) + 4),
    "note": (PgType(25, "text", "b"), -1),
    "raw": (PgType(17, "bytea", "b"), -1),
    "real": (PgType(700, "float4", "b"), -1),
    "ok": (PgType(16, "bool", "b"), -1),
    "on": (PgType(1082, "date", "b"), -1),
    "at": (PgType(1184, "timestamptz", "b"), -1),
}
USUAL = ["7", "30864.00", "n\u00f6te", r"\x00ff", "1.5", "t", "2026-11-18"]
USUAL += ["2026-11-18 05:40:49.12+00"]
OTHERS = ["-7", "-0.01", "", r"\x", "-Infinity", "f", "0001-01-01", "9999-12-31 23:59:59.999999+00"]
UNUSUAL: list[tuple[str, str | bytes]] = [
    ("id", str(1 << 63)),
    ("amount", "NaN"),
    ("amount", "12345678901.00"),
    ("amount", "1.5"),
    ("note", b"\xff"),
    ("raw", "00"),
    ("raw", r"\x0"),
    ("ok", "true"),
    ("on", "infinity"),
    ("on", "2026-W47-3"),
    ("on", "20261118"),
    ("on", "0044-03-15 BC"),
    ("at", "infinity"),
    ("at", "0044-03-15 12:00:00+00 BC"),
    ("at", "10000-01-01 00:00:00+00"),
    ("at", "2026-11-18 05:40:49"),
    ("at", "2026-11-18 05:40:49+01"),
    ("at", "2026-11-18 24:00:00+00"),
    ("at", "2026-11-18T05:40:49+00"),
    ("at", "2026-11-18 054049.0000+00"),
]
"""By column: they are read, or refused, on the long way."""


def message(values: Sequence[str | bytes | None]) -> bytes:
    """A row as the stream has it."""
    texts = [one.encode() if isinstance(one, str) else one for one in values]
    each = [b"n" if one is None else b"t" + len(one).to_bytes(4, "big") + one for one in texts]
    return b"I" + bytes([0, 0, 64, 16]) + b"N" + len(each).to_bytes(2, "big") + b"".join(each)


def captured(folder: Path, later: Sequence[str] = ()) -> tuple[Captured, Relation]:
    """A table that is live; columns of the topic that came `later` stand behind its own marks."""
    log = hr.connect(folder)
    fields = {name: arrow_type(*TYPES[name]) for name in TYPES}
    own = [pa.field(name, fields[name]) for name in TYPES if name not in later]
    marks = [pa.field("_weight", pa.int64(), nullable=False), pa.field("_op", pa.string())]
    marks += [pa.field("_lsn", pa.int64()), pa.field("_xid", pa.int64())]
    marks += [pa.field("_commit_time", pa.timestamp("us", tz="UTC"))]
    behind = [pa.field(name, fields[name]) for name in later]
    log.create_topic("t", pa.schema([*own, *marks, *behind]), key=["id"], kind="changes")
    columns = tuple(
        ColumnInfo(name, at, *TYPES[name], not_null=False, has_default=False, missing=None,
                   generated="") for at, name in enumerate(TYPES)
    )  # fmt: skip
    info = TableInfo("public", "t", 16400, False, False, columns, ("id",), "d", ("id",), 0, 0, True)
    state = TableState("t", ["id"], 1, {name: at for at, name in enumerate(TYPES)}, status=LIVE)
    known = {kind.oid: kind for kind, _ in TYPES.values()}
    relation = Relation(
        16400, "public", "t", "d",
        tuple(Column(name, kind.oid, of, name == "id") for name, (kind, of) in TYPES.items()),
    )  # fmt: skip
    return Captured(log, info, state, known, str(folder / "owed")), relation


def the_long_way(table: Captured, one: Transaction) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    group = Group([one])
    rows, weight, of, op = table.changes(group.tables["public", "t"])
    batch = table.with_meta(rows, weight, op, group.lsn[of], group.xid[of], group.time[of])
    return batch, group.told(np.array([len(rows)]))


@pytest.mark.parametrize("later", [(), ("note", "at")])
@pytest.mark.parametrize("count", [1, 2, FEW])
def test_the_short_way_gives_the_same_rows(
    tmp_path: Path, count: int, later: tuple[str, ...]
) -> None:
    table, relation = captured(tmp_path / "log", later)
    kinds: list[Sequence[str | None]] = [USUAL, OTHERS, ["1", *[None] * (len(TYPES) - 1)]]
    for first in range(len(kinds)):
        rows = [message(kinds[(first + at) % len(kinds)]) for at in range(count)]
        run = Rows(relation, "i", rows, 5)
        one = Transaction(4_000_000_000, 1, 1 << 62, -5, [run])
        made = table.inserted(run, one)
        expected, told = the_long_way(table, one)
        assert made is not None
        short = made.batch()
        short.validate(full=True)
        assert short.schema.equals(expected.schema, check_metadata=True)
        assert short.equals(expected)
        assert set(META) <= set(short.schema.names)
        of_one = told_of(one, count, MessageForm(told.schema))
        assert of_one is not None
        assert of_one.batch().equals(told)
    table.log.close()


def test_what_is_not_so_simple_goes_the_long_way(tmp_path: Path) -> None:
    table, relation = captured(tmp_path / "log")
    run = Rows(relation, "i", [message(USUAL)], 5)
    one = Transaction(1, 1, 2, 3, [run])
    left_out = message(USUAL).replace(b"t" + bytes([0, 0, 0, 5]) + "n\u00f6te".encode(), b"u")
    assert table.inserted(Rows(relation, "i", [left_out], 5), one) is None
    fewer = Relation(16400, "public", "t", "d", relation.columns[:3])
    assert table.inserted(Rows(fewer, "i", [message(USUAL[:3])], 5), one) is None
    for name, value in UNUSUAL:
        values: list[str | bytes | None] = [*USUAL]
        values[list(TYPES).index(name)] = value
        assert table.inserted(Rows(relation, "i", [message(values)], 5), one) is None, value
    table.state.status = SNAPSHOTTING
    assert table.inserted(run, one) is None
    table.log.close()
