"""A captured topic read as Debezium's change events: the same fields, the same encodings. Pure.

    for event in hr.debezium(log.read("shop.public.orders"), database="shop"):
        send(event.topic, *event.json())

Where tools expect what Debezium's connector for PostgreSQL writes with its JSON converter (without
schemas), this is it, made of the rows of the log. The old and the new row of an update stand side
by side there, and become one event; an update that changes the key becomes a delete, a tombstone
and a create; all rows that a truncate takes away become one event (left out unless asked for).

**Values** are those of JSON, so that `json.dumps` of a key or a value is its text:

| PostgreSQL | value |
|---|---|
| bool, integers, oid, floats | the same; NaN and infinities as texts |
| numeric(p, s), money | the unscaled integer as bytes (two's complement), in base64 |
| numeric | `{"scale": 2, "value": base64}` without zeros at the end; NaN and infinities null |
| both, with `decimals="string"` or `"double"` | the text, or a float |
| date | days since 1970 |
| time, timestamp | microseconds; with a precision of 3 or less milliseconds |
| timestamptz | ISO 8601 in UTC with as many digits as the type has; `infinity` |
| timetz | ISO 8601 in UTC |
| interval | microseconds, a month being 30.4375 days; infinities 0 |
| bytea | base64 |
| bit(1) | bool |
| bit(n), varbit | bytes, the lowest first, zeros at the end cut off, in base64 |
| point | `{"x", "y", "wkb", "srid"}` |
| arrays | lists of these |
| all others (text, json, uuid, enums, inet, ranges, ...) | the text that the server prints |

The log keeps many types as text, so for numeric, money, interval, timetz, bits, points, and times
with a precision, the type must be known: it is the comment of the topic's column, or is given
(`types`). A type that is not known is read as what the log has.

**What differs by design** is listed in docs/capture.md, and held by tests/capture/test_debezium.py.

**Batches.** A large entry is read as several batches, which may be cut between the two rows of an
update. So give the batches of one reading together; what is cut in two is put together again.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from headrace import errors
from headrace.model.records import Batch
from headrace.sources.postgres.state import told_name

if TYPE_CHECKING:
    from headrace.model.topic import Topic

Decimals = Literal["precise", "string", "double"]
Values = list[Any]
META = ("_weight", "_op", "_lsn", "_xid", "_commit_time")
FOREVER = 9_223_372_036_825_200_000
"""Infinity, as Java's driver for PostgreSQL has it; in milliseconds a thousandth of it."""
LONG_AGO = -9_223_372_036_832_400_000
MONTH_US = 2_629_800_000_000
NEW_KEY, OLD_KEY = "__debezium.newkey", "__debezium.oldkey"


class ChangeEvent(NamedTuple):
    """One message of a topic; all in values of JSON."""

    topic: str
    key: dict[str, Any] | None
    """None: of a truncate, and of tables without a key."""
    value: dict[str, Any] | None
    """None: a tombstone, which says that nothing more is to be known of the key."""
    headers: dict[str, Any]

    def json(self) -> tuple[str | None, str | None]:
        """Key and value as text."""
        return _text(self.key), _text(self.value)


def debezium(
    batches: Batch | Iterable[Batch],
    *,
    database: str = "",
    types: Mapping[str, str] | None = None,
    decimals: Decimals = "precise",
    tombstones: bool = True,
    truncates: bool = False,
    transactions: bool = False,
) -> Iterator[ChangeEvent]:
    """The events that rows of captured tables are.

    `types`: column -> type as `format_type` prints it, where the topic does not say. `decimals`,
    `tombstones`, `truncates`, `transactions`: what Debezium calls `decimal.handling.mode`,
    `tombstones.on.delete`, `skipped.operations` and `provide.transaction.metadata`.
    """
    reading = _Reading(database, types or {}, decimals, tombstones, truncates, transactions)
    for batch in [batches] if isinstance(batches, Batch) else batches:
        yield from reading.events(batch)
    for topic in reading.old:
        raise errors.BadRows(
            f"what was given of topic '{topic}' ends inside of an update",
            place=topic,
            why="a large entry is read as several batches, and may be cut there",
            fix="give all batches of a reading together: hr.debezium(log.read(topic))",
        )


class _Row(NamedTuple):
    """A row of a batch, encoded."""

    weight: int
    op: str
    lsn: int
    xid: int | None
    committed: int | None
    received: int
    key: dict[str, Any] | None
    row: dict[str, Any]


