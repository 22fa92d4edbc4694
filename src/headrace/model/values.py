"""Python values to one Arrow column, where nothing is lost and nothing is guessed.

Arrow alone is too kind: it cuts 1.5 to 1, a datetime to its date, and takes bytes for text. So the
types of the values are checked first, for a whole column at once where they are the usual ones,
else value by value. What each type takes:

- boolean: ``bool``. Integers: ``int`` in range, never ``bool``. float, double: ``float``, and
  ``int`` if exact; a ``float`` column rounds Python's doubles, and refuses what overflows.
- decimal: ``Decimal`` or ``int`` that fits exactly. string: ``str``. binary: ``bytes`` and alike.
- date: ``date``, not ``datetime``. timestamp: ``datetime``; an aware one is converted, **a naive
  one is taken as UTC**. timestamp_ntz: naive ``datetime``. time: naive ``time``. duration:
  ``timedelta``.
- array: ``list`` or ``tuple``. struct: mapping, with no unknown keys. map: mapping, or a list of
  pairs.

Scalars of numpy and subclasses (``IntEnum``, ``pandas.Timestamp``) count as what they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.errors import HeadraceError, MissingKey, WrongColumn, WrongType, nearest
from headrace.model.ddl import DURATION, TIME, TIMESTAMP, TIMESTAMP_NTZ, ddl_type


class Far(int):
    """A moment that Python has no value for (infinity, 44 BC), as the number that Arrow has."""


ARROW_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""What pyarrow raises when values do not convert."""


class Refusal(Exception):
    """A value that cannot be taken: its index in the column, and its path inside the value.

    It never reaches a user: `rows` adds column, row and place and makes a catalogue error of it.
    """

    def __init__(
        self,
        fact: str,
        *,
        index: int | None = None,
        path: str = "",
        why: str = "",
        fix: str = "",
        kind: type[HeadraceError] = WrongType,
    ) -> None:
        super().__init__(fact)
        self.fact, self.index, self.path = fact, index, path
        self.why, self.fix, self.kind = why, fix, kind

    def inside(self, name: str, index: int | None) -> Refusal:
        """Say the same of the value around it: inside ``name``, at this index of its column."""
        self.path = f"{name}.{self.path}" if self.path else name
        self.index = index
        return self


