"""Arrow to PostgreSQL and back, by column: types, the texts that COPY takes, what SELECT gives.

| Arrow | PostgreSQL |
|---|---|
| bool, int8 and int16, int32, int64, float32, float64 | boolean, smallint, integer, bigint, real, double precision |
| decimal(p, s) | numeric(p, s) |
| date, time, timestamp, timestamp with UTC, duration | date, time, timestamp, timestamptz, interval |
| string, binary | text, bytea |
| string, captured from a column of a type in `TEXTS` | that type |
| list of one of these | an array of it |
| struct, map, list of lists | jsonb, as on every way out of Headrace (`model.json_values`) |

Out, a whole column becomes text by Arrow and goes into COPY as CSV; only moments that are unusual
(infinity, before the year 1, after 9999) are written one by one. Back, moments come as the numbers
that Arrow keeps, so that nothing is parsed: infinity is the largest number, as captures carry it.
"""  # noqa: E501 (the table)

from __future__ import annotations

import json
import re
from base64 import b64decode
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from pyarrow import csv

from headrace.model.json_values import far_moment, json_values
from headrace.model.schema import Column

TEXTS = {"uuid", "jsonb", "numeric", "interval", "inet", "cidr", "macaddr", "macaddr8", "time"}
"""Types whose values a capture carries as text, and which every server has, with equality."""
LOOSE = {"numeric", "interval", "jsonb"}
"""Those of them in which texts that differ may be equal: 1.0 and 1.00."""
CAPTURED = re.compile(r"postgresql ((\w+)[^\[]*)")
"""How the comment of a column says that it was captured from such a type."""
_NAMES = {
    pa.bool_(): "boolean",
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.date32(): "date",
    pa.time64("us"): "time",
    pa.timestamp("us"): "timestamp",
    pa.timestamp("us", tz="UTC"): "timestamptz",
    pa.duration("us"): "interval",
    pa.string(): "text",
    pa.binary(): "bytea",
}
_DAY_US = 86_400_000_000
_USUAL = (-719_162, 2_932_896)
"""The first day of the year 1 and the last of 9999, in days since 1970."""


def type_of(column: Column) -> str:
    """The type of a column in PostgreSQL."""
    found = CAPTURED.fullmatch(column.comment or "")
    if pt.is_string(column.type) and found and found[2] in TEXTS:
        return found[1]
    return _name(column.type)


def is_loose(column: Column) -> bool:
    """Whether PostgreSQL takes values for one that differ in the log."""
    found = CAPTURED.fullmatch(column.comment or "")
    return bool(pt.is_string(column.type) and found and found[2] in LOOSE)


def _name(kind: pa.DataType) -> str:
    if pt.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if pt.is_list(kind) and not pt.is_nested(kind.value_type):
        return f"{_name(kind.value_type)}[]"
    return _NAMES.get(kind, "jsonb")


# --- out ------------------------------------------------------------------------------------------


def as_csv(batch: pa.RecordBatch) -> bytes:
    """Rows as COPY ... (FORMAT csv) takes them; nulls are empty, texts are in quotes."""
    columns = [_texts(column) for column in batch.columns]
    made = pa.RecordBatch.from_arrays(columns, names=[str(i) for i in range(len(columns))])
    out = BytesIO()
    csv.write_csv(made, out, csv.WriteOptions(include_header=False))
    return out.getvalue()


def as_array(column: pa.Array) -> str:
    """A column as an array of texts."""
    texts = _texts(column).cast(pa.string()).to_pylist()
    quoted = (one and one.replace("\\", "\\\\").replace('"', '\\"') for one in texts)
    return "{" + ",".join("NULL" if one is None else f'"{one}"' for one in quoted) + "}"


