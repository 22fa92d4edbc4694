"""Hashes and order words, against Python's own equality and order.

Catches: values that are equal and hash differently (slices, offsets, garbage under nulls, chunk
borders, -0.0, nan), neighbours that collide (prefixes, zero bytes, shifted items), a changed hash
(golden values), an order that is not Spark's. Cannot catch: a hash that is merely weak.
"""

from __future__ import annotations

import datetime
import decimal
import itertools
import math
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace.model import hashing
from headrace.model.hashing import hash64, order64

D = decimal.Decimal
UTC = datetime.UTC
COLUMNS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [None, False, True]),
    (pa.int8(), [None, -128, -1, 0, 1, 127]),
    (pa.int32(), [None, -(2**31), -1, 0, 1, 2**31 - 1]),
    (pa.int64(), [None, -(2**63) + 1, -1, 0, 1, 2**53, 2**53 + 1, 2**63 - 1]),
    (pa.float32(), [None, -math.inf, -1.5, 0.0, 1e-40, 1.5, math.inf, math.nan]),
    (pa.float64(), [None, -math.inf, -1e300, -5e-324, 0.0, 5e-324, 1.0, math.inf, math.nan]),
    (pa.decimal128(10, 2), [None, D("-1.50"), D("0"), D("0.01"), D("99999999.99")]),
    (pa.decimal128(38, 0), [None, -(D(10) ** 37), D(-(2**64)), D(-1), D(0), D(2**64), D(10) ** 37]),
    (pa.string(), [None, "", "\0", "a", "a\0", "aa", "abcdefg", "abcdefgh", "b", "ä", "😀"]),
    (pa.binary(), [None, b"", b"\0", b"\0\0", b"\1", b"\xff" * 7, b"\xff" * 8]),
    (pa.date32(), [None, datetime.date(1900, 1, 1), datetime.date(2024, 2, 29)]),
    (
        pa.timestamp("us", "UTC"),
        [
            None,
            datetime.datetime(1969, 12, 31, tzinfo=UTC),
            datetime.datetime(2024, 1, 1, tzinfo=UTC),
        ],
    ),
    (pa.duration("us"), [None, datetime.timedelta(-1), datetime.timedelta(microseconds=1)]),
    (pa.time64("us"), [None, datetime.time(0), datetime.time(23, 59)]),
    (pa.list_(pa.int64()), [None, [], [None], [0], [0, 0], [0, None], [None, 0], [1, 2], [2, 1]]),
    (pa.list_(pa.string()), [None, [], [""], ["", ""], ["ab"], ["a", "b"], ["", "ab"]]),
    (pa.list_(pa.list_(pa.int8())), [None, [], [[]], [[], []], [[1]], [[1], []], [[], [1]]]),
    (
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        [None, *({"a": a, "b": b} for a in (None, 0, 1) for b in (None, "", "x"))],
    ),
    (pa.map_(pa.string(), pa.int64()), [None, [], [("a", 1)], [("a", None)], [("a", 1), ("b", 2)]]),
]
IDS = [str(kind) for kind, _ in COLUMNS]
ORDERED = [(kind, values) for kind, values in COLUMNS if not pa.types.is_nested(kind)]


@pytest.mark.parametrize(("kind", "values"), COLUMNS, ids=IDS)
def test_different_values_hash_differently_and_equal_ones_alike(
    kind: pa.DataType, values: list[Any]
) -> None:
    array = pa.array(values, kind)
    hashes = hash64([array], 7)
    assert len(set(hashes.tolist())) == len(values)
    shuffled = random.Random(3).sample(range(len(values)), len(values))
    assert (hash64([array.take(pa.array(shuffled))], 7) == hashes[shuffled]).all()
    assert (hash64([array], 8) != hashes).all()


