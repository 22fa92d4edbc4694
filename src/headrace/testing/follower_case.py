"""A follower in one thread, with its pipeline, its killers and its rivals; checked at every rest.

The log has a bank: accounts (a captured table) and two views of it that are computed here, in
Python, and committed with `_commits` as a pipeline does: the total of each owner (with a key) and
how many accounts of each owner there are with which balance (a multiset, where a change made twice
shows). Commits lag behind the accounts. A follower keeps the three; it dies before or after any of
its statements, is replaced by a new one while the old one goes on, meets rows that the target does
not take, new columns, and views that are being built.

`check` says what is wrong: **at its cut the target is what the log was then**, less exactly the
rows that are set aside; and accounts and views agree with each other. What it cannot see: anything
within Spark, and concurrency (`tests/derived` has real processes and a reader beside).
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa

from headrace import errors
from headrace.derived import aside
from headrace.derived.follower import Follower
from headrace.derived.postgres import PostgresTarget
from headrace.derived.rows import expected
from headrace.derived.sqlite import SQLiteTarget
from headrace.interfaces import Kept, KeptTable, Target, TargetDescriptor
from headrace.log.embedded.log import EmbeddedLog

ACCOUNTS, TOTAL, BAG = "bank.public.accounts", "p.total", "p.bag"
UNLUCKY = 13
"""A balance that the target does not take, where it has the constraint."""
Views = tuple[dict[Any, int], Counter[tuple[Any, int]]]


class Killed(BaseException):
    """The follower died here."""


@dataclass
class Fuse:
    """Says when a follower dies: at which statement, before or after it."""

    at: int = 0
    """0: never."""
    after: bool = False
    count: int = 0
    dead: bool = False

    def pass_by(self, run: Callable[[], Any], die: Callable[[], None]) -> Any:
        """Run a statement, or die."""
        if self.dead:
            raise Killed
        self.count += 1
        if self.count != self.at:
            return run()
        self.dead = True
        if self.after:
            run()
        die()
        raise Killed


class MortalPostgres(PostgresTarget):
    """A target whose follower dies at a statement."""

    def __init__(self, fuse: Fuse, *place: str) -> None:
        """As the target, with a fuse."""
        self.fuse = fuse
        super().__init__(*place)

    def _execute(self, made: Any, values: Any) -> Any:
        run = super()._execute
        return self.fuse.pass_by(lambda: run(made, values), self._die)

    def _copy(self, into: Any, columns: Any, data: bytes) -> None:
        run = super()._copy
        self.fuse.pass_by(lambda: run(into, columns, data), self._die)

    def _die(self) -> None:
        if self.fuse.after:  # a pipeline has only sent it
            with contextlib.suppress(psycopg.Error):
                self._done()
        self._connection.close()


class MortalSQLite(SQLiteTarget):
    """The same of a file."""

    def __init__(self, fuse: Fuse, *place: str) -> None:
        """As the target, with a fuse."""
        self.fuse = fuse
        super().__init__(*place)

    def _run(self, text: str, *values: Any) -> Any:
        run = super()._run
        return self.fuse.pass_by(lambda: run(text, *values), lambda: None)


@dataclass
class Mortal:
    """Where a target is, for followers that die."""

    place: str
    schema: str = ""
    """Of PostgreSQL; empty: SQLite."""
    fuse: Fuse = field(default_factory=Fuse)

    def open(self, follower: str) -> Target:
        """With the fuse of this moment: a rival that was opened before has its own."""
        if self.schema:
            return MortalPostgres(self.fuse, self.place, self.schema, follower)
        return MortalSQLite(self.fuse, self.place, follower)

    def describe(self) -> str:
        """For people."""
        return "a mortal target"


class Bank:
    """The log's side: accounts that change, views of them, commits."""

    def __init__(self, log: EmbeddedLog) -> None:
        """Make the topics."""
        self.log = log
        schema = "id bigint, owner string, balance bigint"
        log.create_topic(ACCOUNTS, schema, key="id", kind="changes")
        log.create_topic(TOTAL, "owner string, total bigint", key="owner", kind="changes")
        log.create_topic(BAG, "owner string, balance bigint", kind="changes")
        log.create_topic("p._commits", "through bigint, views array<string>")
        self.rows: dict[int, dict[str, Any]] = {}
        self.history: dict[int, list[dict[str, Any]]] = {0: []}
        self.said: Views = ({}, Counter())
        self.through = 0

    def change(self, changes: dict[int, dict[str, Any] | None]) -> int:
        """One entry: each id has these values now, or is gone."""
        rows = []
        for one, new in changes.items():
            old = self.rows.get(one)
            rows += [{**old, "_weight": -1}] if old else []
            rows += [{"id": one, **new, "_weight": 1}] if new is not None else []
            if new is None:
                self.rows.pop(one, None)
            else:
                self.rows[one] = {"id": one, **new}
        position = self.log.append(ACCOUNTS, rows).position if rows else self.log.position
        self.history[position] = [dict(row) for row in self.rows.values()]
        return position

    def move(self, rng: random.Random) -> None:
        """Some transactions in one entry: money moves, accounts open and close empty."""
        new: dict[int, dict[str, Any] | None] = {}
        for _ in range(rng.randrange(1, 5)):
            pair = rng.sample(range(12), 2)
            amount = rng.choice([13, 37, rng.randrange(20)])
            for one, sign in zip(pair, (-1, 1), strict=True):
                now = new.get(one) or self.rows.get(one)
                owner = now["owner"] if now else rng.choice(["ann", "bob", None, "", "é\\\"'"])
                balance = (now["balance"] if now else 0) + sign * amount
                new[one] = {"owner": owner, "balance": balance}
                if now is None and balance == 0 and rng.random() < 0.5:
                    new[one] = None
        self.change({one: row for one, row in new.items() if row or one in self.rows})

    def go_on(self, rng: random.Random) -> None:
        """A few entries and commits; now and then a view is being built, or a column is new."""
        for _ in range(rng.randrange(4)):
            self.move(rng)
            if rng.random() < 0.7:
                some = [one for one in self.history if one >= self.through]
                self.commit(rng.choice(some[-3:]))
        if rng.random() < 0.1:
            self.commit(self.through, ("total",))
            self.move(rng)
            self.commit(None, ("total",))
        if rng.random() < 0.1:
            version = self.log.topic(ACCOUNTS).schema.version
            self.log.alter_topic(ACCOUNTS, add=f"more{version} string")

    def commit(self, through: int | None = None, views: tuple[str, ...] = ("total", "bag")) -> None:
        """All views through a position; those not named stay as they are."""
        through = max(self.history) if through is None else through
        totals: dict[Any, int] = {}
        bag: Counter[tuple[Any, int]] = Counter()
        for row in self.history[through]:
            totals[row["owner"]] = totals.get(row["owner"], 0) + row["balance"]
            bag[row["owner"], row["balance"]] += 1
        rows = []
        for owner in {**self.said[0], **totals}:
            old, new = self.said[0].get(owner), totals.get(owner)
            if old != new:
                rows += [{"owner": owner, "total": old, "_weight": -1}] * (old is not None)
                rows += [{"owner": owner, "total": new, "_weight": 1}] * (new is not None)
        more = _difference(self.said[1], bag)
        with self.log.transaction() as entry:
            if rows and "total" in views:
                entry.append(TOTAL, rows)
            if more and "bag" in views:
                entry.append(BAG, more)
            entry.append("p._commits", [{"through": through, "views": list(views)}])
        self.said = (
            totals if "total" in views else self.said[0],
            bag if "bag" in views else self.said[1],
        )
        self.through = through


