"""The short cut of an append (`shortcut.c`) against the long way, which is its specification.

Caught: a record with other bytes than the long way's, other offsets, counters or conditions; an
entry shown before it is synced; threads, handles and processes that exclude one another no more
where some go one way and some the other; calls that cannot be interrupted or closed. Seeded bugs
in the C source show that these tests notice. Not caught: what needs a crash between two steps: for
that the crash enumerator has workloads that go this way (`workloads.IN_C`), and seeded bugs of its
own (`shortcut_bugs`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace import errors
from headrace.interfaces import Part
from headrace.log.embedded import shortcut
from headrace.log.embedded.files import JournalFiles
from headrace.log.embedded.format import ENTRY, Record, address_of
from headrace.log.embedded.live import COUNTERS_NUMBER, SYNCED, SYNCED_POSITION, WRITTEN_WORD
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.packing import Packer
from headrace.log.embedded.reader import Reading
from headrace.log.embedded.straight import Straight
from headrace.log.embedded.system import OsFile, OsSystem
from headrace.model.topic import define
from headrace.settings import LogSettings
from headrace.testing import shortcut_bugs
from headrace.testing.disk import Killed
from tests.log.kit import PRELUDE, TINY, Child, checked, values

SOURCE = Path(shortcut.__file__).with_suffix(".c")
ROW = pa.record_batch({"a": pa.array([1], pa.int64())})
QUIET: dict[str, Any] = {"background": False}

pytestmark = pytest.mark.skipif(shortcut.compiled() is None, reason="the short cut is not compiled")


def long_way(folder: str, **settings: Any) -> EmbeddedLog:
    """A handle that has no short cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_SHORTCUT", "0")
        return hr.connect(folder, **settings)


def counted(log: EmbeddedLog) -> int:
    """How many syncs of this handle the short cut has made."""
    short = log.journal.short
    return 0 if short is None else short.syncs()


# -- the same record --------------------------------------------------------------------------


@given(st.integers(129, 5000), st.randoms(use_true_random=False))
def test_its_checksum_is_that_of_xxhash(length: int, chance: Random) -> None:
    data = chance.randbytes(length)
    assert shortcut.compiled().checksum(data) == xxhash.xxh3_64_intdigest(data)


def batches(chance: Random, rows: int) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "k": pa.array([chance.randrange(50) for _ in range(rows)], pa.int64()),
            "v": pa.array(["x" * chance.randrange(40) for _ in range(rows)]),
        }
    )


def history(log: EmbeddedLog, seed: int) -> list[object]:
    """Entries of every kind, drawn; what the log answered."""
    chance, said = Random(seed), list[object]()
    schema = "k bigint, v string"
    log.create_topic("one", schema)
    log.create_topic("many", schema, key="k", partitions=7)
    log.create_topic("text", "text")
    for number in range(120):
        kind, rows = chance.randrange(9), chance.choice([1, 1, 3, 40, 700])
        topic = chance.choice(["one", "many"])
        batch = batches(chance, rows)
        options: dict[str, Any] = {}
        try:
            if kind == 0:
                with log.transaction() as tx:
                    tx.append("one", batch)
                    tx.append("many", batches(chance, 2))
                    tx.append("text", ["a"] * rows)
                    if rows > 3:
                        tx.append("one", batch)  # once more: for the long way
                    tx.put("place", {"number": number, "note": "y" * chance.randrange(200)})
            elif kind == 1:
                with log.transaction() as tx:
                    tx.append(topic, batch)
                    tx.expect("c", chance.choice([number, log.counter("c")]))
                    tx.require("d", chance.choice([0, 0, 1]))
            elif kind == 2:
                options = {"expect": {f"counter/{number % 5}": 0}}
            elif kind == 3:
                options = {"transactions": [1] * rows, "headers": {"h": b"1"}}
            elif kind == 4:
                with log.transaction() as tx:
                    tx.commit_offsets("g", {"one": {0: number}})
            elif kind == 5:
                topic, batch = "text", ["a", "b"]
            if kind in (0, 1, 4):
                receipt: Any = tx.receipt
            else:
                receipt = log.append(topic, batch, **options)
            said.append((receipt.position, receipt.rows, receipt.offsets))
        except errors.Conflict as conflict:
            said.append((conflict.fact, conflict.details))
    said += [log.ends("one"), log.ends("many"), log.counter("c"), log.counter("counter/3")]
    return said


