"""Tables and the views' state: does a small change cost the same, however much there is?

The arms of the first measures are the same work on 10^5 rows and on 10^6 or 10^7: met means within
a factor of two. A step is what a view's operator does with a change of 100 rows: hash, probe 100
keys, take the change in (with the merges that are due), describe all in a manifest, write and sync.
Bulk load and scan stand against writing and reading the same bytes, which sort and check nothing.

    ./run bench tables                  all of it, minutes; needs 6 GB on the disk
    ./run bench tables --only probe     measures whose name has "probe" in it
    ./run bench tables --quick          seconds: does it run, not how fast is it
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

import headrace as hr
from benchmarks.kit import PAIRS, Bench, arguments, progress
from headrace.model.hashing import hash64
from headrace.tables.collection import Collection
from headrace.tables.packs import Packs
from headrace.tables.runs import state_batch, state_schema

SIZES = (100_000, 1_000_000, 10_000_000)
QUICK = (1_000, 10_000, 50_000)
STATE = state_schema(pa.schema([("c0", pa.int64()), ("c1", pa.int64()), ("c2", pa.string())]))
BATCH = 100
SEED = 42
Numbers = npt.NDArray[np.int64]


def change(numbers: Numbers, weights: Numbers, hot: bool = False) -> pa.RecordBatch:
    """Rows of a join's side; with `hot`, every second one has the same key."""
    keys = np.where(numbers % 2 == 0, 7, numbers) if hot else numbers
    c0, c1 = pa.array(keys), pa.array(numbers)
    payload = [c0, c1, c1.cast(pa.string())]
    return state_batch(payload, STATE, weights, k=hash64([c0], SEED), h=hash64(payload, SEED))


class State:
    """A collection of a size, and small changes to it."""

    def __init__(self, folder: Path, rows: int, *, hot: bool = False) -> None:
        self.packs = Packs(str(folder))
        self.rows = self.next = rows
        self.hot = hot
        self.number = self.bytes = 0
        self.chance = np.random.default_rng(rows)
        attempt = self.packs.attempt(0)
        load = change(np.arange(rows), np.ones(rows, np.int64), hot)
        self.collection = Collection(self.packs, STATE).plus(load, attempt)
        attempt.finish()

    def keys(self) -> npt.NDArray[np.uint64]:
        numbers = self.chance.integers(0, self.rows, BATCH) | 1  # not the hot ones
        return hash64([pa.array(numbers)], SEED)

    def probe(self, times: int) -> float:
        """Milliseconds for 100 keys."""
        asked = [self.keys() for _ in range(times)]
        start = time.perf_counter()
        for keys in asked:
            self.collection.probe(keys)
        return (time.perf_counter() - start) * 1000 / times

    def steps(self, times: int) -> float:
        """Milliseconds for a change of 100 rows: 30 deleted, 70 new; merges and syncs included."""
        start = time.perf_counter()
        for _ in range(times):
            self.number += 1
            old = self.chance.integers(0, self.rows, 30)
            new = np.arange(self.next, self.next + 70)
            self.next += 70
            weights = np.concatenate([np.full(30, -1), np.ones(70)]).astype(np.int64)
            news = change(np.concatenate([old, new]), weights, self.hot)
            self.collection.probe(self.keys())
            attempt = self.packs.attempt(self.number)
            self.collection = self.collection.plus(news, attempt)
            attempt.add_json(self.collection.to_manifest(attempt))
            attempt.finish()
            self.bytes += attempt.bytes
        return (time.perf_counter() - start) * 1000 / times


def measure_state(bench: Bench, folder: Path, sizes: Sequence[int], pairs: int, only: str) -> None:
    if not any(only in name for name in ("probe", "step", "load and scan", "half on one key")):
        return
    for hot in (False, True):
        name = "half on one key, " if hot else ""
        if hot and only and only not in name:
            continue
        states = []
        for size in sizes:
            progress(f"tables: loading {size:,} rows of state")
            states.append(State(folder / f"state-{size}-{hot}", size, hot=hot))
        for state in states:  # so that every size has runs of all levels
            state.steps(50)
        small = states[0]
        for state in states[1:]:
            title = f"{name}{state.rows:,} rows of state against {small.rows:,}"
            if only in "probe":
                bench.compare(
                    f"probe 100 keys, {title}",
                    ours=partial(state.probe, 50),
                    other=partial(small.probe, 50),
                    better="lower",
                    goal=0.5,
                    other_name=f"{small.rows:,} rows",
                    unit="ms",
                    pairs=pairs,
                )
            if only in "step":
                bench.compare(
                    f"step of 100 rows, {title}",
                    ours=partial(state.steps, 48),
                    other=partial(small.steps, 48),
                    better="lower",
                    goal=0.5,
                    other_name=f"{small.rows:,} rows",
                    unit="ms",
                    pairs=pairs,
                )
                bench.count(
                    f"bytes written a step, {title}",
                    state.bytes / state.number,
                    other=small.bytes / small.number,
                    other_name=f"{small.rows:,} rows",
                    unit="bytes",
                )
        largest = states[-1]
        if not hot and only in "load and scan":
            measure_load_and_scan(bench, folder, largest, pairs)
        for state in states:
            shutil.rmtree(state.packs.folder)