def _difference(old: Counter[Any], new: Counter[Any]) -> list[dict[str, Any]]:
    rows = []
    for one in {**old, **new}:
        count = new[one] - old[one]
        row = {"owner": one[0], "balance": one[1], "_weight": 1 if count > 0 else -1}
        rows += [row] * abs(count)
    return rows


def kept_in(target: TargetDescriptor, *, views: bool = True) -> Kept:
    """What the follower keeps."""
    topics = {"accounts": ACCOUNTS}
    topics |= {"total": TOTAL, "bag": BAG} if views else {}
    return Kept("p", "main", topics, frozenset([TOTAL, BAG] if views else []), target)


def check(
    log: EmbeddedLog, target: Target, kept: Kept, *, unlucky: bool = False, strict: bool = True
) -> str:
    """What is wrong with a target; empty: nothing.

    Not `strict`: a follower may have died after it had set rows aside, before it went on.
    """
    mark = target.mark()
    if mark.cut is None:
        return ""
    there = {(one["table"], one["key"]) for one in aside.rows(log, kept.follower)}
    held: dict[str, list[dict[str, Any]]] = {}
    for table in mark.tables:
        _, batches = target.read(table)
        got = pa.Table.from_batches(batches, table.schema).to_pylist()
        all_rows = pa.Table.from_batches(expected(log, table, mark.cut), table.schema).to_pylist()
        lost = [row for row in all_rows if unlucky and _is_unlucky(table, row)]
        want = [row for row in all_rows if row not in lost]
        held[table.name] = got
        if got != want:
            return f"{table.name} at {mark.cut}: {_only(got, want)} is not {_only(want, got)}"
        if table.key:
            must = {(table.name, aside.key_text(table, row)) for row in lost}
            if not must <= there:
                return f"{table.name}: {sorted(must - there)} is in neither"
            there -= must
    if there and strict:
        return f"set aside, and nobody refuses it: {sorted(there)}"
    if "total" in held and not unlucky:
        one = sum(row["balance"] for row in held["accounts"])
        other = sum(row["total"] for row in held["total"])
        bag = held.get("bag", held["accounts"])
        if one != other or len(bag) != len(held["accounts"]):
            return f"tables disagree: {one} and {other}, {len(bag)} rows of the bag"
    return ""


