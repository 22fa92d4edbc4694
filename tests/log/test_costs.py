"""What the log costs, counted: system calls, syncs, bytes. Exact, so it can stand in a test.

Caught: a second sync for one append, one system call more in an append or a reading, a cost that
grows with what others wrote, writes by a reader, padding that eats the disk. Not caught: time;
`./run bench log` measures that against the floor of the machine.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

import headrace as hr
from headrace.log.embedded.format import place_of
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.system import Buffer, OsFile, OsShared, OsSystem, filesystem_of
from headrace.settings import LogSettings
from tests.log.kit import Child, rows

QUIET = LogSettings(background=False)
ROWS = pa.record_batch({"a": pa.array(range(100), pa.int64())})
ROOT = Path(__file__).parents[2]


class CountedFile(OsFile):
    """Each method is one system call."""

    machine: Counted

    @property
    def calls(self) -> Counter[str]:
        return self.machine.calls

    def pread(self, length: int, offset: int) -> bytes:
        self.calls["pread"] += 1
        return super().pread(length, offset)

    def read(self, length: int, offset: int) -> pa.Buffer:
        self.calls["preadv"] += 1
        return super().read(length, offset)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        self.calls["pwritev"] += 1
        super().pwritev(buffers, offset)

    def fdatasync(self) -> None:
        self.calls["fdatasync"] += 1
        time.sleep(self.machine.sync_seconds)
        super().fdatasync()

    def size(self) -> int:
        self.calls["fstat"] += 1
        return super().size()

    def try_lock(self) -> bool:
        self.calls["flock"] += 1
        return super().try_lock()

    def unlock(self) -> None:
        self.calls["flock"] += 1
        super().unlock()


class CountedShared(OsShared):
    """Shared memory costs nothing but the futex calls."""

    calls: Counter[str]

    def wait(self, index: int, seen: int, timeout: float | None) -> None:
        self.calls["futex wait"] += 1
        super().wait(index, seen, timeout)

    def wake(self, index: int, count: int) -> None:
        self.calls["futex wake"] += 1
        super().wake(index, count)


class Counted(OsSystem):
    """This machine, counting what is asked of it."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sync_seconds = 0.0

    def _file(self, file: OsFile) -> OsFile:
        counted = CountedFile(file.path, os.dup(file.fileno()))
        counted.machine = self
        file.close()
        return counted

    def open(self, path: str, *, create: bool = False) -> OsFile:
        self.calls["open"] += 1
        return self._file(super().open(path, create=create))

    def create(self, path: str, size: int) -> OsFile:
        self.calls["create"] += 1
        return self._file(super().create(path, size))

    def map(self, path: str, size: int) -> OsShared:
        self.calls["map"] += 1
        shared = CountedShared(path, size)
        shared.calls = self.calls
        return shared

    def listdir(self, path: str) -> list[str]:
        self.calls["listdir"] += 1
        return super().listdir(path)

    def rename(self, old: str, new: str) -> None:
        self.calls["rename"] += 1
        super().rename(old, new)

    def unlink(self, path: str) -> None:
        self.calls["unlink"] += 1
        super().unlink(path)

    def fsync_dir(self, path: str) -> None:
        self.calls["fsync of a folder"] += 1
        super().fsync_dir(path)

    @contextmanager
    def during(self) -> Iterator[Counter[str]]:
        """What is asked for inside the block."""
        before = self.calls.copy()
        found: Counter[str] = Counter()
        yield found
        found.update(self.calls - before)


@pytest.fixture
def machine() -> Counted:
    return Counted()


@pytest.fixture
def counted(folder: str, machine: Counted) -> Iterator[EmbeddedLog]:
    """A log with a topic, after a first append."""
    with EmbeddedLog(folder, QUIET, system=machine) as log:
        log.create_topic("t", ROWS.schema)
        log.append("t", ROWS)
        yield log


ONE_APPEND = {
    "flock": 4,  # the append lock and the sync lock, taken and given back
    "pread": 1,  # is there an entry that a dead writer left?
    "pwritev": 1,
    "fdatasync": 1,
    "futex wake": 1,  # the sync lock; nobody waits for the append lock
}


@pytest.mark.parametrize("count", [1, 100, 10_000])
def test_a_durable_append_is_eight_system_calls(
    counted: EmbeddedLog, machine: Counted, count: int
) -> None:
    """One write, one sync, whatever the number of rows. R-A4"""
    batch = pa.record_batch({"a": pa.array(range(count), pa.int64())})
    with machine.during() as calls:
        counted.append("t", batch)
    assert calls == ONE_APPEND


def test_a_million_rows_cost_eight_thousand_calls(folder: str, machine: Counted) -> None:
    """1,000 batches of 1,000 rows: a sync each, and little more for the files they fill. R-A4"""
    batch = pa.record_batch({"a": pa.array(range(1_000), pa.int64())})
    with EmbeddedLog(folder, QUIET, system=machine) as log:
        log.create_topic("t", batch.schema)
        with machine.during() as calls:
            for _ in range(1_000):
                log.append("t", batch)
    files = calls["create"]
    assert files <= 3
    assert calls["fdatasync"] <= 1_000 + 4 * files
    assert sum(calls.values()) <= 8_000 + 60 * files


def test_weaker_durability_never_syncs(counted: EmbeddedLog, machine: Counted) -> None:
    """`os`: the entry is in the operating system's hands, four calls. R-A4"""
    with machine.during() as calls:
        for _ in range(10):
            counted.append("t", ROWS, durability="os")
    assert calls == {"flock": 20, "pread": 10, "pwritev": 10}


