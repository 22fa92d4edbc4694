"""Canonical key bytes and partitions.

The golden values here are the contract with all data ever written: if one fails, the code is wrong,
never the value. These tests catch a changed hash, a difference between the way for many rows and
the way for one, and keys that move when a column is widened. They cannot catch two writers that
disagree about which columns are the key.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from decimal import Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BadSchema
from headrace.model.ddl import parse_type
from headrace.model.keys import (
    key_bytes_of,
    key_tag,
    murmur2,
    murmur2_of,
    partition_of,
    partitions_of,
)
from tests.model.strategies import SCALARS, values_of


@pytest.mark.parametrize(
    ("data", "signed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_that_of_kafka(data: bytes, signed: int) -> None:
    """The vectors that Kafka's own tests state."""
    assert murmur2(data) == signed & 0xFFFFFFFF


GOLDEN: list[tuple[str, list[Any], list[str], list[int]]] = [
    ("boolean", [True, False, None], ["0101", "0100", "00"], [502, 917, 588]),
    (
        "bigint",
        [0, 1, -1, 2**63 - 1, -(2**63)],
        [
            "020000000000000000",
            "020000000000000001",
            "02ffffffffffffffff",
            "027fffffffffffffff",
            "028000000000000000",
        ],
        [389, 702, 177, 605, 369],
    ),
    (
        "double",
        [0.0, 1.5, float("nan"), float("-inf")],
        ["030000000000000000", "033ff8000000000000", "037ff8000000000000", "03fff0000000000000"],
        [331, 825, 834, 924],
    ),
    (
        "decimal(20,4)",
        [Decimal(0), Decimal("1.5"), Decimal("-12345678901234.5678"), Decimal(7)],
        [
            "0400" + "00" * 16,
            "0401" + "00" * 15 + "0f",
            "0404" + (-123456789012345678).to_bytes(16, "big", signed=True).hex(),
            "0400" + "00" * 15 + "07",
        ],
        [452, 802, 755, 400],
    ),
    (
        "string",
        ["", "a", "/index.html", "grüße", "x" * 100],
        [
            "0500000000",
            "050000000161",
            "050000000b2f696e6465782e68746d6c",
            "05000000076772c3bcc39f65",
            "0500000064" + "78" * 100,
        ],
        [533, 220, 189, 921, 221],
    ),
    ("binary", [b"", b"\x00\xff"], ["0600000000", "060000000200ff"], [35, 943]),
    (
        "date",
        [dt.date(1970, 1, 1), dt.date(2024, 2, 29)],
        ["070000000000000000", "070000000000004d46"],
        [725, 850],
    ),
    ("timestamp", [dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC)], ["0800061283ffaff000"], [855]),
    ("timestamp_ntz", [dt.datetime(2024, 2, 29, 12)], ["0900061283ffaff000"], [904]),
    ("time", [dt.time(12, 30)], ["0a0000000a7a358200"], [771]),
    (
        "interval day to second",
        [dt.timedelta(days=1, microseconds=-1)],
        ["0b000000141dd75fff"],
        [69],
    ),
]


def key_of(values: list[Any], types: list[pa.DataType]) -> bytes:
    [key] = key_bytes_of([pa.array([v], t) for v, t in zip(values, types, strict=True)])
    return key


@pytest.mark.parametrize(("ddl", "values", "data", "partitions"), GOLDEN)
def test_bytes_and_partitions_never_change(
    ddl: str, values: list[Any], data: list[str], partitions: list[int]
) -> None:
    """Each type has these bytes and these partitions of 1,000, for ever, on both ways."""
    arrow = parse_type(ddl)
    array = pa.array(values, arrow)
    assert [key.hex() for key in key_bytes_of([array])] == data
    assert partitions_of([array], 1000).tolist() == partitions
    many = pa.concat_arrays([array] * 20)
    assert partitions_of([many], 1000).tolist() == partitions * 20


def test_composite_keys_never_change() -> None:
    """The parts of a key follow each other, and null is one of them."""
    types = [pa.int32(), pa.string(), pa.date32()]
    key = key_of([7, "eu", None], types)
    assert key.hex() == "020000000000000007" + "05000000026575" + "00"
    columns = [pa.array([v] * 20, t) for v, t in zip([7, "eu", None], types, strict=True)]
    assert partition_of(key, 1000) == COMPOSITE
    assert partitions_of(columns, 1000).tolist() == [COMPOSITE] * 20
    assert partitions_of([c.slice(0, 1) for c in columns], 1000).tolist() == [COMPOSITE]


COMPOSITE = 535


def reference(value: Any, arrow: pa.DataType) -> bytes:
    """Give the bytes as the docstring of the module says, written a second time where it can be."""
    if value is None:
        return b"\0"
    if pa.types.is_string(arrow):
        data: bytes = value.encode()
        return b"\5" + len(data).to_bytes(4, "big") + data
    if pa.types.is_binary(arrow):
        return b"\6" + len(value).to_bytes(4, "big") + bytes(value)
    if pa.types.is_integer(arrow):
        return b"\2" + int(value).to_bytes(8, "big", signed=True)
    if pa.types.is_decimal(arrow):
        normal = value.normalize(EXACT)
        if normal.as_tuple().exponent > 0:
            normal = normal.quantize(Decimal(1), context=EXACT)
        scale = -normal.as_tuple().exponent
        unscaled = int(normal.scaleb(scale, EXACT))
        return b"\4" + bytes([scale]) + unscaled.to_bytes(16, "big", signed=True)
    return key_of([value], [arrow])


