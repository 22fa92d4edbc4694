"""Views: how fresh they are, what a small change costs, and what a full recomputation would.

    ./run bench views                    all of it; needs 4 GB on the disk and some minutes
    ./run bench views --only fresh       measures whose name has "fresh" in it
    ./run bench views --quick            does it run, not how fast is it

CPU is that of this process, its JVM and their workers together, in seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import headrace as hr
from benchmarks.kit import Bench, arguments, progress
from headrace.pipelines.views.algebra import Aggregate, Call, Join, Node, Scan
from headrace.pipelines.views.engine import Engine
from headrace.pipelines.views.run import Runner
from headrace.tables.packs import Packs

CUSTOMERS = 10_000
ENTRY_ROWS = 100
"""Rows in an appended entry: 1,000 changes a second are ten of them."""


@dataclass
class Plan:
    """How much to measure."""

    bench: Bench
    folder: Path
    quick: bool
    only: str

    def wanted(self, measure: str) -> bool:
        return self.only.lower() in measure.lower()


# -- data ----------


def orders(first: int, rows: int, seed: int, hot: bool = False) -> pa.RecordBatch:
    chance = np.random.default_rng(seed)
    customer = chance.integers(0, CUSTOMERS, rows)
    if hot:
        customer[chance.random(rows) < 0.5] = 7
    return pa.record_batch(
        {
            "id": pa.array(np.arange(first, first + rows)),
            "customer": pa.array(customer),
            "amount": pa.array(chance.integers(1, 10_000, rows) / 4),
        }
    )


def customers() -> pa.RecordBatch:
    return pa.record_batch(
        {
            "customer": pa.array(np.arange(CUSTOMERS)),
            "country": pa.array([f"country {i % 100}" for i in range(CUSTOMERS)]),
        }
    )


def shop(log: Any, rows: int) -> None:
    log.create_topic("orders", "id bigint, customer bigint, amount double", kind="changes")
    log.create_topic("customers", "customer bigint, country string", kind="changes")
    log.append("customers", customers())
    for first in range(0, rows, 500_000):
        log.append("orders", orders(first, min(500_000, rows - first), first))


def pipeline(operators: int, name: str = "shop") -> hr.Pipeline:
    """One to three operators with state, one above the other."""
    from pyspark.sql import functions as F

    made = hr.Pipeline(name)
    made.table("orders")
    made.table("customers")
    sums = (F.sum("amount").alias("revenue"), F.count("*").alias("orders"))
    if operators == 1:
        made.view("spent")(lambda orders: orders.groupBy("customer").agg(*sums))
        return made
    made.view("revenue")(
        lambda orders, customers: orders.join(customers, "customer").groupBy("country").agg(*sums)
    )
    if operators == 3:
        made.view("total")(lambda revenue: revenue.agg(F.sum("revenue").alias("t")))
    return made


# -- CPU of this process and everything below it ----------


def tree_cpu() -> float:
    """CPU seconds of this process and its living descendants."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(name)] = int(fields[1])
            ticks[int(name)] = sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def cpu(into: list[float]) -> Iterator[None]:
    before = tree_cpu()
    yield
    into.append(tree_cpu() - before)


# -- freshness ----------


def feed(path: str, pipe: Connection, seconds: float) -> None:
    """Append 1,000 rows a second; send back when each entry was appended, and its position."""
    with hr.connect(path) as log:
        first = 100_000_000
        batches = [orders(first + i * ENTRY_ROWS, ENTRY_ROWS, i) for i in range(200)]
        pipe.recv()
        start = time.monotonic()
        sent = []
        number = 0
        while (now := time.monotonic()) < start + seconds:
            due = start + number / 10
            if now < due:
                time.sleep(due - now)
            sent.append((time.monotonic(), log.append("orders", batches[number % 200]).position))
            number += 1
        pipe.send(sent)


