"""Waiting: woken by the next append, by any process, and free while nothing happens.

Caught: a reader that polls, sleeps over an entry, or outlives its handle. Not caught: how quick the
wake-up is; `./run bench log` measures it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.places import Places
from tests.log.kit import Child, values

FOLLOW = """
    log = hr.connect(folder)
    say("ready")
    for batch in log.read("t", start="latest", follow=True):
        for a in batch.data["a"].to_pylist():
            say(a)
"""


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def switches(pid: int) -> int:
    """How often the process was woken: voluntary context switches over all of its threads."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/status", encoding="utf-8") as file:
            total += next(int(line.split()[1]) for line in file if line.startswith("voluntary"))
    return total


def test_a_reader_in_another_process_is_woken(log: EmbeddedLog) -> None:
    """A reader at the end is woken by an append of another process, each time. R-A2"""
    log.create_topic("t", "a bigint")
    with Child(log.path, FOLLOW) as child:
        assert child.line() == "ready"
        time.sleep(0.2)
        for a in range(20):
            log.append("t", [{"a": a}])
            assert child.line() == str(a)


def test_an_idle_reader_costs_nothing(log: EmbeddedLog) -> None:
    """While nothing is appended a following process does nothing at all. R-A2"""
    log.create_topic("t", "a bigint")
    log.append("t", [{"a": 0}])
    with Child(log.path, FOLLOW) as child:
        assert child.line() == "ready"
        time.sleep(1.5)  # the mark of the writer's timer is written by now
        before, woken = cpu_seconds(child.pid), switches(child.pid)
        time.sleep(1.5)
        assert cpu_seconds(child.pid) - before <= 0.01
        assert switches(child.pid) - woken <= 2
        log.append("t", [{"a": 1}])
        assert child.line() == "1"


def test_a_follower_misses_nothing(log: EmbeddedLog) -> None:
    """A follower sees every entry once and in order while others append, over rolls. R-A2 R-A9"""
    log.create_topic("t", "a bigint, pad string")
    code = """
        log = hr.connect(folder, journal_bytes_first=16384, journal_bytes_max=32768)
        for i in range(150):
            log.append("t", [{"a": int(sys.argv[2]) * 1000 + i, "pad": "x" * 300}])
    """
    with Child(log.path, code, 0) as one, Child(log.path, code, 1) as two:
        found: list[int] = []
        positions: list[int] = []
        for batch in log.read("t", follow=True, timeout=20):
            found += batch.data["a"].to_pylist()
            positions += batch.positions.to_pylist()
            if len(found) >= 300:
                break
        one.wait()
        two.wait()
    assert positions == sorted(set(positions))
    assert [a for a in found if a < 1000] == list(range(150))
    assert [a for a in found if a >= 1000] == list(range(1000, 1150))


def test_a_timeout_ends_a_following(log: EmbeddedLog) -> None:
    """A following with a timeout ends after so long without news, and not before. R-A2"""
    log.create_topic("t", "a bigint")
    log.append("t", [{"a": 1}])
    started = time.monotonic()
    threading.Timer(0.2, lambda: log.append("t", [{"a": 2}])).start()
    assert values(log.read("t", follow=True, timeout=0.4)) == [1, 2]
    assert 0.55 < time.monotonic() - started < 5


def test_closing_ends_a_following(folder: str) -> None:
    """A reader that waits ends when its handle is closed, at once. R-A2"""
    log = hr.connect(folder)
    log.create_topic("t", "a bigint")
    ended: list[object] = []

    def follow() -> None:
        ended.append(values(log.read("t", follow=True)))

    def wait() -> None:
        try:
            log.wait(10_000)
        except errors.LogClosed:
            ended.append("closed")

    threads = [threading.Thread(target=follow), threading.Thread(target=wait)]
    for thread in threads:
        thread.start()
    log.append("t", [{"a": 1}])
    time.sleep(0.2)
    log.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert sorted(map(str, ended)) == ["[1]", "closed"]


@pytest.mark.parametrize("batches", [0, 1])
def test_closing_ends_a_following_that_does_not_wait(folder: str, batches: int) -> None:
    """Closed between two batches, it is over; nothing is damaged. R-D3"""
    log = hr.connect(folder)
    log.create_topic("t", "a bigint")
    log.append("t", [{"a": 1}])
    reading = log.read("t", follow=True)
    for _ in range(batches):
        next(reading)
    journal = log.journal
    log.close()
    assert values(reading) == []
    with pytest.raises(errors.LogClosed):  # another thread comes in the middle of `read`
        Places(journal)


def test_a_reading_of_a_closed_handle_ends(folder: str) -> None:
    """A reading in the middle of the log ends, or says that it is closed, after `close`. R-D3"""
    log = hr.connect(folder)
    log.create_topic("t", "a string")
    for _ in range(12):
        log.append("t", [{"a": "x" * 900_000}], durability="os")
    log.sync()
    reading = iter(log.read("t"))
    next(reading)
    log.close()
    with contextlib.suppress(errors.LogClosed):
        list(reading)
    with pytest.raises(errors.LogClosed):
        log.read("t")
    with pytest.raises(errors.LogClosed):
        log.append("t", [{"a": "x"}])
    with pytest.raises(errors.LogClosed):
        _ = log.position
    log.close()
