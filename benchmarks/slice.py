"""The slice: what it costs to keep a table equal to its source, and to prove it.

    ./run bench slice                   all of it, minutes
    ./run bench slice --only verify     measures whose name has "verify" in it
    ./run bench slice --quick           seconds: does it run, not how fast is it

Fresh: transactions of one row at 500/s, from the commit at the source until a reader of the target
sees them beside the views they have changed; all parts under `headrace run`. Against 1.5 times the
sum of the parts' own times, each measured alone at the same rate: a capture until a reader of the
log sees it, views from entry to commit, a follower from entry to the reader of the target.

Apply: a follower that is 1,000,000 updates of 100,000 keys behind, against a program by hand that
has them in memory: COPY to a temporary table, one MERGE of the newest row of each key.

Verify: a follower's table of some columns in PostgreSQL against the log's table, nothing differing,
in rows of each side a second. On the clock, where the server works beside us; and by the CPU time
of our own process, which is what one core can do.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from pyarrow import csv

import headrace as hr
from benchmarks.kit import PAIRS, Bench, arguments, progress
from headrace.derived.follower import Follower
from headrace.interfaces import Kept
from headrace.runtime.project import find_project
from headrace.runtime.status import parts_of
from headrace.runtime.verify import verify_kept
from headrace.testing.postgres import Server

ROWS, QUICK_ROWS = 1_000_000, 20_000
VERIFY_RATE = 200_000
"""Rows a second and side."""


def orders(first: int, count: int) -> pa.RecordBatch:
    """Rows as a shop has them."""
    numbers = np.arange(first, first + count)
    columns = {
        "id": numbers,
        "customer": numbers * 7 % 10_000,
        "status": pa.array(np.array(["new", "paid", "sent"])[numbers % 3]),
        "note": pa.array(numbers % 1000).cast(pa.string()),
        "amount": pa.array(numbers % 100_000, pa.int32()).cast(pa.decimal128(12, 2)),
        "at": pa.array(numbers * 1_000_000).cast(pa.timestamp("us", tz="UTC")),
        "_weight": np.ones(count, np.int64),
    }
    return pa.RecordBatch.from_pydict(columns)


def measure_verify(bench: Bench, folder: Path, quick: bool, pairs: int) -> None:
    rows = QUICK_ROWS if quick else ROWS
    columns = (
        "id bigint, customer bigint, status string, note string, amount decimal(12,2), at timestamp"
    )
    with Server() as server, hr.connect(folder / "log") as log:
        log.create_topic("orders", columns, key="id", kind="changes")
        for first in range(0, rows, 50_000):
            progress(f"slice: loading, {first:,} of {rows:,} rows")
            log.append("orders", orders(first, min(50_000, rows - first)))
        target = hr.Table(server.dsn("postgres"), "kept")
        kept = Kept("shop", "main", {"orders": "orders"}, frozenset(), target)
        with Follower(log, kept) as follower:
            follower.run("caught up")
        clock, cpu = [], []
        for number in range(pairs + 1):
            progress(f"slice: verify {rows:,} rows: {number} of {pairs}")
            began, spent = time.perf_counter(), time.process_time()
            (result,) = verify_kept(log, kept)
            assert (result.rows, result.differing) == (rows, 0)
            if number:  # the first one builds the index of the table
                clock.append(rows / (time.perf_counter() - began))
                cpu.append(rows / (time.process_time() - spent))
        progress("")
    unit, limit = "rows/s and side", VERIFY_RATE
    title = f"verify {rows:,} rows of a target"
    bench.limit(f"{title}, by the clock", clock, limit=limit, unit=unit, better="higher")
    bench.limit(f"{title}, by our CPU time", cpu, limit=limit, unit=unit, better="higher")


# --- apply ----------------------------------------------------------------------------------------

KEYS, UPDATES = 100_000, 1_000_000
COLUMNS = "id bigint, customer bigint, note string, version bigint"
BY_HAND = """
    merge into hand t using (select distinct on (id) * from changes order by id, version desc) c
    on t.id = c.id when matched then update set customer = c.customer, note = c.note,
    version = c.version when not matched then insert (id, customer, note, version)
    values (c.id, c.customer, c.note, c.version)"""


def versions(keys: np.ndarray, version: int) -> dict[str, Any]:
    """The rows of keys at a version."""
    return {
        "id": keys,
        "customer": keys % 1000,
        "note": pa.array(keys * 31 + version).cast(pa.string()),
        "version": np.full(len(keys), version),
    }


def measure_apply(bench: Bench, folder: Path, quick: bool, pairs: int) -> None:
    keys, updates = (2000, 20_000) if quick else (KEYS, UPDATES)
    each = 10_000 if not quick else 1000
    everybody = np.arange(keys)
    version = 0
    with Server() as server, hr.connect(folder / "apply") as log, server.connect() as hand:
        log.create_topic("rows", COLUMNS, key="id", kind="changes")
        first = versions(everybody, 0) | {"_weight": np.ones(keys, np.int64)}
        log.append("rows", pa.RecordBatch.from_pydict(first))
        kept = Kept(
            "p", "main", {"rows": "rows"}, frozenset(), hr.Table(server.dsn(), "kept")
        )  # fmt: skip
        with Follower(log, kept) as follower:
            follower.run("caught up")
        hand.execute("create table hand (like kept.rows including all)")
        hand.execute("insert into hand select * from kept.rows")

        def ours() -> float:
            began = time.perf_counter()
            with Follower(log, kept) as follower:
                follower.run("caught up")
            return updates / (time.perf_counter() - began)

        def by_hand() -> float:
            began = time.perf_counter()
            with hand.transaction(), hand.cursor() as cursor:
                hand.execute("create temp table changes (like hand) on commit drop")
                names = "id, customer, note, version"
                with cursor.copy(f"copy changes ({names}) from stdin (format csv)") as copy:
                    for table in newest:
                        text = pa.BufferOutputStream()
                        csv.write_csv(table, text, csv.WriteOptions(include_header=False))
                        copy.write(memoryview(text.getvalue()))
                cursor.execute(BY_HAND)
            return updates / (time.perf_counter() - began)

        mine: list[float] = []
        theirs: list[float] = []
        for pair in range(pairs):
            progress(f"slice: apply {updates:,} changes: {pair} of {pairs}")
            newest: list[pa.Table] = []
            for _ in range(updates // keys):
                for at in range(0, keys, each):
                    some = everybody[at : at + each]
                    old, new = versions(some, version), versions(some, version + 1)
                    newest.append(pa.table(new))
                    both = {name: pa.concat_arrays([pa.array(old[name]), pa.array(new[name])])
                            for name in old}  # fmt: skip
                    weight = np.repeat([-1, 1], len(some))
                    log.append("rows", pa.RecordBatch.from_pydict(both | {"_weight": weight}))
                version += 1
            arms = [(ours, mine), (by_hand, theirs)]
            for arm, values in arms if pair % 2 else reversed(arms):
                values.append(arm())
            sums = [hand.execute(f"select sum(version), sum(note::bigint) from {table}").fetchone()
                    for table in ("hand", "kept.rows")]  # fmt: skip
            assert sums[0] == sums[1]
        progress("")
    bench.add(
        f"apply {updates:,} updates of {keys:,} keys", mine, theirs, "COPY + MERGE by hand",
        "updates/s", "higher", 0.5,
    )  # fmt: skip


# --- fresh ----------------------------------------------------------------------------------------

RATE, WARM = 500, 2
SALES = "create table sales(id bigint primary key, customer int, amount bigint, at timestamptz)"
INSERT = "insert into sales values (%s, %s, %s, clock_timestamp())"
PIPELINE = """
import headrace as hr
from pyspark.sql import functions as F

