"""The bank: money only moves, so in every state that anybody can see the accounts add up to zero.

Ten accounts; a transfer is one entry of two rows. Credits and debits by account are two views, the
balance is their full outer join, the total a view on that. A driver with Spark keeps them, in a
process of its own, while tellers transfer, cancel and correct; it is killed at random instants, its
JVM is killed, the Python workers of its JVM are killed, a second driver is started beside it. All
the while a reader reads the newest state.

At the end every committed state is gone through: in each, credits, debits, balance and total agree,
the total is zero, and the accounts are those of the bank after some transfer, never earlier than in
the state before. Can catch: views of one commit from different positions, half an entry, a batch
twice or not at all, two drivers that both commit. Cannot catch: instants that did not happen.

    python -m headrace.testing.views_bank FOLDER      a driver: until it is killed, or fenced
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.pipelines.pipeline import Pipeline
from headrace.pipelines.views.reading import rows_of, status_of, topic_of
from headrace.testing.watched import children_of

ACCOUNTS = 10
NAME = "bank"
VIEWS = ("credits", "debits", "balance", "total")
FENCED, STOPPED = 3, 4
"""How a driver ends by itself."""
PATIENCE = 240.0
"""Seconds that a driver may take to start and to commit, on a machine with other things to do."""


def bank() -> Pipeline:
    """The pipeline, in plain PySpark."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import LongType

    pipeline = Pipeline(NAME)
    pipeline.table("moves")

    # Plain Python, so that Spark has Python workers.
    amount_of = F.udf(abs, LongType())

    @pipeline.view(key="account")
    def credits(moves: Any) -> Any:  # noqa: A001 - the name of the view
        plus = moves.where(F.col("amount") > 0)
        return plus.groupBy("account").agg(F.sum("amount").alias("credit"))

    @pipeline.view(key="account")
    def debits(moves: Any) -> Any:
        minus = moves.where(F.col("amount") < 0)
        return minus.groupBy("account").agg(F.sum(amount_of("amount")).alias("debit"))

    @pipeline.view(key="account")
    def balance(credits: Any, debits: Any) -> Any:  # noqa: A002
        both = credits.join(debits, "account", "full_outer")
        zero = F.lit(0)
        return both.select(
            "account",
            (F.coalesce("credit", zero) - F.coalesce("debit", zero)).alias("balance"),
        )

    @pipeline.view()
    def total(balance: Any) -> Any:
        return balance.agg(F.sum("balance").alias("total"), F.count("*").alias("accounts"))

    return pipeline


def open_bank(folder: str) -> EmbeddedLog:
    """The bank's log, with its topic."""
    log = EmbeddedLog(folder)
    schema = "id bigint, account bigint, amount bigint"
    log.create_topic("moves", schema, kind="changes", exist_ok=True)
    return log


class Teller:
    """Moves money, one entry at a time."""

    def __init__(self, log: EmbeddedLog, seed: str) -> None:
        """The transfers follow from the seed."""
        self.log = log
        self.chance = Random(f"teller/{seed}")
        self.open: list[tuple[int, int, int, int]] = []
        self.count = 0

    def move(self) -> None:
        """A transfer; or one is cancelled; or one is corrected."""
        chance = self.chance
        rows: list[dict[str, Any]] = []
        if self.open and chance.random() < 0.3:
            old = self.open.pop(chance.randrange(len(self.open)))
            rows += self._rows(old, -1)
            if chance.random() < 0.5:
                rows += self._new(old[0])
        else:
            self.count += 1
            rows += self._new(self.count)
        self.log.append("moves", rows)

    def _new(self, number: int) -> list[dict[str, Any]]:
        here, there = self.chance.sample(range(ACCOUNTS), 2)
        made = (number, here, there, self.chance.randrange(1, 100))
        self.open.append(made)
        return self._rows(made, 1)

    def _rows(self, made: tuple[int, int, int, int], weight: int) -> list[dict[str, Any]]:
        number, here, there, amount = made
        return [
            {"id": number, "account": account, "amount": sign * amount, "_weight": weight}
            for account, sign in ((here, -1), (there, 1))
        ]


