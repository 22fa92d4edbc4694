"""Arrow columns of any type to the types of a topic, where no value is lost.

Which types may become which is stated here, not left to Arrow, whose casts parse text, cut floats
and take a bool for a number. Between the types allowed, each value must survive exactly: an
``int64`` may become a ``bigint`` always and an ``int`` where it fits; nanoseconds become
microseconds where they are whole. A timestamp without zone becomes one in UTC (as a naive datetime
does), never the other way round. An interval of days and nanoseconds, as DuckDB has it, becomes a
duration (a day has 24 hours), and back; one with months does not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import BadRows, MissingKey
from headrace.model.ddl import ddl_type
from headrace.model.values import Refusal, first_bad, shown, unknown_field

types = pa.types


def cast(column: pa.Array, target: pa.DataType, *, floats_to_integers: bool = False) -> pa.Array:
    """Convert an array exactly, or raise `Refusal` for the first value that would change.

    ``floats_to_integers`` lets whole floats become integers: for pandas, which turns a column of
    integers into floats when one is missing.
    """
    source = column.type
    if source.equals(target):
        return column
    if types.is_null(source):
        return pa.nulls(len(column), target)
    if isinstance(source, pa.BaseExtensionType):
        fix = f"convert it to its storage type {source.storage_type} first"
        raise Refusal(f"extension type {source} is not supported", fix=fix, kind=BadRows)
    if types.is_dictionary(source):
        return cast(_decoded(column), target, floats_to_integers=floats_to_integers)
    if types.is_run_end_encoded(source):
        return cast(pc.run_end_decode(column), target, floats_to_integers=floats_to_integers)
    if types.is_list(target) and _is_any_list(source):
        return _cast_list(column, target)
    if types.is_map(target) and types.is_map(source):
        return _cast_map(column, target)
    if types.is_struct(target) and types.is_struct(source):
        return _cast_struct(column, target)
    if types.is_interval(source) and types.is_duration(target):
        return _to_duration(column, target)
    if types.is_duration(source) and types.is_interval(target):
        return _to_interval(column)
    if not _allowed(source, target, floats_to_integers):
        raise _not_allowed(source, target)
    if types.is_decimal(target) and types.is_integer(source):
        # Arrow wants room for every integer; 256 bits have it, and the second step looks at values.
        column = column.cast(pa.decimal256(76, target.scale))
    elif types.is_float32(target) and types.is_float64(source):
        return _cast_double(column)
    elif types.is_floating(target) and types.is_float16(source):
        return column.cast(pa.float32()).cast(target)
    return _cast_exact(column, target)


def _decoded(column: pa.Array) -> pa.Array:
    """Put the values of a dictionary in their places; Arrow cannot do that with views."""
    values = column.dictionary
    if types.is_string_view(values.type):
        values = values.cast(pa.large_string())
    elif types.is_binary_view(values.type):
        values = values.cast(pa.large_binary())
    return values.take(column.indices)


def _is_any_list(source: pa.DataType) -> bool:
    return bool(
        types.is_list(source)
        or types.is_large_list(source)
        or types.is_fixed_size_list(source)
        or types.is_list_view(source)
        or types.is_large_list_view(source)
    )


def _is_text(source: pa.DataType) -> bool:
    return bool(
        types.is_string(source) or types.is_large_string(source) or types.is_string_view(source)
    )


def _is_bytes(source: pa.DataType) -> bool:
    return bool(
        types.is_binary(source)
        or types.is_large_binary(source)
        or types.is_binary_view(source)
        or types.is_fixed_size_binary(source)
    )


def _allowed(source: pa.DataType, target: pa.DataType, floats_to_integers: bool) -> bool:
    """Say whether values of one type may become those of another, if each one fits exactly."""
    if types.is_integer(target):
        return bool(types.is_integer(source) or (floats_to_integers and types.is_floating(source)))
    if types.is_floating(target):
        return bool(types.is_integer(source) or types.is_floating(source))
    if types.is_decimal(target):
        return bool(types.is_integer(source) or types.is_decimal(source))
    if types.is_string(target):
        return _is_text(source)
    if types.is_binary(target):
        return _is_bytes(source)
    if types.is_date(target):
        return bool(types.is_date(source))
    if types.is_timestamp(target):
        return bool(types.is_timestamp(source) and (target.tz is not None or source.tz is None))
    if types.is_time(target):
        return bool(types.is_time(source))
    return bool(types.is_duration(target) and types.is_duration(source))


def _not_allowed(source: pa.DataType, target: pa.DataType) -> Refusal:
    fix = "convert the column before appending, or change the topic's column"
    if types.is_timestamp(target) and types.is_timestamp(source):
        fix = "drop the time zone first, or use timestamp for the topic's column"
    elif types.is_date(target) and types.is_timestamp(source):
        fix = "cast the column to date first: a timestamp has a time too"
    elif types.is_decimal(target) and types.is_floating(source):
        fix = "a float is not exact: cast the column to decimal first"
    elif types.is_integer(target) and types.is_floating(source):
        fix = "cast the column to an integer type first"
    elif _is_text(source):
        fix = "text is not converted to other types: parse it first"
    return Refusal(f"{source} is not converted to {ddl_type(target)}", fix=fix)


def _cast_exact(column: pa.Array, target: pa.DataType) -> pa.Array:
    try:
        return column.cast(target)
    except pa.ArrowException as error:
        raise _refusal_of(column, target, error) from error


def _refusal_of(column: pa.Array, target: pa.DataType, error: Exception) -> Refusal:
    def fails(start: int, end: int) -> bool:
        try:
            column.slice(start, end - start).cast(target)
        except pa.ArrowException:
            return True
        return False

    index = first_bad(len(column), fails)
    spelled = ddl_type(target)
    if index is None:
        fact = f"the column does not become {spelled} as a whole"
        return Refusal(fact, why=str(error), fix="append fewer rows at a time", kind=BadRows)
    fact = f"{value_text(column, index)} does not fit {spelled}"
    return Refusal(fact, index=index, why=str(error))


def value_text(column: pa.Array, index: int) -> str:
    """Show one value of an array in an error message, also one that Python cannot hold."""
    try:
        return shown(column[index].as_py())
    except (ValueError, OverflowError, ImportError):  # nanoseconds, or years that Python lacks
        return f"{column[index].value} ({column.type})"


def _cast_double(column: pa.Array) -> pa.Array:
    """Make floats of doubles that are such; Arrow would round the others."""
    narrow = column.cast(pa.float32())
    before = column.to_numpy(zero_copy_only=False)
    after = narrow.to_numpy(zero_copy_only=False)
    changed = np.flatnonzero((before != after) & ~np.isnan(before))
    if len(changed):
        index = int(changed[0])
        fact = f"{value_text(column, index)} is not exact as float"
        fix = "round the column to float32 before appending, or use double"
        raise Refusal(fact, index=index, fix=fix)
    return narrow


_INTERVAL = np.dtype([("months", "<i4"), ("days", "<i4"), ("nanoseconds", "<i8")])
_DAY = 86_400_000_000


def _to_duration(column: pa.Array, target: pa.DataType) -> pa.Array:
    """Intervals as microseconds, where they have no months and fit."""
    parts = np.frombuffer(column.buffers()[1], _INTERVAL)[column.offset :][: len(column)]
    days, nanoseconds = parts["days"].astype(np.int64), parts["nanoseconds"]
    total = days * _DAY + nanoseconds // 1000
    exact = days * float(_DAY) + nanoseconds / 1000
    bad = (parts["months"] != 0) | (nanoseconds % 1000 != 0) | (np.abs(exact - total) > 1e6)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    if (bad & valid).any():
        index = int(np.flatnonzero(bad & valid)[0])
        why = "a month has no fixed length, and a duration has microseconds"
        raise Refusal(f"{column[index]} does not fit {ddl_type(target)}", index=index, why=why)
    return pa.array(total, pa.int64(), mask=~valid).cast(target)


def _to_interval(column: pa.Array) -> pa.Array:
    """Microseconds as days and the rest, so that none is out of the range of nanoseconds."""
    total = column.cast(pa.duration("us")).cast(pa.int64()).fill_null(0).to_numpy()
    parts = np.zeros(len(column), _INTERVAL)
    parts["days"], parts["nanoseconds"] = total // _DAY, total % _DAY * 1000
    valid = None
    if column.null_count:
        valid = pa.array(np.packbits(column.is_valid(), bitorder="little")).buffers()[1]
    buffers = [valid, pa.py_buffer(parts.tobytes())]
    return pa.Array.from_buffers(pa.month_day_nano_interval(), len(column), buffers)


def _mask(column: pa.Array) -> pa.Array | None:
    return column.is_null() if column.null_count else None


def _cast_list(column: pa.Array, target: pa.DataType) -> pa.Array:
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    bounds = np.zeros(len(column) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    try:
        values = cast(column.flatten(), target.value_type)
        offsets = pa.array(bounds).cast(pa.int32())
    except Refusal as refusal:
        raise refusal.inside("element", _row_of(bounds, refusal.index)) from refusal.__cause__
    except pa.ArrowInvalid as error:
        fix = "append fewer rows at a time"
        raise Refusal("the lists hold too many values", fix=fix, kind=BadRows) from error
    return pa.ListArray.from_arrays(offsets, values, type=target, mask=_mask(column))


def _row_of(bounds: npt.NDArray[np.int64], index: int | None) -> int | None:
    return None if index is None else int(np.searchsorted(bounds, index, "right")) - 1


def _cast_map(column: pa.Array, target: pa.DataType) -> pa.Array:
    bounds = column.offsets.to_numpy().astype(np.int64)
    start, end = int(bounds[0]), int(bounds[-1])
    bounds -= start
    halves = []
    for name, half, wanted in (
        ("key", column.keys, target.key_type),
        ("value", column.items, target.item_type),
    ):
        try:
            halves.append(cast(half.slice(start, end - start), wanted))
        except Refusal as refusal:
            raise refusal.inside(name, _row_of(bounds, refusal.index)) from refusal.__cause__
    offsets = pa.array(bounds.astype(np.int32))
    return pa.MapArray.from_arrays(offsets, *halves, type=target, mask=_mask(column))


def _cast_struct(column: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert field by field, by name; a field that is not there is null."""
    names = [field.name for field in column.type]
    known = [field.name for field in target]
    children = dict(zip(names, column.flatten(), strict=True))
    if len(children) != len(names):
        raise Refusal("a field comes twice", kind=BadRows)
    for name in names:
        if name not in known:
            raise unknown_field(name, known)
    result = []
    for field in target:
        child = children.get(field.name)
        try:
            if child is None:
                result.append(pa.nulls(len(column), field.type))
            else:
                result.append(cast(child, field.type))
        except Refusal as refusal:
            raise refusal.inside(field.name, refusal.index) from refusal.__cause__
    return pa.StructArray.from_arrays(result, fields=list(target), mask=_mask(column))


