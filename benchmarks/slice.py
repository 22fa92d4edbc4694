"""The slice: what it costs to keep a table equal to its source, and to prove it.

    ./run bench slice                   all of it, minutes
    ./run bench slice --only verify     measures whose name has "verify" in it
    ./run bench slice --quick           seconds: does it run, not how fast is it

Fresh: transactions of one row at 500/s, from the commit at the source until a reader of the target
sees them beside the views they have changed; all parts under `headrace run`. Against 1.5 times the
sum of the parts' own times, each measured alone at the same rate: a capture until a reader of the
log sees it, views from entry to commit, a follower of the same tables from a commit of the views
(written by hand) to the reader of the target. All arrangements run, and are written to in turn, two
seconds each: those that are not do nothing.

Apply: a follower that is 1,000,000 updates of 100,000 keys behind, against a program by hand that
has them in memory: COPY to a temporary table, one MERGE of the newest row of each key.

Verify: a follower's table of some columns in PostgreSQL against the log's table, nothing differing,
in rows of each side a second. On the clock, where the server works beside us; and by the CPU time
of our own process, which is what one core can do.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
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
from headrace.log.embedded.log import EmbeddedLog
from headrace.pipelines.spark import archive_in_background
from headrace.pipelines.views.reading import commits_topic
from headrace.runtime.project import FollowerOf, find_project
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

RATE, WARM, LEAD = 500, 2, 250
"""Rows a second; how often it is warmed up; rows before those that count, each time."""
AT_ONCE = 5
"""Rows in a commit of the views that is written by hand; a pipeline has as many at this rate."""
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


Write = Callable[[int], object]
"""May give the numbers that it has written now, if these are others."""
Look = Callable[[], Iterable[int]]
"""Gives the numbers that came since the last call."""


class Arm:
    """An arrangement of parts that runs, and how it is written to and looked at."""

    def __init__(self, write: Write, look: Look) -> None:
        self._write, self._look = write, look
        self._next = 1

    def times(self, count: int) -> list[float]:
        """From a write to its being seen, in milliseconds, of so many at the rate, under way."""
        sent: dict[int, float] = {}
        seen: dict[int, float] = {}
        over = threading.Event()

        def read() -> None:
            while not over.is_set():
                found = list(self._look())
                seen.update(dict.fromkeys(found, time.perf_counter()))

        def write(number: int) -> None:
            written = self._write(number)
            now = time.perf_counter()
            sent.update(dict.fromkeys(written if isinstance(written, list) else [number], now))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            paced(write, self._next, LEAD + count)
            self._next += LEAD + count
            deadline = time.monotonic() + 120
            while len(seen) < len(sent) and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            over.set()
            reader.join()
        return [1e3 * (seen[number] - at) for number, at in list(sent.items())[LEAD:]]


class ViewsByHand:
    """What the views of `VIEWS` say of one more sale, as their pipeline would commit it."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._spent: dict[int, tuple[int, int]] = {}
        self._classes: dict[int, int] = {}

    def create(self, log: EmbeddedLog) -> None:
        """Their topics."""
        commits_topic(log, "p")
        columns = "customer int, spent bigint, n bigint"
        log.create_topic("p.spent", columns, key="customer", kind="changes")
        log.create_topic("p.classes", "class bigint, n bigint", key="class", kind="changes")

    def commit(self, log: EmbeddedLog, numbers: list[int], through: int) -> None:
        """One entry, of different customers."""
        rows: list[dict[str, int]] = []
        for number in numbers:
            customer = number % 100
            before = self._spent.get(customer)
            spent, n = before or (0, 0)
            after = self._spent[customer] = (spent + number % 977, n + 1)
            rows += [
                {"customer": customer, "spent": one[0], "n": one[1], "_weight": weight}
                for one, weight in ((before, -1), (after, 1)) if one
            ]  # fmt: skip
        with log.transaction() as entry:
            entry.append("p.spent", rows)
            if self._depth > 1:
                entry.append("p.classes", self._moved(rows))
            views = ["spent", "classes"][: self._depth]
            entry.append("p._commits", [{"through": through, "views": views}])

    def _moved(self, spent: list[dict[str, int]]) -> list[dict[str, int]]:
        old = dict(self._classes)
        for row in spent:
            one = row["spent"] // 1000
            self._classes[one] = self._classes.get(one, 0) + row["_weight"]
        rows: list[dict[str, int]] = []
        for one in sorted({row["spent"] // 1000 for row in spent}):
            was, now = old.get(one, 0), self._classes[one]
            if was != now:
                rows += [{"class": one, "n": was, "_weight": -1}] * (was > 0)
                rows += [{"class": one, "n": now, "_weight": 1}] * (now > 0)
        return rows


class Fresh:
    """Makes the arrangements; they run until the stack ends."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack

    def capture(self) -> Arm:
        """A capture alone."""
        server = self._stack.enter_context(Server())
        toml, write = self._source(server)
        log = self._running("capture", toml)
        return Arm(write, _polled(lambda: log.read("src.public.sales", follow=True), "id"))

    def views(self, depth: int) -> Arm:
        """Views alone."""
        name = f"views{depth}"
        text = PIPELINE.format(topic="sales") + "".join(VIEWS[: depth + 1])
        write = self._log(name)
        log = self._running(name, "", text)
        positions: deque[tuple[int, int]] = deque()

        def written(number: int) -> None:
            positions.append((write(number), number))

        polled = _polled(lambda: log.read("p._commits", follow=True), "through")
        through = 0

        def look() -> Iterable[int]:
            nonlocal through
            through = max(through, *polled(), 0)
            while positions and positions[0][0] <= through:
                yield positions.popleft()[1]

        return Arm(written, look)

    def follower(self, depth: int) -> Arm:
        """A follower alone, of the same tables: what the views would say is written by hand."""
        server = self._stack.enter_context(Server())
        keep, look = self._target(server, depth)
        folder = self._folder / f"follower{depth}"
        write, views = self._log(folder.name), ViewsByHand(depth)
        log = self._stack.enter_context(hr.connect(folder / "data"))
        views.create(log)
        (folder / "headrace.toml").write_text("[page]\nport = false\n")
        named: dict[str, Any] = {}
        exec(PIPELINE.format(topic="sales") + "".join(VIEWS[: depth + 1]) + keep, named)
        kept = [FollowerOf.of(one) for one in named["p"].kept.values()]
        project = find_project(folder)
        project.run_folder.mkdir()
        project.note_followers(kept)
        command = [sys.executable, "-m", "headrace", "part", "follower", kept[0].name]
        process = subprocess.Popen([*command, "--project", str(folder)], stderr=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)

        waiting: list[int] = []

        def written(number: int) -> list[int]:
            waiting.append(number)
            if len(waiting) < AT_ONCE:
                return []
            some = waiting[:]
            waiting.clear()
            views.commit(log, some, [write(one) for one in some][-1])
            return some

        return Arm(written, look)

    def whole(self, depth: int) -> Arm:
        """Everything."""
        server = self._stack.enter_context(Server())
        toml, write = self._source(server)
        keep, look = self._target(server, depth)
        text = PIPELINE.format(topic="src.public.sales") + "".join(VIEWS[: depth + 1]) + keep
        self._running(f"whole{depth}", toml, text)
        return Arm(write, look)

    def _running(self, name: str, toml: str, pipeline: str = "") -> EmbeddedLog:
        self._stack.enter_context(running(self._folder / name, toml, pipeline))
        return self._stack.enter_context(hr.connect(self._folder / name / "data"))

    def _source(self, server: Server) -> tuple[str, Write]:
        server.create_database("source")
        source = self._stack.enter_context(server.connect("source"))
        source.execute(SALES)
        toml = f'[capture.src]\ndsn = "{server.dsn("source")}"\ntables = ["public.sales"]\n'

        def write(number: int) -> None:
            source.execute(INSERT, (number, number % 100, number % 977))

        return toml, write

    def _log(self, name: str) -> Callable[[int], int]:
        log = self._stack.enter_context(hr.connect(self._folder / name / "data"))
        columns = "id bigint, customer int, amount bigint"
        log.create_topic("sales", columns, key="id", kind="changes")

        def write(number: int) -> int:
            row = {"id": number, "customer": number % 100, "amount": number % 977, "_weight": 1}
            return log.append("sales", [row]).position

        return write

    def _target(self, server: Server, depth: int) -> tuple[str, Look]:
        server.create_database("target")
        target = self._stack.enter_context(server.connect("target"))
        target.execute("set enable_seqscan = off")  # a reader's plan must not go by statistics
        target.execute("set enable_bitmapscan = off")
        names = ", ".join(["'sales'", "'spent'", "'classes'"][: 1 + depth])
        keep = f'p.keep({names}, in_=hr.Table("{server.dsn("target")}", schema="kept"))\n'
        newest = 0

        def look() -> Iterable[int]:
            nonlocal newest
            time.sleep(0.003)
            try:
                found = target.execute("select id from kept.sales where id > %s", [newest])
            except psycopg.errors.UndefinedTable:  # not loaded yet
                return []
            numbers = [row[0] for row in found.fetchall()]
            newest = max(numbers, default=newest)
            return numbers

        return keep, look


def _polled(begin: Callable[[], Any], column: str) -> Look:
    """What a reading of the log gives; it begins when the topic is there."""
    reading: Any = None

    def look() -> Iterable[int]:
        nonlocal reading
        try:
            reading = reading or begin()
        except hr.errors.UnknownTopic:
            time.sleep(0.05)
            return []
        batch = reading.poll()
        if batch is None:
            time.sleep(0.002)
            return []
        return list(batch.data.column(column).to_pylist())

    return look


def measure_fresh(bench: Bench, folder: Path, quick: bool, pairs: int) -> None:
    """All arrangements run at once, and are written to in turn: the others do nothing then."""
    count, rounds = (100, 2) if quick else (1000, pairs)
    recording = archive_in_background()
    if recording is not None:
        progress("slice: fresh, Spark's class archive is recorded")
        recording.wait()
    with contextlib.ExitStack() as stack:
        fresh = Fresh(folder / "fresh", stack)
        made: dict[str, Callable[[], Arm]] = {
            "capture": fresh.capture,
            **{f"follower{depth}": partial(fresh.follower, depth) for depth in (1, 2)},
            **{f"views{depth}": partial(fresh.views, depth) for depth in (1, 2)},
            **{f"whole{depth}": partial(fresh.whole, depth) for depth in (1, 2)},
        }
        arms: dict[str, Arm] = {}
        taken: dict[str, list[list[float]]] = {name: [] for name in made}
        for name, make in made.items():
            progress(f"slice: fresh, {name} starts")
            arms[name] = make()
            for _ in range(WARM):  # the first builds the views, then compilers get to work
                arms[name].times(2 * count)
        for number in range(rounds):
            for name in list(arms) if number % 2 else reversed(arms):
                progress(f"slice: fresh, {name}, {number} of {rounds}")
                taken[name].append(sorted(arms[name].times(count)))
        progress("")
    middle = {name: [statistics.median(one) for one in values] for name, values in taken.items()}
    for depth, title in ((1, "one operator deep"), (2, "two operators deep")):
        parts = ("capture", f"views{depth}", f"follower{depth}")
        whole = f"whole{depth}"
        own = [1.5 * sum(values) for values in zip(*(middle[one] for one in parts), strict=True)]
        told = ", ".join(f"{one} {statistics.median(middle[one]):.0f}" for one in parts)
        bench.add(
            f"commit to visible, {title}, p50", middle[whole], own,
            f"1.5x the parts' own times ({told})", "ms", "lower", 1.0,
        )  # fmt: skip
        p99 = [values[int(0.99 * (len(values) - 1))] for values in taken[whole]]
        bench.add(f"commit to visible, {title}, p99", p99, p99, "itself", "ms", "lower")
        bench.limit(
            f"commit to visible, {title}, p50 (aim)", middle[whole], limit=500.0, unit="ms",
            better="lower",
        )  # fmt: skip


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
