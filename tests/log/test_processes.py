"""Many handles, threads and processes on one folder, forks included.

Caught: a lock shared with a child, a child that writes with its parent's state, handles that unlock
one another, an order that two readers see differently. Not caught: schedules that this machine did
not happen to run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator

import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from tests.log.kit import TINY, Child, checked, places, values


def forked(work: Callable[[], None]) -> int:
    """Run in a forked child; its pid. The child leaves with 0 if all went well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads, which we have on purpose
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def join(pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_forked_child_has_a_handle_of_its_own(log: EmbeddedLog) -> None:
    """A handle works on in parent and child after a fork, and nothing is lost. R-A9"""
    log.create_topic("t", "a bigint")
    log.append("t", [{"a": -1}])

    def work() -> None:
        for i in range(50):
            log.append("t", [{"a": i}])
        assert -1 in values(log.read("t"))
        log.close()

    child = forked(work)
    for i in range(50, 100):
        log.append("t", [{"a": i}])
    join(child)
    found = places(log.read("t"))
    assert sorted(a for _, _, a in found) == list(range(-1, 100))
    assert [offset for _, offset, _ in found] == list(range(101))
    checked(log.path)


def test_a_forked_child_does_not_hold_its_parents_lock(folder: str) -> None:
    """A lock held while forking stays the parent's alone, whatever the child does. R-A4"""
    with hr.connect(folder) as log, hr.connect(folder, lock_timeout_seconds=0.3) as other:
        log.create_topic("t", "a bigint")
        lock = log.journal.append_lock
        lock.acquire(5)
        pid = forked(lambda: time.sleep(60))
        try:
            with pytest.raises(errors.LockTimeout):
                other.append("t", [{"a": 1}])
            lock.release()
            other.append("t", [{"a": 1}])  # the sleeping child does not keep it
            lock.acquire(5)
            join(forked(lambda: None))
            with pytest.raises(errors.LockTimeout):
                other.append("t", [{"a": 2}])  # and a child that ended did not free it
            lock.release()
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert values(log.read("t")) == [1]


def test_a_killed_parent_frees_the_lock_in_spite_of_its_children(folder: str) -> None:
    """A process killed with the lock held frees it, though a child it forked lives on. R-A4"""
    with hr.connect(folder) as log:
        log.create_topic("t", "a bigint")
    code = """
        log = hr.connect(folder)
        log.journal.append_lock.acquire(5)
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        say(pid)
        sys.stdin.readline()
    """
    with Child(folder, code) as child, hr.connect(folder, lock_timeout_seconds=10) as log:
        grandchild = int(child.line())
        try:
            child.kill()
            log.append("t", [{"a": 1}])
        finally:
            os.kill(grandchild, signal.SIGKILL)
        assert values(log.read("t")) == [1]


def test_handles_of_one_process_do_not_unlock_one_another(folder: str) -> None:
    """Closing one handle of a log does not free a lock that another holds. R-A4"""
    with hr.connect(folder) as log, hr.connect(folder, lock_timeout_seconds=0.2) as third:
        log.create_topic("t", "a bigint")
        lock = log.journal.append_lock
        lock.acquire(5)
        reader = hr.connect(folder)
        reader.close()
        with pytest.raises(errors.LockTimeout):
            third.append("t", [{"a": 1}])
        lock.release()
        third.append("t", [{"a": 2}])


def test_a_stopped_holder_is_named_and_never_broken(folder: str) -> None:
    """A timeout names the process that holds the lock, and that it is stopped. R-D3"""
    with hr.connect(folder, lock_timeout_seconds=0.3) as log:
        log.create_topic("t", "a bigint")
        code = """
            log = hr.connect(folder)
            log.journal.append_lock.acquire(5)
            say("holds"); sys.stdin.readline()
            log.journal.append_lock.release()
            say("free")
        """
        with Child(folder, code) as child:
            assert child.line() == "holds"
            os.kill(child.pid, signal.SIGSTOP)
            _wait_until(lambda: _state(child.pid) == "T")
            with pytest.raises(errors.LockTimeout) as caught:
                log.append("t", [{"a": 1}])
            assert str(child.pid) in caught.value.fact
            assert "stopped" in caught.value.fact
            assert caught.value.details["pid"] == child.pid
            os.kill(child.pid, signal.SIGCONT)
            child.go()
            assert child.line() == "free"
        log.append("t", [{"a": 2}])
        assert values(log.read("t")) == [2]


def test_a_stopped_syncer_is_named_too(folder: str) -> None:
    """Who waits for the sync of a stopped process is told its pid, and that it is unknown. R-A15"""
    with hr.connect(folder, lock_timeout_seconds=0.3) as log:
        log.create_topic("t", "a bigint")
        code = """
            log = hr.connect(folder)
            log.journal.sync_lock.acquire(5)
            say("holds"); time.sleep(60)
        """
        with Child(folder, code) as child:
            assert child.line() == "holds"
            os.kill(child.pid, signal.SIGSTOP)
            _wait_until(lambda: _state(child.pid) == "T")
            with pytest.raises(errors.Unknown, match=str(child.pid)):
                log.append("t", [{"a": 1}])
            with pytest.raises(errors.LockTimeout, match=str(child.pid)):
                log.sync()
            log.append("t", [{"a": 2}], durability="os")
            assert values(log.read("t")) == []
        log.append("t", [{"a": 3}])
        assert values(log.read("t")) == [1, 2, 3]


def test_several_processes_make_one_log(folder: str) -> None:
    """Of processes that open a folder at the same moment one makes the log, for all. R-A9"""
    code = """
        say("ready"); sys.stdin.readline()
        with hr.connect(folder) as log:
            log.create_topic("t", "a bigint", exist_ok=True)
            log.append("t", [{"a": int(sys.argv[2])}])
    """
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(folder, code, n)) for n in range(4)]
        for child in children:
            assert child.line() == "ready"
        for child in children:
            child.go()
        for child in children:
            child.wait()
    with hr.connect(folder) as log:
        assert sorted(values(log.read("t"))) == [0, 1, 2, 3]
    checked(folder)