EXACT = Context(prec=80)


@settings(max_examples=150)
@given(st.data(), st.lists(SCALARS, min_size=1, max_size=3), st.integers(13, 40))
def test_many_rows_hash_like_one(data: st.DataObject, types: list[pa.DataType], rows: int) -> None:
    """For random columns, with nulls and slices, the vector way gives what each key alone gives."""
    columns: list[pa.Array] = []
    keys = [b""] * rows
    cut = data.draw(st.integers(0, 5))
    for arrow in types:
        some = values_of(arrow)
        if data.draw(st.booleans()):
            some = st.none() | some
        values = data.draw(st.lists(some, min_size=rows + cut, max_size=rows + cut))
        columns.append(pa.array(values, arrow).slice(cut))
        keys = [k + reference(v, arrow) for k, v in zip(keys, values[cut:], strict=True)]
    assert key_bytes_of(columns) == keys
    assert murmur2_of(columns).tolist() == [murmur2(key) for key in keys]
    assert partitions_of(columns, 17).tolist() == [partition_of(key, 17) for key in keys]
    few = [column.slice(2, 3) for column in columns]
    assert partitions_of(few, 17).tolist() == partitions_of(columns, 17)[2:5].tolist()


@given(st.lists(st.integers(-128, 127) | st.none(), max_size=40))
def test_the_width_of_an_integer_does_not_matter(values: Sequence[int | None]) -> None:
    """Widening an integer key moves no row to another partition."""
    widths = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
    results = {partitions_of([pa.array(values, w)], 64).tobytes() for w in widths}
    assert len(results) == 1


@given(st.lists(st.floats(width=32) | st.none(), max_size=40))
def test_the_width_of_a_float_does_not_matter(values: Sequence[float | None]) -> None:
    """A float and the double of the same value are the same key."""
    narrow, wide = pa.array(values, pa.float32()), pa.array(values, pa.float64())
    assert partitions_of([narrow], 64).tolist() == partitions_of([wide], 64).tolist()


@given(st.lists(st.integers(-(10**9), 10**9), min_size=1, max_size=40), st.integers(0, 20))
def test_the_scale_of_a_decimal_does_not_matter(values: list[int], scale: int) -> None:
    """Equal decimals are the same key, whatever the scale of their column."""
    plain = pa.array([Decimal(v).scaleb(-3) for v in values], pa.decimal128(12, 3))
    scaled = plain.cast(pa.decimal128(38, 3 + scale))
    assert key_bytes_of([plain]) == key_bytes_of([scaled])
    assert murmur2_of([plain]).tolist() == murmur2_of([scaled]).tolist()


def test_zeros_are_one_key_and_so_are_nans() -> None:
    """0.0 and -0.0 are the same key, and so are all NaN, in both ways."""
    odd = np.array([0x7FF8000000000001, 0xFFF8000000000000], np.uint64).view(np.float64)
    values = pa.array(np.concatenate([[0.0, -0.0], odd, [np.nan]] * 5))
    hashes = murmur2_of([values])
    assert len(set(hashes.tolist())) == 2
    assert len(set(key_bytes_of([values]))) == 2


def test_parts_do_not_run_together() -> None:
    """('ab', 'c') and ('a', 'bc') are different keys, and null is not the empty string."""
    text = [pa.string(), pa.string()]
    assert key_of(["ab", "c"], text) != key_of(["a", "bc"], text)
    assert key_of([None, ""], text) != key_of(["", None], text)


def test_very_different_lengths_are_hashed_right() -> None:
    """A few very long keys among short ones are hashed like alone."""
    values = ["a" * (i % 7) for i in range(100)] + ["b" * 100_003, "c" * 50_000] + ["d" * 9] * 50
    array = pa.array(values)
    expected = [murmur2(key) for key in key_bytes_of([array])]
    assert murmur2_of([array]).tolist() == expected


def test_more_rows_than_a_block() -> None:
    """Blocks of rows are put together in order."""
    numbers = pa.array(np.arange(40_000))
    texts = numbers.cast(pa.string())
    for columns in ([numbers], [texts], [numbers, texts]):
        whole = partitions_of(columns, 1000)
        for start in (0, 16_380, 32_764, 39_990):
            part = partitions_of([c.slice(start, 10) for c in columns], 1000)
            assert whole[start : start + 10].tolist() == part.tolist()
    assert partitions_of([numbers.slice(0, 0)], 3).tolist() == []


def test_keys_spread_over_partitions() -> None:
    """Consecutive numbers fill 16 partitions evenly, within 5 percent."""
    counts = np.bincount(partitions_of([pa.array(np.arange(160_000))], 16), minlength=16)
    assert counts.min() > 9_500
    assert counts.max() < 10_500


@pytest.mark.parametrize(
    "arrow",
    [pa.list_(pa.int8()), pa.struct([("a", pa.int8())]), pa.timestamp("ns"), pa.large_string()],
)
def test_other_types_are_no_keys(arrow: pa.DataType) -> None:
    """Nested types, and types that no topic has, cannot be part of a key."""
    with pytest.raises(BadSchema):
        key_tag(arrow, "c")
    with pytest.raises(BadSchema):
        partitions_of([pa.nulls(3, arrow)], 2)