def records(folder: str) -> list[tuple[object, ...]]:
    """Every record but for its times, and what hangs on them: checksums, and the log's id."""
    log_id = hr.connect(folder, create=False).journal.log_id
    files, found = JournalFiles(OsSystem(), folder, log_id), []
    for number in files.numbers():
        size = files.file(number)[1]
        try:
            for record, data, at in files.walk(
                address_of(number, 0), address_of(number, size), bodies=True
            ):
                found.append((*content(record, data.slice(at, record.length).to_pybytes()),))
        except errors.LogDamaged:
            pass  # the zeros behind the newest record
    return found


def content(record: Record, data: bytes) -> tuple[object, ...]:
    control = record.control() if record.kind == ENTRY else {}
    sections = [
        (s.topic, s.schema, s.flags, s.rows, s.slot, s.offset, s.checksum, bytes(s.table))
        for s in record.sections()
    ]
    place = (record.address, record.position, record.synced, record.previous_control)
    shape = (record.kind, record.flags, record.length)
    return (*place, *shape, control, sections, data[record.body_offset :] if sections else b"")


def both_ways(folder: Path, seed: int) -> None:
    folders = [str(folder / name) for name in ("short", "long")]
    settings = {**QUIET, **(TINY if seed % 2 else {}), "journal_entries_max": 50}
    with hr.connect(folders[0], **settings) as short, long_way(folders[1], **settings) as long:
        assert history(short, seed) == history(long, seed)
        assert counted(short) > 60
        assert counted(long) == 0
    one, other = (records(folder) for folder in folders)
    assert len(one) > 100
    assert one == other


@pytest.mark.parametrize("seed", range(6))
def test_a_history_has_the_same_records_both_ways(tmp_path: Path, seed: int) -> None:
    both_ways(tmp_path, seed)


