"""The embedded log against a real Kafka broker: same rows, same machine, arms in turn.

Which settings each side has and why that is fair: docs/kafka.md. In short: the broker has the flags
of its own start script; its producer is the fastest that was found (confluent-kafka, whole batches
handed over at once), with the best of some linger and batch settings, partitions and numbers of
processes, looked for before the clock starts; its rows are bytes made ready beforehand, ours are
Arrow batches that are serialized while the clock runs, in one process.

    ./run bench kafka                   all of it, about ten minutes; needs 15 GB on the disk
    ./run bench kafka --only read       measures whose name has "read" in it
    ./run bench kafka --quick           under a minute: does it run, not how fast is it
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json

import headrace as hr
from benchmarks.kit import PAIRS, Bench, arguments, progress
from benchmarks.log import INLINE_ROWS, TOPIC, Crew, Plan, State, bids, do_close
from headrace.log.embedded.log import EmbeddedLog
from headrace.testing.kafka import Broker, Unavailable

BATCH = 1_000
ROW_BYTES = 175
RATE = 1_000
"""Rows a second while the way from an append to a reader is timed."""
PAIRS_SHORT = 11
CREW = 5
CONSUMED = 10_000
"""Records that a consumer takes at once."""
SOON = {"broker.session.timeout.ms": "1000", "broker.heartbeat.interval.ms": "100"}
"""A broker that was killed waits until its former self has expired: as short as can be."""


@dataclass(frozen=True)
class Way:
    """How rows are given to Kafka; the words are Kafka's."""

    topic: str = TOPIC
    processes: int = 1
    linger: int = 5
    batch: int = 1_000_000
    compression: str = "none"

    def settings(self) -> dict[str, Any]:
        return {
            "acks": "all",
            "linger.ms": self.linger,
            "batch.size": self.batch,
            "batch.num.messages": 100_000,
            "compression.type": self.compression,
            "queue.buffering.max.messages": 2_000_000,
            "queue.buffering.max.kbytes": 1 << 20,
        }

    def __str__(self) -> str:
        noun = "process" if self.processes == 1 else "processes"
        return (
            f"{self.topic}, {self.processes} {noun}, linger {self.linger} ms, batch {self.batch:,}"
        )


@dataclass
class Race(Plan):
    """How much to measure, and the broker, started when it is first needed."""

    leaving: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    started: Broker | None = None

    @property
    def broker(self) -> Broker:
        if self.started is None:
            say("starting a broker")
            self.started = self.leaving.enter_context(Broker(stock=True))
        return self.started

    @property
    def batches(self) -> int:
        """Of an arm of an append."""
        return 20 if self.quick else 200

    @property
    def rows(self) -> int:
        """That are read, kept and recovered."""
        return 20_000 if self.quick else 1_000_000

    @contextlib.contextmanager
    def log(self, name: str, schema: pa.Schema | None = None) -> Iterator[EmbeddedLog]:
        """A log with an empty topic, for the time of a measure."""
        path = self.path(name)
        with hr.connect(path) as log:
            log.create_topic(TOPIC, schema or bids(1).schema)
            yield log
        shutil.rmtree(path)


def say(text: str) -> None:
    print(f"kafka: {text}", file=sys.stderr, flush=True)


# -- rows ----------


def payloads(rows: int) -> list[bytes]:
    """The rows as bytes of the same size: what they hold, cut or filled to 175 bytes each."""
    found = []
    for row in bids(rows).to_pylist():
        numbers = (row["auction"], row["bidder"], row["price"], int(row["at"].timestamp() * 1e6))
        text = f"{row['channel']}{row['url']}{row['extra']}".encode()
        packed = b"".join(number.to_bytes(8, "little") for number in numbers) + text
        found.append(packed[:ROW_BYTES].ljust(ROW_BYTES))
    return found


def json_rows(batch: pa.RecordBatch) -> list[bytes]:
    """The rows as JSON, as users of Kafka write them: compact, times as text."""
    names = batch.schema.names
    columns = [
        column.cast(pa.string()).to_pylist()
        if pa.types.is_timestamp(column.type)
        else column.to_pylist()
        for column in batch.columns
    ]
    dump = json.JSONEncoder(separators=(",", ":")).encode
    return [dump(dict(zip(names, row, strict=True))).encode() for row in zip(*columns, strict=True)]