def fresh(plan: Plan) -> None:
    goals = {1: 0.15, 2: 0.3, 3: 0.5}
    for operators, limit in goals.items():
        name = f"fresh: append to committed view, {operators} stateful operators, p50"
        if not plan.wanted(name):
            continue
        path = plan.folder / f"fresh-{operators}"
        with hr.connect(path) as log:
            shop(log, 1_000 if plan.quick else 1_000_000)
            ages, jobs, batches = _ages(log, operators, 2 if plan.quick else 20)
        plan.bench.limit(name, ages, limit=limit, unit="s", better="lower")
        plan.bench.count(
            f"fresh: Spark jobs a batch, {operators} stateful operators",
            jobs / max(1, batches),
            other=0,
            other_name="none",
        )
        shutil.rmtree(path)


def _ages(log: Any, operators: int, seconds: float) -> tuple[list[float], int, int]:
    from headrace.pipelines.spark import session

    spark = session()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    feeder = context.Process(target=feed, args=(log.path, theirs, seconds), daemon=True)
    feeder.start()
    with Runner(pipeline(operators), log, spark) as runner:
        runner.run("caught up")
        for i in range(20):  # warm
            log.append("orders", orders(200_000_000 + i * ENTRY_ROWS, ENTRY_ROWS, i))
            runner.run("caught up")
        context_id = f"bench-{operators}"
        spark.sparkContext.setJobGroup(context_id, "fresh")
        ours.send("go")
        done: list[tuple[float, int]] = []
        commits = runner.commits
        reached = runner.run("caught up")
        while not ours.poll():
            with contextlib.suppress(hr.errors.WaitTimeout):
                log.wait(reached + 1, timeout=0.5)
            reached = runner.run("caught up")
            done.append((time.monotonic(), reached))
        sent = ours.recv()
        jobs = len(spark.sparkContext.statusTracker().getJobIdsForGroup(context_id))
        batches = runner.commits - commits
    feeder.join(10)
    ages = []
    at = 0
    for when, position in sent:
        while at < len(done) and done[at][1] < position:
            at += 1
        if at < len(done):
            ages.append(done[at][0] - when)
    return ages, jobs, batches


# -- the cost of a small change, by size of the state ----------


def scan(name: str, *types: pa.DataType) -> Scan:
    columns = pa.schema([(f"c{i}", t) for i, t in enumerate(types)])
    return Scan(name=name, columns=columns, **PLAIN)


PLAIN: dict[str, Any] = {"names": (), "fingerprint": "", "origin": ""}
SOURCES = {"orders": "o", "customers": "c"}
LEFT = scan("orders", pa.int64(), pa.int64(), pa.float64())
RIGHT = scan("customers", pa.int64(), pa.string())


def schema_of(*types: pa.DataType) -> pa.Schema:
    return pa.schema([(f"c{i}", t) for i, t in enumerate(types)])


def operators() -> dict[str, Node]:
    """The operators whose cost is measured."""
    calls = {
        "sum": (Call("sum", 2, None, pa.float64()), Call("count", None, None, pa.int64())),
        "max": (Call("max", 2, None, pa.float64()),),
    }
    found: dict[str, Node] = {
        name: Aggregate(
            over=LEFT,
            keys=(1,),
            calls=of,
            columns=schema_of(pa.int64(), *(call.type for call in of)),
            **PLAIN,
        )
        for name, of in calls.items()
    }
    found["join"] = Join(
        kind="inner",
        left=LEFT,
        right=RIGHT,
        left_keys=(1,),
        right_keys=(0,),
        null_safe=(False,),
        residual=None,
        columns=schema_of(pa.int64(), pa.int64(), pa.float64(), pa.int64(), pa.string()),
        **PLAIN,
    )
    return found


def as_change(batch: pa.RecordBatch, weight: int = 1) -> pa.RecordBatch:
    names = [f"c{i}" for i in range(batch.num_columns)]
    weights = pa.array(np.full(batch.num_rows, weight, np.int64))
    return pa.RecordBatch.from_arrays([*batch.columns, weights], names=[*names, "_w"])


