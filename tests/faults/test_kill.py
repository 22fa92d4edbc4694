"""Real processes killed and stopped, with and without a lock in their hands.

Caught: anything that outlives a `kill -9` and should not (a lock, a half-made update of shared
memory, a reader asleep), anything that does not and should (what was acknowledged), and a stopped
process that stops everybody for ever. Not caught: what needs a power cut; rare instants, which only
many runs meet.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from random import Random

import pytest

import headrace as hr
from headrace.testing.real import SMALL, Worker, account, history_of, prepare
from headrace.testing.simulation import rows_to_write


@pytest.fixture
def folder(tmp_path: Path) -> str:
    path = str(tmp_path / "data")
    prepare(path)
    return path


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_writers_killed_in_mid_append(folder: str, durability: str) -> None:
    rng = Random(durability)
    follower = Worker(folder, "follow")
    follower.wait_for("ready")
    workers = [follower]
    survivor = Worker(folder, "append", "--first", "1000000", durability=durability)
    workers.append(survivor)
    for number in range(1, 7):
        worker = Worker(folder, "append", "--first", str(number * 10_000), durability=durability)
        workers.append(worker)
        worker.wait_for("taken")
        time.sleep(rng.random() * 0.15)
        worker.end(signal.SIGKILL)
    done = len(survivor.wait_for("taken"))
    survivor.wait_for("taken", count=done + 5)  # it goes on, whoever died
    survivor.end(signal.SIGKILL)
    follower.wait_for("saw")
    follower.end()
    history = history_of(workers, durable=durability == "fsync")
    assert sum(attempt.outcome == "taken" for attempt in history.attempts) > 50
    assert account(folder, history) == []
    with hr.connect(folder, **SMALL) as log:
        log.append("orders", rows_to_write(1, 1))
        assert log.append("orders", rows_to_write(2, 1)).rows == 1


@pytest.mark.parametrize("lock", ["append", "sync"])
def test_the_lock_of_a_killed_process_is_free(folder: str, lock: str) -> None:
    holder = Worker(folder, "hold", lock)
    holder.wait_for("holds")
    holder.end(signal.SIGKILL)
    with hr.connect(folder, **SMALL) as log:
        started = time.monotonic()
        log.append("orders", rows_to_write(1, 1))
        assert time.monotonic() - started < 2.0


def test_a_stopped_holder_of_the_append_lock_is_named_and_not_robbed(folder: str) -> None:
    with hr.connect(folder, **SMALL, lock_timeout_seconds=0.4) as log:
        holder = Worker(folder, "hold", "append")
        holder.wait_for("holds")
        holder.send(signal.SIGSTOP)
        with pytest.raises(hr.errors.LockTimeout) as caught:
            log.append("orders", rows_to_write(1, 1))
        assert f"process {holder.process.pid}" in str(caught.value)
        assert caught.value.details["pid"] == holder.process.pid
        assert "stopped" in str(caught.value)
        assert [row for batch in log.read("orders") for row in batch.to_pylist()] == []
        holder.end()
        log.append("orders", rows_to_write(1, 1))


def test_a_stopped_holder_of_the_sync_lock_is_named_too(folder: str) -> None:
    """The entry is written by then, so its outcome is unknown; nobody waits for ever."""
    holder = Worker(folder, "hold", "sync")
    holder.wait_for("holds")
    holder.send(signal.SIGSTOP)
    appender = Worker(folder, "append", "--count", "1", lock_timeout_seconds=0.4)
    try:
        line = appender.wait_for("unknown")[0]
        assert f"process {holder.process.pid}" in line
    finally:
        holder.end()
        appender.end()
    history = history_of([appender])
    assert account(folder, history) == []


def test_a_stopped_writer_goes_on_where_it_was(folder: str) -> None:
    rng = Random(1)
    one = Worker(folder, "append", "--first", "1000")
    two = Worker(folder, "append", "--first", "2000")
    for worker in (one, two):
        worker.wait_for("taken")
    for _ in range(8):
        one.send(signal.SIGSTOP)
        time.sleep(rng.random() * 0.05)
        one.send(signal.SIGCONT)
        time.sleep(rng.random() * 0.05)
    for worker in (one, two):
        worker.end(signal.SIGKILL)
    assert account(folder, history_of([one, two])) == []
