"""Capture: rows a second from PostgreSQL into the durable log, against `pg_recvlogical` to nowhere.

Both arms read the same changes of one server, each from a slot of its own, in turn; both connect
anew. Behind each load the server notes which transactions run, so that no arm makes it decode again
what was decoded before (it begins at the last such note, of which it makes one in 15 s by itself).
`pg_recvlogical` decodes nothing and keeps nothing: it is what the server can give. A snapshot
stands against `COPY ... TO STDOUT` of the table; commit-to-readable against a loop that receives
and does an fdatasync for each transaction. Debezium's own engine has a sink in Java that only
counts, a warm Java and no encoding; there the time of both runs from the first rows to the last,
ours being those that a reader of the log can have. pgbench runs with a capture beside it and
without, in turn.

    ./run bench capture                 all of it, some minutes
    ./run bench capture --only update   measures whose name has "update" in it
    ./run bench capture --quick         seconds: does it run, not how fast is it
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg

import headrace as hr
from benchmarks.kit import PAIRS, Bench, arguments, progress
from headrace.sources.postgres import catalog
from headrace.sources.postgres.capture import Capture
from headrace.testing.capture_case import all_live
from headrace.testing.capture_process import Child, ended
from headrace.testing.debezium_engine import MISSING, Engine, available
from headrace.testing.postgres import Server, fresh_database

TABLE = """
    create table {name}(
        id bigint primary key, customer bigint, product int, amount numeric(12, 2), note text,
        ok bool, at timestamptz
    )
"""
ROW = "g, g % 1000, g % 77, g / 4.0, 'note ' || g, g % 2 = 0, now()"
TOPIC = "bench.public.t"


class Source:
    """A server with a table, a slot for the floor, and a capture."""

    def __init__(self, server: Server, log: Any) -> None:
        self.server = server
        self.connection: psycopg.Connection[Any] = server.connect()
        self.connection.execute(TABLE.format(name="t"))
        self.log = log
        self.capture = Capture(log, "bench", server.dsn(), ["public.t"])
        self.capture.run("caught up")
        self.execute("select pg_create_logical_replication_slot('floor', 'pgoutput')")
        self.next = 1

    def execute(self, query: str) -> None:
        self.connection.execute(query)

    def insert(self, rows: int) -> None:
        end = self.next + rows - 1
        self.execute(f"insert into t select {ROW} from generate_series({self.next}, {end}) g")
        self.next = end + 1

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Changes that no clock measures: quickly made, then on the disk, and a place to begin."""
        self.execute("set synchronous_commit = off")
        yield
        self.execute("set synchronous_commit = on")
        self.execute("select pg_log_standby_snapshot(), pg_current_xact_id()")

    def floor(self) -> float:
        end = catalog.lsn_text(catalog.lsn(self.connection))
        started = time.perf_counter()
        subprocess.run(
            [
                self.server.bin / "pg_recvlogical", "-d", self.server.dsn(), "--slot", "floor",
                "--start", "-o", "proto_version=2", "-o", "publication_names=headrace_bench",
                "--endpos", end, "-f", os.devnull, "--no-loop",
            ],
            check=True,
        )  # fmt: skip
        return time.perf_counter() - started

    def ours(self) -> float:
        started = time.perf_counter()
        self.capture.run("caught up")
        return time.perf_counter() - started