# --- the audit ----------------------------------------------------------------------------


def states(log: EmbeddedLog, topics: list[str]) -> Iterator[tuple[int, dict[str, Counter[Any]]]]:
    """The rows of topics after every entry that has some of theirs: (position, topic -> bag)."""
    held: dict[str, Counter[Any]] = {topic: Counter() for topic in topics}
    changes: dict[int, list[tuple[str, Hashable, int]]] = {}
    for batch in log.read(topics, through=log.position):
        own = [name for name in batch.data.schema.names if not name.startswith("_")]
        columns = [batch.data.column(name).to_pylist() for name in own]
        weights = batch.data.column("_weight").to_pylist()
        rows = zip(*columns, strict=True)
        for position, weight, row in zip(batch.positions.to_pylist(), weights, rows, strict=True):
            changes.setdefault(position, []).append((batch.topic, row, weight))
    for position in sorted(changes):
        for topic, changed, weight in changes[position]:
            held[topic][changed] += weight
            if not held[topic][changed]:
                del held[topic][changed]
        yield position, held


def _books(moves: Counter[Any]) -> tuple[dict[int, int], dict[int, int]]:
    credit: dict[int, int] = {}
    debit: dict[int, int] = {}
    for (_, account, amount), times in moves.items():
        books = credit if amount > 0 else debit
        books[account] = books.get(account, 0) + abs(amount) * times
    return credit, debit


@dataclass
class Audit:
    """What was found in the books."""

    entries: int = 0
    commits: int = 0
    wrong: list[str] = field(default_factory=list)


def audit(log: EmbeddedLog) -> Audit:
    """Go through every committed state; the last one must be that of the last transfer."""
    found = Audit()
    known: dict[Any, list[int]] = {}
    positions = []
    for number, (position, held) in enumerate(states(log, ["moves"])):
        known.setdefault(repr(_sorted(_books(held["moves"]))), []).append(number)
        positions.append(position)
    found.entries = len(positions)
    topics = {view: topic_of(NAME, view) for view in VIEWS}
    reached = -1
    for position, held in states(log, list(topics.values())):
        found.commits += 1
        views = {view: held[topic] for view, topic in topics.items()}
        wrong = _inconsistent(views)
        books = (_dict(views["credits"]), _dict(views["debits"]))
        fitting = [
            n
            for n in known.get(repr(_sorted(books)), [])
            if n >= reached and positions[n] < position
        ]
        if not wrong and not fitting:
            wrong = f"no transfer leaves the accounts so: {books}"
        if wrong:
            found.wrong.append(f"at {position}: {wrong}")
        else:
            reached = fitting[0]
    last = repr(_sorted(books)) if found.commits else ""
    if found.entries and found.entries - 1 not in known.get(last, []):
        found.wrong.append("the last state is not that of the last transfer")
    return found


def _sorted(books: tuple[dict[int, int], dict[int, int]]) -> list[list[tuple[int, int]]]:
    return [sorted(one.items()) for one in books]


def _dict(bag: Counter[Any]) -> dict[int, int]:
    return {account: value for account, value in bag}  # noqa: C416 - rows, whatever their weight


def _inconsistent(views: dict[str, Counter[Any]]) -> str:
    for view, bag in views.items():
        if any(times != 1 for times in bag.values()):
            return f"{view} has rows {bag}"
    credit, debit, balance = (_dict(views[view]) for view in ("credits", "debits", "balance"))
    wanted = {
        account: credit.get(account, 0) - debit.get(account, 0) for account in {*credit, *debit}
    }
    if balance != wanted:
        return f"the balance is {balance}, and credits less debits are {wanted}"
    totals = list(views["total"])
    if totals != [(sum(balance.values()) if balance else None, len(balance))]:
        return f"the total is {totals}, of {balance}"
    return f"the total is {totals}" if sum(balance.values()) else ""


