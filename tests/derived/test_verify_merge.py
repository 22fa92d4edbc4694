"""The merge of two tables against dicts: random tables, random differences, cut anywhere (R-B7).

Catches: a difference that is not named, named twice, or as another kind; a false one; batches cut
at bad places, the last one left out; keys of all types, equal in their first 32 bytes, null, NaN,
-0.0; values that are null on one side only; rows that stand there twice; a side out of order.
Cannot catch: what a target's own reading gets wrong (the tests on PostgreSQL do).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace import errors
from headrace.derived import verify
from headrace.derived.verify import Comparison, as_multiset
from headrace.tables import keyed

Row = tuple[Any, ...]
LONG = "https://shop.example.org/articles/of/the/year/"
NAN = float("nan")
KEYS: dict[str, tuple[list[pa.DataType], Callable[[random.Random], Row]]] = {
    "bigint": ([pa.int64()], lambda r: (r.choice([-(2**63), 1 - 2**63, r.randrange(-99, 99)]),)),
    "null": ([pa.int32()], lambda r: (r.choice([None, r.randrange(-50, 50)]),)),
    "double": ([pa.float64()], lambda r: (r.choice([None, NAN, -1.5, float(r.randrange(50))]),)),
    "string": ([pa.string()], lambda r: (r.choice(["", "Z", "a", "é", "~"]) * r.randrange(4),)),
    "long": ([pa.string()], lambda r: (LONG + str(r.randrange(80)),)),
    "two": (
        [pa.string(), pa.int64()],
        lambda r: (r.choice([None, "", "B", "a", LONG]), r.choice([None, -1, *range(9)])),
    ),
    "numeric": (
        [pa.decimal128(30, 2), pa.bool_()],
        lambda r: (Decimal(r.randrange(-900, 900)) / 4, r.choice([None, True, False])),
    ),
}
VALUES = (None, 0.0, -0.0, 1.5, NAN, math.inf)
TEXTS = (None, "", "x", "ä")


def order(key: Row) -> list[Any]:
    """Null first, NaN last, strings by their bytes."""
    made: list[Any] = []
    for value in key:
        if value is None:
            made.append((0, 0))
        elif isinstance(value, float) and math.isnan(value):
            made.append((2, 0))
        else:
            made.append((1, value.encode() if isinstance(value, str) else value))
    return made


def plain(value: Any) -> Any:
    """A value that equals itself: one NaN, one zero."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return tuple(value) if isinstance(value, list) else value


def named(row: Row) -> Row:
    return tuple(map(plain, row))


def value_of(rng: random.Random) -> Row:
    return rng.choice(VALUES), rng.choice(TEXTS), rng.choice([None, [], [1], [1, None]])


def schema_of(types: list[pa.DataType]) -> pa.Schema:
    key = [pa.field(f"k{at}", kind) for at, kind in enumerate(types)]
    own = [("v", pa.float64()), ("t", pa.string()), ("n", pa.list_(pa.int64()))]
    return pa.schema([*key, *own])