def _texts(column: pa.Array) -> pa.Array:
    """A column of which Arrow writes the text that PostgreSQL reads."""
    kind = column.type
    if pt.is_date(kind) or pt.is_timestamp(kind):
        return _moments(column)
    if pt.is_time(kind):
        numbers = column.view(pa.int64())
        late = pc.equal(numbers, _DAY_US)
        clock = pc.if_else(late, 0, numbers).view(column.type).cast(pa.string())
        return pc.if_else(late, "24:00:00", clock)
    if pt.is_duration(kind):
        return pc.binary_join_element_wise(
            column.view(pa.int64()).cast(pa.string()), " microseconds", ""
        )
    if pt.is_binary(kind) or pt.is_fixed_size_binary(kind):
        return pa.array(
            [None if one is None else f"\\x{one.hex()}" for one in column.to_pylist()], pa.string()
        )
    if pt.is_list(kind) and not pt.is_nested(kind.value_type):
        return _arrays(column)
    if pt.is_nested(kind):
        texts = [
            None if one is None else json.dumps(one, ensure_ascii=False)
            for one in json_values(column)
        ]
        return pa.array(texts, pa.string())
    return column


def _moments(column: pa.Array) -> pa.Array:
    is_date = pt.is_date(column.type)
    numbers = column.view(pa.int32() if is_date else pa.int64())
    unit = 1 if is_date else _DAY_US
    low, high = _USUAL[0] * unit, (_USUAL[1] + 1) * unit - 1
    usual = pc.and_(pc.greater_equal(numbers, low), pc.less_equal(numbers, high))
    plain = column if is_date else numbers.view(pa.timestamp("us"))
    if pc.all(usual, min_count=0).as_py() is not False:
        return plain.cast(pa.string())
    texts = pc.if_else(usual, plain, pa.scalar(None, plain.type)).cast(pa.string()).to_pylist()
    for at in np.flatnonzero(~usual.fill_null(True).to_numpy(zero_copy_only=False)):
        texts[at] = _unusual(numbers[int(at)].as_py(), is_date=is_date)
    return pa.array(texts, pa.string())


def _unusual(number: int, *, is_date: bool) -> str:
    limits = np.iinfo(np.int32 if is_date else np.int64)
    if number == limits.max:
        return "infinity"
    if number == limits.min:
        return "-infinity"
    days, rest = (number, 0) if is_date else divmod(number, _DAY_US)
    era, day = divmod(days + 719_468, 146_097)  # the year begins in March: see sources
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    of_year = day - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153
    of_month = of_year - (153 * month + 2) // 5 + 1
    month = month + 3 if month < 10 else month - 9
    year += era * 400 + (month <= 2)
    text = f"{year if year > 0 else 1 - year:04}-{month:02}-{of_month:02}"
    if not is_date:
        seconds, part = divmod(rest, 1_000_000)
        text += f" {seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{part:06}"
    return text if year > 0 else f"{text} BC"


def _arrays(column: pa.Array) -> pa.Array:
    """`{1,2}`; texts are in quotes, with backslashes before quotes and backslashes."""
    flat = _texts(column.flatten())
    if not pt.is_string(flat.type):
        flat = pc.if_else(flat, "t", "f") if pt.is_boolean(flat.type) else flat.cast(pa.string())
    else:
        flat = pc.replace_substring(pc.replace_substring(flat, "\\", "\\\\"), '"', '\\"')
        flat = pc.binary_join_element_wise('"', flat, '"', "")
    lengths = pc.list_value_length(column).fill_null(0).to_numpy()
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), flat.fill_null("NULL"))
    texts = pc.binary_join_element_wise("{", pc.binary_join(lists, ","), "}", "")
    return pc.if_else(column.is_valid(), texts, pa.scalar(None, pa.string()))


# --- back -----------------------------------------------------------------------------------------


def selected(name: str, kind: pa.DataType) -> str:
    """The expression that gives a column (its quoted name) as `from_csv` reads it."""
    if pt.is_list(kind) and not pt.is_nested(kind.value_type):
        inner = selected("e", kind.value_type)
        agg = f"select coalesce(jsonb_agg({inner} order by o), '[]') "
        unnest = f"from unnest({name}) with ordinality as u(e, o)"
        return f"case when {name} is not null then ({agg}{unnest})::text end"
    if pt.is_nested(kind):
        return f"{name}::text"
    if pt.is_date(kind):
        return _finite(name, f"{name} - date '1970-01-01'", np.iinfo(np.int32), "integer")
    if pt.is_timestamp(kind):
        number = f"(extract(epoch from {name}) * 1000000)::bigint"
        return _finite(name, number, np.iinfo(np.int64), "bigint")
    if pt.is_time(kind) or pt.is_duration(kind):
        return f"(extract(epoch from {name}) * 1000000)::bigint"
    if pt.is_binary(kind):
        return f"encode({name}, 'hex')"
    if pt.is_decimal(kind) or pt.is_floating(kind):
        return f"{name}::text"
    return name  # of a text the output itself: a cast of inet would add its mask