def test_a_transaction_over_forty_topics_is_one_write_and_one_sync(
    counted: EmbeddedLog, machine: Counted
) -> None:
    """An entry costs the same however many topics, counters and offsets it holds. R-A15"""
    for number in range(40):
        counted.create_topic(f"t{number}", ROWS.schema)
    with counted.transaction() as tx:
        for number in range(40):
            tx.append(f"t{number}", ROWS)
    with machine.during() as calls, counted.transaction() as tx:
        for number in range(40):
            tx.append(f"t{number}", ROWS)
            tx.expect(f"counter/{number}", 0)
    assert calls == ONE_APPEND


def test_a_thousand_partitions_cost_what_one_costs(counted: EmbeddedLog, machine: Counted) -> None:
    """Partitions are runs inside one entry, not files. R-A1"""
    counted.create_topic("many", ROWS.schema, key="a", partitions=1_000)
    counted.append("many", ROWS)
    with machine.during() as calls:
        counted.append("many", ROWS)
    assert calls == ONE_APPEND


@pytest.mark.parametrize("others", [1, 500])
def test_an_append_costs_the_same_however_much_others_wrote(
    counted: EmbeddedLog, machine: Counted, others: int
) -> None:
    """What another process appended is in shared memory; nobody reads it to go on. R-A9"""
    code = """
        log = hr.connect(folder, background=False)
        for _ in range(int(sys.argv[2])):
            log.append("t", [{"a": 1}], durability="os")
        log.sync()
        os._exit(0)  # without the mark of a clean end
    """
    with Child(counted.path, code, others) as child:
        child.wait()
    with machine.during() as calls:
        counted.append("t", ROWS)
    assert calls == ONE_APPEND


def test_threads_share_syncs(folder: str, machine: Counted) -> None:
    """Eight threads: who waits while a sync is under way is served by the next one. R-A4"""
    threads, each = 8, 25
    machine.sync_seconds = 0.002  # long enough for the others to come
    with EmbeddedLog(folder, QUIET, system=machine) as log:
        log.create_topic("t", ROWS.schema)

        def work() -> None:
            for _ in range(each):
                log.append("t", ROWS)

        with machine.during() as calls:
            workers = [threading.Thread(target=work) for _ in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        assert calls["pwritev"] >= threads * each
        assert calls["fdatasync"] <= threads * each // 2
        assert len(rows(log.read("t"))) == threads * each * len(ROWS)


def test_a_reading_writes_nothing(counted: EmbeddedLog, machine: Counted) -> None:
    """A bounded reading reads each window once and changes nothing, not even a lock. R-A9"""
    for _ in range(50):
        counted.append("t", ROWS)
    assert len(rows(counted.read("t"))) == 51 * len(ROWS)
    with machine.during() as calls:
        assert len(rows(counted.read("t"))) == 51 * len(ROWS)
    assert set(calls) <= {"pread", "preadv"}
    assert sum(calls.values()) <= 2


def test_opening_and_reading_an_idle_log_writes_no_entry(folder: str, machine: Counted) -> None:
    """Open, read, close: nothing is appended and no data is synced for it. R-A9"""
    with hr.connect(folder, background=False) as log:
        log.create_topic("t", ROWS.schema)
        log.append("t", ROWS)
    with machine.during() as calls, EmbeddedLog(folder, QUIET, system=machine) as log:
        assert len(rows(log.read("t"))) == len(ROWS)
    assert calls["pwritev"] == 0
    assert calls["fdatasync"] == 0
    assert calls["create"] == calls["rename"] == calls["fsync of a folder"] == 0


def test_an_entry_is_its_arrow_bytes_and_little_more(counted: EmbeddedLog) -> None:
    """A header, a section and a run: 208 bytes, and padding to 64. R-A9"""
    for count in (1, 1_000):
        batch = pa.record_batch({"a": pa.array(range(count), pa.int64())})
        counted.append("t", batch)
        before = counted.journal.live.tail().end
        counted.append("t", batch)
        size = counted.journal.live.tail().end - before
        assert batch.serialize().size + 208 <= size <= batch.serialize().size + 256 + 63


def cached_behind(path: str, offset: int) -> int:
    """Pages of a file that the page cache holds behind `offset`."""
    size = os.path.getsize(path)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        held = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), held
        )
        del start
    assert not failed
    return sum(one & 1 for one in bytes(held)[offset // mmap.PAGESIZE + 1 :])


def test_an_append_makes_the_kernel_read_nothing_ahead(folder: str) -> None:
    """Looking at the end before each write is not reading in order: nothing behind it is cached."""
    if filesystem_of(os.path.dirname(folder)) == "tmpfs":
        pytest.skip("a file in memory is its own cache")
    batch = pa.record_batch({"a": pa.array(range(17_008), pa.int64())})
    ends, behind = [], 0
    with hr.connect(folder, background=False, journal_bytes_first=16 << 20) as log:
        log.create_topic("t", batch.schema)
        for _ in range(100):
            log.append("t", batch, durability="os")
            number, offset = place_of(log.journal.live.tail().end)
            ends.append(offset % mmap.PAGESIZE)
            if len(ends) > 2:  # past the zeros that small entries take with them
                behind = max(behind, cached_behind(log.journal.files.path(number), offset))
        assert number == 1
    assert 0 in ends  # the page of the end was not cached when it was looked at
    assert behind == 0


@pytest.mark.slow
def test_the_benchmark_runs() -> None:
    """`./run bench log --quick` measures everything once and prints the JSON of the design."""
    command = [sys.executable, "-m", "benchmarks.log", "--quick", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert result.stdout, result.stderr  # the exit code says whether goals were met
    report = json.loads(result.stdout)
    assert report["benchmark"] == "log"
    measures = [one["measure"] for one in report["results"]]
    for name in ("append 1 rows", "partitions", "scan", "wake", "idle", "open", "system calls"):
        assert any(name in measure for measure in measures), name
