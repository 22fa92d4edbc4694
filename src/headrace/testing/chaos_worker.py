"""One process of the chaos: it works on a log in its role, and records what it was told.

    python -m headrace.testing.chaos_worker FOLDER ROLE NUMBER RECORD [--settings JSON]

It works until it is killed, or ends well at SIGTERM. Rows carry an id that nobody else uses and a
padding that follows from it: what comes back otherwise is recorded as a row that nobody wrote.
Errors of the catalogue are outcomes, and recorded; any other is recorded as a surprise.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

from headrace import errors
from headrace.clock import SystemClock
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.groups.consumer import Consumer
from headrace.log.writer import Writer
from headrace.model.groups import group_name
from headrace.model.records import Batch, Receipt, time_of
from headrace.settings import LogSettings
from headrace.testing.chaos_history import ACKED, INDEX_BITS, REFUSED, UNKNOWN, Recorder
from headrace.testing.verdicts import Violated

SCHEMA = "id bigint, key bigint, _op string, pad string"
PLAIN = {"orders": 4, "payments": 2, "audit": 1, "filed": 2, "short": 2}
"""Topics with their partitions; `filed` has an archive, and `short` little retention."""
TWINS = {"accounts": 2, "balances": 2}
"""Topics that are only ever written together, the same keys in both; they are compacted."""
COPIES = {"copies": 2}
"""Here a group copies `audit`, each row once, with its offsets."""
TOPICS = PLAIN | TWINS | COPIES
GROUPS = {"readers": ["orders", "payments", "short"], "copiers": ["audit"]}
COPIED = {"copiers": ("audit", "copies")}
_RUN = struct.Struct("<IIQ")
NUMBERS = 1_000_000
"""Attempts of one process at most."""


class Ended(BaseException):
    """SIGTERM came."""


def sleep(seconds: float) -> None:
    """Sleep; `time.sleep` asks for an absolute time, which libfaketime gets wrong."""
    select.select((), (), (), seconds)


class Worker:
    """The process."""

    def __init__(
        self, folder: str, number: int, settings: LogSettings, record: Callable[..., None]
    ) -> None:
        """Nothing is open yet."""
        self.folder = folder
        self.number = number
        self.settings = settings
        self.rng = Random(f"worker/{number}")
        self.record = record
        self.log: EmbeddedLog
        self.ending = False
        """SIGTERM came; the exception for it may have been raised where it goes no further."""
        self._attempts = 0
        self._readings = 0
        self._commits = 0

    def run(self, role: str) -> None:
        """Work until SIGTERM, whatever happens; the log is opened again after an error."""
        work: Callable[[Worker], None] = ROLES[role]
        while True:
            try:
                with EmbeddedLog(self.folder, self.settings, create=False) as self.log:
                    self.record(opened=role)
                    while not self.ending:
                        work(self)
                raise Ended
            except errors.HeadraceError as error:
                self.failed(error)
                sleep(0.05)
            except Exception as error:  # noqa: BLE001 - recorded; the director judges
                self.record(surprise=f"{type(error).__name__}: {error}", role=role)
                sleep(0.05)

    def failed(self, error: errors.HeadraceError) -> None:
        """Record an error that is no outcome of an append."""
        self.record(error=type(error).__name__, text=error.render()[:500])

    # --- appending ---

    def begin(self, rows: Mapping[str, Sequence[tuple[int, bool]]], **more: Any) -> Attempt:
        """Record what is about to be appended: (key, gone) of each row, by topic."""
        self._attempts += 1
        number = self.number * NUMBERS + self._attempts
        index, named = 0, {}
        for topic, some in rows.items():
            named[topic] = [
                (number << INDEX_BITS | index + at, key, gone)
                for at, (key, gone) in enumerate(some)
            ]
            index += len(some)
        self.record(begin=number, rows=named, **more)
        return Attempt(self, number, named)

    def some(self, most: int = 50) -> list[tuple[int, bool]]:
        """Rows with any keys."""
        return [(self.rng.randrange(200), False) for _ in range(self.rng.randint(1, most))]

    @contextlib.contextmanager
    def commit(
        self, group: str, offsets: Mapping[str, Mapping[int, int]], generation: int | None = None
    ) -> Iterator[None]:
        """Record a commit of a group's offsets and how it ends; `generation`: which it requires."""
        self._commits += 1
        number = self._commits
        self.record(commit=number, group=group, generation=generation, offsets=offsets)
        outcome = UNKNOWN
        try:
            yield
            outcome = ACKED
        except errors.Unknown:
            raise
        except errors.HeadraceError:
            outcome = REFUSED
            raise
        finally:
            self.record(committed=number, outcome=outcome)

    # --- reading ---

    def reading(self, topics: Sequence[str], **more: Any) -> int:
        """Record that a reading begins; its number."""
        self._readings += 1
        starts = {topic: self.log.starts(topic) for topic in topics}
        self.record(reading=self._readings, topics=list(topics), starts=starts, **more)
        return self._readings

    def batch(self, reading: int, batch: Batch) -> None:
        """Record a batch."""
        self.record(
            batch=reading, topic=batch.topic, position=batch.position, last=batch.last,
            rows=rows_of(batch),
        )  # fmt: skip

    @contextlib.contextmanager
    def told(self, reading: int) -> Iterator[None]:
        """Record it when a reading is told that what it asks for is gone."""
        try:
            yield
        except errors.OffsetsGone as gone:
            details: Any = gone.details
            first = {p: last + 1 for p, (_, last) in details["partitions"].items()}
            self.record(gone=reading, first={details["topic"]: first})

    def glimpse(self) -> int:
        """The newest position, as the log says."""
        asked = time.monotonic()
        position = self.log.position
        self.record(asked, glimpse=position)
        return position