# --- processes ----------------------------------------------------------------------------


class Process:
    """A driver in a process of its own."""

    def __init__(self, folder: str) -> None:
        """Start it."""
        command = [sys.executable, "-m", "headrace.testing.views_bank", folder]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self.talk: list[str] = []
        self.jvms: set[int] = set()
        self._threads = [
            threading.Thread(target=_gather, args=(stream, into), daemon=True)
            for stream, into in (
                (self.process.stdout, self.lines),
                (self.process.stderr, self.talk),
            )
        ]
        for thread in self._threads:
            thread.start()

    def children(self) -> list[int]:
        """The processes it has started: its JVM."""
        found = children_of(self.process.pid)
        self.jvms.update(found)
        return found

    def wait_for(self, line: str) -> None:
        """Wait until it has said something."""
        until(lambda: line in self.lines or self.process.poll() is not None, line)
        if line not in self.lines:
            raise AssertionError(f"the driver ended: {''.join(self.talk[-12:])}")
        self.children()

    def kill(self) -> None:
        """`kill -9`, then wait for it and for its JVM, which must die with it."""
        self.children()
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.finish()

    def kill_workers(self, *, daemon: bool) -> int:
        """`kill -9` of the JVM's Python workers, and of what starts them; how many."""
        daemons = [pid for jvm in self.children() for pid in children_of(jvm)]
        workers = [pid for one in daemons for pid in children_of(one)]
        for pid in (found := [*daemons, *workers] if daemon else workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(found)

    def kill_jvm(self) -> None:
        """`kill -9` of the JVM; the driver must notice by itself, and end."""
        for pid in self.children():
            os.kill(pid, signal.SIGKILL)
        self.finish()

    def finish(self) -> int:
        """Wait until it has ended; its exit code."""
        try:
            code = self.process.wait(PATIENCE)
            until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in self.jvms), "the JVM")
            self.jvms.clear()  # these numbers may soon be those of other processes
        finally:
            self.end()
        return code

    def end(self) -> None:
        """Leave nothing behind."""
        running = [self.process.pid] if self.process.poll() is None else []
        for pid in (*running, *self.jvms):
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        self.jvms.clear()
        self.process.wait(PATIENCE)
        for thread in self._threads:
            thread.join(PATIENCE)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _gather(stream: Any, into: list[str]) -> None:
    into.extend(line.rstrip("\n") for line in stream)


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Wait for something."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)


# --- a day at the bank --------------------------------------------------------------------


@dataclass
class Day:
    """What happened."""

    reads: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    audit: Audit = field(default_factory=Audit)
    wrong: list[str] = field(default_factory=list)


