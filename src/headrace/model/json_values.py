"""Arrow values as what stands for them in JSON, on every way out: command line, HTTP, feeds.

Chosen so that nothing is lost and `topic append` takes it back: integers and finite floats are
numbers (a float is the shortest that reads back the same), `NaN`, `Infinity` and `-Infinity` are
strings; decimals are strings, since most readers of JSON would make doubles of them; binary is
base64; times are ISO 8601 (a `timestamp` in UTC with its `Z`, a `timestamp_ntz` without, an
interval as `P1DT2H3.5S`); a struct is an object; a map is an object if its keys are text and
differ, else an array of pairs.

The first and the last moment of a type, as captures carry them, are `-infinity` and `infinity`.
These, years before 1 and after 9999 and `24:00:00` are all that `topic append` does not take back:
Python has no value for them.
"""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Callable
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_types = pa.types
_ZERO_FRACTION = r"\.?0+(Z?)$"


def json_values(column: pa.Array) -> list[Any]:
    """Give the values of a column as what stands for them in JSON."""
    kind = column.type
    for belongs, encode in _ENCODINGS:
        if belongs(kind):
            return encode(column)
    values: list[Any] = column.to_pylist()
    return values


def _floats(column: pa.Array) -> list[Any]:
    if column.type == pa.float32():  # the shortest text of a float, not that of its double
        texts = column.cast(pa.string()).to_pylist()
        values = [None if text is None else float(text) for text in texts]
    else:
        values = column.to_pylist()
    if pc.all(pc.is_finite(column), min_count=0).as_py():
        return values
    return [_special(value) if value is not None else None for value in values]