def _only(some: list[Any], others: list[Any]) -> list[Any]:
    left = list(some)
    for one in others:
        if one in left:
            left.remove(one)
    return left[:3]


def _is_unlucky(table: KeptTable, row: dict[str, Any]) -> bool:
    return table.name == "accounts" and bool(row["balance"] == UNLUCKY)


def stepped(
    folder: Path, place: str, seed: int, *, schema: str = "", steps: int = 12
) -> tuple[str, int]:
    """One case; what was wrong, if anything, and how often the follower died."""
    rng = random.Random(seed)
    mortal = Mortal(place, schema)
    everything = kept_in(mortal)
    topics = {"accounts": ACCOUNTS, "total": TOTAL}
    kept = replace(everything, topics=topics, views=frozenset([TOTAL]))
    late = random.Random(f"{seed} late").choice([0, 0, 2, 4, 6])  # a table is kept from here on
    deaths, rivals = 0, []
    unlucky, forbidden = bool(schema) and rng.random() < 0.6, False
    with EmbeddedLog(folder) as log, contextlib.ExitStack() as stack:
        bank = Bank(log)
        bank.change({one: {"owner": rng.choice("ab"), "balance": 50} for one in range(5)})
        for step in range(steps):
            bank.go_on(rng)
            at = rng.choice([0, rng.randrange(1, 30), rng.randrange(30, 42)])
            mortal.fuse = Fuse(at, after=rng.random() < 0.5)
            kept = everything if step >= late else kept
            follower = stack.enter_context(Follower(log, kept))
            try:
                follower.run("caught up")
            except Killed:
                deaths += 1
            if not mortal.fuse.dead and rng.random() < 0.3:
                rivals.append(follower)
            else:
                follower.close()
            mortal.fuse = Fuse()
            watching = stack.enter_context(contextlib.closing(mortal.open(kept.follower)))
            if unlucky and not forbidden and watching.mark().cut is not None:
                forbidden = _forbid(watching, schema)
            wrong = check(log, watching, kept, unlucky=forbidden, strict=not forbidden)
            if not wrong and rivals and rng.random() < 0.5:
                wrong = _let_go_on(rivals.pop(), bank, mortal, kept)
                wrong = wrong or check(log, watching, kept, unlucky=forbidden, strict=False)
            watching.close()
            if wrong:
                return f"step {step}: {wrong}", deaths
        bank.commit()
        with Follower(log, kept) as last:
            last.run("caught up")
            target = stack.enter_context(contextlib.closing(mortal.open(kept.follower)))
            cut = target.mark().cut
            wrong = check(log, target, kept, unlucky=forbidden)
            if not wrong and (cut is None or cut.through != bank.through):
                wrong = f"it ends at {cut}, the views at {bank.through}"
            if not wrong and forbidden:
                wrong = _mend(log, target, kept, last, schema)
        return wrong and f"at the end: {wrong}", deaths


def _forbid(target: Target, schema: str) -> bool:
    """The user adds a constraint; False if there is a row already that breaks it."""
    assert isinstance(target, PostgresTarget)
    try:
        target._connection.execute(
            f'alter table "{schema}".accounts add constraint luck check (balance <> {UNLUCKY})'
        )
    except psycopg.errors.CheckViolation:
        return False
    return True


def _mend(log: EmbeddedLog, target: Target, kept: Kept, follower: Follower, schema: str) -> str:
    """The user drops the constraint, and has everything tried again."""
    assert isinstance(target, PostgresTarget)
    target._connection.execute(f'alter table "{schema}".accounts drop constraint luck')
    found = aside.rows(log, kept.follower)
    if found:
        aside.replace(log, kept.follower, found, asked=True)
        late = threading.Timer(20, follower.stop)
        late.start()
        follower.run("caught up")
        late.cancel()
    return check(log, target, kept)


def _let_go_on(rival: Follower, bank: Bank, mortal: Mortal, kept: Kept) -> str:
    """An older follower goes on after a newer one has begun: it must be told, and do nothing."""
    watched = contextlib.closing(mortal.open(kept.follower))
    with watched as watching, rival, Follower(bank.log, kept) as newer:
        newer.run("caught up")
        cut = watching.mark().cut
        bank.commit(bank.through)
        with contextlib.suppress(errors.Fenced, Killed):
            rival.run("caught up")
        wrong = watching.mark().cut != cut
    return "an older follower was not told that there is a newer one" if wrong else ""