def small_changes(plan: Plan) -> None:
    sizes = (1_000, 2_000) if plan.quick else (100_000, 1_000_000, 10_000_000)
    for hot in (False, True):
        for name, node in operators().items():
            measure = f"cost of a 100-row change, {name}, " + ("hot key" if hot else "even keys")
            if not plan.wanted(measure):
                continue
            times = {}
            for size in sizes:
                progress(f"views: {measure}: {size:,} rows of state")
                times[size] = _cost(plan, node, size, hot)
            means = {size: statistics.mean(found) for size, found in times.items()}
            for size, found in times.items():
                plan.bench.add(
                    f"{measure}: median at {size:,} rows",
                    [statistics.median(found) * 1e3],
                    [1],
                    "1 ms",
                    "ms",
                    "lower",
                )
            plan.bench.count(
                f"{measure}: smallest to largest mean of {', '.join(f'{s:,}' for s in sizes)}",
                max(means.values()) * 1e3,
                other=min(means.values()) * 1e3,
                other_name="the cheapest of them",
                unit="ms",
                goal=0.5,
            )


def _cost(plan: Plan, node: Node, size: int, hot: bool) -> list[float]:
    """Seconds of each of 1,000 batches, with merges, packs and fsync."""
    folder = plan.folder / "cost"
    packs = Packs(str(folder))
    engine = Engine({"v": node}, SOURCES, packs, 0x5EED0)

    def step(number: int, changes: dict[str, pa.RecordBatch]) -> float:
        started = time.perf_counter()
        attempt = packs.attempt(number)
        batch = engine.step(changes, attempt)
        manifest = engine.manifest(batch, attempt)
        attempt.add_json(manifest)
        attempt.finish()
        engine.keep(batch)
        taken = time.perf_counter() - started
        if number % 64 == 0:
            packs.drop_except(engine.pack_names(manifest), number)
        return taken

    step(0, {"customers": as_change(customers())})
    for first in range(0, size, 1_000_000):
        batch = orders(first, min(1_000_000, size - first), first, hot)
        step(1, {"orders": as_change(batch)})
    base = orders(0, min(1_000_000, size), 0, hot)
    found = []
    for number in range(2, 12 if plan.quick else 1_002):
        new = as_change(orders(1_000_000_000 + number * 50, 50, number, hot))
        old = as_change(base.slice(number * 50, 50), -1)
        found.append(step(number, {"orders": pa.concat_batches([new, old])}))
    shutil.rmtree(folder)
    return found


# -- where the steps of a large batch run ----------


def switch(plan: Plan) -> None:
    """The same step in the driver and on the executors, over sizes: where they cross."""
    from headrace.pipelines.spark import session
    from headrace.pipelines.views.executors import Executors

    node = operators()["join"]
    for rows in (1_000, 2_000) if plan.quick else (100_000, 400_000, 1_600_000):
        measure = f"switch: join step of {rows:,} rows on the executors"
        if not plan.wanted(measure):
            continue
        executors = Executors(session(), rows=1)
        engines = []
        for way in (executors, None):
            packs = Packs(str(plan.folder / f"switch-{way is None}"))
            engine = Engine({"v": node}, SOURCES, packs, 0x5EED0, executors=way)
            attempt = packs.attempt(0)
            first = engine.step({"customers": as_change(customers())}, attempt)
            attempt.finish()
            engine.keep(first)
            engines.append(engine)
        change = {"orders": as_change(orders(0, rows, 1))}

        def arm(engine: Engine, change: dict[str, pa.RecordBatch] = change) -> float:
            attempt = engine.packs.attempt(1)
            started = time.perf_counter()
            engine.step(change, attempt)
            taken = time.perf_counter() - started
            attempt.forget()
            return taken

        for engine in engines:
            arm(engine)  # warm
        plan.bench.compare(
            measure,
            ours=partial(arm, engines[0]),
            other=partial(arm, engines[1]),
            other_name="in the driver",
            unit="s",
            better="lower",
        )
        for engine in engines:
            shutil.rmtree(engine.packs.folder)


# -- against full recomputation ----------