def _special(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _decimals(column: pa.Array) -> list[Any]:
    return [None if value is None else f"{value:f}" for value in column.to_pylist()]


def _bytes(column: pa.Array) -> list[Any]:
    return [None if v is None else b64encode(v).decode("ascii") for v in column.to_pylist()]


def _moments(column: pa.Array) -> list[Any]:
    """Dates, times and timestamps, by Arrow: ten times as fast as through Python's.

    Beyond the year 32767 Arrow is wrong, or says that it does not know.
    """
    numbers = column.view(pa.int32() if _types.is_date(column.type) else pa.int64())
    low, high = _near(column.type)
    near = pc.and_(pc.greater_equal(numbers, low), pc.less_equal(numbers, high))
    all_near = pc.all(near, min_count=0).as_py()
    shown = column if all_near else pc.if_else(near, column, pa.scalar(None, column.type))
    texts = shown.cast(pa.string())
    if not _types.is_date(column.type):
        texts = pc.replace_substring_regex(texts, _ZERO_FRACTION, r"\1")
        texts = pc.replace_substring(texts, " ", "T")
    values: list[Any] = texts.to_pylist()
    if not all_near:
        for index, number in enumerate(numbers.to_pylist()):
            if number is not None and not low <= number <= high:
                values[index] = _far(number, column.type)
    return values


DAY_US = 86_400_000_000
_YEAR_1, _YEAR_10000 = -719_162, 2_932_897
"""The first days of these years, in days since 1970."""
_MOMENT = re.compile(r"(-?\d{4,})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?Z?)?")


def _near(kind: pa.DataType) -> tuple[int, int]:
    """The first and the last value of a type that everybody can write."""
    if _types.is_time(kind):
        return 0, DAY_US - 1
    unit = 1 if _types.is_date(kind) else DAY_US
    return _YEAR_1 * unit, _YEAR_10000 * unit - 1


def _ends(kind: pa.DataType) -> tuple[int, int]:
    bits = 31 if _types.is_date(kind) else 63
    return -(1 << bits), (1 << bits) - 1


def _far(number: int, kind: pa.DataType) -> str:
    """A moment that is not near; the year is that of ISO 8601, in which 0 is 1 BC."""
    if _types.is_time(kind):
        seconds, part = divmod(number, 1_000_000)
        return _clock(seconds, part)
    if number in _ends(kind):
        return "infinity" if number > 0 else "-infinity"
    days, rest = (number, 0) if _types.is_date(kind) else divmod(number, DAY_US)
    years, days = divmod(days - _YEAR_1, 146_097)  # 400 years have always so many days
    near = date.fromordinal(days + 1)
    year = near.year + 400 * years
    text = f"{'-' if year < 0 else ''}{abs(year):04}-{near.month:02}-{near.day:02}"
    if _types.is_date(kind):
        return text
    return f"{text}T{_clock(*divmod(rest, 1_000_000))}{'Z' if kind.tz else ''}"


def _clock(seconds: int, part: int) -> str:
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return text + f".{part:06}".rstrip("0").rstrip(".")


def far_moment(text: str, kind: pa.DataType) -> int | None:
    """The number of a moment that Python has no value for; None: it has one, or is none."""
    if _types.is_time(kind):
        return DAY_US if text == "24:00:00" else None
    if text in ("infinity", "-infinity"):
        return _ends(kind)[text == "infinity"]
    found = _MOMENT.fullmatch(text)
    if found is None or 1 <= int(found[1]) <= 9999:
        return None
    years, year = divmod(int(found[1]) - 1, 400)
    days = date(year + 1, int(found[2]), int(found[3])).toordinal() - 1 + _YEAR_1 + 146_097 * years
    number = days
    if not _types.is_date(kind):
        hours, minutes, seconds = (int(one or 0) for one in found.groups()[3:6])
        clock = (hours * 60 + minutes) * 60 + seconds
        number = days * DAY_US + clock * 1_000_000 + int((found[7] or "").ljust(6, "0"))
    first, last = _ends(kind)
    if not first < number < last:
        raise ValueError("it does not fit")
    return number


def _durations(column: pa.Array) -> list[Any]:
    return [None if v is None else _duration(v) for v in column.cast(pa.int64()).to_pylist()]


def _duration(microseconds: int) -> str:
    sign = "-" if microseconds < 0 else ""
    seconds, fraction = divmod(abs(microseconds), 1_000_000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    exact = f"{seconds}.{fraction:06d}".rstrip("0") if fraction else str(seconds)
    parts = ((str(hours), "H"), (str(minutes), "M"), (exact, "S"))
    time = "".join(number + unit for number, unit in parts if number != "0")
    date = f"{days}D" if days else ""
    if not time and not date:
        return "PT0S"
    return f"{sign}P{date}T{time}" if time else f"{sign}P{date}"


def _lists(column: pa.Array) -> list[Any]:
    values = iter(json_values(column.flatten()))
    lengths = pc.list_value_length(column).to_pylist()
    return [None if n is None else [next(values) for _ in range(n)] for n in lengths]


def _maps(column: pa.Array) -> list[Any]:
    bounds = column.offsets.to_pylist()
    start, length = bounds[0], bounds[-1] - bounds[0]
    text = _types.is_string(column.type.key_type)
    keys = json_values(column.keys.slice(start, length))
    items = json_values(column.items.slice(start, length))
    result: list[Any] = []
    for row, present in enumerate(column.is_valid().to_pylist()):
        here = slice(bounds[row] - start, bounds[row + 1] - start)
        found = list(zip(keys[here], items[here], strict=True))
        as_object = dict(found) if text else {}
        if not present:
            result.append(None)
        else:
            result.append(as_object if text and len(as_object) == len(found) else found)
    return result


def _structs(column: pa.Array) -> list[Any]:
    names = [field.name for field in column.type]
    children = [json_values(child) for child in column.flatten()]
    present = column.is_valid().to_pylist()
    rows = zip(*children, strict=True)
    return [
        dict(zip(names, row, strict=True)) if there else None
        for row, there in zip(rows, present, strict=True)
    ]


_ENCODINGS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], list[Any]]], ...] = (
    (_types.is_floating, _floats),
    (_types.is_decimal, _decimals),
    (_types.is_binary, _bytes),
    (lambda kind: _types.is_temporal(kind) and not _types.is_duration(kind), _moments),
    (_types.is_duration, _durations),
    (_types.is_map, _maps),
    (_types.is_list, _lists),
    (_types.is_struct, _structs),
)