class Attempt:
    """An append under way; `with` records how it ended."""

    def __init__(self, worker: Worker, number: int, rows: Mapping[str, list[Any]]) -> None:
        """Made by `Worker.begin`."""
        self.number = number
        self.rows = {
            topic: [
                {"id": row, "key": key, "_op": "d" if gone else "u", "pad": pad_of(row)}
                for row, key, gone in some
            ]
            for topic, some in rows.items()
        }
        self.outcome = ""
        self._worker = worker
        self._receipt: Receipt | None = None

    def taken(self, receipt: Receipt | None) -> None:
        """It was acknowledged; without a receipt: found out later."""
        self.outcome, self._receipt = ACKED, receipt

    def __enter__(self) -> Attempt:
        """For `with`."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Record the outcome; what an append may end with goes no further."""
        more: dict[str, Any] = {}
        if isinstance(error, errors.Unknown) or not isinstance(error, errors.HeadraceError | None):
            self.outcome = UNKNOWN
        elif error is not None:
            self.outcome = REFUSED
        elif self._receipt is not None:
            receipt = self._receipt
            runs: dict[str, list[Any]] = {}
            for topic, table in receipt.runs:
                runs.setdefault(topic, []).extend(runs_of(table))
            more = {"position": receipt.position, "received": receipt.received_us, "runs": runs}
        if isinstance(error, errors.HeadraceError):
            more["why"] = f"{error.code} {error.fact}"[:300]
        self._worker.record(end=self.number, outcome=self.outcome, **more)
        return isinstance(error, errors.Conflict | errors.LockTimeout | errors.DiskFull)


def pad_of(row: int) -> str:
    """The padding of a row, some of it long."""
    length = (row * 2654435761 >> 7) % 97 if row % 53 else 3000
    return f"{row:x}" + "-" * length


def runs_of(table: bytes) -> list[tuple[int, int, int]]:
    """Partition, rows and first offset of each run of a receipt."""
    return list(_RUN.iter_unpack(table))