p = hr.Pipeline("p")
p.table("sales", of="{topic}")
"""
VIEWS = (
    "",
    """
@p.view(key="customer")
def spent(sales):
    return sales.groupBy("customer").agg(F.sum("amount").alias("spent"), F.count("*").alias("n"))
""",
    """
@p.view(key="class")
def classes(spent):
    return spent.groupBy(F.expr("spent div 1000").alias("class")).agg(F.count("*").alias("n"))
""",
)


@contextlib.contextmanager
def running(folder: Path, toml: str, pipeline: str = "") -> Iterator[None]:
    """`headrace run` of a project, until all its parts are ready."""
    folder.mkdir(parents=True, exist_ok=True)
    files = 'pipelines = ["pipeline.py"]\n' if pipeline else ""
    (folder / "headrace.toml").write_text(f"{files}{toml}\n[page]\nport = false\n")
    (folder / "pipeline.py").write_text(pipeline)
    command = [sys.executable, "-m", "headrace", "run", "--project", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        project, deadline = find_project(folder), time.monotonic() + 300
        wanted = 1 + bool(pipeline) * ("keep(" in pipeline) + ("capture" in toml) * bool(pipeline)
        while True:
            parts = parts_of(project)["parts"]
            if len(parts) >= wanted and all(part["ready"] for part in parts):
                break
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"the project does not run: {parts}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def paced(write: Callable[[int], None], first: int, count: int) -> None:
    """Write at the rate; what is late is made up for."""
    began = time.perf_counter()
    for number in range(count):
        time.sleep(max(0.0, began + number / RATE - time.perf_counter()))
        write(first + number)


class Fresh:
    """Times from a write to its being seen, in milliseconds, of one arrangement of parts."""

    def __init__(self, folder: Path, server: Server, count: int) -> None:
        self.folder, self.server, self.count = folder, server, count
        self.seen: dict[int, float] = {}
        self.sent: dict[int, float] = {}
        self._over = threading.Event()

    def times(
        self, write: Callable[[int], None], look: Callable[[int], Iterable[int]]
    ) -> list[float]:
        """Warm up, then measure; `look(newest)` gives the numbers above that are there."""

        def read() -> None:
            newest = 0
            while not self._over.is_set():
                for number in look(newest):
                    self.seen[number] = time.perf_counter()
                    newest = max(newest, number)

        def sent(number: int) -> None:
            write(number)
            self.sent[number] = time.perf_counter()

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for warm in range(WARM + 1):  # the first builds the views, then compilers get to work
                paced(sent, 1 + warm * self.count, self.count)
                deadline = time.monotonic() + 120
                while len(self.seen) < len(self.sent) and time.monotonic() < deadline:
                    time.sleep(0.05)
        finally:
            self._over.set()
            reader.join()
        return [1e3 * (self.seen[n] - self.sent[n]) for n in list(self.sent)[-self.count :]]

    def into_source(self, number: int) -> None:
        self.source.execute(INSERT, (number, number % 100, number % 977))

    def into_log(self, number: int) -> None:
        row = {"id": number, "customer": number % 100, "amount": number % 977, "_weight": 1}
        self.log.append("sales", [row])

    def in_target(self, newest: int) -> list[int]:
        time.sleep(0.003)
        try:
            found = self.target.execute("select id from kept.sales where id > %s", [newest])
        except psycopg.errors.UndefinedTable:  # not loaded yet
            return []
        return [row[0] for row in found.fetchall()]

    def whole(self, depth: int) -> list[float]:
        """Everything."""
        toml = f'[capture.src]\ndsn = "{self.server.dsn("source")}"\ntables = ["public.sales"]\n'
        names = ", ".join(["'sales'", "'spent'", "'classes'"][: 1 + depth])
        keep = f'p.keep({names}, in_=hr.Table("{self.server.dsn("target")}", schema="kept"))\n'
        text = PIPELINE.format(topic="src.public.sales") + "".join(VIEWS[: depth + 1]) + keep
        with (
            self.server.connect("source") as self.source,
            self.server.connect("target") as self.target,
        ):
            self.source.execute(SALES)
            with running(self.folder / "whole", toml, text):
                return self.times(self.into_source, self.in_target)

    def capture(self) -> list[float]:
        """A capture alone."""
        toml = f'[capture.src]\ndsn = "{self.server.dsn("source")}"\ntables = ["public.sales"]\n'
        with self.server.connect("source") as self.source:
            self.source.execute(SALES)
            with (
                running(self.folder / "capture", toml),
                hr.connect(self.folder / "capture" / "data") as log,
            ):
                reading = log.read("src.public.sales", follow=True)

                def look(_: int) -> Iterable[int]:
                    batch = reading.poll()
                    if batch is not None:
                        return list(batch.data.column("id").to_pylist())
                    time.sleep(0.002)
                    return []

                return self.times(self.into_source, look)

    def views(self, depth: int) -> list[float]:
        """Views alone."""
        text = PIPELINE.format(topic="sales") + "".join(VIEWS[: depth + 1])
        with hr.connect(self.folder / "views" / "data") as self.log:
            self.log.create_topic("sales", "id bigint, customer int, amount bigint",
                                  key="id", kind="changes")  # fmt: skip
            positions: dict[int, int] = {}
            with running(self.folder / "views", "", text):
                reading: Any = None

                def write(number: int) -> None:
                    self.into_log(number)
                    positions[self.log.position] = number

                def look(_: int) -> Iterable[int]:
                    nonlocal reading
                    if "p._commits" not in {one.name for one in self.log.topics()}:
                        time.sleep(0.05)
                        return []
                    reading = reading or self.log.read("p._commits", follow=True)
                    batch = reading.poll()
                    if batch is None:
                        time.sleep(0.002)
                        return []
                    through = batch.data.column("through").to_pylist()[-1]
                    there = [at for at in list(positions) if at <= through]
                    return [positions.pop(at) for at in there]

                return self.times(write, look)

    def follower(self) -> list[float]:
        """A follower alone."""
        keep = f'p.keep("sales", in_=hr.Table("{self.server.dsn("target")}", schema="kept"))\n'
        with (
            hr.connect(self.folder / "follower" / "data") as self.log,
            self.server.connect("target") as self.target,
        ):
            self.log.create_topic("sales", "id bigint, customer int, amount bigint",
                                  key="id", kind="changes")  # fmt: skip
            with running(self.folder / "follower", "", PIPELINE.format(topic="sales") + keep):
                return self.times(self.into_log, self.in_target)


def measure_fresh(bench: Bench, folder: Path, quick: bool, pairs: int) -> None:
    del pairs  # a run has thousands of transactions
    count = 200 if quick else 5000
    numbers = itertools.count()

    def timed(measure: Callable[[Fresh], list[float]], what: str) -> list[float]:
        progress(f"slice: fresh, {what}")
        with Server() as server:
            server.create_database("source")
            server.create_database("target")
            return sorted(measure(Fresh(folder / f"fresh{next(numbers)}", server, count)))

    middle = {
        "capture": statistics.median(timed(Fresh.capture, "capture alone")),
        "follower": statistics.median(timed(Fresh.follower, "follower alone")),
    }
    for depth, title in ((1, "one operator deep"), (2, "two operators deep")):
        views = statistics.median(timed(lambda one: one.views(depth), f"views alone, {title}"))  # noqa: B023
        whole = timed(lambda one: one.whole(depth), f"all parts, {title}")  # noqa: B023
        parts = {**middle, "views": views}
        told = ", ".join(f"{name} {value:.0f}" for name, value in parts.items())
        bench.add(
            f"commit to visible, {title}, p50", [statistics.median(whole)],
            [1.5 * sum(parts.values())], f"1.5x the parts' own times ({told})", "ms", "lower", 1.0,
        )  # fmt: skip
        p99 = whole[int(0.99 * (len(whole) - 1))]
        bench.add(f"commit to visible, {title}, p99", [p99], [p99], "itself", "ms", "lower")
        bench.limit(
            f"commit to visible, {title}, p50 (aim)", statistics.median(whole), limit=500.0,
            unit="ms", better="lower",
        )  # fmt: skip
    progress("")


MEASURES: dict[str, Callable[[Bench, Path, bool, int], None]] = {
    "fresh": measure_fresh,
    "apply": measure_apply,
    "verify": measure_verify,
}


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments("slice")
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds")
    parser.add_argument("--only", default="", help="measures whose name contains this")
    parser.add_argument("--folder", default=None, help="where to write; default: a temporary one")
    options = parser.parse_args(given)
    if options.pairs < PAIRS:
        parser.error(f"--pairs must be at least {PAIRS}")
    bench = Bench("slice")
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir=options.folder))
    try:
        for name, measure in MEASURES.items():
            if options.only in name:
                measure(bench, folder, options.quick, options.pairs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return bench.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