def test_the_short_cut_makes_the_calls_of_an_append_and_no_more(tmp_path: Path) -> None:
    """One look, one write, one sync, a lock and a sync lock; then the look for the folder."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    folder, trace = str(tmp_path / "log"), tmp_path / "trace"
    with hr.connect(folder, **QUIET) as log:
        log.create_topic("t", "a bigint")
    code = """
        import pyarrow as pa
        log = hr.connect(folder, background=False)
        batch = pa.record_batch({"a": pa.array([1], pa.int64())})
        for _ in range(3):
            log.append("t", batch)
        os.path.exists("/begin")
        for _ in range(5):
            log.append("t", batch)
        os.path.exists("/end")
        say("done")
    """
    calls = "flock,pread64,pwritev,pwritev2,fdatasync,fsync,newfstatat,stat,futex,openat"
    program = PRELUDE + textwrap.dedent(code)
    command = ["strace", "-f", "-o", str(trace), "-e", f"trace={calls}"]
    subprocess.run([*command, sys.executable, "-c", program, folder], check=True, timeout=60)
    lines = trace.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if '"/begin"' in line)
    last = next(i for i, line in enumerate(lines) if '"/end"' in line)
    made = [line.split()[1].partition("(")[0] for line in lines[first + 1 : last]]
    made = ["pwritev" if call == "pwritev2" else call for call in made]
    one = ["flock", "pread64", "pwritev", "flock"]
    one += ["flock", "fdatasync", made[6] if len(made) > 6 else "", "flock", "futex"]
    assert made == one * 5
    assert "stat" in one[6]


# -- partitions ---------------------------------------------------------------------------------

KEYS = st.one_of(
    *(
        st.tuples(st.just(kind), st.lists(st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)))
        for kind, bits in ((pa.int8(), 8), (pa.int16(), 16), (pa.int32(), 32), (pa.int64(), 64))
    ),
    st.tuples(st.just(pa.string()), st.lists(st.text(max_size=90))),
    st.tuples(st.just(pa.int64()), st.lists(st.one_of(st.none(), st.integers(0, 9)))),
)


@given(KEYS, st.integers(2, 40), st.integers(0, 5), st.integers(1, 9), st.booleans())
def test_rows_go_to_the_partitions_that_numpy_gives_them(
    keys: tuple[pa.DataType, list[Any]], partitions: int, skip: int, times: int, ordered: bool
) -> None:
    """For ever the same, whichever way an append takes; slices and nulls included. R-A9"""
    kind, column = keys
    schema = pa.schema([("k", kind), ("n", pa.int64())])
    rows = [key for key in column for _ in range(times)]
    batch = pa.record_batch([pa.array(rows, kind), range(len(rows))], schema=schema).slice(skip)
    topic = define("t", schema, "k", None, partitions, "events")
    packer, plain = Packer(topic), Packer(topic)
    assert packer._spread_by is not None
    plain._spread_by = None
    mine, my_runs, my_only = packer._placed(batch, None, ordered=ordered)
    other, other_runs, other_only = plain._placed(batch, None, ordered=ordered)
    assert mine == other
    assert (my_runs is None, my_only) == (other_runs is None, other_only)
    if my_runs is not None and other_runs is not None:
        assert my_runs.tobytes() == other_runs.tobytes()


# -- both ways at once --------------------------------------------------------------------------


def append_many(log: EmbeddedLog, first: int, count: int) -> None:
    for a in range(first, first + count):
        log.append("t", row(a))


def in_threads(*calls: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failed


def crowd(path: Path) -> None:
    folder = str(path / "log")
    with hr.connect(folder, **TINY) as short, long_way(folder, **TINY) as long:
        short.create_topic("t", "a bigint")
        short.append("t", ROW)
        calls = [functools.partial(append_many, short, 1000 * n, 150) for n in range(1, 5)]
        calls += [functools.partial(append_many, long, 1000 * n, 150) for n in range(5, 7)]
        in_threads(*calls)
        found = values(short.read("t"))
        assert values(long.read("t")) == found
        wanted = [1, *(1000 * n + i for n in range(1, 7) for i in range(150))]
        assert sorted(found) == wanted
        for n in range(1, 7):
            own = [a for a in found if a // 1000 == n]
            assert own == sorted(own), "each thread's own order is kept"
        assert short.ends("t") == [901]
        assert counted(short) > 0
    assert checked(folder).ok


def test_threads_handles_and_both_ways_exclude_one_another(tmp_path: Path) -> None:
    """Every row once, offsets without a gap, readers of both ways see the same order. R-A9"""
    crowd(tmp_path)


def test_conditions_hold_between_processes_of_both_ways(tmp_path: Path) -> None:
    """A counter that both ways move is moved by one of them at a time."""
    folder = str(tmp_path / "log")
    code = """
        import pyarrow as pa
        log = hr.connect(folder)
        won = 0
        while won < 60:
            try:
                log.append("t", [{"a": won}], expect={"turn": log.counter("turn")})
            except errors.Conflict:
                continue
            won += 1
    """
    with hr.connect(folder) as log:
        log.create_topic("t", "a bigint")
        with Child(folder, code) as one, Child(folder, code) as two:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("HEADRACE_SHORTCUT", "0")
                with Child(folder, code) as three:
                    three.wait()
            one.wait()
            two.wait()
        assert log.counter("turn") == 180
        assert log.ends("t") == [180]


def test_a_lock_that_the_long_way_holds_keeps_the_short_cut_out(tmp_path: Path) -> None:
    """Of the same handle: a timeout that names who has it; then it goes on. R-D3"""
    folder = str(tmp_path / "log")
    with hr.connect(folder, lock_timeout_seconds=0.2, **QUIET) as log:
        log.create_topic("t", "a bigint")
        log.append("t", ROW)
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with log.journal.appending():
                entered.set()
                leave.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        assert entered.wait(10)
        with pytest.raises(errors.LockTimeout) as caught:
            log.append("t", ROW)
        leave.set()
        thread.join()
        assert caught.value.details["pid"] == os.getpid()
        assert log.append("t", ROW).offsets == {"t": {0: 1}}


# -- what is not synced is not shown --------------------------------------------------------------

SLOW = """
    import pyarrow as pa
    from tests.log import test_shortcut as kit
    log = hr.connect(folder, background=False)
    log.append("t", kit.row(7))
    say("ready")
    sys.stdin.readline()
    try:
        log.append("t", kit.row(8))
    except errors.Unknown:
        say("unknown")
    say("appended")
    os._exit(0)  # a mark would sync