def test_threads_read_more_files_than_are_kept_open(folder: str) -> None:
    """Readers in several threads go through more files than a handle keeps open. R-A9"""
    with hr.connect(folder, journal_entries_max=4, durability="os", background=False) as log:
        log.create_topic("t", "a bigint")
        for a in range(150):
            log.append("t", [{"a": a}])
        log.sync()
        assert len(log.journal.files.numbers()) > 45
        right: list[bool] = []
        before = len(os.listdir("/proc/self/fd"))

        def read(start: int) -> None:
            right.extend(
                values(log.read("t", start=start)) == list(range(start, 150)) for _ in range(3)
            )

        threads = [threading.Thread(target=read, args=(n,)) for n in (0, 10, 60, 110)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert right == [True] * 12
        assert len(os.listdir("/proc/self/fd")) < before + 45


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0]


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_threads_share_a_handle(folder: str) -> None:
    """Threads that append and read through one handle lose nothing and see one order. R-A9"""
    with hr.connect(folder, **TINY) as log:
        log.create_topic("t", "a bigint, pad string", key="a", partitions=3)
        problems: list[BaseException] = []

        @contextlib.contextmanager
        def noted() -> Iterator[None]:
            try:
                yield
            except BaseException as problem:
                problems.append(problem)

        def write(number: int) -> None:
            with noted():
                for i in range(40):
                    log.append("t", [{"a": number * 100 + i, "pad": "x" * 100}])

        def read() -> None:
            with noted():
                seen: list[int] = []
                for batch in log.read("t", follow=True, timeout=20):
                    seen += batch.positions.to_pylist()
                    if len(seen) == 160:
                        break
                assert seen == sorted(seen)
                assert len(seen) == 160

        threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
        threads += [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        assert sorted(values(log.read("t"))) == [n * 100 + i for n in range(4) for i in range(40)]
    checked(folder)


def test_many_handles_see_one_log(folder: str) -> None:
    """Whatever one handle appends, all others read and number on. R-A9"""
    with contextlib.ExitStack() as stack:
        handles = [stack.enter_context(hr.connect(folder, **TINY)) for _ in range(5)]
        handles[0].create_topic("t", "a bigint, pad string")
        for i in range(200):
            receipt = handles[i % 5].append("t", [{"a": i, "pad": "x" * 200}], durability="os")
            assert receipt.offsets == {"t": {0: i}}
        handles[3].sync()
        for handle in handles:
            assert values(handle.read("t")) == list(range(200))
            assert handle.ends("t") == [200]


def test_processes_write_over_rolls_at_once(log: EmbeddedLog) -> None:
    """Processes that append through many journal files at once number without gaps. R-A9"""
    log.create_topic("t", "a bigint, pad string", key="a", partitions=4)
    code = """
        log = hr.connect(folder, journal_bytes_first=16384, journal_bytes_max=16384)
        n = int(sys.argv[2])
        for i in range(100):
            log.append("t", [{"a": n * 1000 + 2 * i + j, "pad": "x" * 150} for j in range(2)],
                       expect={f"own/{n}": i}, durability="os" if i % 3 else "fsync")
        log.close()
    """
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(log.path, code, n)) for n in range(3)]
        for child in children:
            child.wait()
    log.sync()
    found = places(log.read("t"))
    assert sorted(a for _, _, a in found) == [n * 1000 + i for n in range(3) for i in range(200)]
    for partition, end in enumerate(log.ends("t")):
        assert [o for p, o, _ in found if p == partition] == list(range(end))
    assert [log.counter(f"own/{n}") for n in range(3)] == [100, 100, 100]
    checked(log.path)