def shown(value: object) -> str:
    """Show a value in an error message, cut to a readable length."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write integers of thousands of digits
        text = f"a {type(value).__name__} too long to be shown"
    return text if len(text) <= 60 else f"{text[:57]}..."


def first_bad(count: int, fails: Callable[[int, int], bool]) -> int | None:
    """Find the first of ``count`` values that fails, by halving; ``fails(start, end)`` tests some.

    Gives None if the values fail only together (or not at all).
    """
    start, end = 0, count
    while end - start > 1:
        middle = (start + end) // 2
        if fails(start, middle):
            end = middle
        else:
            start = middle
    return start if end > start and fails(start, end) else None


_NONE = type(None)
_USUAL: dict[int, frozenset[type]] = {
    pa.bool_().id: frozenset({bool, _NONE}),
    pa.int8().id: frozenset({int, _NONE}),
    pa.int16().id: frozenset({int, _NONE}),
    pa.int32().id: frozenset({int, _NONE}),
    pa.int64().id: frozenset({int, _NONE}),
    pa.float32().id: frozenset({float, int, _NONE}),
    pa.float64().id: frozenset({float, int, _NONE}),
    pa.decimal128(1, 0).id: frozenset({Decimal, int, _NONE}),
    pa.string().id: frozenset({str, _NONE}),
    pa.binary().id: frozenset({bytes, _NONE}),
    pa.date32().id: frozenset({date, _NONE}),
    TIMESTAMP.id: frozenset({datetime, _NONE}),
    TIME.id: frozenset({time, _NONE}),
    DURATION.id: frozenset({timedelta, _NONE}),
}
_NEVER: frozenset[type] = frozenset()


def from_values(values: Sequence[Any], arrow: pa.DataType) -> pa.Array:
    """Make an array of this type (one of ours); raises `Refusal` for the first value that fails."""
    number = arrow.id
    usual = _USUAL.get(number, _NEVER)
    if not usual.issuperset(map(type, values)) or (
        (number == TIME.id or arrow.equals(TIMESTAMP_NTZ)) and _any_aware(values)
    ):
        values = _coerced(values, arrow)
    try:
        array = pa.array(values, arrow)
    except ARROW_ERRORS as error:
        raise _refusal_of(values, arrow, error) from error
    if number == _FLOAT32:
        _refuse_overflow(values, array)
    return array


_FLOAT32 = pa.float32().id
_FLOAT_MAX = float(np.finfo(np.float32).max)


def _any_aware(values: Sequence[Any]) -> bool:
    return any(value is not None and value.tzinfo is not None for value in values)


def _refusal_of(values: Sequence[Any], arrow: pa.DataType, error: Exception) -> Refusal:
    def fails(start: int, end: int) -> bool:
        try:
            pa.array(values[start:end], arrow)
        except ARROW_ERRORS:
            return True
        return False

    index = first_bad(len(values), fails)
    if index is None:
        return Refusal(f"the values do not fit {ddl_type(arrow)}", why=str(error))
    fact = f"{shown(values[index])} does not fit {ddl_type(arrow)}"
    return Refusal(fact, index=index, why=str(error))


def _refuse_overflow(values: Sequence[Any], array: pa.Array) -> None:
    """Find doubles that became infinite as floats."""
    floats = array.to_numpy(zero_copy_only=False)
    for index in np.flatnonzero(np.isinf(floats)).tolist():
        if not math.isinf(values[index]):
            fact = f"{shown(values[index])} does not fit float"
            raise Refusal(fact, index=index, fix="use double for this column")


def _coerced(values: Sequence[Any], arrow: pa.DataType) -> list[Any]:
    coerce = _coercion(arrow)
    result = []
    for index, value in enumerate(values):
        try:
            result.append(None if value is None else coerce(value))
        except Refusal as refusal:
            refusal.index = index
            raise
    return result


def _coercion(arrow: pa.DataType) -> Callable[[Any], Any]:
    """Give the function that turns one value (not None) into what pyarrow takes as this type."""
    types = pa.types
    if types.is_list(arrow):
        return _list_coercion(arrow)
    if types.is_map(arrow):
        return _map_coercion(arrow)
    if types.is_struct(arrow):
        return _struct_coercion(arrow)
    wanted, convert = _SCALARS[arrow.id]
    if arrow.equals(TIMESTAMP_NTZ):
        convert = _local_datetime
    spelled, temporal = ddl_type(arrow), types.is_temporal(arrow)

    def coerce(value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Far) and temporal:
            return int(value)
        if not isinstance(value, wanted) or (temporal and value != value):  # noqa: PLR0124 (NaT)
            raise _wrong(value, spelled)
        return convert(value, spelled)

    return coerce


def _wrong(value: object, spelled: str) -> Refusal:
    fact = f"{shown(value)} ({type(value).__name__}) is not a {spelled}"
    return Refusal(fact, fix=_fix(value, spelled))


def _fix(value: object, spelled: str) -> str:
    """Say how to convert, for the mistakes that are usual."""
    if spelled in ("timestamp", "timestamp_ntz", "date", "time"):
        name = {"date": "date", "time": "time"}.get(spelled, "datetime")
        if isinstance(value, str):
            return f"convert it first: datetime.{name}.fromisoformat(text)"
        if isinstance(value, datetime) and spelled == "date":
            return "a datetime has a time too: use value.date()"
        return f"give a datetime.{name}"
    if spelled == "interval day to second":
        return "give a datetime.timedelta"
    if spelled == "string" and isinstance(value, bytes):
        return "decode it first: value.decode()"
    if spelled == "string":
        return "convert it first: str(value)"
    if spelled == "binary" and isinstance(value, str):
        return "encode it first: value.encode()"
    if spelled.startswith("decimal") and isinstance(value, float):
        return "a float is not exact: give a Decimal, e.g. Decimal(str(value))"
    if isinstance(value, bool):
        return "a bool is not a number: use int(value), or a boolean column"
    if isinstance(value, str):
        return "text is not converted to other types: convert it first"
    if isinstance(value, list | tuple):
        return "one value a row: to append many rows, give a list of dicts"
    return f"give a value of type {spelled}, or change the column"


def _refuse_bool(value: Any, spelled: str) -> None:
    if isinstance(value, bool):
        raise _wrong(value, spelled)


def _integer(value: Any, spelled: str) -> int:
    _refuse_bool(value, spelled)
    return int(value)


def _number(value: Any, spelled: str) -> float | int:
    _refuse_bool(value, spelled)
    if not isinstance(value, float):
        return int(value)
    if spelled == "float" and _FLOAT_MAX < abs(value) < math.inf:
        raise Refusal(f"{shown(value)} does not fit float", fix="use double for this column")
    return float(value)


def _decimal(value: Any, spelled: str) -> Decimal | int:
    _refuse_bool(value, spelled)
    return Decimal(value) if isinstance(value, Decimal) else int(value)


def _date(value: Any, spelled: str) -> date:
    if isinstance(value, datetime):
        raise _wrong(value, spelled)
    return date(value.year, value.month, value.day)


def _datetime(value: Any, spelled: str) -> datetime:
    if getattr(value, "nanosecond", 0):
        raise _nanoseconds(value, spelled)
    plain: datetime = value.to_pydatetime() if hasattr(value, "to_pydatetime") else value
    return plain


def _local_datetime(value: Any, spelled: str) -> datetime:
    if value.tzinfo is not None:
        fact = f"{shown(value)} has a time zone, {spelled} has none"
        raise Refusal(fact, fix="drop it with value.replace(tzinfo=None), or use timestamp")
    return _datetime(value, spelled)


def _time(value: Any, spelled: str) -> time:
    if value.tzinfo is not None:
        fact = f"{shown(value)} has a time zone, {spelled} has none"
        raise Refusal(fact, fix="drop it with value.replace(tzinfo=None)")
    plain: time = value
    return plain


def _timedelta(value: Any, spelled: str) -> timedelta:
    if getattr(value, "nanoseconds", 0):
        raise _nanoseconds(value, spelled)
    plain: timedelta = value.to_pytimedelta() if hasattr(value, "to_pytimedelta") else value
    return plain


def _nanoseconds(value: object, spelled: str) -> Refusal:
    fact = f"{shown(value)} has nanoseconds, {spelled} has microseconds"
    return Refusal(fact, fix="round it to microseconds first")


_SCALARS: dict[int, tuple[Any, Callable[[Any, str], Any]]] = {
    pa.bool_().id: (bool, lambda value, _: value),
    pa.int8().id: (int, _integer),
    pa.int16().id: (int, _integer),
    pa.int32().id: (int, _integer),
    pa.int64().id: (int, _integer),
    pa.float32().id: (float | int, _number),
    pa.float64().id: (float | int, _number),
    pa.decimal128(1, 0).id: (Decimal | int, _decimal),
    pa.string().id: (str, lambda value, _: str.__str__(value)),
    pa.binary().id: (bytes | bytearray | memoryview, lambda value, _: bytes(value)),
    pa.date32().id: (date, _date),
    TIMESTAMP.id: (datetime, _datetime),
    TIME.id: (time, _time),
    DURATION.id: (timedelta, _timedelta),
}


def _list_coercion(arrow: pa.DataType) -> Callable[[Any], Any]:
    coerce, spelled = _inner(arrow.value_type), ddl_type(arrow)

    def coerce_list(value: Any) -> list[Any]:
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(value, list | tuple):
            raise _wrong(value, spelled)
        return [coerce(item, f"[{i}]") for i, item in enumerate(value)]

    return coerce_list


def _map_coercion(arrow: pa.DataType) -> Callable[[Any], Any]:
    coerce_key, coerce_item = _inner(arrow.key_type), _inner(arrow.item_type)
    spelled = ddl_type(arrow)

    def coerce_map(value: Any) -> list[tuple[Any, Any]]:
        pairs = value.items() if isinstance(value, Mapping) else value
        if isinstance(pairs, str | bytes) or not hasattr(pairs, "__iter__"):
            raise _wrong(value, spelled)
        result = []
        for pair in pairs:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise _wrong(value, spelled)
            if pair[0] is None:
                raise Refusal("a key of a map is null", kind=MissingKey)
            item = coerce_item(pair[1], f"[{shown(pair[0])}]")
            result.append((coerce_key(pair[0], "key"), item))
        return result

    return coerce_map


def _struct_coercion(arrow: pa.DataType) -> Callable[[Any], Any]:
    fields = {field.name: _inner(field.type) for field in arrow}
    spelled = ddl_type(arrow)

    def coerce_struct(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _wrong(value, spelled)
        for name in value:
            if name not in fields:
                raise unknown_field(str(name), list(fields))
        return {name: coerce(value.get(name), name) for name, coerce in fields.items()}

    return coerce_struct


def unknown_field(name: str, known: list[str]) -> Refusal:
    """Make the refusal of a struct's field that its type does not have."""
    fix = nearest(name, known) or f"its fields are {', '.join(known)}"
    return Refusal(f"there is no field '{name}'", fix=fix, kind=WrongColumn)


def _inner(arrow: pa.DataType) -> Callable[[Any, str], Any]:
    """Coerce values inside another, of which the name is said in a refusal.

    Conversion by pyarrow is tried for each value, so that a refusal names the very one.
    """
    coerce = _coercion(arrow)
    nested = pa.types.is_nested(arrow)

    def coerce_inner(value: Any, name: str) -> Any:
        if value is None:
            return None
        try:
            result = coerce(value)
            if not nested:
                pa.scalar(result, arrow)
        except Refusal as refusal:
            raise refusal.inside(name, None) from None
        except ARROW_ERRORS as error:
            fact = f"{shown(value)} does not fit {ddl_type(arrow)}"
            raise Refusal(fact, path=name, why=str(error)) from error
        return result

    return coerce_inner