"""


def row(a: int) -> pa.RecordBatch:
    return pa.record_batch({"a": pa.array([a], pa.int64())})


@contextlib.contextmanager
def under_strace(child: Child, what: str, folder: Path) -> Iterator[None]:
    """Tamper with what a process that runs does from now on."""
    command = ["strace", "-f", "-qq", "-o", str(folder / "trace"), "-p", str(child.pid)]
    command += ["-e", "trace=fdatasync", "-e", f"inject=fdatasync:{what}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as tracer:
        deadline = time.monotonic() + 20
        status = Path(f"/proc/{child.pid}/status")
        while f"TracerPid:\t{tracer.pid}" not in status.read_text():
            assert time.monotonic() < deadline, "strace does not trace"
            assert tracer.poll() is None, "strace does not work here"
            time.sleep(0.01)
        yield


@contextlib.contextmanager
def followed(folder: Path) -> Iterator[tuple[EmbeddedLog, list[tuple[int, float]]]]:
    """A log, and what a thread sees that follows it and waits, with the times."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    with hr.connect(folder / "log", **QUIET) as log:
        log.create_topic("t", "a bigint")
        log.append("t", ROW)
        seen: list[tuple[int, float]] = []

        def follow() -> None:
            with contextlib.suppress(errors.HeadraceError):
                for batch in log.read("t", follow=True):
                    seen.extend((a, time.monotonic()) for a in batch.data["a"].to_pylist())

        thread = threading.Thread(target=follow)
        thread.start()
        yield log, seen
    thread.join(20)
    assert not thread.is_alive()


