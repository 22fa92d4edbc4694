"""Groups: how long nobody reads after a death, and what a consumer costs over a plain reading.

./run bench groups            take-over, reading, lag: under a minute
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

import headrace as hr
from benchmarks.kit import Bench, arguments
from headrace.log.embedded.log import EmbeddedLog

MEMBER = """
import sys, headrace as hr
log = hr.connect(sys.argv[1])
consumer = log.consumer("t", "g", lease_seconds=600)
print("joined", flush=True)
for batch in consumer:
    pass
"""
ROWS = 2_000_000


def takeover(folder: str, others: int) -> float:
    """Milliseconds from kill -9 to the first row in the hands of somebody else."""
    with hr.connect(folder) as log:
        log.create_topic("t", "n bigint")
        log.append("t", [{"n": 1}])
        members = [_member(folder)]
        with log.consumer("t", "g", lease_seconds=600, timeout=60) as consumer:
            members += [_member(folder) for _ in range(others)]
            time.sleep(0.05)  # they sleep now
            began = time.perf_counter()
            os.kill(members[0].pid, signal.SIGKILL)
            next(consumer)
            taken = time.perf_counter() - began
        for member in members:
            member.kill()
            member.wait()
    shutil.rmtree(folder)
    return taken * 1000


def _member(folder: str) -> subprocess.Popen[bytes]:
    member = subprocess.Popen(
        [sys.executable, "-c", MEMBER, folder], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert member.stdout is not None
    member.stdout.readline()
    return member


def filled(folder: str, rows: int) -> EmbeddedLog:
    log = hr.connect(folder)
    log.create_topic("t", "n bigint, s string", partitions=4)
    batch = pa.record_batch({"n": range(10_000), "s": ["x" * 60] * 10_000})
    for number in range(rows // 10_000):
        log.append("t", batch, partition=number % 4, durability="os")
    log.sync()
    return log


def through_reading(log: EmbeddedLog) -> float:
    began, rows = time.perf_counter(), 0
    for batch in log.read("t", dict.fromkeys(range(4), 0)):
        rows += len(batch)
    return rows / (time.perf_counter() - began)


def through_consumer(log: EmbeddedLog, number: list[int]) -> float:
    number[0] += 1
    with log.consumer("t", f"g{number[0]}", follow=False) as consumer:
        began, rows = time.perf_counter(), 0
        for batch in consumer:
            rows += len(batch)
        consumer.commit()
        return rows / (time.perf_counter() - began)


def commits(log: EmbeddedLog, count: int = 200) -> float:
    with log.consumer("t", "committing", follow=False, max_rows=1) as consumer:
        seconds = 0.0
        for _ in range(count):
            next(consumer)
            began = time.perf_counter()
            consumer.commit()
            seconds += time.perf_counter() - began
    return count / seconds


def appends(log: EmbeddedLog, count: int = 200) -> float:
    log.create_topic("other", "n bigint", exist_ok=True)
    began = time.perf_counter()
    for number in range(count):
        log.append("other", [{"n": number}])
    return count / (time.perf_counter() - began)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments("groups").parse_args(given)
    bench = Bench("groups")
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    try:
        for others in (0, 3):
            name = f"kill -9 to the next member's first row, {others + 2} members"
            times = [takeover(str(folder / "t"), others) for _ in range(options.pairs)]
            bench.limit(name, times, limit=100.0, unit="ms", better="lower")
        log, number = filled(str(folder / "r"), ROWS), [0]
        bench.compare(
            "read 2 M rows, commit them",
            ours=lambda: through_consumer(log, number),
            other=lambda: through_reading(log),
            other_name="log.read at offsets",
            unit="rows/s",
            better="higher",
            goal=0.6,
            pairs=options.pairs,
        )
        bench.compare(
            "commits of one member",
            ours=lambda: commits(log),
            other=lambda: appends(log),
            other_name="appends of a row",
            unit="/s",
            better="higher",
            goal=0.6,
            pairs=options.pairs,
        )
        times = []
        for _ in range(options.pairs):
            with log.transaction() as transaction:
                transaction.commit_offsets("late", {"t": dict.fromkeys(range(4), 1000)})
            began = time.perf_counter()
            log.group("late")
            times.append((time.perf_counter() - began) * 1000)
        bench.limit("lag of a group", times, limit=1000.0, unit="ms", better="lower")
        log.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return bench.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