@pytest.mark.parametrize(("kind", "values"), COLUMNS, ids=IDS)
def test_slices_offsets_and_what_lies_under_nulls_do_not_matter(
    kind: pa.DataType, values: list[Any]
) -> None:
    array = pa.array(values * 3, kind)
    hashes = hash64([array], 7)
    for start, stop in itertools.combinations(range(len(array) + 1), 2):
        assert (hash64([array.slice(start, stop - start)], 7) == hashes[start:stop]).all()
    assert (order64(array.slice(2))[0] == order64(array)[0][2:]).all()
    # The same nulls over other bytes.
    null = pa.array([not index for index in range(len(values))])
    over = pa.array([values[1], *values[1:]], kind)
    masked = pa.compute.if_else(null, pa.scalar(None, kind), over)
    assert (hash64([masked], 7) == hashes[: len(values)]).all()


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [
        pa.array(["x" * (i % 40) for i in range(100)]),
        pa.array([[i] * (i % 5) for i in range(100)]),
    ]
    whole = hash64(columns)
    monkeypatch.setattr(hashing, "BLOCK", 7)
    assert (hash64(columns) == whole).all()


def test_zeros_and_nans_are_one_each_and_integers_of_all_widths_agree() -> None:
    odd = np.array([0x7FF8000000000001, 0xFFF8000000000000, 0x7FF8000000000000], np.uint64)
    assert len(set(hash64([pa.array(odd.view(np.float64))]).tolist())) == 1
    assert len(set(hash64([pa.array([0.0, -0.0])]).tolist())) == 1
    assert len(set(order64(pa.array([0.0, -0.0]))[0].tolist())) == 1
    for kind in (pa.int8(), pa.int16(), pa.int32()):
        small = pa.array([-3, 5], kind)
        assert (hash64([small]) == hash64([small.cast(pa.int64())])).all()


def test_the_order_of_columns_counts_and_so_does_the_column_of_a_value() -> None:
    a, b = pa.array(["x", "", None]), pa.array(["", "x", None])
    assert (hash64([a, b])[:2] != hash64([b, a])[:2]).all()
    assert len({*hash64([a, b]).tolist(), *hash64([b, a]).tolist()}) == 3


def test_the_hash_never_changes() -> None:
    columns = [pa.array([1, None]), pa.array(["héllo wörld", ""]), pa.array([[1.5], None])]
    assert [f"{h:016x}" for h in hash64(columns, 42).tolist()] == GOLDEN


GOLDEN = ["0ae56bdc4b01c8f5", "ec832c710d465b94"]


@pytest.mark.parametrize(("kind", "values"), ORDERED, ids=[str(kind) for kind, _ in ORDERED])
def test_words_are_in_the_order_of_the_values(kind: pa.DataType, values: list[Any]) -> None:
    words, exact = order64(pa.array(values, kind))
    found = words.tolist()
    assert found == sorted(found)
    assert found[0] == 0
    assert min(found[1:]) > 0
    if exact:
        assert len(set(found)) == len(found)


def test_long_random_columns_are_ordered_as_python_orders_them() -> None:
    rng = random.Random(5)
    strings = ["".join(rng.choice("\0aä😀") for _ in range(rng.randrange(12))) for _ in range(500)]
    decimals = [D(rng.randrange(-(10**37), 10**37) // 10 ** rng.randrange(38)) for _ in range(500)]
    pairs: list[tuple[list[Any], pa.DataType]] = [
        (sorted(strings, key=str.encode), pa.string()),
        (sorted(decimals), pa.decimal128(38, 0)),
    ]
    for values, kind in pairs:
        words = order64(pa.array(values, kind))[0].tolist()
        assert words == sorted(words)


def test_structs_order_by_their_first_field() -> None:
    array = pa.array([None, {"a": None}, {"a": 1}, {"a": 2}], pa.struct([("a", pa.int32())]))
    words, exact = order64(array)
    assert words.tolist() == sorted(words.tolist())
    assert not exact


@pytest.mark.parametrize("values", [["a", "", None, "longer than a word"], [None], ["x"]])
def test_a_long_column_of_few_values_hashes_as_each_value_does(values: list[str | None]) -> None:
    column = pa.array(values * (9_000 // len(values)), pa.string())
    alone = {value: int(hash64([pa.array([value], pa.string())], 3)[0]) for value in values}
    wanted = [alone[value] for value in column.to_pylist()]
    assert hash64([column], 3).tolist() == wanted
    assert hash64([column.dictionary_encode()], 3).tolist() == wanted