class _Reading:
    """What is remembered between batches, of each topic: half an update, and a place."""

    def __init__(
        self,
        database: str,
        types: Mapping[str, str],
        decimals: Decimals,
        tombstones: bool,
        truncates: bool,
        transactions: bool,
    ) -> None:
        self.database, self.types, self.decimals = database, types, decimals
        self.tombstones, self.truncates, self.transactions = tombstones, truncates, transactions
        self.old: dict[str, _Row] = {}
        """An old row whose new one is still to come."""
        self.emptied: dict[str, int] = {}
        """The LSN of a truncate whose rows are coming."""
        self.order: dict[str, tuple[int, int]] = {}
        """The LSN of a transaction, and how many events it had so far."""

    def events(self, batch: Batch) -> Iterator[ChangeEvent]:
        topic = batch.topic
        for row in self._rows(batch):
            old = self.old.pop(topic, None)
            if row.op != "t":
                self.emptied.pop(topic, None)
            if old is not None and not (row.weight > 0 and row.op == old.op == "u"):
                if not (row.weight > 0 and row.op == old.op and row.key == old.key is not None):
                    yield from self._gone(topic, old)  # a snapshot did not find it
                old = None
            if row.op == "t":
                if self.truncates and self.emptied.get(topic) != row.lsn:
                    yield self._event(topic, row, "t", None, None, None)
                self.emptied[topic] = row.lsn
            elif row.weight > 0:
                yield from self._come(topic, old, row)
            elif row.op == "d":
                yield from self._gone(topic, row)
            else:
                self.old[topic] = row
        if batch.last and topic in self.old and self.old[topic].op == "r":
            yield from self._gone(topic, self.old.pop(topic))

    def _come(self, topic: str, old: _Row | None, row: _Row) -> Iterator[ChangeEvent]:
        if row.op == "u" and old is not None and old.key != row.key:
            yield from self._gone(topic, old, {NEW_KEY: row.key})
            yield self._event(topic, row, "c", row.key, None, row.row, {OLD_KEY: old.key})
            return
        before = None if old is None else old.row
        yield self._event(topic, row, row.op, row.key, before, row.row)

    def _gone(
        self, topic: str, row: _Row, headers: dict[str, Any] | None = None
    ) -> Iterator[ChangeEvent]:
        yield self._event(topic, row, "d", row.key, row.row, None, headers)
        if self.tombstones:
            yield ChangeEvent(topic, row.key, None, headers or {})

    def _event(
        self,
        topic: str,
        row: _Row,
        op: str,
        key: dict[str, Any] | None,
        before: dict[str, Any] | None,
        after: dict[str, Any] | None,
        headers: dict[str, Any] | None = None,
    ) -> ChangeEvent:
        name, *where = topic.split(".", 2)
        schema, table = map(told_name, where)
        at = _times(row.received if row.committed is None else row.committed)
        source = {
            "version": _version(),
            "connector": "postgresql",
            "name": name,
            "ts_ms": at["ts_ms"],
            "snapshot": "incremental" if row.op == "r" else "false",
            "db": self.database,
            "sequence": f'[null,"{row.lsn}"]',
            "ts_us": at["ts_us"],
            "ts_ns": at["ts_ns"],
            "schema": schema,
            "table": table,
            "txId": row.xid,
            "lsn": row.lsn,
            "xmin": None,
            "origin": None,
            "origin_lsn": None,
        }
        value = {
            "before": before,
            "after": after,
            "source": source,
            "transaction": self._transaction(topic, row),
            "op": op,
            **_times(row.received),
        }
        return ChangeEvent(topic, key, value, headers or {})

    def _transaction(self, topic: str, row: _Row) -> dict[str, Any] | None:
        if not self.transactions or row.xid is None:
            return None
        lsn, count = self.order.get(topic, (0, 0))
        count = count + 1 if lsn == row.lsn else 1
        self.order[topic] = row.lsn, count
        return {
            "id": f"{row.xid}:{row.lsn}",
            "total_order": None,
            "data_collection_order": count,
        }

    def _rows(self, batch: Batch) -> Iterator[_Row]:
        data = batch.data
        if not set(META) <= set(data.schema.names):
            raise errors.BadRows(
                f"topic '{batch.topic}' is not a captured table", place=batch.topic,
                why=f"its rows do not have {', '.join(META)}",
                fix="give batches of a topic that a capture writes, with all their columns",
            )  # fmt: skip
        own = [name for name in data.schema.names if name not in META]
        known = _types(batch.definition) | dict(self.types)
        values = [_encoded(data.column(n), known.get(n, ""), self.decimals) for n in own]
        rows = zip(*values, strict=True) if values else iter([()] * data.num_rows)
        key = [name for name in batch.definition.key if name in own]
        meta = [data.column(name) for name in META]
        meta[-1] = meta[-1].cast(pa.int64())
        received = batch.received_time.cast(pa.int64())
        for weight, op, lsn, xid, committed, at, one in zip(
            *(column.to_pylist() for column in [*meta, received]), rows, strict=True
        ):
            row = dict(zip(own, one, strict=True))
            own_key = {name: row[name] for name in key} or None
            yield _Row(weight, op, lsn, xid, committed, at, own_key, row)