def batches(rng: random.Random, rows: list[Row], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows, cut at random places; some batches have no rows."""
    columns = [list(c) for c in zip(*rows, strict=True)] or [[] for _ in schema]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
    whole = pa.RecordBatch.from_arrays(arrays, schema=schema)
    at = 0
    while at < len(rows):
        step = rng.choice([0, 1, 2, 7, 40])
        yield whole.slice(at, step)
        at += step


def found_by(comparison: Comparison, width: int) -> Counter[tuple[str, Row]]:
    found: Counter[tuple[str, Row]] = Counter()
    for one in comparison:
        sides = [
            [named(tuple(row.values())) for row in side.to_pylist()] if side is not None else None
            for side in (one.ours, one.theirs)
        ]
        for at in range(len(one)):
            pair = [None if side is None else side[at] for side in sides]
            if one.kind == verify.CHANGED:
                assert pair[0] is not None
                assert pair[1] is not None
                assert pair[0][:width] == pair[1][:width]
                assert pair[0] != pair[1]
            key = next(row for row in pair if row is not None)[:width]
            found[one.kind, key] += 1
    return found


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("seed", range(25))
def test_the_differences_are_those_of_dicts(name: str, seed: int) -> None:
    rng = random.Random(seed)
    types, make = KEYS[name]
    schema, width = schema_of(types), len(types)
    keys = {named(key): key for key in (make(rng) for _ in range(rng.choice([0, 3, 60, 150])))}
    ours = {key: value_of(rng) for key in keys}
    theirs = dict(ours)
    for key in list(keys):
        chance = rng.random() if seed % 5 else 1.0  # every fifth case has no difference
        if chance < 0.05:
            theirs[key] = value_of(rng)
        elif chance < 0.1:
            del theirs[key]
        elif chance < 0.15:
            del ours[key]
    expected = Counter(
        {("missing", key): 1 for key in ours.keys() - theirs.keys()}
        | {("extra", key): 1 for key in theirs.keys() - ours.keys()}
        | {
            ("changed", key): 1
            for key in ours.keys() & theirs.keys()
            if named(ours[key]) != named(theirs[key])
        }
    )
    sides = [
        [keys[key] + side[key] for key in sorted(side, key=lambda k: order(keys[k]))]
        for side in (ours, theirs)
    ]
    one, other = (batches(rng, rows, schema) for rows in sides)
    comparison = Comparison(one, other, schema.names[:width], seed=seed)
    assert found_by(comparison, width) == expected
    assert comparison.rows == (len(ours), len(theirs))


@pytest.mark.parametrize("seed", range(20))
def test_rows_without_a_key_are_counted(seed: int) -> None:
    rng = random.Random(seed)
    schema = schema_of([])
    kinds = [value_of(rng) for _ in range(12)]
    ours = [rng.choice(kinds) for _ in range(60)]
    theirs = list(ours)
    rng.shuffle(theirs)
    for _ in range(rng.randrange(4)):
        theirs.pop()
        theirs.append(value_of(rng))
    one, other = (as_multiset(batches(rng, rows, schema), schema) for rows in (ours, theirs))
    counts = [Counter(map(named, rows)) for rows in (ours, theirs)]
    comparison = Comparison(one, other, verify.MULTISET)
    differing = {row for row in counts[0] | counts[1] if counts[0][row] != counts[1][row]}
    found: Counter[Row] = Counter()
    for some in comparison:
        for row in some.rows.to_pylist():
            found[named(tuple(row[n] for n in schema.names))] += 1
    assert found == Counter(differing)


def test_a_key_that_is_there_twice_is_extra_or_missing_once() -> None:
    once, twice = ["a", "b"], ["a", "a", "b"]
    for ours, theirs, kind in ((once, twice, "extra"), (twice, once, "missing")):
        for size in (1, 9):
            sides = [
                [pa.RecordBatch.from_pydict({"k": rows[at : at + size]})
                 for at in range(0, len(rows), size)]
                for rows in (ours, theirs)
            ]  # fmt: skip
            found = list(Comparison(sides[0], sides[1], ["k"]))
            assert [(one.kind, one.rows.to_pylist()) for one in found] == [(kind, [{"k": "a"}])]


def test_a_side_out_of_order_is_an_error() -> None:
    schema = pa.schema([("k", pa.string())])

    def side(*keys: str) -> list[pa.RecordBatch]:
        return [pa.RecordBatch.from_arrays([pa.array([k])], schema=schema) for k in keys]

    for theirs in (side("a", "B", "c"), side("c", "a", "d", "B")):
        with pytest.raises(errors.OutOfOrder, match="theirs"):
            list(Comparison(side("B", "a", "c"), theirs, ["k"]))


def test_equal_stretches_cost_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Order words are made for windows that differ, not for those that are equal (a count)."""
    made: list[int] = []
    own = keyed.key_words

    def counting(columns: Any, seed: int) -> Any:
        made.append(len(columns[0]))
        return own(columns, seed)

    monkeypatch.setattr(verify, "key_words", counting)
    numbers = np.arange(100_000)
    whole = pa.RecordBatch.from_arrays([pa.array(numbers), pa.array(numbers % 7)], ["k", "v"])
    cut = [whole.slice(at, 1000) for at in range(0, 100_000, 1000)]
    other = [whole.slice(at, 1700) for at in range(0, 100_000, 1700)]
    assert list(Comparison(cut, other, ["k"])) == []
    assert made == []
    assert len(list(Comparison(cut, [whole.slice(0, 50_000), whole.slice(50_001)], ["k"]))) == 1
    assert sum(made) <= 53_000  # the window of theirs that was not cut, and one of ours