def recompute(plan: Plan) -> None:
    from headrace.pipelines.spark import session

    if not any(map(plan.wanted, ("CPU against the batch query", "first build"))):
        return
    rows = 20_000 if plan.quick else 10_000_000
    spark = session()
    path = plan.folder / "recompute"
    with hr.connect(path) as log:
        progress("views: filling the log")
        shop(log, rows)
        made = pipeline(2)
        batch, query = _batch_query(plan, spark, made, rows)
        plan.bench.compare(
            f"first build of {rows:,} rows: CPU",
            ours=partial(_first_build, log, spark, itertools.count()),
            other=lambda: 3 * query(),
            other_name="3x the batch query",
            unit="s",
            better="lower",
            goal=1.0,
        )
        shutil.rmtree(plan.folder / "parquet")
        with Runner(made, log, spark) as runner:
            runner.run("caught up")
            for share, goal in ((0.01, 5), (0.0001, 50)):
                taken: list[float] = []
                for number in range(2 if plan.quick else 7):
                    _change(log, rows, max(1, int(rows * share)), number)
                    with cpu(taken):
                        runner.run("caught up")
                plan.bench.add(
                    f"CPU against the batch query, {share:.2%} of {rows:,} rows change",
                    taken[1:],
                    [statistics.median(batch)] * len(taken[1:]),
                    "the batch query",
                    "s",
                    "lower",
                    goal,
                )
    shutil.rmtree(path)


def _first_build(log: Any, spark: Any, numbers: Iterator[int]) -> float:
    """CPU seconds of a build; its state is removed."""
    made = pipeline(2, f"shop{next(numbers)}")
    taken: list[float] = []
    with Runner(made, log, spark) as runner, cpu(taken):
        runner.run("caught up")
    shutil.rmtree(f"{log.path}/pipelines/{made.name}")
    return taken[0]


def _batch_query(
    plan: Plan, spark: Any, made: hr.Pipeline, rows: int
) -> tuple[list[float], Callable[[], float]]:
    """CPU seconds of Spark's own answer from Parquet files, warm; and how to ask once more."""
    import pyarrow.parquet as pq

    folder = plan.folder / "parquet"
    folder.mkdir()
    tables = {"orders": folder / "orders", "customers": folder / "customers"}
    for one in tables.values():
        one.mkdir()
    pq.write_table(pa.Table.from_batches([customers()]), tables["customers"] / "0.parquet")
    for first in range(0, rows, 500_000):
        batch = orders(first, min(500_000, rows - first), first)
        pq.write_table(pa.Table.from_batches([batch]), tables["orders"] / f"{first}.parquet")
    frames = {name: spark.read.parquet(str(one)) for name, one in tables.items()}
    query: Callable[..., Any] = made.views["revenue"].definition  # type: ignore[assignment]

    def once() -> float:
        taken: list[float] = []
        with cpu(taken):
            query(**frames).toArrow()
        return taken[0]

    progress("views: batch query")
    return [once() for _ in range(2 if plan.quick else 7)][1:], once


def _change(log: Any, rows: int, count: int, number: int) -> None:
    """Update `count` orders: each old row goes, a new one comes."""
    start = (number * 500_000) % max(1, rows - count)
    start -= start % 500_000
    old = orders(start, min(500_000, rows - start), start).slice(0, count)
    new = old.set_column(2, "amount", pa.array(old.column(2).to_numpy() + number + 1))
    weights = [pa.array(np.full(old.num_rows, w, np.int64)) for w in (-1, 1)]
    with log.transaction() as transaction:
        for part, weight in zip((old, new), weights, strict=True):
            transaction.append("orders", part.append_column("_weight", weight))


def main() -> int:
    parser = arguments("views")
    parser.add_argument("--only", default="", help="measures whose name contains this")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    plan = Plan(Bench("views"), folder, chosen.quick, chosen.only)
    try:
        for measure in (fresh, small_changes, switch, recompute):
            measure(plan)
        return plan.bench.finish(as_json=chosen.json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