@cache
def _version() -> str:
    return importlib.metadata.version("headrace")


def _types(topic: Topic) -> dict[str, str]:
    return {
        column.name: column.comment.removeprefix("postgresql ")
        for column in topic.schema.columns
        if column.comment
    }


def _times(microseconds: int) -> dict[str, int]:
    return {
        "ts_ms": microseconds // 1000,
        "ts_us": microseconds,
        "ts_ns": microseconds * 1000,
    }


def _text(value: dict[str, Any] | None) -> str | None:
    if value is None:
        return None
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


# --- values -------------------------------------------------------------------------------


def _encoded(column: pa.Array, kind: str, decimals: Decimals) -> Values:
    """A column's values; `kind` is PostgreSQL's type, if it is known."""
    arrow = column.type
    if pa.types.is_list(arrow):
        inner = _encoded(column.flatten(), kind.removesuffix("[]"), decimals)
        ends = np.cumsum(column.value_lengths().fill_null(0)).tolist()
        starts = [0, *ends[:-1]]
        there = column.is_valid().to_pylist()
        return [
            inner[start:end] if valid else None
            for start, end, valid in zip(starts, ends, there, strict=True)
        ]
    found = re.search(r"\((-?\d+)(?:,(-?\d+))?\)", kind)
    size = int(found[1]) if found else None
    base = kind.replace(found[0], "") if found else kind
    if pa.types.is_floating(arrow):
        return [_number(value) for value in _shortest(column)]
    if pa.types.is_decimal(arrow):
        return _each(column, lambda value: _decimal(format(value, "f"), arrow.scale, decimals))
    if pa.types.is_date(arrow):
        return _list(column.cast(pa.int32()))
    if pa.types.is_time(arrow):
        return _list(column.view(pa.int64()), 1 if size is None or size > 3 else 1000)
    if pa.types.is_timestamp(arrow):
        if arrow.tz is not None:
            return _moments(column, 6 if size is None else size)
        return _timestamps(column, 1 if size is None or size > 3 else 1000)
    if pa.types.is_binary(arrow):
        return _each(column, _base64)
    if base == "numeric":
        scale = None if found is None else int(found[2] or 0)
        return _each(column, lambda text: _decimal(text, scale, decimals))
    if base == "money":
        return _each(column, lambda text: _decimal(_amount(text), 2, decimals))
    if base.startswith("bit"):
        one = base == "bit" and size in (None, 1)
        return _each(column, (lambda text: text == "1") if one else _bits)
    reader = _READERS.get("interval" if base.startswith("interval") else base)
    return _each(column, reader) if reader else _list(column)