def rows_of(batch: Batch) -> list[tuple[int, int, int, int]]:
    """Partition, offset, position and id of each row; one that is not as written: its negative."""
    ids, pads = batch.data.column("id").to_pylist(), batch.data.column("pad").to_pylist()
    return [
        (partition, offset, position, row if pad == pad_of(row) else -row)
        for partition, offset, position, row, pad in zip(
            batch.partition.to_pylist(), batch.offset.to_pylist(), batch.positions.to_pylist(),
            ids, pads, strict=True,
        )
    ]  # fmt: skip


# --- producers ------------------------------------------------------------------------------------


def produce(worker: Worker) -> None:
    """One append of some kind."""
    kinds = (_plain, _plain, _transaction, _transaction, _twins, _twins, _staged, _single)
    worker.rng.choice(kinds)(worker)
    sleep(worker.rng.choice((0.0, 0.0, 0.005, 0.02)))


def _plain(worker: Worker) -> None:
    topic = worker.rng.choice(list(PLAIN))
    durability = worker.rng.choice(("fsync", "fsync", "fsync", "interval", "os"))
    with worker.begin({topic: worker.some()}, durable=durability == "fsync") as attempt:
        attempt.taken(worker.log.append(topic, attempt.rows[topic], durability=durability))


def _transaction(worker: Worker) -> None:
    topics = worker.rng.sample(list(PLAIN), worker.rng.randint(2, 3))
    _together(worker, {topic: worker.some(8) for topic in topics})


def _twins(worker: Worker) -> None:
    keys = worker.rng.sample(range(40), worker.rng.randint(1, 5))
    rows = [(key, worker.rng.random() < 0.2) for key in keys]
    _together(worker, dict.fromkeys(TWINS, rows))


def _together(worker: Worker, rows: Mapping[str, Sequence[tuple[int, bool]]]) -> None:
    with worker.begin(rows) as attempt:
        with worker.log.transaction() as transaction:
            for topic, some in attempt.rows.items():
                transaction.append(topic, some)
        attempt.taken(transaction.receipt)


def _staged(worker: Worker) -> None:
    if worker.rng.random() < 0.7:  # they are large
        return
    rows = worker.some(1) * worker.rng.randint(100, 1200)
    with worker.begin({"orders": rows}) as attempt:
        piece = worker.log.stage("orders", attempt.rows["orders"])
        attempt.taken(worker.log.append("orders", [piece]))


def _single(worker: Worker) -> None:
    """Row by row, gathered by a producer in the background."""
    with worker.begin({"payments": worker.some(30)}, whole=False) as attempt:
        producer = worker.log.producer("payments")
        try:
            for row in attempt.rows["payments"]:
                producer.send(row)
            producer.flush(20.0)
        except errors.HeadraceError as error:
            raise errors.Unknown(error.fact, place="producer") from error
        finally:
            with contextlib.suppress(errors.HeadraceError):
                producer.close()
        attempt.taken(None)


def write_once(worker: Worker) -> None:
    """A writer's entries: what ended unknown is settled by claiming the name again."""
    name = f"writer-{worker.rng.randrange(2)}"
    writer = worker.log.writer(name)
    for _ in range(worker.rng.randint(3, 30)):
        if not _once(worker, writer, name):
            return  # somebody else has the name now, or nobody knows


def _once(worker: Worker, writer: Writer, name: str) -> bool:
    version = writer.version
    with worker.begin({"orders": worker.some(10), "audit": worker.some(2)}) as attempt:
        try:
            with writer.transaction(version=version) as transaction:
                for topic, rows in attempt.rows.items():
                    transaction.append(topic, rows)
        except errors.Unknown as unknown:
            try:
                stored = worker.log.writer(name).version
            except errors.HeadraceError:
                raise unknown from None
            if stored <= version:
                raise errors.Conflict("not stored: the next claim says so", place=name) from None
            raise  # stored, though by whom? Another holder may have come in between
        receipt = transaction.receipt
        assert receipt is not None
        again = writer.append("orders", attempt.rows["orders"], version=version)
        if not again.duplicate:
            raise Violated(f"version {version} of {name} was taken twice")
        attempt.taken(receipt)
        return True
    return False


