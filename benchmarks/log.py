"""The embedded log against the floor of the machine it stands on.

The floor of an append is one writer doing group commit of the same Arrow bytes: serialize, write,
one fdatasync for as many batches as we have writers. It takes no lock, keeps no order between
processes, checks nothing and cannot be read back. Two floors are measured: `ring` writes over and
over into one file that was filled with zeros before the clock started, so it never pays for space;
`growing` pays for new space as it goes, as everything that keeps its data must. One row is held
against `ring`, the stricter one; from 100 rows on, where the space is what costs, against `growing`
(decisions 0017 and 0023). Both are reported. Small appends are measured twice: each awaited before
the next, and eight of each process on their way at a time (the floor then syncs as many at once).

By producers: each process hands the same record batch to its `log.producer` again and again, up to
`OUTSTANDING` batches ahead of the disk, and the clock stops when the last of them has flushed: all
is durable then. The floor is the one writer again, in four arms: one fdatasync for each group of 1,
8, 64 and 1,000 batches times the number of processes, as far as the producers may have so many
outstanding together. We are held against the best of these arms, and the note names them all. It
serializes each batch as it is; a producer joins batches before it serializes them, which is what
it is for. No keeper runs: above 1 GB of journal our arm seals as well, the floor does not.

    ./run bench log                     all of it, about ten minutes; needs 15 GB on the disk
    ./run bench log --only append       measures whose name has "append" in it
    ./run bench log --quick             seconds: does it run, not how fast is it
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import headrace as hr
from benchmarks.kit import PAIRS, Bench, Better, arguments, progress, short
from headrace.log.embedded.format import OFFSET_MASK, place_of
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.system import EVERYBODY, OsShared

TOPIC = "bids"
PAIRS_SHORT = 21
"""Many short pairs: a disturbance that lasts a second then hits few of them, and both arms."""
ROLL_BYTES = 64 << 20
MEGABYTE = bytes(1 << 20)
ON_THEIR_WAY = 8
"""Appends of a process that wait for one sync, where not each is awaited."""
OUTSTANDING = {1: 1_000, 100: 1_000, 1_000: 64, 10_000: 8}
"""Batches that a producer may be ahead of the disk, by their rows: 14 to 18 MB but for one row."""
GROUPS = (1, 8, 64, 1_000)
"""Batches for each process that the floor of producers puts under one sync."""
KEEPS_ROWS = 100
"""From so many rows on an append is held against the floor that keeps them."""
INLINE_ROWS = 23_000
"""Rows in an entry just below the limit of 4 MB."""


def bids(rows: int, seed: int = 0) -> pa.RecordBatch:
    """Rows like those of Nexmark's bids: seven columns, 175 bytes a row."""
    chance = np.random.default_rng(seed)
    ids = np.arange(rows, dtype=np.int64)
    urls = [
        f"https://www.nexmark.com/googl/item.htm?query=1&channel_id={i:09d}" for i in range(rows)
    ]
    return pa.record_batch(
        {
            "auction": pa.array(chance.integers(0, 1 << 40, rows), pa.int64()),
            "bidder": pa.array(chance.integers(0, 1 << 40, rows), pa.int64()),
            "price": pa.array(chance.integers(0, 1 << 30, rows), pa.int64()),
            "channel": pa.array([f"channel-{i % 10}" for i in range(rows)]),
            "url": pa.array(urls),
            "at": pa.array(1_700_000_000_000_000 + ids, pa.timestamp("us", "UTC")),
            "extra": pa.array(["x" * 55] * rows),
        }
    )


# -- processes: started once, warm, told what to do through pipes ----------


@dataclass
class State:
    """What a worker holds between two commands."""

    log: EmbeddedLog | None = None
    batch: pa.RecordBatch | None = None
    more: dict[str, Any] = field(default_factory=dict)
    """What another benchmark's commands need."""


Finish = tuple[int, float, int]
"""Batches written, when the last was done, fdatasyncs."""


def do_open(state: State, path: str, rows: int, topic: str, seed: int) -> None:
    state.log = hr.connect(path)
    state.batch = bids(rows, seed)
    for _ in range(3):
        state.log.append(topic, state.batch)


