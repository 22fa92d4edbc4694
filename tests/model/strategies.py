"""Random types of topics, and random values of them, for the tests of the model."""

from __future__ import annotations

import datetime as dt
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from headrace.model.ddl import DURATION, TIME, TIMESTAMP, TIMESTAMP_NTZ, has_map

SIMPLE = [
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    TIMESTAMP,
    TIMESTAMP_NTZ,
    TIME,
    DURATION,
]

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)


@st.composite
def decimals(draw: st.DrawFn) -> pa.DataType:
    precision = draw(st.integers(1, 38))
    return pa.decimal128(precision, draw(st.integers(0, precision)))


SCALARS = st.one_of(st.sampled_from(SIMPLE), decimals())


def _structs(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    field = st.builds(lambda n, t, null: pa.field(n, t, nullable=null), NAMES, inner, st.booleans())
    fields = st.lists(field, min_size=1, max_size=3, unique_by=lambda f: f.name.casefold())
    return fields.map(pa.struct)


def _nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    keys = inner.filter(lambda t: not has_map(t))
    return st.one_of(inner.map(pa.list_), st.builds(pa.map_, keys, inner), _structs(inner))


TYPES = st.recursive(SCALARS, _nested, max_leaves=6)
"""Every type a column can have."""

_INTEGERS = {pa.int8(): 8, pa.int16(): 16, pa.int32(): 32, pa.int64(): 64}
_EXACT = Context(prec=60)
_MOMENTS = st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1))


def values_of(arrow: pa.DataType) -> st.SearchStrategy[Any]:
    """Python values of a type, themselves not null; inside they are where they may be."""
    if pa.types.is_list(arrow):
        return st.lists(st.none() | values_of(arrow.value_type), max_size=3)
    if pa.types.is_map(arrow):
        pair = st.tuples(values_of(arrow.key_type), st.none() | values_of(arrow.item_type))
        return st.lists(pair, max_size=3)
    if pa.types.is_struct(arrow):
        return st.fixed_dictionaries(
            {f.name: values_of(f.type) | (st.none() if f.nullable else st.nothing()) for f in arrow}
        )
    if arrow in _INTEGERS:
        bits = _INTEGERS[arrow] - 1
        return st.integers(-(2**bits), 2**bits - 1)
    if pa.types.is_decimal(arrow):
        whole = st.integers(-(10**arrow.precision) + 1, 10**arrow.precision - 1)
        trailing = st.integers(0, 9).map(lambda n: n * 10 ** (arrow.precision - 1))
        return (whole | trailing).map(lambda n: Decimal(n).scaleb(-arrow.scale, _EXACT))
    return {
        pa.bool_(): st.booleans(),
        pa.float32(): st.floats(width=32),
        pa.float64(): st.floats(),
        pa.string(): st.text(max_size=30),
        pa.binary(): st.binary(max_size=30),
        pa.date32(): st.dates(),
        TIMESTAMP: _MOMENTS.map(lambda m: m.replace(tzinfo=dt.UTC)),
        TIMESTAMP_NTZ: _MOMENTS,
        TIME: st.times(),
        DURATION: st.timedeltas(dt.timedelta(days=-(10**5)), dt.timedelta(days=10**5)),
    }[arrow]


def large(arrow: pa.DataType) -> pa.DataType:
    """Another Arrow type with the same values: larger offsets, views, other order of fields."""
    if pa.types.is_list(arrow):
        return pa.large_list(large(arrow.value_type))
    if pa.types.is_map(arrow):
        return pa.map_(large(arrow.key_type), large(arrow.item_type))
    if pa.types.is_struct(arrow):
        return pa.struct([pa.field(f.name, large(f.type)) for f in reversed(list(arrow))])
    if arrow in (pa.int8(), pa.int16(), pa.int32()):
        return pa.int64()
    return {
        pa.string(): pa.string_view(),
        pa.binary(): pa.large_binary(),
        pa.date32(): pa.date64(),
        pa.float32(): pa.float64(),
    }.get(arrow, arrow)