# --- readers --------------------------------------------------------------------------------------


def follow(worker: Worker) -> None:
    """Follow several topics from some place on, woken by appends or asking."""
    log, rng = worker.log, worker.rng
    topics = rng.sample(list(TOPICS), rng.randint(1, len(TOPICS)))
    start = {"after": rng.randrange(log.position + 1)} if rng.random() < 0.5 else {}
    reading = worker.reading(topics, start=start)
    with worker.told(reading):
        found = log.read(topics, after=start.get("after"), follow=True, timeout=1.0)
        until = time.monotonic() + rng.uniform(1.0, 6.0)
        if rng.random() < 0.5:
            for batch in found:
                worker.batch(reading, batch)
                if time.monotonic() > until:
                    break
            return
        while time.monotonic() < until:
            newest = worker.glimpse()
            while (next_one := found.poll()) is not None:
                worker.batch(reading, next_one)
            worker.record(through=reading, position=newest)
            with contextlib.suppress(errors.WaitTimeout):
                log.wait(newest + 1, 0.3)


def rove(worker: Worker) -> None:
    """Read from a random place to the end, or to some position."""
    log, rng = worker.log, worker.rng
    sleep(rng.uniform(0.02, 0.3))
    newest = worker.glimpse()
    topic = rng.choice(list(TOPICS))
    kind = rng.choice(("offsets", "offsets", "time", "after", "partitions", "through", "earliest"))
    options: dict[str, Any] = {}
    start: dict[str, Any] = {}
    topics = [topic]
    more: dict[str, Any] = {}
    if kind == "offsets":
        ends = log.ends(topic)
        chosen = rng.sample(range(len(ends)), rng.randint(1, len(ends)))
        offsets = {p: rng.randint(0, ends[p]) for p in chosen}
        options["start"], start = offsets, {"offsets": offsets}
    elif kind == "time":
        now = SystemClock().now_us() - rng.randrange(20_000_000)
        options["start"], start = time_of(now), {"time": now}
    elif kind == "partitions":
        more["partitions"] = options["partitions"] = [rng.randrange(TOPICS[topic])]
    elif kind in ("after", "through"):
        topics = rng.sample(list(TOPICS), 2)
        options["after"] = rng.randrange(newest + 1)
        start = {"after": options["after"]}
        if kind == "through":
            options["through"] = newest
    reading = worker.reading(topics, start=start, **more)
    count = 0
    with worker.told(reading):
        for batch in log.read(topics, **options):
            worker.batch(reading, batch)
            count += len(batch)
            if count > 20_000:
                return
        worker.record(through=reading, position=newest)


