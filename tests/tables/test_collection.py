"""Collections against a plain dict {row: weight}, over random histories with merges all the time.

Catches: rows lost, doubled or with a wrong weight by sorting, merging, cutting (also within one hot
key), draining, searching, storing and loading; results out of order; a repeat that differs; work
that grows with the state. Cannot catch: hash collisions (2^-128), real speed, concurrent threads.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.hashing import hash64
from headrace.tables import levels
from headrace.tables.collection import Collection
from headrace.tables.packs import Packs, Ref
from headrace.tables.runs import consolidate, consolidate_runs, sorted_order, state_batch
from tests.tables.kit import (
    HOT,
    ORDERED,
    PLAIN,
    Row,
    change,
    check,
    identities,
    key,
    random_change,
    rows_of,
    small_levels,
)


@pytest.fixture(autouse=True)
def without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power cuts, and a real disk is slow."""
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.parametrize("seed", range(6))
def test_a_collection_is_its_changes_added_up(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    small_levels(monkeypatch, rng)
    schema = ORDERED if seed % 2 else PLAIN
    packs = Packs(str(tmp_path / "packs"), cached=rng.choice([3, 4096]))
    collection, world = Collection(packs, schema), dict[Row, int]()
    check(collection, world, rng)
    for number in range(16):
        before, was = collection, dict(world)
        attempt = packs.attempt(number)
        collection = collection.plus(change(random_change(rng, world, 200), schema), attempt)
        manifest = collection.to_manifest(attempt)
        if rng.random() < 0.3:
            check(collection, world, rng)  # readable before it is written
        attempt.finish()
        if rng.random() < 0.5:
            collection = Collection.from_manifest(manifest, packs, schema)
        check(collection, world, rng)
        if rng.random() < 0.2:
            check(before, was, rng)  # a value: what was, stays


@pytest.mark.parametrize("seed", range(8))
def test_a_collection_that_is_loaded_is_its_changes_added_up(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    small_levels(monkeypatch, rng)
    monkeypatch.setattr(levels, "FAN", rng.choice([2, 3]))
    schema = ORDERED if seed % 2 else PLAIN
    packs = Packs(str(tmp_path / "packs"), may_hold=rng.choice([0, 5_000, 1 << 20]))
    collection, world = Collection(packs, schema), dict[Row, int]()
    for number in range(24):
        attempt = packs.attempt(number)
        collection = collection.loaded(change(random_change(rng, world, 200), schema), attempt)
        attempt.finish()
        check(collection, world, rng)
        if number % 8 == 7:
            attempt = packs.attempt(number)
            collection = collection.settled(attempt)
            manifest = collection.to_manifest(attempt)
            attempt.finish()
            assert packs.held == 0
            collection = Collection.from_manifest(manifest, packs, schema)
            check(collection, world, rng)


def test_a_repeat_of_a_batch_gives_the_same_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    small_levels(monkeypatch, rng)
    packs = Packs(str(tmp_path))
    collection, world = Collection(packs, PLAIN), dict[Row, int]()
    for number in range(30):
        rows = random_change(rng, world, 100)
        first = packs.attempt(number, 1)
        one = collection.plus(change(rows), first)
        first.finish()
        rng.shuffle(rows)
        second = packs.attempt(number, 2)
        two = collection.plus(change(rows), second)
        second.finish()
        assert [len(run.slices) for run in one.runs] == [len(run.slices) for run in two.runs]
        for a, b in zip(pieces(one), pieces(two), strict=True):
            assert a == b  # two attempts, two names, the same content
        collection = one


def pieces(collection: Collection) -> list[tuple[object, ...]]:
    return [
        (one.lo, one.hi, one.first, collection.packs.piece(one.ref).batch)
        for run in collection.runs
        for one in run.slices
    ]


WEIGHTED = st.lists(
    st.tuples(
        st.tuples(st.integers(0, 3), st.sampled_from(["", "a", "b", None])), st.integers(-2, 2)
    )
)


@settings(deadline=None)
@given(WEIGHTED, WEIGHTED, st.booleans())
def test_consolidate_and_merge_add_up(
    a: list[tuple[Row, int]], b: list[tuple[Row, int]], ordered: bool
) -> None:
    schema = ORDERED if ordered else PLAIN
    world: dict[Row, int] = {}
    for row, weight in a + b:
        world[row] = world.get(row, 0) + weight
    world = {row: weight for row, weight in world.items() if weight}
    merged = consolidate_runs([consolidate(change(a, schema)), consolidate(change(b, schema))])
    for batch in (merged, consolidate(change(a + b, schema))):
        assert rows_of([batch]) == world
        assert identities([batch]) == sorted(identities([batch]))


def test_a_bulk_load_is_one_run_of_several_pieces_written_once(tmp_path: Path) -> None:
    packs = Packs(str(tmp_path))
    rows = 5 * levels.SLICE + 17
    numbers = np.arange(rows)
    batch = _numbers(numbers)
    attempt = packs.attempt(1)
    collection = Collection(packs, PLAIN).plus(batch, attempt)
    attempt.finish()
    assert [run.rows for run in collection.runs] == [rows]
    assert [len(run.slices) for run in collection.runs] == [6]
    assert attempt.bytes < 1.1 * batch.nbytes
    assert sum(part.num_rows for part in collection.scan()) == rows
    assert collection.probe(key([5, rows + 1])).column("c0").to_pylist() == [5]


def _numbers(numbers: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.RecordBatch:
    c0, c1 = pa.array(numbers), pa.array(numbers).cast(pa.string())
    weights = np.ones(len(numbers), np.int64)
    return state_batch([c0, c1], PLAIN, weights, k=hash64([c0], 5), h=hash64([c0, c1], 5))


@pytest.mark.parametrize("size", [1, 9])
def test_the_smallest_and_the_largest_key_are_keys_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(levels, "SLICE", 2)
    packs = Packs(str(tmp_path))
    keys = np.repeat(np.array([0, 5, 2**64 - 2, 2**64 - 1], np.uint64), size)
    numbers = np.arange(len(keys))
    payload = [pa.array(numbers), pa.array(numbers).cast(pa.string())]
    words = numbers.astype(np.uint64)
    weights = np.ones(len(keys), np.int64)
    batch = state_batch(payload, ORDERED, weights, k=keys, o=words, h=words)
    collection = Collection(packs, ORDERED).plus(batch, packs.attempt(1))
    for wanted in (0, 5, 2**64 - 2, 2**64 - 1):
        found = collection.probe(np.array([wanted], np.uint64))
        assert found.column("c0").to_pylist() == numbers[keys == wanted].tolist()
        assert pa.Table.from_batches(collection.ordered(wanted)).num_rows == size
        assert sum(part.num_rows for part in collection.scan(wanted, wanted)) == size


@pytest.mark.parametrize("hot", [False, True])
def test_small_changes_write_a_bounded_number_of_rows_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hot: bool
) -> None:
    """Amortised: (1 + RATIO) rows for a row and level; and no single batch does it all."""
    for name, value in (("SLICE", 256), ("BASE", 64), ("RATIO", 4)):
        monkeypatch.setattr(levels, name, value)
    packs = Packs(str(tmp_path))
    attempt = packs.attempt(0)
    start = 40_000
    load = [((HOT if hot and n % 2 else n, str(n)), 1) for n in range(start)]
    collection = Collection(packs, PLAIN).plus(change(load), attempt)
    attempt.finish()
    written = []
    for number in range(400):
        attempt = packs.attempt(number)
        news = [((HOT if hot and n % 2 else n, str(n)), 1) for n in range(start, start + 20)]
        start += 20
        added: list[int] = []
        monkeypatch.setattr(attempt, "add", _counting(attempt.add, added))
        collection = collection.plus(change(news), attempt)
        attempt.finish()
        written.append(sum(added))
    depth = len(collection._levels)
    assert sum(written) <= 400 * 20 * (1 + levels.RATIO) * depth
    assert max(written) <= 12 * levels.SLICE
    assert len(collection.runs) <= 2 * depth


def _counting(add: Callable[[pa.RecordBatch], Ref], added: list[int]) -> object:
    def counted(batch: pa.RecordBatch) -> Ref:
        added.append(batch.num_rows)
        return add(batch)

    return counted


def test_reading_the_least_rows_of_a_hot_key_opens_few_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "SLICE", 64)
    packs = Packs(str(tmp_path))
    attempt = packs.attempt(0)
    rows = [((HOT, f"{n:05}"), 1) for n in range(5_000)]
    collection = Collection(packs, ORDERED).plus(change(rows, ORDERED), attempt)
    attempt.finish()
    fresh = Packs(str(tmp_path))
    collection = Collection(fresh, ORDERED, collection._levels)
    for reverse, text in ((False, "00000"), (True, "04999")):
        first = next(collection.ordered(int(key([HOT])[0]), reverse=reverse))
        assert first.column("c1")[0].as_py() == text
    assert len(fresh._pieces) <= 4


def words(chance: np.random.Generator, rows: int) -> list[npt.NDArray[np.uint64]]:
    """Words of all kinds."""
    any_ = chance.integers(0, 2**64, rows, dtype=np.uint64)
    few = chance.integers(0, 9, (2, rows)).astype(np.uint64)
    return [
        any_,
        any_[chance.integers(0, rows // 50 + 1, rows)],
        few[0],
        np.full(rows, 2**64 - 1, np.uint64),
        few[0] << np.uint64(60) | few[1],  # many are equal in all bits that are sorted by first
        np.sort(any_),
    ]


@pytest.mark.parametrize("rows", [1, 100, 5_000, 70_000])
def test_words_are_sorted_whatever_they_look_like(rows: int) -> None:
    chance = np.random.default_rng(rows)
    for first in words(chance, rows):
        for second in words(chance, rows):
            columns = [first, second]
            order = sorted_order(columns)
            found = columns if order is None else [column[order] for column in columns]
            right = np.lexsort(columns[::-1])
            for column, one in zip(columns, found, strict=True):
                assert (one == column[right]).all()