def do_batch(state: State, rows: int, seed: int) -> None:
    state.batch = bids(rows, seed)


def do_close(state: State) -> None:
    if "producer" in state.more:
        state.more.pop("producer").close()
    if state.log is not None:
        state.log.close()
    state.log = None


def do_append(
    state: State, topic: str, group: int, start: float, seconds: float, most: int
) -> Finish:
    """Durable appends: each awaited, or so many on their way before the disk is awaited."""
    log, batch = state.log, state.batch
    assert log is not None
    syncs = log.journal.syncs
    count = 0
    durability = "fsync" if group == 1 else "os"
    _wait_until(start)
    while count < most and time.monotonic() < start + seconds:
        for _ in range(group):
            log.append(topic, batch, durability=durability)
        if group > 1:
            log.sync()
        count += group
    return count, time.monotonic(), log.journal.syncs - syncs


def do_producer(state: State, topic: str, outstanding: int) -> None:
    assert state.log is not None
    assert state.batch is not None
    rows_max = outstanding * state.batch.num_rows
    state.more["producer"] = state.log.producer(topic, rows_max=rows_max)


def do_produce(state: State, start: float, seconds: float, most: int) -> Finish:
    """Hand batches over without a pause; all of them durable at the end."""
    log, batch, producer = state.log, state.batch, state.more["producer"]
    assert log is not None
    syncs = log.journal.syncs
    count = 0
    _wait_until(start)
    while count < most and time.monotonic() < start + seconds:
        producer.send(batch)
        count += 1
    producer.flush()
    return count, time.monotonic(), log.journal.syncs - syncs


def do_floor(
    state: State, path: str, growing: bool, group: int, start: float, seconds: float, most: int
) -> Finish:
    """Serialize, write, sync: nothing else."""
    batch = state.batch
    assert batch is not None
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    files = [path]
    room = ROLL_BYTES if growing else os.fstat(file).st_size
    count = offset = syncs = 0
    _wait_until(start)
    while count < most and time.monotonic() < start + seconds:
        for _ in range(group):
            data = batch.serialize()
            if offset + data.size > room:
                offset = 0
                if growing:
                    os.fdatasync(file)
                    os.close(file)
                    files.append(f"{path}.{len(files)}")
                    file = os.open(files[-1], os.O_RDWR | os.O_CREAT)
            os.pwrite(file, data, offset)
            offset += data.size
        os.fdatasync(file)
        syncs += 1
        count += group
    finished = time.monotonic()
    os.close(file)
    for name in files if growing else ():
        os.unlink(name)
    return count, finished, syncs


