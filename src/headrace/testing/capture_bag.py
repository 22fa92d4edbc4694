"""A table without a key that changes at random while it is captured, and its capture killed.

One thread: between the pieces of the table that the capture reads, its writers go on, in
transactions that stay open. Afterwards the log must have each row as often as the database, and at
no entry less often than never.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any
from unittest import mock

import psycopg

from headrace.log.embedded.log import EmbeddedLog
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.keyless import Whole
from headrace.testing.postgres import Server
from headrace.testing.verdicts import Violated

BAG = "create table bag(n int, body text); alter table bag replica identity full;"


class Killed(BaseException):
    """The capture ends here."""


class Bag:
    """Writers of a table without a key: few values, so that many rows are equal."""

    def __init__(self, connections: Sequence[psycopg.Connection[Any]], seed: str) -> None:
        """Makes the table. The changes follow from the seed."""
        self.chance = Random(seed)
        self.connections = connections
        for one in self.connections:
            one.execute("set lock_timeout = 30")
        self.connections[0].execute(BAG + "alter table bag alter column body set storage external")
        self.under_way: set[int] = set()

    def write(self, steps: int) -> None:
        """Some statements."""
        for _ in range(steps):
            which = self.chance.randrange(3)
            try:
                self._step(which, self.connections[which])
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                self.connections[which].execute("rollback")
                self.under_way.discard(which)

    def _step(self, which: int, one: psycopg.Connection[Any]) -> None:
        chance = self.chance
        if which not in self.under_way and chance.random() < 0.5:
            one.execute("begin")
            self.under_way.add(which)
        kind, n = chance.random(), chance.randrange(6)
        if kind < 0.45:
            body = chance.choice(["", "x", None, "y" * 5000])
            one.execute("insert into bag select %s, %s from generate_series(1, %s)",
                        (n, body, chance.choice([1, 2, 9])))  # fmt: skip
        elif kind < 0.65:
            one.execute("update bag set n = (n + 1) %% 6 where n = %s", (n,))
        elif kind < 0.75:
            one.execute("delete from bag where ctid in (select ctid from bag where n = %s limit 2)",
                        (n,))  # fmt: skip
        elif kind < 0.78 and which not in self.under_way:
            one.execute("truncate bag")
            one.execute("insert into bag select 1, 't' from generate_series(1, 30)")
        elif which in self.under_way:
            one.execute(chance.choice(["commit", "commit", "rollback"]))
            self.under_way.discard(which)

    def finish(self) -> None:
        """Commit all."""
        for which in self.under_way:
            self.connections[which].execute("commit")
        self.under_way.clear()

    def rows(self) -> Counter[Any]:
        """How often the database has each row."""
        return Counter(self.connections[0].execute("select n, body from bag").fetchall())


def counted(log: EmbeddedLog) -> Counter[Any]:
    """How often each row is there; never less than nothing at any entry."""
    found: Counter[Any] = Counter()
    last = 0
    for batch in log.read("shop.public.bag"):
        for row, position in zip(batch.data.to_pylist(), batch.positions.to_pylist(), strict=True):
            if position != last:
                _some(found, f"before entry {position}")
            last = position
            found[row["n"], row["body"]] += row["_weight"]
    _some(found, "in the end")
    return +found


def _some(found: Counter[Any], when: str) -> None:
    less = [row for row, count in found.items() if count < 0]
    if less:
        raise Violated(f"{when} the log has less than none of {less[:3]}")


def bag_case(server: Server, database: str, log: EmbeddedLog, seed: str) -> str:
    """One case: a first snapshot and three repeated ones; what is wrong."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connect(database)) for _ in range(3)]
        bag = Bag(connections, f"bag {seed}")
        bag.write(30)
        bag.finish()
        kills, budget, following = bag.chance.choice([0.0, 0.05]), 0, Whole.next

        def paused(whole: Whole) -> Any:
            nonlocal budget
            budget -= 1
            if budget > 0:
                bag.write(bag.chance.choice([0, 1, 5]))
                if bag.chance.random() < kills:
                    raise Killed
            return following(whole)

        stack.enter_context(mock.patch.object(Whole, "next", paused))
        for number in range(4):
            budget = 25
            while True:
                shop = Capture(log, "shop", server.dsn(database), chunk_rows=7, readers=0)
                with contextlib.suppress(Killed):
                    if number:
                        shop.run("caught up")
                        bag.write(10)
                        shop.snapshot("public.bag")
                    shop.run("caught up")
                    break
            bag.finish()
            shop.run("caught up")
            found, rows = counted(log), bag.rows()
            if found != rows:
                return f"table: the log has {found - rows} more and {rows - found} less"
    return ""