def fill(log: EmbeddedLog, batch: pa.RecordBatch) -> None:
    """Put the rows into the log, in entries of 1,000."""
    for first in range(0, len(batch), BATCH):
        log.append(TOPIC, batch.slice(first, BATCH), durability="os")
    log.sync()


def seal(log: EmbeddedLog) -> None:
    """Let the keeper turn everything into sealed files."""
    with log.keeper() as keeper:
        keeper.turn(close=True)


def produce(base: dict[str, Any], way: Way, values: Sequence[bytes]) -> None:
    """Put the values into a topic, all acknowledged."""
    from confluent_kafka import Producer

    producer = Producer(base | way.settings())
    for first in range(0, len(values), CONSUMED):
        part = [{"value": value} for value in values[first : first + CONSUMED]]
        assert producer.produce_batch(way.topic, part) == len(part)
        producer.poll(0)
    assert producer.flush(120) == 0


def consumer(base: dict[str, Any], topic: str, *, at_end: bool = False) -> tuple[Any, int]:
    """A consumer of the whole topic, connected, and how many records the topic has."""
    from confluent_kafka import Consumer, TopicPartition

    made = Consumer(base | {"group.id": "bench", "enable.auto.commit": False})
    partitions = made.list_topics(topic, timeout=10).topics[topic].partitions
    ends = {
        number: made.get_watermark_offsets(TopicPartition(topic, number), timeout=10)[1]
        for number in partitions
    }
    made.assign([TopicPartition(topic, n, end if at_end else 0) for n, end in ends.items()])
    return made, sum(ends.values())


def settle(folder: Path) -> None:
    """Sync what a broker has left to the system, off the clock: it would slow the next arm."""
    for path in folder.glob("*/*.log"):
        with contextlib.suppress(FileNotFoundError):
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.close(file)


# -- what workers do ----------


def do_open(state: State, path: str) -> None:
    state.log = hr.connect(path)
    state.batch = bids(BATCH)


def do_append(state: State, batches: int, awaited: bool) -> float:
    """Append; a row counts when it is on the disk. Seconds."""
    log, batch = state.log, state.batch
    assert log is not None
    start = time.monotonic()
    if awaited:
        for _ in range(batches):
            log.append(TOPIC, batch)
        return time.monotonic() - start
    with ThreadPoolExecutor(1) as pool:  # what is appended during a sync shares the next one
        syncing = pool.submit(log.sync)
        for _ in range(batches):
            log.append(TOPIC, batch, durability="os")
            if syncing.done():
                syncing = pool.submit(log.sync)
        syncing.result()
    log.sync()
    return time.monotonic() - start


def do_connect(state: State, base: dict[str, Any], way: Way) -> None:
    """Connect a producer, and make ready what it will send."""
    from confluent_kafka import Producer

    state.more["producer"] = Producer(base | way.settings())
    state.more["producer"].list_topics(way.topic, timeout=10)
    state.more["messages"] = [{"value": value} for value in payloads(BATCH)]


def do_produce(state: State, topic: str, batches: int, awaited: bool) -> float:
    """Produce; a row counts when it is acknowledged. Seconds."""
    producer, messages = state.more["producer"], state.more["messages"]
    start = time.monotonic()
    for _ in range(batches):
        assert producer.produce_batch(topic, messages) == len(messages)
        if awaited:
            assert producer.flush(60) == 0
        else:
            producer.poll(0)
    assert producer.flush(60) == 0
    return time.monotonic() - start


def do_sync(_: State, path: str, count: int) -> list[int]:
    """What the disk alone takes at the same rate: nanoseconds of a write and an fdatasync."""
    found = []
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(file, bytes(count << 12), 0)
    os.fsync(file)
    for number in paced(count):
        start = time.monotonic_ns()
        os.pwrite(file, bytes(4096), number << 12)
        os.fdatasync(file)
        found.append(time.monotonic_ns() - start)
    os.close(file)
    return found


def do_release(state: State) -> None:
    state.more.clear()


def do_follow(state: State) -> None:
    assert state.log is not None
    state.more["reading"] = state.log.read(TOPIC, start="latest", follow=True)


def do_send(state: State, count: int) -> None:
    """Rows at a steady rate, each with the time at which it was handed over."""
    assert state.log is not None
    row = bids(1).to_pylist()[0]
    with state.log.producer(TOPIC) as producer:
        for _ in paced(count):
            producer.send({**row, "price": time.monotonic_ns()})