def look_up(worker: Worker) -> None:
    """The tables of the twins at one position."""
    sleep(worker.rng.uniform(0.05, 0.4))
    position = worker.glimpse()
    if worker.rng.random() < 0.3:
        since = max(worker.log.since_of(topic) for topic in TWINS)
        position = worker.rng.randint(max(since, position // 2), position)
    worker.record(table=tables_of(worker.log, position), position=position)


def tables_of(log: EmbeddedLog, position: int) -> dict[str, list[tuple[int, int, int]]]:
    """Key, id and position of each row of the twins."""
    found = {}
    for topic in TWINS:
        rows = log.table(topic).scan(at=position).read_all().to_pydict()
        found[topic] = [
            (key, row if pad == pad_of(row) else -row, at)
            for key, row, pad, at in zip(
                rows["key"], rows["id"], rows["pad"], rows["_position"], strict=True
            )
        ]
    return found


# --- keepers --------------------------------------------------------------------------------------


def keep(worker: Worker) -> None:
    """Seal, let go, compact and delete, when nobody else does."""
    rng = worker.rng
    keeper = worker.log.keeper()
    try:
        for _ in range(rng.randint(1, 10)):
            sleep(rng.uniform(0.05, 0.6))
            done = keeper.turn(close=rng.random() < 0.4, compact=rng.random() < 0.4)
            worker.record(turn={name: len(some) for name, some in done.to_json().items() if some})
    except errors.NotKeeper:
        sleep(0.3)
    finally:
        keeper.release()


def hold(worker: Worker) -> None:
    """Hold a position, and see whether it can be read until it is let go."""
    log, name = worker.log, f"hold-{worker.number}"
    position = worker.glimpse()
    log.hold(name, position, topics=["short"], seconds=20.0)
    if log.since_of("short") <= position:
        until = time.monotonic() + worker.rng.uniform(0.5, 5.0)
        while time.monotonic() < until:
            sleep(0.2)
            try:
                next(log.read("short", after=position), None)
                worker.record(held=name, position=position, kept=True)
            except errors.OffsetsGone:
                worker.record(held=name, position=position, kept=False)
    log.release(name)


# --- members of groups ----------------------------------------------------------------------------


def consume(worker: Worker) -> None:
    """Read as a member of a group for a while, and commit most of the time."""
    _member(worker, "readers", _commit)


def copy(worker: Worker) -> None:
    """Read as a member of a group, and store a copy of each row with the offsets."""
    _member(worker, "copiers", _copy)


def _member(worker: Worker, group: str, act: Callable[[Worker, Consumer, Batch], None]) -> None:
    rng, generation = worker.rng, 0
    options: dict[str, Any] = {"max_rows": rng.choice((5, 200)), "lease_seconds": 2.0}
    topics = GROUPS[group]
    with worker.log.consumer(topics, group, timeout=1.0, on_gone="skip", **options) as consumer:
        until = time.monotonic() + rng.uniform(1.0, 8.0)
        for batch in consumer:
            if consumer.generation != generation:
                generation = consumer.generation
                worker.record(joined=group, generation=generation)
            worker.record(took=group, topic=batch.topic, rows=rows_of(batch))
            with contextlib.suppress(errors.Conflict):
                act(worker, consumer, batch)
            if time.monotonic() > until:
                break


def _commit(worker: Worker, consumer: Consumer, batch: Batch) -> None:
    if worker.rng.random() < 0.7:
        with worker.commit(consumer.group, {batch.topic: batch.ends}):
            consumer.commit(batch)


def _copy(worker: Worker, consumer: Consumer, batch: Batch) -> None:
    ids = batch.data.column("id").to_pylist()
    with worker.begin({"copies": [(row, False) for row in ids]}) as attempt:
        with worker.log.transaction() as transaction:
            transaction.append("copies", attempt.rows["copies"])
            consumer.commit_in(transaction, batch)
            generation = transaction._require[group_name(consumer.group)]
            with worker.commit(consumer.group, {batch.topic: batch.ends}, generation):
                transaction.commit()
        attempt.taken(transaction.receipt)


ROLES: dict[str, Callable[[Worker], None]] = {
    "producer": produce,
    "writer": write_once,
    "follower": follow,
    "rover": rove,
    "table reader": look_up,
    "keeper": keep,
    "holder": hold,
    "member": consume,
    "copier": copy,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Work until somebody ends it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("role", choices=list(ROLES))
    parser.add_argument("number", type=int)
    parser.add_argument("record")
    parser.add_argument("--settings", default="{}", help="of the log, as JSON")
    chosen = parser.parse_args(arguments)
    settings = LogSettings(**json.loads(chosen.settings))
    worker = Worker(chosen.folder, chosen.number, settings, Recorder(chosen.record))

    def end(*_: object) -> None:
        worker.ending = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Ended

    signal.signal(signal.SIGTERM, end)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where somebody hangs
    with contextlib.suppress(Ended):
        worker.run(chosen.role)
    return 0


if __name__ == "__main__":
    sys.exit(main())