def measure_load_and_scan(bench: Bench, folder: Path, state: State, pairs: int) -> None:
    load = change(np.arange(state.rows), np.ones(state.rows, np.int64))
    packs = Packs(str(folder / "load"))

    def ours() -> float:
        attempt = packs.attempt(1)
        start = time.perf_counter()
        Collection(packs, STATE).plus(load, attempt)
        attempt.finish()
        seconds = time.perf_counter() - start
        shutil.rmtree(packs.folder)
        packs._made = False
        return seconds

    def floor() -> float:
        path = folder / "floor"
        start = time.perf_counter()
        with open(path, "wb") as file, pa.ipc.new_stream(file, load.schema) as stream:
            stream.write_batch(load)
        with open(path, "rb") as written:
            os.fdatasync(written.fileno())
        seconds = time.perf_counter() - start
        path.unlink()
        return seconds

    bench.compare(
        f"bulk load of {state.rows:,} rows",
        ours=ours,
        other=floor,
        other_name="writing the same rows, unsorted, and one fdatasync",
        unit="s",
        better="lower",
        pairs=pairs,
    )
    names = sorted(state.collection.pack_names())

    def scan() -> float:
        start = time.perf_counter()
        for _ in state.collection.scan():
            pass
        return time.perf_counter() - start

    def read() -> float:
        start = time.perf_counter()
        for name in names:
            xxhash.xxh3_64_intdigest(Path(state.packs.path(name)).read_bytes())
        return time.perf_counter() - start

    bench.compare(
        f"scan of {state.rows:,} rows",
        ours=scan,
        other=read,
        other_name="reading the files and their checksums",
        unit="s",
        better="lower",
        pairs=pairs,
    )


class Keyed:
    """A log with a keyed topic of a size."""

    def __init__(self, folder: Path, rows: int, *, text: bool) -> None:
        self.log = hr.connect(folder)
        self.text, self.rows = text, rows
        kind = "string" if text else "bigint"
        self.log.create_topic("t", f"k {kind}, v bigint, s string", key="k", kind="changes")
        for start in range(0, rows, 500_000):
            self.log.append("t", self.batch(np.arange(start, min(rows, start + 500_000))))
        self.chance = np.random.default_rng(rows)
        start_time = time.perf_counter()
        self.log.table("t").get([None])
        self.build_seconds = time.perf_counter() - start_time

    def names(self, numbers: Numbers) -> pa.Array:
        column = pa.array(numbers)
        if not self.text:
            return column
        prefix = pa.scalar("https://shop.example.org/articles/")
        return pa.compute.binary_join_element_wise(prefix, column.cast(pa.string()), "")

    def batch(self, numbers: Numbers) -> pa.Table:
        column = pa.array(numbers)
        return pa.table({"k": self.names(numbers), "v": column, "s": column.cast(pa.string())})

    def get(self, times: int) -> float:
        """Milliseconds for 100 keys at the newest position, after a change of 100 rows each."""
        table = self.log.table("t")
        spent = 0.0
        for _ in range(times):
            self.log.append("t", self.batch(self.chance.integers(0, self.rows, BATCH)))
            keys = self.names(self.chance.integers(0, self.rows, BATCH))
            start = time.perf_counter()
            found = table.get(keys)
            spent += time.perf_counter() - start
            assert found.num_rows == BATCH
        return spent * 1000 / times


def measure_keyed(bench: Bench, folder: Path, sizes: Sequence[int], pairs: int, only: str) -> None:
    if only not in "get of string keys of integer keys":
        return
    for text in (False, True):
        keyed = []
        for size in sizes[:2] if text else sizes:
            progress(f"tables: building a table of {size:,} rows")
            keyed.append(Keyed(folder / f"log-{size}-{text}", size, text=text))
        small = keyed[0]
        for one in keyed[1:]:
            kind = "string" if text else "integer"
            bench.compare(
                f"get of 100 {kind} keys and upkeep of 100 rows, table of {one.rows:,} rows",
                ours=partial(one.get, 20),
                other=partial(small.get, 20),
                other_name=f"{small.rows:,} rows",
                unit="ms",
                better="lower",
                goal=0.5,
                pairs=pairs,
            )
            print(f"built {one.rows:,} rows in {one.build_seconds:.1f} s", file=sys.stderr)
        for one in keyed:
            one.log.close()
            shutil.rmtree(one.log.path)


def measures() -> Iterator[Callable[[Bench, Path, Sequence[int], int, str], None]]:
    yield measure_state
    yield measure_keyed


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments("tables")
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds")
    parser.add_argument("--only", default="", help="measures whose name contains this")
    parser.add_argument("--folder", default=None, help="where to write; default: a temporary one")
    options = parser.parse_args(given)
    if options.pairs < PAIRS:
        parser.error(f"--pairs must be at least {PAIRS}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and tidy up on the way
    bench = Bench("tables")
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir=options.folder))
    try:
        for measure in measures():
            sizes = QUICK if options.quick else SIZES
            measure(bench, folder, sizes, options.pairs, options.only)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return bench.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
