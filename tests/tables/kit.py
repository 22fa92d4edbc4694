"""What the tests of collections share: changes made of Python rows, and rows read back."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pytest

from headrace.model.hashing import hash64, order64
from headrace.tables import levels
from headrace.tables.collection import Collection
from headrace.tables.runs import consolidate, identity, state_batch, state_schema

Row = tuple[int, str | None]
SEED = 5
PAYLOAD = pa.schema([("c0", pa.int64()), ("c1", pa.string())])
PLAIN = state_schema(PAYLOAD)
ORDERED = state_schema(PAYLOAD, ordered=True)
HOT = 7


def change(rows: Iterable[tuple[Row, int]], schema: pa.Schema = PLAIN) -> pa.RecordBatch:
    """A change of rows with weights; the key is the first column, the order the second."""
    given = list(rows)
    c0 = pa.array([row[0] for row, _ in given], pa.int64())
    c1 = pa.array([row[1] for row, _ in given], pa.string())
    return state_batch(
        [c0, c1],
        schema,
        np.array([weight for _, weight in given], np.int64),
        k=hash64([c0], SEED),
        h=hash64([c0, c1], SEED),
        o=order64(c1)[0] if schema is ORDERED else None,
    )


def key(values: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return hash64([pa.array(list(values), pa.int64())], SEED)


def rows_of(batches: Iterable[pa.RecordBatch]) -> dict[Row, int]:
    """Rows and weights; each row once, none of weight 0."""
    found: dict[Row, int] = {}
    for batch in batches:
        for c0, c1, weight in zip(
            *(batch.column(name).to_pylist() for name in ("c0", "c1", "_w")), strict=True
        ):
            assert (c0, c1) not in found
            assert weight
            found[c0, c1] = weight
    return found


def identities(batches: Iterable[pa.RecordBatch]) -> list[tuple[int, ...]]:
    return [
        one
        for batch in batches
        for one in zip(*(column.tolist() for column in identity(batch)), strict=True)
    ]


def random_change(rng: random.Random, world: dict[Row, int], most: int) -> list[tuple[Row, int]]:
    """Inserts, deletes, repeats, negative weights; half of it on one hot key. Updates the world."""
    rows = []
    for _ in range(rng.choice([0, 1, 3, most // 4, rng.randrange(most)])):
        if world and rng.random() < 0.4:
            row = rng.choice(list(world))
            weight = -world[row] if rng.random() < 0.7 else rng.choice([-1, 1])
        else:
            text = rng.choice(["a", "", None, "x" * 40, "é\0"]) or ""
            row = (rng.choice([HOT, rng.randrange(300)]), text + str(rng.randrange(300)))
            row = (row[0], None) if rng.random() < 0.05 else row
            weight = 1
        rows.append((row, weight))
        world[row] = world.get(row, 0) + weight
        if not world[row]:
            del world[row]
    return rows


def small_levels(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Make merges happen all the time."""
    monkeypatch.setattr(levels, "SLICE", rng.choice([2, 8, 64]))
    monkeypatch.setattr(levels, "BASE", rng.choice([1, 4, 16]))
    monkeypatch.setattr(levels, "RATIO", rng.choice([2, 4, 8]))


def check(collection: Collection, world: dict[Row, int], rng: random.Random) -> None:
    """Every way of reading agrees with the world."""
    schema = collection.schema
    scanned = list(collection.scan())
    assert rows_of(scanned) == world
    assert identities(scanned) == sorted(identities(scanned))
    middle = rng.randrange(2**64)
    parts = [*collection.scan(0, middle), *collection.scan(middle + 1)]
    assert identities(parts) == identities(scanned)
    keys = [*(rng.randrange(310) for _ in range(5)), HOT]
    probed = collection.probe(key(keys))
    assert rows_of([probed]) == {row: w for row, w in world.items() if row[0] in keys}
    assert identities([probed]) == sorted(identities([probed]))
    absent = [(rng.randrange(310), f"absent{number}") for number in range(3)]
    asked = change([(row, 1) for row in {*world, *absent}], schema)
    asked = consolidate(asked)
    for row, weight in zip(rows_of([asked]), collection.weights_of(asked).tolist(), strict=True):
        assert weight == world.get(row, 0)
    for reverse in (False, True):
        batches = list(collection.ordered(int(key([HOT])[0]), reverse=reverse))
        assert rows_of(batches) == {row: w for row, w in world.items() if row[0] == HOT}
        assert identities(batches) == sorted(identities(batches), reverse=reverse)
