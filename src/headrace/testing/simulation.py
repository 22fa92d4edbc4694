"""The log on a simulated machine: appends that are remembered, a follower, and the probe.

`Run` is one workload under way. Everything it appends, and everything it is shown, goes into its
`History`. `probe` is what happens after a crash: open, check, read everything, append, read again,
close, open again, read again.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from random import Random
from typing import Any

import pyarrow as pa

from headrace import errors
from headrace.log.embedded.check import check
from headrace.log.embedded.keeper import pieces_of
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.orphans import PATIENCE_SECONDS
from headrace.model.policy import Policy
from headrace.model.records import Batch, Receipt
from headrace.settings import LogSettings
from headrace.testing.disk import SimulatedMachine, SimulatedProcess
from headrace.testing.explore import Opening
from headrace.testing.oplog import Image
from headrace.testing.promises import (
    REFUSED,
    TAKEN,
    UNKNOWN,
    Attempt,
    Content,
    History,
    Row,
)  # fmt: skip
from headrace.testing.schedule import Stuck
from headrace.testing.verdicts import Violated, verdict_on

FOLDER = "/disk/data"
SCHEMA = "k bigint, attempt bigint, i bigint, pad string"
TOPICS = {"orders": 3, "audit": 1}
"""Topics that every workload has, with their partitions."""
SETTINGS = LogSettings(
    journal_bytes_first=16 << 10, journal_bytes_max=32 << 10, background=False,
    lock_timeout_seconds=5.0,
)  # fmt: skip
COUNTERS = ("c0", "c1", "c2", "post")
LATER = 1_000_000


def new_machine() -> SimulatedMachine:
    """A machine with an empty disk but for the folder in which the log will be made."""
    return SimulatedMachine(Image(frozenset(("/", "/disk"))))


class Run:
    """A workload on a simulated machine, with its history."""

    def __init__(self, machine: SimulatedMachine, seed: int | str) -> None:
        """Nothing is open yet."""
        self.machine = machine
        self.rng = Random(f"run/{seed}")
        self.history = History(counters=COUNTERS)
        self.logs: list[EmbeddedLog] = []
        self._first = 0

    def open(self, process: SimulatedProcess | None = None, **settings: Any) -> EmbeddedLog:
        """Open the log in a process, a new one unless it is given."""
        chosen = {name: getattr(SETTINGS, name) for name in SETTINGS.__dataclass_fields__}
        chosen.update(settings)
        log = EmbeddedLog(FOLDER, LogSettings(**chosen), system=process or self.machine.process())
        self.logs.append(log)
        return log

    def make_topics(self, log: EmbeddedLog) -> None:
        """Make the topics that every workload has."""
        there = {topic.name for topic in log.topics()}
        for name, partitions in TOPICS.items():
            if name not in there:
                log.create_topic(name, SCHEMA, key="k", partitions=partitions)

    def end(self) -> None:
        """Let go of all handles as the end of the machine does: nothing is written any more."""
        for process in self.machine.processes:
            process.kill()
        for log in self.logs:
            log._finalizer.detach()
        self.logs.clear()

    # --- appending ---

    def append(
        self, log: EmbeddedLog, rows: Mapping[str, int], *, expect: Mapping[str, int] | None = None,
        require: Mapping[str, int] | None = None, durability: str | None = None, pad: int = 40,
        stage: bool = False, apart: Mapping[str, int] | None = None,
    ) -> Attempt:  # fmt: skip
        """One attempt: so many rows of each topic in one entry; never raises a catalogue error.

        `apart`: rows of topics of which not everything is kept; see `agreeing`.
        """
        durable = (durability or log.settings.durability) == "fsync"
        alone = self.machine.short_cut and len(rows) == 1 and not (expect or require or apart)

        def act(attempt: Attempt) -> Receipt:
            if alone and not stage:  # the straight way
                (topic,) = rows
                data: Any = self.rows(attempt.number, rows[topic], pad)
                batch = pa.RecordBatch.from_pylist(data, log.topic(topic).schema.arrow)
                return log.append(topic, batch, durability=durability)
            with log.transaction(durability=durability) as transaction:
                for topic, count in {**rows, **(apart or {})}.items():
                    data = self.rows(attempt.number, count, pad)
                    bounds = None
                    if stage:
                        data = log.stage(topic, data)
                    elif count > 1:
                        bounds = [1, count - 1]
                    transaction.append(topic, data, transactions=bounds)
                for name, value in (expect or {}).items():
                    transaction.expect(name, value)
                for name, value in (require or {}).items():
                    transaction.require(name, value)
            assert transaction.receipt is not None
            return transaction.receipt

        return self.attempt(act, rows, expect=expect, require=require, durable=durable)

    def attempt(
        self, act: Callable[[Attempt], Receipt], rows: Mapping[str, int], *,
        expect: Mapping[str, int] | None = None, require: Mapping[str, int] | None = None,
        durable: bool = True,
    ) -> Attempt:  # fmt: skip
        """Note how an attempt begins and ends."""
        attempt = self.history.start(
            rows, expect=expect, require=require, durable=durable, now=len(self.machine.ops)
        )
        attempt.number += self._first
        try:
            receipt = act(attempt)
        except errors.Unknown as error:
            attempt.outcome, attempt.error = UNKNOWN, error.fact
        except errors.HeadraceError as error:
            attempt.outcome, attempt.error = REFUSED, f"{error.code} {error.fact}"
        else:
            attempt.outcome, attempt.position = TAKEN, receipt.position
        attempt.ended = len(self.machine.ops)
        return attempt

    def rows(self, number: int, count: int, pad: int = 40) -> list[dict[str, Any]]:
        """Rows that say which attempt they belong to."""
        return rows_to_write(number, count, pad)

    def numbered_from(self, first: int) -> None:
        """Attempts of this run are numbered after `first`."""
        self._first = first

    # --- reading ---

    def follow(
        self, log: EmbeddedLog, name: str, topics: Iterable[str], after: int = 0, **options: Any
    ) -> int:
        """Read on from a position and remember what was shown; the position reached."""
        topics = list(topics)
        through = after
        for batch in log.read(topics, after=after or None, **options):
            if batch.last:
                through = max(through, batch.position)
            rows = rows_of(batch)[0]
            self.history.show(name, topics, rows, through, len(self.machine.ops))
        return through


def rows_to_write(number: int, count: int, pad: int = 40) -> list[dict[str, Any]]:
    """Rows that say which attempt they belong to."""
    return [
        {"k": (number * 7 + i) % 11, "attempt": number, "i": i, "pad": "x" * pad}
        for i in range(count)
    ]


def rows_of(batch: Batch) -> tuple[list[Row], dict[int, int]]:
    """The rows of a batch, and the position of each attempt in it."""
    columns = batch.data.select(["attempt", "i", "k", "pad"]).to_pydict()
    rows, positions = [], {}
    for partition, offset, position, attempt, index, key, pad in zip(
        batch.partition.to_pylist(), batch.offset.to_pylist(), batch.positions.to_pylist(),
        *columns.values(), strict=True,
    ):  # fmt: skip
        value = zlib.crc32(f"{key} {pad}".encode())
        rows.append(Row(batch.topic, partition, offset, attempt, index, value))
        positions[attempt] = position
    return rows, positions


def content_of(log: EmbeddedLog, into: Content | None = None) -> Content:
    """Everything that a log shows; `into` is filled as far as it can be read."""
    content = into or Content([], {}, 0)
    content.topics = tuple(t.name for t in log.topics() if _keeps_all(t.policy))
    content.upper = log.position
    for batch in log.read(content.topics) if content.topics else ():
        take(batch, content)
    content.counters = {name: log.counter(name) for name in COUNTERS}
    return content


def _keeps_all(policy: Policy) -> bool:
    limited = policy.retention_seconds is not None or policy.retention_bytes is not None
    return not policy.compact and (not limited or policy.archive is not None)


def agreeing(log: EmbeddedLog) -> None:
    """Raise if what is kept of a topic is not what it should be.

    A compacted topic `keyed` has the newest rows of `twin`, which is written with it and keeps all;
    one with little retention (`short`) has every row from its first offset to its last.
    """
    names = {topic.name for topic in log.topics()}
    if not {"twin", "keyed", "short"} <= names:
        return
    newest = [
        {
            row["k"]: (row["attempt"], row["i"])
            for batch in log.read(topic, across_gaps=True)
            for row in batch.to_pylist()
        }
        for topic in ("twin", "keyed")
    ]
    if newest[0] != newest[1]:
        raise Violated(f"the newest rows of twin and keyed: {newest}")
    held = {p: list(range(*ends)) for p, ends in enumerate(_held(log, "short"))}
    found: dict[int, list[int]] = {partition: [] for partition in held}
    for batch in log.read("short"):
        for partition, offset in zip(
            batch.partition.to_pylist(), batch.offset.to_pylist(), strict=True
        ):
            found[partition].append(offset)
    if found != held:
        raise Violated(f"offsets of short: {found}, not {held}")


def _held(log: EmbeddedLog, topic: str) -> Iterator[tuple[int, int]]:
    return zip(log.starts(topic), log.ends(topic), strict=True)


def take(batch: Batch, content: Content) -> None:
    """Add the rows of a batch."""
    rows, positions = rows_of(batch)
    content.rows += rows
    for attempt, position in positions.items():
        if content.positions.setdefault(attempt, position) != position:
            raise Violated(
                f"attempt {attempt} at positions {position} and {content.positions[attempt]}"
            )


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `Stuck` when the block takes longer; only in the main thread, where signals arrive.

    Longer by the processor's time: other processes may leave this one little of it. A block that
    waits and does nothing is stuck after ten times as long, counted in alarms: a machine that
    stands still does not bring any.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    used, alarms = time.process_time(), itertools.count()

    def stuck(*_: object) -> None:
        if time.process_time() - used >= seconds or next(alarms) >= 9 * seconds:
            raise Stuck(f"no end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stuck)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)


def probe(machine: SimulatedMachine) -> Opening:
    """Open what is left on a machine; see the module."""
    run = Run(machine, "probe")
    opening = Opening(machine)
    try:
        machine.ops_max = 5_000
        with time_limit(10):
            _probe(run, opening)
    except Exception as error:  # noqa: BLE001 - whatever it is, the log did not open well
        opening.error = verdict_on(error)
    finally:
        run.end()
    return opening


def _probe(run: Run, opening: Opening) -> None:
    machine = run.machine
    process = machine.process()
    if f"{FOLDER}/headrace.json" in machine.names:
        _must_be_sound(process, "before it is opened")
    log = run.open(process)
    opening.content = content_of(log)
    agreeing(log)
    opening.read_at = len(machine.ops)
    run.numbered_from(machine.generation * LATER)
    run.make_topics(log)
    post = opening.content.counters["post"]
    run.append(log, {"orders": 2, "audit": 1}, expect={"post": post})
    run.append(log, {"orders": 1}, expect={"post": post})
    run.append(log, {"orders": 1}, require={"post": post + 1})
    outcomes = [attempt.outcome for attempt in run.history.attempts]
    if outcomes != [TAKEN, REFUSED, TAKEN]:
        raise Violated(f"appending after the crash: {run.history.attempts}")
    opening.later = run.history.attempts
    opening.final.append((len(machine.ops), content_of(log)))
    log.close()
    process.kill()
    again = run.open()
    opening.final.append((len(machine.ops), content_of(again)))
    kept = (f"{FOLDER}/sealed/", f"{FOLDER}/pieces/")
    if any(name.startswith(kept) for name in machine.names):  # somebody keeps it
        keeper = again.keeper()
        for _ in range(2):
            keeper.turn(close=True)
            machine.clock_us += round(2e6 * PATIENCE_SECONDS)
        opening.final.append((len(machine.ops), content_of(again)))
        agreeing(again)
        numbers = again.journal.files.numbers()
        named = {name for number in numbers for name in pieces_of(again, number)}
        left = set(machine.process().listdir(again.pieces.folder)) - named
        if left:
            raise Violated(f"pieces that nobody will ever name: {left}")
    _must_be_sound(machine.process(), "after all")


def _must_be_sound(process: SimulatedProcess, when: str) -> None:
    report = check(process, FOLDER)
    if not report.ok:
        raise Violated(f"check {when}: {report.problems[0].render()}")