def has_required_inside(arrow: pa.DataType) -> bool:
    """Say whether a value of this type holds others that may not be null."""
    if not types.is_nested(arrow):
        return False
    if types.is_map(arrow):
        return True
    inner = [arrow.field(i) for i in range(arrow.num_fields)]
    return any(not field.nullable or has_required_inside(field.type) for field in inner)


def refuse_nulls_inside(column: pa.Array) -> None:
    """Raise `Refusal` if a value inside a value is null and may not be; types are ours."""
    arrow = column.type
    if types.is_list(arrow):
        if has_required_inside(arrow.value_type):
            bounds = np.zeros(len(column) + 1, np.int64)
            lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
            np.cumsum(lengths, out=bounds[1:])
            try:
                refuse_nulls_inside(column.flatten())
            except Refusal as refusal:
                raise refusal.inside("element", _row_of(bounds, refusal.index)) from None
    elif types.is_map(arrow):
        _refuse_nulls_in_map(column)
    elif types.is_struct(arrow):
        for field, child in zip(arrow, column.flatten(), strict=True):
            if not field.nullable and child.null_count > column.null_count:
                missing = pc.and_(child.is_null(), column.is_valid())
                index = pc.index(missing, True).as_py()
                raise Refusal("it is null", index=index, path=field.name, kind=MissingKey)
            if has_required_inside(field.type):
                try:
                    refuse_nulls_inside(child)
                except Refusal as refusal:
                    raise refusal.inside(field.name, refusal.index) from None


def _refuse_nulls_in_map(column: pa.Array) -> None:
    bounds = column.offsets.to_numpy().astype(np.int64)
    start, end = int(bounds[0]), int(bounds[-1])
    keys = column.keys.slice(start, end - start)
    if keys.null_count:
        index = _row_of(bounds - start, pc.index(keys.is_null(), True).as_py())
        raise Refusal("a key of a map is null", index=index, path="key", kind=MissingKey)
    for name, half in (("key", keys), ("value", column.items.slice(start, end - start))):
        if has_required_inside(half.type):
            try:
                refuse_nulls_inside(half)
            except Refusal as refusal:
                raise refusal.inside(name, _row_of(bounds - start, refusal.index)) from None