def _list(column: pa.Array, divisor: int = 1) -> Values:
    values: Values = column.to_pylist()
    if divisor == 1:
        return values
    return [None if value is None else value // divisor for value in values]


def _each(column: pa.Array, encode: Callable[[Any], Any]) -> Values:
    return [None if value is None else encode(value) for value in column.to_pylist()]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _shortest(column: pa.Array) -> Values:
    """Floats; those of 32 bits as the shortest number of 64 bits that prints the same."""
    if column.type != pa.float32():
        return _list(column)
    texts = column.cast(pa.string())
    return [None if text is None else float(text) for text in texts.to_pylist()]


def _number(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


_SPECIAL = {"NaN": "NAN", "Infinity": "POSITIVE_INFINITY", "-Infinity": "NEGATIVE_INFINITY"}


def _decimal(text: str, scale: int | None, mode: Decimals) -> Any:
    """A number that the server printed, of a type with this scale, or with none."""
    if text in _SPECIAL:
        return {"precise": None, "string": _SPECIAL[text], "double": text}[mode]
    if mode == "double":
        return _number(float(text))
    if mode == "string":
        return text
    whole, _, fraction = text.partition(".")
    if scale is None:
        fraction = fraction.rstrip("0")
    if scale is not None and scale < 0:
        whole = whole[:scale] if len(whole.lstrip("-")) > -scale else "0"
    number = int(Decimal(whole + fraction))  # of int, a text has 4300 digits at most
    value = _base64(number.to_bytes((number + (number < 0)).bit_length() // 8 + 1, signed=True))
    return value if scale is not None else {"scale": len(fraction), "value": value}


def _amount(text: str) -> str:
    """Money as a number: `-$1,234.50`, or as another place on earth prints it."""
    digits = re.sub(r"\D", "", text).rjust(3, "0")
    return f"{'-' * bool(re.search(r'[-(]', text))}{digits[:-2]}.{digits[-2:]}"


def _bits(text: str) -> str:
    number = int(text or "0", 2)
    return _base64(number.to_bytes((number.bit_length() + 7) // 8, "little"))


def _timestamps(column: pa.Array, divisor: int) -> Values:
    limits = np.iinfo(np.int64)
    named = {limits.max: FOREVER, limits.min: LONG_AGO}
    numbers = column.view(pa.int64()).to_pylist()
    return [None if n is None else named.get(n, n) // divisor for n in numbers]


def _moments(column: pa.Array, digits: int) -> Values:
    numbers = column.view(pa.int64())
    texts = np.datetime_as_string(
        np.array(numbers.fill_null(0)).view("datetime64[us]"), unit="us"
    ).tolist()
    limits = np.iinfo(np.int64)
    named = {None: None, limits.max: "infinity", limits.min: "-infinity"}
    cut = digits - 6 if digits else -7
    return [
        named[number] if number in named else _iso(text[:cut] if cut else text)
        for number, text in zip(numbers.to_pylist(), texts, strict=True)
    ]


def _iso(text: str) -> str:
    """A year has four digits, or more and a sign."""
    year, month, rest = text.rsplit("-", 2)
    if year.startswith("-"):
        year = f"-{year[1:].zfill(4)}"
    elif len(year) > 4:
        year = f"+{year}"
    return f"{year}-{month}-{rest}Z"


_TIMETZ = re.compile(r"(\d\d):(\d\d):(\d\d)(\.\d+)?([-+])(\d\d)(?::(\d\d))?(?::(\d\d))?")


def _timetz(text: str) -> str:
    found = _TIMETZ.fullmatch(text)
    assert found is not None, text
    h, m, s, fraction, sign, *zone = found.groups()
    east = sum(int(part or 0) * of for part, of in zip(zone, (3600, 60, 1), strict=True))
    second = int(h) * 3600 + int(m) * 60 + int(s) - (east if sign == "+" else -east)
    minute, second = divmod(second % 86_400, 60)
    return f"{minute // 60:02}:{minute % 60:02}:{second:02}{fraction or ''}Z"


_INTERVAL = re.compile(
    r"P(?:(-?\d+)Y)?(?:(-?\d+)M)?(?:(-?\d+)D)?(?:T(?:(-?\d+)H)?(?:(-?\d+)M)?(?:(-?[\d.]+)S)?)?"
)


def _interval(text: str) -> int:
    found = _INTERVAL.fullmatch(text)
    if found is None:
        return 0  # infinity, which Debezium has no room for
    years, months, days, hours, minutes = (int(part or 0) for part in found.groups()[:5])
    whole, _, fraction = (found[6] or "0").partition(".")
    us = int(fraction.ljust(6, "0")) if fraction else 0
    seconds = ((days * 24 + hours) * 60 + minutes) * 60 + int(whole)
    sign = -1 if whole.startswith("-") else 1
    return (12 * years + months) * MONTH_US + seconds * 1_000_000 + sign * us


def _point(text: str) -> dict[str, Any]:
    x, y = (float(part) for part in text.strip("()").split(","))
    wkb = _base64(struct.pack("<BIdd", 1, 1, x, y))
    return {"x": _number(x), "y": _number(y), "wkb": wkb, "srid": None}


_READERS: dict[str, Callable[[str], Any]] = {
    "interval": _interval,
    "point": _point,
    "time with time zone": _timetz,
}