def until(happened: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # and what was done has settled: who follows sleeps again


def test_a_follower_hands_out_nothing_before_it_is_synced(tmp_path: Path) -> None:
    """R-A4: what was seen, a power cut does not take back."""
    with followed(tmp_path) as (log, seen), Child(log.path, SLOW) as child:
        assert child.line() == "ready"
        until(lambda: len(seen) == 2)
        with under_strace(child, "delay_enter=700000:when=1", tmp_path):
            began = time.monotonic()
            child.go()
            assert child.line() == "appended"
        until(lambda: len(seen) == 3)
        assert [a for a, _ in seen] == [1, 7, 8]
        assert seen[2][1] - began >= 0.7, "before it was synced"


def test_a_follower_never_shows_what_could_not_be_synced(tmp_path: Path) -> None:
    with followed(tmp_path) as (log, seen), Child(log.path, SLOW) as child:
        assert child.line() == "ready"
        until(lambda: len(seen) == 2)
        with under_strace(child, "error=EIO:when=1", tmp_path):
            child.go()
            assert child.line() == "unknown"
            assert child.line() == "appended"
        assert (Path(log.path) / "poisoned").exists()
        until(lambda: len(seen) == 3, 0.5)
        assert [a for a, _ in seen] == [1, 7]


# -- interrupts, closing, forks -------------------------------------------------------------------


@pytest.mark.parametrize("what", ["append", "sync", "follow"])
def test_an_interrupt_comes_while_it_waits(tmp_path: Path, what: str) -> None:
    """^C ends a wait for the append lock, for a sync of somebody else, and for the next entry."""
    folder = str(tmp_path / "log")
    code = """
        import pyarrow as pa
        batch = pa.record_batch({"a": pa.array([1], pa.int64())})
        log = hr.connect(folder, lock_timeout_seconds=60, background=False)
        log.append("t", batch)
        reading = log.read("t", follow=True)
        next(reading)
        say("ready")
        sys.stdin.readline()
        try:
            next(reading) if sys.argv[2] == "follow" else log.append("t", batch)
        except KeyboardInterrupt:
            say("interrupted")
        os._exit(0)
    """
    with hr.connect(folder, **QUIET) as log:
        log.create_topic("t", "a bigint")
        with Child(folder, code, what) as child:
            assert child.line() == "ready"
            lock = log.journal.sync_lock if what == "sync" else log.journal.append_lock
            if what != "follow":
                lock.acquire(5)
            try:
                child.go()
                time.sleep(0.3)
                child.process.send_signal(signal.SIGINT)
                assert child.line() == "interrupted"
            finally:
                lock.release()


def open_files() -> list[str]:
    """What this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def test_closing_ends_a_follower_that_sleeps(tmp_path: Path) -> None:
    """And all that the handle had open, however many files it has gone through."""
    log, seen = hr.connect(tmp_path / "log", **TINY), list[int]()
    log.create_topic("t", "a bigint")
    log.append("t", ROW)

    def follow(reading: Reading) -> None:
        seen.extend(values(reading))

    thread = threading.Thread(target=follow, args=(log.read("t", follow=True),))
    thread.start()
    for _ in range(300):
        log.append("t", ROW)
    log.close()
    thread.join(10)
    assert not thread.is_alive()
    assert seen
    del log, thread
    gc.collect()
    assert [name for name in open_files() if name.startswith(str(tmp_path))] == []


def test_a_forked_child_has_a_short_cut_of_its_own(tmp_path: Path) -> None:
    with hr.connect(tmp_path / "log", **QUIET) as log:
        log.create_topic("t", "a bigint")
        log.append("t", ROW)
        child = os.fork()
        if child == 0:
            try:
                for _ in range(20):
                    log.append("t", ROW)
                os._exit(0)
            except BaseException:
                os._exit(1)
        for _ in range(20):
            log.append("t", ROW)
        assert os.waitpid(child, 0)[1] == 0
        assert log.ends("t") == [41]


def test_a_forked_child_holds_no_lock_of_its_parent(tmp_path: Path) -> None:
    """Also if a thread was inside: else a parent that is killed leaves its locks behind."""
    with hr.connect(tmp_path / "log", **QUIET) as log:
        log.create_topic("t", "a bigint")
        log.append("t", ROW)
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.extend(values(log.read("t", follow=True))))
        thread.start()
        until(lambda: log.journal.live.words.cast("B").cast("I")[WRITTEN_WORD + 1] == 1)
        child = os.fork()
        if child == 0:
            os._exit(any("/locks/" in name for name in open_files()))
        assert os.waitpid(child, 0)[1] == 0
    thread.join(10)
    assert seen == [1]


def test_another_log_at_the_same_path_is_not_written_to(tmp_path: Path) -> None:
    """It opens the journal's file once more, which may be another's by then."""
    folder = str(tmp_path / "log")
    with hr.connect(folder, **QUIET) as log:
        log.create_topic("t", "a bigint")
        log.append("t", ROW)
    old = hr.connect(folder, **QUIET)
    assert (old.ends("t"), old.counter("c")) == ([1], 0)  # nothing is left to be mapped
    Path(folder).rename(tmp_path / "moved")
    with hr.connect(folder, **QUIET) as new:
        new.create_topic("t", "a bigint")
        for a in range(50):
            new.append("t", row(a))
        for _ in range(5):
            old.append("t", ROW, durability="os")
        with pytest.raises(errors.Unknown):
            old.append("t", ROW)
        assert values(new.read("t")) == list(range(50))
    with contextlib.suppress(errors.LogGone):
        old.close()
    assert checked(folder).ok


def test_an_append_needs_no_descriptor_to_spare(tmp_path: Path) -> None:
    """What the short cut wants to open comes behind the entry, which is taken: R-A4."""
    folder = str(tmp_path / "log")
    with hr.connect(folder, **QUIET) as log:
        log.create_topic("t", "a bigint")
        log.append("t", ROW)
    code = """
        import resource
        log = hr.connect(folder, background=False)
        log.ends("t")
        most = max(int(name) for name in os.listdir("/proc/self/fd")) + 2
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            os.close(taken.pop())  # for the journal's own
        say(log.append("t", [{"a": 2}]).offsets)
        os._exit(0)
    """
    with Child(folder, code) as child:
        assert child.line() == "{'t': {0: 1}}"


def test_who_comes_while_the_file_before_is_closed_finds_the_one_of_now(tmp_path: Path) -> None:
    """Closing lets other threads run: they met what was being freed, and a descriptor let go."""
    with hr.connect(tmp_path / "log", **QUIET) as log:
        log.create_topic("t", "a bigint")
        log.append("t", ROW)
        short, straight, came = log.journal.short, log._straight["t"], list[bool]()
        assert short is not None

        class Closing(OsFile):
            def close(self) -> None:
                super().close()
                came.append(straight(ROW, durable=True) is not None)

        live, (file, size) = log.journal.live, log.journal.files.file(1)
        for kind in (Closing, OsFile):
            again = kind(file.path, os.open(file.path, os.O_RDWR))
            table, number = live.current_table(), live.words[COUNTERS_NUMBER]
            short.fit(again, 1, size, live.end_words(1), table, number)
            del again
        assert came == [True]
        assert log.ends("t") == [2]


def test_what_a_follower_asks_may_raise_as_often_as_it_likes(tmp_path: Path) -> None:
    """In a simulation it does, at every death: each took a reference to None that was not its."""

    class Dying(OsSystem):
        dead = False

        def takes_short_cut(self) -> bool:
            return True

        def give_way(self) -> None:
            if self.dead:
                raise Killed

    system = Dying()
    with EmbeddedLog(str(tmp_path / "log"), LogSettings(background=False), system=system) as log:
        log.create_topic("t", "a bigint")
        log.append("t", ROW)
        short, before = log.journal.short, sys.getrefcount(None)
        assert short is not None
        system.dead = True
        for _ in range(500):
            with pytest.raises(Killed):
                short.next(0, 0, 0, 0, 0.0)
        system.dead = False
        assert sys.getrefcount(None) > before - 250


class Watched:
    """A short cut whose calls of `next` are counted."""

    def __init__(self, short: Any) -> None:
        self.short = short
        self.waits: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.short, name)

    def next(self, *given: Any) -> Any:
        self.waits.append(given[-1])
        return self.short.next(*given)


@pytest.mark.parametrize("how", ["poisoned", "unsynced", "closed"])
def test_a_follower_sleeps_while_nothing_can_be_shown(tmp_path: Path, how: str) -> None:
    """An entry that will not be synced, or not for long, is not asked for again and again. R-A2"""
    with hr.connect(tmp_path / "log", **QUIET) as log, hr.connect(log.path, **QUIET) as other:
        log.create_topic("t", "a bigint")
        log.append("t", ROW)
        watched: Any = Watched(other.journal.short)
        other.journal.short = watched
        seen: list[int] = []
        reading = other.read("t", follow=True, timeout=1e19)

        def follow() -> None:
            for batch in reading:
                seen.extend(batch.data["a"].to_pylist())

        thread = threading.Thread(target=follow)
        thread.start()
        until(lambda: len(watched.waits) == 1)
        if how == "closed":
            watched.short.close()
        log.append("t", row(2), durability="os")
        if how == "poisoned":
            log.journal._poison()
        time.sleep(0.3)
        assert seen == [1]
        assert len(watched.waits) < 10
        assert max(watched.waits) <= 60
        if how != "poisoned":
            log.sync()
            until(lambda: len(seen) == 2)
            assert seen == [1, 2]
        other.close()
        thread.join(10)
        assert not thread.is_alive()


def test_what_was_read_early_is_not_shown_from_a_file_that_was_left(tmp_path: Path) -> None:
    """Somebody else may have recovered meanwhile: the entry is in another file, or nowhere."""
    with hr.connect(tmp_path / "log", **QUIET) as log:
        log.create_topic("t", "a bigint")
        log.append("t", ROW)
        before = log.journal.live.tail()
        log.append("t", row(2))
        tail, short = log.journal.live.tail(), log.journal.short
        assert short is not None
        assert short.confirm(before.end, tail.end, tail.checksum, 1.0)
        words = log.journal.live.words
        synced = words[SYNCED]
        words[SYNCED] = address_of(2, 4096)
        assert not short.confirm(before.end, tail.end, tail.checksum, 1.0)
        words[SYNCED] = synced


def test_lengths_that_overflow_crash_no_follower(tmp_path: Path) -> None:
    folder = str(tmp_path / "log")
    with hr.connect(folder, **QUIET) as log:
        log.create_topic("t", "a bigint")
        log.append("t", ROW)
        code = """
            log = hr.connect(folder, background=False)
            try:
                for batch in log.read("t", follow=True):
                    say("read")
            except Exception:
                say("survived")
            os._exit(0)
        """
        with Child(folder, code) as child:
            assert child.line() == "read"
            time.sleep(0.2)
            draft = log._drafter.draft([Part("t", ROW)], {}, {}, {})
            assert draft is not None
            section = bytearray(draft.section_bytes)
            struct.pack_into("<QQ", section, 40, 2**64 - 2**40, 2**40 + 136)
            draft.section_bytes = bytes(section)
            taken = log.journal.append(draft, log.journal.catalog)
            assert taken is not None
            log.journal.sync(taken.end, taken.position)
            assert child.line() == "survived"


def test_batches_without_a_key_take_turns(tmp_path: Path) -> None:
    """Each goes to the next partition, also one that is too large for the short cut."""
    with hr.connect(tmp_path / "log", inline_bytes_max=1000, **QUIET) as log:
        log.create_topic("t", "a bigint", partitions=2)
        large = pa.record_batch({"a": pa.array(range(1000), pa.int64())})
        for _ in range(10):
            log.append("t", large)
        assert log.ends("t") == [5000, 5000]


def deleted(folder: Path) -> None:
    """A way that was made for a topic is never taken for a newer catalog than that topic's."""
    with hr.connect(folder / "log", **QUIET) as log, pytest.MonkeyPatch.context() as patch:
        log.create_topic("t", "a bigint")

        def late(*given: Any) -> Straight:
            patch.undo()
            log.delete_topic("t")
            log.topics()  # the control state is the newer one now
            return Straight(*given)

        patch.setattr("headrace.log.embedded.log.Straight", late)
        log.append("t", ROW)
        assert "t" in log._straight
        with pytest.raises(errors.UnknownTopic):
            log.append("t", ROW)


def test_a_topic_deleted_while_its_way_is_made_takes_nothing(tmp_path: Path) -> None:
    deleted(tmp_path)


def test_it_can_be_left_out(tmp_path: Path) -> None:
    with long_way(str(tmp_path / "log")) as log:
        assert log.journal.short is None


def test_another_version_of_it_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was compiled from an older source is not used."""
    monkeypatch.setattr(shortcut.compiled(), "VERSION", -1)
    assert shortcut.compiled() is None


# -- seeded bugs ----------------------------------------------------------------------------------

BUGS: dict[str, tuple[str, str, str]] = {
    "a key hashed with its sign lost": (
        "value = (int64_t)((u64)value << unused) >> unused;",
        "(void)unused;",
        "partitions",
    ),
    "no look at the end": ("|| !memcmp(found, MAGIC, 8)", "", "dead"),
    "topics that have changed": ("|| tail.catalog != entry->catalog", "", "deleted"),
    "an offset for each run only": (
        "store_at(s, end, run->base + run->rows)",
        "store_at(s, end, run->base + 1)",
        "history",
    ),
    "a new counter is taken for one that is there": (
        "&& (known || !condition->moves)",
        "",
        "history",
    ),
    "control records do not chain": ("tail.control = tail.end;", ";", "history"),
    "a topic twice in an entry": (
        "if (entry->sections[j].topic == one->topic)",
        "if (false)",
        "history",
    ),
    "no room is left for the roll": (
        "+ length + HEADER_BYTES > fit->size",
        "> fit->size",
        "history",
    ),
    "threads do not exclude one another": (
        "    if (__atomic_exchange_n(flag, 1, __ATOMIC_SEQ_CST))\n        return false;\n",
        "",
        "threads",
    ),
}


def dead_writer(folder: Path) -> None:
    """A whole record stands at the end, which its dead writer did not publish: it stays. R-A4"""
    with hr.connect(folder / "log", **QUIET) as log:
        log.create_topic("t", "a bigint")
        log.append("t", ROW)
        words, before = log.journal.live.words, log.journal.live.tail()
        log.append("t", row(2))
        log.journal.live.publish(before)  # as if it had died before
        log.journal.live.end_words(1)[0] = 1
        words[SYNCED], words[SYNCED_POSITION] = before.end, before.position
        assert log.append("t", row(3)).offsets == {"t": {0: 2}}
        assert values(log.read("t")) == [1, 2, 3]


def test_what_a_dead_writer_left_is_kept(tmp_path: Path) -> None:
    dead_writer(tmp_path)


def histories(folder: Path) -> None:
    for seed in range(4):
        both_ways(folder / str(seed), seed)


def crowds(folder: Path) -> None:
    for number in range(8):
        crowd(folder / str(number))


def negative(_: Path) -> None:
    check: Any = test_rows_go_to_the_partitions_that_numpy_gives_them
    check.hypothesis.inner_test((pa.int8(), [-1, 0, 3]), 2, 0, 1, False)


CHECKS: dict[str, Callable[[Path], None]] = {
    "partitions": negative,
    "history": histories,
    "threads": crowds,
    "dead": dead_writer,
    "deleted": deleted,
}


@pytest.mark.parametrize("name", BUGS)
def test_a_seeded_bug_is_caught(tmp_path: Path, name: str) -> None:
    if shortcut_bugs.why_not():
        pytest.skip(shortcut_bugs.why_not())
    old, new, caught_by = BUGS[name]
    caught = pytest.raises((AssertionError, errors.HeadraceError, pytest.fail.Exception))
    with shortcut_bugs.in_c(name, old, new).on(), caught:
        CHECKS[caught_by](tmp_path)