def do_bare(state: State, path: str, start: float, seconds: float, most: int) -> Finish:
    """The least that processes must do to share a sync: a lock, a write, one who syncs, a wake."""
    batch = state.batch
    assert batch is not None
    file, append, sync = (os.open(path + end, os.O_RDWR | os.O_CREAT) for end in ("", ".a", ".s"))
    shared = OsShared(f"{path}.words", 4096)
    words, word = shared.view.cast("Q"), shared.view.cast("I")
    room, token, count, syncs = os.fstat(file).st_size - (8 << 20), os.getpid() << 12, 0, 0
    _wait_until(start)
    while count < most and time.monotonic() < start + seconds:
        data = batch.serialize()
        fcntl.flock(append, fcntl.LOCK_EX)
        os.pwrite(file, data, words[0] % room)
        words[0] = end = words[0] + data.size
        fcntl.flock(append, fcntl.LOCK_UN)
        while words[1] < end:
            seen = word[100]
            try:
                fcntl.flock(sync, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                shared.wait(100, seen, 0.05)
                continue
            if words[1] < end:
                os.sched_yield()
                tail = words[0]
                os.fdatasync(file)
                words[1] = tail
                syncs += 1
            fcntl.flock(sync, fcntl.LOCK_UN)
            word[100] = token = (token + 1) & 0xFFFFFFFF
            shared.wake(100, EVERYBODY)
        count += 1
    finished = time.monotonic()
    for descriptor in (file, append, sync):
        os.close(descriptor)
    return count, finished, syncs


def do_follow(_: State, path: str, back: Connection) -> None:
    """Tell when each entry was there, until the topic's last column says stop."""
    with hr.connect(path) as log:
        reading = log.read(TOPIC, start="latest", follow=True, columns=["price"])
        back.send_bytes(b"ready")
        for batch in reading:
            now = time.monotonic_ns()
            if batch.data.column(0)[0].as_py() < 0:
                return
            back.send_bytes(now.to_bytes(8, "little"))


def do_wake_bare(_: State, reader: Connection, back: Connection) -> None:
    """The same with a pipe that says: there is something."""
    source = reader.fileno()
    while os.read(source, 1) == b"+":
        back.send_bytes(time.monotonic_ns().to_bytes(8, "little"))


def do_idle(_: State, path: str, seconds: float) -> tuple[float, int]:
    """Follow a log to which nothing comes: CPU seconds and how often we were woken."""
    import threading

    with hr.connect(path) as log:
        reading = log.read(TOPIC, start="latest", follow=True)
        thread = threading.Thread(target=lambda: list(reading), daemon=True)
        thread.start()
        time.sleep(0.2)
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(seconds)
        after = resource.getrusage(resource.RUSAGE_SELF)
    thread.join(5)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, after.ru_nvcsw - before.ru_nvcsw - 1  # one is our own sleep


def _wait_until(start: float) -> None:
    while (left := start - time.monotonic()) > 0:
        time.sleep(left if left > 0.002 else 0)


def work(pipe: Connection) -> None:
    """A worker: commands come, answers go."""
    state = State()
    with contextlib.suppress(EOFError, BrokenPipeError):  # the benchmark was ended
        while True:
            command, given = pipe.recv()
            if command is None:
                return
            pipe.send(command(state, *given))


class Crew:
    """Worker processes."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._workers = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))

    def send(self, number: int, command: Callable[..., Any], *given: Any) -> None:
        self._workers[number][1].send((command, given))

    def answer(self, number: int) -> Any:
        return self._workers[number][1].recv()

    def ask(self, number: int, command: Callable[..., Any], *given: Any) -> Any:
        self.send(number, command, *given)
        return self.answer(number)

    def all(self, count: int, command: Callable[..., Any], *given: Any) -> list[Any]:
        for number in range(count):
            self.send(number, command, *given)
        return [self.answer(number) for number in range(count)]

    def stop(self) -> None:
        for process, pipe in self._workers:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((None, ()))
            pipe.close()
            process.join(10)


# -- the measures ----------

FLOORS = {
    "ring": "serialize + write + fdatasync, one writer, space filled beforehand and reused",
    "growing": "serialize + write + fdatasync, one writer, new space as it goes",
}


@dataclass
class Plan:
    """How much to measure."""

    bench: Bench
    folder: Path
    crew: Crew
    quick: bool
    seconds: float
    pairs: int
    gigabytes: float
    only: str

    def wanted(self, measure: str) -> bool:
        return self.only.lower() in measure.lower()

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def compare(
        self,
        measure: str,
        ours: Callable[[], float],
        other: Callable[[], float],
        other_name: str,
        unit: str,
        better: Better,
        goal: float | None,
        pairs: int | None = None,
    ) -> None:
        """As the kit does it; one pair in a quick run, which says nothing about speed."""
        if self.quick:
            self.bench.add(measure, [ours()], [other()], other_name, unit, better)
        else:
            self.bench.compare(
                measure,
                ours=ours,
                other=other,
                other_name=other_name,
                unit=unit,
                better=better,
                goal=goal,
                pairs=pairs or self.pairs,
            )


def measure_append(plan: Plan) -> None:
    """Record batches of 1 to 10,000 rows, by 1 to 8 processes, durable."""
    ring = plan.path("ring")
    for rows in (1, 100, 1_000, 10_000):
        for processes in (1, 2) if plan.quick else (1, 4, 8):
            noun = "process" if processes == 1 else "processes"
            name = f"append {rows:,} rows, {processes} {noun}"
            floors = ["ring"] + (["growing"] if rows >= KEEPS_ROWS else [])
            ends = [*floors, f"{ON_THEIR_WAY} on their way each"]
            if not any(plan.wanted(f"{name}, {end}") for end in ends):
                continue
            _fill(ring, 16 << 20 if plan.quick else 512 << 20)
            for floor in floors:
                if plan.wanted(f"{name}, {floor}"):
                    _append(plan, f"{name}, {floor}", rows, processes, floor)
            if rows < 1_000 and plan.wanted(f"{name}, {ON_THEIR_WAY} on their way each"):
                on_way = f"{name}, {ON_THEIR_WAY} on their way each"
                _append(plan, on_way, rows, processes, "ring", ON_THEIR_WAY)
    Path(ring).unlink(missing_ok=True)


def _append(plan: Plan, name: str, rows: int, processes: int, floor: str, group: int = 1) -> None:
    crew, path = plan.crew, plan.path("append")
    with hr.connect(path) as log:
        log.create_topic(TOPIC, bids(1).schema, key="auction")
    for number in range(processes):
        crew.send(number, do_open, path, rows, TOPIC, number)
    for number in range(processes):
        crew.answer(number)
    most = max(1, (16 << 20 if plan.quick else 512 << 20) // (180 * rows))
    per_million: list[float] = []

    def ours() -> float:
        start = time.monotonic() + 0.02
        found: list[Finish] = crew.all(
            processes, do_append, TOPIC, group, start, plan.seconds, max(1, most // processes)
        )
        written = rows * sum(count for count, _, _ in found)
        per_million.append(sum(syncs for _, _, syncs in found) / written * 1e6)
        return written / (max(finished for _, finished, _ in found) - start)

    def other() -> float:
        start = time.monotonic() + 0.02
        growing = floor == "growing"
        file = plan.path("grown" if growing else "ring")
        count, finished, _ = crew.ask(
            0, do_floor, file, growing, processes * group, start, plan.seconds, most
        )
        return float(count * rows / (finished - start))

    goal = _goal(rows, floor) if group == 1 else None
    plan.compare(name, ours, other, FLOORS[floor], "rows/s", "higher", goal)
    if floor == "ring":
        plan.bench.count(
            f"fsyncs per 1,000,000 rows, {name}",
            statistics.median(per_million),
            other=1e6 / rows,
            other_name="one fsync for each batch",
        )
    crew.all(processes, do_close)
    shutil.rmtree(path)


def _goal(rows: int, floor: str) -> float | None:
    return 0.6 if (floor == "growing") == (rows >= KEEPS_ROWS) else None


def measure_producers(plan: Plan) -> None:
    """The same batches, gathered by the producers of 1 to 8 processes; see the top of the file."""
    ring = plan.path("ring")
    floors = [(1, "ring"), (100, "ring"), (100, "growing"), (1_000, "growing"), (10_000, "growing")]
    for rows, floor in floors:
        for processes in (1, 2) if plan.quick else (1, 4, 8):
            noun = "producer" if processes == 1 else "producers"
            name = f"append {rows:,} rows by {processes} {noun}, {floor}"
            if plan.wanted(name):
                _fill(ring, 16 << 20 if plan.quick else 512 << 20)
                _produce(plan, name, rows, processes, floor)
    Path(ring).unlink(missing_ok=True)


def _produce(plan: Plan, name: str, rows: int, processes: int, floor: str) -> None:
    crew, path = plan.crew, plan.path("produce")
    with hr.connect(path) as log:
        log.create_topic(TOPIC, bids(1).schema, key="auction")
    for number in range(processes):
        crew.ask(number, do_open, path, rows, TOPIC, number)
        crew.ask(number, do_producer, TOPIC, OUTSTANDING[rows])
    most = max(1, (16 << 20 if plan.quick else 512 << 20) // (180 * rows))

    def ours() -> float:
        start = time.monotonic() + 0.02
        share = max(1, most // processes)
        found: list[Finish] = crew.all(processes, do_produce, start, plan.seconds, share)
        written = rows * sum(count for count, _, _ in found)
        return written / (max(finished for _, finished, _ in found) - start)

    def other(group: int) -> float:
        start = time.monotonic() + 0.02
        growing = floor == "growing"
        file = plan.path("grown" if growing else "ring")
        count, finished, _ = crew.ask(0, do_floor, file, growing, group, start, plan.seconds, most)
        return float(count * rows / (finished - start))

    groups = [processes * each for each in GROUPS if each <= OUTSTANDING[rows]]
    mine: list[float] = []
    theirs: dict[int, list[float]] = {group: [] for group in groups}
    arms: list[tuple[Callable[[], float], list[float]]] = [(ours, mine)]
    arms += [(partial(other, group), theirs[group]) for group in groups]
    ours()
    for number in range(1 if plan.quick else max(PAIRS, plan.pairs // 2)):
        progress(f"log: {name}: turn {number + 1}")
        for arm, values in arms if number % 2 == 0 else reversed(arms):
            values.append(arm())
    progress("")
    medians = {group: statistics.median(values) for group, values in theirs.items()}
    best = max(groups, key=lambda group: medians[group])
    all_arms = ", ".join(f"{group:,}: {short(rate)}" for group, rate in medians.items())
    note = f"{FLOORS[floor]}, {best:,} batches for each sync, the best ({all_arms} rows/s)"
    goal = None if plan.quick else _goal(rows, floor)
    plan.bench.add(name, mine, theirs[best], note, "rows/s", "higher", goal)
    crew.all(processes, do_close)
    shutil.rmtree(path)


def measure_bare(plan: Plan) -> None:
    """How near to the floor Python processes come that do nothing but share a sync (0007)."""
    crew, ring = plan.crew, plan.path("bare ring")
    for rows in (1,) if plan.quick else (1, 100, 1_000):
        for processes in (2,) if plan.quick else (1, 4, 8):
            name = f"bare group commit, {rows:,} rows, {processes} processes"
            if not plan.wanted(name):
                continue
            _fill(ring, 16 << 20 if plan.quick else 512 << 20)
            Path(f"{ring}.words").unlink(missing_ok=True)
            for number in range(processes):
                crew.ask(number, do_batch, rows, number)
            most = max(1, (8 << 20 if plan.quick else 504 << 20) // (180 * rows))

            def ours(processes: int = processes, rows: int = rows, most: int = most) -> float:
                start = time.monotonic() + 0.02
                share = max(1, most // processes)
                found: list[Finish] = crew.all(processes, do_bare, ring, start, plan.seconds, share)
                written = rows * sum(count for count, _, _ in found)
                return written / (max(finished for _, finished, _ in found) - start)

            def other(processes: int = processes, rows: int = rows, most: int = most) -> float:
                start = time.monotonic() + 0.02
                count, finished, _ = crew.ask(
                    0, do_floor, ring, False, processes, start, plan.seconds, most
                )
                return float(count * rows / (finished - start))

            plan.compare(name, ours, other, FLOORS["ring"], "rows/s", "higher", None)
    for path in plan.folder.glob("bare ring*"):
        path.unlink()


def measure_partitions(plan: Plan) -> None:
    """1,000 partitions against 1."""
    name = "1,000 partitions, append 1,000 rows, 1 process"
    if not plan.wanted(name):
        return
    crew, path = plan.crew, plan.path("partitions")
    with hr.connect(path) as log:
        log.create_topic("one", bids(1).schema, key="auction", partitions=1)
        log.create_topic("many", bids(1).schema, key="auction", partitions=1_000)
    crew.ask(0, do_open, path, 1_000, "one", 0)

    def arm(topic: str) -> Callable[[], float]:
        def run() -> float:
            start = time.monotonic()
            count, finished, _ = crew.ask(0, do_append, topic, 1, start, plan.seconds, 3_000)
            return float(count * 1_000 / (finished - start))

        return run

    arm("many")()
    plan.compare(name, arm("many"), arm("one"), "1 partition, ours", "rows/s", "higher", 0.8)
    crew.ask(0, do_close)
    shutil.rmtree(path)


def measure_scan(plan: Plan) -> None:
    """A full scan against reading the same bytes from the page cache."""
    for rows, goal in ((1_000, 0.5), (1, None), (10_000, None)):
        name = f"scan of {rows:,}-row entries"
        if not plan.wanted(name):
            continue
        size = 4 << 20 if plan.quick else (1 << 20 if rows == 1 else 300 << 20)
        path = plan.path("scan")
        with hr.connect(path) as log:
            log.create_topic(TOPIC, bids(1).schema, key="auction")
            batch = bids(rows)
            count = size // batch.nbytes
            for _ in range(count):
                log.append(TOPIC, batch, durability="os")
            log.sync()
            extents = _extents(log)
            total = sum(end for _, end in extents)
            expected = count * rows
            ours, other = _scan_arms(log, extents, expected, total)
            ours()
            other()
            note = "os.read of the same bytes, 1 MB blocks, page cache"
            plan.compare(
                name, ours, other, note, "MB/s", "higher", goal, max(PAIRS, plan.pairs // 2)
            )
        shutil.rmtree(path)


def _scan_arms(
    log: EmbeddedLog, extents: list[tuple[str, int]], expected: int, total: int
) -> tuple[Callable[[], float], Callable[[], float]]:
    def ours() -> float:
        start = time.monotonic()
        rows = sum(len(batch) for batch in log.read(TOPIC))
        seconds = time.monotonic() - start
        assert rows == expected, (rows, expected)
        return total / seconds / 1e6

    def other() -> float:
        start = time.monotonic()
        done = 0
        for path, end in extents:
            file = os.open(path, os.O_RDONLY)
            left = end
            while left:
                data = os.read(file, min(left, 1 << 20))
                left -= len(data)
                done += len(data)
            os.close(file)
        assert done == total
        return total / (time.monotonic() - start) / 1e6

    return ours, other


def _extents(log: EmbeddedLog) -> list[tuple[str, int]]:
    """The journal files and how many bytes of each are records."""
    journal = log.journal
    number, end = place_of(journal.live.tail().end)
    journal.refresh_control()
    closed = [(file.number, file.end & OFFSET_MASK) for file in journal.closed_files]
    return [(journal.files.path(n), used) for n, used in [*closed, (number, end)]]


def measure_wake(plan: Plan) -> None:
    """From before an append in one process until a follower in another has it."""
    name = "append to wake in another process"
    if not plan.wanted(name):
        return
    path = plan.path("wake")
    batch, stop = bids(1), [{"price": -1}]
    times = 20 if plan.quick else 300
    context = multiprocessing.get_context("spawn")
    back, theirs = context.Pipe()
    bare_back, bare_theirs = context.Pipe()
    bare_read, bare_write = context.Pipe(duplex=False)
    with hr.connect(path) as log:
        log.create_topic(TOPIC, batch.schema)
        log.append(TOPIC, batch)
        follower = Crew(1)
        follower.send(0, do_follow, path, theirs)
        bare = Crew(1)
        bare.send(0, do_wake_bare, bare_read, bare_theirs)
        back.recv_bytes()
        _fill(plan.path("bare"), 16 << 20)
        file = os.open(plan.path("bare"), os.O_RDWR)
        data, offset, signalled = bytes(batch.serialize()), 0, bare_write.fileno()

        def ours() -> float:
            found = []
            for _ in range(times):
                time.sleep(0.001)
                start = time.monotonic_ns()
                log.append(TOPIC, batch)
                found.append(int.from_bytes(back.recv_bytes(), "little") - start)
            return statistics.median(found) / 1e3

        def other() -> float:
            nonlocal offset
            found = []
            for _ in range(times):
                time.sleep(0.001)
                start = time.monotonic_ns()
                os.pwrite(file, data, offset)
                os.fdatasync(file)
                os.write(signalled, b"+")
                found.append(int.from_bytes(bare_back.recv_bytes(), "little") - start)
                offset += len(data)
            return statistics.median(found) / 1e3

        ours()
        other()
        note = "pwrite + fdatasync + a byte through a pipe"
        plan.compare(name, ours, other, note, "us", "lower", 0.5)
        log.append(TOPIC, stop)
        os.write(signalled, b"-")
        follower.answer(0)
        bare.answer(0)
        follower.stop()
        bare.stop()
        os.close(file)
    shutil.rmtree(path)
    Path(plan.path("bare")).unlink()


def measure_idle(plan: Plan) -> None:
    """What a follower costs while nothing comes."""
    name = "idle follower"
    if not plan.wanted(name):
        return
    path = plan.path("idle")
    seconds = 0.3 if plan.quick else 5.0
    with hr.connect(path) as log:
        log.create_topic(TOPIC, bids(1).schema)
        log.append(TOPIC, bids(1))
    time.sleep(0.1)
    cpu, wakes = plan.crew.ask(0, do_idle, path, seconds)
    bench = plan.bench
    what = f"{name} over {seconds:g} s"
    bench.limit(f"{what}: CPU", cpu * 1e3, limit=5.0, unit="ms", better="lower")
    bench.limit(f"{what}: wakes", wakes, limit=1.0, unit="", better="lower")
    shutil.rmtree(path)


# -- opening ----------

OPEN = """
import sys, time
start = time.monotonic()
import pyarrow, numpy, xxhash, pyarrow.ipc, pyarrow.compute
imported = time.monotonic()
import headrace as hr
import headrace.log.embedded.log
row = pyarrow.record_batch({"n": numpy.zeros(1, numpy.int64)})
ready = time.monotonic()
log = hr.connect(sys.argv[1], create=False)
receipt = log.append("small", row)
last = list(log.read("small", after=receipt.position - 1))
done = time.monotonic()
assert len(last) == 1 and last[0].position == receipt.position
print(done - ready, imported - start)
"""

DIE = """
import sys, headrace as hr, pyarrow as pa
log = hr.connect(sys.argv[1])
batch = pa.record_batch({"n": pa.array(range(100), pa.int64())})
print("going", flush=True)
while True:
    log.append("small", batch, durability="os")
"""


def measure_open(plan: Plan) -> None:
    """Opening a large log: first append and first read included, import of libraries excluded."""
    gigabytes = 0.02 if plan.quick else plan.gigabytes
    free = shutil.disk_usage(plan.folder).free / 1e9
    if free < gigabytes * 1.5:
        scaled = round(free / 2, 1)
        print(
            f"open: {free:.0f} GB are free, so {scaled} GB instead of {gigabytes}", file=sys.stderr
        )
        gigabytes = scaled
    names = [
        f"open {gigabytes:g} GB, {how}"
        for how in ("clean", "after kill -9", "after a reboot, nothing cached")
    ]
    if not any(plan.wanted(name) for name in names):
        return
    path = plan.path("open")
    _make_large(path, gigabytes)
    imports: list[float] = []

    def opened() -> float:
        result = subprocess.run(
            [sys.executable, "-c", OPEN, path], check=True, capture_output=True, text=True
        )
        total, libraries = map(float, result.stdout.split())
        imports.append(libraries)
        return total

    def killed() -> float:
        command = [sys.executable, "-c", DIE, path]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.3)
            process.send_signal(signal.SIGKILL)
        return opened()

    def rebooted() -> float:
        killed()
        shutil.rmtree(f"{path}/live")
        _forget_pages(path)
        return opened()

    times = 1 if plan.quick else 5
    for name, arm in zip(names, (opened, killed, rebooted), strict=True):
        if plan.wanted(name):
            found = []
            for number in range(times):
                progress(f"log: {name}: {number + 1} of {times}")
                found.append(arm())
            progress("")
            plan.bench.limit(name, found, limit=1.0, unit="s", better="lower")
    note = "import of pyarrow and numpy, not in the times above"
    plan.bench.add(note, [statistics.median(imports)], [1.0], "a second", "s", "lower")
    shutil.rmtree(path)


def _make_large(path: str, gigabytes: float) -> None:
    batch = bids(INLINE_ROWS)
    wanted = int(gigabytes * 1e9)
    with hr.connect(path) as log:
        log.create_topic(TOPIC, batch.schema, key="auction")
        log.create_topic("small", "n bigint")
        written = 0
        while written < wanted:
            log.append(TOPIC, batch, durability="os")
            written += batch.nbytes
            progress(f"log: making {gigabytes:g} GB: {written / 1e9:.1f}")
        progress("")
        log.sync()


def _forget_pages(path: str) -> None:
    for folder, _, files in os.walk(path):
        for name in files:
            file = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def _fill(path: str, size: int) -> None:
    if os.path.exists(path) and os.path.getsize(path) == size:
        return
    with open(path, "wb") as file:
        for _ in range(size >> 20):
            file.write(MEGABYTE)
        file.flush()
        os.fsync(file.fileno())


# -- counted ----------

COUNTED = """
import sys
import headrace as hr
from benchmarks.log import TOPIC, bids
path, rows, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
log = hr.connect(path, background=False, journal_bytes_first=64 << 20)
log.create_topic(TOPIC, bids(1).schema, key="auction", exist_ok=True)
batch = bids(rows)
for _ in range(count):
    log.append(TOPIC, batch)
"""


def measure_counted(plan: Plan) -> None:
    """System calls and bytes, exact: two runs of different length under strace, subtracted."""
    for rows in (1, 1_000):
        name = f"counted, batches of {rows:,} rows"
        if not plan.wanted(name):
            continue
        path = plan.path("counted")
        few, many = (5, 15) if plan.quick else (50, 250)
        appends = many - few
        if shutil.which("strace") is None:
            print("counted: no strace here, so system calls are not counted", file=sys.stderr)
        else:
            first, second = (_strace(path, rows, count) for count in (few, many))
            calls = (sum(second.values()) - sum(first.values())) / appends
            syncs = (second.get("fdatasync", 0) - first.get("fdatasync", 0)) / appends
            per = 1e6 / rows
            plan.bench.count(
                f"{name}: system calls per 1,000,000 rows",
                calls * per,
                other=2 * per,
                other_name="write + fdatasync for each batch",
            )
            plan.bench.count(
                f"{name}: fsyncs per 1,000,000 rows",
                syncs * per,
                other=per,
                other_name="one fsync for each batch",
                goal=1.0,
            )
        with hr.connect(path) as log:
            log.create_topic(TOPIC, bids(1).schema, key="auction", exist_ok=True)
            batch = bids(rows)
            log.append(TOPIC, batch)
            before = log.journal.live.tail().end
            log.append(TOPIC, batch)
            size = (log.journal.live.tail().end - before) / rows
        plan.bench.count(
            f"{name}: bytes on disk per row",
            size,
            other=batch.serialize().size / rows,
            other_name="the Arrow message alone",
        )
        shutil.rmtree(path)


def _strace(path: str, rows: int, count: int) -> dict[str, int]:
    shutil.rmtree(path, ignore_errors=True)
    report = f"{path}.strace"
    command = ["strace", "-f", "-c", "-U", "calls,name", "-o", report]
    command += [sys.executable, "-c", COUNTED, path, str(rows), str(count)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    found = {}
    for line in Path(report).read_text().splitlines():
        fields = line.split()
        if len(fields) == 2 and fields[0].isdigit() and fields[1] != "total":
            found[fields[1]] = int(fields[0])
    Path(report).unlink()
    return found


MEASURES = (
    measure_counted,
    measure_append,
    measure_producers,
    measure_bare,
    measure_partitions,
    measure_scan,
    measure_wake,
    measure_idle,
    measure_open,
)


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments("log")
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds")
    parser.add_argument("--only", default="", help="measures whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each arm of an append")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="the log that is opened")
    parser.add_argument("--folder", default=None, help="where to write; default: a temporary one")
    parser.set_defaults(pairs=PAIRS_SHORT)
    options = parser.parse_args(given)
    if options.pairs < PAIRS:
        parser.error(f"--pairs must be at least {PAIRS}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and tidy up on the way
    bench = Bench("log")
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir=options.folder))
    crew = Crew(2 if options.quick else 8)
    try:
        plan = Plan(
            bench=bench,
            folder=folder,
            crew=crew,
            quick=options.quick,
            seconds=0.05 if options.quick else options.seconds,
            pairs=options.pairs,
            gigabytes=options.gigabytes,
            only=options.only,
        )
        for measure in MEASURES:
            measure(plan)
    finally:
        crew.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return bench.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