def do_receive(state: State, count: int) -> list[int]:
    """Nanoseconds from when a row was handed over until it is here."""
    found: list[int] = []
    while len(found) < count:
        batch = next(state.more["reading"])
        now = time.monotonic_ns()
        found += [now - sent for sent in batch.data.column("price").to_pylist()]
    return found


def do_consumer(state: State, base: dict[str, Any], topic: str) -> None:
    state.more["consumer"], _ = consumer(base, topic, at_end=True)
    state.more["consumer"].poll(0.1)


def do_send_kafka(state: State, count: int) -> None:
    producer, rest = state.more["producer"], state.more["messages"][0]["value"][8:]
    for _ in paced(count):
        producer.produce("paced", time.monotonic_ns().to_bytes(8, "little") + rest)
        producer.poll(0)
    assert producer.flush(60) == 0


def do_receive_kafka(state: State, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        record = state.more["consumer"].poll(60)
        now = time.monotonic_ns()
        assert record is not None, "a record came within a minute"
        assert record.error() is None, record.error()
        found.append(now - int.from_bytes(record.value()[:8], "little"))
    return found


def paced(count: int) -> Iterator[int]:
    start = time.monotonic()
    for number in range(count):
        if (left := start + number / RATE - time.monotonic()) > 0:
            time.sleep(left)
        yield number


# -- appending ----------


def measure_append(race: Race) -> None:
    """1,000-row batches, durable: many on their way, and one at a time."""
    flushed = "Kafka, fsync before each acknowledgment (flush.messages=1)"
    usual = "Kafka as it comes, acknowledged before it is on the disk"
    todo = [
        ("durable append, batches on their way", False, True, flushed, 5.0),
        ("durable append, each batch awaited", True, True, flushed, None),
        ("durable append against not durable, batches on their way", False, False, usual, 1.0),
        ("durable append against not durable, each batch awaited", True, False, usual, None),
    ]
    todo = [one for one in todo if race.wanted(one[0])]
    if not todo:
        return
    broker, crew = race.broker, race.crew
    for partitions in (1, 4):
        broker.create_topic(f"usual-{partitions}", partitions)
        broker.create_topic(f"flushed-{partitions}", partitions, flush_messages="1")
    with race.log("append"):
        crew.ask(0, do_open, race.path("append"))
        for name, awaited, durable, other, goal in todo:
            way = best_way(race, "flushed" if durable else "usual", awaited)

            def ours(awaited: bool = awaited) -> float:
                settle(broker.data)
                return race.batches * BATCH / float(crew.ask(0, do_append, race.batches, awaited))

            def theirs(way: Way = way, awaited: bool = awaited) -> float:
                return kafka_rate(race, way, awaited, race.batches)

            connect(race, way)
            ours(), theirs()
            race.compare(name, ours, theirs, f"{other}: {way}", "rows/s", "higher", goal)
        crew.ask(0, do_close)
    crew.all(CREW, do_release)


def connect(race: Race, way: Way) -> None:
    for number in range(way.processes):
        race.crew.ask(1 + number, do_connect, race.broker.client(), way)


def kafka_rate(race: Race, way: Way, awaited: bool, batches: int) -> float:
    """Rows a second of all producers together; that all have arrived is counted afterwards."""
    settle(race.broker.data)
    each = batches // way.processes
    before = records(race, way.topic)
    start = time.monotonic()
    for number in range(way.processes):
        race.crew.send(1 + number, do_produce, way.topic, each, awaited)
    seconds = [race.crew.answer(1 + number) for number in range(way.processes)]
    slowest = max(seconds) if way.processes == 1 else time.monotonic() - start
    sent = each * way.processes * BATCH
    arrived = records(race, way.topic) - before
    assert arrived == sent, (arrived, sent)
    return sent / float(slowest)


def records(race: Race, topic: str) -> int:
    made, count = consumer(race.broker.client(), topic)
    made.close()
    return count


def best_way(race: Race, kind: str, awaited: bool) -> Way:
    """Try ways to give rows to Kafka, in turn; the one that was fastest once."""
    ways = [
        Way(f"{kind}-{partitions}", processes, linger, batch)
        for partitions in (1, 4)
        for processes in ((1,) if awaited else (1, 2))
        for linger, batch in (
            ((0, 1_000_000), (5, 1_000_000))
            if awaited
            else ((5, 262_144), (5, 1_000_000), (50, 1_000_000))
        )
    ]
    if race.quick:
        ways = ways[:2]
    rates: dict[Way, list[float]] = {way: [] for way in ways}
    for number in range(1 if race.quick else 2):
        for way in ways:
            progress(f"kafka: looking for its best settings: round {number + 1}, {way}")
            connect(race, way)
            rates[way].append(kafka_rate(race, way, awaited, race.batches // 2))
    progress("")
    best = max(ways, key=lambda way: max(rates[way]))
    say(f"of {len(ways)} ways the best: {best}")
    return best


# -- from an append to a reader ----------


def measure_latency(race: Race) -> None:
    """A row handed over in one process, until another has it; 1,000 rows a second."""
    name = f"append to read at {RATE:,} rows/s"
    if not race.wanted(name):
        return
    broker, crew = race.broker, race.crew
    count = RATE // 5 if race.quick else 2 * RATE
    usual, hasty = Way("paced"), Way("paced", linger=0)
    broker.create_topic("paced")
    crew.ask(1, do_connect, broker.client(), usual)
    crew.ask(4, do_connect, broker.client(), hasty)
    crew.ask(3, do_consumer, broker.client(), "paced")
    with race.log("paced"):
        crew.ask(0, do_open, race.path("paced"))
        crew.ask(2, do_open, race.path("paced"))
        crew.ask(2, do_follow)

        def arm(sender: int, receiver: int) -> Sequence[int]:
            settle(broker.data)
            ours = sender == 0
            crew.send(receiver, do_receive if ours else do_receive_kafka, count)
            crew.ask(sender, do_send if ours else do_send_kafka, count)
            found: Sequence[int] = crew.answer(receiver)
            return found

        def disk() -> Sequence[int]:
            settle(broker.data)
            found: Sequence[int] = crew.ask(0, do_sync, race.path("floor"), count // 4)
            return found

        arms: dict[str, Callable[[], Sequence[int]]] = {
            "ours": lambda: arm(0, 2),
            f"Kafka as it comes, not durable: {usual}": lambda: arm(1, 3),
            f"Kafka, not durable: {hasty}": lambda: arm(4, 3),
            "4 KB written and fdatasync, no log and no reader": disk,
        }
        times: dict[str, list[Sequence[int]]] = {one: [] for one in arms}
        for one in arms.values():
            one()
        for turn in range(1 if race.quick else PAIRS):
            progress(f"kafka: {name}: turn {turn + 1}")
            for note in arms if turn % 2 == 0 else reversed(arms):
                times[note].append(arms[note]())
        progress("")
        for what, share in (("median", 50), ("99 of 100 within", 99)):
            mine, *others = (
                [float(np.percentile(one, share)) / 1e6 for one in values]
                for values in times.values()
            )
            goals = (None if race.quick else 1.0, None, None)
            against = ("", ", Kafka without linger", ", this disk alone")
            for extra, note, values, goal in zip(
                against, list(arms)[1:], others, goals, strict=True
            ):
                race.bench.add(f"{name}{extra}: {what}", mine, values, note, "ms", "lower", goal)
        for number in (0, 2):
            crew.ask(number, do_close)
    crew.all(CREW, do_release)


# -- reading everything, and what it takes on the disk ----------


def measure_read(race: Race) -> None:
    """All rows into one Arrow table; and the bytes they take."""
    sources = ("journal", "sealed files")
    names = {source: f"everything read into Arrow, from {source}" for source in sources}
    disk = "bytes on disk"
    if not any(race.wanted(name) for name in (*names.values(), disk)):
        return
    batch = bids(race.rows)
    values = json_rows(batch)
    for compression in ("none", "lz4"):
        way = Way(f"rows-{compression}", linger=50, batch=262_144, compression=compression)
        race.broker.create_topic(way.topic)
        produce(race.broker.client(), way, values)
    theirs = {topic: kafka_scan(race, topic, batch.schema) for topic in ("rows-none", "rows-lz4")}
    tried = {topic: max(scan() for _ in range(2)) for topic, scan in theirs.items()}
    faster = max(tried, key=lambda topic: tried[topic])
    settle(race.broker.data)
    note = f"confluent-kafka, consume({CONSUMED:,}) and pyarrow.json, topic {faster}"
    with race.log("read") as log:
        fill(log, batch)
        for source in sources:
            if source != "journal":
                seal(log)
            ours = log_scan(log, race.rows)
            ours()
            if race.wanted(names[source]):
                race.compare(
                    names[source], ours, theirs[faster], note, "rows/s", "higher", 10.0, PAIRS
                )
        if race.wanted(disk):
            sealed = sum(path.stat().st_size for path in Path(log.path).glob("sealed/*"))
            segments = (race.broker.data / "rows-lz4-0").glob("*.log")
            race.bench.count(
                f"{disk}, a row",
                sealed / race.rows,
                other=sum(path.stat().st_size for path in segments) / race.rows,
                other_name="Kafka, JSON, lz4, batches of 256 K",
                unit="bytes",
                goal=None if race.quick else 1.6,
            )


def log_scan(
    log: EmbeddedLog, rows: int, columns: Sequence[str] | None = None
) -> Callable[[], float]:
    def scan() -> float:
        start = time.monotonic()
        read = log.read(TOPIC, columns=columns)
        found = pa.Table.from_batches([batch.data for batch in read])
        seconds = time.monotonic() - start
        assert len(found) == rows, (len(found), rows)
        return rows / seconds

    return scan


def kafka_scan(race: Race, topic: str, schema: pa.Schema) -> Callable[[], float]:
    options = pyarrow.json.ParseOptions(explicit_schema=schema)

    def scan() -> float:
        made, rows = consumer(race.broker.client(), topic)
        start = time.monotonic()
        parts, count = [], 0
        while count < rows:
            records = made.consume(CONSUMED, 60)
            assert records, "records come within a minute"
            count += len(records)
            lines = b"\n".join([record.value() for record in records])
            parts.append(pyarrow.json.read_json(io.BytesIO(lines), parse_options=options))
        found = pa.concat_tables(parts)
        seconds = time.monotonic() - start
        made.close()
        assert len(found) == rows == race.rows
        assert found.schema == schema
        return rows / seconds

    return scan


def measure_columns(race: Race) -> None:
    """2 of 10 columns of sealed data, and all of them."""
    name = "2 of 10 columns of sealed data"
    if not race.wanted(name):
        return
    batch = bids(race.rows)
    for number in range(3):
        values = np.random.default_rng(number).integers(0, 1 << 30, race.rows)
        batch = batch.append_column(f"more_{number}", pa.array(values))
    with race.log("columns", batch.schema) as log:
        fill(log, batch)
        seal(log)
        ours = log_scan(log, race.rows, ["auction", "price"])
        other = log_scan(log, race.rows)
        ours(), other()
        race.compare(name, ours, other, "all 10, ours", "rows/s", "higher", 3.0)


# -- starting, standing by, history ----------

START = """
import sys, time
import headrace as hr
import pyarrow.ipc
log = hr.connect(sys.argv[1], create=False)
with open(f"{sys.argv[1]}.row", "rb") as file:
    log.append("bids", pyarrow.ipc.open_stream(file).read_next_batch())
print(time.monotonic(), flush=True)
sys.stdin.read()
"""
STAND_BY = """
import sys
import headrace as hr
log = hr.connect(sys.argv[1], create=False)
reading = log.read("bids", start="latest", follow=True)
print("ready", flush=True)
for batch in reading:
    print(batch.position, flush=True)
"""


@contextlib.contextmanager
def child(script: str, path: str) -> Iterator[Any]:
    """A process of ours that is killed, with SIGKILL, in the end.

    Its modules are compiled beforehand, as where they were installed with pip.
    """
    compiled = {"PYTHONPYCACHEPREFIX": f"{os.path.dirname(path)}/compiled"}
    environment = {**os.environ, **compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", script, path]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def as_many_rows(race: Race, name: str, broker: Broker) -> str:
    """A log, closed, and a broker's topic with as many rows of the same size."""
    path, values = race.path(name), payloads(min(race.rows, 100 * BATCH))
    with hr.connect(path) as log:
        log.create_topic(TOPIC, bids(1).schema)
        fill(log, bids(race.rows))
    broker.create_topic(TOPIC)
    for _ in range(race.rows // len(values)):
        produce(broker.client(), Way(), values)
    return path


def measure_start(race: Race) -> None:
    """A process from its start until it has acknowledged an append, after a kill -9."""
    name = "start after kill -9"
    if not race.wanted(name):
        return
    if race.started is not None:
        race.started.stop()
    with Broker(settings=SOON) as broker:
        path = as_many_rows(race, "start", broker)

        def ours() -> float:
            start = time.monotonic()
            with child(START, path) as process:
                return float(process.stdout.readline()) - start

        def theirs() -> float:
            broker.kill()
            start = time.monotonic()
            broker.start()
            return time.monotonic() - start

        row = bids(1)  # ready, as Kafka's is: to make one of Python values would import pandas
        with pa.OSFile(f"{path}.row", "wb") as file, pa.ipc.new_stream(file, row.schema) as stream:
            stream.write_batch(row)
        ours()
        note = "Kafka, small heap, session timeout of 1 s (as it comes: 9 s)"
        race.compare(name, ours, theirs, note, "s", "lower", 5.0, PAIRS)
    shutil.rmtree(path)


def measure_memory(race: Race) -> None:
    """What a process takes that has the log open and follows it, against a broker."""
    name = "idle memory"
    if not race.wanted(name):
        return
    broker = race.broker
    path = as_many_rows(race, "memory", broker)
    broker.stop()  # what it took to write the rows is not what it needs when idle
    broker.start()
    with child(STAND_BY, path) as process, hr.connect(path) as log:
        process.stdout.readline()
        log.append(TOPIC, bids(1))
        process.stdout.readline()
        time.sleep(1 if race.quick else 5)
        ours, theirs = resident(process.pid), resident(broker.pid)
    note = "Kafka, the flags of its own start script, idle since its start"
    goal = None if race.quick else 3.0
    race.bench.count(name, ours, other=theirs, other_name=note, unit="MB", goal=goal)
    shutil.rmtree(path)


def resident(pid: int) -> float:
    """Resident memory in MB, pages shared with others included."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmRSS"))


def measure_history(race: Race) -> None:
    """Appends to a log that holds much, sealed, and to one that holds nothing."""
    gigabytes = 0.02 if race.quick else race.gigabytes
    name = f"durable append with {gigabytes:g} GB of history"
    if not race.wanted(name):
        return
    free = shutil.disk_usage(race.folder).free / 1e9
    assert free > gigabytes * 1.5, f"{free:.0f} GB are free; --gigabytes says how much history"
    crew, batch = race.crew, bids(INLINE_ROWS)
    with race.log("history") as log, race.log("empty"):
        for number in range(int(gigabytes * 1e9 / batch.nbytes)):
            log.append(TOPIC, batch, durability="os")
            progress(f"kafka: making history: {number * batch.nbytes / 1e9:.1f} GB")
        progress("kafka: sealing history")
        seal(log)
        progress("")
        crew.ask(0, do_open, race.path("history"))
        crew.ask(1, do_open, race.path("empty"))

        def arm(number: int) -> Callable[[], float]:
            return lambda: (
                race.batches * BATCH / float(crew.ask(number, do_append, race.batches, False))
            )

        arm(0)(), arm(1)()
        race.compare(name, arm(0), arm(1), "an empty log, ours", "rows/s", "higher", 0.9)
        crew.ask(0, do_close), crew.ask(1, do_close)


NEED_KAFKA = (measure_append, measure_latency, measure_read, measure_memory, measure_start)
OURS = (measure_columns, measure_history)


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments("kafka")
    parser.add_argument("--quick", action="store_true", help="a smoke run, under a minute")
    parser.add_argument("--only", default="", help="measures whose name contains this")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of history")
    parser.add_argument("--folder", default=None, help="where to write; default: a temporary one")
    parser.set_defaults(pairs=PAIRS_SHORT)
    options = parser.parse_args(given)
    if options.pairs < PAIRS:
        parser.error(f"--pairs must be at least {PAIRS}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and tidy up on the way
    bench = Bench("kafka")
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir=options.folder))
    crew = Crew(CREW)
    race = Race(
        bench=bench,
        folder=folder,
        crew=crew,
        quick=options.quick,
        seconds=0.0,
        pairs=options.pairs,
        gigabytes=options.gigabytes,
        only=options.only,
    )
    try:
        with race.leaving:
            try:
                for measure in NEED_KAFKA:
                    measure(race)
            except Unavailable as error:
                say(f"{error}: only what needs no broker is measured")
        for measure in OURS:
            measure(race)
    finally:
        crew.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return bench.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