def throughput(bench: Bench, source: Source, quick: bool, wanted: Callable[[str], bool]) -> None:
    """Rows a second of three kinds of load."""
    rows = 2_000 if quick else 200_000

    def inserts() -> int:
        for _ in range(rows // 1000):
            source.insert(1000)
        return rows

    def updates() -> int:
        for first in range(1, rows, 1000):
            source.execute(
                f"update t set amount = amount + 1, note = note || 'x'"
                f" where id between {first} and {first + 999}"
            )
        return rows

    def singles() -> int:
        count = rows // 10
        source.execute(
            f"do $$ begin for n in 1..{count} loop"
            " update t set amount = amount + 1 where id = n; commit; end loop; end $$"
        )
        return count

    for measure, load, goal in (
        ("insert transactions of 1,000 rows", inserts, 0.7),
        ("update transactions of 1,000 rows, before-images completed", updates, 0.4),
        ("update transactions of 1 row", singles, 0.5),
    ):
        if measure.startswith("update") and source.next <= rows:
            with source.loading():
                source.insert(rows)
            source.floor(), source.ours()
        if not wanted(measure):
            continue
        ours: list[float] = []
        floor: list[float] = []
        for pair in range(PAIRS):
            progress(f"capture: {measure}: pair {pair + 1} of {PAIRS}")
            with source.loading():
                count = load()
            arms = [(source.ours, ours), (source.floor, floor)]
            for arm, values in arms if pair % 2 else reversed(arms):
                values.append(count / arm())
        bench.add(measure, ours, floor, "pg_recvlogical", "rows/s", "higher", goal)


def flow(rows: int, count: Callable[[], int]) -> float:
    """Rows a second while they come, from the first that are there to the last."""
    first, began = 0, time.perf_counter()
    while (there := count()) < rows:
        if there and not first:
            first, began = there, time.perf_counter()
        time.sleep(0.002)
    return (rows - first) / (time.perf_counter() - began)


class Debezium:
    """Debezium's engine with a sink that does nothing, on the same changes."""

    def __init__(self, source: Source, engine: Engine) -> None:
        self.source, self.engine = source, engine
        source.execute("select pg_create_logical_replication_slot('debezium', 'pgoutput')")
        self.settings = {
            "snapshot.mode": "no_data",
            "publication.name": "headrace_bench",
            "publication.autocreate.mode": "disabled",
            "max.batch.size": "8192",
            "max.queue.size": "65536",
        }

    def rate(self, rows: int) -> float:
        """Take what has come since last time; rows a second."""
        self.engine.start(self.source.server.port, "postgres", self.settings, count=True)
        found = flow(rows, self.engine.count)
        self.engine.stop()
        return found


def debezium(bench: Bench, source: Source, folder: Path, quick: bool) -> None:
    """Rows a second of insert transactions, into our log and out of Debezium's engine."""
    rows = 5_000 if quick else 400_000

    def captured() -> float:
        before = sum(source.log.ends(TOPIC))
        with ThreadPoolExecutor(1) as other:
            ended = other.submit(source.ours)

            def come() -> int:
                return rows if ended.done() else sum(source.log.ends(TOPIC)) - before

            found = flow(rows, come)
            ended.result()  # says why, if not all have come
        return found

    ours: list[float] = []
    theirs: list[float] = []
    with Engine(folder / "debezium", "-Xms256m", "-Xmx2g") as engine:
        other = Debezium(source, engine)
        for pair in range(PAIRS + 1):  # the first one only warms
            progress(f"capture: Debezium: pair {pair} of {PAIRS}")
            with source.loading():
                for _ in range(rows // 1000):
                    source.insert(1000)
            arms: list[tuple[Callable[[], float], list[float]]] = [
                (captured, ours),
                (lambda: other.rate(rows), theirs),
            ]
            for arm, values in arms if pair % 2 else reversed(arms):
                values.append(arm())
    source.execute("select pg_drop_replication_slot('debezium')")
    bench.add(
        "insert transactions of 1,000 rows, and Debezium", ours[1:], theirs[1:],
        "Debezium's engine", "rows/s", "higher", 5.0,
    )  # fmt: skip


def pgbench(bench: Bench, server: Server, folder: Path, quick: bool) -> None:
    """What a capture takes from its server: transactions a second, with it and without."""
    seconds = "1" if quick else "5"
    tables = ("accounts", "branches", "history", "tellers")
    with fresh_database(server, "bank") as database, hr.connect(folder / "bank/log") as log:
        run = [str(server.bin / "pgbench"), "-n", "-c", "2"]
        bank = server.dsn(database)
        subprocess.check_output([*run[:1], "-i", "-q", "-s", "5", bank], stderr=subprocess.STDOUT)
        connection = server.connect(database)
        connection.execute("alter table pgbench_history add column n bigserial primary key")
        child = Child(folder / "bank", bank, chunk_rows=50_000)

        def tps() -> float:
            said = subprocess.check_output([*run, "-T", seconds, bank], stderr=subprocess.STDOUT)
            return float(said.partition(b"tps = ")[2].split()[0])

        def captured() -> float:
            child.start()
            place = catalog.lsn(connection)
            while not all_live(log, [f"pgbench_{one}" for one in tables], place):
                time.sleep(0.05)
            found = tps()
            child.kill()
            return found

        with ended(child):
            bench.compare(
                "pgbench beside a capture", ours=captured, other=tps, other_name="without it",
                unit="tps", better="higher",
            )  # fmt: skip
        connection.close()


def snapshot(bench: Bench, server: Server, folder: Path, quick: bool) -> None:
    """A table read for the first time."""
    rows = 5_000 if quick else 5_000_000
    connection = server.connect()
    connection.execute(TABLE.format(name="big"))
    connection.execute(f"insert into big select {ROW} from generate_series(1, {rows}) g")
    numbers = iter(range(1000))

    def ours() -> float:
        number = next(numbers)
        with hr.connect(folder / f"snapshot{number}") as log:
            capture = Capture(log, f"big{number}", server.dsn(), ["public.big"])
            started = time.perf_counter()
            capture.run("caught up")
            seconds = time.perf_counter() - started
            assert capture.state is not None
            slot = (capture.state.slot,)
            active = "select active from pg_replication_slots where slot_name = %s"
            while connection.execute(active, slot).fetchone() == (True,):  # a moment longer
                time.sleep(0.01)
            connection.execute("select pg_drop_replication_slot(%s)", slot)
        return rows / seconds

    def copy() -> float:
        started = time.perf_counter()
        with connection.cursor() as cursor, cursor.copy("copy big to stdout") as data:
            for _ in data:
                pass
        return rows / (time.perf_counter() - started)

    bench.compare(
        f"snapshot of {rows:,} rows", ours=ours, other=copy, other_name="COPY TO STDOUT",
        unit="rows/s", better="higher", goal=0.6,
    )  # fmt: skip
    connection.close()


CHILD = """
import sys, headrace as hr
from headrace.sources.postgres.capture import Capture
with hr.connect(sys.argv[1]) as log:
    Capture(log, "bench", sys.argv[2], ["public.t"]).run()
"""
BARE = """
import os, sys, time
from headrace.sources.postgres.stream import Stream
with Stream(sys.argv[2], "floor", "headrace_bench", 0) as stream, open(sys.argv[1], "wb", 0) as to:
    while True:
        if any([getattr(one, "changes", None) for one in stream.receive(1.0)]):
            to.write(b"x" * 200)
            os.fdatasync(to.fileno())
            print(time.perf_counter(), flush=True)
"""


def freshness(bench: Bench, source: Source, folder: Path, quick: bool) -> None:
    """From the commit at the source to the row at a reader, transactions one after the other.

    Both arms sleep in a process of their own until the server has something to say: ours until our
    reader, here, has the row; the bare loop until its file is synced, which it says with the time.
    """
    count = 10 if quick else 100
    os.sync()  # what was written before is not to be waited for

    def after_commit(program: str, place: str, come: Callable[[Any, int], float]) -> float:
        """The median of the milliseconds until the next row has come."""
        times: list[float] = []
        command = [sys.executable, "-c", program, place, source.capture.dsn]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            try:
                for _ in range(count + 1):  # the first one waits until all is running
                    time.sleep(0.005)
                    source.insert(1)
                    at = time.perf_counter()
                    times.append(1e3 * (come(child.stdout, source.next - 1) - at))
            finally:
                child.kill()
        return statistics.median(times[1:])

    def ours() -> float:
        reading = source.log.read(TOPIC, start="latest", follow=True, timeout=60)

        def come(_: Any, number: int) -> float:
            while number not in next(reading).data.column("id").to_pylist():
                continue
            return time.perf_counter()

        return after_commit(CHILD, str(source.log.path), come)

    def bare() -> float:
        source.floor()  # what is old is not to be taken for what is new
        return 3 * after_commit(BARE, str(folder / "floor"), lambda said, _: float(said.readline()))

    bench.compare(
        "commit to readable, median", ours=ours, other=bare,
        other_name="3x receive + append + fdatasync", unit="ms", better="lower", goal=1.0,
    )  # fmt: skip


def main() -> int:
    parser = arguments("capture")
    parser.add_argument("--only", default="", help="measures whose name contains this")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run")
    chosen = parser.parse_args()
    bench = Bench("capture")

    def wanted(measure: str) -> bool:
        return chosen.only.lower() in measure.lower()

    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name, Server() as server:
        folder = Path(name)
        with hr.connect(folder / "log") as log:
            source = Source(server, log)
            throughput(bench, source, chosen.quick, wanted)
            if wanted("insert transactions of 1,000 rows, and Debezium"):
                if available():
                    debezium(bench, source, folder, chosen.quick)
                else:
                    print(MISSING, file=sys.stderr)
            if wanted("commit to readable"):
                freshness(bench, source, folder, chosen.quick)
            source.connection.close()
        if wanted("snapshot"):
            snapshot(bench, server, folder, chosen.quick)
        if wanted("pgbench beside a capture"):
            pgbench(bench, server, folder, chosen.quick)
    return bench.finish(as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
