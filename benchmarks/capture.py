"""Capture: rows a second from PostgreSQL into the durable log, against `pg_recvlogical` to nowhere.

Both arms read the same changes of one server, each from a slot of its own, in turn; both connect
anew. `pg_recvlogical` decodes nothing and keeps nothing: it is what the server can give. A snapshot
stands against `COPY ... TO STDOUT` of the table; commit-to-readable against a loop that receives
and does an fdatasync for each transaction.

    ./run bench capture                 all of it, some minutes
    ./run bench capture --only update   measures whose name has "update" in it
    ./run bench capture --quick         seconds: does it run, not how fast is it
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg

import headrace as hr
from benchmarks.kit import PAIRS, Bench, arguments, progress
from headrace.sources.postgres import catalog
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.stream import Stream
from headrace.testing.postgres import Server

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
        for number in range(1, count + 1):
            source.execute(f"update t set amount = amount + 1 where id = {number}")
        return count

    for measure, load, goal in (
        ("insert transactions of 1,000 rows", inserts, 0.7),
        ("update transactions of 1,000 rows, before-images completed", updates, 0.4),
        ("update transactions of 1 row", singles, 0.5),
    ):
        if measure.startswith("update") and source.next <= rows:
            source.insert(rows)
            source.floor(), source.ours()
        if not wanted(measure):
            continue
        ours: list[float] = []
        floor: list[float] = []
        for pair in range(PAIRS):
            progress(f"capture: {measure}: pair {pair + 1} of {PAIRS}")
            count = load()
            arms = [(source.ours, ours), (source.floor, floor)]
            for arm, values in arms if pair % 2 else reversed(arms):
                values.append(count / arm())
        bench.add(measure, ours, floor, "pg_recvlogical", "rows/s", "higher", goal)


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
            connection.execute("select pg_drop_replication_slot(%s)", (capture.state.slot,))
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


def freshness(bench: Bench, source: Source, folder: Path, quick: bool) -> None:
    """From the commit at the source to the row at a reader, transactions one after the other."""
    count = 20 if quick else 300

    def commits() -> Iterator[tuple[int, float]]:
        for _ in range(count):
            time.sleep(0.005)
            source.insert(1)
            yield source.next - 1, time.perf_counter()

    seen: dict[int, float] = {}
    stop = threading.Event()

    def read() -> None:
        for batch in source.log.read(TOPIC, start="latest", follow=True, timeout=2):
            now = time.perf_counter()
            for number in batch.data.column("id").to_pylist():
                seen[number] = now
            if stop.is_set():
                return

    with hr.connect(source.log.path) as log:
        own = Capture(log, "bench", source.server.dsn(), ["public.t"])
        running = threading.Thread(target=own.run, args=(1 << 62,), daemon=True)
        reader = threading.Thread(target=read)
        running.start()
        time.sleep(2)
        reader.start()
        sent = dict(commits())
        stop.set()
        reader.join()
        ours = [1e3 * (seen[number] - at) for number, at in sent.items() if number in seen]
    connection = source.connection
    state = own.state
    assert state is not None
    received: list[float] = []
    with (
        Stream(own.dsn, "floor", state.publication, 0) as stream,
        open(folder / "floor", "wb", buffering=0) as file,
    ):
        list(stream.receive(1.0))
        for _ in range(count):
            time.sleep(0.005)
            source.insert(1)
            at = time.perf_counter()
            while not any(getattr(one, "changes", None) for one in stream.receive(1.0)):
                continue
            file.write(b"x" * 200)
            os.fdatasync(file.fileno())
            received.append(1e3 * (time.perf_counter() - at))
    del connection
    bench.add(
        "commit to readable, median", [statistics.median(ours)], [3 * statistics.median(received)],
        "3x receive + fdatasync", "ms", "lower", 1.0,
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
            if wanted("commit to readable"):
                freshness(bench, source, folder, chosen.quick)
            source.connection.close()
        if wanted("snapshot"):
            snapshot(bench, server, folder, chosen.quick)
    return bench.finish(as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
