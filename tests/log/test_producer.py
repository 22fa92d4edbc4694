"""The producer: single rows in, large entries out, bounded, and nothing lost silently.

Caught: rows lost, repeated or reordered, memory without bound, an error that nobody is told. Not
caught: batches, see test_producer_batches.py; how quick it is, see `./run bench log`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.producer import Producer
from headrace.model.records import Receipt
from tests.log.kit import Gate, Machine, machine_log, rows, values


class Slow:
    """A log that takes an entry only when told."""

    def __init__(self) -> None:
        self.entries: list[list[Any]] = []
        self.gate = threading.Event()

    def append(self, topic: str, rows: Any, *, headers: Any = None) -> Receipt:
        assert self.gate.wait(10)
        self.entries.append(list(rows))
        return Receipt(len(self.entries), len(rows), 0)

    def taken_in(self, topic: str, rows: Any, headers: Any = None) -> pa.RecordBatch:
        raise AssertionError("no batch was given")


def test_rows_are_stored_in_order(log: EmbeddedLog) -> None:
    """Every row is stored once, in the order of `send`. R-A15"""
    log.create_topic("t", "a bigint")
    with log.producer("t") as producer:
        for i in range(5000):
            producer.send({"a": i})
        receipt = producer.flush()
        assert receipt is not None
        assert log.position >= receipt.position
        producer.send({"a": 5000})
    assert producer.sent_total == 5001
    assert producer.unsent == []
    assert values(log.read("t")) == list(range(5001))


def test_rows_are_batched_while_the_disk_is_busy(folder: str) -> None:
    """While one entry is on its way, the next rows gather into one. R-A4"""
    machine = Machine()
    with machine_log(folder, machine, background=False) as log:
        log.create_topic("t", "a bigint")
        machine.sync_seconds = 0.02
        before = log.position
        with log.producer("t", batch_rows_max=500) as producer:
            for i in range(1000):
                producer.send({"a": i})
        assert log.position - before < 50
        assert values(log.read("t")) == list(range(1000))


def test_an_entry_holds_so_many_rows_at_most() -> None:
    """No entry is larger than `batch_rows_max`. R-A15"""
    slow = Slow()
    with Producer(slow, "t", batch_rows_max=7, rows_max=100) as producer:
        for i in range(100):
            producer.send({"a": i})
        slow.gate.set()
    assert max(len(entry) for entry in slow.entries) == 7
    assert [row["a"] for entry in slow.entries for row in entry] == list(range(100))


def test_memory_is_bounded() -> None:
    """When the log does not keep up, `send` waits, then says so; the row was not taken. R-D3"""
    slow = Slow()
    producer = Producer(slow, "t", rows_max=10, batch_rows_max=5, timeout_seconds=0.1)
    for i in range(10):
        producer.send({"a": i})
    started = time.monotonic()
    with pytest.raises(errors.ProducerFull) as caught:
        producer.send({"a": 10})
    assert time.monotonic() - started >= 0.1
    assert "topic 't'" in caught.value.place
    assert [row["a"] for row in producer.unsent] == list(range(10))
    slow.gate.set()
    producer.flush(10)
    producer.send({"a": 10})
    producer.close()
    assert [row["a"] for entry in slow.entries for row in entry] == list(range(11))


def test_memory_is_bounded_in_bytes_too() -> None:
    """Few large rows fill the producer as well as many small ones. R-D3"""
    slow = Slow()
    limits: dict[str, Any] = {"bytes_max": 100_000, "timeout_seconds": 0.1}
    producer = Producer(slow, "t", **limits)
    with pytest.raises(errors.ProducerFull):
        for _ in range(20):
            producer.send({"a": "x" * 20_000})
    assert 1 <= len(producer.unsent) <= 6
    slow.gate.set()
    producer.flush(10)
    producer.send({"a": "x" * 500_000})  # larger than all: it goes alone
    producer.close()


def test_headers_travel_with_their_rows(log: EmbeddedLog) -> None:
    """Rows sent with and without headers keep their own. R-A1"""
    log.create_topic("t", "a bigint")
    with log.producer("t") as producer:
        for a in range(100):
            producer.send({"a": a}, headers={"n": str(a)} if a % 3 else None)
    found = {
        a: headers
        for batch in log.read("t")
        for a, headers in zip(batch.data["a"].to_pylist(), batch.headers.to_pylist(), strict=True)
    }
    assert found == {a: [("n", str(a).encode())] if a % 3 else None for a in range(100)}


def test_a_full_producer_goes_on_when_there_is_room() -> None:
    """A `send` that waits for room is let in as soon as there is some. R-D3"""
    slow = Slow()
    producer = Producer(slow, "t", rows_max=4, batch_rows_max=4, timeout_seconds=30)
    for i in range(4):
        producer.send({"a": i})
    threading.Timer(0.1, slow.gate.set).start()
    started = time.monotonic()
    producer.send({"a": 4})
    assert time.monotonic() - started < 10
    producer.close()


def test_an_interrupt_before_the_thread_is_woken() -> None:
    """The row was handed over: `flush` sees to it that it is stored. R-D3"""
    slow = Slow()
    slow.gate.set()
    producer = Producer(slow, "t")
    while not producer._idle:
        time.sleep(0.001)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(producer._change, "notify_all", interrupted)
        producer.send({"a": 0})
    producer.flush(10)
    assert slow.entries == [[{"a": 0}]]
    producer.close()


def test_an_interrupt_before_the_row_is_counted() -> None:
    """A row that waits is never taken for stored. R-D3"""

    class Interrupted(list[Any]):
        def append(self, one: Any) -> None:
            super().append(one)
            interrupted()

    slow = Slow()
    producer = Producer(slow, "t")
    producer._waiting = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        producer.send({"a": 0})
    with pytest.raises(errors.WaitTimeout):
        producer.flush(0.01)
    slow.gate.set()
    producer.flush(10)
    assert slow.entries == [[{"a": 0}]]
    producer.close()


def interrupted() -> None:
    raise KeyboardInterrupt


def test_few_rows_may_wait_whatever_an_entry_would_hold(log: EmbeddedLog) -> None:
    """`rows_max` alone is enough: an entry then holds no more than that."""
    log.create_topic("t", "a bigint")
    with log.producer("t", rows_max=10) as producer:
        for a in range(50):
            producer.send({"a": a})
    assert values(log.read("t")) == list(range(50))


def test_a_send_that_waits_for_room_is_told_that_the_producer_is_closed() -> None:
    """Its row would be stored by nobody: the thread stores what it has, and ends. R-D3"""
    slow = Slow()
    producer = Producer(slow, "t", rows_max=1, batch_rows_max=1, timeout_seconds=30)
    producer.send({"a": 0})
    found: list[object] = []

    def late() -> None:
        try:
            producer.send({"a": 1})
        except errors.LogClosed as error:
            found.append(error)

    sender = threading.Thread(target=late)
    sender.start()
    closer = threading.Thread(target=producer.close)
    while len(producer._change._waiters) < 1:  # type: ignore[attr-defined]
        time.sleep(0.001)
    closer.start()
    sender.join(10)
    slow.gate.set()
    closer.join(10)
    assert len(found) == 1
    assert producer.unsent == []
    assert slow.entries == [[{"a": 0}]]


def test_what_never_has_room_together_goes_in_parts(log: EmbeddedLog) -> None:
    """A topic may take fewer rows at once than a producer gathers: none of them is lost. R-A3"""
    log.create_topic("t", "a bigint")
    log.set_topic("t", flow="backpressure", flow_rows=10)
    gate = Gate(log)
    with Producer(gate, "t") as producer:
        for a in range(100):
            producer.send({"a": a})
        gate.open.set()
    assert values(log.read("t")) == list(range(100))


def test_an_error_is_raised_and_the_rows_are_kept(log: EmbeddedLog) -> None:
    """An entry that was refused is raised by the next call, and its rows are in `unsent`. R-D3"""
    log.create_topic("t", "a bigint")
    producer = log.producer("t")
    producer.send({"a": 1})
    producer.flush()
    producer.send({"b": 2})
    calls: list[Callable[[], object]] = [
        lambda: producer.flush(10),
        lambda: producer.send({"a": 3}),
        producer.close,
    ]
    for call in calls:
        with pytest.raises(errors.WrongColumn):
            call()
    assert producer.unsent == [{"b": 2}]
    assert values(log.read("t")) == [1]


def test_a_flush_has_a_deadline() -> None:
    """A `flush` that takes too long says how many rows are not stored yet. R-D3"""
    slow = Slow()
    producer = Producer(slow, "t")
    producer.send({"a": 1})
    with pytest.raises(errors.WaitTimeout, match="1 rows"):
        producer.flush(0.05)
    slow.gate.set()
    producer.close()


def test_a_closed_producer_takes_nothing(log: EmbeddedLog) -> None:
    """After `close` everything is stored and no row is taken. R-D3"""
    log.create_topic("t", "a bigint")
    producer = log.producer("t")
    for i in range(100):
        producer.send({"a": i})
    producer.close()
    assert values(log.read("t")) == list(range(100))
    with pytest.raises(errors.LogClosed):
        producer.send({"a": 1})
    producer.close()


def test_a_producer_with_a_name_is_fenced(log: EmbeddedLog) -> None:
    """A producer over a writer stores each row once, and stops when its name is claimed. R-A15"""
    log.create_topic("t", "a bigint")
    producer = log.producer("t", writer="p")
    producer.send({"a": 1})
    producer.flush()
    log.writer("p")
    producer.send({"a": 2})
    with pytest.raises(errors.Fenced):
        producer.flush()
    assert producer.unsent == [{"a": 2}]
    assert values(log.read("t")) == [1]


def test_threads_share_a_producer(log: EmbeddedLog) -> None:
    """Rows of many threads are all stored, each thread's in its order. R-A9"""
    log.create_topic("t", "a bigint")
    with log.producer("t", rows_max=50, batch_rows_max=20) as producer:

        def work(number: int) -> None:
            for i in range(200):
                producer.send({"a": number * 1000 + i})

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = values(log.read("t"))
    for number in range(4):
        own = [a for a in found if a // 1000 == number]
        assert own == list(range(number * 1000, number * 1000 + 200))


def test_bad_settings(log: EmbeddedLog) -> None:
    """Limits that cannot work, and topics that are not there, are refused at once. R-D3"""
    with pytest.raises(errors.UnknownTopic):
        log.producer("t")
    log.create_topic("t", "a bigint")
    bad_ones: list[dict[str, Any]] = [{"rows_max": 5, "batch_rows_max": 10}, {"batch_rows_max": 0}]
    for bad in bad_ones:
        with pytest.raises(errors.BadSetting):
            log.producer("t", **bad)


def test_a_row_is_what_it_was_when_it_was_sent(log: EmbeddedLog) -> None:
    """A dict and headers that are filled anew for each row do not change those on their way."""
    log.create_topic("t", "a bigint, l array<struct<x:int>>, b binary")
    struct, blob = {"x": 0}, bytearray(1)
    row: dict[str, Any] = {"l": [struct], "b": blob}
    headers: dict[str, bytes | str] = {}
    with log.producer("t") as producer:
        for a in range(200):
            row["a"] = struct["x"] = blob[0] = a
            headers["a"] = str(a)
            producer.send(row, headers=headers)
    inner = [(row["l"][0]["x"], row["b"][0]) for row in rows(log.read("t"))]
    assert inner == [(a, a) for a in range(200)]
    found = [
        (a, dict(pairs))
        for batch in log.read("t")
        for a, pairs in zip(
            batch.data.column("a").to_pylist(), batch.headers.to_pylist(), strict=True
        )
    ]
    assert found == [(a, {"a": str(a).encode()}) for a in range(200)]


def test_a_struct_of_another_kind_of_dict_is_what_it_was_when_it_was_sent(log: EmbeddedLog) -> None:
    log.create_topic("t", "s struct<x:int>, b binary")
    struct, blob = OrderedDict(x=0), bytearray(1)
    with log.producer("t") as producer:
        for a in range(200):
            struct["x"] = blob[0] = a
            producer.send({"s": struct})
            producer.send({"b": memoryview(blob)})
    found = rows(log.read("t"))
    assert [row["s"]["x"] for row in found[::2]] == list(range(200))
    assert [row["b"][0] for row in found[1::2]] == list(range(200))


FORGETFUL = """
import os, sys
import headrace as hr

log = hr.connect(sys.argv[1])
log.create_topic("t", "a bigint")
producer = log.producer("t")
for i in range(3000):
    producer.send({"a": i})
if sys.argv[2:] == ["wrong"]:
    producer.send({"a": "text"})
if sys.argv[2:] == ["fork"]:
    if os.fork() == 0:
        sys.exit()
    os.wait()
"""


@pytest.mark.parametrize("how", ["", "wrong", "fork"])
def test_what_a_program_forgot_to_flush_is_stored_at_its_end(folder: str, how: str) -> None:
    """Or said: nothing is lost silently. A child does not store the rows of its parent again."""
    command = [sys.executable, "-c", FORGETFUL, folder, *([how] if how else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    with hr.connect(folder) as log:
        stored = values(log.read("t"))
    if how == "wrong":
        assert "rows of a producer were not stored:" in done.stderr
        assert "HR-LOG-016" in done.stderr
        assert stored == list(range(len(stored)))
        assert len(stored) <= 3000
    else:
        assert (stored, done.stderr) == (list(range(3000)), "")


def test_a_producer_is_not_for_a_forked_child(log: EmbeddedLog) -> None:
    """Its thread stays with the parent: what the child sends would never be stored."""
    log.create_topic("t", "a bigint")
    with log.producer("t") as producer:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                producer.send({"a": 1})
            except errors.LogClosed as error:
                os.write(writing, error.code.encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        assert os.read(reading, 100) == b"HR-LOG-009"
        os.close(reading)


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_an_entry_is_taken_also_where_no_thread_can_be_started(
    log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """At a limit of the system, or at the end of the program: the timer is not needed for it."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    log.create_topic("t", "a bigint")
    receipt = log.append("t", [{"a": 1}], durability=durability)
    assert log.position == receipt.position