class Open:
    """The bank while it is open: a teller and a reader at work, drivers that come and go."""

    def __init__(self, folder: str, seed: str) -> None:
        """Both begin."""
        self.folder = folder
        self.log = open_bank(folder)
        self.chance = Random(f"bank/{seed}")
        self.day = Day()
        self.teller = Teller(self.log, seed)
        self._closing = threading.Event()
        self._stop_teller = threading.Event()
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._tell)]
        for thread in self._threads:
            thread.start()

    def _tell(self) -> None:
        while not self._stop_teller.wait(0.05):
            self.teller.move()

    def _read(self) -> None:
        """Read the newest state again and again, as anybody may at any time."""
        while not self._closing.wait(0.005):
            there = {topic.name for topic in self.log.topics()}
            if topic_of(NAME, "total") not in there:
                continue
            position = self.log.position
            total = rows_of(self.log, NAME, "total", position).to_pylist()
            balance = rows_of(self.log, NAME, "balance", position).to_pylist()
            added = sum(row["balance"] for row in balance)
            self.day.reads += bool(total)
            if added or (total and total[0]["total"] not in (0, None)):
                self.day.wrong.append(f"a reader saw at {position}: {total}, {balance}")

    @property
    def batch(self) -> int:
        """How many commits there are."""
        return status_of(self.log, NAME).batch

    def driver(self) -> Process:
        """Start one, and wait until it has committed."""
        before = self.batch
        process = Process(self.folder)
        try:
            process.wait_for("ready")
            self.committed(process, before)
        except BaseException:
            process.end()
            raise
        return process

    def committed(self, process: Process, before: int, times: int = 1) -> None:
        """Wait until there are so many commits more."""
        until(lambda: self.batch >= before + times or process.process.poll() is not None, "commit")
        if process.process.poll() is not None and self.batch < before + times:
            raise AssertionError(f"the driver ended: {''.join(process.talk[-12:])}")

    def killed(self, how: str) -> None:
        """A driver that dies at a random instant."""
        process = self.driver()
        try:
            self.committed(process, self.batch, times=self.chance.randrange(1, 8))
            time.sleep(self.chance.random())
            process.kill() if how == "driver" else process.kill_jvm()
        finally:
            process.end()
        self.day.kills[how] += 1

    def without_workers(self) -> None:
        """Python workers die under a driver: it goes on, or stops with an error that has a name."""
        process = self.driver()
        try:
            killed = 0
            for _ in range(self.chance.randrange(6, 16)):
                time.sleep(self.chance.random() / 2)
                killed += process.kill_workers(daemon=self.chance.random() < 0.3)
            before = self.batch
            until(lambda: process.process.poll() is not None or self.batch > before, "a commit")
            if process.process.poll() is None:
                process.kill()
            elif process.finish() != STOPPED:
                self.day.wrong.append(f"lost workers ended the driver: {process.talk[-12:]}")
        finally:
            process.end()
        self.day.kills["worker"] += killed

    def doubled(self) -> None:
        """Two drivers: the older one is fenced, and nothing of it is committed any more."""
        old = self.driver()
        try:
            new = self.driver()
        except BaseException:
            old.end()
            raise
        try:
            code = old.finish()
            if "fenced" not in old.lines:
                self.day.wrong.append(f"the older driver was not fenced: {code} {old.talk[-3:]}")
            before = self.batch
            self.committed(new, before)
            new.kill()
        finally:
            old.end()
            new.end()
        self.day.kills["two drivers"] += 1

    def close(self) -> Day:
        """No more transfers; a last driver; the audit."""
        self._stop_teller.set()
        self._threads[1].join()
        try:
            end = self.log.position
            last = Process(self.folder)
            try:
                until(
                    lambda: (
                        status_of(self.log, NAME).through >= end or last.process.poll() is not None
                    ),
                    "the last state",
                )
                if last.process.poll() is not None:
                    self.day.wrong.append(f"the last driver ended: {last.talk[-12:]}")
                last.kill()
            finally:
                last.end()
        finally:
            self._closing.set()
            self._threads[0].join()
        self.day.audit = audit(self.log)
        self.day.wrong += self.day.audit.wrong
        self.log.close()
        return self.day

    def abandon(self) -> None:
        """Stop at once."""
        self._stop_teller.set()
        self._closing.set()
        for thread in self._threads:
            thread.join()


def day(folder: str, seed: str, events: list[str]) -> Day:
    """A day with these events: `driver`, `jvm`, `worker` (kills) and `two drivers`."""
    opened = Open(folder, seed)
    special = {"worker": opened.without_workers, "two drivers": opened.doubled}
    try:
        for event in events:
            special[event]() if event in special else opened.killed(event)
        return opened.close()
    finally:
        opened.abandon()


def main() -> int:
    """Drive the bank's pipeline until somebody ends it."""
    log = open_bank(sys.argv[1])
    pipeline = bank()
    os.write(1, b"ready\n")
    try:
        pipeline.run(log, batch_rows=64)
    except errors.Fenced:
        os.write(1, b"fenced\n")
        return FENCED
    except errors.SparkFailed:
        return STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