def _finite(name: str, number: str, limits: Any, kind: str) -> str:
    first, last = f"({limits.min})::{kind}", f"({limits.max})::{kind}"
    infinite = f"when {name} > 'epoch' then {last} else {first} end"
    return f"case when {name} is null then null when isfinite({name}) then {number} {infinite}"


def from_csv(data: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """What COPY TO has given of `selected` expressions, as rows."""
    read = [_read_as(field.type) for field in schema]
    names = [str(i) for i in range(len(read))]
    table = csv.read_csv(
        BytesIO(data),
        csv.ReadOptions(column_names=names, use_threads=False, block_size=len(data) + 1),
        csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        csv.ConvertOptions(
            column_types=dict(zip(names, read, strict=True)),
            null_values=[""],
            true_values=["t"],
            false_values=["f"],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    ).combine_chunks()
    columns = [
        _back(table.column(i).combine_chunks(), field.type) for i, field in enumerate(schema)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _read_as(kind: pa.DataType) -> pa.DataType:
    if pt.is_date(kind):
        return pa.int32()
    if pt.is_timestamp(kind) or pt.is_time(kind) or pt.is_duration(kind):
        return pa.int64()
    return pa.string() if pt.is_nested(kind) or pt.is_binary(kind) else kind


def _back(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if pt.is_binary(kind):
        texts = column.to_pylist()
        return pa.array([None if one is None else bytes.fromhex(one) for one in texts], kind)
    if pt.is_list(kind) and not pt.is_nested(kind.value_type):
        lists = [None if one is None else json.loads(one) for one in column.to_pylist()]
        read = _read_as(kind.value_type)
        flat = [one for several in lists for one in several or ()]
        if pt.is_floating(read) or pt.is_decimal(read):
            made = pa.array([None if one is None else str(one) for one in flat], pa.string())
            made = made.cast(read)
        else:
            made = pa.array(flat, read)
        ends = np.cumsum([0, *(len(one or ()) for one in lists)])
        mask = pa.array([one is None for one in lists])
        values = _back(made, kind.value_type)
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values, kind, mask=mask)
    if pt.is_nested(kind):
        return pa.array([from_json(one, kind) for one in map(_loads, column.to_pylist())], kind)
    return column if column.type == kind else column.view(kind)


def _loads(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def from_json(value: Any, kind: pa.DataType) -> Any:
    """The inverse of `json_values`, for one value."""
    if value is None:
        return None
    if pt.is_map(kind):
        pairs = value.items() if isinstance(value, dict) else value
        return [(from_json(k, kind.key_type), from_json(v, kind.item_type)) for k, v in pairs]
    if pt.is_list(kind):
        return [from_json(one, kind.value_type) for one in value]
    if pt.is_struct(kind):
        return {one.name: from_json(value.get(one.name), one.type) for one in kind}
    if pt.is_floating(kind):
        return float(value)
    if pt.is_decimal(kind):
        return Decimal(value)
    if pt.is_binary(kind):
        return b64decode(value)
    if pt.is_temporal(kind) and (far := far_moment(value, kind)) is not None:
        return far
    if pt.is_date(kind):
        return date.fromisoformat(value)
    if pt.is_timestamp(kind):
        return datetime.fromisoformat(value)
    if pt.is_time(kind):
        return time.fromisoformat(value)
    return _duration(value) if pt.is_duration(kind) else value


_DURATION = re.compile(r"(-?)P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)(?:\.(\d+))?S)?)?")


def _duration(text: str) -> timedelta:
    found = _DURATION.fullmatch(text)
    if not found:
        raise ValueError(f"'{text}' is not an interval")
    days, hours, minutes, seconds = (int(one or 0) for one in found.groups()[1:5])
    part = int((found[6] or "").ljust(6, "0"))
    made = timedelta(days, seconds, part, minutes=minutes, hours=hours)
    return -made if found[1] else made
